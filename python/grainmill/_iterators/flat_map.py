"""Each element split into a sequence of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._iterators.part import After, Start, fixed
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import FlatMap


class FlatMapStage(Stage):
    """Pulls one element at a time and hands out what it becomes.

    A state holds the parent's state before the element being split, and how many of its pieces
    were handed out.
    """

    def __init__(self, node: FlatMap, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._split = node.transform.flat_map
        self._start = Start(parent)
        self._begin(self._start, 0)

    def _begin(self, after: After, taken: int) -> None:
        self._place = (after, taken)
        self._pieces: Sequence[Any] = ()
        self._taken = 0
        self._skip = taken
        self._block: Block | None = None

    @property
    def burst(self) -> int:
        """See `Stage.burst`; pieces that are there already."""
        there = isinstance(self._pieces, list | tuple)
        return max(1, len(self._pieces) - self._taken) if there else 1

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        last, last_taken = self._place
        while self._taken == len(self._pieces):
            if not self._advance():
                return self._end()
        begin, (after, _) = self._taken, self._place
        pieces = self._pieces_up_to(min(begin + limit, len(self._pieces)))
        self._taken += len(pieces)
        self._place = (after, self._taken)
        return Block(pieces, lambda k: _state(after, begin + k) if k else _state(last, last_taken))

    def _end(self) -> Block:
        after, taken = self._place
        return Block([], lambda _: _state(after, taken))

    def _advance(self) -> bool:
        """Splits the next element; `False` at the end of the parent."""
        if self._block is None:
            block = self._parent.pull(1)
            self._start.settle(block.state_after)
            if not block.elements:
                self._place = (block.state_after, self._place[1])
                return False
            self._block = block
        after = self._block.state_after
        pieces = self._split(self._block.elements[0])
        if self._skip > len(pieces):
            raise ValueError(
                f"state was saved after {self._skip} pieces of an element "
                f"that becomes {len(pieces)} pieces now"
            )
        self._block = None
        self._place = (after, self._skip)
        self._pieces, self._taken, self._skip = pieces, self._skip, 0
        return True

    def _pieces_up_to(self, end: int) -> list[Any]:
        if isinstance(self._pieces, list | tuple):
            return list(self._pieces[self._taken : end])
        made: list[Any] = []
        for at in range(self._taken, end):
            try:
                made.append(self._pieces[at])
            except Exception:
                if not made:
                    raise
                break
        return made

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._place)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._start.freeze()
        self._parent.restore(state["parent"])
        self._begin(fixed(state["parent"]), state["next_index_in_buffer"])


def _state(after: After, taken: int) -> State:
    return {"parent": after(0), "next_index_in_buffer": taken}
