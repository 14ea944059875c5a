"""The base classes of users' transforms."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Map(abc.ABC):
    """Maps one element to one element.

    Derive from it and define `map`; `ds.map`, `ds.apply` and `DataLoader` accept such objects.

    Where it is cheaper to handle many elements in one call, also define `map_block(elements)`: it
    gets a list of elements and returns a list, or an object with a length and indexing, with the
    result for each. Results, order, states and errors stay those of `map`, which is still called
    for single elements, and for those of a block that fails. A derived class that replaces `map`
    alone has no `map_block`.

    Example:
        >>> class Scale(grain.transforms.Map):
        ...     def __init__(self, factor):
        ...         self.factor = factor
        ...
        ...     def map(self, element):
        ...         return element * self.factor
        >>> list(grain.MapDataset.range(3).map(Scale(10)))
        [0, 10, 20]
    """

    @abc.abstractmethod
    def map(self, element: Any) -> Any:
        """Returns the element that replaces `element`.

        Args:
            element: An element; `None` only in a `DataLoader`. Change it in place only if nothing
                else refers to it.
        """


class RandomMap(abc.ABC):
    """Maps one element to one element, with random numbers of its own.

    Derive from it and define `random_map`; `ds.random_map`, `ds.apply` and `DataLoader` accept such
    objects.

    Example:
        >>> class Jitter(grain.transforms.RandomMap):
        ...     def random_map(self, element, rng):
        ...         return element + rng.uniform(-0.5, 0.5)
        >>> ds = grain.MapDataset.range(3).random_map(Jitter(), seed=0)
        >>> [round(x, 3) for x in ds]
        [-0.486, 0.788, 2.35]
    """

    @abc.abstractmethod
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns the element that replaces `element`.

        Args:
            element: An element; `None` only in a `DataLoader`.
            rng: The random generator of this element; `None` in a `DataLoader` whose sampler has no
                seed.
        """


class MapWithIndex(abc.ABC):
    """Maps one element and its index to one element.

    Derive from it and define `map_with_index`; `ds.map_with_index` and `ds.apply` accept such
    objects.

    Example:
        >>> class Number(grain.transforms.MapWithIndex):
        ...     def map_with_index(self, index, element):
        ...         return index, element
        >>> list(grain.MapDataset.source("ab").map_with_index(Number()))
        [(0, 'a'), (1, 'b')]
    """

    @abc.abstractmethod
    def map_with_index(self, index: int, element: Any) -> Any:
        """Returns the element that replaces `element`.

        Args:
            index: In a `MapDataset`, the position, which continues to grow in later epochs; in an
                `IterDataset`, the number of elements before this one.
            element: An element, never `None`.
        """


class TfRandomMap(abc.ABC):
    """A random map for `DataLoader` only, with an older name of its method; see `RandomMap`."""

    @abc.abstractmethod
    def np_random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns the element that replaces `element`.

        Args:
            element: An element.
            rng: The random generator of this record; `None` if the sampler has no seed.
        """


class Filter(abc.ABC):
    """Decides for each element whether to keep it.

    Derive from it and define `filter`; `ds.filter`, `ds.apply` and `DataLoader` accept such
    objects.

    Example:
        >>> class Even(grain.transforms.Filter):
        ...     def filter(self, element):
        ...         return element % 2 == 0
        >>> list(grain.MapDataset.range(5).filter(Even()))
        [0, 2, 4]
    """

    @abc.abstractmethod
    def filter(self, element: Any) -> bool | np.bool_:
        """Returns whether to keep `element`.

        Args:
            element: An element; in a `MapDataset` never `None`.
        """


class FlatMap(abc.ABC):
    """Maps one element to several, or none.

    Derive from it and define `flat_map`; `ds.apply`, `DataLoader` and the stages
    `experimental.FlatMapMapDataset` and `experimental.FlatMapIterDataset` accept such objects.

    Attributes:
        max_fan_out: Maximum number of elements that replace one element. It determines the length
            of a `MapDataset`, which raises an error if there are more; elsewhere it is not a limit.

    Example:
        >>> class Words(grain.experimental.FlatMapTransform):
        ...     max_fan_out = 2
        ...
        ...     def flat_map(self, element):
        ...         return element.split()
        >>> list(grain.MapDataset.source(["one two", "three"]).apply(Words()))
        ['one', 'two', 'three']
    """

    max_fan_out: int

    @abc.abstractmethod
    def flat_map(self, element: Any) -> Sequence[Any]:
        """Returns the elements that replace `element`.

        Args:
            element: An element.
        """


@dataclasses.dataclass(frozen=True)
class Batch:
    """Stacks consecutive elements along a new leading axis; see `MapDataset.batch`.

    Attributes:
        batch_size: Elements per batch, at least 1; checked where it is applied.
        drop_remainder: Whether to drop a last, shorter batch.
        batch_fn: Function that makes a batch from a list of elements, in place of stacking.

    Example:
        >>> ds = grain.MapDataset.range(5).apply(grain.transforms.Batch(2, drop_remainder=True))
        >>> [batch.tolist() for batch in ds]
        [[0, 1], [2, 3]]
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[list[Any]], Any] | None = None


# Protocols for type checkers: a transform's element types are those of its method.


class MapLike(Protocol[In_contra, Out_co]):
    """A `Map` from one type of elements to another."""

    def map(self, element: In_contra, /) -> Out_co:
        """See `Map.map`."""


class RandomMapLike(Protocol[In_contra, Out_co]):
    """A `RandomMap` from one type of elements to another."""

    def random_map(self, element: In_contra, rng: np.random.Generator, /) -> Out_co:
        """See `RandomMap.random_map`."""


class MapWithIndexLike(Protocol[In_contra, Out_co]):
    """A `MapWithIndex` from one type of elements to another."""

    def map_with_index(self, index: int, element: In_contra, /) -> Out_co:
        """See `MapWithIndex.map_with_index`."""


class FilterLike(Protocol[In_contra]):
    """A `Filter` of one type of elements."""

    def filter(self, element: In_contra, /) -> bool | np.bool_:
        """See `Filter.filter`."""


class FlatMapLike(Protocol[In_contra, Out_co]):
    """A `FlatMap` from one type of elements to another."""

    @property
    def max_fan_out(self) -> int:
        """See `FlatMap`."""

    def flat_map(self, element: In_contra, /) -> Sequence[Out_co]:
        """See `FlatMap.flat_map`."""


Transformation: TypeAlias = Batch | Map | RandomMap | TfRandomMap | Filter | FlatMap | MapWithIndex
Transformations: TypeAlias = Sequence[Transformation]


class OfEngine(abc.ABC):
    """A transform that holds what cannot be pickled, and makes it again where it is unpickled."""

    _engine: Any

    @abc.abstractmethod
    def _new_engine(self) -> Any:
        """Returns what `_engine` is, made of the other attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._engine = self._new_engine()


class DatasetSelectionMap(abc.ABC):
    """Maps each index of a selection to a dataset and an index in it.

    Derive from it and define `__len__` and `__getitem__`; `MapDataset.select_from_datasets` accepts
    such objects.

    Example:
        >>> class Alternate(grain.transforms.DatasetSelectionMap):
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return index % 2, index // 2
        >>> datasets = [grain.MapDataset.range(10), grain.MapDataset.range(20, 30)]
        >>> list(grain.MapDataset.select_from_datasets(datasets, Alternate()))
        [0, 20, 1, 21]
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of elements in an epoch of the selection."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns (dataset number, index in that dataset).

        Args:
            index: A position; at least the length in later epochs.
        """
