"""Consecutive elements stacked into batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._evaluate.batches.stack import BatchBuilder, ElementList, shared_arena
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.node import Length, Origin, SequentialNode, origins
from grainmill._iterators.base.position import Position, end_at, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.notes import note_stage
from grainmill._iterators.open import open_node
from grainmill._iterators.pack_in_thread import PackInThreadStage
from grainmill._iterators.read import ReadStage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.batching import Batching, num_batches
from grainmill._plan.notes import note_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context


@lazy_dataclass
class Batch(Batching, SequentialNode):
    """Consecutive elements stacked along a new leading axis."""

    dataset_name: ClassVar[str] = "BatchIterDataset"
    keeps_positions: ClassVar[bool] = True
    saves: ClassVar[str] = ""
    keeps_length: ClassVar[bool] = False

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        parent = open_node(self.parent, context)
        stage = BatchStage(self, parent)
        if parent.packs and self.batch_fn is None and context.threads is None:
            (reader,) = parent.parents
            if isinstance(reader, ReadStage) and reader.has_threads:
                stage.node, stage.recorder = self, context.recorder
                return PackInThreadStage(reader, stage, self.batch_size)
        return stage

    @property
    def is_native(self) -> bool:  # type: ignore[override]
        """See `SequentialNode`."""
        return not self.runs_users_code

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        return parents[0].by(
            lambda n: num_batches(n, self.batch_size, drop_remainder=self.drop_remainder)
        )

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        lasts = origins(self.parent, after, after)
        # Asked twice, each batch upstream would double the number of questions.
        firsts = lasts if before is after else origins(self.parent, before, before)
        if len(firsts) != 1 or len(lasts) != 1 or firsts[0].plan is not lasts[0].plan:
            return firsts if any(origin.last is None for origin in firsts) else []
        last = firsts[0].last
        return firsts if last is None else [Origin(lasts[0].plan, last + 1, lasts[0].last)]


class BatchStage(CursorStage):
    """Stacks `batch_size` elements into one.

    Elements are copied into the batch when they arrive, while they are still in cache. If the
    parent fails in mid-batch, the elements so far stay in the pending batch for the next `pull`.
    """

    def __init__(self, node: Batch, parent: Stage) -> None:
        super().__init__(node, parent)
        self._size = node.batch_size
        self._drop_remainder = node.drop_remainder
        self._pending: BatchBuilder | ElementList = (
            BatchBuilder(node.batch_size, shared_arena())
            if node.batch_fn is None
            else ElementList(node.batch_fn)
        )
        self._reset()
        self._reader: ReadStage | None = None  # the parent, if it can compute whole batches
        if isinstance(parent, ReadStage) and node.batch_fn is None:
            self._reader = parent
            parent.expect_batches(node.batch_size)

    def _reset(self) -> None:
        self._pending.clear()
        self._start: Position | None = None  # before the pending batch, if it was started

    @property
    def pull_size(self) -> int:  # type: ignore[override]
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
            self._start = self._cursor.position()
        start = self._start
        try:
            self._fill()
        except Exception as failure:
            raise_interrupt(failure)
            if self._start is not None:  # one element failed, not the whole batch
                note_part(failure, self._node, len(self._pending))
            raise
        end = self._cursor.position()
        if len(self._pending) < self._size and (self._drop_remainder or not len(self._pending)):
            self._reset()
            return end_at(end)
        batch = self._run_or_rewind(self._pending.finish)
        self._reset()
        return Block([batch], functools.partial(_state, start, end))

    def _fill(self) -> None:
        """Adds the elements that the pending batch lacks."""
        cursor = self._cursor
        pending = self._pending
        push_rows = pending.push_rows if isinstance(pending, BatchBuilder) else None
        while missing := self._size - len(pending):
            if push_rows and (rows := cursor.take_rows(missing)) is not None:
                self._run_or_rewind(push_rows, *rows)
                continue
            elements = cursor.take(missing)
            if not elements:
                return
            self._run_or_rewind(pending.push, elements)
            del elements
            cursor.release_taken()  # the next elements reuse their memory, which is in cache

    def _block(self, whole: Block, count: int) -> Block:
        if not count or (self._drop_remainder and count < self._size):
            return end_at((whole.state_after, len(whole.elements)))
        return whole

    def _run_or_rewind(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function`; if it fails, rewinds to the start of the batch, or says it cannot."""
        try:
            return function(*args)
        except Exception as failure:
            raise_interrupt(failure)
            start = self._start
            if start is not None:
                # The states of a batch stage are those of its parent.
                node = self._node
                note_stage(failure, node, start, self._cursor.position(), upstream=node)
            self._reset()
            if start is not None:
                try:
                    self._cursor.restore(state_at(start))
                except Exception as unable:
                    raise_interrupt(unable)
                    failure.add_note(
                        "The elements of this batch are lost and the next one begins after them: "
                        f"the iterator upstream cannot go back ({unable})."
                    )
            raise

    def state(self) -> State:
        """See `Stage.state`."""
        return state_at(self._start or self._cursor.position())

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


def _state(before: Position, after: Position, k: int) -> State:
    return state_at(after if k else before)
