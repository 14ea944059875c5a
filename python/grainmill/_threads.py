"""Python threads that are stopped and joined before interpreter shutdown.

During shutdown, a thread that acquires the interpreter lock (GIL) is ended on the spot, which
aborts the process if frames of compiled code (JAX, a tokenizer) are on its stack. So at exit every
thread is asked to return, and joined with a timeout.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EXIT_WAIT_S = 1.0

_running: dict[threading.Thread, Callable[[], object]] = {}


class _ThreadLocal(threading.local):
    may_wait = True


_thread_local = _ThreadLocal()


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """Makes `close` calls of this thread in the `with` block not wait for threads or processes.

    For finalizers, which the garbage collector runs anywhere, and for a thread that is about to
    raise an error.
    """
    before, _thread_local.may_wait = _thread_local.may_wait, False
    try:
        yield
    finally:
        _thread_local.may_wait = before


def may_wait() -> bool:
    """Whether the calling thread may wait for others; see `not_waiting`."""
    return _thread_local.may_wait


def call_on_new_thread(call: Callable[[], object]) -> None:
    """Calls `call`, which may block, on a new thread.

    Safe in a finalizer: unlike `Thread.start`, this acquires no lock of `threading`, which the
    collecting thread may hold, and does not wait for the new thread to start. Nothing joins the
    thread at exit.
    """
    try:
        _thread.start_new_thread(call, ())
    except RuntimeError as failure:  # too many threads, or interpreter shutdown
        raise_interrupt(failure)
        call()


def start_thread(
    run: Callable[[], object],
    *,
    name: str,
    stop: Callable[[], object],
    kind: type[threading.Thread] = threading.Thread,
) -> threading.Thread:
    """Starts a thread that calls `run`; at exit, `stop` is called to make `run` return.

    Raises:
        RuntimeError: No more threads can be started.
    """

    def run_and_leave() -> None:
        try:
            run()
        finally:
            _running.pop(thread, None)

    thread = kind(target=run_and_leave, name=name, daemon=True)
    _running[thread] = stop
    try:
        _start(thread)
    except BaseException:
        stop()  # if this is an interrupt, the thread may have started
        _running.pop(thread, None)
        raise
    return thread


def _start(thread: threading.Thread) -> None:
    """`thread.start()`, where no signal handler runs: an exception there breaks `threading`."""
    if threading.get_ident() != threading.main_thread().ident:
        thread.start()
        return
    failures = []
    started = _thread.allocate_lock()

    def start() -> None:
        try:
            thread.start()
        except BaseException as failure:
            failures.append(failure)
        finally:
            started.release()

    started.acquire()
    _thread.start_new_thread(start, ())
    started.acquire()
    if failures:
        raise failures[0]


def is_own_thread() -> bool:
    """Whether `start_thread` started the calling thread, or this is a worker process."""
    return serves_parent[0] or threading.current_thread() in _running


def own_threads() -> list[int]:
    """The identifiers of the threads that `start_thread` started."""
    return [thread.ident for thread in list(_running) if thread.ident is not None]


serves_parent = [False]
"""Whether this is a worker, which reports nothing that its parent can report."""


_exit_began = [False]


def begin_exit() -> None:
    """Tells that this process ends, before its threads and workers do."""
    _exit_began[0] = True


def stay_at_exit(release: Callable[[], object]) -> None:
    """At exit, keeps a daemon thread of the user in this call for ever, after calling `release`.

    What it uses is closed, of which it would report an error to nobody. The interpreter ends such
    threads wherever they are.
    """
    if _exit_began[0] and threading.current_thread().daemon and not is_own_thread():
        release()
        while True:
            threading.Event().wait()


@atexit.register
def _stop_all() -> None:
    begin_exit()
    running = _running.copy()
    for stop in running.values():
        stop()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for thread in running:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def at_fork(**handlers: Callable[[], object]) -> None:
    """Registers handlers as `os.register_at_fork` does; on systems without `fork`, does nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**handlers)


# A forked child has none of these threads, and `stop` might wait for a lock that one of them held.
at_fork(after_in_child=_running.clear)
