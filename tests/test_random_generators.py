"""Generators of random maps: each is as a new one, whatever was done with those before it."""

import copy
import gc
import pickle
import random
import threading

import numpy as np
import pytest
from effort import SEED, cases
from oracle import generator

from grainmill import MapDataset, experimental

SEED_OF_MAPS = 11
DRAWS = [
    lambda rng: rng.random(),
    lambda rng: rng.random(3),
    lambda rng: rng.integers(10, dtype=np.int32),  # keeps half of a word for the next draw
    lambda rng: rng.standard_normal(),
    lambda rng: rng.permutation(5),
    lambda rng: rng.bit_generator.random_raw(3),
    lambda rng: rng.bit_generator.advance(7),
    lambda rng: rng.bit_generator.jumped(),
    lambda rng: rng.bytes(3),
]
# What a function may keep of a generator, from which more numbers can be drawn.
KEPT = [
    lambda rng: rng,
    lambda rng: np.random.Generator(rng.bit_generator),
    copy.deepcopy,
    lambda rng: pickle.loads(pickle.dumps(rng)),
    lambda rng: rng.random.__self__,
    lambda rng: next(iter([rng])),
    lambda rng: rng.bit_generator.state and None,
]


def numbers_of(rng):
    """Some numbers that depend on the whole state."""
    return [
        int(rng.integers(2**31, dtype=np.int32)),
        float(rng.random()),
        int(rng.integers(2**63)),
        float(rng.standard_normal()),
    ]


def plain(state):
    """The state of a bit generator without arrays."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class Function:
    """A random map that compares each generator with a new one, and then draws and keeps some."""

    def __init__(self, seed):
        self.chosen = random.Random(seed)
        self.kept = []
        self.lock = threading.Lock()  # a busy machine may be given another thread

    def __call__(self, element, rng):
        with self.lock:
            return self.compare(element, rng)

    def compare(self, element, rng):
        expected = generator(SEED_OF_MAPS, element)
        assert plain(rng.bit_generator.state) == plain(expected.bit_generator.state)
        for _ in range(self.chosen.randrange(4)):
            draw = self.chosen.choice(DRAWS)
            draw(rng)
            draw(expected)
        kept = self.chosen.choice(KEPT)
        mine, other = kept(rng), kept(expected)
        if mine is not None:
            self.kept.append((mine, other))
        if self.chosen.random() < 0.2:
            self.check()
        return element

    def check(self):
        """What was kept is as if nobody else had used it."""
        for mine, other in self.kept:
            assert plain(mine.bit_generator.state) == plain(other.bit_generator.state)
            assert numbers_of(mine) == numbers_of(other)
        self.kept = [pair for pair in self.kept if self.chosen.random() < 0.5]


@pytest.mark.parametrize("way", ["index", "block", "sequential"])
@pytest.mark.parametrize("seed", range(SEED, SEED + cases(20, 500)))
def test_each_generator_is_as_a_new_one(seed, way):
    function = Function(seed)
    ds = MapDataset.range(60)
    if way == "sequential":
        list(ds.to_iter_dataset().random_map(function, seed=SEED_OF_MAPS))
    elif way == "block":
        list(ds.random_map(function, seed=SEED_OF_MAPS))
    else:
        ds = ds.random_map(function, seed=SEED_OF_MAPS)
        for index in range(60):
            ds[index]
    function.check()


def test_generators_of_a_failure_stay_as_they_are():
    def fail(element, rng):
        rng.random()
        raise KeyError(element)

    ds = MapDataset.range(5).random_map(fail, seed=SEED_OF_MAPS)
    failures = []
    for index in range(5):
        with pytest.raises(KeyError) as info:
            ds[index]
        failures.append(info.value)
    for index, failure in enumerate(failures):
        traceback = failure.__traceback__
        while traceback.tb_next is not None:
            traceback = traceback.tb_next
        expected = generator(SEED_OF_MAPS, index)
        expected.random()
        assert traceback.tb_frame.f_locals["rng"].random() == expected.random()


def test_threads_have_generators_of_their_own():
    barrier = threading.Barrier(4, timeout=20)

    def together(element, rng):
        if element < 4:
            barrier.wait()  # all have one now
        first = rng.integers(100, dtype=np.int32)
        return first, rng.random()

    ds = MapDataset.range(400).random_map(together, seed=SEED_OF_MAPS)
    found = {}

    def compute(numbers):
        found.update((index, ds[index]) for index in numbers)

    threads = [threading.Thread(target=compute, args=(range(at, 400, 4),)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(400):
        rng = generator(SEED_OF_MAPS, index)
        assert found[index] == (rng.integers(100, dtype=np.int32), rng.random())


def test_generators_of_a_pool_are_independent():
    pool = experimental.RngPool(seed=SEED_OF_MAPS)
    first = pool.acquire_rng(3)
    again = pool.acquire_rng(3)
    assert first is not again
    assert first.random() == again.random()
    first.random()
    assert again.random() == pool.acquire_rng(3).random(2)[1]
    pool.release_rng(first)
    number = first.random()
    del again
    gc.collect()
    assert pool.acquire_rng(3).random(3)[2] == number


@pytest.mark.parametrize("op_seed", [0, 7, 2**64 - 1])
def test_indices_are_limited_before_and_after_one_is_used_again(op_seed):
    pool = experimental.RngPool(seed=SEED_OF_MAPS)

    def message(index):
        with pytest.raises(OverflowError) as info:
            pool.acquire_rng(index, op_seed=op_seed)
        return str(info.value)

    before = message(-1), message(2**64)
    states = [
        plain(pool.acquire_rng(index, op_seed=op_seed).bit_generator.state)
        for index in (0, 2**64 - 1, 5)
    ]
    assert [state["state"]["counter"] for state in states] == [
        [0, 0, op_seed, index] for index in (0, 2**64 - 1, 5)
    ]
    assert (message(-1), message(2**64)) == before
    assert (
        pool.acquire_rng(5, op_seed=op_seed).random()
        == pool.acquire_rng(5, op_seed=op_seed).random()
    )
