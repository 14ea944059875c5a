"""Names of `grain._src.python.dataset.transformations.shuffle`."""

from grainmill.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset

__all__ = ["WindowShuffleIterDataset", "WindowShuffleMapDataset"]
