"""`DataLoader` and its iterator: a sampler, a data source and operations as one pipeline."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

from grainmill._checkpoint import pipeline
from grainmill._dataset.element_types import Loaded_co
from grainmill._dataset.iterator import Savable
from grainmill._dataset.map_dataset import MapDataset, PlannedMapDataset
from grainmill._dataset.views.reprs import Shown
from grainmill._dataset.views.running_reprs import ShownRunning
from grainmill._loader import records
from grainmill._loader.operations import Operated
from grainmill._loader.samplers import IndexSampler, Sampler
from grainmill._loader.state import Numbering, from_bytes, to_bytes
from grainmill._plan import transforms
from grainmill._plan.arguments import checked_integer, wrong_type
from grainmill._plan.multiprocessing_options import (
    DEFAULT_WORKER_BUDGET,
    MultiprocessingOptions,
)
from grainmill._plan.options import ReadOptions
from grainmill._plan.random_access import check_source, source_len
from grainmill._plan.sharding import NoSharding, ShardOptions

if TYPE_CHECKING:
    from grainmill._dataset.element_types import Indexed, SourceLike, T
    from grainmill._dataset.iter_dataset import IterDataset
    from grainmill._loader.operations import OperationLike
    from grainmill._plan.node import Node

_ALL = NoSharding()


class DataLoader(Shown, Generic[Loaded_co]):
    """Reads the records that a sampler chooses and applies operations to them, in order.

    Iterating over it again starts again. Elements that are `None` are kept, and given to
    operations. A random transform gets the generator of the record, of a batch that of its last
    record, of a piece of a split record one of its own; without a seed in the sampler, `None`.

    Args:
        data_source: Anything with indexing. Saved states hold its `repr` (of a list, tuple or array
            only the type), and are refused where it differs.
        sampler: Maps each position of the order to a record.
        operations: Transforms of the classes in `grainmill.transforms` except `MapWithIndex`, or
            callables from an iterator of `Record`s to another.
        worker_count: Worker processes; 0 does all the work in this one, `None` starts as many as
            the machine has CPUs. Each takes every `worker_count`-th record, and batches those, so
            that batches and states depend on it.
        worker_buffer_size: The most elements each worker holds ready, at least 1.
        shard_options: The part of the records to read; that of the sampler if `None`.
        read_options: How far ahead records are read; `ReadOptions()` if `None`.
        enable_profiling: Accepted for programs that set it; nothing is recorded.
        per_worker_budget_bytes: Maximum memory for undelivered elements of each worker, as in
            `MultiprocessingOptions`.

    Raises:
        ValueError: `worker_count` is negative, another number is out of range, or neither the
            sampler nor `shard_options` says which part to read.
        TypeError: An operation is neither a transform nor callable, or another argument has a
            wrong type.

    Example:
        >>> sampler = grain.samplers.IndexSampler(5, shuffle=True, num_epochs=1, seed=0)
        >>> loader = grain.DataLoader(
        ...     data_source=range(5), sampler=sampler, operations=[grain.transforms.Batch(2)]
        ... )
        >>> [batch.tolist() for batch in loader]
        [[0, 4], [1, 2], [3]]
        >>> iterator = iter(loader)
        >>> next(iterator).tolist()
        [0, 4]
        >>> state = iterator.get_state()  # bytes, for a checkpoint
        >>> restored = iter(loader)
        >>> restored.set_state(state)
        >>> next(restored).tolist()
        [1, 2]
    """

    @overload
    def __init__(
        self,
        *,
        data_source: Indexed[Loaded_co],
        sampler: Sampler,
        operations: tuple[()] = (),
        worker_count: int | None = 0,
        worker_buffer_size: int = 1,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        enable_profiling: bool = False,
        per_worker_budget_bytes: int | None = DEFAULT_WORKER_BUDGET,
    ) -> None: ...
    @overload
    def __init__(
        self: DataLoader[Any],
        *,
        data_source: Indexed[Any],
        sampler: Sampler,
        operations: Sequence[transforms.Transformation | OperationLike],
        worker_count: int | None = 0,
        worker_buffer_size: int = 1,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        enable_profiling: bool = False,
        per_worker_budget_bytes: int | None = DEFAULT_WORKER_BUDGET,
    ) -> None: ...
    def __init__(
        self,
        *,
        data_source: Any,
        sampler: Sampler,
        operations: Sequence[transforms.Transformation | OperationLike] = (),
        worker_count: int | None = 0,
        worker_buffer_size: int = 1,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        enable_profiling: bool = False,
        per_worker_budget_bytes: int | None = DEFAULT_WORKER_BUDGET,
    ) -> None:
        if worker_count is not None:
            worker_count = checked_integer(worker_count, "worker_count")
        worker_count = determined_worker_count(worker_count)
        if worker_count < 0:
            raise ValueError(
                "Worker count should be greater than or equal zero."
                f"Current worker_count is {worker_count}."
            )
        worker_buffer_size = checked_integer(worker_buffer_size, "worker_buffer_size")
        if worker_buffer_size < 0:
            raise ValueError(
                "Worker buffer size must be greater than or equal zero."
                f"Current worker_buffer_size is {worker_buffer_size}."
            )
        check_source(data_source, "data_source")
        for name, indexed in (("data_source", data_source), ("sampler", sampler)):
            if not hasattr(indexed, "__getitem__"):
                raise wrong_type(f"`{name}` must have `__getitem__`", indexed)
        if not isinstance(operations, Iterable):
            raise TypeError(
                "`operations` must be a sequence of transforms, got one object: "
                f"{operations!r}; put it into a list"
            )
        if shard_options is None:
            shard_options = getattr(sampler, "_shard_options", None)
        if shard_options is None:
            raise ValueError(
                "No shard options were provided to the DataLoader. Please pass shard options to "
                "the DataLoader. Previously sharding was handled by the Sampler but going forward "
                "sharding will be handled by the DataLoader for greater flexibility."
            )
        # Keras reads these attributes to build an equal loader.
        self._data_source = data_source
        self._sampler = sampler
        self._operations = tuple(operations)
        self._multiprocessing_options = MultiprocessingOptions(
            worker_count,
            worker_buffer_size,
            enable_profiling,
            per_worker_budget_bytes=per_worker_budget_bytes,
        )
        self._shard_options = shard_options
        self._read_options = ReadOptions() if read_options is None else read_options
        self._dataset = self._pipeline()

    def _pipeline(self) -> IterDataset[Any]:
        sampled = records.SampledRecords(
            self._sampler,
            self._data_source,
            with_rng=_need_rng(self._operations),
        )
        shard = self._shard_options
        all_shards = MapDataset.source(sampled)
        num_rounds, rest = divmod(len(all_shards), shard.shard_count)
        if not shard.drop_remainder:
            num_rounds += shard.shard_index < rest
        end = shard.shard_index + num_rounds * shard.shard_count
        own_shard = all_shards[shard.shard_index : end : shard.shard_count]
        dataset = own_shard.to_iter_dataset(self._read_options)
        if not hasattr(self._sampler, "__len__"):
            dataset = records.UntilEnd(dataset)
        for number, operation in enumerate(self._operations):
            if isinstance(operation, transforms.FlatMap):
                with_rng = _need_rng(self._operations[number + 1 :])
                dataset = dataset.apply(records.SplitData(operation, with_rng=with_rng))
            else:
                dataset = _applied(dataset, operation, number)
        return dataset.map(records.data_of).mp_prefetch(self._multiprocessing_options)

    @property
    def multiprocessing_options(self) -> MultiprocessingOptions:
        """How many workers there are, and how far ahead they work."""
        return self._multiprocessing_options

    def __iter__(self) -> DataLoaderIterator[Loaded_co]:
        return DataLoaderIterator(self)

    def __repr__(self) -> str:
        return self._stages_shown()

    def _shown_plan(self) -> tuple[Node, str]:
        source = type(self._data_source).__name__
        kind = f"DataLoader over {source}, sampled by {self._sampler!r}"
        return self._dataset._plan_node(), kind  # noqa: SLF001 - its own pipeline

    def _described(self) -> pipeline.Stages:
        """The loader as a checkpoint describes it, without what its states have themselves."""
        shard = self._shard_options
        stage: dict[str, Any] = {
            "stage": "DataLoader",
            "shard_index": shard.shard_index,
            "shard_count": shard.shard_count,
        }
        with contextlib.suppress(TypeError):
            stage["length"] = len(self._data_source)
        if self._numbering() is None:
            stage["source"] = type(self._data_source).__name__
            stage["sampler"] = repr(self._sampler)
        return [stage, *(_described_operation(operation) for operation in self._operations)]

    def _numbering(self) -> Numbering | None:
        """How states count positions; `None` if a state is that of the pipeline, unchanged."""
        if any(isinstance(operation, transforms.FlatMap) for operation in self._operations):
            return None
        return Numbering(
            shard_index=self._shard_options.shard_index,
            shard_count=self._shard_options.shard_count,
            worker_count=self._multiprocessing_options.num_workers,
            sampler=repr(self._sampler),
            data_source=_description(self._data_source),
        )


_WITHOUT_RNG = (transforms.Map, transforms.Filter, transforms.Batch, transforms.FlatMap)


def determined_worker_count(worker_count: int | None) -> int:
    """`worker_count`, or the number of CPUs of the machine if it is `None`, as Grain has it.

    Batches and states depend on it, so that it is not the number of those that may be used.
    """
    return (os.cpu_count() or 1) if worker_count is None else int(worker_count)


def _need_rng(operations: Sequence[Any]) -> bool:
    """Whether one of `operations` may use the generators of its records."""
    return not all(isinstance(operation, _WITHOUT_RNG) for operation in operations)


def _batched(dataset: IterDataset[Any], batch: transforms.Batch) -> IterDataset[Any]:
    return dataset.batch(
        batch.batch_size,
        drop_remainder=batch.drop_remainder,
        batch_fn=records.BatchData(batch.batch_fn),
    )


# How each kind of operation is appended to a pipeline of records.
_APPENDED: dict[type, Callable[[IterDataset[Any], Any], IterDataset[Any]]] = {
    transforms.Batch: _batched,
    transforms.Map: lambda ds, op: ds.map(records.MapData(op.map, op)),
    transforms.RandomMap: lambda ds, op: ds.map(records.RandomMapData(op.random_map, op)),
    transforms.TfRandomMap: lambda ds, op: ds.map(records.RandomMapData(op.np_random_map, op)),
    transforms.Filter: lambda ds, op: ds.filter(records.FilterData(op.filter, op)),
}


def _applied(dataset: IterDataset[Any], operation: Any, number: int) -> IterDataset[Any]:
    for kind, append in _APPENDED.items():
        if isinstance(operation, kind):
            return append(dataset, operation)
    if callable(operation):
        return Operated(dataset, operation)
    raise TypeError(
        f"operation {number} must be a transform of a kind that `DataLoader` has, or a callable "
        f"from an iterator of records to another, got {operation!r}"
    )


def _described_operation(operation: Any) -> dict[str, Any]:
    if isinstance(operation, transforms.Batch):
        return {
            "stage": "Batch",
            "batch_size": int(operation.batch_size),
            "drop_remainder": bool(operation.drop_remainder),
        }
    return {"stage": pipeline.function_name(operation)}


def _description(data_source: Any) -> str:
    """The text that identifies the source in a state; only the type where `repr` lists values."""
    by_type = type(data_source).__name__ == "ndarray" or isinstance(data_source, list | tuple)
    if isinstance(data_source, PlannedMapDataset):
        return data_source._identity()  # noqa: SLF001 - private to datasets
    return str(type(data_source)) if by_type else repr(data_source)


class DataLoaderIterator(ShownRunning, Savable, Iterator[Loaded_co], Generic[Loaded_co]):
    """Iterates over the elements of a `DataLoader`; its position can be saved and restored.

    One comes from `iter(loader)`. `close`, or the end of its `with` block, releases threads, worker
    processes and memory.

    Args:
        data_loader: The loader.
        state: A state to start from, as bytes or the dict that they are in JSON; the first element
            if `None`.
        validate_state: Whether to refuse states, here and in `set_state`, that were taken with
            another sampler or source.

    Raises:
        ValueError: `set_state` would refuse `state`.
    """

    _STATE_IS_DICT = False

    def __init__(
        self,
        data_loader: DataLoader[Loaded_co],
        state: dict[str, Any] | bytes | None = None,
        validate_state: bool = True,  # noqa: FBT001, FBT002 - as programs call it
    ) -> None:
        self._data_loader = data_loader
        self._validate_state = validate_state
        self._numbering = data_loader._numbering()  # noqa: SLF001 - the loader's own iterator
        self._iterator = data_loader._dataset.__iter__()  # noqa: SLF001
        if state is not None:
            self.set_state(to_bytes(state) if isinstance(state, dict) else state)

    def __next__(self) -> Loaded_co:
        # No signal handler runs after this call, as one may after `next`.
        element: Loaded_co = self._iterator.__next__()
        return element

    def _take_back(self) -> None:
        """See `PipelineDatasetIterator._take_back`."""
        iterator: Any = self._iterator
        iterator._take_back()  # noqa: SLF001 - the loader's own iterator

    def get_state(self) -> bytes:
        """Returns the state after the element last returned, as JSON in bytes."""
        state = self._iterator.get_state()
        return to_bytes(state if self._numbering is None else self._numbering.saved(state))

    def set_state(self, state: bytes) -> None:
        """Continues after the element that was returned last when `state` was taken.

        Args:
            state: From `get_state` of an iterator over an equal `DataLoader`, in any process.

        Raises:
            ValueError: `state` is not a state of a loader, or was taken with another number of
                workers, another sampler, source or sharding (of which none is looked at where an
                operation is a `FlatMapTransform`).
        """
        saved = from_bytes(state)
        if self._numbering is not None:
            saved = self._numbering.own(saved, validate=self._validate_state)
        self._iterator.set_state(saved)

    def _describe_pipeline(self) -> pipeline.Stages:
        """What a checkpoint says about the loader."""
        return self._data_loader._described()  # noqa: SLF001 - the loader's own iterator

    def stats(self) -> dict[str, Any]:
        """Returns where the time has gone so far; see `DatasetIterator.stats`."""
        return self._iterator.stats()

    def verdict(self, *, has_consumer: bool = True) -> str:
        """Returns one sentence on what holds the loader back; see `DatasetIterator.verdict`.

        Args:
            has_consumer: See there.
        """
        return self._iterator.verdict(has_consumer=has_consumer)

    def start_prefetch(self) -> None:
        """Starts to compute elements before the first is asked for.

        Raises:
            ValueError: The iterator is closed.
        """
        self._iterator.start_prefetch()

    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again."""
        self._iterator.close()

    def _shown_iterator(self) -> tuple[Any, str]:
        source = type(self._data_loader._data_source).__name__  # noqa: SLF001 - its own loader
        return self._iterator, f"DataLoaderIterator over {source}"

    def __str__(self) -> str:
        return f"PyGrainDatasetIterator(state={self.get_state().decode()})"


