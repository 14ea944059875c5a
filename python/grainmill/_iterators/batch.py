"""Consecutive elements stacked into batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.stack import BatchBuilder, shared_arena
from grainmill._iterators.pack import FitPackStage
from grainmill._iterators.read import ReadStage, WholeBatches
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

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
        self._start: Callable[[], State] | None = None  # the state before a batch begun
        self._reader: ReadStage | None = None  # what may give whole batches
        self._packer: FitPackStage | None = None  # what may give rows of arrays
        if isinstance(parent, ReadStage) and node.batch_fn is None:
            self._reader = parent
            parent.expect_batches(node.batch_size)
        elif isinstance(parent, FitPackStage) and node.batch_fn is None:
            self._packer = parent

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return 1 if self._reader is None else max(1, self._reader.num_ready_batches)

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`; gives one batch, or those that came in one piece."""
        if self._reader is not None and (self._start is None or not len(self._gathered)):
            whole = self._reader.pull_batches(self._size, limit)
            if whole is not None:
                self._start = None
                return self._block(whole)
        if self._start is None:
            self._start = _state_of(self._parent)
        after = self._gather()
        if len(self._gathered) < self._size and (self._drop_remainder or not len(self._gathered)):
            self._reset()
            return Block([], lambda _: after(0))
        start = self._start
        batch = self._whole(self._gathered.finish)
        self._reset()
        return Block([batch], lambda k: after(k) if k else start())

    def _gather(self) -> Callable[[int], State]:
        """Gathers what the batch lacks; returns the parent's state after that."""
        while True:
            missing = self._size - len(self._gathered)
            packed = self._packer.pull_rows(missing) if self._packer is not None else None
            if packed is not None:
                self._whole(self._gathered.push_rows, packed.columns, packed.order)
                if len(packed.order) == missing:
                    return lambda _: packed.state_after(missing)
                continue
            block = self._parent.pull(missing, interior=False)
            count, state_after = len(block.elements), block.state_after
            self._whole(self._gathered.push, block.elements)
            del block  # its memory is free for the next one, still in cache
            if count == missing or not count:
                return lambda _: state_after(count)

    def _block(self, whole: WholeBatches) -> Block:
        batches, batch_size, before, after = whole
        if not batch_size or (self._drop_remainder and batch_size < self._size):
            return Block([], lambda _: {"next_index": after})
        first = after - len(batches) * batch_size
        return Block(batches, lambda k: {"next_index": first + k * batch_size if k else before})

    def _whole(self, gather: Callable[..., Any], *what: Any) -> Any:
        """Calls `gather`; if it fails, goes back to where the batch begins, if there is a way."""
        try:
            return gather(*what)
        except Exception:
            start = self._start
            self._reset()
            with contextlib.suppress(Exception):
                if start is not None:
                    self._parent.restore(start())
            raise

    def _reset(self) -> None:
        self._gathered = self._new_batch()
        self._start = None

    def state(self) -> State:
        """See `Stage.state`."""
        return self._parent.state() if self._start is None else self._start()

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

    def push_rows(
        self, columns: dict[str, np.ndarray[Any, Any]], order: np.ndarray[Any, Any]
    ) -> None:
        """Adds the elements whose values are rows of `columns`, those of `order`."""
        self._builder.push_rows(columns, order)
        self._count += len(order)

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


def _state_of(stage: Stage) -> Callable[[], State]:
    """The state of `stage` now; if a user's iterator has none, that is for who asks for it."""
    try:
        state = stage.state()
    except Exception as failure:
        refused = failure

        def refuse() -> State:
            raise refused

        return refuse
    return lambda: state


def _new_batch(node: plan.Batch) -> Callable[[], _Gathered]:
    if node.batch_fn is not None:
        batch_fn = node.batch_fn
        return lambda: _GatheredList(batch_fn)
    return lambda: _Gathered(node.batch_size)
