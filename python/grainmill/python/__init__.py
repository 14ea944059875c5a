"""The interface under its older names, for `import grainmill.python as pygrain`."""

from grainmill import (
    DataLoader,
    DatasetIterator,
    IterDataset,
    MapDataset,
    MultiprocessingOptions,
    ReadOptions,
    Record,
    RecordMetadata,
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
