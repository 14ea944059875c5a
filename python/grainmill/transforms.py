"""Transforms as classes, for pipelines written with `apply` and for functions with a type.

Attributes:
    Transformation: An object that `apply` and `DataLoader` take: of one of these classes.
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
