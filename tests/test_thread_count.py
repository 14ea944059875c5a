"""Threads are added where they help, and only there."""

import numpy as np
import pytest

from grainmill._evaluate import thread_count
from grainmill._evaluate.thread_count import ThreadCount


class Clock:
    """Stands in for the time, so that no test depends on the machine."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def active_after(monkeypatch, num_windows, rate_of, cpu_s_of):
    """Threads in use once a starved consumer took blocks of 10 for so many windows."""
    clock = Clock()
    monkeypatch.setattr(thread_count, "time", clock)
    count = ThreadCount(16)
    for window in range(num_windows):
        for _ in range(200):
            seconds = 10 / rate_of(count.active, window)
            clock.now += seconds
            count.record(10, seconds, 10 * cpu_s_of(count.active))
    return count.active


def test_functions_that_wait_get_all_threads(monkeypatch):
    used = active_after(monkeypatch, 60, lambda n, _: 500 * n, lambda _: 50e-6)
    assert used == 16


def test_functions_that_release_the_lock_get_a_thread_a_core(monkeypatch):
    used = active_after(monkeypatch, 60, lambda n, _: 1000 * min(n, 2), lambda _: 1e-3)
    assert used == 2


@pytest.mark.parametrize("seed", range(5))
def test_functions_that_hold_the_lock_keep_one_thread_whatever_the_clock_does(monkeypatch, seed):
    speed = np.random.default_rng(seed).uniform(0.5, 2, 1000)
    used = []
    for windows in range(20, 100, 20):
        rate = lambda n, w: 1000 * speed[w] * (1 if n == 1 else 0.95)  # noqa: E731
        used.append(active_after(monkeypatch, windows, rate, lambda _: 0.9e-3 / 2))
    assert set(used) <= {1, 2}, used  # 2 while a trial lasts
    assert used.count(1) >= 2


def test_contended_functions_give_back_what_makes_them_dearer(monkeypatch):
    used = active_after(monkeypatch, 61, lambda n, _: 1000 * n**0.5, lambda n: 1e-3 * n**0.5)
    assert used in (1, 2)
