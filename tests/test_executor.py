"""Prefetching: how much, by how many threads, and in which order elements are delivered."""

import threading
import time
import types

import effort
import numpy as np
import opcodes
import pytest
from stage_harness import count_at_rest
from under_test import INLINE

import grainmill as grain
from grainmill._evaluate.batches.batch_blocks import byte_len
from grainmill._evaluate.prefetch import executor, thread_pool, tuning
from grainmill._evaluate.prefetch.thread_policy import ThreadPolicy
from grainmill._evaluate.program import Program

NUM_THREADS = 4


class Calls:
    """A function that records its arguments and the calling thread."""

    def __init__(self, function=lambda x: x):
        self.function = function
        self.elements = []
        self.threads = set()

    def __call__(self, x):
        self.elements.append(x)
        self.threads.add(threading.current_thread().name)
        return self.function(x)


def sleeps(x, seconds=0.01):
    time.sleep(seconds)
    return x


def threaded(ds, **options):
    return ds.to_iter_dataset(grain.ReadOptions(num_threads=NUM_THREADS, **options))


@pytest.mark.parametrize("batch_size", [0, 3, 64])
def test_functions_that_wait_get_all_threads_within_a_few_elements(batch_size):
    function = Calls(sleeps)
    ds = grain.MapDataset.range(10**6).map(function)
    with iter(threaded(ds.batch(batch_size) if batch_size else ds)) as iterator:
        while len(function.threads) < NUM_THREADS and len(function.elements) < 200:
            next(iterator)
    assert function.threads == {f"grain-prefetch_{number}" for number in range(NUM_THREADS)}


def test_iteration_continues_without_threads_that_cannot_be_started(monkeypatch):
    start = thread_pool.start_thread

    def refused(run, *, name, **options):
        if name != "grain-prefetch_0":
            raise RuntimeError("can't start new thread")
        return start(run, name=name, **options)

    monkeypatch.setattr(thread_pool, "start_thread", refused)
    function = Calls(sleeps)
    ds = threaded(grain.MapDataset.range(40).map(function).batch(4))
    assert [batch[0] for batch in ds] == list(range(0, 40, 4))
    assert function.threads == {"grain-prefetch_0"}


def test_a_failed_wait_of_a_task_is_reported():
    """The thread continues, and waiting for the task raises."""
    threads = thread_pool.ThreadPool()
    failing = thread_pool.Task(list, lambda: 1 // 0)
    after = thread_pool.Task(lambda: 7)
    for task in (failing, after):
        threads.submit(task)
    assert failing.done.acquire(timeout=60)
    assert after.done.acquire(timeout=60)
    assert (type(failing.failure), after.result) == (ZeroDivisionError, 7)
    threads.shutdown()


def shut_down_at(place):
    """Shuts a pool down before the `place`-th opcode of its thread, which takes two tasks.

    Returns:
        Whether the thread had as many.
    """
    pool, left, threads = thread_pool.ThreadPool(), place, set()
    tasks = [thread_pool.Task(lambda: None) for _ in range(2)]

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != thread_pool.__file__:
            return None
        threads.add(threading.current_thread())
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                pool.shutdown()  # as a garbage collection may, there
        return trace

    threading.settrace(trace)
    try:
        for task in tasks:
            pool.submit(task)
    finally:
        threading.settrace(None)
    while left > 0 and any(task.done.locked() for task in tasks):
        time.sleep(0.001)
    pool.shutdown()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), place
    return left <= 0


