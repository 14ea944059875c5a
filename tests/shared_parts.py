"""What the tests of shared workers have in common: elements, and what a mixture raises."""

import time

import numpy as np
import pytest

from grainmill._evaluate.prefetch import worker_tasks
from grainmill._workers.failures import WorkerError


@pytest.fixture(autouse=True)
def few_processes(monkeypatch):
    """Parts share workers from the second one on."""
    monkeypatch.setattr(worker_tasks, "MIN_PROCESSES", 0)
    monkeypatch.setattr(worker_tasks, "num_cores", lambda: 1)


def large(x):
    return np.full(5000, x)


def small(x):
    return {"x": x, "y": [x, x]}


def sometimes_slow(x):
    if x % 17 == 3:
        time.sleep(0.003)
    return np.int64(x)


def raised(iterator, kind=WorkerError):
    """The elements before the next error, and that."""
    found = []
    try:
        found.extend(iterator)
    except kind as failure:
        return found, failure
    return found, None
