"""Datasets whose elements are read in sequence."""

from __future__ import annotations

import abc
import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Never, overload

from grainmill._dataset import grain_classes
from grainmill._dataset.apply import apply_each
from grainmill._dataset.dataset import Dataset, Factories
from grainmill._dataset.elastic.shard_states import InterleaveDatasetIterator
from grainmill._dataset.element_types import D2, D, K, Leaf, S, T, T_co
from grainmill._dataset.iterator import DatasetIterator, PipelineDatasetIterator, iterator_over
from grainmill._dataset.shared_batches import SharedMemoryOutput
from grainmill._dataset.views import hints
from grainmill._iterators.batch import Batch
from grainmill._iterators.elementwise import Filter, Map, MapWithIndex, RandomMap
from grainmill._iterators.flat_map import FlatMap
from grainmill._iterators.mix import Mix
from grainmill._iterators.settings import Seed
from grainmill._iterators.stored_cache import StoredCache
from grainmill._iterators.user_defined import UserDefined
from grainmill._iterators.workers.worker_shards import MultiprocessPrefetch
from grainmill._plan.arguments import checked_integer
from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill._plan.slicing import check_sliceable
from grainmill._plan.tracebacks import line_of_user

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._plan import transforms
    from grainmill._plan.node import Node


class IterDatasetFactories(Factories, abc.ABCMeta):
    """The factories of `IterDataset`: methods of the class, not of datasets."""

    def mix(
        cls,
        datasets: Sequence[AnyDataset[T]] | Mapping[str, AnyDataset[T]],
        weights: Sequence[float] | Mapping[str, float] | None = None,
    ) -> IterDataset[T]:
        """Interleaves several datasets in fixed proportions, until the next one in turn ends.

        The order of turns is that of `MapDataset.mix`. A saved state contains the states of all
        datasets. Exceptions raised in a dataset get a note with the dataset's name or number.

        Args:
            datasets: At least one. If it is a mapping, datasets are ordered by name and a saved
                state refers to them by name; on restore, datasets that the state does not contain
                start at their first element.
            weights: A positive weight for each dataset, by name if `datasets` is a mapping; equal
                weights if `None`.

        Raises:
            ValueError: There is no dataset, a weight is missing, or a weight is not positive.
            TypeError: A weight is not a number.

        Example:
            >>> parts = [grain.MapDataset.range(3), grain.MapDataset.range(10, 20)]
            >>> parts = [part.to_iter_dataset() for part in parts]
            >>> list(grain.IterDataset.mix(parts, weights=[1, 2]))
            [0, 10, 11, 1, 12, 13, 2, 14, 15]
        """
        nodes: Any = (
            {name: node_of(dataset) for name, dataset in datasets.items()}
            if isinstance(datasets, Mapping)
            else nodes_of(datasets)
        )
        node = Mix.of(nodes, weights)
        keys: Any = range(len(datasets)) if node.names is None else node.names
        return PlannedIterDataset(node, [datasets[key] for key in keys])


