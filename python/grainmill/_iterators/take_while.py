"""The elements of a stage up to the first that a predicate rejects."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._interrupts import raise_interrupt
from grainmill._iterators.cursor import Cursor, ResumePoint
from grainmill._iterators.notes import note_stage
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State, runs
from grainmill._plan import sequential

if TYPE_CHECKING:
    from grainmill._plan.sequential import TakeWhile


@runs(sequential.TakeWhile)
class TakeWhileStage(Stage):
    """Calls the predicate once for each element, when that is requested.

    The rejected element is taken from the parent; the state then says that the stage has ended.
    """

    saves = "whether it has ended"

    def __init__(self, node: TakeWhile, parent: Stage) -> None:
        super().__init__(parent)
        self._node = node
        self._predicate = node.function
        self._cursor = Cursor(parent)
        self._ended = False

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        elements: list[Any] = []
        points = [self._point()]
        while len(elements) < limit and not self._ended:
            element: list[Any] = []
            try:
                element = self._cursor.peek(1)
                keep = bool(element) and self._predicate(element[0])
            except Exception as failure:
                raise_interrupt(failure)
                if not elements:
                    if element:
                        cursor = self._cursor
                        note_stage(failure, self._node, cursor.state, cursor.state_after_first)
                    raise
                break  # It is computed again once those before it are delivered.
            self._cursor.advance(len(element))
            if keep:
                elements += element
                points.append(self._point())
            else:
                self._ended = True
        if not elements:
            points = [self._point()]
        return Block(elements, functools.partial(_state_at, points))

    def _point(self) -> tuple[ResumePoint, bool]:
        return self._cursor.resume_point(), self._ended

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._point())

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parent", "ended"))
        ended = saved.flag("ended")
        self._cursor.restore(saved["parent"])
        self._ended = ended


def _state(point: ResumePoint, ended: bool) -> State:  # noqa: FBT001 - the pair is stored like this
    after, position = point
    return {"parent": after(position), "ended": ended}


def _state_at(points: list[tuple[ResumePoint, bool]], k: int) -> State:
    return _state(*points[k])
