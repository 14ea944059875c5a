"""Consecutive elements stacked into batches."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.stack import BatchBuilder, shared_arena
from grainmill._iterators.cursor import Cursor, ResumePoint, constant_state_at
from grainmill._iterators.notes import note_part, note_stage
from grainmill._iterators.read import ReadStage
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan import sequential as plan


class BatchStage(Stage):
    """Gathers `batch_size` elements, then makes one of them.

    Elements are copied into the batch as they come, while they are still in cache. Where the
    parent fails in mid-batch, those gathered are kept for when it goes on.
    """

    def __init__(self, node: plan.Batch, parent: Stage) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._node = node
        self._size = node.batch_size
        self._drop_remainder = node.drop_remainder
        self._takes_rows = node.batch_fn is None
        self._new_batch = _new_batch(node)
        self._reset()
        self._reader: ReadStage | None = None  # what may give whole batches
        if isinstance(parent, ReadStage) and node.batch_fn is None:
            self._reader = parent
            parent.expect_batches(node.batch_size)

    def _reset(self) -> None:
        self._gathered = self._new_batch()
        self._start: ResumePoint | None = None  # the place before a batch begun

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return 1 if self._reader is None else max(1, self._reader.num_ready_batches)

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; gives one batch, or those that came in one piece."""
        if self._reader is not None and (self._start is None or not len(self._gathered)):
            try:
                whole = self._reader.pull_batches(self._size, limit)
            except Exception as failure:
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
            self._gather()
        except Exception as failure:
            if self._start is not None:  # it is one of an element, not of all
                note_part(failure, self._node, len(self._gathered))
            raise
        after, position = self._cursor.resume_point()
        if len(self._gathered) < self._size and (self._drop_remainder or not len(self._gathered)):
            self._reset()
            return Block([], constant_state_at((after, position)))
        batch = self._whole(self._gathered.finish)
        self._reset()
        return Block([batch], functools.partial(_state, (last, taken), (after, position)))

    def _gather(self) -> None:
        """Gathers what the batch lacks."""
        cursor = self._cursor
        while missing := self._size - len(self._gathered):
            if self._takes_rows and (rows := cursor.take_rows(missing)) is not None:
                self._whole(self._gathered.push_rows, *rows)
                continue
            elements = cursor.take(missing)
            if not elements:
                return
            self._whole(self._gathered.push, elements)
            del elements
            cursor.release_taken()  # their memory is free for the next ones, still in cache

    def _block(self, whole: Block, count: int) -> Block:
        if not count or (self._drop_remainder and count < self._size):
            end = len(whole.elements)
            return Block([], constant_state_at((whole.state_after, end)))
        return whole

    def _whole(self, gather: Callable[..., Any], *what: Any) -> Any:
        """Calls `gather`; if it fails, goes back to where the batch begins, if there is a way."""
        try:
            return gather(*what)
        except Exception as failure:
            start = self._start
            if start is not None:
                (after, taken), cursor = start, self._cursor
                # Its states are those of its parent.
                node = self._node
                note_stage(failure, node, lambda: after(taken), cursor.state, above=node)
            self._reset()
            with contextlib.suppress(Exception):
                if start is not None:
                    after, taken = start
                    self._cursor.restore(after(taken))
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


class _Gathered:
    """Elements of one batch to be stacked."""

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
        """Adds the elements whose values are these rows of `columns`."""
        self._builder.push_rows(columns, np.array(rows, np.int64))
        self._count += len(rows)

    def finish(self) -> Any:
        """The batch."""
        return self._builder.finish()


class _GatheredList(_Gathered):
    """Elements of one batch for a user's batch function."""

    def __init__(self, batch_fn: Callable[[list[Any]], Any]) -> None:
        self._batch_fn = batch_fn
        self._elements: list[Any] = []

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, elements: list[Any]) -> None:
        """See `_Gathered.push`."""
        self._elements += elements

    def finish(self) -> Any:
        """See `_Gathered.finish`."""
        return self._batch_fn(self._elements)


def _new_batch(node: plan.Batch) -> Callable[[], _Gathered]:
    if node.batch_fn is not None:
        batch_fn = node.batch_fn
        return lambda: _GatheredList(batch_fn)
    return lambda: _Gathered(node.batch_size)


def _state(before: ResumePoint, after: ResumePoint, k: int) -> State:
    state_after, position = after if k else before
    return state_after(position)
