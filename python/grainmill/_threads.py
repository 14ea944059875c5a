"""Threads of Python, and how they end before the interpreter does.

While the interpreter goes down, a thread that asks for its lock is ended wherever it is, and amid
compiled code that aborts the process: in JAX, in a tokenizer. So every thread is asked to end at
exit, and waited for, for a while.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_EXIT_WAIT_S = 1.0

_running: dict[threading.Thread, Callable[[], object]] = {}


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
