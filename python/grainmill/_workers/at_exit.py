"""Calls made when a process ends; also in a worker, which leaves without Python's own."""

from __future__ import annotations

import atexit
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_calls: Final[list[Callable[[], object]]] = []


def call_at_exit(call: Callable[[], object]) -> Callable[[], object]:
    """Calls `call` when this process, or one that inherits its modules, ends by itself."""
    _calls.append(call)
    return atexit.register(call)


def run_calls() -> None:
    """Makes the calls, in a process that is about to leave."""
    for call in _calls:
        with contextlib.suppress(Exception):
            call()
