"""Names of `grain._src.python.dataset.transformations.repeat`."""

from grainmill.experimental import RepeatIterDataset

__all__ = ["RepeatIterDataset"]
