"""Names of `grain._src.python.dataset.transformations.limit`."""

from grainmill.experimental import LimitIterDataset

__all__ = ["LimitIterDataset"]
