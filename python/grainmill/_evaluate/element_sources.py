"""Where the elements of a chain come from: files, users' objects, numbers, other plans."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import BatchBlock, batched, block_len
from grainmill._evaluate.fuse import Evaluated, Step, stopped
from grainmill._evaluate.stack import shared_arena, stack
from grainmill._native import fill_columns
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from grainmill._evaluate.evaluator import Evaluator, PendingElements
    from grainmill._native import PendingRead, ReadQueue, RecordFiles
    from grainmill._plan import random_access as plan

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
PartNumbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint32]]"

# Which elements a leaf is asked for: their indices, with their parts where it has several.
At = TypeVar("At")


class ElementSource(abc.ABC, Generic[At]):
    """The source of one chain.

    Attributes:
        runs_user_code: Whether Python code of the user makes the elements.
        mean_byte_len: Bytes of an element on average, 0 where unknown.
        num_records: Records that go into an element.
        reads_lists: Whether a user's object is asked for as many elements at once as this is.
    """

    runs_user_code = True
    mean_byte_len = 0.0
    num_records = 1
    reads_lists = False

    @property
    def waits(self) -> bool:
        """Whether what it read lately had to be waited for."""
        return False

    def at(self, index: Indices, parts: PartNumbers | None) -> Any:
        """What `start` and `read` take for the indices, and parts if any, of a column."""
        return index

    def start(self, at: At) -> Any:
        """Begins what can go on without the interpreter; `finish` takes what this returns."""
        return at

    def settle(self, started: Any) -> Any:
        """Waits for what `start` began; returns what `finish` is to take instead."""
        return started

    @abc.abstractmethod
    def finish(self, started: Any) -> Evaluated:
        """The elements that `start` was asked for."""

    def read(self, at: At) -> Evaluated:
        """The elements at `at`, now."""
        return self.finish(self.start(at))

    def filler(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """`fill_columns` of the engine but for its first argument, where it reads these files."""
        return None

    def first_step(self) -> Step | None:
        """A step that reads one element, where elements are better made inside the loop."""
        return None


class RangeSource(ElementSource[Indices]):
    """The numbers of ranges, which the engine computes."""

    runs_user_code = False

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return Evaluated(started.tolist(), None)


class BigRangeSource(ElementSource[Indices]):
    """The numbers of a `range` that do not fit in 64 bits."""

    runs_user_code = False

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return Evaluated(list(map(self._numbers.__getitem__, started.tolist())), None)


class FileSource(ElementSource[Indices]):
    """Records of files the engine reads, ahead of their use where storage is far.

    Args:
        files: The files.
        reads: Bounds how many reads are in flight, together with all else that is given it.
    """

    runs_user_code = False

    def __init__(self, files: RecordFiles, reads: ReadQueue | None = None) -> None:
        self._files = files
        self._reads = reads
        self.mean_byte_len = files.mean_byte_len

    @property
    def waits(self) -> bool:
        """Whether what it read lately had to be waited for."""
        return self._files.is_far

    def start(self, at: Indices) -> tuple[Indices, PendingRead | None]:
        """See `ElementSource.start`; records at hand in memory are left to `finish`."""
        if not self._files.is_far:
            return at, None
        try:
            return at, self._files.start(at, self._reads)
        except Exception:
            return at, None  # `finish` shows which record it is.

    def settle(
        self, started: tuple[Indices, PendingRead | None]
    ) -> Evaluated | tuple[Indices, None]:
        """See `ElementSource.settle`."""
        index, pending = started
        return (index, None) if pending is None else self._read(index, pending)

    def finish(self, started: Evaluated | tuple[Indices, PendingRead | None]) -> Evaluated:
        """See `ElementSource.finish`."""
        return started if isinstance(started, Evaluated) else self._read(*started)

    def read(self, at: Indices) -> Evaluated:
        """See `ElementSource.read`."""
        return super().read(at) if self._files.is_far else self._read(at)

    def filler(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """See `ElementSource.filler`; none where records are better read many at a time."""
        return None if self._files.is_far else functools.partial(fill_columns, self._files)

    def _read(self, index: Indices, pending: PendingRead | None = None) -> Evaluated:
        """A record that cannot be read does not hide those before it."""
        try:
            read = self._files.read(index) if pending is None else pending.finish()
            return Evaluated(read, None)
        except Exception:
            pass  # One by one shows which record it is.
        return one_by_one(self._files.read_one, index.tolist())


def one_by_one(read: Callable[[Any], Any], index: Iterable[Any]) -> Evaluated:
    """What `read` returns for each of `index`, up to the first for which it fails."""
    made = []
    try:
        for i in index:
            made.append(read(i))  # noqa: PERF401 - those before a failure are wanted
    except StopIteration as stop:
        failure = stopped(stop)
        failure.__cause__ = stop
        return Evaluated(made, failure)
    except Exception as failure:
        return Evaluated(made, failure)
    return Evaluated(made, None)


class ObjectSource(ElementSource[Indices]):
    """A user's object, asked for one element at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return Step("read", self._source.__getitem__)

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        return one_by_one(self._source.__getitem__, started.tolist())


