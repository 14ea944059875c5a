"""Epochs of slices of endless datasets, whose indices leave the 64-bit range: Grain's elements."""

import random

import effort
import grain as real
import numpy as np
import pytest
from kept_shuffles import _shuffles_are_kept  # noqa: F401 - a fixture
from pipelines import encode
from under_test import INLINE, IS_GRAIN, grain

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="compares the two")


def endless(g, draw, first):
    datasets = [
        part.shuffle(seed=draw.randrange(9)) if draw.random() < 0.5 else part
        for part in (first(g.MapDataset.range(5)), first(g.MapDataset.range(100, 107)))
    ]
    if draw.random() < 0.3:
        weights = [draw.randint(1, 4), draw.randint(1, 4)]
        return g.MapDataset.mix([part.repeat() for part in datasets], weights)
    return datasets[0].repeat(reseed_each_epoch=draw.random() < 0.7)


def sliced(dataset, draw):
    start = draw.randrange(9)
    return dataset[start : start + draw.randint(2, 12) : draw.randint(1, 3)]


STAGES = [
    lambda ds, draw: ds.shuffle(seed=draw.randrange(9)),
    lambda ds, _: ds.map(lambda x: x),
    lambda ds, _: ds.map_with_index(lambda i, x: (i, x)),
    lambda ds, draw: ds.seed(draw.randrange(9)).random_map(lambda x, r: (x, r.integers(999))),
    lambda ds, draw: ds.batch(draw.randint(1, 3), batch_fn=list),
    lambda ds, draw: ds.repeat(draw.randint(1, 3)),
    sliced,
]


def pipeline(g, seed, first=lambda dataset: dataset, stages=STAGES):
    """A slice of an endless dataset, with stages before and after it, repeated."""
    draw = random.Random(seed)
    dataset = endless(g, draw, first)
    for _ in range(draw.randrange(3)):
        dataset = draw.choice(STAGES[1:4])(dataset, draw)
    dataset = sliced(dataset, draw)
    for _ in range(draw.randrange(4)):
        dataset = draw.choice(stages)(dataset, draw)
    return dataset.repeat(3)


def element(dataset, index):
    try:
        return encode(dataset[index])
    except OverflowError:
        return "a random number of an index beyond 64 bits"


def check_equal(ours, theirs):
    assert len(ours) == len(theirs)
    indices = [*range(min(40, len(ours))), len(ours) - 1] if len(ours) else []
    assert [element(ours, at) for at in indices] == [element(theirs, at) for at in indices]


@pytest.mark.parametrize("seed", range(effort.cases(60, 3000)))
def test_epochs_of_slices_of_endless_datasets_are_those_of_grain(seed):
    check_equal(pipeline(grain, seed), pipeline(real, seed))


def flat_mapped(g):
    class Halves(g.experimental.FlatMapTransform):
        max_fan_out = 3

        def flat_map(self, x):
            return [x, x + 0.5][: 1 + x % 2]

    return lambda dataset: g.experimental.FlatMapMapDataset(dataset, Halves())


@pytest.mark.parametrize("seed", range(effort.cases(30, 1000)))
def test_epochs_of_slices_of_endless_flat_maps_are_those_of_grain(seed):
    stages = [*STAGES[:4], *STAGES[5:]]  # no batches of these
    ours, theirs = (pipeline(g, seed, flat_mapped(g), stages) for g in (grain, real))
    check_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(effort.cases(30, 1000)))
def test_epochs_of_slices_of_endless_caches_are_those_without(seed, tmp_path):
    def cached(dataset):
        return dataset.cache(tmp_path if seed % 2 else None)

    check_equal(pipeline(grain, seed, cached), pipeline(grain, seed))


@pytest.mark.parametrize("g", [real, grain])
def test_such_slices_may_be_nested(g):
    dataset = g.MapDataset.range(5).repeat()[0:8].repeat()[0:13].repeat(2)
    expected = [*(0, 1, 2, 3, 4, 0, 1, 2, 2, 3, 4, 0, 1), *(2, 2, 3, 4, 0, 1, 2, 3, 4, 4, 0, 1, 2)]
    assert [dataset[at] for at in range(26)] == expected


def test_they_are_iterated_and_continued():
    parts = [grain.MapDataset.range(5).repeat(), grain.MapDataset.range(100, 107).repeat()]
    dataset = grain.MapDataset.mix(parts, [2, 1])[0:10].shuffle(seed=123).repeat(2)
    expected = [dataset[at] for at in range(20)]
    assert expected == [
        *(102, 101, 100, 1, 3, 0, 1, 4, 2, 0),
        *(0, 3, 1, 104, 4, 0, 102, 103, 2, 1),
    ]
    for options in (INLINE, grain.ReadOptions()):
        iterator = iter(dataset.map(np.int64).to_iter_dataset(options))
        found = [next(iterator) for _ in range(13)]
        state = iterator.get_state()
        iterator.set_state(state)
        assert found + list(iterator) == expected
