"""Datasets with random access."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Never, Self, cast, overload

import numpy as np

from grainmill._dataset.apply import apply_each
from grainmill._dataset.element_types import D2, D, K, Leaf, P, S, SourceLike, T, T_co
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
from grainmill._plan.arguments import checked_integer
from grainmill._plan.node import random_access
from grainmill._plan.options import ReadOptions
from grainmill._plan.tracebacks import line_of_user

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from grainmill._dataset.iterator import DatasetIterator
    from grainmill._plan.node import Node


class EmptyDatasetError(IndexError, ZeroDivisionError):
    """An element of an empty dataset was asked for; Grain has it as the second of these."""


class MapDatasetFactories(abc.ABCMeta):
    """What `MapDataset` itself offers, and datasets made from it do not."""

    def source(cls, source: SourceLike[T | None]) -> MapDataset[T]:
        """Makes a dataset of any object with `__len__` and `__getitem__`.

        Positions beyond the object's length start over, so that epochs follow each other; records
        that are `None` count as dropped. An object whose `len` raises a `TypeError` is read at the
        positions asked for, and its dataset counts as infinite.

        Args:
            source: Read by index; one that also has `__getitems__` is asked for many at once. It is
                read from several threads at a time, and pickled where worker processes read it.

        Raises:
            TypeError: `source` has no `__len__` or no `__getitem__`.

        Example:
            >>> ds = grain.MapDataset.source(["zero", "one", "two"])
            >>> len(ds), ds[1], ds[4]
            (3, 'one', 'one')
        """
        return PlannedMapDataset(plan.Source.of(source))

    def range(cls, start: int, stop: int | None = None, step: int = 1) -> MapDataset[int]:
        """Makes a dataset of the integers of `range(start, stop, step)`, as Python's `int`.

        Args:
            start: The first integer; where `stop` is `None`, the end, and the first is 0.
            stop: The end, which is left out.
            step: From one integer to the next, not 0.

        Raises:
            ValueError: `step` is 0.
            TypeError: A number is not an integer.

        Example:
            >>> list(grain.MapDataset.range(3)), list(grain.MapDataset.range(10, 20, 4))
            ([0, 1, 2], [10, 14, 18])
        """
        start, step = checked_integer(start, "start"), checked_integer(step, "step")
        if not step:
            raise ValueError("`step` must not be 0")
        if stop is None:
            start, stop, step = 0, start, 1
        numbers = range(start, checked_integer(stop, "stop"), step)
        return PlannedMapDataset(plan.Range((), len(numbers), numbers))

    def mix(
        cls, datasets: Sequence[MapDataset[T]], weights: Sequence[float] | None = None
    ) -> MapDataset[T]:
        """Interleaves several datasets in fixed proportions.

        An epoch ends when the first of `datasets` would be used up; later positions go on with the
        mixture, each dataset in its next epochs. The order within each dataset stays, and its
        elements are spread evenly over the mixture. Weights are first scaled so that the smallest
        is 100 and cut to integers: 0.3 and 0.7 become 100 and 233.

        There may be thousands of datasets: the start takes some microseconds for each, an element
        as much as with few where they are alike. The order is kept for up to a million positions,
        in 12 MB. Where weights make an order that repeats only after more, a shuffle downstream
        takes time in proportion to the number of datasets; shuffle each of them instead.

        Args:
            datasets: At least one, none of them empty.
            weights: A positive share for each, which need not sum to 1; equal shares if `None`.

        Raises:
            ValueError: There is no dataset, one is empty, weights are not as many as datasets, or a
                weight is not positive.
            TypeError: A weight is not a number.

        Example:
            >>> ds = grain.MapDataset.mix(
            ...     [grain.MapDataset.range(4), grain.MapDataset.range(10, 20)], weights=[1, 2]
            ... )
            >>> list(ds)
            [0, 10, 11, 1, 12, 13, 2, 14, 15, 3, 16, 17]
        """
        return PlannedMapDataset(plan.Mix.of([node_of(ds) for ds in datasets], weights))

    def select_from_datasets(
        cls, datasets: Sequence[MapDataset[T]], selection_map: transforms.DatasetSelectionMap
    ) -> MapDataset[T]:
        """Makes a dataset of the elements that `selection_map` picks from several datasets.

        Its length is that of `selection_map`. Positions beyond it, or negative ones, are handed to
        `selection_map` as they are.

        Args:
            datasets: The datasets, known to `selection_map` by their places in this sequence.
            selection_map: Called with an index; gives the number of a dataset and an index in it.

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
        return PlannedMapDataset(plan.Select.of([node_of(ds) for ds in datasets], selection_map))

    def concatenate(cls, datasets: Sequence[MapDataset[T]]) -> MapDataset[T]:
        """Joins several datasets end to end; epoch `n` consists of the `n`-th epoch of each.

        There may be thousands of datasets: the start takes some microseconds for each, an element
        as much as with few where they are alike.

        Args:
            datasets: At least one, none of them infinite.

        Raises:
            ValueError: There is no dataset, or one is infinite.

        Example:
            >>> datasets = [grain.MapDataset.range(2), grain.MapDataset.range(7, 9)]
            >>> list(grain.MapDataset.concatenate(datasets))
            [0, 1, 7, 8]
        """
        return PlannedMapDataset(plan.Concatenate.of([node_of(ds) for ds in datasets]))


