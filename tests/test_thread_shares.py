"""Each thread that runs users' functions gets its share of any thousand elements.

Programs keep something per thread, such as a stream of a data set that has no index: what a thread
without elements would have read, is not seen.
"""

import collections
import random
import threading
import time

import pytest
from effort import cases

import grainmill as grain
import grainmill.python
from grainmill import experimental
from grainmill._evaluate.prefetch.thread_policy import ThreadPolicy
from grainmill._evaluate.prefetch.thread_pool import Task, ThreadPool

WINDOW = 1000
SHARE = 0.2  # how far from equal a share may be


def ran_by(pool, counts):
    """For each element of tasks of `counts` elements, in order, the name of its thread."""
    threads = []
    finished = threading.Semaphore(0)

    def task(count):
        threads.extend([threading.current_thread().name] * count)
        finished.release()

    for count in counts:
        pool.submit(Task(lambda count=count: task(count), num_records=count))
    for _ in counts:
        assert finished.acquire(timeout=60)
    pool.shutdown()
    return threads


def assert_shares_are_equal(threads, num_threads, share=SHARE):
    """Of any `WINDOW` elements that followed each other, each thread has an equal share."""
    names = [f"grain-prefetch_{number}" for number in range(num_threads)]
    assert set(threads) <= set(names)
    equal = WINDOW / num_threads
    for start in range(0, len(threads) - WINDOW + 1, 37):
        counts = collections.Counter(threads[start : start + WINDOW])
        least, most = min(counts[name] for name in names), max(counts.values())
        assert max(most - equal, equal - least) <= max(1, share * equal), (start, least, most)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("seed", range(cases(2, 4)))
def test_a_turn_goes_around_where_one_thread_works(num_threads, seed):
    """Whatever the number of elements of tasks, up to a tenth of a thread's share of them."""
    draw = random.Random(f"{num_threads} {seed}")
    longest = draw.choice([1, max(1, WINDOW // num_threads // 10)])
    counts = [
        draw.randint(min(longest, draw.randint(0, 1)), longest) for _ in range(cases(2000, 4000))
    ]
    threads = ran_by(ThreadPool(num_threads), counts)
    assert len(threads) == sum(counts)
    assert_shares_are_equal(threads, num_threads)


@pytest.mark.parametrize("num_threads", [2, 4, 5, 8, 16])
def test_tasks_as_long_as_a_turn_are_one_each(num_threads):
    threads = ran_by(ThreadPool(num_threads), [WINDOW // num_threads] * 6 * num_threads)
    assert_shares_are_equal(threads, num_threads)


ASKED = {
    "name": lambda: threading.current_thread().name,
    "ident": lambda: threading.current_thread().ident,
    "native_id": lambda: threading.current_thread().native_id,
}


@pytest.mark.parametrize("asked", ASKED)
def test_threads_take_turns_whatever_a_function_asks_its_thread_for(monkeypatch, asked):
    monkeypatch.setattr(ThreadPolicy, "decide", lambda *_: 1)
    threads = {}

    def function(index):
        threads[index] = ASKED[asked]()
        return index

    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
    with iter(grain.MapDataset.range(10**9).map(function).to_iter_dataset(options)) as iterator:
        for _ in range(3 * WINDOW):
            next(iterator)
    counts = collections.Counter(threads[index] for index in range(3 * WINDOW))
    equal = 3 * WINDOW / 4
    assert len(counts) == 4
    assert max(counts.values()) - equal <= SHARE * equal
    assert equal - min(counts.values()) <= SHARE * equal


class Source:
    """A source that notes on which thread it is read."""

    def __init__(self, work):
        self.work, self.threads = work, {}

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        self.threads[index] = threading.current_thread().name
        return {"index": index, "sum": sum(range(self.work))}


def read(source, options):
    return grain.MapDataset.source(source).to_iter_dataset(options)


def loaded(source, options):
    sampler = grain.python.IndexSampler(
        len(source), grain.python.NoSharding(), num_epochs=1, seed=0
    )
    return grain.DataLoader(data_source=source, sampler=sampler, read_options=options)


def packed(source, options):
    tokens = grain.MapDataset.source(source).map(lambda x: {"tokens": [x["sum"]] * 3})
    ds = experimental.FirstFitPackIterDataset(
        tokens.to_iter_dataset(options), length_struct={"tokens": 12}, num_packing_bins=3
    )
    return ds.batch(2)


def batched(source, options):
    return grain.MapDataset.source(source).batch(8).to_iter_dataset(options)


def mapped(source, options):
    """The same of functions: a map over records that need no thread."""
    return grain.MapDataset.range(len(source)).map(source.__getitem__).to_iter_dataset(options)


# Short and long functions take turns among the numbers, of which each goes with both in the end.
@pytest.mark.parametrize(
    ("num_threads", "buffer_size", "work"),
    [(4, 16, 10), (4, 500, 5000), (16, 500, 10), (3, 100, 5000)]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in ((4, 16, 5000), (4, 500, 10), (16, 500, 5000), (3, 100, 10))
    ],
)
@pytest.mark.parametrize("pipeline", [read, loaded, mapped, batched, packed])
def test_pipelines_give_each_thread_its_share(
    monkeypatch, pipeline, num_threads, buffer_size, work
):
    """Whatever the pace of the machine, where one thread works."""
    monkeypatch.setattr(ThreadPolicy, "decide", lambda *_: 1)
    source = Source(work)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
    iterator = iter(pipeline(source, options))
    count = cases(2, 3) * WINDOW
    while len(source.threads) < count:
        next(iterator)
    iterator.close()
    threads = [source.threads[index] for index in range(count)]
    assert_shares_are_equal(threads, num_threads)


def test_one_thread_keeps_its_core_where_no_function_asks_which_it_is(monkeypatch):
    monkeypatch.setattr(ThreadPolicy, "decide", lambda *_: 1)
    threads = {}

    def function(index):
        threads.setdefault(threading.get_ident(), []).append(index)
        if index >= 2 * WINDOW:
            assert threading.current_thread().name.startswith("grain-prefetch_")
        return index

    iterator = iter(grain.MapDataset.range(10**9).map(function).to_iter_dataset())
    for index in range(2 * WINDOW - 500):  # of which 500 are computed ahead
        assert next(iterator) == index
    assert len(threads) == 1
    while len(threads) < 16:
        next(iterator)
    iterator.close()


def test_functions_that_wait_give_each_thread_its_share():
    """All threads work: each takes the next element once it has finished one."""
    source = Source(0)

    def function(index):
        time.sleep(0.001)
        return source[index]

    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
    iterator = iter(grain.MapDataset.range(10**9).map(function).to_iter_dataset(options))
    while len(source.threads) < 3 * WINDOW:
        next(iterator)
    iterator.close()
    counts = collections.Counter(source.threads[index] for index in range(WINDOW, 2 * WINDOW))
    assert min(counts[f"grain-prefetch_{number}"] for number in range(4)) >= WINDOW / 4 / 2
