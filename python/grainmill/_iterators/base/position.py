"""Positions of a stage: places whose state is made when it is asked for.

A state, the dict that checkpoints hold, is all that is known of a place: the element between two
states, and what it was computed from, follow from these (`SequentialNode.origins`), in every
process and after every restore. A position is a state that is not made yet: most never are.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from grainmill._iterators.base.stage import Block

if TYPE_CHECKING:
    from grainmill._iterators.base.stage import State, StateAfter

Position: TypeAlias = "tuple[StateAfter, int]"
"""A block's `state_after`, and how many of its elements were taken.

It never changes, can be pickled and holds no elements. A plain tuple: one is made for each element
of some stages, and any class would cost more than the rest of it.
"""

_PLAIN: Final = (int, str, float, bool, type(None))


def state_at(position: Position) -> State:
    """The state at `position`, a new dict each time."""
    state_after, taken = position
    return state_after(taken)


def copy_state(state: Any) -> Any:
    """A copy of a state that shares nothing with it."""
    kind = type(state)
    if kind is dict:
        return {key: v if type(v) in _PLAIN else copy_state(v) for key, v in state.items()}
    if kind is list:
        return [v if type(v) in _PLAIN else copy_state(v) for v in state]
    return state if kind in _PLAIN else copy.deepcopy(state)


def constant_state(state: Any) -> StateAfter:
    """A `state_after` that always returns a copy of `state` as it is now."""
    return functools.partial(_constant_state, copy_state(state))


def _constant_state(state: Any, _: int) -> Any:
    return copy_state(state)


def of_state(state: Any) -> Position:
    """The position whose state is a copy of `state` as it is now."""
    return constant_state(state), 0


def no_state(text: str) -> StateAfter:
    """A `state_after` that raises `NotImplementedError` with `text`."""
    return functools.partial(_raise_not_implemented, text)


def _raise_not_implemented(text: str, _: int) -> State:
    raise NotImplementedError(text)


def end_at(position: Position) -> Block:
    """The block of a stage at its end: no elements, and the state at `position`."""
    return Block([], functools.partial(_state_at_end, position))


def _state_at_end(position: Position, _: int) -> State:
    return state_at(position)
