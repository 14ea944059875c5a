"""Ctrl-C at any line of a `next`: the next call returns the next element, and none is lost."""

import contextlib
import gc
import os
import random
import signal
import sys

import effort
import numpy as np
import pytest
from pipelines import add_one, encode
from under_test import INLINE, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset
PACKAGE = f"{os.sep}grainmill{os.sep}"
pytestmark = pytest.mark.better_than_grain("Grain loses the element in flight")


def inline(start, stop):
    return MapDataset.range(start, stop).map(add_one).to_iter_dataset(INLINE)


def kept(start, stop):
    return inline(start, stop).filter(lambda x: x % 3 > 0)


def arrays(options=INLINE):
    return MapDataset.range(40).map(lambda x: np.array([x])).to_iter_dataset(options)


def sequences():
    pieces = MapDataset.range(40).map(lambda x: {"t": np.full(1 + x % 5, x)})
    return pieces.to_iter_dataset(INLINE)


class Pieces(experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element):
        return [element * 10 + piece for piece in range(element % 3 + 1)]


DATASETS = {
    "read": lambda: inline(0, 30),
    "batch": lambda: arrays().batch(4),
    "filtered_batch": lambda: arrays().filter(lambda x: x[0] % 3 > 0).batch(4),
    "map_batch": lambda: MapDataset.range(40).map(np.array).batch(4).to_iter_dataset(INLINE),
    "threads_batch": lambda: arrays(grain.ReadOptions()).batch(4),
    "zip": lambda: experimental.ZipIterDataset([kept(0, 40), kept(0, 40)]),
    "mix": lambda: IterDataset.mix([inline(0, 15), inline(15, 30)]),
    "interleave": lambda: experimental.InterleaveIterDataset(
        [inline(10 * part, 10 * part + 9) for part in range(4)], cycle_length=3
    ),
    "window_shuffle": lambda: experimental.WindowShuffleIterDataset(
        inline(0, 30), window_size=7, seed=1
    ),
    "packed": lambda: experimental.FirstFitPackIterDataset(
        sequences(), length_struct={"t": 8}, num_packing_bins=4
    ).batch(3),
    "concat": lambda: experimental.ConcatThenSplitIterDataset(sequences(), length_struct={"t": 8}),
    "flat_map": lambda: experimental.FlatMapIterDataset(inline(0, 20), Pieces()),
    "rebatch": lambda: experimental.RebatchIterDataset(arrays().batch(7), 5),
    "limit": lambda: experimental.LimitIterDataset(inline(0, 40), 25),
    "repeat": lambda: experimental.RepeatIterDataset(kept(0, 9), num_epochs=5),
    "random_map": lambda: inline(0, 30).random_map(lambda x, rng: (x, rng.integers(99)), seed=3),
}


# After the first ten, every so many lines; with the datasets and places, most lines have a turn.
STEP = effort.cases(7, 1)


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line that the package runs.

    Garbage collection is disabled meanwhile: it would run `__del__` of iterators of other tests,
    and Python ignores exceptions in those.
    """

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        gc.enable()

    def _trace(self, frame, event, _):
        if PACKAGE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("name", DATASETS)
def test_nothing_is_lost_or_repeated_after_an_interrupt(name, num_before):
    dataset = DATASETS[name]()
    expected = [encode(element) for element in dataset]
    at = 1
    while True:
        iterator = iter(dataset)
        found = [encode(next(iterator)) for _ in range(num_before)]
        with Interrupt(at) as interrupt, contextlib.suppress(KeyboardInterrupt):
            found.append(encode(next(iterator)))
        if interrupt.left > 0:
            break
        state = iterator.get_state()
        found += map(encode, iterator)
        assert found == expected, at
        iterator.set_state(state)
        assert [encode(element) for element in iterator] == expected[num_before:], at
        at += 1 if at < 10 else STEP
    assert at > 3


def test_nothing_is_lost_where_a_signal_comes_while_a_thread_starts():
    dataset = experimental.ThreadPrefetchIterDataset(inline(0, 30), prefetch_buffer_size=4)
    expected = list(dataset)
    moments = random.Random(0)
    num_interrupts = 0
    waiting = False

    def interrupt(_, frame):
        # A thread that is slow to take its turn may bring the signal after `next` has returned.
        # While `__next__` returns the element, the caller may or may not get it.
        if waiting and frame.f_code.co_filename != __file__ and frame.f_code.co_name != "__next__":
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(100):
            iterator, found = iter(dataset), []
            try:
                waiting = True
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(5e-5, 4e-4))
                found.append(next(iterator))
            except (KeyboardInterrupt, RuntimeError):
                # CPython's own `Thread.start` may give an error of its locks for an interrupt.
                num_interrupts += 1
            finally:
                waiting = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            found += iterator
            assert found == expected
            iterator.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts
