"""The error of a closed iterator."""

from __future__ import annotations


def closed_error(message: str = "Attempting to use a closed iterator.") -> ValueError:
    """The error for callers of a closed iterator, and for threads waiting in it when it closes."""
    return ValueError(message)
