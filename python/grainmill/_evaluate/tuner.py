"""Watches the threads of a threads, and has as many of them work as `ThreadPolicy` says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from grainmill._evaluate import tuning
from grainmill._evaluate.thread_policy import Span, ThreadPolicy

if TYPE_CHECKING:
    from grainmill._evaluate.thread_pool import ThreadPool


class Tuner:
    """Sizes `threads`, up to `allowed` threads, by what comes of it."""

    def __init__(self, threads: ThreadPool, allowed: int) -> None:
        self._threads = threads
        self._allowed = allowed
        self._policy = ThreadPolicy(allowed)
        self._open()

    def _open(self) -> None:
        self._opened = time.perf_counter()
        self._next_look = self._opened + tuning.WAITS_AFTER_S
        self._before = self._threads.totals()
        self._elements = 0
        self._starved_s = 0.0

    def record(self, elements: int, starved_s: float) -> None:
        """Takes note of elements that were computed, and of how long the consumer waited."""
        if self._allowed == 1:
            return
        self._elements += elements
        self._starved_s += starved_s
        time_now = time.perf_counter()
        if time_now < self._next_look:
            return
        self._next_look = time_now + tuning.WAITS_AFTER_S
        elapsed_s = time_now - self._opened
        now, before = self._threads.totals(), self._before
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
            if count != self._threads.active:
                self._threads.resize(count)
            self._open()

    def _is_over(self, span: Span, num_tasks: int) -> bool:
        on_trial, count = self._policy.on_trial, self._policy.count
        if span.waits and span.starves and not on_trial and count < self._allowed:
            return True
        wanted = (tuning.TASKS_ON_TRIAL if on_trial else tuning.TASKS_PER_THREAD) * count
        enough = num_tasks >= wanted or span.elapsed_s >= tuning.LONGEST_SPAN_S
        return enough and span.elapsed_s >= tuning.SPAN_S
