"""Lazy blocks of stages that take elements from several parents, one step per element."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._evaluate.evaluated import SKIPPED
from grainmill._iterators.base.cursor import END
from grainmill._iterators.base.stage import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.base.stage import State

P = TypeVar("P")

PULL_SIZE = 256
"""Elements per pull of such a stage: enough to make the cost per block negligible."""

_RAW: list[None] = [None] * PULL_SIZE


def lazy_block(
    step: Callable[[], Any],
    position: Callable[[], P],
    state_of: Callable[[list[P]], State],
    limit: int,
) -> Block:
    """A lazy block whose elements are the results of `step()`, up to its `END`.

    Args:
        step: Takes the next element; called when it is requested.
        position: Returns the stage's position, or its change by the last step; must be cheap.
        state_of: Computes a state from the positions before the first step and after each step.
        limit: The maximum number of elements.
    """
    positions = [position()]
    dropped: list[int] = []

    def finish(_: Any, at: int) -> Any:
        element = END if dropped else step()
        positions.append(position())
        if element is END:
            dropped.append(at)
            return SKIPPED
        return element

    state_after = functools.partial(_state_after, state_of, positions)
    return Block(_RAW[:limit], state_after, finish, dropped)


def _state_after(state_of: Callable[[list[P]], State], positions: list[P], k: int) -> State:
    return state_of(positions[: k + 1])
