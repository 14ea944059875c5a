"""Names of `grain._src.python.dataset.transformations.zip`."""

from grainmill.experimental import ZipIterDataset, ZipMapDataset

__all__ = ["ZipIterDataset", "ZipMapDataset"]
