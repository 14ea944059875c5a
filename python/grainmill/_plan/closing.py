"""What is said of an iterator that was closed."""

from __future__ import annotations


def closed_error(message: str = "Attempting to use a closed iterator.") -> ValueError:
    """What whoever uses a closed iterator meets, or waits for an element while it is closed."""
    return ValueError(message)
