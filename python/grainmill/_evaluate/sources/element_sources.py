"""Where the elements of a chain come from: files, users' objects, numbers, other plans."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from grainmill._evaluate.batches.batch_blocks import BatchBlock, batched, block_len
from grainmill._evaluate.batches.stack import stack
from grainmill._evaluate.evaluated import Evaluated, stop_iteration_error
from grainmill._evaluate.fused import Step
from grainmill._evaluate.prefetch import tuning
from grainmill._interrupts import listed, raise_interrupt
from grainmill._native import fill_columns
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from grainmill._evaluate.evaluator import Evaluator, PendingElements
    from grainmill._native import PendingRead, ReadQueue, RecordFiles
    from grainmill._plan.node import MapNode

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
DatasetNumbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint32]]"

# The elements to read: their indices, with the numbers of their datasets if there are several.
Request = TypeVar("Request")


def may_be_slow(parts: Iterable[Evaluator | ElementSource[Any]]) -> Sequence[ElementSource[Any]]:
    """See `ElementSource.may_be_slow`; those of several plans or sources."""
    return list({id(source): source for part in parts for source in part.may_be_slow}.values())


class ElementSource(abc.ABC, Generic[Request]):
    """The source of one chain.

    Attributes:
        runs_user_code: Whether the elements are computed by Python code of the user.
        mean_byte_len: Mean bytes of an element, 0 if unknown.
        num_records: Records per element.
        reads_lists: Whether a user's `__getitems__` is called with one list for all elements
            that are requested at once.
        reads_beyond: Whether its reads serve many elements each, so that blocks start too few:
            then `start_beyond` starts some.
    """

    runs_user_code = True
    reads_beyond = False
    mean_byte_len = 0.0
    num_records = 1
    reads_lists = False

    @property
    def waits_for_storage(self) -> bool:
        """Whether its storage, or one upstream, is slow, by its recent reads."""
        return any(source.waits_for_storage for source in self.may_be_slow)

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """Of this source and those upstream the ones whose storage may be slow, once each.

        Many stages may read one, so that asking all parents would take time by the number of ways.
        """
        has_own = type(self).waits_for_storage is not ElementSource.waits_for_storage
        return [self] if has_own else []

    @property
    def is_partly_near(self) -> bool:
        """Whether its storage, or a part of it, is fast."""
        return not self.waits_for_storage

    @property
    def has_room(self) -> bool:
        """Whether there is memory to start further reads on slow storage."""
        return True

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Any:
        """The argument of `start` and `read` for the indices and dataset numbers of a column."""
        return index

    def start(self, request: Request) -> Any:
        """Starts the reads that need no interpreter lock; returns the argument of `finish`."""
        return request

    def start_beyond(self, request: Request) -> Any:
        """Starts reads that help to read these elements later, if there is memory for them.

        Returns:
            What must be held until the reads of the elements are started; `None` if none were.
        """
        return None

    def wait(self, pending: Any) -> Any:
        """Waits for the reads; returns another argument for `finish`."""
        return pending

    @abc.abstractmethod
    def finish(self, pending: Any) -> Evaluated:
        """The elements that were passed to `start`."""

    def read(self, request: Request) -> Evaluated:
        """`start` and `finish` in one call."""
        return self.finish(self.start(request))

    def fill_function(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """The engine's `fill_columns` with its first argument bound, if it can read these files."""
        return None

    def first_step(self) -> Step | None:
        """A step that reads one element, if the loop of functions should read."""
        return None


SourceT = TypeVar("SourceT", bound="type[ElementSource[Any]]")


def computes(node_type: type[MapNode]) -> Callable[[SourceT], SourceT]:
    """Makes a class of sources the `computed_by` of nodes of this type."""

    def register(source_type: SourceT) -> SourceT:
        node_type.computed_by = source_type
        return source_type

    return register


class RangeSource(ElementSource[Indices]):
    """The numbers of ranges, which the engine computes."""

    runs_user_code = False

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return Evaluated(pending.tolist(), None)

    def read(self, request: Indices) -> Evaluated:
        """See `ElementSource.read`."""
        return Evaluated(request.tolist(), None)


class BigRangeSource(ElementSource[Indices]):
    """The numbers of a `range` that do not fit in 64 bits."""

    runs_user_code = False

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return Evaluated(list(map(self._numbers.__getitem__, pending.tolist())), None)


