"""Names of `grain._src.python.dataset.transformations.rebatch`."""

from grainmill.experimental import RebatchIterDataset

__all__ = ["RebatchIterDataset"]
