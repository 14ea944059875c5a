"""What a checkpoint can be made of."""

from __future__ import annotations

from typing import Any


class NoStateError(AttributeError, TypeError):
    """Something else was passed in place of an iterator."""


def check_has_state(item: Any) -> None:
    """Raises `NoStateError` if `item` is not an iterator."""
    if hasattr(item, "get_state"):
        return
    if item is None:
        raise NoStateError(
            "pass `item`, the iterator that the training loop reads, or `args` with it: 'NoneType' "
            "object has no attribute 'item'"  # Grain's text
        )
    name = type(item).__name__
    meant = ": pass the iterator that the training loop reads, `iter(dataset)`"
    raise NoStateError(
        f"`item` must be an iterator, but a '{name}' object has no attribute 'get_state'"
        f"{meant if hasattr(item, '__iter__') else ''}"
    )
