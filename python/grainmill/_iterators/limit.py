"""The first elements of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._iterators.part import Place, Start
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from grainmill._plan.sequential import Limit


class LimitStage(Stage):
    """Never pulls more than its parent may give."""

    def __init__(self, node: Limit, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._limit = node.count
        self._begin(0)

    def _begin(self, count: int) -> None:
        self._count = count
        self._start = Start(self._parent)
        self._place: Place = (self._start, 0)

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return self._parent.burst

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        room = min(limit, self._limit - self._count)
        if room <= 0:
            (last, position), total = self._place, self._count
            return Block([], lambda _: _state(last(position), total))
        block = self._parent.pull(room, interior=interior)
        after, count = block.state_after, self._count
        self._start.settle(after)
        self._place = (after, len(block.elements))
        self._count += len(block.elements)
        return Block(block.elements, lambda k: _state(after(k), count + k))

    def state(self) -> State:
        """See `Stage.state`."""
        after, position = self._place
        return _state(after(position), self._count)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._start.freeze()
        self._parent.restore(state["parent"])
        self._begin(state["count_elements_read"])

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._parent.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._start.freeze()
        self._parent.seek(index)
        self._begin(index)


def _state(parent: State, count: int) -> State:
    return {"parent": parent, "count_elements_read": count}
