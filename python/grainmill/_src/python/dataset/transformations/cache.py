"""Names of `grain._src.python.dataset.transformations.cache`."""

from grainmill.experimental import CacheIterDataset

__all__ = ["CacheIterDataset"]