@opcodes.traced
def test_a_pool_that_is_shut_down_anywhere_while_a_thread_takes_a_task_ends_it(monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    place = 1
    while shut_down_at(place):
        assert not failures, (place, failures)
        place += 1
    assert place > 200


def test_no_more_threads_than_allowed_run_functions_at_once():
    inside, most = set(), []

    def function(x):
        inside.add(x)
        most.append(len(inside))
        time.sleep(0.002)
        inside.discard(x)
        return x

    with iter(threaded(grain.MapDataset.range(10**6).map(function).batch(32))) as iterator:
        for number in range(1000):
            next(iterator)
            if number >= 20 and max(most) >= NUM_THREADS:
                break
    assert max(most) == NUM_THREADS


def test_threads_share_the_elements_of_one_batch(monkeypatch):
    """All are given some of them at the same time, and none more than its share of 64."""
    monkeypatch.setattr(ThreadPolicy, "decide", lambda *_: NUM_THREADS)
    first = {}  # of each thread, after element 0

    def is_shared(x):
        if x == 0:
            return thread_pool.current_thread_pool().active == NUM_THREADS
        first.setdefault(threading.current_thread().name, x)
        return len(first) == NUM_THREADS

    def function(x):
        until = time.monotonic() + 60
        time.sleep(0.01)
        while not is_shared(x):
            assert time.monotonic() < until
            time.sleep(0.01)
        return x

    with iter(threaded(grain.MapDataset.range(64).map(function).batch(64))) as iterator:
        np.testing.assert_array_equal(next(iterator), np.arange(64))
    assert len(first) == NUM_THREADS
    assert max(first.values()) <= 1 + 3 * 64 / NUM_THREADS


@pytest.mark.parametrize("num_workers", [0, 1])
def test_shared_batches_fail_where_unshared_ones_do(num_workers):
    def function(x):
        sleeps(x, 0.005)
        if x == 150:
            raise ValueError("no more")
        return np.full(3, x)

    ds = grain.MapDataset.range(400).map(function)
    for make in (
        lambda options: ds.batch(32).to_iter_dataset(options),
        lambda options: ds.to_iter_dataset(options).batch(32),
    ):
        options = grain.ReadOptions(num_threads=NUM_THREADS, num_workers=num_workers)
        iterator = iter(make(options))
        for start in range(0, 128, 32):
            np.testing.assert_array_equal(next(iterator)[:, 0], np.arange(start, start + 32))
        state = iterator.get_state()
        with pytest.raises(ValueError, match="no more"):
            next(iterator)
        assert iterator.get_state() == state
        iterator.close()


def test_elements_after_a_slow_one_are_computed_meanwhile():
    slow = threading.Event()

    def function(x):
        if x == 20:
            slow.wait(60)
        return x

    calls = Calls(function)
    ds = threaded(grain.MapDataset.range(10**6).map(calls), prefetch_buffer_size=100)
    with iter(ds) as iterator:
        assert [next(iterator) for _ in range(20)] == list(range(20))
        later = threading.Thread(target=lambda: next(iterator))
        later.start()  # what waits for elements sees that threads are needed
        deadline = time.monotonic() + 30
        while max(calls.elements) < 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        slow.set()
        later.join()
        assert next(iterator) == 21


def test_elements_before_a_slow_one_do_not_wait_for_it():
    """They are delivered while the block that they share with it is still being computed."""
    slow = threading.Event()

    def function(x):
        if x == 1007:  # long after blocks have grown
            slow.wait(60)
        return x

    ds = grain.MapDataset.range(10**6).map(function)
    with iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=1))) as iterator:
        assert [next(iterator) for _ in range(1007)] == list(range(1007))
        state = iterator.get_state()
        assert state == {"next_index": 1007}
        slow.set()
        assert [next(iterator) for _ in range(1000)] == list(range(1007, 2007))


def test_a_block_whose_elements_were_all_taken_is_not_the_end(monkeypatch):
    """The consumer has the last element before the block is done."""
    call = executor._elements

    def slowly(*args):
        made = call(*args)
        time.sleep(0.06)
        return made

    monkeypatch.setattr(executor, "_elements", slowly)
    number = effort.cases(12, 100)
    ds = grain.MapDataset.range(number).map(lambda x: x)
    assert list(ds.to_iter_dataset(grain.ReadOptions(num_threads=1))) == list(range(number))


