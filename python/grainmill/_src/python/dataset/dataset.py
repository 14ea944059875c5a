"""Names of `grain._src.python.dataset.dataset`."""

from grainmill import DatasetIterator, IterDataset, MapDataset
from grainmill.experimental import (
    WithOptionsIterDataset,
    apply_transformations,
    get_element_spec,
    get_next_index,
    set_next_index,
)

__all__ = [
    "DatasetIterator",
    "IterDataset",
    "MapDataset",
    "WithOptionsIterDataset",
    "apply_transformations",
    "get_element_spec",
    "get_next_index",
    "set_next_index",
]
