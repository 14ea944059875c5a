"""Workers send the positions of their elements; states are computed from these on request."""

import itertools
import json
import os
import pickle
import signal
import time

import pytest
from stages import STAGES, make
from under_test import experimental, grain
from worker_harness import workers

from grainmill._dataset.iter_dataset import node_of
from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.open import open_stage
from grainmill._iterators.workers.pipeline_job import PipelineTask, _PipelineRunner
from grainmill._stats.meters import Recorder
from grainmill._stats.worker_reporter import WorkerReporter
from grainmill._workers.worker import WorkerContext

pytestmark = pytest.mark.better_than_grain("Grain pickles a state with each element")

IN_WORKERS = [name for name in STAGES if "mp_prefetch" not in name]


@pytest.mark.parametrize("name", IN_WORKERS)
def test_places_of_every_stage_cross_as_they_are(name):
    cursor = Cursor(open_stage(node_of(make(grain, name))))
    points = [cursor.position()]
    while cursor.next() is not END:
        points.append(cursor.position())
    points.append(cursor.position())
    text = pickle.dumps(points)
    states = [after(position) for after, position in points]
    cursor.stage.close()
    crossed = pickle.loads(text)
    for _ in range(2):
        found = [after(position) for after, position in crossed]
        assert found == states
        for state in found:
            state.clear()  # each is the caller's own
    assert json.dumps(states[0])


def parts(count, length=40):
    read = grain.ReadOptions(num_threads=0)
    return [
        grain.MapDataset.range(1000 * part, 1000 * part + length).map(abs).to_iter_dataset(read)
        for part in range(count)
    ]


def interleave(count, length=40):
    return experimental.InterleaveIterDataset(parts(count, length), cycle_length=count)


LARGE = {
    "interleave": interleave,
    "mix": lambda *size: grain.IterDataset.mix(parts(*size)),
    "interleave_mapped": lambda *size: interleave(*size).map(lambda x: x),
}


def positions_bytes(ds):
    """Bytes per element that a worker sends for positions."""
    node, recorder = node_of(ds), Recorder()
    runner = _PipelineRunner(
        open_stage(node, recorder),
        WorkerContext(0, 1, None, lambda _: None, -1),
        WorkerReporter(recorder, node),
        task_bytes=1 << 30,
    )
    for _ in range(60):  # until the datasets return many elements at a time
        runner.run(PipelineTask(None, 64, 64))
    outcome = runner.run(PipelineTask(None, 64, 64))
    assert len(outcome.elements) == 64
    return len(outcome.extra[0]) / 64


@pytest.mark.parametrize("large", LARGE)
def test_an_element_carries_no_states_of_all_datasets(large):
    assert positions_bytes(LARGE[large](100, 1000)) < 400  # one state takes 1,600


@pytest.mark.parametrize("large", LARGE)
def test_states_amid_a_block_are_exact_also_when_workers_died(large):
    def run():
        ds = LARGE[large](9)
        return iter(ds.mp_prefetch(grain.MultiprocessingOptions(2, 20)))

    with run() as iterator:
        elements, states = [], [iterator.get_state()]
        for element in iterator:
            elements.append(element)
            states.append(iterator.get_state())
    # The order and the states are those that threads have.
    threads = iter(experimental.multithread_prefetch(LARGE[large](9), 2, 1))
    assert list(threads) == elements
    for places in ([150], range(0, len(states), 37)):  # in a new pool, and in one that is in use
        with run() as restored:
            for place in places:
                restored.set_state(states[place])
                assert restored.get_state() == states[place]
                assert list(itertools.islice(restored, 30)) == elements[place : place + 30]
    with run() as iterator:
        for _ in range(101):
            next(iterator)
        for worker in workers():
            os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.1)
        # The last element's position is enough.
        assert iterator.get_state() == states[101]
        rest = []
        while len(rest) < 100:
            try:
                rest.append(next(iterator))
            except grain.WorkerError:
                assert iterator.get_state() == states[101 + len(rest)]
        assert rest == elements[101:201]
        assert iterator.get_state() == states[201]


class NoState(grain.DatasetIterator):
    """A user's iterator that cannot be saved."""

    def __init__(self):
        super().__init__()
        self._at = 0

    def __next__(self):
        self._at += 1
        if self._at > 9:
            raise StopIteration
        return self._at

    def get_state(self):
        raise TypeError("lives in a socket")

    def set_state(self, _):
        raise TypeError("lives in a socket")


class Unsaved(grain.IterDataset):
    def __iter__(self):
        return NoState()

    def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - as Grain calls it
        pass


def test_elements_without_a_state_come_and_asking_for_it_says_why():
    with iter(Unsaved().mp_prefetch(grain.MultiprocessingOptions(1))) as iterator:
        assert [next(iterator) for _ in range(4)] == [1, 2, 3, 4]
        with pytest.raises(NotImplementedError, match=r"NoState cannot be saved.*in a socket"):
            iterator.get_state()
        assert list(iterator) == [5, 6, 7, 8, 9]
