"""Names of `grain._src.core.transforms`."""

from grainmill.experimental import FlatMapTransform as FlatMap
from grainmill.experimental import MapWithIndexTransform as MapWithIndex
from grainmill.transforms import Batch, Filter, Map, RandomMap, TfRandomMap

__all__ = ["Batch", "Filter", "FlatMap", "Map", "MapWithIndex", "RandomMap", "TfRandomMap"]
