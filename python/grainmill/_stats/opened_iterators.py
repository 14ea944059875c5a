"""Which iterators of this package a user's iterator opens while it runs."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_running = threading.local()


class OpenedIterators:
    """The iterators of this package that are opened while one of a user runs.

    They are its parents where it names none, such as a generator.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []

    def living(self) -> tuple[Any, ...]:
        """Those that are still in use."""
        return tuple(found for each in self._found if (found := each()) is not None)

    def add(self, iterator: Any) -> None:
        """Adds one, which this does not keep alive."""
        self._found = [weakref.ref(each) for each in (*self.living(), iterator)]

    def during(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, and adds what that opens on this thread."""
        before = getattr(_running, "opened", None)
        _running.opened = self
        try:
            return function(*args)
        finally:
            _running.opened = before


def opens(iterator: Any) -> None:
    """Adds an iterator of this package to those of the user's one that runs, if one does."""
    opened = getattr(_running, "opened", None)
    if opened is not None:
        opened.add(iterator)
