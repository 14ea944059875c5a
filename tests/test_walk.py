"""How many calls an element takes from `next` to a user's function; ARCHITECTURE.md lists them."""

import sys

import pytest

import grainmill as grain

OPTIONS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
# So many elements that calls for timed ones and for the first are rare.
COUNT = 2000


def num_calls(make):
    """The least number of calls between `next` and the function that `make` puts into a dataset."""
    counts = []

    def function(element):
        frame, count = sys._getframe(1), 0
        while frame.f_code is not num_calls.__code__:
            frame, count = frame.f_back, count + 1
        counts.append(count)
        return element

    iterator = iter(make(function))
    for _ in range(COUNT):
        next(iterator)
    return min(counts)


@pytest.mark.parametrize(
    ("most", "make"),
    [
        (9, lambda f: grain.MapDataset.range(COUNT).map(f).to_iter_dataset(OPTIONS).map(abs)),
        (3, lambda f: grain.MapDataset.range(COUNT).to_iter_dataset(OPTIONS).map(f)),
        (4, lambda f: map(grain.MapDataset.range(COUNT).map(f).__getitem__, range(COUNT))),
    ],
    ids=["map_dataset", "iter_dataset", "by_index"],
)
def test_few_calls_lie_between_next_and_a_function(most, make):
    assert num_calls(make) <= most
