"""Base classes of transforms, for `apply`, `DataLoader` and the methods of datasets.

Attributes:
    Transformation: An instance of one of these classes, as `apply` and `DataLoader` accept.
    Transformations: A sequence of them.
"""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names
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

if TYPE_CHECKING:
    from grainmill._example import to_example
    from grainmill._images import DecodeImage, DecodeRandomCrop
    from grainmill._parsing.example import Feature, ParseExample
    from grainmill._parsing.json import JsonField, ParseJson
    from grainmill._parsing.tokenize import Tokenize
else:
    # Imported when they are used, as few programs need them.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._example": ["to_example"],
            "grainmill._images": ["DecodeImage", "DecodeRandomCrop"],
            "grainmill._parsing.example": ["Feature", "ParseExample"],
            "grainmill._parsing.json": ["JsonField", "ParseJson"],
            "grainmill._parsing.tokenize": ["Tokenize"],
        },
    )


__all__ = [
    "Batch",
    "DatasetSelectionMap",
    "DecodeImage",
    "DecodeRandomCrop",
    "Feature",
    "Filter",
    "JsonField",
    "Map",
    "MapWithIndex",
    "ParseExample",
    "ParseJson",
    "RandomMap",
    "TfRandomMap",
    "Tokenize",
    "Transformation",
    "Transformations",
    "to_example",
]
