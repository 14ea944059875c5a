"""The same epoch again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._iterators.part import Place, Start, fixed
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from grainmill._plan.sequential import Repeat


class RepeatStage(Stage):
    """Takes its parent back to where it was first found whenever it is at its end.

    An epoch without any element is the last one, so that no endless repetition of nothing
    is waited for.
    """

    def __init__(self, node: Repeat, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._num_epochs = node.num_epochs
        self._initial: State | None = None
        self._begin(0)
        self._empty = True

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._ended = self._num_epochs is not None and epoch >= self._num_epochs
        self._start = Start(self._parent)
        self._place: Place = (self._start, 0)

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return self._parent.burst

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        last, last_epoch = self._place, self._epoch
        initial = self._first_state()
        while not self._ended:
            block = self._parent.pull(limit, interior=interior)
            self._start.settle(block.state_after)
            self._place = (block.state_after, len(block.elements))
            if block.elements:
                self._empty = False
                return self._block(block, last, last_epoch)
            self._next_epoch(initial)
        (end, count), epoch = self._place, self._epoch
        return Block([], lambda _: _state(end(count), epoch))

    def _block(self, block: Block, last: Place, last_epoch: int) -> Block:
        """The parent's `block`, before which this stage stood at `last`."""
        after, epoch, (before, position) = block.state_after, self._epoch, last
        return Block(
            block.elements,
            lambda k: _state(after(k), epoch) if k else _state(before(position), last_epoch),
        )

    def _next_epoch(self, initial: State) -> None:
        self._ended = self._empty or self._epoch + 1 == self._num_epochs
        if not self._ended:
            self._parent.restore(initial)
            self._place = (fixed(initial), 0)
            self._empty = True
        self._epoch += 1

    def _first_state(self) -> State:
        if self._initial is None:
            self._initial = self._parent.state()
        return self._initial

    def state(self) -> State:
        """See `Stage.state`."""
        after, position = self._place
        return _state(after(position), self._epoch)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._first_state()
        self._start.freeze()
        self._parent.restore(state["parent"])
        self._begin(state["epoch"])
        self._empty = False


def _state(parent: State, epoch: int) -> State:
    return {"parent": parent, "epoch": epoch}
