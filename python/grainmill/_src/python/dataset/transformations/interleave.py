"""Names of `grain._src.python.dataset.transformations.interleave`."""

from grainmill.experimental import InterleaveIterDataset

__all__ = ["InterleaveIterDataset"]
