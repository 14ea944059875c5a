"""Tuples of one element of each of several stages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._iterators.cursor import END, Cursor, ResumePoint
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State
from grainmill._iterators.turns import AT_ONCE, turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import Zip


class ZipStage(Stage):
    """Takes an element of each parent, in their order, when a tuple is asked for.

    Where all parents have elements at hand, tuples come in blocks.
    """

    def __init__(self, node: Zip, parents: Sequence[Stage]) -> None:
        super().__init__(*parents)
        self._node = node
        self._strict = node.strict
        self._cursors = [Cursor(parent) for parent in parents]
        self._begin()

    def _begin(self) -> None:
        self._gathered: list[Any] = []  # the first elements of a tuple
        self._places: list[ResumePoint] | None = None  # before those, if known
        self._refusal: str | None = None
        self._ended = False

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return AT_ONCE

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        if self._ended:
            return Block([], functools.partial(_state_at_end, self._here()))
        if not self._gathered:
            count = min(limit, *(cursor.at_hand for cursor in self._cursors))
            if count:
                places = self._here()
                elements = list(zip(*[cursor.take(count) for cursor in self._cursors], strict=True))
                self._places = None
                return Block(elements, functools.partial(_state, places))
        is_lazy = any(cursor.is_lazy for cursor in self._cursors)
        return turns(self._step, self._here, _last_state, limit if is_lazy else 1)

    def _step(self) -> Any:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        gathered = self._gathered
        if not gathered:
            self._here()
        for cursor in self._cursors[len(gathered) :]:
            element = cursor.next()
            if element is END:
                return self._end(len(gathered))
            gathered.append(element)
        self._gathered = []
        self._places = None
        return tuple(gathered)

    def _end(self, ended: int) -> Any:
        """Is at the end of a parent, if no other has more where that matters."""
        self._places = places = list(self._here())
        places[ended] = self._cursors[ended].place()
        if self._strict:
            if ended:
                self._refuse(f"argument {ended + 1} is shorter than {_first(ended)}")
            for number, cursor in enumerate(self._cursors[1:], 1):
                if cursor.next() is not END:
                    self._refuse(f"argument {number + 1} is longer than {_first(number)}")
                places[number] = cursor.place()
        self._ended = True
        return END

    def _refuse(self, text: str) -> None:
        self._refusal = f"ZipIterDataset {text}"
        raise ValueError(self._refusal)

    def _here(self) -> list[ResumePoint]:
        if self._places is None:
            self._places = [cursor.place() for cursor in self._cursors]
        return self._places

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._here(), 0)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = Saved(self._node, state, ("parents",))
        parents = saved.list_of("parents", len(self._cursors), "the datasets that are zipped")
        for cursor, of_parent in zip(self._cursors, parents, strict=True):
            cursor.restore(of_parent)
        self._begin()


def _first(count: int) -> str:
    return "argument 1" if count == 1 else f"arguments 1-{count}"


def _state(places: list[ResumePoint], count: int) -> State:
    return {"parents": [after(position + count) for after, position in places]}


def _last_state(places: list[list[ResumePoint]]) -> State:
    return _state(places[-1], 0)


def _state_at_end(places: list[ResumePoint], _: int) -> State:
    return _state(places, 0)
