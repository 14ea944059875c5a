"""Measures the threads of a pool, and resizes it as `ThreadPolicy` decides."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.thread_policy import Span, ThreadPolicy

if TYPE_CHECKING:
    from grainmill._evaluate.prefetch.thread_pool import ThreadPool


class Tuner:
    """Resizes `pool`, up to `allowed` threads, by its throughput.

    Several consumers may record at the same time.
    """

    def __init__(self, pool: ThreadPool, allowed: int) -> None:
        self._pool = pool
        self._allowed = allowed
        self._policy = ThreadPolicy(allowed)
        self._recording = threading.Lock()
        self._start_span()

    def _start_span(self) -> None:
        self._span_start_s = time.perf_counter()
        self._next_check_s = self._span_start_s + tuning.WAITS_AFTER_S
        self._before = self._pool.totals()
        self._elements = 0
        self._starved_s = 0.0

    def record(self, elements: int, starved_s: float) -> None:
        """Records elements that were computed, and how long the consumer waited."""
        if self._allowed == 1 or not self._recording.acquire(blocking=False):
            return
        try:
            self._record(elements, starved_s)
        finally:
            self._recording.release()

    def _record(self, elements: int, starved_s: float) -> None:
        self._elements += elements
        self._starved_s += starved_s
        time_now = time.perf_counter()
        if time_now < self._next_check_s:
            return
        self._next_check_s = time_now + tuning.WAITS_AFTER_S
        elapsed_s = time_now - self._span_start_s
        now, before = self._pool.totals(), self._before
        span = Span(
            elapsed_s,
            self._elements,
            self._starved_s,
            now.busy_s - before.busy_s,
            now.cpu_s - before.cpu_s,
            now.ready_s - before.ready_s,
        )
        if self._is_over(span, now.tasks - before.tasks):
            count = self._policy.decide(span)
            if count != self._pool.active:
                self._pool.resize(count)
            self._start_span()

    def _is_over(self, span: Span, num_tasks: int) -> bool:
        on_trial, count = self._policy.on_trial, self._policy.count
        if span.waits and span.starves and not on_trial and count < self._allowed:
            return True
        wanted = (tuning.TASKS_ON_TRIAL if on_trial else tuning.TASKS_PER_THREAD) * count
        enough = num_tasks >= wanted or span.elapsed_s >= tuning.LONGEST_SPAN_S
        return enough and span.elapsed_s >= tuning.SPAN_S
