"""Base classes of transforms, for `apply`, `DataLoader` and the methods of datasets.

Attributes:
    Transformation: An instance of one of these classes, as `apply` and `DataLoader` accept.
    Transformations: A sequence of them.
"""

from typing import TYPE_CHECKING

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
    from grainmill._parsing.example import Feature, ParseExample
    from grainmill._parsing.json import JsonField, ParseJson
    from grainmill._parsing.tokenize import Tokenize
else:

    def __getattr__(name: str) -> object:
        if name in {"Feature", "ParseExample"}:
            from grainmill._parsing import example  # noqa: PLC0415 - few programs need it

            return getattr(example, name)
        if name in {"JsonField", "ParseJson"}:
            from grainmill._parsing import json  # noqa: PLC0415

            return getattr(json, name)
        if name == "Tokenize":
            from grainmill._parsing import tokenize  # noqa: PLC0415

            return tokenize.Tokenize
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch",
    "DatasetSelectionMap",
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
]