@overload
def load(
    source: SourceLike[T],
    *,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions = _ALL,
    transformations: tuple[()] = (),
    batch_size: None = None,
    drop_remainder: bool = False,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader[T]: ...
@overload
def load(
    source: SourceLike[Any],
    *,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions = _ALL,
    transformations: transforms.Transformations = (),
    batch_size: int | None = None,
    drop_remainder: bool = False,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader[Any]: ...
def load(
    source: SourceLike[Any],
    *,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions = _ALL,
    transformations: transforms.Transformations = (),
    batch_size: int | None = None,
    drop_remainder: bool = False,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader[Any]:
    """Makes a `DataLoader` over all records of `source`, in order or shuffled.

    Args:
        source: The records: anything with `len` and indexing.
        num_epochs: How many epochs; without end if `None`.
        shuffle: Whether each epoch has an order of its own.
        seed: For the order and for random transforms, from 0 to 2**32 - 1; if `None`, records
            cannot be shuffled, and random transforms get no generator.
        shard_options: The part of the records to read.
        transformations: Applied to each record, in order.
        batch_size: Elements per batch; no batches if `None`.
        drop_remainder: Whether a last, shorter batch is left out.
        worker_count: See `DataLoader`.
        read_options: See `DataLoader`.

    Raises:
        ValueError: An argument is out of range, `source` is empty, or there is no seed to shuffle
            with.
        TypeError: The seed to shuffle with is not an `int`, or a transformation is neither a
            transform nor callable.

    Example:
        >>> loader = grain.load(range(5), num_epochs=1, shuffle=True, seed=0, batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 4], [1, 2], [3]]
    """
    num_records = source_len(source)
    if num_records is None:
        raise wrong_type("`source` must have `__len__` and `__getitem__`", source)
    sampler = IndexSampler(
        num_records=num_records,
        shard_options=shard_options,
        shuffle=shuffle,
        num_epochs=num_epochs,
        seed=seed,
    )
    operations = list(transformations)
    if batch_size is not None:
        operations.append(transforms.Batch(batch_size, drop_remainder=drop_remainder))
    return DataLoader(
        data_source=source,
        sampler=sampler,
        operations=operations,
        worker_count=worker_count,
        read_options=read_options,
    )
