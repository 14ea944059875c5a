"""Splits and joins batches into batches of another size."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from grainmill._checkpoint.ends import CutCount
from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import END, CursorStage
from grainmill._iterators.base.group_len import GroupLen
from grainmill._iterators.base.node import Regrouping, runs
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.notes import note_stage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.batching import checked_batch_size
from grainmill._plan.spec import in_rows
from grainmill._tree import Structure, flatten, flatten_with_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._plan.node import Node


@lazy_dataclass
class Rebatch(Regrouping):
    """Batches split and joined into batches of another size."""

    batch_size: int
    drop_remainder: bool
    dataset_name: ClassVar[str] = "RebatchIterDataset"
    saves: ClassVar[str] = "the position in a batch"
    parent_key: ClassVar[str | None] = "parent"
    restart_key: ClassVar[str | None] = "batch_idx"
    completes_last: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False
    restarts_before: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, batch_size: int, *, drop_remainder: bool) -> Self:
        """A node that regroups the rows of the batches of `parent`."""
        return cls((parent,), checked_batch_size(batch_size), drop_remainder)

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`; as in Grain, a last, shorter batch does not make the size unknown."""
        return in_rows(self.batch_size, spec_of(self.parent), 1)

    def _arguments(self) -> str:
        return f"(batch_size={self.batch_size}, drop_remainder={self.drop_remainder})"


