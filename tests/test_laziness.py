"""Random pipelines of sequential stages against plain generators: elements, calls and states.

A generator is the slow twin: it calls a user's function when its element is requested, in order.
"""

import itertools
import random

import pytest
from under_test import experimental, grain

from grainmill._native import window_order

pytestmark = pytest.mark.better_than_grain("Grain has no twin to be compared with here")


class Logged:
    """Records each call of a user's function."""

    def __init__(self):
        self.calls = []

    def function(self, name, compute):
        def logged(*args):
            self.calls.append((name, args))
            return compute(*args)

        return logged


class Pieces(experimental.FlatMapTransform):
    max_fan_out = 3

    def __init__(self, split):
        self.flat_map = split

    def flat_map(self, element):
        raise NotImplementedError


class Passing(grain.IterDataset):
    """A user's own dataset that passes its elements on."""

    def __init__(self, parent, function):
        super().__init__(parent)
        self.function = function

    def __iter__(self):
        return PassingIterator(self._parent.__iter__(), self.function)


class PassingIterator(grain.DatasetIterator):
    def __init__(self, parent, function):
        super().__init__(parent)
        self.function = function

    def __next__(self):
        return self.function(next(self._parent))

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


def flat_mapped(make, function):
    def twin():
        for element in make():
            yield from function(element)

    return twin


def windowed(make, size, seed):
    def twin():
        elements = make()
        for number in itertools.count():
            window = list(itertools.islice(elements, size))
            if not window:
                return
            order = window_order(len(window), seed + number)
            yield from [window[at] for at in order.tolist()]

    return twin


def repeated(make, count):
    return lambda: itertools.chain.from_iterable(make() for _ in range(count))


def cached(make):
    def twin():
        memory = []
        for element in make():
            memory.append(element)
            yield element
        yield from memory

    return twin


def mixed(makes):
    def twin():
        for part in itertools.cycle([make() for make in makes]):
            try:
                yield next(part)
            except StopIteration:
                return

    return twin


def interleaved(makes):
    def twin():
        slots = [make() for make in makes]
        while slots:
            for slot in list(slots):
                try:
                    yield next(slot)
                except StopIteration:
                    slots.remove(slot)

    return twin


def pipeline(dice, depth, ours, theirs):  # noqa: PLR0911 - one for each operation
    """A dataset and a function that creates its twin, which log to `ours` and `theirs`."""
    if not depth:
        bounds = sorted(dice.sample(range(30), 2))
        return grain.MapDataset.range(*bounds).to_iter_dataset(), lambda: iter(range(*bounds))
    ds, make = pipeline(dice, depth - 1, ours, theirs)
    name = dice.choice(OPERATIONS)
    label = f"{name} {depth} {dice.random()}"

    def both(compute):
        return ours.function(label, compute), theirs.function(label, compute)

    if name == "map":
        f, g = both(lambda x: x + 1)
        return ds.map(f), lambda: map(g, make())
    if name == "index":
        f, g = both(lambda i, x: 3 * i + x)
        return ds.map_with_index(f), lambda: itertools.starmap(g, enumerate(make()))
    if name == "filter":
        keep = dice.choice([2, 3, 5])
        f, g = both(lambda x: x % keep > 0)
        return ds.filter(f), lambda: filter(g, make())
    if name == "flat":
        f, g = both(lambda x: [x] * (x % 3))
        return experimental.FlatMapIterDataset(ds, Pieces(f)), flat_mapped(make, g)
    if name == "user":
        f, g = both(lambda x: x)
        return Passing(ds, f), lambda: map(g, make())
    if name == "window":
        size, seed = dice.randint(1, 6), dice.randint(0, 9)
        shuffled = experimental.WindowShuffleIterDataset(ds, window_size=size, seed=seed)
        return shuffled, windowed(make, size, seed)
    if name == "limit":
        count = dice.randint(1, 12)
        return experimental.LimitIterDataset(ds, count), lambda: itertools.islice(make(), count)
    if name == "repeat":
        return experimental.RepeatIterDataset(ds, 2), repeated(make, 2)
    if name == "cache":
        return experimental.RepeatIterDataset(experimental.CacheIterDataset(ds), 2), cached(make)
    other, make_other = pipeline(dice, dice.randint(0, depth - 1), ours, theirs)
    if name == "mix":
        return grain.IterDataset.mix([ds, other]), mixed([make, make_other])
    if name == "interleave":
        both_parts = experimental.InterleaveIterDataset([ds, other], cycle_length=2)
        return both_parts, interleaved([make, make_other])
    f, g = both(lambda pair: 7 * pair[0] + pair[1])
    zipped = experimental.ZipIterDataset([ds, other], strict=False)
    return zipped.map(f), lambda: map(g, zip(make(), make_other(), strict=False))


OPERATIONS = [
    *("map", "index", "filter", "flat", "user", "window", "limit", "repeat", "cache"),
    *("mix", "interleave", "zip"),
]


@pytest.mark.parametrize("seed", [*range(60), 129, 578])
def test_elements_calls_and_states_are_those_of_plain_generators(seed):
    dice = random.Random(seed)
    ours, theirs = Logged(), Logged()
    ds, make = pipeline(dice, 1 + seed % 5, ours, theirs)
    iterator, twin = iter(ds), make()
    expected, states = [], [iterator.get_state()]
    for at in itertools.count():
        element, other = next(iterator, None), next(twin, None)
        assert element == other, (at, str(ds))
        assert ours.calls == theirs.calls, (at, str(ds))
        if element is None:
            break
        expected.append(element)
        states.append(iterator.get_state())
    assert [int(x) for batch in ds.batch(5) for x in batch] == expected
    resumed = iter(ds)
    for at, state in dice.sample([*enumerate(states)], min(6, len(states))):
        resumed.set_state(state)
        assert resumed.get_state() == state or "cache" in str(ds).lower()
        assert list(resumed) == expected[at:]


def test_functions_run_no_earlier_if_no_state_is_requested():
    calls = []
    ds = grain.MapDataset.range(100).to_iter_dataset()
    ds = ds.filter(lambda x: x % 2).map(lambda x: calls.append(x) or x)
    ds = experimental.ZipIterDataset([ds, ds.map(lambda x: -x)])
    for at, pair in enumerate(itertools.islice(ds, 20)):
        assert pair == (2 * at + 1, -2 * at - 1)
        assert len(calls) == 2 * at + 2
