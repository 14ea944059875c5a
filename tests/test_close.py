"""Closing an iterator while another thread waits for its next element, in any method."""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from passing import Passing, PassingIterator
from under_test import INLINE, experimental, grain
from worker_harness import starters

from grainmill._workers.worker_group import WorkerGroup

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset
pytestmark = pytest.mark.better_than_grain("Grain does not wake a waiting thread")
HERE = Path(__file__).parent
# Far longer than any of this takes on a busy machine.
BOUND_S = 60


class Hang:
    """A user's function that blocks from its third element on, until it is released.

    In a worker it is never released: it ends with the process.
    """

    def __init__(self, mark):
        self.mark = mark
        self.released = threading.Event()

    def __getstate__(self):
        return {"mark": self.mark, "released": None}

    def __call__(self, x):
        if np.max(x) < 2:
            return x
        self.mark.touch()
        while self.released is None:
            time.sleep(0.01)
        self.released.wait()
        return x

    def await_begin(self):
        assert settles(self.mark.exists)


def settles(reached):
    """Whether `reached()` comes true."""
    until = time.monotonic() + BOUND_S
    while not reached():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """Each test collects garbage, which takes as long as there are objects of the tests before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hang(tmp_path):
    """The function; afterwards no thread or process of the test may be left."""
    gc.collect()
    threads, processes = set(threading.enumerate()), running()
    hang = Hang(tmp_path / "begun")
    yield hang
    hang.released.set()
    assert settles(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    assert settles(lambda: running() <= processes), "processes are left"


def running():
    """The processes that this one has started, but for what starts those of later pools."""
    return set(psutil.Process().children(recursive=True)) - set(starters())


def elements(hang, options=None, *, length=1000):
    return MapDataset.range(length).map(hang).to_iter_dataset(options)


def bare(hang):
    """Elements that are computed by the thread that requests them."""
    return elements(hang, INLINE)


def opens_slowly(hang):
    """An interleave whose next dataset is being opened by a thread when the first has ended."""

    def part(x):
        if x == 1:
            time.sleep(0.01)  # so that threads open the next ones
        hang(x)
        return MapDataset.range(1).to_iter_dataset(INLINE)

    return experimental.InterleaveIterDataset(MapDataset.range(9).map(part), cycle_length=1)


def loader(hang, **options):
    source = np.arange(1000)

    class Operation(grain.transforms.Map):
        def map(self, element):
            return hang(element)

    sampler = grain.samplers.IndexSampler(1000, grain.sharding.NoSharding(), num_epochs=1, seed=1)
    return grain.DataLoader(
        data_source=source, sampler=sampler, operations=[Operation()], **options
    )


def packed(hang):
    ds = MapDataset.range(1000).map(hang).map(lambda x: {"t": np.full(4, x)}).to_iter_dataset()
    return experimental.FirstFitPackIterDataset(
        ds, length_struct={"t": 4}, num_packing_bins=1
    ).batch(1)


def put_on_device(hang):
    jax = pytest.importorskip("jax")
    return experimental.device_put(
        elements(hang, INLINE), jax.devices()[0], cpu_buffer_size=1, device_buffer_size=1
    )


def workers(number=2):
    return grain.MultiprocessingOptions(num_workers=number)


# The function hangs in the thread that requests the element.
IN_CALLER = {
    "no_threads": bare,
    "lazy_map": lambda hang: MapDataset.range(1000).to_iter_dataset().map(hang),
    "filter": lambda hang: (
        MapDataset.range(1000).to_iter_dataset().filter(lambda x: hang(x) is not None)
    ),
    "batch": lambda hang: bare(hang).batch(1),
    "own_dataset": lambda hang: Passing(bare(hang)),
    "prefetch_of_0": lambda hang: experimental.ThreadPrefetchIterDataset(
        bare(hang), prefetch_buffer_size=0
    ),
    "map_over_workers": lambda hang: elements(lambda x: x, grain.ReadOptions(num_workers=1)).map(
        hang
    ),
    "data_loader": loader,
}
# It hangs in another thread or process, so the waiting thread is woken.
ELSEWHERE = {
    "threads": elements,
    "one_thread": lambda hang: elements(
        hang, grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    ),
    "threads_batch": lambda hang: elements(hang).batch(1),
    "map_batch": lambda hang: MapDataset.range(1000).map(hang).batch(1).to_iter_dataset(),
    "workers": lambda hang: elements(hang, grain.ReadOptions(num_workers=2)),
    "workers_batch": lambda hang: elements(hang, grain.ReadOptions(num_workers=2)).batch(1),
    "thread_prefetch": lambda hang: experimental.ThreadPrefetchIterDataset(
        bare(hang), prefetch_buffer_size=1
    ),
    "thread_prefetch_over_workers": lambda hang: experimental.ThreadPrefetchIterDataset(
        elements(hang, grain.ReadOptions(num_workers=1)), prefetch_buffer_size=1
    ),
    "interleave": lambda hang: experimental.InterleaveIterDataset(
        [elements(hang), elements(hang)], cycle_length=2
    ),
    "interleave_prefetched": lambda hang: experimental.InterleaveIterDataset(
        [bare(hang).filter(lambda _: True)] * 2, cycle_length=2, iter_buffer_size=2
    ),
    "interleave_opening": opens_slowly,
    "mix": lambda hang: IterDataset.mix([elements(hang), elements(hang)]),
    "mp_prefetch": lambda hang: bare(hang).mp_prefetch(workers()),
    "multithread_prefetch": lambda hang: experimental.multithread_prefetch(
        bare(hang), num_threads=2, buffer_size=1
    ),
    "packed": packed,
    "own_dataset_over_threads": lambda hang: Passing(elements(hang)),
    "prefetch_of_own_dataset": lambda hang: experimental.ThreadPrefetchIterDataset(
        Passing(elements(hang)), prefetch_buffer_size=1
    ),
    "data_loader_workers": lambda hang: loader(hang, worker_count=1),
    "device_put": put_on_device,
}


class Waiter(threading.Thread):
    """Takes elements of `iterator`, or runs `call`, until that fails."""

    def __init__(self, iterator, call=None):
        super().__init__(daemon=True)
        self._call = call or (lambda: [None for _ in iterator])
        self.failure = None
        self.start()

    def run(self):
        try:
            self._call()
        except BaseException as failure:
            self.failure = failure

    def is_refused(self):
        self.join(BOUND_S)
        assert not self.is_alive()
        assert isinstance(self.failure, ValueError), self.failure
        assert "closed iterator" in str(self.failure)
        return True


def closed_in_time(close):
    """Calls `close` on a thread, so that a hang is a failure."""
    closing = Waiter(None, close)
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert closing.failure is None


@pytest.mark.parametrize("name", ELSEWHERE)
def test_threads_that_wait_learn_of_it_while_the_function_hangs(name, hang):
    iterator = iter(ELSEWHERE[name](hang))
    waiters = [Waiter(iterator), Waiter(iterator)]
    hang.await_begin()
    time.sleep(0.05)
    closed_in_time(iterator.close)
    assert all(waiter.is_refused() for waiter in waiters)
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)
    closed_in_time(iterator.close)


@pytest.mark.parametrize("name", IN_CALLER)
def test_threads_that_wait_for_their_turn_learn_of_it_and_so_does_the_one_that_hangs(name, hang):
    iterator = iter(IN_CALLER[name](hang))
    waiters = [Waiter(iterator), Waiter(iterator)]
    hang.await_begin()
    closed_in_time(iterator.close)
    assert settles(lambda: sum(waiter.is_alive() for waiter in waiters) == 1)
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)
    hang.released.set()
    assert all(waiter.is_refused() for waiter in waiters)
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


CALLS = {
    "next": next,
    "get_state": lambda iterator: iterator.get_state(),
    "set_state": lambda iterator: iterator.set_state({"next_index": 0}),
    "start_prefetch": lambda iterator: iterator.start_prefetch(),
    "get_next_index": experimental.get_next_index,
    "set_next_index": lambda iterator: experimental.set_next_index(iterator, 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_whoever_waits_for_a_hanging_element_to_do_something_else_learns_of_it(call, hang):
    iterator = iter(bare(hang))
    hanging = Waiter(iterator)
    hang.await_begin()
    waiting = Waiter(iterator, lambda: CALLS[call](iterator))
    time.sleep(0.05)
    assert waiting.is_alive()
    closed_in_time(iterator.close)
    assert waiting.is_refused()
    hang.released.set()
    assert hanging.is_refused()


@pytest.mark.parametrize("name", ["start_prefetch", "next_index", "seek", "close"])
def test_stages_change_under_the_lock(name, monkeypatch):
    iterator = iter(MapDataset.range(9).map(lambda x: x).to_iter_dataset(INLINE))
    stage, held = iterator._stage, []
    change = getattr(stage, name)

    def watched(*args):
        held.append(iterator._lock._is_owned())
        return change(*args)

    monkeypatch.setattr(stage, name, watched)
    {
        "start_prefetch": iterator.start_prefetch,
        "next_index": lambda: experimental.get_next_index(iterator),
        "seek": lambda: experimental.set_next_index(iterator, 3),
        "close": iterator.close,
    }[name]()
    assert held == [True]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_endless_search_for_an_element_ends(num_workers):
    options = grain.ReadOptions(num_workers=num_workers)
    ds = MapDataset.range(9).repeat().map(lambda x: x).to_iter_dataset(options)
    iterator = iter(ds.filter(lambda _: False))
    waiter = Waiter(iterator)
    time.sleep(0.1)
    closed_in_time(iterator.close)
    assert waiter.is_refused()


def test_worker_set_up_that_hangs_is_given_up(tmp_path):
    mark = tmp_path / "begun"

    def set_up(_, __):
        mark.touch()
        time.sleep(10**6)

    options = grain.ReadOptions(num_workers=1, worker_init_fn=set_up)
    iterator = iter(MapDataset.range(9).map(lambda x: x).to_iter_dataset(options))
    waiter = Waiter(iterator)
    assert settles(mark.exists)
    closed_in_time(iterator.close)
    assert waiter.is_refused()


@pytest.mark.parametrize("num_taken", [0, 1, 33, 101])
@pytest.mark.parametrize("function", [None, lambda x: x])
def test_state_after_close_is_that_of_the_element_delivered_last(function, num_taken):
    ds = MapDataset.range(1000).to_iter_dataset(INLINE)
    iterator = iter(ds if function is None else ds.map(function))
    for _ in range(num_taken):
        next(iterator)
    iterator.close()
    assert iterator.get_state() == {"next_index": num_taken}


# --- dropped iterators, garbage collected at any point -----------------------------------------


@pytest.mark.parametrize("name", ELSEWHERE)
def test_dropped_iterator_waits_for_nothing(name, hang, monkeypatch):
    iterator = iter(ELSEWHERE[name](hang))
    getattr(iterator, "_iterator", iterator).start_prefetch()
    next(iterator)
    time.sleep(0.1)  # threads and workers reach the hanging function, or wait for space
    waited = []
    for owner, method in [
        (threading.Thread, "join"),
        (threading.Thread, "start"),
        (subprocess.Popen, "wait"),
        (WorkerGroup, "end"),
    ]:
        original = getattr(owner, method)

        def watched(*args, _original=original, _name=method):
            if threading.get_ident() == threading.main_thread().ident:
                waited.append(_name)
            return _original(*args)

        monkeypatch.setattr(owner, method, watched)
    # Garbage collection may run while its thread holds the locks of `threading`.
    with threading._active_limbo_lock:
        del iterator
    gc.collect()
    assert waited == []
    monkeypatch.undo()


def test_own_iterator_that_is_dropped_closes_its_parent_without_waiting(hang):
    parent = iter(elements(hang, grain.ReadOptions(num_workers=1)))
    iterator = PassingIterator(parent)
    next(iterator)
    time.sleep(0.1)
    with threading._active_limbo_lock:
        del iterator
    with pytest.raises(ValueError, match="closed iterator"):
        next(parent)


def test_parent_that_is_busy_is_closed_by_the_thread_that_uses_it(hang):
    closed_by = []

    class Busy:
        def __init__(self):
            self._at = 0

        def __iter__(self):
            return self

        def __next__(self):
            self._at += 1
            return hang(self._at)

        def _cancel_waiting(self):
            """Its waiting cannot be ended."""

        def close(self):
            closed_by.append(threading.current_thread().name)

    iterator = experimental.ThreadPrefetchDatasetIterator(Busy(), prefetch_buffer_size=2)
    waiter = Waiter(iterator)
    hang.await_begin()
    closed_in_time(iterator.close)
    assert waiter.is_refused()
    assert closed_by == []
    hang.released.set()
    assert settles(lambda: closed_by)
    assert len(closed_by) == 1
    assert closed_by[0].startswith("grain-thread-prefetch")


AT_EXIT = """
import pathlib, sys, threading, time
threading.excepthook = lambda _: None
from under_test import experimental, grain

