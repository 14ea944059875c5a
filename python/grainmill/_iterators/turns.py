"""Blocks of stages that take from several others in turn, where that is done one by one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._evaluate.fuse import SKIPPED
from grainmill._iterators.cursor import END
from grainmill._iterators.stage import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import State

P = TypeVar("P")

AT_ONCE = 256
"""Elements to ask such a stage for: enough that what a block costs does not matter."""

_TURNS: list[None] = [None] * AT_ONCE


def turns(
    step: Callable[[], Any],
    place: Callable[[], P],
    state_of: Callable[[list[P]], State],
    limit: int,
) -> Block:
    """A lazy block whose elements are those that `step()` gives, up to its `END`.

    Args:
        step: Takes the next element; called when it is asked for.
        place: Tells where the stage stands, or by what the last step moved it, at little cost.
        state_of: Makes a state of the places before the first step and after each one since.
        limit: The most elements.
    """
    places = [place()]
    dropped: list[int] = []

    def finish(_: Any, at: int) -> Any:
        element = END if dropped else step()
        places.append(place())
        if element is END:
            dropped.append(at)
            return SKIPPED
        return element

    state_after = functools.partial(_state_after, state_of, places)
    return Block(_TURNS[:limit], state_after, finish, dropped)


def _state_after(state_of: Callable[[list[P]], State], places: list[P], k: int) -> State:
    return state_of(places[: k + 1])
