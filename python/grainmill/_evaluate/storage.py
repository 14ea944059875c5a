"""Time that threads spend at work: waits for storage are none."""

from __future__ import annotations

import time

from grainmill._native import waited_s


def work_clock_s() -> float:
    """A clock of the calling thread, in seconds, that stands still while it waits for storage."""
    return time.perf_counter() - waited_s()
