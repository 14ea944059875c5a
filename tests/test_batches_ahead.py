"""Batches made on threads, several at a time where they are small, are those made without."""

import numpy as np
import pytest
from stage_harness import count_at_rest, found
from under_test import INLINE

import grainmill as grain


def plain(x):
    return {"x": np.full(3, x), "y": x}


def one_is_none(x):
    return None if x == 333 else x


def one_fails(x):
    if x == 333:
        raise ValueError("no more")
    return x


def one_has_another_shape(x):
    return np.zeros(4 if x == 333 else 3)


def one_has_another_dtype(x):
    return np.full(3, x, np.float64 if x == 333 else np.int64)


def large(x):
    return np.full(9000, x)


@pytest.mark.parametrize("batch_size", [1, 7, 50])
@pytest.mark.parametrize(
    "function",
    [plain, one_is_none, one_fails, one_has_another_shape, one_has_another_dtype, large],
)
def test_threads_change_no_batch_state_or_failure(function, batch_size):
    def made(options):
        ds = grain.MapDataset.range(400).map(function).to_iter_dataset(options)
        return found(ds.batch(batch_size))

    inline = made(INLINE)
    assert len(inline) >= 7
    for threads, prefetch in ((1, 1), (16, 20), (16, 500)):
        assert made(grain.ReadOptions(threads, prefetch)) == inline


def test_place_changes_among_batches_that_are_ready():
    ds = grain.MapDataset.range(5000).map(plain).to_iter_dataset().batch(4)
    with iter(ds) as iterator:
        for _ in range(100):
            next(iterator)
        state = iterator.get_state()
        later = [next(iterator)["y"].tolist() for _ in range(300)]
        for _ in range(3):
            iterator.set_state(state)
            assert [next(iterator)["y"].tolist() for _ in range(300)] == later
        grain.experimental.set_next_index(iterator, 7)
        assert next(iterator)["y"].tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize(("batch_size", "prefetch"), [(4, 20), (4, 500), (1000, 2)])
def test_little_is_ahead(batch_size, prefetch):
    calls = []

    def function(x):
        calls.append(x)
        return x

    options = grain.ReadOptions(prefetch_buffer_size=prefetch)
    ds = grain.MapDataset.range(10**7).map(function).to_iter_dataset(options).batch(batch_size)
    with iter(ds) as iterator:
        for _ in range(2000):
            next(iterator)
        before = count_at_rest(calls)
    # What is at hand, and two tasks.
    assert before - 2000 * batch_size <= 3 * max(batch_size, 8 * prefetch)
