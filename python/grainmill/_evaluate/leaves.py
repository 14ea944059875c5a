"""Where the elements of a chain come from: files, users' objects, numbers, other plans."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate.fuse import Evaluated, Step
from grainmill._evaluate.rows import StackedRows, batched, block_len
from grainmill._evaluate.stack import shared_arena, stack
from grainmill._evaluate.storage import StorageWatch
from grainmill._native import fill_columns

if TYPE_CHECKING:
    from grainmill._evaluate.program import Program
    from grainmill._native import PendingRead, RecordFiles
    from grainmill._plan import random_access as plan

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


class Leaf(abc.ABC):
    """The source of one chain.

    Attributes:
        runs_user_code: Whether Python code of the user makes the elements.
        mean_byte_len: Bytes of an element on average, 0 where unknown.
    """

    runs_user_code = True
    mean_byte_len = 0.0

    def start(self, index: Indices) -> Any:
        """Begins what can go on without the interpreter; `finish` takes what this returns."""
        return index

    @abc.abstractmethod
    def finish(self, started: Any) -> Evaluated:
        """The elements at the indices that were given to `start`."""

    def read(self, index: Indices) -> Evaluated:
        """The elements at `index`, now."""
        return self.finish(self.start(index))

    def filler(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """`fill_columns` of the engine but for its first argument, where it reads these files."""
        return None

    def first_step(self) -> Step | None:
        """A step that reads one element, where elements are better made inside the loop."""
        return None


class NumbersLeaf(Leaf):
    """The numbers of a `range`."""

    runs_user_code = False

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def column(self, index: Indices) -> Indices:
        """The numbers at `index` as an array."""
        start, step = self._numbers.start, self._numbers.step
        return index if (start, step) == (0, 1) else start + index * step

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`."""
        return Evaluated(self.column(started).tolist(), None)


