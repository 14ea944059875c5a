"""Options picked by timing a pipeline: their limits, and the choice between workers and threads."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from worker_harness import workers

import grainmill as grain
from grainmill import IterDataset, MapDataset
from grainmill._dataset import performance_config
from grainmill._dataset.performance_config import Limits, Measured, decide, size_of
from grainmill._stats.thread_clock import ThreadTimes
from grainmill.experimental import (
    InterleaveIterDataset,
    PerformanceConfig,
    ThreadPrefetchIterDataset,
    pick_performance_config,
)

MIB = 1 << 20


def pick(ds, *, ram_budget_mb=64, max_workers=100, max_buffer_size=100, **more):
    config = pick_performance_config(
        ds,
        ram_budget_mb=ram_budget_mb,
        max_workers=max_workers,
        max_buffer_size=max_buffer_size,
        **more,
    )
    return config.multiprocessing_options.num_workers, config.read_options


def large(mib):
    """An element of so many MiB, which takes long enough for workers."""
    time.sleep(0.001)
    return np.zeros(mib * MIB, np.uint8)


def ones(count=20):
    return MapDataset.range(count).map(lambda _: large(1))


def threes(count=20):
    return MapDataset.range(count).map(lambda _: large(3))


# Grain 0.2.18's choice within the same limits: workers, and `prefetch_buffer_size`. Where Grain
# finds no reader, it takes the maximum.
LIMITS = {
    "read": (lambda: ones().to_iter_dataset(), {}, 64, 64),
    "endless": (lambda: ones().repeat().to_iter_dataset(), {}, 64, 64),
    "batch": (lambda: ones().to_iter_dataset().batch(4), {}, 16, 64),
    "batch before": (lambda: ones().batch(4).to_iter_dataset(), {}, 16, 16),
    "random access": (ones, {}, 64, 100),
    "interleave": (lambda: InterleaveIterDataset([ones(), ones()], cycle_length=2), {}, 64, 100),
    "mix": (
        lambda: IterDataset.mix([ones().to_iter_dataset(), threes().to_iter_dataset()]),
        {},
        35,
        16,
    ),
    "short": (lambda: ones(3).to_iter_dataset(), {"max_workers": 7}, 7, 100),
    "too large": (
        lambda: MapDataset.range(9).map(lambda _: large(2)).to_iter_dataset(),
        {"ram_budget_mb": 1},
        0,
        0,
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_choices_are_within_the_limits_of_grain(case):
    make, limits, max_workers, max_buffer_size = LIMITS[case]
    num_workers, read = pick(make(), **limits)
    assert 0 <= num_workers <= max_workers
    assert 0 <= read.prefetch_buffer_size <= max_buffer_size
    assert 0 <= read.num_threads <= max(1, read.prefetch_buffer_size)
    if not num_workers and case in {"read", "batch before", "mix"}:
        assert read.prefetch_buffer_size == max_buffer_size  # all that the budget allows


@pytest.mark.parametrize("num_readers", [1, 3])
def test_buffers_of_all_workers_fit_into_the_budget(num_readers):
    slow = [ones().to_iter_dataset() for _ in range(num_readers)]
    ds = IterDataset.mix(slow).map(lambda x: time.sleep(0.02) or x)
    num_workers, read = pick(ds, ram_budget_mb=48)
    assert num_workers
    assert num_workers * (1 + num_readers * read.prefetch_buffer_size) <= 48


def test_a_cheap_pipeline_gets_no_workers():
    for _ in range(9):  # as other programs may take the core meanwhile
        num_workers, read = pick(MapDataset.range(10_000).map(lambda x: x + 1).batch(10))
        if num_workers == 0:
            break
    assert num_workers == 0
    assert read == grain.ReadOptions(num_threads=1, prefetch_buffer_size=100)


def test_a_function_that_waits_gets_threads_and_no_workers(monkeypatch):
    # All times are twenty times as long: a busy machine wakes threads some milliseconds late.
    for name in ("_CHEAP_S", "_CHEAP_WITH_THREADS_S"):
        monkeypatch.setattr(performance_config, name, 20 * getattr(performance_config, name))
    num_workers, read = pick(MapDataset.range(10_000).map(lambda x: time.sleep(0.1) or x))
    assert num_workers == 0
    assert read.num_threads >= 16


def test_a_function_that_computes_gets_workers(monkeypatch):
    monkeypatch.setattr(performance_config, "num_cores", lambda: 4)

    def compute(x):
        return sum(range(200_000)) + x

    # Where other programs take a core during one of its two measurements, threads look faster.
    for _ in range(5):
        num_workers, read = pick(MapDataset.range(1000).map(compute), max_workers=3)
        if read.num_threads <= 1:
            break
    assert 1 <= num_workers <= 3
    assert read.num_threads <= 1


def test_a_slow_stage_after_the_reader_gets_workers():
    """Threads compute the reader's elements only."""
    ds = MapDataset.range(1000).to_iter_dataset().map(lambda x: time.sleep(0.01) or x)
    assert 5 in (pick(ds, max_workers=5)[0] for _ in range(9))


