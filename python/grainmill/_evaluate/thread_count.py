"""How many threads are worth having, found out by trying."""

from __future__ import annotations

import time

_WINDOW_S = 0.1
_BLOCKS_PER_THREAD = 4
_STARVED_SHARE = 0.5
_WORTHWHILE = 1.15
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class ThreadCount:
    """Grows while the consumer starves and more threads bring more elements.

    Functions that hold the interpreter lock gain nothing from a second thread; those that wait or
    release it do. Which kind a function is shows only in the rate, so a doubled count is tried
    for a moment and taken back where the rate has not risen. Pauses between trials double.

    Attributes:
        active: The threads to give work to, 1 to the number allowed.
    """

    def __init__(self, allowed: int) -> None:
        self.active = 1
        self._allowed = allowed
        self._pause_s = _FIRST_PAUSE_S
        self._next_trial = 0.0
        self._before: tuple[int, float] | None = None
        self._open_window(time.perf_counter())

    def _open_window(self, now: float) -> None:
        self._opened = now
        self._blocks = self._elements = 0
        self._waited_s = 0.0

    def record(self, count: int, waited_s: float) -> None:
        """Takes note of a block of `count` elements that the consumer waited for."""
        if self._allowed == 1:
            return
        self._blocks += 1
        self._elements += count
        self._waited_s += waited_s
        now = time.perf_counter()
        elapsed_s = now - self._opened
        if elapsed_s < _WINDOW_S or self._blocks < _BLOCKS_PER_THREAD * self.active:
            return
        self._decide(now, self._elements / elapsed_s, self._waited_s / elapsed_s)
        self._open_window(now)

    def _decide(self, now: float, rate: float, starved: float) -> None:
        if self._before is not None:
            active, rate_before = self._before
            self._before = None
            if rate < _WORTHWHILE * rate_before:
                self.active = active
                self._next_trial = now + self._pause_s
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
                return
        if starved > _STARVED_SHARE and self.active < self._allowed and now >= self._next_trial:
            self._before = (self.active, rate)
            self.active = min(self._allowed, 2 * self.active)