class FilesLeaf(Leaf):
    """Records of files the engine reads."""

    runs_user_code = False

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._storage = StorageWatch()
        self.mean_byte_len = files.mean_byte_len

    @property
    def waits(self) -> bool:
        """Whether what it read lately had to be waited for."""
        return self._storage.slow

    def start(self, index: Indices) -> tuple[Indices, PendingRead | None]:
        """See `Leaf.start`; records at hand in memory are left to `finish`."""
        return index, self._files.start(index) if self._storage.is_slow() else None

    def finish(self, started: tuple[Indices, PendingRead | None]) -> Evaluated:
        """See `Leaf.finish`."""
        index, pending = started
        return self.read(index) if pending is None else self._read(index, pending)

    def read(self, index: Indices) -> Evaluated:
        """See `Leaf.read`."""
        if self._storage.is_due():
            return self._storage.watched(lambda: self._read(index), len(index))
        return self._read(index)

    def filler(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """See `Leaf.filler`; none where `read` should watch the storage."""
        if self._storage.is_due():
            self._storage.look_next()
            return None
        return functools.partial(fill_columns, self._files)

    def _read(self, index: Indices, pending: PendingRead | None = None) -> Evaluated:
        """A record that can not be read does not hide those before it."""
        try:
            read = self._files.read(index) if pending is None else pending.finish()
            return Evaluated(read, None)
        except Exception:
            pass  # One by one shows which record it is.
        return _one_by_one(self._files.read_one, index.tolist())


def _all(make: Callable[[], list[Any]]) -> Evaluated:
    try:
        return Evaluated(make(), None)
    except Exception as failure:
        return Evaluated([], failure)


def _one_by_one(read: Callable[[int], Any], index: Iterable[int]) -> Evaluated:
    made = []
    try:
        for i in index:
            made.append(read(i))  # noqa: PERF401 - those before a failure are wanted
    except Exception as failure:
        return Evaluated(made, failure)
    return Evaluated(made, None)


class ObjectLeaf(Leaf):
    """A user's object, asked for one element at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def first_step(self) -> Step:
        """See `Leaf.first_step`."""
        return Step("read", self._source.__getitem__)

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`."""
        return _one_by_one(self._source.__getitem__, started.tolist())


class BlockObjectLeaf(Leaf):
    """A user's object that offers `__getitems__`, asked for many elements at once."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`; where a block fails, its elements are asked for singly."""
        index = started.tolist()
        made = _all(lambda: list(self._source.__getitems__(index)))
        if made.failure is None and len(made.elements) == len(index):
            return made
        return _one_by_one(self._source.__getitem__, index)


class BatchLeaf(Leaf):
    """Batches of consecutive elements of one epoch of another plan."""

    def __init__(self, node: plan.Batch, parent: Program, parent_len: int) -> None:
        self._node = node
        self._parent = parent
        self._parent_len = parent_len
        self.runs_user_code = parent.runs_user_code or node.batch_fn is not None
        self.mean_byte_len = parent.mean_byte_len * node.batch_size

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`."""
        batches: list[Any] = []
        for i in started.tolist():
            epoch, number = divmod(i, self._node.length)
            first = number * self._node.batch_size
            stop = min(self._parent_len, first + self._node.batch_size)
            offset = epoch * self._parent_len
            try:
                batches.append(self._batch(offset + first, offset + stop))
            except Exception as failure:
                return Evaluated(batches, failure)
        return Evaluated(batches, None)

    def _batch(self, start: int, stop: int) -> Any:
        count = stop - start
        if self._node.batch_fn is not None:
            return self._node.batch_fn(self._elements(start, stop))
        numbers = self._parent.numbers(start, count)
        if numbers is not None:
            return numbers
        made = batched(self._parent, start, count)
        if isinstance(made, StackedRows):
            return made.batch
        elements = _all_of(made)  # up to what made them no batch
        return stack(elements + self._elements(start + len(elements), stop), shared_arena())

    def _elements(self, start: int, stop: int) -> list[Any]:
        elements: list[Any] = []
        size = block_len(self._parent.mean_byte_len, stop - start)
        parts = self._parent.in_parts(start, stop - start)
        for at in range(start, stop, size):
            elements += _all_of(parts.run(at, min(size, stop - at)))
        return elements


def _all_of(made: Evaluated) -> list[Any]:
    if made.failure is not None:
        raise made.failure
    return made.elements


class FlatMapLeaf(Leaf):
    """The pieces that a user's function splits elements of another plan into."""

    def __init__(self, node: plan.FlatMap, parent: Program) -> None:
        self._split = node.transform.flat_map
        self._fan_out = node.transform.max_fan_out
        self._parent = parent
        self.mean_byte_len = parent.mean_byte_len

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`; an element is split once for all pieces that stand together."""
        made: list[Any] = []
        last: int | None = None
        pieces: Sequence[Any] = ()
        for i in started.tolist():
            whole, piece = divmod(i, self._fan_out)
            if whole != last:
                read = self._parent.run(whole, 1)
                if read.failure is not None:
                    return Evaluated(made, read.failure)
                try:
                    pieces = self._pieces(read.elements[0])
                except Exception as failure:
                    return Evaluated(made, failure)
                last = whole
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


class ZipLeaf(Leaf):
    """Tuples of what several plans have at the same index."""

    def __init__(self, parents: Sequence[Program]) -> None:
        self._parents = parents
        self.runs_user_code = any(parent.runs_user_code for parent in parents)
        self.mean_byte_len = sum(parent.mean_byte_len for parent in parents)

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`."""
        made = [parent.run_at(started) for parent in self._parents]
        tuples = list(zip(*(part.elements for part in made), strict=False))
        failures = [p.failure for p in made if p.failure and len(p.elements) == len(tuples)]
        return Evaluated(tuples, failures[0] if failures else None)


class SelectLeaf(Leaf):
    """Elements of several plans, picked by a user's map."""

    def __init__(self, selection: Any, parents: Sequence[Program]) -> None:
        self._selection = selection
        self._parents = parents
        self.mean_byte_len = max((parent.mean_byte_len for parent in parents), default=0.0)

    def finish(self, started: Indices) -> Evaluated:
        """See `Leaf.finish`."""
        picked = _one_by_one(self._selection.__getitem__, started.tolist())
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
