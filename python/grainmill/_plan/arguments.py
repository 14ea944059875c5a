"""Checks of the arguments of public calls, made when a plan is built."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def wrong_type(expected: str, value: Any) -> TypeError:
    """The error for a `value` of another type than `expected` says it must be."""
    return TypeError(f"{expected}, got {value!r} of type {type(value).__name__}")


def checked_integer(value: Any, name: str, *, minimum: int | None = None) -> int:
    """`value` as an `int`; NumPy integers are accepted, booleans are not.

    Args:
        value: The user's argument.
        name: Its name in messages.
        minimum: The smallest allowed value.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is below `minimum`.
    """
    number: int | None = None
    if type(value) is int:
        number = value
    elif not isinstance(value, bool | np.bool_):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None:
        limit = "" if minimum is None else f" of at least {minimum}"
        raise wrong_type(f"`{name}` must be an integer{limit}", value)
    if minimum is not None and number < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {number}")
    return number


def checked_number(value: Any, name: str) -> float:
    """`value`, checked to be a finite number.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(f"`{name}` must be a number", value)
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return value  # type: ignore[return-value]


def checked_callable(value: Any, name: str, expected: str) -> None:
    """Raises `TypeError` unless `value` is callable or `None`."""
    if value is not None and not callable(value):
        raise wrong_type(f"`{name}` must be {expected} or None", value)


def checked_names(value: Any, name: str) -> tuple[Any, ...]:
    """`value`, a collection of names, as a tuple; a single string is not accepted.

    Raises:
        TypeError: `value` is not a collection.
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise wrong_type(f"`{name}` must be a sequence of names", value)
    return tuple(value)


def leaves(struct: Any, name: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields (keys from the outermost, value) of each leaf of nested mappings, in order."""
    if not isinstance(struct, Mapping):
        raise ValueError(f"`{name}` must be a mapping from feature names to values, got {struct!r}")
    for key, value in struct.items():
        if isinstance(value, Mapping):
            for path, leaf in leaves(value, name):
                yield (key, *path), leaf
        else:
            yield (key,), value


def check_at_least(value: Any, minimum: int, name: str) -> None:
    """Raises `TypeError` or `ValueError` unless `value` is an integer of at least `minimum`."""
    try:
        number = checked_integer(value, name)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
