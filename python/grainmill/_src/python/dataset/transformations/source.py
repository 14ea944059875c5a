"""Names of `grain._src.python.dataset.transformations.source`."""

from grainmill._dataset.map_dataset import SourceMapDataset

__all__ = ["SourceMapDataset"]
