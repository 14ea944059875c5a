"""Each element split into a sequence of elements."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._iterators.cursor import END, Cursor, ResumePoint
from grainmill._iterators.notes import note_stage
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State, runs
from grainmill._plan import sequential

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import FlatMap


@runs(sequential.FlatMap)
class FlatMapStage(Stage):
    """Pulls one element at a time and hands out what it becomes.

    A state holds the parent's state before the element being split, and how many of its pieces
    were handed out.
    """

    def __init__(self, node: FlatMap, parent: Stage) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._node = node
        self._split = node.transform.flat_map
        self._reset(0)

    def _reset(self, taken: int) -> None:
        self._pieces: Sequence[Any] = ()
        self._taken = 0
        self._skip = taken
        self._before = self._cursor.resume_point()  # the element being split
        self._point = (self._before, taken)
        self._element: Any = _NONE  # taken and not split yet

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`; all pieces of an element are there at once."""
        return _MANY

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        last, last_taken = self._point
        while self._taken == len(self._pieces):
            if not self._advance():
                return self._end()
        begin, pieces, point = self._taken, self._pieces, self._before
        self._taken = end = min(begin + limit, len(pieces))
        self._point = (point, end)
        state_after = functools.partial(_state_after, (last, last_taken), point, begin)
        if type(pieces) is list:
            whole = not begin and end == len(pieces)
            return Block(pieces[:] if whole else pieces[begin:end], state_after)
        if isinstance(pieces, list | tuple):
            return Block(list(pieces[begin:end]), state_after)
        return Block(list(range(begin, end)), state_after, lambda piece, _: pieces[piece])

    def _end(self) -> Block:
        return Block([], functools.partial(_state_after, self._point, *self._point))

    def _advance(self) -> bool:
        """Splits the next element; `False` at the end of the parent."""
        if self._element is _NONE:
            before = self._cursor.resume_point()
            element = self._cursor.next()
            if element is END:
                self._point = (self._cursor.resume_point(), self._point[1])
                return False
            self._before, self._element = before, element
        try:
            pieces = self._split(self._element)
        except Exception as failure:
            after, taken = self._before
            note_stage(failure, self._node, lambda: after(taken), self._cursor.state)
            raise
        if self._skip > len(pieces):
            raise ValueError(
                f"state of {self._node} was saved after {self._skip} pieces of an element that "
                f"becomes {len(pieces)} pieces now; restore needs the same data and function"
            )
        self._element = _NONE
        self._point = (self._before, self._skip)
        self._pieces, self._taken, self._skip = pieces, self._skip, 0
        return True

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._point)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parent", "next_index_in_buffer"))
        taken = saved.index("next_index_in_buffer")
        self._cursor.restore(saved["parent"])
        self._reset(taken)


_NONE = object()
_MANY = 1 << 20


def _state(point: ResumePoint, taken: int) -> State:
    after, position = point
    return {"parent": after(position), "next_index_in_buffer": taken}


def _state_after(last: tuple[ResumePoint, int], point: ResumePoint, begin: int, k: int) -> State:
    return _state(point, begin + k) if k else _state(*last)