class MapDataset(Generic[T_co], metaclass=MapDatasetFactories):
    """A sequence of elements computed by position; nothing is read until one is asked for.

    A dataset is never changed: each method returns a new one. `ds[i]` is an element, `None` where a
    filter or a map dropped it; `ds[a:b:c]` is a dataset. `len(ds)` is the number of elements of one
    epoch, dropped ones included, and `sys.maxsize` where there is no end. Positions beyond it go on
    with the next epochs, in which shuffles and random maps draw anew; negative positions are those
    of the epochs before the first. An iteration reads one epoch, as `to_iter_dataset()` does, and
    leaves out what was dropped.

    `MapDataset.source` and `MapDataset.range` make one of records or integers; `MapDataset.mix`,
    `MapDataset.concatenate` and `MapDataset.select_from_datasets` one of several.

    Derive from it to write a stage of your own: call `super().__init__(parent)` and define
    `__len__` and `__getitem__`, which reads `self._parent`. Threads may call `__getitem__` at the
    same time.

    Args:
        parents: The dataset, or datasets, that elements are taken from.

    Example:
        >>> ds = grain.MapDataset.range(10).shuffle(seed=42).map(lambda x: x * 2).batch(4)
        >>> [batch.tolist() for batch in ds]
        [[16, 12, 14, 18], [0, 10, 2, 4], [8, 6]]
        >>> len(ds), ds[0].tolist(), ds[3].tolist()  # position 3 is the first of the second epoch
        (3, [16, 12, 14, 18], [4, 0, 18, 2])

        A stage of one's own:

        >>> class Pairs(grain.MapDataset):
        ...     def __len__(self):
        ...         return len(self._parent) // 2
        ...
        ...     def __getitem__(self, index):
        ...         if isinstance(index, slice):
        ...             return self.slice(index)
        ...         return self._parent[2 * index], self._parent[2 * index + 1]
        >>> list(Pairs(grain.MapDataset.range(5)).map(sum))
        [1, 5]
    """

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, parents: MapDataset[Any] | Sequence[MapDataset[Any]] = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)

    @property
    def parents(self) -> tuple[MapDataset[Any], ...]:
        """The datasets that elements are taken from; empty for a source."""
        return tuple(self.__dict__.get("_parents", ()))

    @property
    def _parent(self) -> MapDataset[Any]:
        (parent,) = self.parents
        return parent

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns how many elements an epoch has, dropped ones included."""

    @overload
    def __getitem__(self, index: slice) -> MapDataset[T_co]: ...
    @overload
    def __getitem__(self, index: int) -> T_co | None: ...
    @abc.abstractmethod
    def __getitem__(self, index: slice | int) -> MapDataset[T_co] | T_co | None:
        """Returns the element at `index`, `None` where it was dropped; of a slice, a dataset.

        Args:
            index: A position, counted on over epochs, or a slice of each epoch (see `slice`).
        """

    def __iter__(self) -> DatasetIterator[T_co]:
        return self.to_iter_dataset().__iter__()

    # An `Any` within the elements goes with `Never`, so those come first.
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[list[T_co]], S]
    ) -> MapDataset[S]: ...
    @overload
    def batch(
        self: MapDataset[Never],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[Any]: ...
    @overload
    def batch(
        self: MapDataset[NDArray[D]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[NDArray[D]]: ...
    @overload
    def batch(
        self: MapDataset[Leaf],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[NDArray[Any]]: ...
    @overload
    def batch(
        self: MapDataset[Mapping[K, Never]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: MapDataset[dict[K, object]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: MapDataset[dict[K, NDArray[D]]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[dict[K, NDArray[D]]]: ...
    @overload
    def batch(
        self: MapDataset[Mapping[K, Leaf]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[dict[K, NDArray[Any]]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[Never, object]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[object, Never]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[NDArray[D], NDArray[D2]]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[tuple[NDArray[D], NDArray[D2]]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[Leaf, Leaf]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: None = None,
    ) -> MapDataset[tuple[NDArray[Any], NDArray[Any]]]: ...
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None
    ) -> MapDataset[Any]: ...
    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[list[Any]], Any] | None = None,
    ) -> MapDataset[Any]:
        """Stacks `batch_size` consecutive elements along a new leading axis.

        Elements are pytrees (dicts, tuples, lists and what was registered with JAX) of one
        structure; the leaves are stacked as `numpy.stack` does. Arrays of shape `(...)` become one
        of shape `(batch_size, ...)` and the same dtype; Python's numbers become an int64, float64
        or bool array of shape `(batch_size,)`, text one of `<U`, bytes one of `S`. Where JAX is
        installed, dicts come with sorted keys. The arrays of a batch are new: no later batch is
        written into them.

        Do not write to an element's arrays on another thread before the batch is there: its row may
        hold some old and some new values.

        Batches never mix epochs: an epoch's last batch has what is left. Use `repeat` first to fill
        it from the next epoch.

        Args:
            batch_size: Elements per batch, at least 1.
            drop_remainder: Whether an epoch's last, shorter batch is left out. Set it under
                `jax.jit`: a second shape compiles a second time.
            batch_fn: Makes a batch from a list of elements, in place of stacking.

        Raises:
            ValueError: `batch_size` is not positive, or a stage upstream may drop elements: batches
                would differ in length. Batch after `to_iter_dataset` instead. When read: elements
                differ in structure or shape.
            TypeError: `batch_size` is not an integer, or `batch_fn` is not callable.

        Example:
            >>> [batch.shape for batch in grain.MapDataset.range(10).batch(4)]
            [(4,), (4,), (2,)]
            >>> ds = grain.MapDataset.source([{"x": np.zeros(3), "y": 1}] * 8)
            >>> {name: array.shape for name, array in ds.batch(4)[0].items()}
            {'x': (4, 3), 'y': (4,)}
        """
        return _after(
            self, plan.Batch.of, batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn
        )

    def filter(
        self, transform: transforms.FilterLike[T_co] | Callable[[T_co], bool | np.bool_]
    ) -> MapDataset[T_co]:
        """Drops the elements for which `transform` is false: they become `None`.

        Positions and `len` stay as they are; iterating skips what was dropped. Elements that are
        `None` already are not given to `transform`.

        Args:
            transform: A function of an element that says whether it stays, or a
                `transforms.Filter`.

        Raises:
            TypeError: `transform` is neither.
            ValueError: When read, where `DatasetOptions.filter_raise_threshold_ratio` is set: too
                many elements were dropped.

        Example:
            >>> ds = grain.MapDataset.range(6).filter(lambda x: x % 2 == 0)
            >>> list(ds), ds[1], len(ds)
            ([0, 2, 4], None, 6)
        """
        return _after(self, plan.Filter.of, transform)

    def shuffle(self, seed: int | None = None) -> MapDataset[T_co]:
        """Visits the elements of each epoch in that epoch's own order.

        The order is computed from the position and needs no memory: a keyed bijection of the
        positions (a Feistel network with the round function of the cipher Simon, and cycle walking;
        see `experimental.index_shuffle`). Epoch `e` has the order that seed `seed + e` has in epoch
        0.

        Args:
            seed: From 0 to 2**32 - 1; if `None`, derived from `ds.seed(...)` upstream.

        Raises:
            ValueError: There is no seed, or it is out of range.
            TypeError: `seed` is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(5).shuffle(seed=0)
            >>> list(ds), list(ds.repeat(2))
            ([0, 4, 1, 2, 3], [0, 4, 1, 2, 3, 1, 2, 3, 0, 4])
        """
        return _after(self, plan.Shuffle.of, seed)

    def slice(self, sl: slice | Sequence[int]) -> MapDataset[T_co]:
        """Takes a slice, or listed indices, of every epoch; `ds[a:b:c]` is the same as a slice.

        Downstream of a shuffle each epoch has other elements, since the slice is one of the
        shuffled order. `ds[index::count]` is the part of process `index` of `count`.

        Args:
            sl: A slice, with the meaning it has for a list; or a sequence of indices, where a
                negative one means the epoch before and not a place counted from the end.

        Raises:
            TypeError: An index is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(10)
            >>> list(ds[1::4]), list(ds.slice([3, 3, 0]))
            ([1, 5, 9], [3, 3, 0])
        """
        if isinstance(sl, slice):
            return _after(self, plan.Slice.of, sl)
        return _after(self, plan.Take.of, sl)

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> MapDataset[T_co]:
        """Makes one epoch of several.

        Args:
            num_epochs: How many; without end if `None`.
            reseed_each_epoch: Whether shuffles and random maps upstream draw anew in each of them.

        Raises:
            ValueError: `num_epochs` is not positive, or the dataset is infinite already.
            TypeError: `num_epochs` is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(4).repeat(2)
            >>> list(ds), [batch.tolist() for batch in ds.batch(3)]
            ([0, 1, 2, 3, 0, 1, 2, 3], [[0, 1, 2], [3, 0, 1], [2, 3]])
        """
        return _after(self, plan.Repeat.of, num_epochs, reseed_each_epoch=reseed_each_epoch)

    def map(
        self, transform: transforms.MapLike[T_co, S | None] | Callable[[T_co], S | None]
    ) -> MapDataset[S]:
        """Replaces every element by `transform(element)`.

        Elements that are `None` stay so, without a call; where `transform` returns `None`, the
        element is dropped. Threads may call `transform` at the same time.

        An exception of `transform` reaches the consumer as it is, with notes on the element:

            ValueError: no tokens
            while computing element 5060 of `MapMapDataset(transform=decode @ a.py:3)` at a.py:12
              from record 34 of train-00003.array_record (epoch 2)

        Args:
            transform: A function of an element, or a `transforms.Map`.

        Raises:
            TypeError: `transform` is neither. What `transform` raises comes out where the element
                is asked for.

        Example:
            >>> list(grain.MapDataset.range(3).map(lambda x: x * x))
            [0, 1, 4]
        """
        return _after(self, plan.Map.of, transform)

    def map_with_index(
        self,
        transform: transforms.MapWithIndexLike[T_co, S | None] | Callable[[int, T_co], S | None],
    ) -> MapDataset[S]:
        """Replaces every element by `transform(index, element)`.

        Elements that are `None` stay so, without a call; where `transform` returns `None`, the
        element is dropped.

        Args:
            transform: A function of a position and an element, or a `transforms.MapWithIndex`. The
                position is the one that was asked of this stage: in the second epoch it runs on
                from `len(ds)`.

        Raises:
            TypeError: `transform` is neither.

        Example:
            >>> ds = grain.MapDataset.source("ab").map_with_index(lambda index, x: f"{x}{index}")
            >>> list(ds.repeat(2))
            ['a0', 'b1', 'a2', 'b3']
        """
        return _after(self, plan.MapWithIndex.of, transform)

    def random_map(
        self,
        transform: transforms.RandomMapLike[T_co, S | None]
        | Callable[[T_co, np.random.Generator], S | None],
        *,
        seed: int | None = None,
    ) -> MapDataset[S]:
        """Replaces every element by `transform(element, rng)`.

        Random numbers depend on the seed and on the position asked of this stage alone, not on the
        order in which elements are computed. So epochs draw anew; upstream of a shuffle a record
        keeps its numbers within an epoch, downstream of it a place in the order does. Elements that
        are `None` stay so, without a call.

        Args:
            transform: A function of an element and a `numpy.random.Generator` (Philox, keyed by the
                seed, its counter set to the position), or a `transforms.RandomMap`.
            seed: Any non-negative integer; if `None`, derived from `ds.seed(...)` upstream.

        Raises:
            TypeError: `transform` is neither.
            ValueError: There is no seed, or it is negative.
            OverflowError: When read: the position is negative.

        Example:
            >>> ds = grain.MapDataset.range(3).random_map(lambda x, rng: x + rng.uniform(), seed=0)
            >>> [round(x, 3) for x in ds]
            [0.014, 1.288, 2.85]
        """
        return _after(self, plan.RandomMap.of, transform, seed)

    def seed(self, seed: int) -> MapDataset[T_co]:
        """Sets a seed that random stages downstream derive their own from, where they have none.

        What a stage derives depends on how many stages lie between: two shuffles have different
        orders, and a stage put in between changes those downstream of it.

        Args:
            seed: Any non-negative integer.

        Raises:
            ValueError: `seed` is negative.
            TypeError: `seed` is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(5).seed(1)
            >>> list(ds.shuffle()), list(ds.map(lambda x: x).shuffle())
            ([1, 4, 2, 3, 0], [3, 2, 4, 0, 1])
        """
        return _after(self, plan.Seed.of, seed)

    @overload
    def apply(
        self, transformations: transforms.MapWithIndexLike[T_co, S | None]
    ) -> MapDataset[S]: ...
    @overload
    def apply(self, transformations: transforms.FlatMapLike[T_co, S]) -> MapDataset[S]: ...
    @overload
    def apply(
        self,
        transformations: transforms.Batch | transforms.TfRandomMap | transforms.Transformations,
    ) -> MapDataset[Any]: ...
    @overload
    def apply(self, transformations: transforms.FilterLike[T_co]) -> MapDataset[T_co]: ...
    @overload
    def apply(self, transformations: transforms.MapLike[T_co, S | None]) -> MapDataset[S]: ...
    @overload
    def apply(self, transformations: transforms.RandomMapLike[T_co, S | None]) -> MapDataset[S]: ...
    def apply(self, transformations: Any) -> MapDataset[Any]:
        """Appends transforms that are given as objects.

        Args:
            transformations: One object of a class in `grainmill.transforms`, or several, which are
                applied in turn.

        Raises:
            NotImplementedError: An object is not of a known transform class.
            ValueError: As the method for an object raises it, such as `random_map` without a seed.

        Example:
            >>> class Double(grain.transforms.Map):
            ...     def map(self, element):
            ...         return element * 2
            >>> ds = grain.MapDataset.range(4).apply([Double(), grain.transforms.Batch(2)])
            >>> [batch.tolist() for batch in ds]
            [[0, 2], [4, 6]]
        """
        return apply_each(self, transformations)

    def _flat_map(self, transform: transforms.FlatMap) -> MapDataset[Any]:
        return _after(self, plan.FlatMap.of, transform)

    def pipe(
        self, func: Callable[Concatenate[Self, P], S], /, *args: P.args, **kwargs: P.kwargs
    ) -> S:
        """Returns `func(self, *args, **kwargs)`, so that functions of datasets can be chained.

        Args:
            func: A function whose first argument is a dataset.
            *args: Its further arguments.
            **kwargs: Its arguments by name.

        Example:
            >>> def first_half(ds):
            ...     return ds[: len(ds) // 2]
            >>> list(grain.MapDataset.range(6).pipe(first_half).map(str))
            ['0', '1', '2']
        """
        return func(self, *args, **kwargs)

    @overload
    def to_iter_dataset(
        self, read_options: ReadOptions | None = None, *, allow_nones: Literal[False] = False
    ) -> IterDataset[T_co]: ...
    @overload
    def to_iter_dataset(
        self, read_options: ReadOptions | None = None, *, allow_nones: bool
    ) -> IterDataset[T_co | None]: ...
    def to_iter_dataset(
        self, read_options: ReadOptions | None = None, *, allow_nones: bool = False
    ) -> IterDataset[Any]:
        """Reads one epoch in order, ahead of use.

        Elements come in the order of their positions, whatever the options. An exception raised by
        user code comes out at the place of its element. A saved state is
        `{"next_index": position}`.

        Args:
            read_options: How far ahead, on how many threads or in how many worker processes;
                `ReadOptions()` if `None`, except that nothing is computed ahead for a plain
                `range`.
            allow_nones: Whether dropped elements come out as `None` instead of not at all.

        Raises:
            TypeError: `read_options` are others than `ReadOptions`.

        Example:
            >>> ds = grain.MapDataset.range(4).filter(lambda x: x != 1)
            >>> list(ds.to_iter_dataset()), list(ds.to_iter_dataset(allow_nones=True))
            ([0, 2, 3], [0, None, 2, 3])
            >>> iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=2)))
            >>> next(iterator), next(iterator), iterator.get_state()
            (0, 2, {'next_index': 3})
        """
        node = node_of(self)
        if read_options is None:
            # Numbers cost nothing to make, so nothing is gained by making them ahead.
            numbers = isinstance(node, plan.Range)
            read_options = ReadOptions(prefetch_buffer_size=0) if numbers else ReadOptions()
        return PlannedIterDataset(
            sequential.read(node, read_options, allow_nones=allow_nones), (self,)
        )

    def _over(self, node: Any) -> MapDataset[T_co]:
        """This dataset where its node is replaced by `node`: on other parents, or a slice of it."""
        if isinstance(node, plan.UserDefined):
            copied: MapDataset[T_co] = node.dataset
            return copied
        return PlannedMapDataset(node, (self,))

    def _plan_node(self) -> Node:
        parents = [node_of(parent) for parent in self.parents]
        return plan.UserDefined.of(self, parents, with_parents)

    def __str__(self) -> str:
        return str(self._plan_node())


class PlannedMapDataset(MapDataset[T_co]):
    """A dataset that is a plan."""

    def __init__(self, node: Node, parents: Sequence[MapDataset[Any]] = ()) -> None:
        super().__init__(parents)
        self._node = random_access(node)
        if node.added_at is None:
            node.set_added_at(line_of_user())
        self._program: Program | None = None

    def _over(self, node: Any) -> MapDataset[T_co]:
        if node is self._node:
            return self
        if self._node in node.parents:
            return PlannedMapDataset(node, (self,))
        copied: PlannedMapDataset[T_co] = with_node(self, node)
        copied._program = None
        return copied

    def _plan_node(self) -> Node:
        return self._node

    def __len__(self) -> int:
        return self._node.length

    @overload
    def __getitem__(self, index: slice) -> MapDataset[T_co]: ...
    @overload
    def __getitem__(self, index: int) -> T_co | None: ...
    def __getitem__(self, index: slice | int) -> MapDataset[T_co] | T_co | None:
        """Returns the element at `index`; see `MapDataset`."""
        if isinstance(index, slice):
            return self.slice(index)
        index = checked_integer(index, "index")
        if self._node.length == 0:
            raise self._no_element(index)
        made = self._ready().run(index, 1)
        if made.failure is not None:
            raise made.failure
        return cast("T_co | None", made.elements[0])

    def _no_element(self, index: int) -> EmptyDatasetError:
        return EmptyDatasetError(
            f"{self} has no elements, so there is none at index {index}; check its source, and "
            "what slices and batches leave over"
        )

    def _ready(self) -> Program:
        if self._program is None:
            self._program = Program(self._node)
        return self._program

    def __getitems__(self, indices: Sequence[int]) -> list[T_co | None]:
        """Returns the elements at `indices`, made as one block."""
        chosen = np.asarray(indices)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise TypeError(f"`indices` must be integers, got {indices!r}")
        if chosen.size and self._node.length == 0:
            raise self._no_element(int(chosen[0]))
        made = self._ready().run_at(chosen.astype(np.int64))
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