MEASURED = Measured(0.02, 1.0, 0, 0.02, 1000.0, 1000.0)
MAXIMUM = Limits(64 * MIB, 100, 100, 8)
DECISIONS = {
    "computes: as many workers as cores": (MEASURED, MAXIMUM, 8, 1),
    "at most max_workers": (MEASURED, MAXIMUM._replace(workers=3), 3, 1),
    "one core": (MEASURED, MAXIMUM._replace(cores=1), 0, 1),
    "threads keep four cores busy": (
        MEASURED._replace(threads=16, threaded_s=0.005), MAXIMUM, 2, 16,
    ),
    "threads suffice": (
        MEASURED._replace(busy_cores=0.01, threads=64, threaded_s=0.0004), MAXIMUM, 0, 64,
    ),
    "waits, and threads do not help": (MEASURED._replace(busy_cores=0.01), MAXIMUM, 100, 1),
    "this process takes no more": (
        MEASURED._replace(element_s=0.0002, busy_cores=0.01, threaded_s=0.0002), MAXIMUM, 10, 1,
    ),
    "cheap": (MEASURED._replace(element_s=5e-5, threaded_s=5e-5), MAXIMUM, 0, 1),
    "no elements": (Measured(0.0, 0.0, 0, 0.0, 0.0, 0.0), MAXIMUM, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS)
def test_decisions(case):
    measured, limits, num_workers, num_threads = DECISIONS[case]
    config = decide(measured, limits)
    assert config.multiprocessing_options.num_workers == num_workers
    assert config.read_options.num_threads == num_threads


def test_sizes_of_elements():
    array = np.zeros((3, 4), np.int32)
    assert size_of({"a": array, "b": [array, (array, array)]}) == 4 * array.nbytes
    assert size_of(b"1234") == b"1234".__sizeof__()


def test_everything_is_closed_and_the_options_are_used():
    before = threading.active_count()
    ds = MapDataset.range(10).map(lambda x: time.sleep(0.002) or x).to_iter_dataset()
    ds = ThreadPrefetchIterDataset(ds.map(lambda x: x + 1), prefetch_buffer_size=2)
    config = pick_performance_config(ds, ram_budget_mb=8, max_workers=2, max_buffer_size=None)
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert not workers()
    assert sorted(ds.mp_prefetch(config.multiprocessing_options)) == list(range(1, 11))
    assert list(MapDataset.range(3).to_iter_dataset(config.read_options)) == [0, 1, 2]


def test_few_elements_are_computed_when_they_are_slow():
    calls = []
    ds = MapDataset.range(1000).map(lambda x: time.sleep(0.1) or calls.append(x))
    began = time.monotonic()
    pick(ds.to_iter_dataset(allow_nones=True))
    assert len(calls) < 1000
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"ram_budget_mb": None}, TypeError),
        ({"ram_budget_mb": -1}, ValueError),
        ({"max_workers": -1}, ValueError),
        ({"max_buffer_size": 1.5}, TypeError),
        ({"samples_to_check": 0}, ValueError),
    ],
)
def test_wrong_limits_are_refused(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        pick(MapDataset.range(3), **arguments)


@pytest.mark.parametrize(("seconds", "num_workers"), [(1e-5, 0), (0.01, 8)])
def test_a_users_dataset_is_timed(monkeypatch, seconds, num_workers):
    """By a clock that its elements advance, as nobody knows what other programs do meanwhile."""
    now = 0.0

    class Clock:
        is_known = True

        def read(self):
            return ThreadTimes(now, now)

    class Twice(IterDataset):
        def __iter__(self):
            nonlocal now
            for x in self._parent:
                for _ in range(2):
                    now += seconds
                    yield x

    class Sliced(Twice):
        def set_slice(self, *_):
            raise AssertionError("nothing is sliced")

    monkeypatch.setattr(performance_config, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(performance_config, "ThreadClock", Clock)
    monkeypatch.setattr(performance_config, "num_cores", lambda: 8)
    for kind in (Twice, Sliced):
        ds = kind(MapDataset.range(100).to_iter_dataset())
        assert pick(ds.map(str))[0] == num_workers
        assert "elements: str" in str(ds.map(str).describe(read_elements=True))
        assert list(itertools.islice(ds, 4)) == [0, 0, 1, 1]


def test_a_config_has_defaults():
    assert PerformanceConfig() == PerformanceConfig(None, None)
    assert not hasattr(PerformanceConfig(), "__dict__")


def test_a_map_dataset_under_a_sequential_stage_is_timed():
    ds = grain.experimental.LimitIterDataset(grain.MapDataset.range(50).map(str), 40)
    found = ds.describe(read_elements=True)
    assert "raised" not in str(found)
    config = grain.experimental.pick_performance_config(
        ds.map(str.encode), ram_budget_mb=1, max_workers=1, max_buffer_size=7
    )
    assert config.read_options.prefetch_buffer_size == 7
