"""The CPU time of one thread, read by others; on Linux, also how long it waited for a core."""

from __future__ import annotations

import io
import os
import threading
import time
from typing import NamedTuple

from grainmill._interrupts import suppressed
from grainmill._native import thread_times

_NS = 1e-9


class ThreadTimes(NamedTuple):
    """The times of a thread since its start.

    Attributes:
        cpu_s: CPU seconds.
        ready_s: Seconds in which it could have run: CPU seconds and waits for a core.
    """

    cpu_s: float
    ready_s: float

    def plus(self, times: ThreadTimes, factor: float = 1.0) -> ThreadTimes:
        """These and `factor` times `times`, and not less than 0."""
        return ThreadTimes(
            max(0.0, self.cpu_s + factor * times.cpu_s),
            max(0.0, self.ready_s + factor * times.ready_s),
        )


def _parsed(statistics: bytes) -> ThreadTimes:
    cpu_ns, waited_ns, _ = statistics.split()
    cpu_s = int(cpu_ns) * _NS
    return ThreadTimes(cpu_s, cpu_s + int(waited_ns) * _NS)


class _File(io.FileIO):
    """A file that is closed with its last reference, also if a signal handler raises meanwhile."""

    __del__ = io.FileIO.close  # without a warning that it was open


class ThreadClock:
    """The times of the thread that creates it, for one other thread, also after the first ended."""

    def __init__(self) -> None:
        self._last = ThreadTimes(0.0, 0.0)
        self._statistics: _File | None = None
        self._clock: int | None = None
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        if hasattr(os, "pread"):
            with suppressed(OSError):  # another system
                self._statistics = _File(path)
        of_thread = getattr(time, "pthread_getcpuclockid", None)
        if self._statistics is None and of_thread is not None:
            self._clock = of_thread(threading.get_ident())

    @property
    def is_known(self) -> bool:
        """Whether this system has the times of single threads."""
        return self._statistics is not None or self._clock is not None

    def read(self) -> ThreadTimes:
        """The times until now, or those last read if the thread has ended."""
        with suppressed(OSError, ValueError):  # the thread has ended
            if self._statistics is not None:
                self._last = _parsed(os.pread(self._statistics.fileno(), 100, 0))
            elif self._clock is not None:
                cpu_s = time.clock_gettime(self._clock)
                self._last = ThreadTimes(cpu_s, cpu_s)
        return self._last


class ThreadUse:
    """The times of the thread that creates it, from then on; it keeps no file open.

    They are those of `ThreadClock`, at the price of opening a file for each reading.
    """

    def __init__(self) -> None:
        self._native_id = threading.get_native_id()
        of_thread = getattr(time, "pthread_getcpuclockid", None)
        self._clock = None if of_thread is None else of_thread(threading.get_ident())
        self._before = self._now()
        self._started_s = time.perf_counter()
        self._ended: ThreadTimes | None = None
        self._ended_s = 0.0

    def _now(self) -> ThreadTimes:
        times = thread_times(self._native_id)
        if times is not None:
            cpu_s, waited_s = times
            return ThreadTimes(cpu_s, cpu_s + waited_s)
        with suppressed(OSError):
            if self._clock is not None:
                cpu_s = time.clock_gettime(self._clock)
                return ThreadTimes(cpu_s, cpu_s)
        return ThreadTimes(0.0, 0.0)

    def read(self) -> ThreadTimes:
        """The times until now, or until `end`; 0 if the thread has ended without."""
        if self._ended is not None:
            return self._ended
        return self._now().plus(self._before, -1.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds until now, or until `end`."""
        return (self._ended_s or time.perf_counter()) - self._started_s

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended is not None

    def end(self) -> None:
        """Records that the thread ends."""
        self._ended, self._ended_s = self.read(), time.perf_counter()
