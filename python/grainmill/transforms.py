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
    __getattr__ = lazy_names(
        __name__,
        {
            "DecodeImage": "grainmill._images",
            "DecodeRandomCrop": "grainmill._images",
            "Feature": "grainmill._parsing.example",
            "JsonField": "grainmill._parsing.json",
            "ParseExample": "grainmill._parsing.example",
            "ParseJson": "grainmill._parsing.json",
            "Tokenize": "grainmill._parsing.tokenize",
            "to_example": "grainmill._example",
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


def __dir__() -> list[str]:
    return sorted(__all__)
