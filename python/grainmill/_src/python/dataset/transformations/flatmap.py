"""Names of `grain._src.python.dataset.transformations.flatmap`."""

from grainmill.experimental import FlatMapIterDataset, FlatMapMapDataset

__all__ = ["FlatMapIterDataset", "FlatMapMapDataset"]
