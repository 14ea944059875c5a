"""Names of `grain._src.python.data_loader`."""

from grainmill import DataLoader, DataLoaderIterator
from grainmill._loader.data_loader import determined_worker_count as _determine_worker_count

__all__ = ["DataLoader", "DataLoaderIterator", "_determine_worker_count"]