@pytest.mark.parametrize("failing", [3, 11])
def test_elements_taken_from_a_block_are_delivered_once_whatever_follows(failing):
    go_on = threading.Event()

    def function(x):
        if x == 1008 and not go_on.wait(60):
            raise AssertionError
        if x == 1008 + failing:
            raise ValueError("no more")
        return None if x % 5 == 0 else x

    ds = grain.MapDataset.range(10**6).map(function)
    expected = [x for x in range(1008 + failing) if x % 5]
    with iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=1))) as iterator:
        found = [next(iterator) for _ in range(len([x for x in range(1008) if x % 5]))]
        go_on.set()
        found += [next(iterator) for _ in range(len(expected) - len(found))]
        assert found == expected
        for _ in range(2):
            with pytest.raises(ValueError, match="no more"):
                next(iterator)
            assert iterator.get_state() == {"next_index": expected[-1] + 1}


def test_a_consumer_that_pauses_finds_the_requested_prefetch():
    calls = Calls(lambda x: sleeps(x, 1e-4))
    ds = threaded(grain.MapDataset.range(10**6).map(calls), prefetch_buffer_size=200)
    with iter(ds) as iterator:
        for _ in range(300):
            next(iterator)
        deadline = time.monotonic() + 60
        while len(calls.elements) < 300 + 100:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert count_at_rest(calls.elements) - 300 <= 250


@pytest.mark.parametrize("make", [
    lambda ds: threaded(ds, prefetch_buffer_size=10**9, ram_budget_bytes=16 << 20),
    lambda ds: threaded(ds, prefetch_buffer_size=10**9, ram_budget_bytes=16 << 20).batch(4),
    lambda ds: threaded(ds.batch(4), prefetch_buffer_size=10**9, ram_budget_bytes=16 << 20),
])  # fmt: skip
def test_prefetch_is_bounded_by_bytes(make):
    calls = Calls(lambda _: np.zeros(1 << 20, np.uint8))
    with iter(make(grain.MapDataset.range(10**9).map(calls))) as iterator:
        for _ in range(30):
            element = next(iterator)
        taken = 30 * (1 if element.ndim == 1 else 4)
        # Up to 16 are ready; two batches are always in flight.
        assert count_at_rest(calls.elements) - taken <= 16 + 2 * 4


def test_bytes_of_elements_are_those_of_their_leaves():
    array = np.zeros((10, 100), np.float32)
    assert byte_len(array) == 4000
    assert byte_len({"a": array, "b": (array, b"x" * 50), "c": [array] * 1000}) == 8050 + 4_000_000
    cyclic = [array]
    cyclic.append(cyclic)
    assert 4000 <= byte_len(cyclic) < 10**6
    assert 0 < byte_len(object()) < 100
    assert byte_len(None) < 100


@pytest.mark.parametrize("options", [None, INLINE, grain.ReadOptions(0, 500)])
def test_the_first_element_waits_for_no_other(options):
    """A small permutation takes hundreds of microseconds an epoch, a batch has 50 of them."""
    ds = grain.MapDataset.range(10).shuffle(seed=1).repeat().batch(512).to_iter_dataset(options)
    with iter(ds) as iterator:
        assert next(iterator).shape == (512,)
        assert iterator._stage._blocks.position <= 2


def test_no_more_is_started_once_the_awaited_block_is_ready(monkeypatch):
    """Starting the reads of a block may take longer than the reads."""
    begun = []
    begin = Program.start_reads

    def slow_begin(self, start, count):
        time.sleep(0.01)
        begun.append(start)
        return begin(self, start, count)

    monkeypatch.setattr(Program, "start_reads", slow_begin)
    monkeypatch.setattr(Program, "waits_for_storage", property(lambda _: True))
    ds = grain.MapDataset.range(10_000).map(lambda x: time.sleep(0.001) or x)
    iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=4)))
    for taken in range(20):
        assert next(iterator) == taken
        assert len(begun) <= 40 + 3 * taken
    iterator.close()