class BlockObjectSource(ElementSource[Indices]):
    """A user's object that offers `__getitems__`, asked for many elements at once."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads_lists = getattr(source, "_reads_lists", True)  # those of a loader know

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        index = started.tolist()
        made: list[Any] = []
        for at in range(0, len(index), tuning.MOST_DEMANDED):
            part = self._list(index[at : at + tuning.MOST_DEMANDED])
            made += part.elements
            if part.failure is not None:
                return Evaluated(made, part.failure)
        return Evaluated(made, None)

    def _list(self, index: list[int]) -> Evaluated:
        """The elements at `index`; where a list fails, they are asked for singly."""
        refusal: Exception | None = None
        try:
            answer = self._source.__getitems__(index.copy())
            made = None if isinstance(answer, Mapping | str | bytes) else list(answer)
            if made is not None and len(made) == len(index):
                return Evaluated(made, None)
            found = f"a {type(answer).__name__}" if made is None else f"{len(made)} elements"
            refusal = ValueError(
                f"`{type(self._source).__name__}.__getitems__` must return a list with one element "
                f"for each of the {len(index)} indices it is given, got {found}; correct it, or "
                "leave it out and have `__getitem__` called"
            )
        except Exception:
            pass  # One by one shows which element it is.
        singly = one_by_one(self._source.__getitem__, index)
        if refusal is None or singly.failure is not None:
            return singly
        return Evaluated([], refusal)


class BatchSource(ElementSource[Indices]):
    """Batches of consecutive elements of one epoch of another plan."""

    def __init__(self, node: plan.Batch, parent: Evaluator, parent_len: int) -> None:
        self._node = node
        self._parent = parent
        self._parent_len = parent_len
        self.runs_user_code = parent.runs_user_code or node.batch_fn is not None
        self.mean_byte_len = parent.mean_byte_len * node.batch_size
        self.num_records = parent.num_records * node.batch_size

    @property
    def waits(self) -> bool:
        """See `ElementSource.waits`."""
        return self._parent.waits_for_storage

    def start(self, at: Indices) -> list[range | PendingElements]:
        """See `ElementSource.start`; batches whose records have to be waited for are begun."""
        positions = map(self._positions, at.tolist())
        if not self._parent.waits_for_storage:
            return list(positions)
        return [self._parent.begin(batch.start, len(batch)) for batch in positions]

    def settle(self, started: list[range | PendingElements]) -> list[range | PendingElements]:
        """See `ElementSource.settle`."""
        for batch in started:
            if not isinstance(batch, range):
                batch.settle()
        return started

    def finish(self, started: list[range | PendingElements]) -> Evaluated:
        """See `ElementSource.finish`."""
        batches: list[Any] = []
        for batch in started:
            try:
                if isinstance(batch, range):
                    batches.append(self._batch(batch.start, batch.stop))
                else:
                    batches.append(self._stacked(self._all_of(batch(), 0)))
            except Exception as failure:
                return Evaluated(batches, failure)
        return Evaluated(batches, None)

    def _positions(self, index: int) -> range:
        """Where the elements of batch `index` stand in the parent."""
        if not self._node.length:
            raise IndexError(f"`batch` of no records has no position {index}")
        epoch, number = divmod(index, self._node.length)
        first = number * self._node.batch_size
        stop = min(self._parent_len, first + self._node.batch_size)
        offset = epoch * self._parent_len
        return range(offset + first, offset + stop)

    def _stacked(self, elements: list[Any]) -> Any:
        if self._node.batch_fn is not None:
            return self._node.batch_fn(elements)
        return stack(elements, shared_arena())

    def _batch(self, start: int, stop: int) -> Any:
        count = stop - start
        if self._node.batch_fn is not None:
            return self._stacked(self._elements(start, stop))
        numbers = self._parent.numbers(start, count)
        if numbers is not None:
            return numbers
        made = batched(self._parent, start, count)
        if isinstance(made, BatchBlock):
            return made.batch
        elements = self._all_of(made, 0)  # up to what made them no batch
        return self._stacked(elements + self._elements(start + len(elements), stop, len(elements)))

    def _elements(self, start: int, stop: int, num_before: int = 0) -> list[Any]:
        elements: list[Any] = []
        size = block_len(self._parent.mean_byte_len, stop - start)
        parts = self._parent.run_incrementally(start, stop - start)
        for at in range(start, stop, size):
            made = parts.run(at, min(size, stop - at))
            elements += self._all_of(made, num_before + len(elements))
        return elements

    def _all_of(self, made: Evaluated, num_before: int) -> list[Any]:
        if made.failure is not None:
            number = num_before + len(made.elements)
            add_note(
                made.failure, [f"which is element {number} of a batch of {located(self._node)}"]
            )
            raise made.failure
        return made.elements


_MISSING = object()


class FlatMapSource(ElementSource[Indices]):
    """The pieces that a user's function splits elements of another plan into."""

    def __init__(self, node: plan.FlatMap, parent: Evaluator) -> None:
        self._split = node.transform.flat_map
        self._fan_out = node.transform.max_fan_out
        self._parent = parent
        self.mean_byte_len = parent.mean_byte_len
        self.num_records = parent.num_records
        self.reads_lists = parent.reads_lists

    @property
    def waits(self) -> bool:
        """See `ElementSource.waits`."""
        return self._parent.waits_for_storage

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`; an element is split once for consecutive pieces of it."""
        wholes, pieces_of = np.divmod(started, self._fan_out)
        is_new = np.ones(len(wholes), bool)
        is_new[1:] = wholes[1:] != wholes[:-1]
        read = self._parent.run_at(wholes[is_new])
        elements = iter(read.elements)
        made: list[Any] = []
        pieces: Sequence[Any] = ()
        for piece, new in zip(pieces_of.tolist(), is_new.tolist(), strict=True):
            if new:
                element = next(elements, _MISSING)
                if element is _MISSING:
                    return Evaluated(made, read.failure)
                try:
                    pieces = self._pieces(element)
                except Exception as failure:
                    return Evaluated(made, failure)
            made.append(pieces[piece] if piece < len(pieces) else None)
        return Evaluated(made, None)

    def _pieces(self, element: Any) -> Sequence[Any]:
        if element is None:
            return ()
        pieces = self._split(element)
        if not isinstance(pieces, Sequence):
            pieces = list(pieces)
        if len(pieces) > self._fan_out:
            raise ValueError(
                "The user-provided FlatMapTransform has a split that exceeds specified max fan-out "
                f"size. To address this, you can raise the max fan-out size, but for max fan-out "
                f"size >100, performance may suffer. Split: {len(pieces)}, "
                f"max fan-out: {self._fan_out}."
            )
        return pieces


class ZipSource(ElementSource[Indices]):
    """Tuples of what several plans have at the same index."""

    def __init__(self, parents: Sequence[Evaluator]) -> None:
        self._parents = parents
        self.runs_user_code = any(parent.runs_user_code for parent in parents)
        self.mean_byte_len = sum(parent.mean_byte_len for parent in parents)
        self.num_records = sum(parent.num_records for parent in parents)
        self.reads_lists = any(parent.reads_lists for parent in parents)

    @property
    def waits(self) -> bool:
        """See `ElementSource.waits`."""
        return any(parent.waits_for_storage for parent in self._parents)

    def start(self, at: Indices) -> list[PendingElements]:
        """See `ElementSource.start`."""
        return [parent.begin_at(at) for parent in self._parents]

    def settle(self, started: list[PendingElements]) -> list[PendingElements]:
        """See `ElementSource.settle`."""
        for begun in started:
            begun.settle()
        return started

    def finish(self, started: list[PendingElements]) -> Evaluated:
        """See `ElementSource.finish`."""
        made = [begun() for begun in started]
        tuples = list(zip(*(part.elements for part in made), strict=False))
        failures = [p.failure for p in made if p.failure and len(p.elements) == len(tuples)]
        return Evaluated(tuples, failures[0] if failures else None)


class SelectSource(ElementSource[Indices]):
    """Elements of several plans, picked by a user's map."""

    def __init__(self, selection: Any, parents: Sequence[Evaluator]) -> None:
        self._selection = selection
        self._parents = parents
        self.mean_byte_len = max((parent.mean_byte_len for parent in parents), default=0.0)
        self.reads_lists = any(parent.reads_lists for parent in parents)

    @property
    def waits(self) -> bool:
        """See `ElementSource.waits`."""
        return any(parent.waits_for_storage for parent in self._parents)

    def finish(self, started: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
        picked = one_by_one(self._selection.__getitem__, started.tolist())
        places: dict[int, list[int]] = {}
        for place, (number, _) in enumerate(picked.elements):
            places.setdefault(number, []).append(place)
        parts = []
        for number, rows in places.items():
            keys = np.array([picked.elements[row][1] for row in rows], np.int64)
            parts.append((np.array(rows), self._parents[number].run_at(keys)))
        return merged(parts, len(picked.elements), picked.failure)


def merged(
    parts: Sequence[tuple[Any, Evaluated]], length: int, failure: BaseException | None = None
) -> Evaluated:
    """Elements of several plans at their places among `length`, up to the first failure.

    Args:
        parts: Pairs of (places, ascending; what stands there).
        length: How many places there are.
        failure: What hindered place `length`, if anything.
    """
    made: list[Any] = [None] * length
    for rows, part in parts:
        if part.failure is not None and rows[len(part.elements)] < length:
            length, failure = int(rows[len(part.elements)]), part.failure
        for row, element in zip(rows.tolist(), part.elements, strict=False):
            made[row] = element
    return Evaluated(made[:length], failure)
