"""Threads are added where they help, and only there, as simulated functions show."""

import itertools

import numpy as np
import pytest

from grainmill._evaluate.prefetch.thread_policy import LONGEST_PAUSE_S, Span, ThreadPolicy

SPAN_S = 0.05


class Function:
    """A user's function on a machine with `cores` cores.

    Args:
        locked_s: Seconds it computes holding the interpreter lock.
        free_s: Seconds it computes having released it.
        waits_s: Seconds it waits for something.
        contention: By how much of its CPU time each further thread makes it dearer.
    """

    def __init__(self, locked_s=0.0, free_s=0.0, waits_s=0.0, *, cores=8, contention=0.0):
        self.locked_s, self.free_s, self.waits_s = locked_s, free_s, waits_s
        self.cores = cores
        self.contention = contention

    def span(self, threads, *, speed=1.0, demand=float("inf"), elapsed_s=SPAN_S, queued=0.0):
        """The effect of `threads` threads on a consumer that takes `demand` elements a second.

        `queued` is the share of their time in which threads wait for a core.
        """
        dearer = (1 + self.contention * (threads - 1)) / speed
        locked_s, cpu_s = self.locked_s * dearer, (self.locked_s + self.free_s) * dearer
        rates = [threads / (cpu_s + self.waits_s), demand]
        if cpu_s:
            rates.append(self.cores / cpu_s)
        if locked_s:
            rates.append(1 / locked_s)
        rate = min(rates)
        starved_s = elapsed_s * 0.9 if rate < demand else 0.0
        busy_s = threads * elapsed_s if rate < demand else rate * elapsed_s * (cpu_s + self.waits_s)
        used_s = rate * elapsed_s * cpu_s
        ready_s = used_s + queued * elapsed_s * threads
        return Span(elapsed_s, round(rate * elapsed_s), starved_s, busy_s, used_s, ready_s)


def counts(policy, function, seconds, **how):
    """The numbers of threads in use during `seconds`."""
    seen = []
    for _ in range(round(seconds / SPAN_S)):
        seen.append(policy.count)
        policy.decide(function.span(policy.count, **how))
    return seen


@pytest.mark.parametrize("allowed", [1, 4, 16, 64])
def test_functions_that_wait_get_all_threads_immediately(allowed):
    policy = ThreadPolicy(allowed)
    assert counts(policy, Function(locked_s=20e-6, waits_s=0.01), 3)[1:] == [allowed] * 59


@pytest.mark.parametrize("queued", np.linspace(0, 0.9, 10))
def test_they_keep_them_where_each_wait_is_followed_by_one_for_a_core(queued):
    seen = counts(ThreadPolicy(16), Function(locked_s=20e-6, waits_s=0.004), 60, queued=queued)
    assert seen[1:].count(16) > 0.9 * len(seen)


def test_they_get_them_where_a_thread_waited_for_a_core_before_its_first_call():
    policy = ThreadPolicy(16)
    policy.decide(Span(0.116, 6, 0.08, busy_s=0.076, cpu_s=0.001, ready_s=0.081))
    assert set(counts(policy, Function(locked_s=20e-6, waits_s=0.004), 60)[2:]) == {16}


def test_a_function_slower_than_a_span_is_recognised_as_waiting():
    policy = ThreadPolicy(16)
    for _ in range(20):
        policy.decide(Span(SPAN_S, 0, SPAN_S, policy.count * SPAN_S, 1e-5, 1e-5))
    assert policy.count == 16


def test_functions_that_hold_the_lock_keep_one_thread():
    seen = counts(ThreadPolicy(16), Function(locked_s=1e-3), 300)
    assert seen.count(1) > 0.99 * len(seen)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("seed", range(5))
def test_they_keep_it_whatever_the_clock_rate_does(seed):
    speeds = np.random.default_rng(seed).uniform(0.5, 2, 6000)
    policy, function = ThreadPolicy(16), Function(locked_s=1e-3, contention=0.05)
    seen = []
    for speed in speeds:
        seen.append(policy.count)
        policy.decide(function.span(policy.count, speed=speed))
    assert seen.count(1) > 0.9 * len(seen)


def test_a_busy_machine_is_not_taken_for_a_function_that_waits():
    """Others leave the thread a third of a core."""
    seen = counts(ThreadPolicy(16), Function(locked_s=1e-3), 60, speed=0.33, queued=0.67)
    assert seen.count(1) > 0.9 * len(seen)
    assert max(seen) == 2


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (4, 4), (8, 8), (64, 16)])
def test_functions_that_release_the_lock_get_a_thread_a_core(cores, expected):
    seen = counts(ThreadPolicy(16), Function(free_s=1e-3, cores=cores), 10)
    assert np.median(seen) == expected
    assert seen.index(expected) <= 5  # each doubling takes a span


def test_a_thread_that_makes_elements_dearer_by_contention_is_removed():
    seen = counts(ThreadPolicy(16), Function(free_s=1e-3, contention=0.5), 60)
    assert seen.count(1) > 0.9 * len(seen)


def test_a_trial_that_looked_good_after_a_cold_start_is_reverted():
    """Images of 150 KB: two cores share the memory bandwidth, but the first images were dearer."""
    function = Function(free_s=40e-6, contention=0.9)
    policy = ThreadPolicy(16)
    policy.decide(function.span(1, speed=0.5))
    assert policy.count == 2
    seen = counts(policy, function, 60)
    assert seen.count(1) > 0.9 * len(seen)


def test_useful_threads_are_removed_only_for_rare_trials():
    seen = counts(ThreadPolicy(16), Function(free_s=1e-3, cores=8), 120)
    assert seen.count(8) > 0.97 * len(seen)
    assert 4 in seen[200:]


def test_functions_that_wait_half_the_time_get_threads_until_the_lock_is_busy():
    seen = counts(ThreadPolicy(16), Function(locked_s=0.3e-3, waits_s=0.7e-3), 60)
    assert np.median(seen) > 3


def test_a_consumer_that_never_waits_gets_no_more_threads():
    seen = counts(ThreadPolicy(16), Function(waits_s=1e-3), 10, demand=500)
    assert set(seen) == {1}


def test_threads_that_just_serve_the_consumer_stay():
    """Once all elements are in time, they are computed no faster than they are taken."""
    seen = counts(ThreadPolicy(16), Function(waits_s=10e-3), 10, demand=110)
    assert set(seen[1:]) == {16}


def test_a_function_that_starts_to_wait_is_noticed():
    policy = ThreadPolicy(16)
    counts(policy, Function(locked_s=1e-3), 100)
    seen = counts(policy, Function(waits_s=10e-3), LONGEST_PAUSE_S + 1)
    assert seen[-1] == 16


def test_a_function_that_starts_to_compute_is_noticed():
    policy = ThreadPolicy(16)
    assert counts(policy, Function(waits_s=10e-3), 5)[-1] == 16
    seen = counts(policy, Function(locked_s=1e-3, contention=0.02), 5)
    assert seen.count(1) > 0.9 * len(seen)


def test_pauses_after_failed_trials_double():
    seen = counts(ThreadPolicy(16), Function(locked_s=1e-3), 40)
    changes = enumerate(itertools.pairwise(seen))
    trials = [place * SPAN_S for place, (count, then) in changes if count < then]
    gaps = np.diff(trials)
    assert len(gaps) >= 3
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))