class Far:
    """Numbers that are far away, and how many reads of them are started and not finished."""

    _waits_for_storage = True

    def __init__(self):
        self.blocks, self.num_started = [], []
        self._num_open = 0

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return indices

    def _start_reads(self, indices):
        self._num_open += len(indices)
        self.blocks.append(len(indices))
        self.num_started.append(self._num_open)
        return types.SimpleNamespace(indices=indices, wait=lambda: time.sleep(0.001))

    def _finish_reads(self, reads):
        self._num_open -= len(reads.indices)
        return reads.indices


@pytest.mark.parametrize("num_threads", [0, 4])
@pytest.mark.parametrize("batch_size", [0, 1, 7, 64, 200])
def test_blocks_of_far_records_wait_for_few_reads_of_each_other(num_threads, batch_size):
    source = Far()
    ds = grain.MapDataset.source(source).map(lambda x: x)
    if batch_size:
        ds = ds.batch(batch_size)
    count = 6000
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=10_000)
    with iter(ds.to_iter_dataset(options)) as iterator:
        for start in range(0, count, max(1, batch_size)):
            expected = range(start, start + batch_size) if batch_size else start
            np.testing.assert_array_equal(next(iterator), expected)
    longest = max(tuning.MAX_READS_STARTED // 2, batch_size)
    if not batch_size:
        assert longest // 2 < max(source.blocks) <= longest
    assert tuning.MAX_READS_STARTED <= max(source.num_started) < tuning.MAX_READS_STARTED + longest


@pytest.mark.parametrize("num_threads", [1, 4, 16])
def test_elements_from_slow_storage_are_computed_within_the_budget(monkeypatch, num_threads):
    """All reads are in flight before the first element is there, and with it its size."""
    may_compute = threading.Event()
    calls = Calls(lambda _: may_compute.wait(60) and np.zeros(1 << 20, np.uint8))
    begun = []
    begin = Program.start_reads
    monkeypatch.setattr(Program, "start_reads", lambda *args: begun.append(args) or begin(*args))
    monkeypatch.setattr(Program, "waits_for_storage", property(lambda _: True))
    options = grain.ReadOptions(num_threads=num_threads, ram_budget_bytes=8 << 20)
    with iter(grain.MapDataset.range(10_000).map(calls).to_iter_dataset(options)) as iterator:
        iterator.start_prefetch()
        assert len(begun) > 200
        may_compute.set()
        assert count_at_rest(calls.elements) <= num_threads + 2
        next(iterator)
        assert count_at_rest(calls.elements) <= 8 + num_threads
        for _ in range(30):
            next(iterator)
        assert count_at_rest(calls.elements) - 31 <= 8 + num_threads


READERS = {
    "caller": {"num_threads": 0},
    "threads": {"num_threads": 4},
    "workers": {"num_workers": 2},
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("first_size", [2, 200])
@pytest.mark.parametrize("run", range(effort.cases(1, 25)))
def test_the_limit_on_prefetching_may_change_while_elements_are_taken(reader, first_size, run):  # noqa: ARG001
    """Each task fits the limit at its start; those started before stay."""
    options = grain.ReadOptions(prefetch_buffer_size=first_size, **READERS[reader])
    iterator = iter(grain.MapDataset.range(10**6).map(lambda x: x + 1).to_iter_dataset(options))
    blocks = iterator._stage._blocks
    ahead, limits = blocks._ahead, []
    add = ahead.add

    def checked_add(task):
        add(task)
        limits.append((blocks.buffer_size, ahead.until - blocks.position, task.count))

    ahead.add = checked_add
    taken, longest = 0, {2: 0, 400: 0}
    with iterator:
        for size in [400, 2, 400, 2]:
            blocks.buffer_size = size
            limits.clear()
            for _ in range(3000):
                assert next(iterator) == taken + 1
                taken += 1
            for limit, num_ahead, count in limits:
                assert limit == size
                assert count == num_ahead or num_ahead <= 2 * size
                longest[size] = max(longest[size], count)
    if reader != "caller":
        assert longest[2] <= 2 < longest[400]