begun = pathlib.Path(sys.argv[1])

def hang(x):
    while x == 2:
        begun.touch()
        time.sleep(0.05)
    return x

read = grain.MapDataset.range(9).map(hang).to_iter_dataset(grain.ReadOptions({options}))
iterator = iter({dataset})
next(iterator)
threading.Thread(target=lambda: [None for _ in iterator], daemon=True).start()
while not begun.exists():
    time.sleep(0.005)
time.sleep(0.05)  # the thread waits for the element
{leave}
print("end")
"""
LEAVES = ["iterator.close()", "del iterator", "pass"]


@pytest.mark.parametrize("options", ["num_workers=2", "num_threads=2"])
@pytest.mark.parametrize(
    "dataset", ["read", "experimental.ThreadPrefetchIterDataset(read, prefetch_buffer_size=2)"]
)
def test_interpreter_ends_with_hanging_functions(options, dataset, tmp_path):
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c"),
                AT_EXIT.format(leave=leave, options=options, dataset=dataset),
                str(tmp_path / str(number)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        for number, leave in enumerate(LEAVES)
    ]
    try:
        for leave, process in zip(LEAVES, processes, strict=True):
            out, error = process.communicate(timeout=BOUND_S)
            assert (process.returncode, out, error) == (0, "end\n", ""), leave
    finally:
        for process in processes:
            process.kill()
            process.communicate()