class FileSource(ElementSource[Indices]):
    """Records of files that the engine reads, prefetched where storage is slow.

    Args:
        files: The files.
        reads: Limits the reads in flight of all sources that share it.
        numbers_of: Maps the indices of elements to those of records, if they differ.

    Attributes:
        files: The files.
    """

    runs_user_code = False

    def __init__(
        self,
        files: RecordFiles,
        reads: ReadQueue | None = None,
        numbers_of: Callable[[Indices], Indices] | None = None,
    ) -> None:
        self.files = files
        self._reads = reads
        self._numbers_of = numbers_of
        self.mean_byte_len = files.mean_byte_len

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return self.files.is_slow

    @property
    def is_partly_near(self) -> bool:
        """See `ElementSource.is_partly_near`."""
        return self.files.has_fast

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Indices:
        """See `ElementSource.request`."""
        return index if self._numbers_of is None else self._numbers_of(index)

    def start(self, request: Indices) -> tuple[Indices, PendingRead | None]:
        """See `ElementSource.start`; on fast storage, `finish` reads."""
        if not self.files.is_slow:
            return request, None
        try:
            return request, self.files.start(request, self._reads)
        except Exception as failure:
            raise_interrupt(failure)
            return request, None  # `finish` finds the failing record

    def wait(self, pending: tuple[Indices, PendingRead | None]) -> Evaluated | tuple[Indices, None]:
        """See `ElementSource.wait`."""
        index, read = pending
        return (index, None) if read is None else self._read(index, read)

    def finish(self, pending: Evaluated | tuple[Indices, PendingRead | None]) -> Evaluated:
        """See `ElementSource.finish`."""
        return pending if isinstance(pending, Evaluated) else self._read(*pending)

    def read(self, request: Indices) -> Evaluated:
        """See `ElementSource.read`."""
        return super().read(request) if self.files.is_slow else self._read(request)

    def fill_function(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """See `ElementSource.fill_function`; `None` on slow storage, where reads are concurrent."""
        return None if self.files.is_slow else functools.partial(fill_columns, self.files)

    def _read(self, index: Indices, read: PendingRead | None = None) -> Evaluated:
        """Reads the records, up to the first that cannot be read."""
        try:
            return Evaluated(self.files.read(index) if read is None else read.finish(), None)
        except Exception as failure:
            raise_interrupt(failure)  # reading one by one finds the failing record
        return one_by_one(self.files.read_one, index.tolist())


def one_by_one(read: Callable[[Any], Any], index: Iterable[Any]) -> Evaluated:
    """`read(i)` for each `i` in `index`, up to the first that fails."""
    elements = []
    try:
        for i in index:
            elements.append(read(i))  # noqa: PERF401 - a failure keeps the elements before it
    except StopIteration as stop:
        raise_interrupt(stop)
        failure = stop_iteration_error(stop)
        failure.__cause__ = stop
        return Evaluated(elements, failure)
    except Exception as failure:
        raise_interrupt(failure)
        return Evaluated(elements, failure)
    return Evaluated(elements, None)


class ObjectSource(ElementSource[Indices]):
    """A user's object, called for one element at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return Step("read", self._source.__getitem__)

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return one_by_one(self._source.__getitem__, pending.tolist())


class BlockObjectSource(ElementSource[Indices]):
    """A user's object with `__getitems__`, called for many elements at once."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads_lists = getattr(source, "_reads_lists", True)  # `SampledRecords` has it

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        index = pending.tolist()
        elements: list[Any] = []
        for first in range(0, len(index), tuning.MAX_REQUESTED):
            result = self._list(index[first : first + tuning.MAX_REQUESTED])
            elements += result.elements
            if result.failure is not None:
                return Evaluated(elements, result.failure)
        return Evaluated(elements, None)

    def _list(self, index: list[int]) -> Evaluated:
        """The elements at `index`; if `__getitems__` fails, each is read by `__getitem__`."""
        refusal: Exception | None = None
        try:
            answer = self._source.__getitems__(index.copy())
            elements = None if isinstance(answer, Mapping | str | bytes) else listed(answer)
            if elements is not None and len(elements) == len(index):
                return Evaluated(elements, None)
            found = (
                f"a {type(answer).__name__}" if elements is None else f"{len(elements)} elements"
            )
            refusal = ValueError(
                f"`{type(self._source).__name__}.__getitems__` must return a list with one element "
                f"for each of the {len(index)} indices it is given, got {found}; correct it, or "
                "remove it so that `__getitem__` is called"
            )
        except Exception as failure:
            raise_interrupt(failure)  # reading one by one finds the failing element
        singly = one_by_one(self._source.__getitem__, index)
        if refusal is None or singly.failure is not None:
            return singly
        return Evaluated([], refusal)


class PrefetchedObjectSource(BlockObjectSource):
    """An object of this package that can start reads: it has `_start_reads` and `_finish_reads`."""

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return bool(self._source._waits_for_storage)  # noqa: SLF001 - objects have it for this

    def start(self, request: Indices) -> tuple[Indices, Any]:
        """See `ElementSource.start`; reads are started only on slow storage."""
        if not self.waits_for_storage:
            return request, None
        try:
            return request, self._source._start_reads(request.tolist())  # noqa: SLF001
        except Exception as failure:
            raise_interrupt(failure)
            return request, None  # `finish` finds the failing element

    def wait(self, pending: tuple[Indices, Any]) -> tuple[Indices, Any]:
        """See `ElementSource.wait`."""
        if pending[1] is not None:
            pending[1].wait()
        return pending

    def finish(self, pending: Any) -> Evaluated:
        """See `ElementSource.finish`."""
        index, reads = pending
        if reads is not None:
            try:
                return Evaluated(self._source._finish_reads(reads), None)  # noqa: SLF001
            except Exception as failure:
                raise_interrupt(failure)  # reading one by one finds the failing element
        return super().finish(index)

    def read(self, request: Indices) -> Evaluated:
        """See `ElementSource.read`."""
        return super().finish(request)


@computes(plan.Batch)
class BatchSource(ElementSource[Indices]):
    """Batches of consecutive elements of another plan, each within one epoch."""

    def __init__(self, node: plan.Batch, parent: Evaluator) -> None:
        self._node = node
        self._parent = parent
        self._parent_len = random_access(node.parent).length
        self.runs_user_code = parent.runs_user_code or node.batch_fn is not None
        self.mean_byte_len = parent.mean_byte_len * node.batch_size
        self.num_records = parent.num_records * node.batch_size
        self.reads_beyond = parent.reads_beyond

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return self._parent.may_be_slow

    @property
    def has_room(self) -> bool:
        """See `ElementSource.has_room`."""
        return self._parent.has_room

    def start(self, request: Indices) -> list[range | PendingElements]:
        """See `ElementSource.start`; reads are started only on slow storage."""
        positions = [self._positions(batch) for batch in request.tolist()]
        if not self._parent.waits_for_storage:
            return [*positions]
        return [self._parent.start_reads(batch.start, len(batch)) for batch in positions]

    def start_beyond(self, request: Indices) -> Any:
        """See `ElementSource.start_beyond`."""
        positions = [self._positions(batch) for batch in request.tolist()]
        started = [self._parent.start_beyond(batch.start, len(batch)) for batch in positions]
        return started if any(reads is not None for reads in started) else None

    def wait(self, pending: list[range | PendingElements]) -> list[range | PendingElements]:
        """See `ElementSource.wait`."""
        for batch in pending:
            if not isinstance(batch, range):
                batch.wait()
        return pending

    def finish(self, pending: list[range | PendingElements]) -> Evaluated:
        """See `ElementSource.finish`."""
        batches: list[Any] = []
        for batch in pending:
            try:
                if isinstance(batch, range):
                    batches.append(self._batch(batch.start, batch.stop))
                else:
                    batches.append(self._pending_batch(batch))
            except Exception as failure:
                raise_interrupt(failure)
                return Evaluated(batches, failure)
        return Evaluated(batches, None)

    def _pending_batch(self, pending: PendingElements) -> Any:
        rows = pending.batches() if self._node.batch_fn is None else None
        if rows is not None:
            return rows[0].batch
        return self._stacked(self._elements_of(pending(), 0))

    def _positions(self, index: int) -> range:
        """The positions in the parent of the elements of batch `index`."""
        if not self._node.length:
            raise IndexError(f"`batch` of an empty dataset has no position {index}")
        epoch, number = divmod(index, self._node.length)
        first = number * self._node.batch_size
        stop = min(self._parent_len, first + self._node.batch_size)
        offset = epoch * self._parent_len
        return range(offset + first, offset + stop)

    def _stacked(self, elements: list[Any]) -> Any:
        return stack(elements, batch_fn=self._node.batch_fn)

    def _batch(self, start: int, stop: int) -> Any:
        count = stop - start
        if self._node.batch_fn is not None:
            return self._stacked(self._elements(start, stop))
        numbers = self._parent.numbers(start, count)
        if numbers is not None:
            return numbers
        block = batched(self._parent, start, count)
        if isinstance(block, BatchBlock):
            return block.batch
        elements = self._elements_of(block, 0)  # up to the first that did not fit
        return self._stacked(elements + self._elements(start + len(elements), stop, len(elements)))

    def _elements(self, start: int, stop: int, num_before: int = 0) -> list[Any]:
        elements: list[Any] = []
        size = block_len(self._parent.mean_byte_len, stop - start)
        run = self._parent.run_incrementally(start, stop - start)
        for position in range(start, stop, size):
            result = run.run(position, min(size, stop - position))
            elements += self._elements_of(result, num_before + len(elements))
        return elements

    def _elements_of(self, result: Evaluated, num_before: int) -> list[Any]:
        if result.failure is not None:
            number = num_before + len(result.elements)
            add_note(
                result.failure, [f"which is element {number} of a batch of {located(self._node)}"]
            )
            raise result.failure
        return result.elements


_MISSING = object()


@computes(plan.FlatMap)
class FlatMapSource(ElementSource[Indices]):
    """The elements that a user's function splits those of another plan into."""

    def __init__(self, node: plan.FlatMap, parent: Evaluator) -> None:
        self._flat_map = node.transform.flat_map
        self._fan_out = node.transform.max_fan_out
        self._parent = parent
        self.mean_byte_len = parent.mean_byte_len
        self.num_records = parent.num_records
        self.reads_lists = parent.reads_lists

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return self._parent.may_be_slow

    def start(self, request: Indices) -> tuple[Indices, PendingElements | None]:
        """See `ElementSource.start`; reads are started only on slow storage."""
        if not self._parent.waits_for_storage:
            return request, None
        return request, self._parent.start_reads_at(self._inputs(request)[0])

    def wait(
        self, pending: tuple[Indices, PendingElements | None]
    ) -> tuple[Indices, PendingElements | None]:
        """See `ElementSource.wait`."""
        if pending[1] is not None:
            pending[1].wait()
        return pending

    def _inputs(self, index: Indices) -> tuple[Indices, Any, Any]:
        """The inputs to split.

        For each output also whether its input differs from that of the output before, and its
        number among the outputs of its input.
        """
        parents, numbers = np.divmod(index, self._fan_out)
        is_new = np.ones(len(parents), bool)
        is_new[1:] = parents[1:] != parents[:-1]
        return parents[is_new], is_new, numbers

    def finish(self, pending: tuple[Indices, PendingElements | None]) -> Evaluated:
        """See `ElementSource.finish`; consecutive outputs of one input share a call."""
        index, reads = pending
        needed, is_new, numbers = self._inputs(index)
        read = self._parent.run_at(needed) if reads is None else reads()
        inputs = iter(read.elements)
        elements: list[Any] = []
        outputs: Sequence[Any] = ()
        for number, new in zip(numbers.tolist(), is_new.tolist(), strict=True):
            if new:
                element = next(inputs, _MISSING)
                if element is _MISSING:
                    return Evaluated(elements, read.failure)
                try:
                    outputs = self._split(element)
                except Exception as failure:
                    raise_interrupt(failure)
                    return Evaluated(elements, failure)
            elements.append(outputs[number] if number < len(outputs) else None)
        return Evaluated(elements, None)

    def _split(self, element: Any) -> Sequence[Any]:
        if element is None:
            return ()
        outputs = self._flat_map(element)
        if not isinstance(outputs, Sequence):
            outputs = listed(outputs)
        if len(outputs) > self._fan_out:
            raise ValueError(
                "The user-provided FlatMapTransform has a split that exceeds specified max fan-out "
                f"size. To address this, you can raise the max fan-out size, but for max fan-out "
                f"size >100, performance may suffer. Split: {len(outputs)}, "
                f"max fan-out: {self._fan_out}."
            )
        return outputs


@computes(plan.Zip)
class ZipSource(ElementSource[Indices]):
    """Tuples of the elements that several plans have at the same index."""

    def __init__(self, _: plan.Zip, *parents: Evaluator) -> None:
        self._parents = parents
        self.runs_user_code = any(parent.runs_user_code for parent in parents)
        self.mean_byte_len = sum(parent.mean_byte_len for parent in parents)
        self.num_records = sum(parent.num_records for parent in parents)
        self.reads_lists = any(parent.reads_lists for parent in parents)

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return may_be_slow(self._parents)

    def start(self, request: Indices) -> list[PendingElements]:
        """See `ElementSource.start`."""
        return [parent.start_reads_at(request) for parent in self._parents]

    def wait(self, pending: list[PendingElements]) -> list[PendingElements]:
        """See `ElementSource.wait`."""
        for elements in pending:
            elements.wait()
        return pending

    def finish(self, pending: list[PendingElements]) -> Evaluated:
        """See `ElementSource.finish`."""
        results = [elements() for elements in pending]
        tuples = list(zip(*(result.elements for result in results), strict=False))
        failures = [r.failure for r in results if r.failure and len(r.elements) == len(tuples)]
        return Evaluated(tuples, failures[0] if failures else None)


class _Selected(NamedTuple):
    """Elements that a selection has picked.

    Attributes:
        picked: Pairs of a plan and an index in it, up to the first that could not be picked.
        groups: For each plan, the positions of its elements, and their indices in it.
        reads: The reads that were started for each plan; empty if none were.
    """

    picked: Evaluated
    groups: list[tuple[int, Indices, Indices]]
    reads: list[PendingElements]


@computes(plan.Select)
class SelectSource(ElementSource[Indices]):
    """Elements of several plans, selected by a user's `DatasetSelectionMap`."""

    def __init__(self, node: plan.Select, *parents: Evaluator) -> None:
        self._selection = node.selection
        self._parents = parents
        self.mean_byte_len = max((parent.mean_byte_len for parent in parents), default=0.0)
        self.reads_lists = any(parent.reads_lists for parent in parents)

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return may_be_slow(self._parents)

    def start(self, request: Indices) -> Indices | _Selected:
        """See `ElementSource.start`; reads are started only on slow storage."""
        if not self.waits_for_storage:
            return request
        try:
            selected = self._selected(request)
            for number, _, keys in selected.groups:
                selected.reads.append(self._parents[number].start_reads_at(keys))
        except Exception as failure:
            raise_interrupt(failure)
            return request  # `finish` finds the failing element
        return selected

    def wait(self, pending: Indices | _Selected) -> Indices | _Selected:
        """See `ElementSource.wait`."""
        if isinstance(pending, _Selected):
            for reads in pending.reads:
                reads.wait()
        return pending

    def finish(self, pending: Indices | _Selected) -> Evaluated:
        """See `ElementSource.finish`."""
        selected = pending if isinstance(pending, _Selected) else self._selected(pending)
        picked, groups, reads = selected
        results = [
            (positions, reads[at]() if reads else self._parents[number].run_at(keys))
            for at, (number, positions, keys) in enumerate(groups)
        ]
        return merged(results, len(picked.elements), picked.failure)

    def _selected(self, index: Indices) -> _Selected:
        picked = one_by_one(self._selection.__getitem__, index.tolist())
        by_parent: dict[int, list[int]] = {}
        for position, (number, _) in enumerate(picked.elements):
            by_parent.setdefault(number, []).append(position)
        groups = []
        for number, positions in by_parent.items():
            chosen = (picked.elements[position][1] for position in positions)
            keys = np.array([operator.index(index) for index in chosen], np.int64)
            groups.append((number, np.array(positions), keys))
        return _Selected(picked, groups, [])


def merged(
    results: Sequence[tuple[Any, Evaluated]], length: int, failure: BaseException | None = None
) -> Evaluated:
    """The results of several sources in the order of their positions, up to the first failure.

    Args:
        results: Pairs of (ascending positions in the block, the elements at them).
        length: Positions in the block.
        failure: The exception raised for position `length`, if any.
    """
    elements: list[Any] = [None] * length
    for positions, result in results:
        if result.failure is not None and positions[len(result.elements)] < length:
            length, failure = int(positions[len(result.elements)]), result.failure
        for position, element in zip(positions.tolist(), result.elements, strict=False):
            elements[position] = element
    return Evaluated(elements[:length], failure)
