"""Threads in place of worker processes, where threads run Python code in parallel."""

import sys
import threading

import numpy as np
import pytest

import grainmill as grain


@pytest.fixture
def free_threads(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


def where(index):
    return {"index": np.array(index), "thread": threading.current_thread().name}


def elements(ds):
    with_threads = list(ds)
    assert {element["thread"] for element in with_threads} - {"MainThread"}
    return [int(element["index"]) for element in with_threads]


@pytest.mark.usefixtures("free_threads")
def test_reading_workers_are_threads_without_the_lock():
    options = grain.ReadOptions(num_workers=2)
    ds = grain.MapDataset.range(100).shuffle(seed=1).map(where)
    alone = [int(element["index"]) for element in ds]
    assert elements(ds.to_iter_dataset(options)) == alone


@pytest.mark.usefixtures("free_threads")
def test_shared_pipelines_are_threads_without_the_lock():
    options = grain.MultiprocessingOptions(num_workers=3)
    ds = grain.MapDataset.range(20).map(where).to_iter_dataset(grain.ReadOptions(num_threads=0))
    assert elements(ds.mp_prefetch(options)) == list(range(20))


def recording_init(called):
    """An init function that records its arguments and thread, and the thread-local data it sets."""
    local = threading.local()

    def init(worker, num_workers):
        called.append((worker, num_workers, threading.current_thread().name))
        local.is_set = True

    return init, local


def opened(ds, entrance, init, num_workers=3):
    """An iterator whose workers call `init`."""
    if entrance == "parts":
        read = ds.to_iter_dataset(grain.ReadOptions(num_threads=0))
        multi = grain.MultiprocessingOptions(num_workers=num_workers)
        return iter(read.mp_prefetch(multi, worker_init_fn=init))
    options = {"num_workers": num_workers, "worker_init_fn": init}
    if entrance == "nothing ahead":
        options["prefetch_buffer_size"] = 0
    read = ds.to_iter_dataset(grain.ReadOptions(**options))
    if entrance == "packed":
        read = grain.experimental.FirstFitPackIterDataset(
            read, length_struct={"x": 4}, num_packing_bins=2, shuffle_bins=False
        ).batch(2)
    return iter(read)


ENTRANCES = ["read", "nothing ahead", "packed", "parts"]


@pytest.mark.usefixtures("free_threads")
@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_each_thread_in_place_of_a_worker_calls_the_init_function_once(entrance, prefetched):
    called = []
    init, local = recording_init(called)

    def sees_init(x):
        assert local.is_set, "a thread that was not initialised"
        return {"x": np.full(3, x)}

    iterator = opened(grain.MapDataset.range(60).map(sees_init), entrance, init)
    assert called == []
    iterator.get_state()
    assert called == []
    if prefetched:
        iterator.start_prefetch()
    assert len(list(iterator)) == (30 if entrance == "packed" else 60)
    assert sorted(call[:2] for call in called) == [(0, 3), (1, 3), (2, 3)]
    names = {name for _, _, name in called}
    assert len(names) == 3
    assert threading.current_thread().name not in names
    iterator.close()


@pytest.mark.usefixtures("free_threads")
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_init_function_that_fails_on_a_thread_is_told(entrance, failing):
    failures = [LookupError("no such device")] * 2

    def init(worker, _):
        if worker == failing and failures:
            raise failures.pop()

    ds = grain.MapDataset.range(12).map(lambda x: {"x": np.full(3, x)})
    iterator = opened(ds, entrance, init)
    found = []
    for _ in range(2):
        with pytest.raises(LookupError, match="no such device") as caught:
            found.extend(iterator)
        assert f"in worker {failing} of 3" in caught.value.__notes__[0]
    found += list(iterator)
    assert len(found) == (6 if entrance == "packed" else 12)
    iterator.close()


@pytest.mark.usefixtures("free_threads")
def test_init_function_is_not_called_without_workers():
    called = []
    options = grain.ReadOptions(worker_init_fn=lambda *numbers: called.append(numbers))
    assert len(list(grain.MapDataset.range(5).map(str).to_iter_dataset(options))) == 5
    assert called == []
