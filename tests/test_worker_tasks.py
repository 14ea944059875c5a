"""How single elements are grouped into tasks for workers."""

import os
import time

import pytest
from under_test import grain

from grainmill._workers.pool import WorkerPool

pytestmark = pytest.mark.better_than_grain("its workers have no tasks")

NUM_WORKERS = 16


@pytest.fixture
def tasks(monkeypatch):
    """The tasks that were submitted: worker, position, count and batch size of each."""
    submitted = []
    submit = WorkerPool.submit

    def recording_submit(self, worker, task, *more):
        submitted.append((worker, *task))
        return submit(self, worker, task, *more)

    monkeypatch.setattr(WorkerPool, "submit", recording_submit)
    return submitted


def reader(function, **options):
    options = grain.ReadOptions(num_workers=NUM_WORKERS, **options)
    return iter(grain.MapDataset.range(10**6).map(function).to_iter_dataset(options))


def test_many_workers_get_few_long_tasks_where_elements_cost_nothing(tasks):
    with reader(lambda x: x + 1, prefetch_buffer_size=64) as iterator:
        for start in range(1, 100_001, 5000):
            tasks.clear()
            assert [next(iterator) for _ in range(5000)] == list(range(start, start + 5000))
            # Divided evenly, the buffer would give each task of 16 workers two elements, as where a
            # worker waits for a core: its elements seem to cost something for a while.
            if len(tasks) < 5000 / 4:
                return
    pytest.fail(f"{len(tasks)} tasks for 5,000 elements, 20 times")


def test_no_more_is_under_way_than_may_be_ahead(tasks):
    with reader(lambda x: x + 1, prefetch_buffer_size=64) as iterator:
        for taken in range(1, 3_000):
            next(iterator)
            _, start, count, _ = tasks[-1]
            # The elements delivered with this one are taken, and the buffer counts from there.
            assert start + count <= taken + 2 * 64


def test_slow_elements_go_to_all_workers_in_order():
    def slow(x):
        time.sleep(0.02)
        return x, os.getpid()

    with reader(slow) as iterator:
        elements = [next(iterator) for _ in range(8 * NUM_WORKERS)]
    assert [x for x, _ in elements] == list(range(8 * NUM_WORKERS))
    assert len({pid for _, pid in elements}) == NUM_WORKERS


def test_elements_of_which_some_are_slow_go_to_all_workers(tasks):
    def sometimes(x):
        if x % 50 == 0:
            time.sleep(0.2)
        return x

    with reader(sometimes, num_threads=1) as iterator:
        for _ in range(1000):
            next(iterator)
        del tasks[:]
        for _ in range(1000):
            next(iterator)
    assert len({worker for worker, *_ in tasks}) == NUM_WORKERS


def test_workers_that_had_nothing_to_do_are_used_once_elements_get_slow():
    def later_slow(x):
        if x >= 5000:
            time.sleep(0.005)
        return x, os.getpid()

    with reader(later_slow, num_threads=1) as iterator:
        elements = [next(iterator) for _ in range(5000)]
        workers = set()
        while len(workers) < NUM_WORKERS and len(elements) < 10_000:
            elements.append(next(iterator))
            workers.add(elements[-1][1])
    assert [x for x, _ in elements] == list(range(len(elements)))
    assert len(workers) == NUM_WORKERS
