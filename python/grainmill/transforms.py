"""Base classes of transforms, for `apply`, `DataLoader` and the methods of datasets.

Attributes:
    Transformation: An instance of one of these classes, as `apply` and `DataLoader` accept.
    Transformations: A sequence of them.
"""

from grainmill._plan.transforms import (
    Batch,
    DatasetSelectionMap,
    Filter,
    Map,
    MapWithIndex,
    RandomMap,
    TfRandomMap,
    Transformation,
    Transformations,
)

__all__ = [
    "Batch",
    "DatasetSelectionMap",
    "Filter",
    "Map",
    "MapWithIndex",
    "RandomMap",
    "TfRandomMap",
    "Transformation",
    "Transformations",
]
