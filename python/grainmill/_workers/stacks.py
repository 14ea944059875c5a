"""The stacks of a worker, and what it waits for, which it writes when it gets a signal.

Stacks come even while it runs no Python. Its requests to storage come while its main thread runs
some, or waits for storage or for other threads.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import os
import re
import select
import signal
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from grainmill._native import pending_requests
from grainmill._plan.tracebacks import CodePlace

if TYPE_CHECKING:
    from collections.abc import Callable

Requests: TypeAlias = "list[tuple[str, float, int]]"
"""Those to storage: a URL, seconds of waiting and the number of retries for each object."""

# The system's libraries use the lowest of these signals, and programs the common ones.
SIGNAL: Final = int(getattr(signal, "SIGRTMAX", 64)) - 2
"""The signal that makes a worker write its stacks."""

REQUESTS_SIGNAL: Final = SIGNAL - 1
"""The signal that makes it write its requests."""

_FIRST_S: Final = 1.0
_MORE_S: Final = 0.1
_MAX_REQUESTS: Final = 16
_EVER_S: Final = 1e9
_MAX_BYTES: Final = 1 << 20
_CALL: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Wanted(NamedTuple):
    """What a zygote is told, or the starter: send a `signal` to a `child`, by its number."""

    child: int
    signal: int


def write_on_signals(file: int) -> None:
    """Makes this process write the stacks of all its threads, or its requests, to `file`."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    signal.signal(REQUESTS_SIGNAL, functools.partial(_write_requests, file))
    signal.siginterrupt(REQUESTS_SIGNAL, False)  # noqa: FBT003 - users' code may not expect it


def ignore_signals() -> None:
    """Makes the signals do nothing until `write_on_signals`; they would end the process."""
    for number in (SIGNAL, REQUESTS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


def _write_requests(file: int, *_: object) -> None:
    with contextlib.suppress(Exception):  # whatever is interrupted goes on
        os.write(file, f"{pending_requests(_EVER_S)[:_MAX_REQUESTS]!a}\n".encode())


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

    def stacks(self, request: Callable[[], object]) -> list[list[CodePlace]]:
        """The stacks that the worker writes after `request`; none if it writes nothing."""
        return _parsed(self._answer(request))

    def requests(self, request: Callable[[], object]) -> Requests:
        """The requests that the worker writes after `request`; none if it writes nothing."""
        for line in self._answer(request).splitlines():
            if line.startswith("["):
                with contextlib.suppress(ValueError, SyntaxError):  # cut off
                    answer = ast.literal_eval(line)
                    return [(url, since_s, retries) for url, since_s, retries in answer]
        return []

    def _answer(self, request: Callable[[], object]) -> str:
        with self._lock:
            self._read(0.0)  # a worker that was stopped may have answered since
            request()
            return self._read(_FIRST_S).decode("ascii", "replace")

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
