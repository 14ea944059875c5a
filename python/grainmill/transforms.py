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
    from grainmill._images import DecodeImage, DecodeRandomCrop
else:

    def __getattr__(name: str) -> object:
        if name in {"DecodeImage", "DecodeRandomCrop"}:  # few programs use them
            from grainmill import _images  # noqa: PLC0415

            return getattr(_images, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch",
    "DatasetSelectionMap",
    "DecodeImage",
    "DecodeRandomCrop",
    "Filter",
    "Map",
    "MapWithIndex",
    "RandomMap",
    "TfRandomMap",
    "Transformation",
    "Transformations",
]
