"""The interface under its older names, for `import grainmill.python as pygrain`."""

from grainmill import (
    DatasetIterator,
    IterDataset,
    MapDataset,
    MultiprocessingOptions,
    ReadOptions,
    config,
)
from grainmill.constants import (
    DATASET_INDEX,
    EPOCH,
    INDEX,
    META_FEATURES,
    RECORD,
    RECORD_KEY,
    SEED,
)
from grainmill.python import experimental
from grainmill.sources import ArrayRecordDataSource, RandomAccessDataSource, RangeDataSource
from grainmill.sources import SharedMemoryDataSource as InMemoryDataSource
from grainmill.transforms import Batch, DatasetSelectionMap, Transformation, Transformations
from grainmill.transforms import Filter as FilterTransform
from grainmill.transforms import Map as MapTransform
from grainmill.transforms import MapWithIndex as MapWithIndexTransform
from grainmill.transforms import RandomMap as RandomMapTransform

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
    "DatasetIterator",
    "DatasetSelectionMap",
    "FilterTransform",
    "InMemoryDataSource",
    "IterDataset",
    "MapDataset",
    "MapTransform",
    "MapWithIndexTransform",
    "MultiprocessingOptions",
    "RandomAccessDataSource",
    "RandomMapTransform",
    "RangeDataSource",
    "ReadOptions",
    "Transformation",
    "Transformations",
    "config",
    "experimental",
]
