"""States of users' own iterators hold any object that can be pickled, wherever they run."""

import copy
import pickle
import threading

import numpy as np
import pytest
from under_test import experimental, grain
from worker_harness import run_script

pytestmark = pytest.mark.better_than_grain("Grain shares a live object, or loses prefetched ones")


class Position:
    """A position in somebody else's data set, which cannot be compared or written as JSON."""

    def __init__(self, at, history):
        self.at = at
        self.history = history

    def __eq__(self, other):
        raise RuntimeError("positions cannot be compared")

    __hash__ = None


class DrawsIterator(grain.DatasetIterator):
    """Draws numbers from a generator that is part of its state."""

    def __init__(self, seed, count):
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._position = Position(0, [])
        self._count = count

    def __next__(self):
        if self._position.at >= self._count:
            raise StopIteration
        drawn = int(self._rng.integers(0, 10**6))
        history = [*self._position.history, drawn]
        self._position = Position(self._position.at + 1, history)
        return drawn

    def get_state(self):
        rng = copy.deepcopy(self._rng)
        return {"rng": rng, "position": self._position, "more": ({1, 2}, b"x", np.arange(3))}

    def set_state(self, state):
        self._rng = copy.deepcopy(state["rng"])
        self._position = state["position"]
        kinds = type(state["position"]), type(state["more"][0]), type(state["more"][2])
        assert kinds == (Position, set, np.ndarray), kinds
        assert len(self._position.history) == self._position.at


class Draws(grain.IterDataset):
    def __init__(self, seed=0, count=9):
        super().__init__()
        self._seed = seed
        self._count = count

    def __iter__(self):
        return DrawsIterator(self._seed, self._count)


def workers(num_workers, buffer=2):
    return grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=buffer)


def several(count=4):
    return [Draws(seed, count=3 + seed % 2) for seed in range(count)]


def tokens(number):
    return {"tokens": np.full(number % 5 + 1, number % 100)}


PIPELINES = {
    "alone": Draws,
    "map and batch": lambda: Draws().map(lambda x: x + 1).batch(2),
    "filter": lambda: Draws().filter(lambda x: x % 2),
    "thread prefetch": lambda: experimental.ThreadPrefetchIterDataset(
        Draws(), prefetch_buffer_size=3
    ),
    "worker": lambda: Draws().mp_prefetch(workers(1)),
    "interleave": lambda: experimental.InterleaveIterDataset(several(), cycle_length=2),
    "interleave of prefetched": lambda: experimental.InterleaveIterDataset(
        several(), cycle_length=2, iter_buffer_size=3
    ),
    "interleave in workers": lambda: experimental.InterleaveIterDataset(
        several(), cycle_length=2
    ).mp_prefetch(workers(2)),
    "interleave in threads": lambda: experimental.multithread_prefetch(
        experimental.InterleaveIterDataset(several(), cycle_length=2), 2, 2
    ),
    "prefetched interleave in a worker": lambda: experimental.ThreadPrefetchIterDataset(
        experimental.InterleaveIterDataset(several(), cycle_length=3), prefetch_buffer_size=2
    ).mp_prefetch(workers(1)),
    "mix": lambda: grain.IterDataset.mix(several(3), [1, 2, 1]),
    "zip": lambda: experimental.ZipIterDataset(several(2), strict=False),
    "window shuffle": lambda: experimental.WindowShuffleIterDataset(Draws(), window_size=4, seed=1),
    "first fit": lambda: experimental.FirstFitPackIterDataset(
        Draws().map(tokens), length_struct={"tokens": 8}, num_packing_bins=2
    ),
    "concat then split": lambda: experimental.ConcatThenSplitIterDataset(
        Draws().map(tokens), length_struct={"tokens": 8}
    ),
    "rebatch": lambda: experimental.RebatchIterDataset(Draws().batch(2), 3),
    "repeat": lambda: experimental.RepeatIterDataset(Draws(count=3), 2),
    "limit": lambda: experimental.LimitIterDataset(Draws(), 7),
    "cache": lambda: experimental.RepeatIterDataset(
        experimental.CacheIterDataset(Draws(count=4)), 2
    ),
}


def as_texts(iterator):
    return [repr(element) for element in iterator]


