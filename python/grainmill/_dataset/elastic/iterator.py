"""Iteration that can be continued by another number of processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Never, overload

from grainmill._checkpoint import pipeline
from grainmill._dataset.elastic.elastic_readers import ByIndex, ByShard, by_users_shards
from grainmill._dataset.element_types import D, K, Leaf, T_co
from grainmill._dataset.iter_dataset import IterDataset, node_of
from grainmill._dataset.iterator import DatasetIterator
from grainmill._iterators import elastic_shards as plan
from grainmill._iterators.read import read
from grainmill._plan.arguments import checked_integer
from grainmill._plan.closing import closed_error
from grainmill._plan.node import MapNode
from grainmill._plan.options import ReadOptions
from grainmill._plan.sharding import ShardOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypedDict, Unpack

    from numpy.typing import NDArray

    from grainmill._dataset.elastic.elastic_readers import ByUsersShards
    from grainmill._dataset.element_types import AnyDataset
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions

    class _Options(TypedDict, total=False):
        read_options: ReadOptions
        multiprocessing_options: MultiprocessingOptions | None


_READ_OPTIONS = ReadOptions()


class ElasticIterator(DatasetIterator[T_co], IterDataset[T_co]):
    """Iterates over this process's part of global batches; another number of processes can go on.

    Each process makes one, with its own `shard_options`. A global batch consists of the batches
    that all processes get in one step, `global_batch_size // shard_count` elements each. It is both
    an iterator and an `IterDataset`, so `.map` and the other methods work; the datasets that they
    return share its position.

    A `MapDataset` that drops no elements: step `t` of all processes together reads the elements
    `ds[t * B]` to `ds[(t + 1) * B - 1]`, where `B` is the size of a global batch; process `i` of
    `c` takes every `c`-th of them from the `i`-th on. So global batches do not depend on the number
    of processes. The state is `{"global_next_index": n}`. It is the same in all processes that
    made as many steps, and any of them can continue from it, under any number of processes and
    another `B`. One epoch is read (call `repeat` for more), and a last, shorter batch is dropped.

    Any other dataset is split into shards that do not depend on the number of processes. Process
    `i` takes elements of the shards `i`, `i + c`, `i + 2 * c`, ... in turn, and runs the stages of
    each shard on its own. States are kept for each shard: `get_shard_states` of all processes
    together is what another number of processes needs, and each gives `set_shard_states` all of
    them or its own ones. No element is lost or repeated, and the last batch of a process may be
    shorter. `get_state` and `set_state` are for the
    same number of processes. The shards are

    * the datasets of an `InterleaveIterDataset` (`cycle_length` of them are open in each process),
      or the workers of `mp_prefetch` or `multithread_prefetch`: with only stages of one parent
      downstream of it. The elements and their order in each shard do not depend on the number of
      processes, but which of them meet in a batch does;
    * else the rows of the global batch: shard `r` has row `r` of every global batch, until the
      first of the shards has ended. It reads every `B`-th element of the sources from the `r`-th
      on. So, if no stage drops elements, these are the rows of plain reading; and global batches
      do not depend on the number of processes where elements are filtered, packed, mixed or zipped,
      either, and each process computes only its own elements. A process runs `B // c` copies of the
      stages, on at most `ReadOptions.num_threads` threads; packing fills the bins of each. Call
      `multithread_prefetch(ds, num_threads, buffer_size)` to have `num_threads` shards instead, at
      least as many as there will be processes. Where stages join interleaved datasets, there are
      no more shards than datasets in one of these.

    Filters of a `MapDataset` make it one of the second kind: how many elements the other processes
    dropped is not known without reading them, so no single number is the state of all processes.

    Args:
        ds: The dataset, before it is split among processes.
        global_batch_size: Elements in a batch of all processes together, a multiple of
            `shard_count`. If it is not positive, elements of shards are not batched.
        shard_options: Which process this is, and how many there are.
        read_options: How a `MapDataset` is read. Neither elements nor states depend on it, except
            that, if there are shards, it may change the order after the first of them has ended.
        multiprocessing_options: Worker processes for a `MapDataset`; the same holds for these.

    Raises:
        ValueError: A source cannot be split among processes. When used: `shard_count` does not
            divide `global_batch_size`, or that is not positive for a `MapDataset`.
        IndexError: When used: there are fewer shards than processes.
        NotImplementedError: `multiprocessing_options` are given for an `IterDataset`; call its
            `mp_prefetch` instead.
        TypeError: An argument has another type.

    Example:
        >>> def process(index, count):
        ...     shard = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
        ...     ds = grain.MapDataset.range(12)
        ...     return grain.experimental.ElasticIterator(ds, 4, shard)
        >>> first, second = process(0, 2), process(1, 2)
        >>> next(first).tolist(), next(second).tolist(), first.get_state()
        ([0, 2], [1, 3], {'global_next_index': 4})

        One process continues:

        >>> only = process(0, 1)
        >>> only.set_state(second.get_state())
        >>> next(only).tolist()
        [4, 5, 6, 7]
    """

    # As the overloads of `batch`; the type of single elements is `ElasticIterator[T](...)`.
    @overload
    def __init__(
        self: ElasticIterator[Any],
        ds: AnyDataset[Never],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: ElasticIterator[NDArray[D]],
        ds: AnyDataset[NDArray[D]],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: ElasticIterator[NDArray[Any]],
        ds: AnyDataset[Leaf],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: ElasticIterator[dict[K, NDArray[D]]],
        ds: AnyDataset[dict[K, NDArray[D]]],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: ElasticIterator[dict[K, NDArray[Any]]],
        ds: AnyDataset[dict[K, Leaf]],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self: ElasticIterator[Any],
        ds: AnyDataset[Any],
        global_batch_size: int,
        shard_options: ShardOptions,
        **options: Unpack[_Options],
    ) -> None: ...
    def __init__(
        self,
        ds: AnyDataset[Any],
        global_batch_size: int,
        shard_options: ShardOptions,
        *,
        read_options: ReadOptions = _READ_OPTIONS,
        multiprocessing_options: MultiprocessingOptions | None = None,
    ) -> None:
        super().__init__()
        size = checked_integer(global_batch_size, "global_batch_size")
        if not isinstance(shard_options, ShardOptions):
            raise TypeError(f"`shard_options` must be a `ShardOptions`, got {shard_options!r}")
        node = node_of(ds)
        self._whole = node
        self._shard_options = shard_options
        self._lock = threading.RLock()
        self._reader: ByIndex | ByShard | ByUsersShards
        if isinstance(node, MapNode) and not plan.drops_elements(node):
            self._reader = ByIndex(ds, size, shard_options, read_options, multiprocessing_options)
            return
        if isinstance(node, MapNode):
            node = read(node, read_options)
            self._reader = ByShard(node, size, shard_options, multiprocessing_options)
            return
        if multiprocessing_options is not None:
            raise NotImplementedError(
                "ElasticIterator does not support multiprocess prefetching for IterDataset."
            )
        self._reader = by_users_shards(node, size, shard_options) or ByShard(
            node, size, shard_options
        )

    def _describe_pipeline(self) -> pipeline.Stages:
        """See `DatasetIterator._describe_pipeline`; batches and processes may change."""
        return [*pipeline.described(self._whole), {"stage": "ElasticIterator"}]

    @property
    def shard_options(self) -> ShardOptions:
        """Which process this is, and how many there are."""
        return self._shard_options

    @property
    def base_iterator(self) -> DatasetIterator[T_co]:
        """The iterator that computes the elements; replaced when a state is restored."""
        with self._lock:
            self._check_open()
            return self._reader.iterator()

    def __next__(self) -> T_co:
        reader, is_taken = self._reader, False
        try:
            with self._lock:
                self._check_open()
                iterator = reader.iterator()
                element: T_co = iterator.__next__()  # no signal handler runs after it
                is_taken = True
                reader.next_index += reader.size
                return element
        except BaseException:
            if is_taken:  # interrupted while the lock was released
                self._take_back()
            raise

    def _take_back(self) -> None:
        """See `PipelineDatasetIterator._take_back`."""
        with self._lock:
            self._reader.next_index -= self._reader.size
            self._reader.iterator()._take_back()  # noqa: SLF001 - the one of its elements

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the element last returned, as a new dict that JSON can represent.

        This starts neither threads nor workers.
        """
        with self._lock:
            return self._reader.state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the element that had been returned last when `state` was saved.

        Args:
            state: From `get_state`. For a `MapDataset` that drops no elements, of any process under
                any number of them; otherwise of the same process under the same number of them.

        Raises:
            ValueError: `state` is of another pipeline, or of another process.
        """
        with self._lock:
            self._reader.restore(state)

    def get_shard_states(self) -> dict[int, dict[str, Any]]:
        """Returns the states of this process's shards after the element last returned.

        Returns:
            By the number of the shard, `{"exhausted": 0 or 1, "state": ...}`.

        Raises:
            NotImplementedError: The dataset is a `MapDataset` that drops no elements; its state is
                a number.
        """
        with self._lock:
            return self._by_shard("get").shard_states()

    def set_shard_states(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Continues the shards of this process at their states.

        Args:
            states: From `get_shard_states`, under any number of processes: those of this process's
                shards, or of all shards. Numbers of shards may be strings, as in JSON.

        Raises:
            NotImplementedError: The dataset is a `MapDataset` that drops no elements.
            ValueError: Shards are missing, or unknown, or a state does not fit.
        """
        with self._lock:
            self._by_shard("set").restore_shards(states)

    def _by_shard(self, verb: str) -> ByShard | ByUsersShards:
        if isinstance(self._reader, ByIndex):
            raise NotImplementedError(
                f"{verb}_shard_states is only supported for IterDataset-based ElasticIterator."
            )
        self._check_open()
        return self._reader

    def start_prefetch(self) -> None:
        """Starts prefetching before the first element is requested, if the pipeline prefetches."""
        self.base_iterator.start_prefetch()

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(f"Trying to advance a closed iterator: '{self}'.")

    def _cancel_waiting(self) -> None:
        self._release()

    def _release(self) -> None:
        """Closes what computes the elements; the next use opens it again, at its position.

        For iterators over datasets that were derived from this one.
        """
        self._reader.close()

    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again."""
        self._closed = True
        reader = self.__dict__.get("_reader")
        if reader is not None:
            reader.close()
