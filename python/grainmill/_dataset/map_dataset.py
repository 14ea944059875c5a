"""Datasets with random access."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, overload

import numpy as np

from grainmill._dataset import grain_classes
from grainmill._dataset.apply import apply_each
from grainmill._dataset.dataset import Dataset, Factories
from grainmill._dataset.element_types import D2, D, K, Leaf, S, SourceLike, T, T_co
from grainmill._dataset.iter_dataset import (
    IterDataset,
    PlannedIterDataset,
    node_of,
    nodes_of,
    with_node,
    with_parents,
)
from grainmill._dataset.shared_batches import SharedMemoryOutput
from grainmill._dataset.views import hints
from grainmill._dataset.views.user_stats import STATS
from grainmill._evaluate.compile import compiled
from grainmill._iterators.read import read
from grainmill._plan import random_access as plan
from grainmill._plan import transforms
from grainmill._plan.arguments import checked_integer
from grainmill._plan.node import random_access
from grainmill._plan.slicing import consecutive_share
from grainmill._plan.tracebacks import line_of_user

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from grainmill._dataset.iterator import DatasetIterator
    from grainmill._evaluate.program import Program
    from grainmill._plan.node import Node
    from grainmill._plan.options import ReadOptions


class EmptyDatasetError(IndexError, ZeroDivisionError):
    """An element of an empty dataset was requested; Grain raises a `ZeroDivisionError`."""


class MapDatasetFactories(Factories, abc.ABCMeta):
    """The factories of `MapDataset`: methods of the class, not of datasets."""

    def source(cls, source: SourceLike[T | None]) -> MapDataset[T]:
        """Makes a dataset of any object with `__len__` and `__getitem__`.

        Positions are taken modulo the object's length, so epochs follow each other; records that
        are `None` count as dropped. An object that has neither `__len__` nor `__iter__` is read at
        the requested positions, and its dataset is infinite.

        Args:
            source: Object to read by index, or several at once if it also has `__getitems__`.
                Several threads may read it at the same time; it is pickled for worker processes.

        Raises:
            TypeError: `source` has no `__getitem__`, is a class, has `__iter__` but no `__len__`,
                or its `__len__` raises one or returns no integer.

        Example:
            >>> ds = grain.MapDataset.source(["zero", "one", "two"])
            >>> len(ds), ds[1], ds[4]
            (3, 'one', 'one')
        """
        return SourceMapDataset(source)

    def range(cls, start: int, stop: int | None = None, step: int = 1) -> MapDataset[int]:
        """Makes a dataset of the integers of `range(start, stop, step)`, as Python's `int`.

        Args:
            start: The first integer; if `stop` is `None`, the end instead, and the first is 0.
            stop: The end (exclusive).
            step: The difference between consecutive integers, not 0.

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
        return SliceableMapDataset(plan.Range((), len(numbers), numbers))

    def mix(
        cls, datasets: Sequence[MapDataset[T]], weights: Sequence[float] | None = None
    ) -> MapDataset[T]:
        """Interleaves several datasets in fixed proportions.

        An epoch ends before the first of `datasets` would be exhausted; later positions continue
        the mixture, with each dataset in its next epochs. The order within each dataset is
        preserved, and its elements are spread evenly over the mixture. Weights are first scaled so
        that the smallest is 100, and truncated to integers: 0.3 and 0.7 become 100 and 233.

        There may be thousands of datasets: starting takes some microseconds for each, and if they
        have the same kinds of stages, the cost per element does not depend on their number. An
        order that repeats within a million positions is cached, in up to 12 MB. For weights whose
        order has a longer period, a shuffle downstream takes time proportional to the number of
        datasets; shuffle each dataset instead.

        Args:
            datasets: At least one, none of them empty.
            weights: A positive weight for each dataset, in any scale; equal weights if `None`.

        Raises:
            ValueError: There is no dataset, one is empty, the numbers of datasets and weights
                differ, or a weight is not positive.
            TypeError: A weight is not a number.

        Example:
            >>> ds = grain.MapDataset.mix(
            ...     [grain.MapDataset.range(4), grain.MapDataset.range(10, 20)], weights=[1, 2]
            ... )
            >>> list(ds)
            [0, 10, 11, 1, 12, 13, 2, 14, 15, 3, 16, 17]
        """
        return PlannedMapDataset(plan.Mix.of(nodes_of(datasets), weights))

    def select_from_datasets(
        cls, datasets: Sequence[MapDataset[T]], selection_map: transforms.DatasetSelectionMap
    ) -> MapDataset[T]:
        """Makes a dataset of the elements that `selection_map` selects from several datasets.

        Its length is that of `selection_map`. Positions beyond it, or negative ones, are passed to
        `selection_map` unchanged.

        Args:
            datasets: The datasets; `selection_map` refers to them by their index in this sequence.
            selection_map: Returns, for an index, the number of a dataset and an index in it.

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
        return PlannedMapDataset(plan.Select.of(nodes_of(datasets), selection_map))

    def concatenate(cls, datasets: Sequence[MapDataset[T]]) -> MapDataset[T]:
        """Concatenates several datasets; epoch `n` consists of the `n`-th epoch of each.

        There may be thousands of datasets: starting takes some microseconds for each, and if they
        have the same kinds of stages, the cost per element does not depend on their number.

        Args:
            datasets: At least one, none of them infinite.

        Raises:
            ValueError: There is no dataset, or one is infinite.

        Example:
            >>> datasets = [grain.MapDataset.range(2), grain.MapDataset.range(7, 9)]
            >>> list(grain.MapDataset.concatenate(datasets))
            [0, 1, 7, 8]
        """
        return PlannedMapDataset(plan.Concatenate(nodes_of(datasets), 0))


class MapDataset(Dataset, grain_classes.MapDataset, Generic[T_co], metaclass=MapDatasetFactories):
    """A sequence of elements computed by position; nothing is read before it is requested.

    A dataset is immutable: each method returns a new one. `ds[i]` is an element, `None` if a filter
    or a map dropped it; `ds[a:b:c]` is a dataset. `len(ds)` is the number of elements of one epoch,
    dropped ones included, and `sys.maxsize` for an infinite dataset. Larger positions belong to the
    next epochs, in which shuffles and random maps differ; negative positions belong to epochs
    before the first. Iterating reads one epoch, as `to_iter_dataset()` does, and skips dropped
    elements.

    `MapDataset.source` and `MapDataset.range` make datasets of records or integers;
    `MapDataset.mix`, `MapDataset.concatenate` and `MapDataset.select_from_datasets` combine
    several.

    Derive from it to write a stage of your own: call `super().__init__(parent)` and define
    `__len__` and `__getitem__`, which reads `self._parent`. Threads may call `__getitem__` at the
    same time.

    Args:
        parents: The dataset, or datasets, that it reads elements from.

    Example:
        >>> ds = grain.MapDataset.range(10).shuffle(seed=42).map(lambda x: x * 2).batch(4)
        >>> [batch.tolist() for batch in ds]
        [[16, 12, 14, 18], [0, 10, 2, 4], [8, 6]]
        >>> len(ds), ds[0].tolist(), ds[3].tolist()  # position 3 is the first of the second epoch
        (3, [16, 12, 14, 18], [4, 0, 18, 2])

        A stage of your own:

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

    _shown_kind = "MapDataset"
    _stats = STATS

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of elements in an epoch, dropped ones included."""

    @overload
    def __getitem__(self, index: slice) -> MapDataset[T_co]: ...
    @overload
    def __getitem__(self, index: int) -> T_co | None: ...
    @abc.abstractmethod
    def __getitem__(self, index: slice | int) -> MapDataset[T_co] | T_co | None:
        """Returns the element at `index`, `None` if it was dropped; for a slice, a dataset.

        Args:
            index: A position, which grows over epochs, or a slice of each epoch (see `slice`).
        """

    def __iter__(self) -> DatasetIterator[T_co]:
        return self.to_iter_dataset().__iter__()

    # `Any` within the elements matches `Never`, so these overloads come first.
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[list[T_co]], S]
    ) -> MapDataset[S]: ...
    @overload
    def batch(
        self: MapDataset[Never], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[Any]: ...
    @overload
    def batch(
        self: MapDataset[NDArray[D]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[NDArray[D]]: ...
    @overload
    def batch(
        self: MapDataset[Leaf], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[NDArray[Any]]: ...
    @overload
    def batch(
        self: MapDataset[Mapping[K, Never]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: MapDataset[dict[K, object]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: MapDataset[dict[K, NDArray[D]]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[dict[K, NDArray[D]]]: ...
    @overload
    def batch(
        self: MapDataset[Mapping[K, Leaf]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[dict[K, NDArray[Any]]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[Never, object]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[object, Never]], batch_size: int, *, drop_remainder: bool = False
    ) -> MapDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[NDArray[D], NDArray[D2]]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
    ) -> MapDataset[tuple[NDArray[D], NDArray[D2]]]: ...
    @overload
    def batch(
        self: MapDataset[tuple[Leaf, Leaf]], batch_size: int, *, drop_remainder: bool = False
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

        Elements are pytrees (dicts, tuples, lists and types registered with JAX) of the same
        structure; the leaves are stacked as by `numpy.stack`. Arrays of shape `(...)` become one
        of shape `(batch_size, ...)` and the same dtype; Python numbers become an int64, float64
        or bool array of shape `(batch_size,)`, `str` one of dtype `<U`, and `bytes` one of `S`. If
        JAX is installed, dicts get sorted keys. The arrays of a batch are new: later batches do not
        overwrite them.

        Do not write to an element's arrays on another thread before its batch is returned: the
        batch may contain a mixture of old and new values.

        Batches never mix epochs: an epoch's last batch may be shorter. Call `repeat` first to fill
        it from the next epoch.

        Args:
            batch_size: Elements per batch, at least 1.
            drop_remainder: Whether to drop an epoch's last, shorter batch. Set it under `jax.jit`,
                which compiles again for each new shape.
            batch_fn: Function that makes a batch from a list of elements, in place of stacking.

        Raises:
            ValueError: `batch_size` is not positive, or a stage upstream may drop elements, so that
                batches would differ in length. Batch after `to_iter_dataset` instead. When read:
                elements differ in structure or shape.
            TypeError: `batch_size` is not an integer, or `batch_fn` is not callable.

        Example:
            >>> [batch.shape for batch in grain.MapDataset.range(10).batch(4)]
            [(4,), (4,), (2,)]
            >>> ds = grain.MapDataset.source([{"x": np.zeros(3), "y": 1}] * 8)
            >>> {name: array.shape for name, array in ds.batch(4)[0].items()}
            {'x': (4, 3), 'y': (4,)}
        """
        node = plan.Batch.after(node_of(self), batch_size, drop_remainder, batch_fn)
        return BatchMapDataset(node, (self,))

    def filter(
        self, transform: transforms.FilterLike[T_co] | Callable[[T_co], bool | np.bool_]
    ) -> MapDataset[T_co]:
        """Drops the elements for which `transform` is false: they become `None`.

        Positions and `len` do not change; iterating skips dropped elements. `transform` is not
        called for elements that are `None` already.

        Args:
            transform: A function of an element that returns whether to keep it, or a
                `transforms.Filter`.

        Raises:
            TypeError: `transform` is neither.
            ValueError: When read, if `DatasetOptions.filter_raise_threshold_ratio` is set: too
                many elements were dropped.

        Example:
            >>> ds = grain.MapDataset.range(6).filter(lambda x: x % 2 == 0)
            >>> list(ds), ds[1], len(ds)
            ([0, 2, 4], None, 6)
        """
        return _after(self, plan.Filter.of, transform)

    def shuffle(self, seed: int | None = None) -> MapDataset[T_co]:
        """Shuffles each epoch, in a different order.

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
        """Selects a slice, or listed indices, of every epoch; `ds[a:b:c]` does the same.

        Downstream of a shuffle, epochs have different elements, since the slice is taken from the
        shuffled order. `ds[index::count]` is the shard of process `index` of `count`.

        Args:
            sl: A slice, as for a list; or a sequence of indices, of which a negative one refers to
                the previous epoch and is not counted from the end.

        Raises:
            ValueError: `sl` is neither a slice nor a sequence.
            TypeError: An index is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(10)
            >>> list(ds[1::4]), list(ds.slice([3, 3, 0]))
            ([1, 5, 9], [3, 3, 0])
        """
        if isinstance(sl, slice):
            return _after(self, plan.Slice.of, sl)
        return _after(self, plan.Take.of, sl)

    def cache(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ram_budget_bytes: int | None = None,
    ) -> MapDataset[T_co]:
        """Computes each element once, and takes it from memory or from files afterwards.

        Elements are stored as they are requested, in any order, by any number of threads and
        processes; what is not stored is computed. Every epoch has the elements of the first one, so
        put what differs between epochs (random maps, shuffles) downstream. Elements are copied, so
        changing one does not change the cache, and must be picklable.

        In memory, the elements that come first are kept until they take `ram_budget_bytes`; worker
        processes share them. In files, elements stay for later runs. Each pipeline has a directory
        below `path`, named by a fingerprint of its stages, the code of its functions and its files;
        so when one of these changes, a new cache is made, and a warning says what has changed.
        Files of killed processes and half-written ones are never used. Reading a cache runs
        `pickle`, so `path` must be as trustworthy as a program.

        Args:
            path: A directory of the local file system, which is created; in memory if `None`.
            ram_budget_bytes: The most memory that the elements may take, a quarter of the memory
                that this process may use if `None`. Only without `path`.

        Raises:
            ValueError: The dataset is endless, `path` is a URL or empty, both arguments are given,
                or the budget is not positive. When read: the cache is damaged.
            TypeError: An argument has another type. When read: an element cannot be pickled.
            OSError: When read: `path` cannot be written to.

        Example:
            >>> calls = []
            >>> ds = grain.MapDataset.range(4).map(lambda x: calls.append(x) or x * x)
            >>> ds = ds.cache().shuffle(seed=1).repeat(3)
            >>> len(list(ds)), len(calls)
            (12, 4)
        """
        from grainmill._cache.make import element_store  # noqa: PLC0415

        return _after(self, plan.Cache.of, element_store(path, ram_budget_bytes))

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> MapDataset[T_co]:
        """Repeats the dataset: several epochs become one.

        Args:
            num_epochs: Number of epochs; infinite if `None`.
            reseed_each_epoch: Whether shuffles and random maps upstream differ in each of them.

        Raises:
            ValueError: `num_epochs` is not positive, or the dataset is infinite already.
            TypeError: `num_epochs` is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(4).repeat(2)
            >>> list(ds), [batch.tolist() for batch in ds.batch(3)]
            ([0, 1, 2, 3, 0, 1, 2, 3], [[0, 1, 2], [3, 0, 1], [2, 3]])
        """
        return _after(self, plan.Repeat.after, num_epochs, reseed_each_epoch=reseed_each_epoch)

    def map(
        self, transform: transforms.MapLike[T_co, S | None] | Callable[[T_co], S | None]
    ) -> MapDataset[S]:
        """Replaces every element by `transform(element)`.

        `transform` is not called for elements that are `None`; if it returns `None`, the element is
        dropped. Several threads may call it at the same time.

        An exception of `transform` reaches the consumer unchanged, with notes on the element:

            ValueError: no tokens
            while computing element 5060 of `MapMapDataset(transform=decode @ a.py:3)` at a.py:12
              from record 34 of train-00003.array_record (epoch 2)

        Args:
            transform: A function of an element, or a `transforms.Map`.

        Raises:
            TypeError: `transform` is neither. Exceptions of `transform` are raised when the element
                is requested.

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

        `transform` is not called for elements that are `None`; if it returns `None`, the element is
        dropped.

        Args:
            transform: A function of a position and an element, or a `transforms.MapWithIndex`. The
                position is that requested from this stage: in the second epoch it continues from
                `len(ds)`.

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

        Random numbers depend only on the seed and on the position requested from this stage, not on
        the order in which elements are computed. So they differ between epochs; upstream of a
        shuffle they belong to a record, downstream of it to a position in the shuffled order.
        `transform` is not called for elements that are `None`.

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
        """Sets a seed from which random stages downstream derive theirs, if they are given none.

        A derived seed depends on the number of stages between: two shuffles have different orders,
        and inserting a stage changes the orders of those downstream of it.

        Args:
            seed: Any non-negative integer; with `None`, seeds upstream stay in effect.

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
        """Appends transform objects.

        Args:
            transformations: One object of a class in `grainmill.transforms`, or several, which are
                applied in turn.

        Raises:
            NotImplementedError: An object is not of a known transform class.
            ValueError: As raised by the method for an object, such as `random_map` without a seed.

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
        return _after(self, plan.FlatMap.after, transform)

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
        """Reads one epoch in order, and prefetches.

        Elements are delivered in the order of their positions, whatever the options. An exception
        in user code is raised when its element is requested. A saved state is
        `{"next_index": position}`.

        Args:
            read_options: Size of the prefetch buffer, and numbers of threads or worker processes;
                `ReadOptions()` if `None`, except that nothing is prefetched for a plain `range`.
            allow_nones: Whether to deliver dropped elements as `None` instead of skipping them.

        Raises:
            TypeError: `read_options` is not a `ReadOptions`.

        Example:
            >>> ds = grain.MapDataset.range(4).filter(lambda x: x != 1)
            >>> list(ds.to_iter_dataset()), list(ds.to_iter_dataset(allow_nones=True))
            ([0, 2, 3], [0, None, 2, 3])
            >>> iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=2)))
            >>> next(iterator), next(iterator), iterator.get_state()
            (0, 2, {'next_index': 3})
        """
        node = read(node_of(self), read_options, allow_nones=allow_nones)
        return PlannedIterDataset(node, (self,))

    def _over(self, node: Any) -> MapDataset[T_co]:
        """A dataset with `node`, which is this one's node on other parents, or a slice of it."""
        if isinstance(node, plan.UserDefined):
            copied: MapDataset[T_co] = node.dataset
            return copied
        return PlannedMapDataset(node, (self,))

    def _plan_node(self) -> Node:
        return plan.UserDefined.of(self, nodes_of(self.parents), with_parents)


