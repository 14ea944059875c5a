"""Consecutive elements stacked into batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._evaluate.stack import BatchBuilder, shared_arena
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
        self._parent = parent
        self._size = node.batch_size
        self._drop_remainder = node.drop_remainder
        self._new_batch = _new_batch(node)
        self._gathered = self._new_batch()
        self._start: State | None = None
        if isinstance(parent, ReadStage) and node.batch_fn is None:
            parent.expect_batches(node.batch_size)

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`; gives one batch."""
        if self._start is None:
            self._start = self._parent.state()
        whole = self._pull_whole()
        if whole is not None:
            before, self._start = self._start, None
            return self._whole_block(*whole, before)
        after = self._gather()
        if len(self._gathered) < self._size and (self._drop_remainder or not len(self._gathered)):
            self._reset()
            return Block([], lambda _: after(0))
        start = self._start
        try:
            batch = self._gathered.finish()
        except Exception:
            self._reset()
            self._parent.restore(start)
            raise
        self._reset()
        return Block([batch], lambda k: after(k) if k else start)

    def _gather(self) -> Callable[[int], State]:
        """Gathers what the batch lacks; returns the parent's state after that."""
        while True:
            missing = self._size - len(self._gathered)
            block = self._parent.pull(missing, interior=False)
            count, state_after = len(block.elements), block.state_after
            self._gathered.push(block.elements)
            del block  # its memory is free for the next one, still in cache
            if count == missing or not count:
                return lambda _: state_after(count)

    def _pull_whole(self) -> tuple[Any, int] | None:
        """The next batch and its elements' number, where the parent makes it in one piece."""
        parent = self._parent
        if (
            len(self._gathered)
            or not self._gathered.is_stacked
            or not isinstance(parent, ReadStage)
        ):
            return None
        numbers = parent.pull_numbers(self._size)
        if numbers is not None:
            return numbers, len(numbers)
        rows = parent.pull_batch(self._size)
        return None if rows is None else (rows.batch, len(rows))

    def _whole_block(self, batch: Any, count: int, before: State) -> Block:
        after = self._parent.state()
        if not count or (self._drop_remainder and count < self._size):
            return Block([], lambda _: dict(after))
        return Block([batch], lambda k: dict(after if k else before))

    def _reset(self) -> None:
        self._gathered = self._new_batch()
        self._start = None

    def state(self) -> State:
        """See `Stage.state`."""
        return self._parent.state() if self._start is None else self._start

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._reset()
        self._parent.restore(state)

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return -(-self._parent.next_index() // self._size)

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._reset()
        self._parent.seek(index * self._size)


class _Gathered:
    """Elements of one batch to be stacked."""

    is_stacked = True

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

    def finish(self) -> Any:
        """The batch."""
        return self._builder.finish()


class _GatheredList(_Gathered):
    """Elements of one batch for a user's batch function."""

    is_stacked = False

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
