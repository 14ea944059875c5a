"""A `MapDataset` where an `IterDataset` is expected: elements and states equal those of Grain."""

import grain as real
import grain.experimental
import numpy as np
import pytest
from pipelines import close, encode
from under_test import IS_GRAIN

import grainmill
import grainmill.experimental

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="compares grainmill with Grain")


def twice(grain):
    class Twice(grain.experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, element):
            return [element, -element]

    return Twice()


def sequences(grain):
    return grain.MapDataset.source([{"x": np.arange(1 + i % 3)} for i in range(7)])


def numbers(grain):
    return grain.MapDataset.range(6).seed(3).shuffle().map(lambda x: x * 2)


def odd(grain):
    return grain.MapDataset.range(9).filter(lambda x: x % 2)


# How a stage is appended to a `MapDataset` that an argument chooses.
STAGES = {
    "mix": lambda g, ds: g.IterDataset.mix([ds, numbers(g)], [1, 2]),
    "named mix": lambda g, ds: g.IterDataset.mix({"a": ds, "b": ds.to_iter_dataset()}),
    "zip": lambda g, ds: g.experimental.ZipIterDataset([ds, ds.map(str)]),
    "flat map": lambda g, ds: g.experimental.FlatMapIterDataset(ds, twice(g)),
    "repeat": lambda g, ds: g.experimental.RepeatIterDataset(ds, 2),
    "cache": lambda g, ds: g.experimental.CacheIterDataset(ds),
    "limit": lambda g, ds: g.experimental.LimitIterDataset(ds, 3),
    "thread": lambda g, ds: g.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    "options": lambda g, ds: g.experimental.WithOptionsIterDataset(
        ds, g.experimental.DatasetOptions()
    ),
    "one thread": lambda g, ds: g.experimental.multithread_prefetch(ds, 1, 1),
    "no threads": lambda g, ds: g.experimental.multithread_prefetch(ds, 0, 1),
    "random map": lambda g, ds: g.experimental.LimitIterDataset(ds.seed(1), 5).random_map(
        lambda x, rng: x + rng.uniform()
    ),
    "batch": lambda g, ds: g.experimental.LimitIterDataset(ds, 5).batch(2),
}


def trace(dataset):
    """The elements of `dataset` and the states after each, as plain values."""
    iterator = iter(dataset)
    states = [iterator.get_state()]
    elements = []
    for element in iterator:
        elements.append(encode(element))
        states.append(iterator.get_state())
    again = iter(dataset)
    again.set_state(states[1])
    rest = [encode(element) for element in again]
    assert rest == elements[1:]
    close(iterator), close(again)
    return elements, states


@pytest.mark.parametrize("parent", [numbers, odd])
@pytest.mark.parametrize("stage", STAGES)
def test_stages_read_a_map_dataset_as_grain_does(stage, parent):
    ours = trace(STAGES[stage](grainmill, parent(grainmill)))
    assert ours == trace(STAGES[stage](real, parent(real)))


# Stages whose states at the end of a window or of packed rows differ from Grain's.
GROUPING = {
    "window": lambda g: g.experimental.WindowShuffleIterDataset(numbers(g), window_size=4, seed=1),
    "rebatch": lambda g: g.experimental.RebatchIterDataset(numbers(g).batch(2), 4),
    "first fit": lambda g: g.experimental.FirstFitPackIterDataset(
        sequences(g), length_struct={"x": 4}, num_packing_bins=2
    ),
    "best fit": lambda g: g.experimental.BestFitPackIterDataset(
        sequences(g), length_struct={"x": 4}, num_packing_bins=2
    ),
    "concat": lambda g: g.experimental.ConcatThenSplitIterDataset(
        sequences(g), length_struct={"x": 4}
    ),
}


@pytest.mark.parametrize("stage", GROUPING)
def test_grouping_stages_read_a_map_dataset_as_grain_does(stage):
    ours, states = trace(GROUPING[stage](grainmill))
    theirs, _ = trace(GROUPING[stage](real))
    assert ours == theirs
    through_reading = grainmill.experimental.LimitIterDataset(GROUPING[stage](grainmill), 99)
    assert trace(through_reading)[0] == ours
    assert len(states) == len(ours) + 1


def test_consecutive_shares_of_a_map_dataset_are_those_of_grain():
    def shared(grain):
        return grain.experimental.multithread_prefetch(
            grain.MapDataset.range(7), 2, 1, sequential_slice=True
        )

    assert trace(shared(grainmill)) == trace(shared(real))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_a_map_dataset_as_one_that_was_converted(num_threads):
    def shared(dataset):
        return list(grainmill.experimental.multithread_prefetch(dataset, num_threads, 1))

    dataset = numbers(grainmill)
    assert shared(dataset) == shared(dataset.to_iter_dataset()) == list(dataset)


def test_device_put_takes_a_map_dataset():
    jax = pytest.importorskip("jax")

    def put(grain):
        batches = grain.MapDataset.range(6).batch(2)
        return grain.experimental.device_put(batches, jax.devices()[0])

    assert trace(put(grainmill)) == trace(put(real))


def test_users_own_stage_is_shared_over_a_map_dataset():
    class Same(grainmill.IterDataset):
        def __iter__(self):
            return self._parent.__iter__()

    own = Same(grainmill.MapDataset.range(5))
    assert list(grainmill.experimental.multithread_prefetch(own, 2, 1)) == list(range(5))
