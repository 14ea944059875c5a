"""Zips the elements of several stages into tuples."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._iterators.cursor import END, Cursor, ResumePoint
from grainmill._iterators.lazy_block import PULL_SIZE, lazy_block
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import Zip


class ZipStage(Stage):
    """Takes an element of each parent, in order, when a tuple is requested.

    If all parents have elements ready, their tuples are returned as one block.
    """

    saves = ""

    def __init__(self, node: Zip, parents: Sequence[Stage]) -> None:
        super().__init__(*parents)
        self._node = node
        self._strict = node.strict
        self._cursors = [Cursor(parent) for parent in parents]
        self._reset()

    def _reset(self) -> None:
        self._partial: list[Any] = []  # the first elements of a tuple
        self._points: list[ResumePoint] | None = None  # before these, if known
        self._refusal: str | None = None
        self._ended = False

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return PULL_SIZE

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        if self._ended:
            return Block([], functools.partial(_state_at_end, self._resume_points()))
        if not self._partial:
            count = min(limit, *(cursor.num_ready for cursor in self._cursors))
            if count:
                points = self._resume_points()
                elements = list(zip(*[cursor.take(count) for cursor in self._cursors], strict=True))
                self._points = None
                return Block(elements, functools.partial(_state, points))
        is_lazy = any(cursor.is_lazy for cursor in self._cursors)
        return lazy_block(self._step, self._resume_points, _last_state, limit if is_lazy else 1)

    def _step(self) -> Any:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        partial = self._partial
        if not partial:
            self._resume_points()
        for cursor in self._cursors[len(partial) :]:
            element = cursor.next()
            if element is END:
                return self._end(len(partial))
            partial.append(element)
        self._partial = []
        self._points = None
        return tuple(partial)

    def _end(self, ended: int) -> Any:
        """Ends at the end of parent `ended`; if strict, all other parents must end too."""
        self._points = points = list(self._resume_points())
        points[ended] = self._cursors[ended].resume_point()
        if self._strict:
            if ended:
                self._refuse(f"argument {ended + 1} is shorter than {_arguments(ended)}")
            for number, cursor in enumerate(self._cursors[1:], 1):
                if cursor.next() is not END:
                    self._refuse(f"argument {number + 1} is longer than {_arguments(number)}")
                points[number] = cursor.resume_point()
        self._ended = True
        return END

    def _refuse(self, text: str) -> None:
        self._refusal = f"ZipIterDataset {text}"
        raise ValueError(self._refusal)

    def _resume_points(self) -> list[ResumePoint]:
        if self._points is None:
            self._points = [cursor.resume_point() for cursor in self._cursors]
        return self._points

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._resume_points(), 0)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parents",))
        parents = saved.list_of("parents", len(self._cursors), "the datasets that are zipped")
        for cursor, parent_state in zip(self._cursors, parents, strict=True):
            cursor.restore(parent_state)
        self._reset()


def _arguments(count: int) -> str:
    return "argument 1" if count == 1 else f"arguments 1-{count}"


def _state(points: list[ResumePoint], count: int) -> State:
    return {"parents": [after(position + count) for after, position in points]}


def _last_state(points: list[list[ResumePoint]]) -> State:
    return _state(points[-1], 0)


def _state_at_end(points: list[ResumePoint], _: int) -> State:
    return _state(points, 0)
