"""Datasets with random access."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import numpy as np

from grainmill._dataset.apply import apply_each
from grainmill._dataset.iter_dataset import (
    IterDataset,
    PlannedIterDataset,
    node_of,
    with_node,
    with_parents,
)
from grainmill._evaluate.program import Program
from grainmill._plan import random_access as plan
from grainmill._plan import sequential, transforms
from grainmill._plan.node import random_access
from grainmill._plan.options import ReadOptions
from grainmill._plan.tracebacks import line_of_user

if TYPE_CHECKING:
    from grainmill._dataset.iterator import DatasetIterator
    from grainmill._plan.node import Node

T = TypeVar("T")
S = TypeVar("S")


class MapDatasetFactories(abc.ABCMeta):
    """What `MapDataset` itself offers, and datasets made from it do not."""

    def source(cls, source: Any) -> MapDataset[Any]:
        """The elements of any object with `__len__` and `__getitem__`.

        Args:
            source: Read by index; one that also has `__getitems__` is asked for many at once.
        """
        return PlannedMapDataset(plan.Source.of(source))

    def range(cls, start: int, stop: int | None = None, step: int = 1) -> MapDataset[int]:
        """The integers of `range(start, stop, step)`."""
        numbers = range(start) if stop is None else range(start, stop, step)
        return PlannedMapDataset(plan.Range((), len(numbers), numbers))

    def mix(
        cls, datasets: Sequence[MapDataset[T]], weights: Sequence[float] | None = None
    ) -> MapDataset[T]:
        """Elements of several datasets in fixed proportions.

        An epoch ends when the first of `datasets` would be used up; later positions go on with
        the mixture, each dataset in its next epochs.

        There may be thousands: to begin takes some microseconds for each, an element as much as
        with few where they are alike. Whose turn it is is kept for up to a million positions, in
        12 MB. Weights whose turns repeat only after more cost a shuffle that follows time in
        proportion to the number of datasets; shuffle each of them instead.

        Args:
            datasets: At least one, none of them empty.
            weights: A positive share for each; equal shares if `None`.

        Raises:
            ValueError: A dataset is empty or a weight is not positive.
        """
        return PlannedMapDataset(plan.Mix.of([node_of(ds) for ds in datasets], weights))

    def select_from_datasets(
        cls, datasets: Sequence[MapDataset[T]], selection_map: transforms.DatasetSelectionMap
    ) -> MapDataset[T]:
        """Elements that `selection_map` picks from several datasets."""
        return PlannedMapDataset(plan.Select.of([node_of(ds) for ds in datasets], selection_map))

    def concatenate(cls, datasets: Sequence[MapDataset[T]]) -> MapDataset[T]:
        """Several datasets one after another, epoch by epoch.

        There may be thousands: to begin takes some microseconds for each, an element as much as
        with few where they are alike.

        Raises:
            ValueError: A dataset is infinite.
        """
        return PlannedMapDataset(plan.Concatenate.of([node_of(ds) for ds in datasets]))


class MapDataset(Generic[T], metaclass=MapDatasetFactories):
    """A sequence of elements computed by position; nothing is read until one is asked for.

    Positions beyond `len(ds)` go on with the next epochs, in which shuffles and random maps draw
    anew. Derive from it to write a stage of your own: call `super().__init__(parent)` and define
    `__len__` and `__getitem__`, which reads `self._parent`.

    Args:
        parents: The dataset, or datasets, that elements are taken from.

    Example:
        >>> ds = MapDataset.range(10).shuffle(seed=42).map(lambda x: x * 2).batch(4)
        >>> [batch.tolist() for batch in ds]
        [[16, 12, 14, 18], [0, 10, 2, 4], [8, 6]]
    """

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, parents: MapDataset[Any] | Sequence[MapDataset[Any]] = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)

    @property
    def parents(self) -> tuple[MapDataset[Any], ...]:
        """The datasets that elements are taken from."""
        return tuple(self.__dict__.get("_parents", ()))

    @property
    def _parent(self) -> MapDataset[Any]:
        (parent,) = self.parents
        return parent

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns how many elements an epoch has."""

    @overload
    def __getitem__(self, index: slice) -> MapDataset[T]: ...
    @overload
    def __getitem__(self, index: int) -> T | None: ...
    @abc.abstractmethod
    def __getitem__(self, index: slice | int) -> MapDataset[T] | T | None:
        """Returns the element at `index`, `None` where it was dropped; slices are datasets."""

    def __iter__(self) -> DatasetIterator[T]:
        return self.to_iter_dataset().__iter__()

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[T]], S] | None = None,
    ) -> MapDataset[S]:
        """Stacks `batch_size` consecutive elements along a new leading axis.

        Batches never mix epochs; `repeat` first for that.

        Args:
            batch_size: Elements per batch, at least 1.
            drop_remainder: Whether an epoch's last, shorter batch is left out. Set it under
                `jax.jit`: a second shape compiles a second time.
            batch_fn: Makes a batch from a list of elements, in place of stacking.

        Raises:
            ValueError: `batch_size` is not positive, or a stage before may drop elements.

        Example:
            >>> [batch.shape for batch in MapDataset.range(10).batch(4)]
            [(4,), (4,), (2,)]
        """
        return _after(
            self, plan.Batch.of, batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn
        )

    def filter(self, transform: transforms.Filter | Callable[[T], bool]) -> MapDataset[T]:
        """Makes `None` of the elements for which `transform` is false; iterating skips those."""
        return _after(self, plan.Filter.of, transform)

    def shuffle(self, seed: int | None = None) -> MapDataset[T]:
        """Visits the elements of each epoch in that epoch's own order.

        The order is computed, not stored: a keyed bijection of the positions (a Feistel network
        with the round function of the cipher Simon, and cycle walking).

        Args:
            seed: Below 2**32; if `None`, drawn from `ds.seed(...)` above.

        Raises:
            ValueError: There is no seed, or it is out of range.
        """
        return _after(self, plan.Shuffle.of, seed)

    def slice(self, sl: slice | Sequence[int]) -> MapDataset[T]:
        """Takes a slice, or listed indices, of every epoch."""
        if isinstance(sl, slice):
            return _after(self, plan.Slice.of, sl)
        return _after(self, plan.Take.of, sl)

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> MapDataset[T]:
        """Makes one epoch of several.

        Args:
            num_epochs: How many; without end if `None`.
            reseed_each_epoch: Whether shuffles and random maps draw anew in each.

        Raises:
            ValueError: `num_epochs` is not positive, or the dataset is infinite already.
        """
        return _after(self, plan.Repeat.of, num_epochs, reseed_each_epoch=reseed_each_epoch)

    def map(self, transform: transforms.Map | Callable[[T], S]) -> MapDataset[S]:
        """Replaces every element by `transform(element)`; `None` drops one.

        What `transform` raises reaches the consumer as it is, with notes on where that was:

            ValueError: no tokens
            while computing element 5060 of `MapMapDataset(transform=decode @ a.py:3)` at a.py:12
              from record 34 of train-00003.array_record (epoch 2)
        """
        return _after(self, plan.Map.of, transform)

    def map_with_index(
        self, transform: transforms.MapWithIndex | Callable[[int, T], S]
    ) -> MapDataset[S]:
        """Replaces every element by `transform(index, element)`; `index` runs on over epochs."""
        return _after(self, plan.MapWithIndex.of, transform)

    def random_map(
        self,
        transform: transforms.RandomMap | Callable[[T, np.random.Generator], S],
        *,
        seed: int | None = None,
    ) -> MapDataset[S]:
        """Replaces every element by `transform(element, rng)`.

        Args:
            transform: Gets a generator of its own, a function of `seed` and the index.
            seed: Any non-negative integer; if `None`, drawn from `ds.seed(...)` above.

        Raises:
            ValueError: There is no seed.
        """
        return _after(self, plan.RandomMap.of, transform, seed)

    def seed(self, seed: int) -> MapDataset[T]:
        """Gives random stages further down that have no seed of their own one to draw from."""
        return _after(self, plan.Seed.of, seed)

    def apply(
        self, transformations: transforms.Transformation | transforms.Transformations
    ) -> MapDataset[Any]:
        """Appends transforms given as objects.

        Raises:
            NotImplementedError: An object is not of a known transform class.
        """
        result: MapDataset[Any] = apply_each(self, transformations)
        return result

    def _flat_map(self, transform: transforms.FlatMap) -> MapDataset[Any]:
        return _after(self, plan.FlatMap.of, transform)

    def pipe(self, func: Callable[..., S], /, *args: Any, **kwargs: Any) -> S:
        """Returns `func(self, *args, **kwargs)`, for chaining."""
        return func(self, *args, **kwargs)

    def to_iter_dataset(
        self, read_options: ReadOptions | None = None, *, allow_nones: bool = False
    ) -> IterDataset[T]:
        """Reads one epoch in order, ahead of use.

        Args:
            read_options: How far ahead and on how many threads; `ReadOptions()` if `None`.
            allow_nones: Whether dropped elements come out as `None` instead of not at all.
        """
        node = node_of(self)
        if read_options is None:
            # Numbers cost nothing to make, so nothing is gained by making them ahead.
            numbers = isinstance(node, plan.Range)
            read_options = ReadOptions(prefetch_buffer_size=0) if numbers else ReadOptions()
        return PlannedIterDataset(
            sequential.read(node, read_options, allow_nones=allow_nones), (self,)
        )

    def _over(self, node: Any) -> MapDataset[T]:
        """This dataset where its node is replaced by `node`: on other parents, or a slice of it."""
        if isinstance(node, plan.UserDefined):
            copied: MapDataset[T] = node.dataset
            return copied
        return PlannedMapDataset(node, (self,))

    def _plan_node(self) -> Node:
        parents = [node_of(parent) for parent in self.parents]
        return plan.UserDefined.of(self, parents, with_parents)

    def __str__(self) -> str:
        return str(self._plan_node())