class RebatchIterDataset(PlannedIterDataset[T_co]):
    """Splits and joins batches into batches of `batch_size` rows.

    Arrays of shape `(n, ...)` become ones of shape `(batch_size, ...)` and the same dtype. A batch
    that lies within one batch of the parent is a view of it; others are copies.

    Args:
        parent: A dataset of batches of any sizes; all arrays of a batch have the same number of
            rows.
        batch_size: Rows per new batch, at least 1.
        drop_remainder: Whether to drop a last, shorter batch.

    Raises:
        ValueError: `batch_size` is not positive. When read: the arrays of a batch differ in their
            number of rows.
        TypeError: `batch_size` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(8).batch(4).to_iter_dataset()
        >>> [batch.tolist() for batch in grain.experimental.RebatchIterDataset(ds, 3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
    """

    def __init__(
        self,
        parent: AnyDataset[T_co],
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> None:
        node = Rebatch.of(node_of(parent), batch_size, drop_remainder=drop_remainder)
        super().__init__(node, (parent,))


@runs(Rebatch)
class RebatchStage(CursorStage):
    """Regroups rows along the first axis of every leaf.

    A batch that lies within one batch of the parent is a view of it. A state holds the parent's
    state before its current batch, and how many rows of that were delivered.
    """

    pull_size = 1 << 20  # all batches within one of the parent are available together

    def __init__(self, node: Rebatch, parent: Stage) -> None:
        super().__init__(node, parent)
        self._size = node.batch_size
        self._drop_remainder = node.drop_remainder
        self._reset(0)

    def _reset(self, row: int) -> None:
        before = self._cursor.position()
        self._point = (before, row)
        self._slices: list[list[Any]] = []
        self._gathered = 0
        self._current = _Rows([], None, 0, before)
        self._row = 0
        self._skip = 0 if isinstance(row, CutCount) else row  # at the end of the data
        self._pending: tuple[Position, Any] | None = None
        self._number = -1  # of the parent's current batch, since this was created or restored

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; a block ends where the parent's batch does."""
        last = self._point
        points = [last]
        elements: list[Any] = []
        while len(elements) < limit:
            if elements and self._current.count - self._row < self._size:
                break
            batch = self._next_batch()
            if batch is None:
                break
            elements.append(batch)
            points.append(self._point)
        if not elements:
            points = [self._point]
        return Block(elements, functools.partial(_state_at, points))

    def _next_batch(self) -> Any:
        while self._gathered < self._size:
            if self._row == self._current.count and not self._advance():
                return self._remainder()
            end = min(self._row + self._size - self._gathered, self._current.count)
            self._slices.append([leaf[self._row : end] for leaf in self._current.leaves])
            self._gathered += end - self._row
            self._row = end
        self._point = (self._current.before, self._row)
        return self._joined()

    def _remainder(self) -> Any:
        self._point = (self._current.before, CutCount(self._row or self._point[1], 0))
        if not self._gathered or self._drop_remainder:
            self._slices, self._gathered = [], 0
            return None
        return self._joined()

    def _joined(self) -> Any:
        slices, self._slices, self._gathered = self._slices, [], 0
        structure = self._current.structure
        if structure is None:
            raise AssertionError("rows come from a batch")
        if len(slices) == 1:
            return structure.unflatten(slices[0])
        return structure.unflatten(map(np.concatenate, zip(*slices, strict=True)))

    def _advance(self) -> bool:
        """Moves on to the parent's next batch; `False` at its end."""
        if self._pending is None:
            before = self._cursor.position()
            batch = self._cursor.next()
            if batch is END:
                self._current.before = self._cursor.position()
                return False
            self._pending = before, batch
        before, batch = self._pending
        try:
            leaves, structure, count = self._parts(batch)
        except Exception as failure:
            raise_interrupt(failure)
            note_stage(failure, self._node, before, self._cursor.position())
            raise
        if self._skip > count:
            raise ValueError(
                f"state of {self._node} was saved after {self._skip} rows of a batch that has "
                f"{count} rows now; restore needs the same data and batches"
            )
        self._current = _Rows(leaves, structure, count, before)
        self._number += 1
        self._row, self._skip = self._skip, 0
        self._pending = None
        return True

    def _parts(self, batch: Any) -> tuple[list[Any], Structure, int]:
        """The leaves of a batch, their structure and the number of rows."""
        leaves, structure = flatten(batch)
        if self._slices and structure != self._current.structure:
            raise self._unlike(batch)
        return leaves, structure, self._row_count(batch, leaves)

    def _unlike(self, batch: Any) -> ValueError:
        """The error if `batch`, the parent's next one, has another structure than the current."""
        structure = self._current.structure
        if structure is None:
            raise AssertionError("rows come from a batch")
        before = dict(flatten_with_path(structure.unflatten(self._current.leaves), "batch"))
        now = dict(flatten_with_path(batch, "batch"))
        number = self._number
        lacks = [f"`{path}`" for path in before if path not in now]
        adds = [f"`{path}`" for path in now if path not in before]
        differ = "their containers are of other types"
        if lacks or adds:
            missing = f"batch {number + 1} lacks {', '.join(lacks)}" if lacks else ""
            more = f"batch {number} lacks {', '.join(adds)}" if adds else ""
            differ = " and ".join(part for part in (missing, more) if part)
        return ValueError(
            "batches to be joined must have the same structure: of those that "
            f"{self._node} took since it was created or restored, {differ}; every batch needs the "
            "same leaves"
        )

    def _row_count(self, batch: Any, leaves: list[Any]) -> int:
        counts = {len(leaf) if np.ndim(leaf) else None for leaf in leaves}
        if len(counts) != 1 or None in counts:
            shown = ", ".join(
                f"{len(leaf)} at `{path}`" if np.ndim(leaf) else f"a scalar at `{path}`"
                for path, leaf in flatten_with_path(batch, "batch")
            )
            raise ValueError(
                f"leaves of a batch must have the same number of rows, got {shown or 'no leaves'} "
                f"in batch {self._number + 1} of those that {self._node} took since it was created "
                "or restored; batch the elements before `RebatchIterDataset`"
            )
        if not len(leaves[0]):
            # Grain's text, which programs may match on.
            raise ValueError(
                "Rebatching with starting batch size of 0 is not supported: batch "
                f"{self._number + 1} of those that {self._node} took since it was created or "
                "restored has no rows"
            )
        return len(leaves[0])

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._point)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "batch_idx"))
        row = GroupLen.of(saved["batch_idx"]).in_state(saved.index("batch_idx"))
        self._cursor.restore(saved["parent"])
        self._reset(row)


class _Rows:
    """A batch of the parent, and the position before it."""

    __slots__ = ("before", "count", "leaves", "structure")

    def __init__(
        self, leaves: list[Any], structure: Structure | None, count: int, before: Position
    ) -> None:
        self.leaves = leaves
        self.structure = structure
        self.count = count
        self.before = before


def _state(before: Position, row: int) -> State:
    return {"parent": state_at(before), "batch_idx": row}


def _state_at(points: list[tuple[Position, int]], k: int) -> State:
    return _state(*points[k])
