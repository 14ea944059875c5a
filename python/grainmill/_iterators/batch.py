"""Consecutive elements stacked into batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.stack import BatchBuilder, shared_arena
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.cursor import Cursor, ResumePoint, constant_state_at
from grainmill._iterators.notes import note_part, note_stage
from grainmill._iterators.read import ReadStage
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan import sequential as plan


class BatchStage(Stage):
    """Stacks `batch_size` elements into one.

    Elements are copied into the batch when they arrive, while they are still in cache. If the
    parent fails in mid-batch, the elements so far stay in the pending batch for the next `pull`.
    """

    is_native = True
    saves = ""

    def __init__(self, node: plan.Batch, parent: Stage) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._node = node
        self._size = node.batch_size
        self._drop_remainder = node.drop_remainder
        self._takes_rows = node.batch_fn is None
        self._new_batch = _new_batch(node)
        self._reset()
        self._reader: ReadStage | None = None  # the parent, if it can compute whole batches
        if isinstance(parent, ReadStage) and node.batch_fn is None:
            self._reader = parent
            parent.expect_batches(node.batch_size)

    def _reset(self) -> None:
        self._pending = self._new_batch()
        self._start: ResumePoint | None = None  # before the pending batch, if it was started

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return 1 if self._reader is None else max(1, self._reader.num_ready_batches)

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; returns one batch, or those that the reader computed together."""
        if self._reader is not None and (self._start is None or not len(self._pending)):
            try:
                whole = self._reader.pull_batches(self._size, limit)
            except Exception as failure:
                raise_interrupt(failure)
                note_part(failure, self._node, 0)
                raise
            if whole is not None:
                self._start = None
                self._cursor.resync()
                return self._block(*whole)
        if self._start is None:
            self._start = self._cursor.resume_point()
        last, taken = self._start
        try:
            self._fill()
        except Exception as failure:
            raise_interrupt(failure)
            if self._start is not None:  # one element failed, not the whole batch
                note_part(failure, self._node, len(self._pending))
            raise
        after, position = self._cursor.resume_point()
        if len(self._pending) < self._size and (self._drop_remainder or not len(self._pending)):
            self._reset()
            return Block([], constant_state_at((after, position)))
        batch = self._run_or_rewind(self._pending.finish)
        self._reset()
        return Block([batch], functools.partial(_state, (last, taken), (after, position)))

    def _fill(self) -> None:
        """Adds the elements that the pending batch lacks."""
        cursor = self._cursor
        while missing := self._size - len(self._pending):
            if self._takes_rows and (rows := cursor.take_rows(missing)) is not None:
                self._run_or_rewind(self._pending.push_rows, *rows)
                continue
            elements = cursor.take(missing)
            if not elements:
                return
            self._run_or_rewind(self._pending.push, elements)
            del elements
            cursor.release_taken()  # the next elements reuse their memory, which is in cache

    def _block(self, whole: Block, count: int) -> Block:
        if not count or (self._drop_remainder and count < self._size):
            end = len(whole.elements)
            return Block([], constant_state_at((whole.state_after, end)))
        return whole

    def _run_or_rewind(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function`; if it fails, rewinds to the start of the batch, or says it cannot."""
        try:
            return function(*args)
        except Exception as failure:
            raise_interrupt(failure)
            start = self._start
            if start is not None:
                (after, taken), cursor = start, self._cursor
                # The states of a batch stage are those of its parent.
                node = self._node
                note_stage(failure, node, lambda: after(taken), cursor.state, upstream=node)
            self._reset()
            if start is not None:
                after, taken = start
                try:
                    self._cursor.restore(after(taken))
                except Exception as unable:
                    raise_interrupt(unable)
                    failure.add_note(
                        "The elements of this batch are lost and the next one begins after them: "
                        f"the iterator upstream cannot go back ({unable})."
                    )
            raise

    def state(self) -> State:
        """See `Stage.state`."""
        if self._start is None:
            return self._cursor.state()
        after, taken = self._start
        return after(taken)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._reset()
        self._cursor.restore(state)

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return -(-self._cursor.next_index() // self._size)

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._reset()
        self._cursor.seek(index * self._size)


class _PendingBatch:
    """A batch being stacked."""

    def __init__(self, batch_size: int) -> None:
        self._builder = BatchBuilder(batch_size, shared_arena())
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, elements: list[Any]) -> None:
        """Adds elements."""
        if elements:
            self._builder.push(elements)
            self._count += len(elements)

    def push_rows(self, columns: dict[str, Any], rows: list[int]) -> None:
        """Adds elements given as row numbers of `columns`."""
        self._builder.push_rows(columns, np.array(rows, np.int64))
        self._count += len(rows)

    def finish(self) -> Any:
        """The batch."""
        return self._builder.finish()


class _PendingList(_PendingBatch):
    """A batch being collected for a user's batch function."""

    def __init__(self, batch_fn: Callable[[list[Any]], Any]) -> None:
        self._batch_fn = batch_fn
        self._elements: list[Any] = []

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, elements: list[Any]) -> None:
        """See `_PendingBatch.push`."""
        self._elements += elements

    def finish(self) -> Any:
        """See `_PendingBatch.finish`."""
        return self._batch_fn(self._elements)


def _new_batch(node: plan.Batch) -> Callable[[], _PendingBatch]:
    if node.batch_fn is not None:
        batch_fn = node.batch_fn
        return lambda: _PendingList(batch_fn)
    return lambda: _PendingBatch(node.batch_size)


def _state(before: ResumePoint, after: ResumePoint, k: int) -> State:
    state_after, position = after if k else before
    return state_after(position)
