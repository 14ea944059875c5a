"""Threads of Python, and how they end before the interpreter does.

While the interpreter goes down, a thread that asks for its lock is ended wherever it is, and amid
compiled code that aborts the process: in JAX, in a tokenizer. So every thread is asked to end at
exit, and waited for, for a while.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EXIT_WAIT_S = 1.0

_running: dict[threading.Thread, Callable[[], object]] = {}


class _OfThread(threading.local):
    may_wait = True


_of_thread = _OfThread()


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """Has what the calling thread closes in the `with` block wait for no thread and no process.

    For garbage collections, which come anywhere, and for a thread that has an error to raise.
    """
    before, _of_thread.may_wait = _of_thread.may_wait, False
    try:
        yield
    finally:
        _of_thread.may_wait = before


def may_wait() -> bool:
    """Whether the calling thread may wait for others; see `not_waiting`."""
    return _of_thread.may_wait


def call_elsewhere(call: Callable[[], object]) -> None:
    """Calls `call`, which waits for something, on a thread of its own.

    A garbage collection may do so anywhere: unlike `Thread.start`, this takes no lock of
    `threading`, which the thread that is collecting may hold, and does not wait for the thread.
    Whatever must be over at exit is to see to that itself.
    """
    try:
        _thread.start_new_thread(call, ())
    except RuntimeError:  # there are too many threads, or the interpreter goes down
        call()


def start_thread(
    run: Callable[[], object], *, name: str, stop: Callable[[], object]
) -> threading.Thread:
    """Starts a thread that calls `run`; at exit `stop` is to make it return soon.

    Raises:
        RuntimeError: No more threads can be started.
    """

    def run_and_leave() -> None:
        try:
            run()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run_and_leave, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException:
        stop()  # it may have begun, if this is an interrupt
        _running.pop(thread, None)
        raise
    return thread


@atexit.register
def _stop_all() -> None:
    running = _running.copy()
    for stop in running.values():
        stop()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for thread in running:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


# A fork leaves the threads behind, and locks that `stop` would wait for.
os.register_at_fork(after_in_child=_running.clear)
