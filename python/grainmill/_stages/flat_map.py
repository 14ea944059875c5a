"""Several elements for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._dataset.element_types import S, T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._dataset.map_dataset import MapDataset, PlannedMapDataset
from grainmill._iterators.flat_map import FlatMap
from grainmill._plan import random_access, transforms

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset


class FlatMapMapDataset(PlannedMapDataset[T_co]):
    """Replaces each element by up to `transform.max_fan_out` elements.

    Element `i` is element `i % max_fan_out` of what `flat_map` returns for the parent's element
    `i // max_fan_out`, or `None` if there are fewer. The length is `max_fan_out` times the
    parent's. `flat_map` is called again for each element of its result.

    Args:
        parent: The dataset to read from.
        transform: Its `flat_map` returns a sequence, or another iterable, of at most `max_fan_out`
            elements.

    Raises:
        ValueError: When read: `flat_map` returned more than `max_fan_out` elements.
        TypeError: `transform` has no `flat_map`, or `max_fan_out` is not an integer.

    Example:
        >>> class Words(grain.experimental.FlatMapTransform):
        ...     max_fan_out = 3
        ...
        ...     def flat_map(self, element):
        ...         return element.split()
        >>> ds = grain.MapDataset.source(["one two", "three"])
        >>> ds = grain.experimental.FlatMapMapDataset(ds, Words())
        >>> len(ds), ds[2], list(ds)
        (6, None, ['one', 'two', 'three'])
    """

    def __init__(self, parent: MapDataset[S], transform: transforms.FlatMapLike[S, T_co]) -> None:
        super().__init__(random_access.FlatMap.after(node_of(parent), transform), (parent,))


class FlatMapIterDataset(PlannedIterDataset[T_co]):
    """Replaces each element by the elements of a sequence, which may be empty.

    Args:
        parent: The dataset to read from.
        transform: Its `flat_map` returns a sequence (not a generator); `max_fan_out` does not limit
            it.

    Raises:
        TypeError: `transform` has no `flat_map`.

    Example:
        >>> class Words(grain.experimental.FlatMapTransform):
        ...     def flat_map(self, element):
        ...         return element.split()
        >>> ds = grain.MapDataset.source(["one two", "", "three"]).to_iter_dataset()
        >>> list(grain.experimental.FlatMapIterDataset(ds, Words()))
        ['one', 'two', 'three']
    """

    def __init__(self, parent: AnyDataset[S], transform: transforms.FlatMapLike[S, T_co]) -> None:
        super().__init__(FlatMap.of(node_of(parent), transform), (parent,))
