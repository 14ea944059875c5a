"""The stacks of a worker, which it writes when it gets a signal, even while it runs no Python."""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
import threading
from typing import TYPE_CHECKING, Final

from grainmill._plan.tracebacks import CodePlace

if TYPE_CHECKING:
    from collections.abc import Callable

# The system's libraries use the lowest of these signals, and programs the common ones.
SIGNAL: Final = int(getattr(signal, "SIGRTMAX", 64)) - 2
"""The signal that makes a worker write its stacks."""

_FIRST_S: Final = 1.0
_MORE_S: Final = 0.1
_MAX_BYTES: Final = 1 << 20
_CALL: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def write_on_signal(file: int) -> None:
    """Makes this process write the stacks of all its threads to `file` when it gets `SIGNAL`."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def ignore_signal() -> None:
    """Makes `SIGNAL` do nothing until `write_on_signal` is called; it would end the process."""
    signal.signal(SIGNAL, signal.SIG_IGN)


class StackReader:
    """The end of the pipe to which a worker writes; closed with the last reference to it.

    So a thread that reads it may continue while another one closes the pool.
    """

    _close = staticmethod(os.close)

    def __init__(self, file: int) -> None:
        self._file = file
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._close(self._file)

    def requested(self, request: Callable[[], object]) -> list[list[CodePlace]]:
        """The stacks that the worker writes after `request`; none if it writes nothing."""
        with self._lock:
            self._read(0.0)  # a worker that was stopped may have answered since
            request()
            return _parsed(self._read(_FIRST_S).decode("ascii", "replace"))

    def _read(self, first_s: float) -> bytes:
        """What comes within `first_s`, and what follows it closely."""
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        data = b""
        while len(data) < _MAX_BYTES and poll.poll(1000 * (_MORE_S if data else first_s)):
            more = os.read(self._file, 1 << 16)
            if not more:
                break
            data += more
        return data


def _parsed(text: str) -> list[list[CodePlace]]:
    stacks: list[list[CodePlace]] = []
    for line in text.splitlines():
        if "most recent call first" in line:
            stacks.append([])
        elif stacks and (call := _CALL.match(line)):
            stacks[-1].insert(0, CodePlace(_decoded(call[1]), int(call[2]), _decoded(call[3])))
    return stacks


def _decoded(name: str) -> str:
    """The name that was written with escapes for what is not ASCII."""
    escaped = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
    return escaped.sub(lambda found: chr(int(found[found.lastindex or 1], 16)), name)
