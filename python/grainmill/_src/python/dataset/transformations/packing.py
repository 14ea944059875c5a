"""Names of `grain._src.python.dataset.transformations.packing`."""

from grainmill.experimental import BestFitPackIterDataset, FirstFitPackIterDataset

__all__ = ["BestFitPackIterDataset", "FirstFitPackIterDataset"]