class IterDataset(
    Dataset,
    Iterable[T_co],
    grain_classes.IterDataset,
    Generic[T_co],
    metaclass=IterDatasetFactories,
):
    """A sequence of elements that is iterated over from its start, or from a saved position.

    A dataset is immutable: each method returns a new one. Each iteration starts at the first
    element; the iterator (`DatasetIterator`) saves its position with `get_state` and continues from
    a saved one with `set_state`. `MapDataset.to_iter_dataset` converts a dataset with random
    access, and `IterDataset.mix` mixes several. Stages and functions that take an `IterDataset`
    also take a `MapDataset`, and read it as `to_iter_dataset()` does.

    Derive from it to write a stage of your own: call `super().__init__(parent)` and define
    `__iter__`, which returns a `DatasetIterator` over `self._parent.__iter__()`.

    Args:
        parents: The dataset, or datasets, that it reads elements from.

    Example:
        >>> ds = grain.MapDataset.range(6).to_iter_dataset().filter(lambda x: x % 3).batch(2)
        >>> iterator = iter(ds)
        >>> next(iterator).tolist()
        [1, 2]
        >>> state = iterator.get_state()
        >>> restored = iter(ds)
        >>> restored.set_state(state)
        >>> next(restored).tolist()
        [4, 5]
    """

    _shown_kind = "IterDataset"

    @abc.abstractmethod
    def __iter__(self) -> DatasetIterator[T_co]:
        """Returns a new iterator that starts at the first element."""

    # `Any` within the elements matches `Never`, so these overloads come first.
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[list[T_co]], S]
    ) -> IterDataset[S]: ...
    @overload
    def batch(
        self: IterDataset[Never], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[Any]: ...
    @overload
    def batch(
        self: IterDataset[NDArray[D]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[NDArray[D]]: ...
    @overload
    def batch(
        self: IterDataset[Leaf], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[NDArray[Any]]: ...
    @overload
    def batch(
        self: IterDataset[Mapping[K, Never]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: IterDataset[dict[K, object]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[dict[K, Any]]: ...
    @overload
    def batch(
        self: IterDataset[dict[K, NDArray[D]]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[dict[K, NDArray[D]]]: ...
    @overload
    def batch(
        self: IterDataset[Mapping[K, Leaf]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[dict[K, NDArray[Any]]]: ...
    @overload
    def batch(
        self: IterDataset[tuple[Never, object]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: IterDataset[tuple[object, Never]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[tuple[Any, Any]]: ...
    @overload
    def batch(
        self: IterDataset[tuple[NDArray[D], NDArray[D2]]],
        batch_size: int,
        *,
        drop_remainder: bool = False,
    ) -> IterDataset[tuple[NDArray[D], NDArray[D2]]]: ...
    @overload
    def batch(
        self: IterDataset[tuple[Leaf, Leaf]], batch_size: int, *, drop_remainder: bool = False
    ) -> IterDataset[tuple[NDArray[Any], NDArray[Any]]]: ...
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None
    ) -> IterDataset[Any]: ...
    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[list[Any]], Any] | None = None,
    ) -> IterDataset[Any]:
        """Stacks `batch_size` consecutive elements along a new leading axis.

        Elements are stacked as in `MapDataset.batch`: arrays of shape `(...)` become one of shape
        `(batch_size, ...)` and the same dtype. A saved state refers to the end of a batch.

        Do not write to an element's arrays on another thread before its batch is returned: the
        batch may contain a mixture of old and new values.

        Args:
            batch_size: Elements per batch, at least 1.
            drop_remainder: Whether to drop a last, shorter batch. Set it under `jax.jit`, which
                compiles again for each new shape.
            batch_fn: Function that makes a batch from a list of elements, in place of stacking.

        Raises:
            ValueError: `batch_size` is not positive. When read: elements differ in structure or
                shape.
            TypeError: `batch_size` is not an integer, or `batch_fn` is not callable.

        Example:
            >>> ds = grain.MapDataset.range(5).to_iter_dataset()
            >>> [batch.tolist() for batch in ds.batch(2)]
            [[0, 1], [2, 3], [4]]
            >>> list(ds.batch(2, drop_remainder=True, batch_fn=sum))
            [1, 5]
        """
        node = Batch.after(node_of(self), batch_size, drop_remainder, batch_fn)
        return BatchIterDataset(node, (self,))

    def filter(
        self, transform: transforms.FilterLike[T_co] | Callable[[T_co], bool | np.bool_]
    ) -> IterDataset[T_co]:
        """Drops the elements for which `transform` is false.

        A warning is logged if 90 % of 1000 consecutive elements are dropped; see
        `experimental.DatasetOptions`.

        Args:
            transform: A function of an element that returns whether to keep it, or a
                `transforms.Filter`. It is also called for elements that are `None`.

        Raises:
            TypeError: `transform` is neither.
            ValueError: When read, if `DatasetOptions.filter_raise_threshold_ratio` is set: too
                many elements were dropped.

        Example:
            >>> list(grain.MapDataset.range(6).to_iter_dataset().filter(lambda x: x % 2))
            [1, 3, 5]
        """
        return after(self, Filter.of, transform)

    def map(self, transform: transforms.MapLike[T_co, S] | Callable[[T_co], S]) -> IterDataset[S]:
        """Replaces every element by `transform(element)`.

        `transform` is called when its element is requested, in the order of the elements. It is not
        called for elements that are `None`, which stay `None`; if it returns `None`, that is an
        element like any other.

        Args:
            transform: A function of an element, or a `transforms.Map`.

        Raises:
            TypeError: `transform` is neither.

        Example:
            >>> list(grain.MapDataset.range(3).to_iter_dataset().map(lambda x: x * x))
            [0, 1, 4]
        """
        return after(self, Map.of, transform)

    def map_with_index(
        self,
        transform: transforms.MapWithIndexLike[T_co, S] | Callable[[int, T_co], S],
    ) -> IterDataset[S]:
        """Replaces every element by `transform(number, element)`.

        `transform` is not called for elements that are `None`; they stay `None`, and are counted.

        Args:
            transform: A function of a number and an element, or a `transforms.MapWithIndex`.
                Numbers count the elements of an iterator from 0, and are part of a saved state;
                each worker of `mp_prefetch` counts its own elements.

        Raises:
            TypeError: `transform` is neither.

        Example:
            >>> ds = grain.MapDataset.range(6).to_iter_dataset().filter(lambda x: x % 2)
            >>> list(ds.map_with_index(lambda number, x: (number, x)))
            [(0, 1), (1, 3), (2, 5)]
        """
        return after(self, MapWithIndex.of, transform)

    def random_map(
        self,
        transform: transforms.RandomMapLike[T_co, S] | Callable[[T_co, np.random.Generator], S],
        *,
        seed: int | None = None,
    ) -> IterDataset[S]:
        """Replaces every element by `transform(element, rng)`.

        Random numbers depend only on the seed and on the element's number, counted from 0 in an
        iterator. Workers of `mp_prefetch` draw the same numbers as without workers, unless a stage
        upstream drops or joins elements. `transform` is not called for elements that are `None`;
        they stay `None`, and are counted.

        Args:
            transform: A function of an element and a `numpy.random.Generator` (Philox, keyed by the
                seed, its counter set to the number), or a `transforms.RandomMap`.
            seed: Any non-negative integer; if `None`, derived from `ds.seed(...)` upstream.

        Raises:
            TypeError: `transform` is neither.
            ValueError: There is no seed, or it is negative. Seeds set upstream of `mp_prefetch`,
                `multithread_prefetch` or `InterleaveIterDataset` are not used.

        Example:
            >>> ds = grain.MapDataset.range(3).to_iter_dataset()
            >>> [round(x, 3) for x in ds.random_map(lambda x, rng: x + rng.uniform(), seed=0)]
            [0.014, 1.288, 2.85]
        """
        return after(self, RandomMap.of, transform, seed)

    def cache(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ram_budget_bytes: int | None = None,
    ) -> IterDataset[T_co]:
        """Stores the elements of the first pass, from which later passes take them.

        A later pass is a new iterator over the same dataset, or the next epoch of
        `RepeatIterDataset` downstream. Elements are copied, so changing one does not change the
        cache, and must be picklable.

        In memory, the first elements are kept, up to `ram_budget_bytes`; those after them are read
        again in each pass. In files, the first pass from the start to the end writes the cache, for
        later runs, too; one that stops before leaves nothing. As with `MapDataset.cache`, it is
        found only by the same pipeline, half-written files are never used, and `path` must be
        trustworthy. Workers of `mp_prefetch` downstream each cache their share.

        A restored iterator continues at once from the state of its parent, or from the cache. Only
        if the state was saved while reading a cache that is gone does it read the parent again from
        its start.

        Args:
            path: A directory of the local file system, which is created; in memory if `None`.
            ram_budget_bytes: The most memory that the elements may take, a quarter of the memory
                that this process may use if `None`. Only without `path`.

        Raises:
            ValueError: `path` is a URL or empty, both arguments are given, or the budget is not
                positive. When read: the cache is damaged.
            TypeError: An argument has another type. When read: an element cannot be pickled.
            OSError: When read: `path` cannot be written to.

        Example:
            >>> calls = []
            >>> ds = grain.MapDataset.range(4).to_iter_dataset()
            >>> ds = ds.filter(lambda x: calls.append(x) or x % 2).cache()
            >>> list(ds), list(ds), calls
            ([1, 3], [1, 3], [0, 1, 2, 3])
        """
        from grainmill._cache.make import sequence_store  # noqa: PLC0415

        return after(self, StoredCache.of, sequence_store(path, ram_budget_bytes))

    def seed(self, seed: int) -> IterDataset[T_co]:
        """Sets a seed from which random stages downstream derive theirs, if they are given none.

        A derived seed depends on the number of stages between: inserting a stage changes the random
        numbers of the stages downstream of it.

        Args:
            seed: Any non-negative integer; with `None`, seeds upstream stay in effect.

        Raises:
            ValueError: `seed` is negative.
            TypeError: `seed` is not an integer.

        Example:
            >>> ds = grain.MapDataset.range(3).to_iter_dataset().seed(1)
            >>> [round(x, 3) for x in ds.random_map(lambda x, rng: x + rng.uniform())]
            [0.692, 1.864, 2.226]
        """
        return after(self, Seed.of, seed)

    @overload
    def apply(
        self,
        transformations: transforms.Batch | transforms.TfRandomMap | transforms.Transformations,
    ) -> IterDataset[Any]: ...
    @overload
    def apply(self, transformations: transforms.FilterLike[T_co]) -> IterDataset[T_co]: ...
    @overload
    def apply(self, transformations: transforms.MapLike[T_co, S]) -> IterDataset[S]: ...
    @overload
    def apply(self, transformations: transforms.RandomMapLike[T_co, S]) -> IterDataset[S]: ...
    @overload
    def apply(self, transformations: transforms.MapWithIndexLike[T_co, S]) -> IterDataset[S]: ...
    @overload
    def apply(self, transformations: transforms.FlatMapLike[T_co, S]) -> IterDataset[S]: ...
    def apply(self, transformations: Any) -> IterDataset[Any]:
        """Appends transform objects.

        Args:
            transformations: One object of a class in `grainmill.transforms`, or several, which are
                applied in turn.

        Raises:
            NotImplementedError: An object is not of a known transform class.
            ValueError: As raised by the method for an object, such as `random_map` without a seed.

        Example:
            >>> ds = grain.MapDataset.range(4).to_iter_dataset()
            >>> [batch.tolist() for batch in ds.apply([grain.transforms.Batch(3)])]
            [[0, 1, 2], [3]]
        """
        return apply_each(self, transformations)

    def _flat_map(self, transform: transforms.FlatMap) -> IterDataset[Any]:
        return after(self, FlatMap.of, transform)

    def mp_prefetch(
        self,
        options: MultiprocessingOptions | None = None,
        worker_init_fn: Callable[[int, int], None] | None = None,
        sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> IterDataset[T_co]:
        """Prefetches elements in worker processes.

        Every worker runs all stages upstream on a share of the elements: where a `MapDataset` is
        converted by `to_iter_dataset`, it reads every `num_workers`-th element. So stages of an
        `IterDataset` (batches, filters, packing, limits) apply to each worker's share, and both the
        elements and a saved state depend on the number of workers. Elements are taken from the
        workers in turn; if stages neither drop nor join elements, the order is the same as without
        workers. `ReadOptions.num_workers` runs the functions of a `MapDataset` in processes, and
        changes neither elements nor states.

        Workers start when the first element is requested, or at `start_prefetch`. Functions and
        sources are sent to them by cloudpickle; no `if __name__ == "__main__"` is needed. JAX uses
        the CPU in workers (`ReadOptions.worker_init_fn` says how to change that), and
        `jax.distributed.initialize` has no effect there.

        Args:
            options: Number of workers and buffer sizes; 10 workers if `None`. With 0 workers, this
                dataset is returned.
            worker_init_fn: Called in each worker with its number and the number of workers, before
                it computes anything. On free-threaded Python, workers are threads, each of which
                calls it.
            sequential_slice: Whether a worker reads a range of consecutive elements of each source
                instead, split upstream of any shuffle.

        Raises:
            TypeError: `options` is not a `MultiprocessingOptions`.
            ValueError: An option is out of range, a source cannot be split among workers, or
                there is an `mp_prefetch` upstream already.
            WorkerError: When read: a worker died, or raised an exception that cannot be pickled.
                Other exceptions are raised unchanged, after the elements before them.

        Example:
            >>> ds = grain.MapDataset.range(7).to_iter_dataset().batch(2)
            >>> ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
            >>> [batch.tolist() for batch in ds]
            [[0, 2], [1, 3], [4, 6], [5]]
        """
        options = MultiprocessingOptions(num_workers=10) if options is None else options
        if not isinstance(options, MultiprocessingOptions):
            raise TypeError(f"`options` must be a `MultiprocessingOptions`, got {options!r}")
        if not checked_integer(options.num_workers, "num_workers"):
            return self
        node = after(
            self,
            MultiprocessPrefetch.of,
            options,
            worker_init_fn,
            sequential_slice=sequential_slice,
        )
        check_sliceable(node_of(self), options.num_workers, sequential=sequential_slice)
        return node

    def prefetch(self, multiprocessing_options: MultiprocessingOptions) -> IterDataset[T_co]:
        """Prefetches elements in worker processes; the deprecated name of `mp_prefetch`.

        Args:
            multiprocessing_options: See `mp_prefetch`.

        Raises:
            TypeError: See `mp_prefetch`.
            ValueError: See `mp_prefetch`.
        """
        warnings.warn(
            "`prefetch` is deprecated, use `mp_prefetch` instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.mp_prefetch(multiprocessing_options)

    def _over(self, node: Any) -> IterDataset[T_co]:
        """A copy of this dataset with `node`, which is its node on other parents."""
        copied: IterDataset[T_co] = node.dataset
        return copied

    def _plan_node(self) -> Node:
        return UserDefined(nodes_of(self.parents), self, with_parents)


if not TYPE_CHECKING:  # type checkers say so themselves
    IterDataset.__getattr__ = lambda self, name: hints.attribute(
        self, name, hints.ITER, "an `IterDataset`"
    )
    # No `__len__` with a hint: a class with one is `Sized`, and packages ask for lengths of those.
    IterDataset.__getitem__ = hints.Missing(hints.ITER_INDEX)


class PlannedIterDataset(IterDataset[T_co]):
    """A dataset defined by a plan."""

    def __init__(self, node: Node, parents: Sequence[Any] = ()) -> None:
        super().__init__(tuple(parents))
        if node.added_at is None:
            node.set_added_at(line_of_user())
        self._node = node

    def _plan_node(self) -> Node:
        return self._node

    def _over(self, node: Any) -> IterDataset[T_co]:
        copied: PlannedIterDataset[T_co] = with_node(self, node)
        return copied

    def __iter__(self) -> DatasetIterator[T_co]:
        kind = (
            InterleaveDatasetIterator
            if self._node.has_shares or self._node.opens is not None
            else PipelineDatasetIterator
        )
        return iterator_over(self._node, kind)

    def __repr__(self) -> str:
        return self._stages_shown()


PlannedIterDataset.__name__ = "IterDataset"  # in messages of Python


class BatchIterDataset(SharedMemoryOutput, PlannedIterDataset[T_co]):
    """What `IterDataset.batch` returns."""


def node_of(dataset: Any) -> Node:
    """The plan of `dataset`; a user's own dataset class is one opaque node."""
    if isinstance(dataset, type):
        name = dataset.__name__
        raise TypeError(f"expected a dataset, got the class `{name}`: did you mean `{name}(...)`?")
    make_node = getattr(dataset, "_plan_node", None)
    if make_node is None:
        raise TypeError(
            f"expected a dataset, got {dataset!r} of type {type(dataset).__name__}; "
            "`MapDataset.source(...)` converts a sequence to one"
        )
    node: Node = _NODES.once(dataset, make_node)
    return node


def nodes_of(datasets: Iterable[Any]) -> tuple[Node, ...]:
    """The plans of `datasets`; see `node_of`."""
    return tuple([node_of(dataset) for dataset in datasets])


class _Once(threading.local):
    """What was made of each dataset during one call: many ways may lead to the same one."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, Any]] | None = None

    def once(self, dataset: Any, make: Callable[[], Any], *others: Any) -> Any:
        """What `make` returns, also for further calls with `dataset` and `others` within it."""
        if self._made is None:
            self._made = {}
            try:
                return make()
            finally:
                self._made = None
        key = (id(dataset), *map(id, others))
        if key not in self._made:
            # They are held, so that the `id`s stay theirs.
            self._made[key] = make(), (dataset, others)
        return self._made[key][0]


_NODES = _Once()
_COPIES = _Once()


def with_parents(dataset: Any, parents: Sequence[Node]) -> Any:
    """A copy of a user's own dataset that reads elements from the plans `parents`."""
    changed = copy.copy(dataset)
    replaced = {
        id(old): _over(old, node) for old, node in zip(dataset.parents, parents, strict=True)
    }
    attributes = vars(changed)
    attributes["_parents"] = tuple(replaced[id(old)] for old in dataset.parents)
    # A class may also keep its parent in another attribute.
    for name, value in attributes.items():
        attributes[name] = replaced.get(id(value), value)
    return changed


def _over(dataset: Any, node: Node) -> Any:
    return _COPIES.once(dataset, lambda: dataset._over(node), node)  # noqa: SLF001 - of all datasets


def with_node(dataset: Any, node: Node) -> Any:
    """A copy of a dataset with `node` as its plan."""
    copied = copy.copy(dataset)
    changed: dict[str, Any] = {"_node": node}
    if len(node.parents) == len(dataset.parents):
        pairs = zip(dataset.parents, node.parents, strict=True)
        changed["_parents"] = tuple(_over(parent, its) for parent, its in pairs)
    vars(copied).update(changed)
    return copied


def after(
    dataset: IterDataset[Any], make: Callable[..., Node], *args: Any, **kw: Any
) -> PlannedIterDataset[Any]:
    """`dataset` with the node that `make` appends."""
    return PlannedIterDataset(make(node_of(dataset), *args, **kw), (dataset,))
