"""Names of `grain._src.python.dataset.transformations.packing_concat_then_split`."""

from grainmill.experimental import BOSHandling, ConcatThenSplitIterDataset

__all__ = ["BOSHandling", "ConcatThenSplitIterDataset"]
