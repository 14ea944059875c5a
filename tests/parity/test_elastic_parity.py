"""Random pipelines under `ElasticIterator` equal those of Grain 0.2.18, restored anywhere."""

import itertools
import random

import grain as real
import grain.experimental
import numpy as np
import pytest
from kept_shuffles import _shuffles_are_kept  # noqa: F401 - a fixture
from pipelines import add_one, add_rand, close, encode, times_two
from under_test import IS_GRAIN

import grainmill
import grainmill.experimental

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="compares grainmill with Grain")
NUM_PIPELINES = 60


def pipeline(grain, seed):
    """A random-access pipeline of integers."""
    rng = random.Random(seed)
    length = rng.choice([1, 4, 9, 16, 30])
    dataset = grain.MapDataset.range(length).seed(seed)
    if rng.random() < 0.3:
        other = grain.MapDataset.source(list(range(100, 100 + rng.choice([3, 8, 20]))))
        parts = [dataset, other]
        dataset = (
            grain.MapDataset.mix(parts, [1, rng.choice([1, 2, 3])])
            if rng.random() < 0.5
            else grain.MapDataset.concatenate(parts)
        )
        dataset = dataset.seed(seed + 1)
    for _ in range(rng.randrange(4)):
        step = rng.randrange(5)
        if step == 0:
            dataset = dataset.shuffle()
        elif step == 1:
            dataset = dataset.map(rng.choice([add_one, times_two]))
        elif step == 2:
            dataset = dataset.random_map(add_rand)
        elif step == 3:
            dataset = dataset[rng.randrange(3) :: rng.choice([1, 2])]
        elif len(dataset) < 1000:
            dataset = dataset.repeat(rng.choice([2, 3]))
    return dataset


def trace(grain, seed):
    """Batches and states of several processes in turn, each restored from another's state."""
    rng = random.Random(-seed)
    dataset = pipeline(grain, seed)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    state, found = None, []
    for _ in range(4):
        count = rng.choice([1, 2, 3, 4])
        size = count * rng.choice([1, 2, 3])
        shard = grain.sharding.ShardOptions(rng.randrange(count), count)
        iterator = grain.experimental.ElasticIterator(dataset, size, shard, read_options=options)
        if state is not None:
            iterator.set_state(state)
        found.append(iterator.get_state())
        for batch in itertools.islice(iterator, rng.choice([0, 1, 2, 5, 99])):
            found += [encode(np.asarray(batch)), iterator.get_state()]
        state = iterator.get_state()
        close(iterator)
    return found


@pytest.mark.parametrize("seed", range(NUM_PIPELINES))
def test_random_elastic_pipelines_match_grain(seed):
    assert trace(grainmill, seed) == trace(real, seed)
