"""Worker processes whose functions wait: several tasks of one worker are under way at a time."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from worker_harness import SOON_S, all_of, gone, opened, workers

import grainmill as grain
from grainmill._evaluate.prefetch.thread_policy import ThreadPolicy

pytestmark = pytest.mark.better_than_grain("Grain has no threads in reading workers")
# By now a function that sleeps is known to wait.
SETTLED = 200


def where(x):
    time.sleep(0.01)
    return np.array([x, os.getpid(), threading.get_native_id()])


def waiting(length=10_000, function=where, **options):
    return opened(grain.MapDataset.range(length).map(function), "read", 1, **options)


def gets_all_threads(*_):
    """Makes a worker use all of its threads soon, whatever a busy machine lets them measure."""
    ThreadPolicy.decide = lambda policy, _: policy._allowed


@pytest.mark.parametrize("batch_size", [0, 5])
def test_elements_come_in_order_from_many_threads_of_a_worker(batch_size):
    iterator = waiting(503, num_threads=8, batch_size=batch_size, worker_init_fn=gets_all_threads)
    found = np.concatenate([np.reshape(element, (-1, 3)) for element in iterator])
    assert found[:, 0].tolist() == list(range(503))
    assert len(set(found[:, 1])) == 1
    assert len(set(found[SETTLED:, 2])) == 8


# Takes seconds until trials with fewer threads have found out: they come at growing distances.
def test_the_main_thread_takes_over_where_functions_no_longer_wait():
    def waits_at_first(x):
        if x < SETTLED:
            time.sleep(0.01)
        else:
            sum(range(20_000))
        return threading.get_native_id() == os.getpid()

    iterator = waiting(10**7, waits_at_first, num_threads=8)
    found = all_of(iterator, SETTLED)
    assert found[0]
    assert not all(found[SETTLED // 2 :])
    until = time.monotonic() + 200
    while not next(iterator):
        assert time.monotonic() < until
    iterator.close()


def test_one_thread_stays_one():
    found = np.stack(all_of(waiting(num_threads=1), SETTLED // 2))
    assert len(set(found[:, 2])) == 1


def test_no_more_than_the_allowed_threads_run_functions(tmp_path):
    def counted(_):
        name = tmp_path / str(threading.get_native_id())
        name.touch()
        time.sleep(0.01)
        at_once = len(list(tmp_path.iterdir()))
        name.unlink()
        return at_once

    iterator = waiting(function=counted, num_threads=4, worker_init_fn=gets_all_threads)
    found = all_of(iterator, 2 * SETTLED)
    assert max(found) == 4


def stuck_beside_others(folder):
    """An iterator whose next element hangs until `folder / "go"` exists, amid four threads."""

    def stuck(x):
        if x == SETTLED:
            while not (folder / "go").exists():
                time.sleep(0.01)
        elif x > SETTLED:
            (folder / str(x)).touch()
        time.sleep(0.01)
        return x

    folder.mkdir()
    iterator = waiting(function=stuck, num_threads=4, prefetch_buffer_size=100)
    assert all_of(iterator, SETTLED) == list(range(SETTLED))
    return iterator


def test_what_one_thread_waits_for_keeps_no_other_from_going_on(tmp_path):
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        iterator = stuck_beside_others(folder)
        if iterator._stage._blocks._num_concurrent == 4:
            break
        iterator.close()  # fewer threads were on trial just then
    assert iterator._stage._blocks._num_concurrent == 4
    until = time.monotonic() + SOON_S
    while len(list(folder.iterdir())) < 15 and time.monotonic() < until:
        time.sleep(0.01)
    done_meanwhile = len(list(folder.iterdir()))
    (folder / "go").touch()
    assert 15 <= done_meanwhile < 100
    assert all_of(iterator, 100) == list(range(SETTLED, SETTLED + 100))


def test_failures_come_in_their_turn():
    def fails(x):
        time.sleep(0.005 * (x % 3))
        if x == SETTLED:
            raise LookupError(x)
        return x

    iterator = waiting(SETTLED + 50, fails, num_threads=8)
    assert all_of(iterator, SETTLED) == list(range(SETTLED))
    for _ in range(2):
        with pytest.raises(LookupError, match=f"{SETTLED}"):
            next(iterator)
    iterator.set_state({"next_index": SETTLED + 1})
    assert all_of(iterator) == list(range(SETTLED + 1, SETTLED + 50))


def test_elements_before_one_that_ends_the_worker_are_not_lost():
    def dies(x):
        time.sleep(0.01)
        if x == SETTLED + 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    iterator = waiting(SETTLED + 50, dies, num_threads=8)
    found, failures = [], 0
    while failures < 10 and len(found) < SETTLED + 9:
        try:
            found.append(next(iterator))
        except grain.WorkerError:
            failures += 1
    assert found == list(range(SETTLED + 9))
    assert failures <= 1
    with pytest.raises(grain.WorkerError, match=rf"element( {SETTLED + 9}|s {SETTLED + 9} to \d+)"):
        next(iterator)
    with pytest.raises(grain.WorkerError, match=f"element {SETTLED + 9}"):
        next(iterator)


def test_states_are_exact_at_every_element():
    iterator = waiting(SETTLED + 30, num_threads=4)
    values = [element[0] for element in all_of(iterator, SETTLED)]
    for _ in range(8):
        state = iterator.get_state()
        values.append(next(iterator)[0])
        iterator.set_state(state)
        assert next(iterator)[0] == values[-1]
    assert values == list(range(SETTLED + 8))


def test_a_child_that_a_thread_forks_ends_where_the_function_returns():
    def forks(x):
        time.sleep(0.01)
        return (x, os.getpid()) if os.fork() else ("child", os.getpid())

    iterator = waiting(function=forks, num_threads=4)
    found = all_of(iterator, SETTLED)
    assert [x for x, _ in found] == list(range(SETTLED))
    assert len({pid for _, pid in found}) == 1


@pytest.mark.parametrize("moment", [1, SETTLED])
def test_closing_ends_functions_that_hang(moment):
    def hangs(x):
        time.sleep(0.01 if x < moment else 3600)
        return x

    others = workers()
    iterator = waiting(function=hangs, num_threads=4)
    assert all_of(iterator, moment) == list(range(moment))
    processes = [process for process in workers() if process not in others]
    assert processes
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < SOON_S
    assert gone(processes)


def test_large_elements_stay_within_the_budget():
    budget = 64 << 20

    def large(x):
        time.sleep(0.01)
        return np.full(4 << 20, x % 251, np.uint8)

    others = workers()
    iterator = waiting(function=large, num_threads=16, ram_budget_bytes=budget)
    next(iterator)
    [worker] = [process for process in workers() if process not in others]
    at_first = worker.memory_info().rss
    most = 0
    for x in range(1, 150):
        assert (next(iterator)[::4096] == x % 251).all()
        most = max(most, worker.memory_info().rss)
    assert most - at_first < 2 * budget
