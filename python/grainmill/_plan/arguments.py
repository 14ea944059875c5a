"""Arguments of public calls, checked when a plan is built."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any


def checked_integer(value: Any, name: str, *, least: int | None = None) -> int:
    """`value` as an `int`; integers of NumPy are taken, truth values are not.

    Args:
        value: What the user gave.
        name: What messages call it.
        least: The smallest that is allowed.

    Raises:
        TypeError: It is no integer.
        ValueError: It is below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        limit = "" if least is None else f" of at least {least}"
        raise TypeError(
            f"`{name}` must be an integer{limit}, got {value!r} of type {type(value).__name__}"
        )
    if least is not None and number < least:
        raise ValueError(f"`{name}` must be at least {least}, got {number}")
    return number


def checked_number(value: Any, name: str) -> float:
    """`value`, a finite number.

    Raises:
        TypeError: It is no number.
        ValueError: It is infinite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return value  # type: ignore[return-value]


def checked_callable(value: Any, name: str, expected: str) -> None:
    """Raises `TypeError` unless `value` is `None` or can be called."""
    if value is not None and not callable(value):
        raise TypeError(
            f"`{name}` must be {expected} or None, got {value!r} of type {type(value).__name__}"
        )


def checked_names(value: Any, name: str) -> tuple[Any, ...]:
    """`value`, a collection of names, as a tuple; a single string is none.

    Raises:
        TypeError: It is no collection.
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise TypeError(
            f"`{name}` must be a sequence of names, got {value!r} of type {type(value).__name__}"
        )
    return tuple(value)
