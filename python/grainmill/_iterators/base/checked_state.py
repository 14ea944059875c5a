"""Checks of saved states, made before a stage is restored."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grainmill._interrupts import raise_interrupt

_SHOWN_CHARS = 300


class CheckedState:
    """A state to restore, whose values are checked when they are read.

    Args:
        stage: The name of the stage in messages: its node, or the text of it.
        state: The argument of `set_state`, or the stage's part of it.
        keys: The keys that a state of this stage must have.
        optional: Keys that it may have.

    Raises:
        ValueError: `state` is not a dict, or has other keys.
    """

    def __init__(
        self, stage: object, state: Any, keys: Sequence[str], optional: Sequence[str] = ()
    ) -> None:
        self._stage = stage
        self._state = state
        if not isinstance(state, Mapping):
            raise self.refusal("it", f"must be a dict with the keys {list(keys)}", state)
        if missing := [key for key in keys if key not in state]:
            raise self.refusal("it", f"must have the keys {list(keys)}, lacks {missing}", state)
        if unknown := [key for key in state if key not in keys and key not in optional]:
            expected = f"must have no keys but {list(keys)}, has {unknown} too"
            raise self.refusal("it", expected, state)

    def __getitem__(self, key: str) -> Any:
        return self._state[key]

    def refusal(self, part: str, expected: str, found: Any) -> ValueError:
        """The error for a `part` of the state that is not as expected."""
        return refusal(self._stage, part, expected, found)

    def index(self, key: str, maximum: int = sys.maxsize, minimum: int = 0) -> int:
        """An integer from `minimum` to `maximum`.

        Raises:
            ValueError: It is out of range, or not an integer.
        """
        return self.checked_index(f"`{key}`", self._state[key], maximum, minimum)

    def checked_index(
        self, part: str, value: Any, maximum: int = sys.maxsize, minimum: int = 0
    ) -> int:
        """As `index`, of `value`, which messages call `part`."""
        found = integer(value)
        if found is None or not minimum <= found <= maximum:
            raise self.refusal(part, f"must be an integer from {minimum} to {maximum}", value)
        return found

    def flag(self, key: str) -> bool:
        """A boolean; Grain stores some as 0 and 1.

        Raises:
            ValueError: It is something else.
        """
        return self.checked_flag(f"`{key}`", self._state[key])

    def checked_flag(self, part: str, value: Any) -> bool:
        """As `flag`, of `value`, which messages call `part`."""
        if isinstance(value, bool | np.bool_) or integer(value) in {0, 1}:
            return bool(value)
        raise self.refusal(part, "must be true or false, or 1 or 0", value)

    def list_of(self, key: str, count: int, what: str) -> Sequence[Any]:
        """A list of `count` values, one for each of `what`.

        Raises:
            ValueError: It is not a list, or has another length.
        """
        value = self._state[key]
        if not isinstance(value, list | tuple):
            raise self.refusal(f"`{key}`", f"must be a list, one for each of {what}", value)
        if len(value) != count:
            expected = f"must be a list of {count}, one for each of {what}, has {len(value)}"
            raise self.refusal(f"`{key}`", expected, value)
        return value


def integer(value: Any) -> int | None:
    """`value` as an `int` if it is an integer, also of NumPy, but not a boolean; else `None`."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError as failure:
        raise_interrupt(failure)
        return None


def refusal(stage: object, part: str, expected: str, found: Any) -> ValueError:
    """The error for a `part` of a state of `stage` that is not as expected."""
    shown = repr(found)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}..."
    return ValueError(
        f"state of {stage}: {part} {expected}, got {shown}; restore a state that the same "
        "pipeline saved"
    )
