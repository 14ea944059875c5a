"""Threads in place of worker processes, where threads run Python code side by side."""

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


@pytest.mark.usefixtures("free_threads")
def test_init_function_of_threads_is_told_to_be_ignored(caplog):
    options = grain.MultiprocessingOptions(num_workers=2)
    ds = grain.MapDataset.range(4).to_iter_dataset()
    assert list(ds.mp_prefetch(options, worker_init_fn=print)) == [0, 1, 2, 3]
    assert "`worker_init_fn` is ignored" in caplog.text
