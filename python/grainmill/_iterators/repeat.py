"""Repeats the elements of a stage for several epochs."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

from grainmill._iterators.cursor import Cursor, ResumePoint, constant_state_at
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State, runs
from grainmill._plan import sequential

if TYPE_CHECKING:
    from grainmill._iterators.stage import StateAfter
    from grainmill._plan.sequential import Repeat


@runs(sequential.Repeat)
class RepeatStage(Stage):
    """Restores its parent to its initial state whenever it ends.

    An epoch without any element is the last one, since repeating it would never end.
    """

    saves = "the epoch"

    def __init__(self, node: Repeat, parent: Stage) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._node = node
        self._num_epochs = node.num_epochs
        self._initial: State | None = None
        self._reset(0)

    def _reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._ended = self._num_epochs is not None and epoch >= self._num_epochs
        self._last: Block | None = None
        self._empty = epoch == 0

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        initial = self._first_state()
        if self._last is not None and self._last.num_finished:
            self._empty = False
        before: tuple[ResumePoint, int] | None = None  # the end of the previous epoch, if reached
        while not self._ended:
            self._last = block = self._cursor.pull_block(limit)
            if block.elements:
                return self._block(block, before)
            before = before or (self._cursor.resume_point(), self._epoch)
            self._next_epoch(initial)
        return Block(
            [],
            functools.partial(
                _state_after, constant_state_at(self._cursor.resume_point()), self._epoch
            ),
        )

    def _block(self, block: Block, before: tuple[ResumePoint, int] | None) -> Block:
        after, epoch = block.state_after, self._epoch
        if before is None:
            return block.with_states(functools.partial(_state_after, after, epoch))
        return block.with_states(functools.partial(_state_from, before, after, epoch))

    def _next_epoch(self, initial: State) -> None:
        self._ended = self._empty or self._epoch + 1 == self._num_epochs
        if not self._ended:
            self._cursor.restore(initial)
            self._empty = True
        self._epoch += 1

    def _first_state(self) -> State:
        if self._initial is None:
            self._initial = self._cursor.stage.state()
        return self._initial

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._cursor.state(), self._epoch)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parent", "epoch"))
        maximum = sys.maxsize if self._num_epochs is None else self._num_epochs
        epoch = saved.index("epoch", maximum)
        self._first_state()
        self._cursor.restore(saved["parent"])
        self._reset(epoch)
        self._empty = False


def _state(parent: State, epoch: int) -> State:
    return {"parent": parent, "epoch": epoch}


def _state_after(after: StateAfter, epoch: int, k: int) -> State:
    return _state(after(k), epoch)


def _state_from(before: tuple[ResumePoint, int], after: StateAfter, epoch: int, k: int) -> State:
    if k:
        return _state(after(k), epoch)
    (last, position), last_epoch = before
    return _state(last(position), last_epoch)
