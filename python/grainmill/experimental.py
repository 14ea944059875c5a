"""Packing, prefetching, window shuffles and other newer parts of the interface."""

from typing import TYPE_CHECKING

from grainmill import _stages as stages
from grainmill._dataset.iterator import (
    ThreadPrefetchDatasetIterator,
    get_next_index,
    set_next_index,
)
from grainmill._evaluate.batches.stack import batch_and_pad
from grainmill._lazy_names import lazy_names
from grainmill._native import index_shuffle
from grainmill._plan.options import DatasetOptions, ExecutionTrackingMode
from grainmill._plan.spec import ShapeDtypeStruct, ShapeDtypeStructProtocol
from grainmill._plan.transforms import FlatMap as FlatMapTransform
from grainmill._plan.transforms import MapWithIndex as MapWithIndexTransform

if TYPE_CHECKING:
    from grainmill._dataset.elastic.iterator import ElasticIterator
    from grainmill._dataset.performance_config import PerformanceConfig, pick_performance_config
    from grainmill._dataset.resume_check import assert_equal_output_after_checkpoint
    from grainmill._dataset.rng_pool import RngPool
    from grainmill._dataset.spec import get_element_spec
    from grainmill._loader.operations import PackAndBatchOperation
    from grainmill._sources.hugging_face import HuggingFaceIterDataset
    from grainmill._sources.mixture import mix_from_text, parse_mixture
    from grainmill._sources.parquet_dataset import ParquetIterDataset
    from grainmill._sources.tfrecord_dataset import TFRecordIterDataset
    from grainmill._stages import *  # noqa: F403 - `_stages.__all__` lists them
    from grainmill._stages.apply_transformations import apply_transformations
    from grainmill._stages.concat_split import BOSHandling
    from grainmill.jax import device_put
else:
    # Imported when they are used: JAX is optional, and a program needs few of the others.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._stages": stages.__all__,
            "grainmill._dataset.elastic.iterator": ["ElasticIterator"],
            "grainmill._dataset.performance_config": [
                "PerformanceConfig",
                "pick_performance_config",
            ],
            "grainmill._dataset.resume_check": ["assert_equal_output_after_checkpoint"],
            "grainmill._dataset.rng_pool": ["RngPool"],
            "grainmill._dataset.spec": ["get_element_spec"],
            "grainmill._loader.operations": ["PackAndBatchOperation"],
            "grainmill._sources.hugging_face": ["HuggingFaceIterDataset"],
            "grainmill._sources.mixture": ["mix_from_text", "parse_mixture"],
            "grainmill._sources.parquet_dataset": ["ParquetIterDataset"],
            "grainmill._sources.tfrecord_dataset": ["TFRecordIterDataset"],
            "grainmill._stages.apply_transformations": ["apply_transformations"],
            "grainmill._stages.concat_split": ["BOSHandling"],
            "grainmill.jax": ["device_put"],
        },
    )


__all__ = [
    "BOSHandling",
    "DatasetOptions",
    "ElasticIterator",
    "ExecutionTrackingMode",
    "FlatMapTransform",
    "HuggingFaceIterDataset",
    "MapWithIndexTransform",
    "PackAndBatchOperation",
    "ParquetIterDataset",
    "PerformanceConfig",
    "RngPool",
    "ShapeDtypeStruct",
    "ShapeDtypeStructProtocol",
    "TFRecordIterDataset",
    "ThreadPrefetchDatasetIterator",
    "apply_transformations",
    "assert_equal_output_after_checkpoint",
    "batch_and_pad",
    "device_put",
    "get_element_spec",
    "get_next_index",
    "index_shuffle",
    "mix_from_text",
    "parse_mixture",
    "pick_performance_config",
    "set_next_index",
]
__all__ += stages.__all__
