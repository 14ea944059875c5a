"""A deterministic, resumable data loader: reads files of records, returns batches for training.

The names are those of Grain, so that `import grainmill as grain` runs a Grain program. A pipeline
starts with `MapDataset.source` or `DataLoader`. Examples in docstrings run after
`import grainmill as grain` and `import numpy as np`.

Attributes:
    __version__: The version of the package, as text.
    __version_info__: The numbers of the version, as integers.
    config: Process-wide settings; see `help(grainmill.config)`.

Example:
    >>> ds = grain.MapDataset.source(["one", "two", "three"]).map(len).shuffle(seed=0)
    >>> [batch.tolist() for batch in ds.repeat(2).batch(3)]
    [[3, 5, 3], [3, 5, 3]]
"""

from typing import TYPE_CHECKING

from grainmill import (
    checkpoint,
    constants,
    experimental,
    multiprocessing,
    samplers,
    sharding,
    sources,
    transforms,
)
from grainmill._as_grain import install_as_grain
from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._dataset.map_dataset import MapDataset
from grainmill._dataset.views.progress import progress
from grainmill._lazy_names import lazy_names
from grainmill._native import GrainmillError, __version__
from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill._plan.options import ReadOptions
from grainmill._plan.settings import config

if TYPE_CHECKING:
    from grainmill._dataset.views.watch import watch
    from grainmill._loader.data_loader import DataLoader, DataLoaderIterator, load
    from grainmill._loader.record import Record, RecordMetadata
    from grainmill._stats.trace_file import trace
    from grainmill._workers.failures import WorkerError
else:
    # The modules that these names come from are imported when the names are used: together, they
    # would take as long as the rest.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._dataset.views.watch": ["watch"],
            "grainmill._loader.data_loader": ["DataLoader", "DataLoaderIterator", "load"],
            "grainmill._loader.record": ["Record", "RecordMetadata"],
            "grainmill._stats.trace_file": ["trace"],
            "grainmill._workers.failures": ["WorkerError"],
        },
    )


config.define_flags()

__version_info__: tuple[int, ...] = tuple(int(part) for part in __version__.split("."))

__all__ = [
    "DataLoader",
    "DataLoaderIterator",
    "DatasetIterator",
    "GrainmillError",
    "IterDataset",
    "MapDataset",
    "MultiprocessingOptions",
    "ReadOptions",
    "Record",
    "RecordMetadata",
    "WorkerError",
    "__version__",
    "__version_info__",
    "checkpoint",
    "config",
    "constants",
    "experimental",
    "install_as_grain",
    "load",
    "multiprocessing",
    "progress",
    "samplers",
    "sharding",
    "sources",
    "trace",
    "transforms",
    "watch",
]
