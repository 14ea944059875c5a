"""The interface under its older names, for `import grainmill.python as pygrain`."""

from typing import TYPE_CHECKING

from grainmill import (
    DataLoader,
    DatasetIterator,
    IterDataset,
    MapDataset,
    MultiprocessingOptions,
    ReadOptions,
    Record,
    RecordMetadata,
    checkpoint,
    config,
    load,
)
from grainmill import DataLoaderIterator as PyGrainDatasetIterator
from grainmill._loader.operations import (
    BatchOperation,
    FilterOperation,
    MapOperation,
    Operation,
    RandomMapOperation,
)
from grainmill.checkpoint import CheckpointHandler as PyGrainCheckpointHandler
from grainmill.constants import (
    DATASET_INDEX,
    EPOCH,
    INDEX,
    META_FEATURES,
    RECORD,
    RECORD_KEY,
    SEED,
)
from grainmill.multiprocessing import SharedMemoryArray
from grainmill.python import experimental
from grainmill.samplers import IndexSampler, Sampler, SequentialSampler
from grainmill.sharding import NoSharding, ShardByJaxProcess, ShardOptions
from grainmill.sources import ArrayRecordDataSource, RandomAccessDataSource, RangeDataSource
from grainmill.sources import SharedMemoryDataSource as InMemoryDataSource
from grainmill.transforms import Batch, DatasetSelectionMap, Transformation, Transformations
from grainmill.transforms import Filter as FilterTransform
from grainmill.transforms import Map as MapTransform
from grainmill.transforms import MapWithIndex as MapWithIndexTransform
from grainmill.transforms import RandomMap as RandomMapTransform

if TYPE_CHECKING:
    from grainmill.checkpoint import CheckpointRestore as PyGrainCheckpointRestore  # noqa: F401
    from grainmill.checkpoint import CheckpointSave as PyGrainCheckpointSave  # noqa: F401
else:

    def __getattr__(name: str) -> object:
        if name in {"PyGrainCheckpointRestore", "PyGrainCheckpointSave"} and name in __all__:
            return getattr(checkpoint, name.removeprefix("PyGrain"))  # imports Orbax
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DATASET_INDEX",
    "EPOCH",
    "INDEX",
    "META_FEATURES",
    "RECORD",
    "RECORD_KEY",
    "SEED",
    "ArrayRecordDataSource",
    "Batch",
    "BatchOperation",
    "DataLoader",
    "DatasetIterator",
    "DatasetSelectionMap",
    "FilterOperation",
    "FilterTransform",
    "InMemoryDataSource",
    "IndexSampler",
    "IterDataset",
    "MapDataset",
    "MapOperation",
    "MapTransform",
    "MapWithIndexTransform",
    "MultiprocessingOptions",
    "NoSharding",
    "Operation",
    "PyGrainCheckpointHandler",
    "PyGrainDatasetIterator",
    "RandomAccessDataSource",
    "RandomMapOperation",
    "RandomMapTransform",
    "RangeDataSource",
    "ReadOptions",
    "Record",
    "RecordMetadata",
    "Sampler",
    "SequentialSampler",
    "ShardByJaxProcess",
    "ShardOptions",
    "SharedMemoryArray",
    "Transformation",
    "Transformations",
    "config",
    "experimental",
    "load",
]
__all__ += [f"PyGrain{name}" for name in checkpoint.__all__ if name != "CheckpointHandler"]


def __dir__() -> list[str]:
    return sorted(__all__)