if not TYPE_CHECKING:  # type checkers say so themselves
    MapDataset.__getattr__ = lambda self, name: hints.attribute(
        self, name, hints.MAP, "a `MapDataset`"
    )


class PlannedMapDataset(MapDataset[T_co]):
    """A dataset defined by a plan."""

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
        if type(index) is not int:
            index = checked_integer(index, "index")
        if self._node.length == 0:
            raise self._no_element(index)
        block = (self._program or self._compiled()).run(index, 1)
        if block.failure is not None:
            raise block.failure
        element: T_co | None = block.elements[0]
        return element

    def _no_element(self, index: int) -> EmptyDatasetError:
        return EmptyDatasetError(
            f"{self} has no elements, so index {index} is out of range; check the length of its "
            "source, and that slices and batches leave elements"
        )

    def _compiled(self) -> Program:
        if self._program is None:
            self._program = compiled(self._node)
        return self._program

    def __getitems__(self, indices: Sequence[int]) -> list[T_co | None]:
        """Returns the elements at `indices`, computed as one block."""
        chosen = np.asarray(indices)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise TypeError(f"`indices` must be integers, got {indices!r}")
        if chosen.size and self._node.length == 0:
            raise self._no_element(int(chosen[0]))
        block = self._compiled().run_at(chosen.astype(np.int64))
        if block.failure is not None:
            raise block.failure
        return block.elements

    def __repr__(self) -> str:
        # Grain's text of a mixture, which may be in states of a `DataLoader`.
        return repr(self._node) if isinstance(self._node, plan.Mix) else self._stages_shown()

    def _identity(self) -> str:
        """The text that identifies it in the state of a `DataLoader`, where it is the source."""
        if isinstance(self._node, plan.Mix):
            return repr(self._node)
        return f"<{type(self).__module__}.{self}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_program": None}


