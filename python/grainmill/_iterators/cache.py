"""Elements of a first epoch, remembered for later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._iterators.part import Place, Start, fixed
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from grainmill._plan.sequential import Cache

_AT_ONCE = 64
_EVERYTHING = 1 << 62


class CacheStage(Stage):
    """Reads its parent once, whatever it is restored to afterwards.

    Where a state is restored whose elements are not in memory, the parent is read again from
    its start, up to the place of the state.
    """

    def __init__(self, node: Cache, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._initial: State | None = None
        self._memory: list[Any] = []
        self._filled = False
        self._missing: int | None = None
        self._position = 0
        self._reported_filled = False
        self._start = Start(parent)
        self._place: Place = (self._start, 0)

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return _AT_ONCE if self._filled else self._parent.burst

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        self._first_state()
        self._refill()
        if self._filled:
            return self._remembered(limit)
        block = self._parent.pull(limit, interior=interior)
        after, position = block.state_after, self._position
        self._start.settle(after)
        self._memory += block.elements
        self._position += len(block.elements)
        self._place = (after, len(block.elements))
        self._filled = self._reported_filled = filled = not block.elements
        return Block(block.elements, lambda k: _state(after(k), position + k, filled=filled))

    def _remembered(self, limit: int) -> Block:
        (after, taken), position = self._place, self._position
        elements = self._memory[position : position + limit]
        self._position += len(elements)
        self._reported_filled = True
        return Block(elements, lambda k: _state(after(taken), position + k, filled=True))

    def _refill(self) -> None:
        """Reads again what a restored state has behind it."""
        while self._missing is not None and len(self._memory) < self._missing:
            block = self._parent.pull(
                min(self._missing - len(self._memory), _AT_ONCE), interior=False
            )
            self._memory += block.elements
            if not block.elements:
                self._filled = True
                if not self._reported_filled or len(self._memory) < self._position:
                    raise ValueError(
                        f"state was saved after {self._position} elements "
                        f"but there are {len(self._memory)} to remember"
                    )
                break
        self._missing = None

    def _first_state(self) -> State:
        if self._initial is None:
            self._initial = self._parent.state()
        return self._initial

    def state(self) -> State:
        """See `Stage.state`."""
        after, taken = self._place
        return _state(after(taken), self._position, filled=self._reported_filled)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        initial = self._first_state()
        self._start.freeze()
        kept = fixed(state["parent"])
        self._position = state["position"]
        self._reported_filled = state["cache_filled"] or self._filled
        if self._filled:
            self._place = (kept, 0)
            return
        if not state["cache_filled"] and self._position <= len(self._memory) and not self._missing:
            del self._memory[self._position :]
            self._parent.restore(state["parent"])
        else:
            self._memory = []
            self._parent.restore(initial)
            self._missing = _EVERYTHING if state["cache_filled"] else self._position
        self._place = (kept, 0)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`; there is nothing to start once all is in memory."""
        if not self._filled:
            super().start_prefetch()


def _state(parent: State, position: int, *, filled: bool) -> State:
    return {"parent": parent, "position": position, "cache_filled": filled}
