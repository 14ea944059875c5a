"""Sequences put into bins, a batch of bins at a time; each bin becomes a row."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill import _native
from grainmill._iterators.cursor import Cursor, fixed
from grainmill._iterators.feature_values import FeatureValues, rows_of
from grainmill._iterators.notes import note_stage
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State, runs
from grainmill._plan import sequential

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEAST, _MOST = 32, 256
"""Elements asked of the parent at once: as many as a batch took before, within these."""


@runs(sequential.FitPack)
class FitPackStage(Stage):
    """Packs what `parent` yields as `node` says.

    A batch of bins is packed, then handed out row by row. The state is that of the parent
    before the batch and the rows already handed out, so restoring packs the batch again.
    """

    def __init__(self, node: sequential.FitPack, parent: Stage) -> None:
        super().__init__(parent)
        self._node = node
        self._cursor = Cursor(parent)
        self._features = _Features(node)
        self._packer = self._features.packer()
        self._columns: dict[str, Any] | None = None
        self._order: list[int] = []
        self._start = self._cursor.state_getter()
        self._next_row = 0
        self._counter = 0
        self._taken = 0
        self._want = _LEAST

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`: all rows of a batch are ready at once."""
        return self._node.num_packing_bins

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; rows are taken apart one by one."""
        if not self._has_rows():
            return Block([], self._at_end())
        first, columns = self._next_row, self._columns or {}
        rows = self._order[first : first + limit]
        self._next_row += len(rows)
        state_after = self._states(first, len(self._order))

        def finish(row: int, _: int) -> dict[str, Any]:
            return {key: cells[row] for key, cells in columns.items()}

        shown = columns if self._features.are_arrays else None
        return Block(rows, state_after, finish, columns=shown)

    def _has_rows(self) -> bool:
        """Whether there are rows to hand out, after packing some if there were none."""
        while self._columns is None or self._next_row >= len(self._order):
            if not self._pack():
                return False
        return True

    def _at_end(self) -> Callable[[int], State]:
        return fixed(self.state())

    def _states(self, first: int, num_rows: int) -> Callable[[int], State]:
        marks = self._start, self._cursor.state_getter()
        return functools.partial(_state_after, marks, self._counter, first, num_rows)

    def _pack(self) -> bool:
        """Packs one batch; `False` at the end of the data."""
        if self._columns is not None:
            self._counter += len(self._order)
            self._next_row -= len(self._order)
            self._columns = None
            self._start = self._cursor.state_getter()
        full, before = False, self._taken
        while not full:
            elements = self._cursor.peek(self._want)
            if not elements:
                break
            count, full = self._push(elements)
            self._cursor.advance(count)
            self._taken += count
        self._want = min(max(self._taken - before, _LEAST), _MOST)
        num_rows, columns, kept = self._packer.take()
        if self._next_row > num_rows:
            raise ValueError(
                f"state was saved at row {self._next_row} of a batch of bins but the batch has "
                f"{num_rows} rows; restore needs the same data and packing options"
            )
        if num_rows == 0:
            return False
        self._columns = self._features.columns(num_rows, columns, kept)
        self._order = self._shuffled(num_rows, self._columns)
        return True

    def _push(self, elements: list[Any]) -> tuple[int, bool]:
        try:
            return self._packer.push(elements, 0)
        except Exception as failure:
            failure.add_note(
                f"Element {self._taken} of those this {self._node} took since it was made or "
                "restored cannot be packed."
            )
            note_stage(failure, self._node, self._cursor.state, self._cursor.state_after_first)
            raise

    def _shuffled(self, num_rows: int, columns: dict[str, Any]) -> list[int]:
        if not self._node.shuffle_bins:
            return list(range(num_rows))
        rng = np.random.default_rng(self._node.seed + self._counter)
        order: list[int] = rng.permuted(range(num_rows)).tolist()
        feature = self._node.shuffle_bins_group_by_feature
        if feature is None:
            return order
        means = [_mean_of_unique(cells) for cells in columns[feature]]
        return sorted(range(num_rows), key=lambda row: (means[row], order[row]))

    def state(self) -> State:
        """See `Stage.state`."""
        if self._columns is not None:
            return self._states(self._next_row, len(self._order))(0)
        counter = self._counter + self._next_row
        return {"parent": self._start(), "next_row": self._next_row, "counter": counter}

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parent", "next_row", "counter"))
        next_row = saved.index("next_row", self._node.num_packing_bins)
        counter = saved.index("counter", least=next_row)
        self._cursor.restore(saved["parent"])
        self._packer = self._features.packer()
        self._columns = None
        self._start = self._cursor.state_getter()
        self._next_row = next_row
        self._counter = counter - next_row
        self._taken = 0


def _mean_of_unique(cells: Any) -> Any:
    unique = np.unique(np.asarray(cells))
    return np.sum(unique) / np.count_nonzero(unique)


class _Features:
    """What of an element goes where."""

    def __init__(self, node: sequential.FitPack) -> None:
        self._node = node
        lengths = dict(sequential.leaves(node.length_struct, "length_struct"))
        self._paths = list(lengths)
        self._lengths = list(lengths.values())
        self._marked = [path[0] not in node.meta_features for path in self._paths]
        self._kept = [name for name in node.meta_features if name not in node.length_struct]
        self.are_arrays = not self._kept and all(len(path) == 1 for path in self._paths)

    def packer(self) -> _native.BinPacker:
        """Empty bins for these features."""
        node = self._node
        alignment = dict(sequential.leaves(node.pack_alignment_struct or {}, ""))
        padding = dict(sequential.leaves(node.padding_struct or {}, ""))
        names = ["/".join(map(str, path)) for path in self._paths]
        return _native.BinPacker(
            paths=self._paths,
            names=names,
            capacities=self._lengths,
            alignments=[alignment.get(path, 1) for path in self._paths],
            marked=self._marked,
            kept=self._kept,
            num_bins=node.num_packing_bins,
            max_sequences=node.max_sequences_per_bin,
            best_fit=node.best_fit,
            cells=FeatureValues(
                names, [padding[path] for path in self._paths] if padding else None
            ),
        )

    def columns(
        self, num_rows: int, columns: list[tuple[Any, ...]], kept: list[list[list[Any]]]
    ) -> dict[str, Any]:
        """The values of all rows by key, sorted."""
        parts: dict[str, Any] = dict(zip(self._kept, kept, strict=True))
        for path, length, column in zip(self._paths, self._lengths, columns, strict=True):
            values, segment_ids, positions = rows_of(
                column, self._node.num_packing_bins, num_rows, length
            )
            key, *inner = path
            if inner:
                _nest(parts.setdefault(key, [{} for _ in range(num_rows)]), inner, values)
                continue
            parts[key] = values
            if segment_ids is not None:
                parts[f"{key}_segment_ids"] = segment_ids
                parts[f"{key}_positions"] = positions
        return {key: parts[key] for key in sorted(parts)}


def _nest(rows: list[dict[str, Any]], path: Sequence[Any], values: Any) -> None:
    for row, cells in zip(rows, values, strict=True):
        place = row
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = cells


def _state_after(
    marks: tuple[Callable[[], State], Callable[[], State]],
    counter: int,
    first: int,
    num_rows: int,
    count: int,
) -> State:
    start, end = marks  # of the elements that these rows were packed from
    row = first + count
    if row < num_rows:
        return {"parent": start(), "next_row": row, "counter": counter + row}
    return {"parent": end(), "next_row": 0, "counter": counter + row}
