"""The CPU time of one thread, read by others; on Linux, also how long it waited for a core."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import NamedTuple

_NS = 1e-9


class ThreadTimes(NamedTuple):
    """The times of a thread since its start.

    Attributes:
        cpu_s: CPU seconds.
        ready_s: Seconds in which it could have run: CPU seconds and waits for a core.
    """

    cpu_s: float
    ready_s: float


class ThreadClock:
    """The times of the thread that creates it, for one other thread, also after the first ended."""

    def __init__(self) -> None:
        self._last = ThreadTimes(0.0, 0.0)
        self._statistics: int | None = None
        self._clock: int | None = None
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        try:
            self._statistics = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError):  # another system
            of_thread = getattr(time, "pthread_getcpuclockid", None)
            if of_thread is not None:
                self._clock = of_thread(threading.get_ident())
        else:
            weakref.finalize(self, os.close, self._statistics).atexit = False

    @property
    def is_known(self) -> bool:
        """Whether this system has the times of single threads."""
        return self._statistics is not None or self._clock is not None

    def read(self) -> ThreadTimes:
        """The times until now, or those last read if the thread has ended."""
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            if self._statistics is not None:
                os.lseek(self._statistics, 0, os.SEEK_SET)
                cpu_ns, waited_ns, _ = os.read(self._statistics, 100).split()
                cpu_s = int(cpu_ns) * _NS
                self._last = ThreadTimes(cpu_s, cpu_s + int(waited_ns) * _NS)
            elif self._clock is not None:
                cpu_s = time.clock_gettime(self._clock)
                self._last = ThreadTimes(cpu_s, cpu_s)
        return self._last
