"""Applies transform objects by calling the dataset method for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grainmill._plan import transforms

if TYPE_CHECKING:
    from grainmill._dataset.element_types import T


def apply_each(ds: T, transformations: Any) -> T:
    """Appends one transform, or several in turn, to a dataset of either kind."""
    several = isinstance(transformations, Sequence)
    for transform in transformations if several else (transformations,):
        ds = _apply(ds, transform)
    return ds


def _apply(dataset: Any, transform: Any) -> Any:
    match transform:
        case transforms.Batch():
            return dataset.batch(
                transform.batch_size,
                drop_remainder=transform.drop_remainder,
                batch_fn=transform.batch_fn,
            )
        case transforms.Map():
            return dataset.map(transform)
        case transforms.RandomMap():
            return dataset.random_map(transform)
        case transforms.MapWithIndex():
            return dataset.map_with_index(transform)
        case transforms.FlatMap():
            return dataset._flat_map(transform)  # noqa: SLF001 - private to datasets
        case transforms.Filter():
            return dataset.filter(transform)
        case _:
            meant = (
                f" Did you mean `{transform.__name__}(...)`?" if isinstance(transform, type) else ""
            )
            text = f"Transformation type: {transform} is not supported.{meant}"
            raise NotImplementedError(text)