class SliceableMapDataset(PlannedMapDataset[T_co]):
    """A source or a range, which can be restricted to a share of its elements."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._whole = self._node

    def set_slice(
        self,
        sl: slice,
        sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> None:
        """Restricts this dataset, in place, to one of several consecutive shares of its elements.

        A second call replaces the first. Datasets already derived from this one do not change.

        Args:
            sl: `slice(index, None, count)` for share `index` of `count`.
            sequential_slice: Must be true: the other kind of slice is `ds[index::count]`.

        Raises:
            AssertionError: `sequential_slice` is false.
            ValueError: There is no share `index`.
        """
        if not sequential_slice:
            kind = " for RangeMapDataset" if isinstance(self._whole, plan.Range) else ""
            raise AssertionError(f"Only sequential slicing is supported{kind}.")
        self._node = consecutive_share(self._whole, sl)
        self._program = None


class SourceMapDataset(SliceableMapDataset[T_co]):
    """The records of a source; programs look for these datasets in a pipeline."""

    def __init__(self, source: SourceLike[T_co | None]) -> None:
        super().__init__(plan.Source.of(source))
        self._source = source


class BatchMapDataset(SharedMemoryOutput, PlannedMapDataset[T_co]):
    """What `MapDataset.batch` returns."""


def _after(
    dataset: MapDataset[Any], make: Callable[..., Node], *args: Any, **kw: Any
) -> PlannedMapDataset[Any]:
    return PlannedMapDataset(make(node_of(dataset), *args, **kw), (dataset,))


for _kind in (PlannedMapDataset, SliceableMapDataset):
    _kind.__name__ = "MapDataset"  # in messages of Python
