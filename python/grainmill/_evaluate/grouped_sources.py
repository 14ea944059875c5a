"""Sources of parts that are alike: one leaf for all, of which a block opens those it touches."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate.element_sources import ElementSource, FileSource, merged, one_by_one
from grainmill._evaluate.grouped_steps import read_step
from grainmill._native import RecordFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.element_sources import Indices, PartNumbers
    from grainmill._evaluate.fuse import Evaluated, Step
    from grainmill._native import ReadQueue

Places: TypeAlias = "tuple[Indices, PartNumbers]"

# Of more parts than this, so many are asked how long their elements are, and spread evenly.
_MOST_ASKED = 16


class GroupedSource(ElementSource[Places]):
    """The sources of one chain, told apart by their part numbers.

    `mean_byte_len` is that of the longest of the parts that were asked.
    """

    def at(self, index: Indices, parts: PartNumbers | None) -> Any:
        """See `ElementSource.at`."""
        return index, parts


class GroupedObjects(GroupedSource):
    """Users' objects, asked for one element at a time."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._step = read_step([source.__getitem__ for source in sources])

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return self._step

    def finish(self, started: Places) -> Evaluated:
        """See `ElementSource.finish`."""
        index, parts = started
        return one_by_one(self._step.function, zip(parts.tolist(), index.tolist(), strict=True))


class GroupedFiles(FileSource):
    """Records of many sources, each with files of its own, as those of one."""

    def __init__(self, files: Sequence[RecordFiles], reads: ReadQueue) -> None:
        super().__init__(RecordFiles.joined(files), reads)
        self._starts = np.cumsum([0, *map(len, files[:-1])], dtype=np.int64)
        self.mean_byte_len = max(files[part].mean_byte_len for part in _asked(len(files)))

    def at(self, index: Indices, parts: PartNumbers | None) -> Indices:
        """See `ElementSource.at`."""
        return index if parts is None else self._starts[parts] + index


class GroupedOthers(GroupedSource):
    """What other leaves make, each of which is made when a block first touches it."""

    def __init__(
        self, leaves: Sequence[Callable[[], ElementSource[Indices]]], *, runs_user_code: bool
    ) -> None:
        self._leaves = _Opened(leaves)
        self.runs_user_code = runs_user_code
        self._asked = [self._leaves[part] for part in _asked(len(leaves))]
        self.mean_byte_len = max(leaf.mean_byte_len for leaf in self._asked)
        self.num_records = max(leaf.num_records for leaf in self._asked)
        self.reads_lists = any(leaf.reads_lists for leaf in self._asked)

    @property
    def waits(self) -> bool:
        """See `ElementSource.waits`; of those that were asked how long elements are."""
        return any(leaf.waits for leaf in self._asked)

    def settle(self, started: Any) -> Any:
        """See `ElementSource.settle`."""
        count, by_part = started
        return count, [
            (rows, part, self._leaves[part].settle(begun)) for rows, part, begun in by_part
        ]

    def start(self, at: Places) -> Any:
        """See `ElementSource.start`."""
        index, parts = at
        started = [
            (rows, part, self._leaves[part].start(index[rows]))
            for part, rows in _rows_by_part(parts)
        ]
        return len(index), started

    def finish(self, started: Any) -> Evaluated:
        """See `ElementSource.finish`."""
        count, by_part = started
        made = [(rows, self._leaves[part].finish(begun)) for rows, part, begun in by_part]
        return merged(made, count)

    def read(self, at: Places) -> Evaluated:
        """See `ElementSource.read`."""
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