def check_states(make, stride):
    """Every `stride`-th state resumes exactly, also in another iterator, and after pickling."""
    iterator = iter(make())
    elements, states = [], [iterator.get_state()]
    for element in iterator:
        elements.append(repr(element))
        states.append(iterator.get_state())
    iterator.close()
    assert len(elements) > 2
    for place in range(0, len(states), stride):
        state = states[place]
        restored = iter(make())
        restored.set_state(state)
        assert as_texts(restored) == elements[place:], place
        if place % 3 == 0:
            restored.set_state(pickle.loads(pickle.dumps(state)))
            again = restored.get_state()
            assert as_texts(restored) == elements[place:], f"{place}, a second time"
            restored.set_state(again)
            assert as_texts(restored) == elements[place:], f"{place}, read again"
        restored.close()


@pytest.mark.parametrize("name", PIPELINES)
def test_state_with_any_object_resumes_exactly(name):
    check_states(PIPELINES[name], stride=5 if "worker" in name else 1)


def test_classes_of_the_main_script_may_be_in_states():
    """Workers send them back as the classes that the main script has."""
    program = """
import numpy as np
import grainmill as grain

class Position:
    def __init__(self, at):
        self.at = at

class CountingIterator(grain.DatasetIterator):
    def __init__(self):
        super().__init__()
        self.position = Position(0)
    def __next__(self):
        if self.position.at == 7:
            raise StopIteration
        self.position = Position(self.position.at + 1)
        return self.position.at
    def get_state(self):
        return {"position": self.position, "key": lambda x: x}
    def set_state(self, state):
        assert type(state["position"]) is Position, type(state["position"])
        self.position = state["position"]

class Counting(grain.IterDataset):
    def __iter__(self):
        return CountingIterator()

ds = Counting().mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=4))
iterator = iter(ds)
elements = [next(iterator) for _ in range(3)]
state = iterator.get_state()
found, = state["iterators_in_use_states"]
assert type(found["position"]) is Position and found["position"].at == 3
restored = iter(ds)
restored.set_state(state)
assert list(restored) == [4, 5, 6, 7] == list(iterator)
"""
    done = run_script(program)
    assert done.returncode == 0, done.stderr


class Unsendable(DrawsIterator):
    def get_state(self):
        return {"lock": threading.Lock()}


class UnsendableDraws(Draws):
    def __iter__(self):
        return Unsendable(0, 4)


def test_worker_delivers_elements_whose_states_cannot_be_sent():
    """The error arises where the state is wanted."""
    iterator = iter(UnsendableDraws().mp_prefetch(workers(1)))
    first = next(iterator)
    with pytest.raises(NotImplementedError, match=r"cannot (be saved|send its state).*lock"):
        iterator.get_state()
    assert [first, *iterator] == list(Draws(count=4))


class SlowIterator(grain.DatasetIterator):
    """Notices when its state is read while it moves."""

    reads = 0

    def __init__(self, count):
        super().__init__()
        self._at = 0
        self._count = count
        self._moving = threading.Event()

    def __next__(self):
        if self._at >= self._count:
            raise StopIteration
        self._at += 1
        self._moving.wait(0.002)  # time for another thread
        self._at += 1
        return self._at // 2

    def get_state(self):
        return {"at": self._at}

    def set_state(self, state):
        assert state["at"] % 2 == 0, "the state was read between two elements"
        self._at = state["at"]


class Slow(grain.IterDataset):
    def __iter__(self):
        return SlowIterator(6)


def test_states_are_not_read_while_a_thread_moves_the_iterator():
    parts = [Slow() for _ in range(4)]
    interleaved = experimental.InterleaveIterDataset(parts, cycle_length=4)
    for ds in (
        experimental.ThreadPrefetchIterDataset(interleaved, prefetch_buffer_size=2),
        experimental.multithread_prefetch(interleaved, num_threads=2, buffer_size=2),
    ):
        iterator = iter(ds)
        elements, states = [], []
        for element in iterator:
            elements.append(element)
            states.append(iterator.get_state())
        for place, state in enumerate(states):
            restored = iter(ds)
            restored.set_state(state)
            assert list(restored) == elements[place + 1 :]
