"""The classes a user derives from to give a function of elements a type."""

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
    """One element in, one element out."""

    @abc.abstractmethod
    def map(self, element: Any) -> Any:
        """Returns what stands in the place of `element`."""


class RandomMap(abc.ABC):
    """One element in, one element out, with random numbers of its own."""

    @abc.abstractmethod
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns what stands in the place of `element`; `rng` belongs to this call."""


class MapWithIndex(abc.ABC):
    """One element and its index in, one element out."""

    @abc.abstractmethod
    def map_with_index(self, index: int, element: Any) -> Any:
        """Returns what stands in the place of `element`, which is at `index`."""


class TfRandomMap(abc.ABC):
    """A random map written for NumPy generators, kept for the older loader."""

    @abc.abstractmethod
    def np_random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns what stands in the place of `element`; `rng` belongs to this call."""


class Filter(abc.ABC):
    """One element in, a verdict out."""

    @abc.abstractmethod
    def filter(self, element: Any) -> bool | np.bool_:
        """Returns whether `element` stays."""


class FlatMap(abc.ABC):
    """One element in, at most `max_fan_out` elements out.

    Attributes:
        max_fan_out: The most elements that one element may become.
    """

    max_fan_out: int

    @abc.abstractmethod
    def flat_map(self, element: Any) -> Sequence[Any]:
        """Returns the elements that `element` becomes."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Stacks consecutive elements along a new leading axis.

    Attributes:
        batch_size: Elements per batch, at least 1.
        drop_remainder: Whether a last, shorter batch is left out.
        batch_fn: Makes a batch from a list of elements, in place of stacking.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[list[Any]], Any] | None = None


# What type checkers see of a transform: the element types of the method that it defines.


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


class DatasetSelectionMap(abc.ABC):
    """Says, for each index of a selection, which dataset to read and where."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns how many elements the selection has."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns (number of the dataset, index in that dataset)."""
