"""The methods of a dataset, as transform objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from grainmill._dataset.apply import apply_each

if TYPE_CHECKING:
    from grainmill._dataset.iter_dataset import IterDataset
    from grainmill._dataset.map_dataset import MapDataset
    from grainmill._plan import transforms


@overload
def apply_transformations(
    ds: MapDataset[Any], transformations: transforms.Transformation | transforms.Transformations
) -> MapDataset[Any]: ...
@overload
def apply_transformations(
    ds: IterDataset[Any], transformations: transforms.Transformation | transforms.Transformations
) -> IterDataset[Any]: ...


def apply_transformations(ds: Any, transformations: Any) -> Any:
    """Appends one transform, or several in turn, to a dataset of either kind.

    Args:
        ds: A `MapDataset` or an `IterDataset`.
        transformations: One object of a class in `grainmill.transforms`, or a sequence of them.

    Returns:
        A dataset of the same kind.

    Raises:
        NotImplementedError: An object is not of a known transform class.

    Example:
        >>> ds = grain.MapDataset.range(4)
        >>> ds = grain.experimental.apply_transformations(ds, [grain.transforms.Batch(2)])
        >>> [batch.tolist() for batch in ds]
        [[0, 1], [2, 3]]
    """
    return apply_each(ds, transformations)
