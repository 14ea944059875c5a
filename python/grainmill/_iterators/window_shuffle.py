"""Elements permuted inside each window of consecutive ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._iterators.part import After, Start, fixed
from grainmill._iterators.stage import Block, Stage, State
from grainmill._native import window_order

if TYPE_CHECKING:
    from grainmill._plan.sequential import WindowShuffle


class WindowShuffleStage(Stage):
    """Fills a window from its parent, then hands it out in an order of its own.

    A state holds where the window starts in the parent, and restoring one fills it again.
    """

    def __init__(self, node: WindowShuffle, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._size = node.window_size
        self._seed = node.seed
        self._start = Start(parent)
        self._begin(self._start, 0, 0)

    def _begin(self, after: After, index: int, position: int) -> None:
        """Stands in the window that starts at `after`, whose elements are not yet there."""
        self._place = (after, index, position)
        self._index = index
        self._skip = position
        self._window: list[Any] = []
        self._position = 0
        self._filling: list[Any] = []
        self._filling_start: After = after

    @property
    def burst(self) -> int:
        """See `Stage.burst`; the rest of a window is there already."""
        return max(1, len(self._window) - self._position)

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        last = self._place
        while self._position == len(self._window):
            if not self._fill():
                return Block([], lambda _: _state(last))
        begin, index, length = self._position, self._index, len(self._window)
        after = self._filling_start
        elements = self._window[begin : begin + limit]
        self._position = end = begin + len(elements)
        if end == length:
            self._index += 1
        self._place = (after, self._index, end)
        return Block(
            elements,
            lambda k: _state((after, index + (begin + k == length), begin + k) if k else last),
        )

    def _fill(self) -> bool:
        """Makes the next window, or the one that a restored state stands in; `False` at the end."""
        while len(self._filling) < self._size:
            first = not self._filling
            block = self._parent.pull(self._size - len(self._filling), interior=first)
            if not block.elements:
                break
            if first:
                self._start.settle(block.state_after)
                self._filling_start = block.state_after
            self._filling += block.elements
        if self._skip > len(self._filling):
            raise ValueError(
                f"state was saved {self._skip} elements into a window "
                f"that has {len(self._filling)} elements now"
            )
        if not self._filling:
            return False
        filling, self._filling = self._filling, []
        order = window_order(len(filling), (self._seed + self._index) % 2**32).tolist()
        self._window = [filling[at] for at in order]
        self._position, self._skip = self._skip, 0
        return True

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._place)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        start = state["parent_window_start_state"]
        self._start.freeze()
        self._parent.restore(start)
        self._begin(fixed(start), state["window_index"], state["pos_in_window"])


def _state(place: tuple[After, int, int]) -> State:
    after, index, position = place
    return {
        "parent_window_start_state": after(0),
        "window_index": index,
        "pos_in_window": position,
    }
