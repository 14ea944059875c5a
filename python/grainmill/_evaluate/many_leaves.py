"""Sources of parts that are alike: one leaf for all, of which a block opens those it touches."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate.by_part import read_step
from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.leaves import Leaf, merged, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.fuse import Step
    from grainmill._evaluate.leaves import Indices, PartNumbers
    from grainmill._native import ReadQueue, RecordFiles

Places: TypeAlias = "tuple[Indices, PartNumbers]"

# Of more parts than this, so many are asked how long their elements are, and spread evenly.
_MOST_ASKED = 16
# Fewer records of one source than this cost less when each is asked for alone.
_FEW_RECORDS = 2


class ManyLeaves(Leaf[Places]):
    """The sources of one chain, told apart by their part numbers.

    `mean_byte_len` is that of the longest of the parts that were asked.
    """

    @staticmethod
    def at(index: Indices, parts: PartNumbers | None) -> Any:
        """See `Leaf.at`."""
        return index, parts


class ManyObjects(ManyLeaves):
    """Users' objects, asked for one element at a time."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._step = read_step([source.__getitem__ for source in sources])

    def first_step(self) -> Step:
        """See `Leaf.first_step`."""
        return self._step

    def finish(self, started: Places) -> Evaluated:
        """See `Leaf.finish`."""
        index, parts = started
        return one_by_one(self._step.function, zip(parts.tolist(), index.tolist(), strict=True))


class ManyFiles(ManyLeaves):
    """Records of many sources, each with files of its own that are opened when they are needed."""

    runs_user_code = False

    def __init__(self, files: Sequence[Callable[[], RecordFiles]], reads: ReadQueue) -> None:
        self._reads = reads
        self._files: dict[int, RecordFiles] = _Opened(files)
        self._read_one = _Opened([functools.partial(self._reader, n) for n in range(len(files))])
        asked = [self._files[part] for part in _asked(len(files))]
        self.mean_byte_len = max(opened.mean_byte_len for opened in asked)
        self._is_far = any(opened.is_far for opened in asked)

    def _reader(self, part: int) -> Any:
        return self._files[part].read_one

    @property
    def waits(self) -> bool:
        """Whether what it read lately had to be waited for."""
        return self._is_far

    def start(self, at: Places) -> tuple[Places, list[tuple[Any, ...]] | None]:
        """See `Leaf.start`; records at hand in memory are left to `finish`."""
        return at, self._pending(*at) if self._is_far else None

    def settle(self, started: Any) -> Any:
        """See `Leaf.settle`."""
        return started if started[1] is None else self.finish(started)

    def finish(self, started: Any) -> Evaluated:
        """See `Leaf.finish`."""
        if isinstance(started, Evaluated):
            return started
        (index, parts), pending = started
        if pending is None:
            return self.read((index, parts))
        made = [(rows, self._all_or_singly(part, at, finish)) for rows, part, at, finish in pending]
        self._look(parts)
        return merged(made, len(index))

    def read(self, at: Places) -> Evaluated:
        """See `Leaf.read`; where storage is far, all parts are read at the same time."""
        self._look(at[1])
        return self.finish((at, self._pending(*at))) if self._is_far else self._read(*at)

    def _look(self, parts: PartNumbers) -> None:
        """Notes whether storage is far: one part of a block tells, the next time another."""
        if len(parts):
            self._is_far = self._files[int(parts[0])].is_far

    def _read(self, index: Indices, parts: PartNumbers) -> Evaluated:
        by_part = _rows_by_part(parts)
        if len(by_part) * _FEW_RECORDS > len(parts):
            return one_by_one(self._record, zip(parts.tolist(), index.tolist(), strict=True))
        made = [(rows, self._read_part(part, index[rows])) for part, rows in by_part]
        return merged(made, len(index))

    def _record(self, place: tuple[int, int]) -> bytes:
        part, index = place
        record: bytes = self._read_one[part](index)
        return record

    def _pending(self, index: Indices, parts: PartNumbers) -> list[tuple[Any, ...]]:
        """Starts to read; for each part its rows, its number, its indices and what goes on."""
        return [
            (rows, part, index[rows], self._begun(part, index[rows]))
            for part, rows in _rows_by_part(parts)
        ]

    def _begun(self, part: int, index: Indices) -> Callable[[], list[bytes]]:
        try:
            return self._files[part].start(index, self._reads).finish
        except Exception:  # It may be met again when its turn comes.
            return lambda: self._files[part].read(index)

    def _read_part(self, part: int, index: Indices) -> Evaluated:
        return self._all_or_singly(part, index, lambda: self._files[part].read(index))

    def _all_or_singly(
        self, part: int, index: Indices, read: Callable[[], list[bytes]]
    ) -> Evaluated:
        """A record that cannot be read does not hide those before it."""
        try:
            return Evaluated(read(), None)
        except Exception:
            pass  # One by one shows which record it is.
        return one_by_one(self._record, ((part, i) for i in index.tolist()))


class ManyOthers(ManyLeaves):
    """What other leaves make, each of which is made when a block first touches it."""

    def __init__(
        self, leaves: Sequence[Callable[[], Leaf[Indices]]], *, runs_user_code: bool
    ) -> None:
        self._leaves = _Opened(leaves)
        self.runs_user_code = runs_user_code
        self._asked = [self._leaves[part] for part in _asked(len(leaves))]
        self.mean_byte_len = max(leaf.mean_byte_len for leaf in self._asked)
        self.num_records = max(leaf.num_records for leaf in self._asked)

    @property
    def waits(self) -> bool:
        """See `Leaf.waits`; of those that were asked how long elements are."""
        return any(leaf.waits for leaf in self._asked)

    def settle(self, started: Any) -> Any:
        """See `Leaf.settle`."""
        count, by_part = started
        return count, [
            (rows, part, self._leaves[part].settle(begun)) for rows, part, begun in by_part
        ]

    def start(self, at: Places) -> Any:
        """See `Leaf.start`."""
        index, parts = at
        started = [
            (rows, part, self._leaves[part].start(index[rows]))
            for part, rows in _rows_by_part(parts)
        ]
        return len(index), started

    def finish(self, started: Any) -> Evaluated:
        """See `Leaf.finish`."""
        count, by_part = started
        made = [(rows, self._leaves[part].finish(begun)) for rows, part, begun in by_part]
        return merged(made, count)

    def read(self, at: Places) -> Evaluated:
        """See `Leaf.read`."""
        index, parts = at
        made = [(rows, self._leaves[part].read(index[rows])) for part, rows in _rows_by_part(parts)]
        return merged(made, len(index))


class _Opened(dict[int, Any]):
    """What the functions of a list return, called when their number is first looked up."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __missing__(self, number: int) -> Any:
        made = self[number] = self._functions[number]()
        return made


def _asked(num_parts: int) -> range:
    return range(0, num_parts, -(-num_parts // _MOST_ASKED))


def _rows_by_part(parts: PartNumbers) -> list[tuple[int, Indices]]:
    """Each part with the rows where it stands, ascending."""
    order = np.argsort(parts, kind="stable")
    in_order = parts[order]
    starts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    bounds = [0, *starts.tolist(), len(parts)]
    numbers = in_order[bounds[:-1]].tolist() if len(parts) else []
    return [
        (number, order[start:stop])
        for number, (start, stop) in zip(numbers, pairwise(bounds), strict=False)
    ]