class PlannedMapDataset(MapDataset[T]):
    """A dataset that is a plan."""

    def __init__(self, node: Node, parents: Sequence[MapDataset[Any]] = ()) -> None:
        super().__init__(parents)
        self._node = random_access(node)
        if node.added_at is None:
            node.note_added(line_of_user())
        self._program: Program | None = None

    def _over(self, node: Any) -> MapDataset[T]:
        if node is self._node:
            return self
        if self._node in node.parents:
            return PlannedMapDataset(node, (self,))
        copied: PlannedMapDataset[T] = with_node(self, node)
        copied._program = None
        return copied

    def _plan_node(self) -> Node:
        return self._node

    def __len__(self) -> int:
        return self._node.length

    @overload
    def __getitem__(self, index: slice) -> MapDataset[T]: ...
    @overload
    def __getitem__(self, index: int) -> T | None: ...
    def __getitem__(self, index: slice | int) -> MapDataset[T] | T | None:
        """Returns the element at `index`; see `MapDataset`."""
        if isinstance(index, slice):
            return self.slice(index)
        if self._node.length == 0:
            raise ZeroDivisionError(f"{self} has no elements, so no element {index}")
        made = self._ready().run(operator.index(index), 1)
        if made.failure is not None:
            raise made.failure
        return cast("T | None", made.elements[0])

    def _ready(self) -> Program:
        if self._program is None:
            self._program = Program(self._node)
        return self._program

    def __getitems__(self, indices: Sequence[int]) -> list[T | None]:
        """Returns the elements at `indices`, made as one block."""
        made = self._ready().run_at(np.asarray(indices, np.int64))
        if made.failure is not None:
            raise made.failure
        return made.elements

    def __repr__(self) -> str:
        if isinstance(self._node, plan.Mix):
            return repr(self._node)
        return f"<{type(self).__module__}.{self}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_program": None}


def _after(
    dataset: MapDataset[Any], make: Callable[..., Node], *args: Any, **kw: Any
) -> PlannedMapDataset[Any]:
    return PlannedMapDataset(make(node_of(dataset), *args, **kw), (dataset,))
