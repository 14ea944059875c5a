"""How many threads are worth having, found out by trying."""

from __future__ import annotations

import time
from typing import NamedTuple

_WINDOW_S = 0.1
_BLOCKS_PER_THREAD = 4
_STARVED_SHARE = 0.5
_WORTHWHILE = 1.3
_TOGETHER_CORES = 1.2
_WAITING_CORES = 0.6
_TOLERABLE = 1.1
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# A function that waits may spend this much of its waiting on waking up.
_WAKING_SHARE = 0.02


class _Measured(NamedTuple):
    """What a window of time brought with `active` threads, which kept `cores` busy."""

    active: int
    elements_per_s: float
    cpu_s_per_element: float
    cores: float

    def is_worth(self, before: _Measured) -> bool:
        """Whether these threads do better than those `before`.

        The clock rate of a shared machine may double from one window to the next, so a higher
        rate counts only where it can have come from the threads: they ran at the same time, or
        they wait more than they compute.
        """
        together = self.cores > _TOGETHER_CORES or before.cores < _WAITING_CORES
        dearest = _TOLERABLE * before.cpu_s_per_element + _WAKING_SHARE / before.elements_per_s
        return (
            together
            and self.elements_per_s >= _WORTHWHILE * before.elements_per_s
            and self.cpu_s_per_element <= dearest
        )


class ThreadCount:
    """Grows while the consumer starves and more threads bring more elements.

    Functions that hold the interpreter lock gain nothing from a second thread; those that wait or
    release it do, though some lose as much to handing the lock around. Which kind a function is
    shows only in the rate and the CPU time, so a doubled count is tried for a moment, and taken
    back where elements do not come clearly faster or each costs clearly more. Pauses between
    trials double.

    Attributes:
        active: The threads to give work to, 1 to the number allowed.
    """

    def __init__(self, allowed: int) -> None:
        self.active = 1
        self._allowed = allowed
        self._pause_s = _FIRST_PAUSE_S
        self._next_trial = 0.0
        self._before: _Measured | None = None
        self._open_window(time.perf_counter())

    def _open_window(self, now: float) -> None:
        self._opened = now
        self._blocks = self._elements = 0
        self._waited_s = self._cpu_s = 0.0

    def record(self, count: int, waited_s: float, cpu_s: float) -> None:
        """Takes note of a block: its elements, the consumer's wait, its thread's CPU time."""
        if self._allowed == 1:
            return
        self._blocks += 1
        self._elements += count
        self._waited_s += waited_s
        self._cpu_s += cpu_s
        now = time.perf_counter()
        elapsed_s = now - self._opened
        if elapsed_s < _WINDOW_S or self._blocks < _BLOCKS_PER_THREAD * self.active:
            return
        elements = max(1, self._elements)
        measured = _Measured(
            self.active,
            elements / elapsed_s,
            self._cpu_s / elements,
            self._cpu_s / elapsed_s,
        )
        self._decide(now, measured, self._waited_s / elapsed_s)
        self._open_window(now)

    def _decide(self, now: float, measured: _Measured, starved: float) -> None:
        before, self._before = self._before, None
        if before is not None and not measured.is_worth(before):
            self.active = before.active
            self._next_trial = now + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        elif starved > _STARVED_SHARE and self.active < self._allowed and now >= self._next_trial:
            self._before = measured
            self.active = min(self._allowed, 2 * self.active)
