"""A block of a plan computed in parts has the same elements as computed at once."""

import random

import numpy as np
import pytest

from grainmill import MapDataset
from grainmill._evaluate.compile import compiled
from grainmill.experimental import ZipMapDataset


def numbers(first, count):
    return MapDataset.range(first, first + count)


def noisy(element, rng):
    return element, float(rng.random())


def mixed():
    parts = [numbers(0, 50).map(str), numbers(100, 30).shuffle(seed=3), numbers(200, 5).map(float)]
    return MapDataset.mix(parts, weights=[0.5, 0.3, 0.2])


PLANS = {
    "range": lambda: numbers(0, 90),
    "map": lambda: numbers(0, 90).shuffle(seed=1).map(lambda x: x * 2),
    "filter": lambda: numbers(0, 90).filter(lambda x: x % 3),
    "random map": lambda: numbers(0, 90).seed(5).random_map(noisy).repeat(2),
    "map with index": lambda: numbers(0, 90).map_with_index(lambda i, x: (i, x))[5::2],
    "mix": mixed,
    "mix, mapped": lambda: mixed().seed(7).random_map(noisy),
    "concatenate": lambda: MapDataset.concatenate([numbers(0, 20), numbers(40, 3).map(str)]),
    "batch": lambda: numbers(0, 90).batch(4).map(np.sum),
    "zip": lambda: ZipMapDataset([numbers(0, 25), mixed()]),
}


@pytest.mark.parametrize("name", PLANS)
def test_parts_have_the_elements_of_the_whole(name):
    dataset = PLANS[name]()
    program = compiled(dataset._node)
    chance = random.Random(name)
    for _ in range(50):
        count = chance.randrange(1, len(dataset) + 1)
        start = chance.randrange(len(dataset) - count + 1)
        whole = program.run(start, count)
        assert whole.failure is None
        parts, at, made = program.run_incrementally(start, count), start, []
        while at < start + count:
            part_len = chance.randint(1, min(7, start + count - at))
            part = parts.run(at, part_len)
            assert part.failure is None
            made += part.elements
            at += part_len
        np.testing.assert_equal(made, whole.elements)
