"""The time that threads work, without waits for storage."""

from __future__ import annotations

import time

from grainmill._native import waited_s


def work_clock_s() -> float:
    """Seconds on a clock of the calling thread that stops while it waits for storage."""
    return time.perf_counter() - waited_s()
