"""A checkpoint of Grain 0.2.18 resumes in grainmill at the same element, and the reverse.

Both sides write and read files by their own `CheckpointHandler`.
"""

import json
import logging

import effort
import grain as real
import jax
import pytest
from absl import flags
from kept_shuffles import _shuffles_are_kept  # noqa: F401 - a fixture
from pipelines import build, close, lacking, take
from stages import STAGES
from under_test import grain

pytestmark = pytest.mark.better_than_grain("it compares grainmill with Grain")

# Stages whose states Grain does not restore from its own checkpoints either: what it reads back
# from JSON as a list it compares with a tuple, and then skips or repeats sequences. From the state
# at the end of a row without a remainder it continues rightly, so these are tried, too.
GRAIN_LOSES = {
    *(name for name in STAGES if name.startswith("concat_split")),
    "mix_of_packed",
}
ONLY_OURS = {
    name for name in STAGES if any(f'"{op}"' in json.dumps(STAGES[name]) for op in lacking(real))
}
ALL_PROCESSES = [name for name in STAGES if "mp_prefetch" in name]
IN_THIS_PROCESS = [name for name in STAGES if name not in {*ALL_PROCESSES, *ONLY_OURS}]
PROCESSES = [name for name in ALL_PROCESSES if name not in ONLY_OURS]
HANDLERS = {real: real.checkpoint.CheckpointHandler, grain: grain.checkpoint.CheckpointHandler}


@pytest.fixture(autouse=True)
def _quiet():
    """Silences the warnings that packing logs about wasted space."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _flags():
    """Workers of Grain 0.2.18 need parsed flags."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])


def saved_by(module, make, place, directory):
    """Saves after `place` elements; at the end, after it was noticed."""
    iterator = iter(make(module))
    found = take(iterator, place)
    if len(found) < place:
        assert take(iterator, 1) == []
    HANDLERS[module]().save(directory, iterator)
    close(iterator)


def restored_by(module, make, directory):
    """The elements that follow."""
    iterator = iter(make(module))
    assert HANDLERS[module]().restore(directory, iterator) is iterator
    rest = take(iterator, None)
    close(iterator)
    return rest


def check_both_ways(make, places, tmp_path, *, grain_loses=False, elements=None):
    """Saves in one and restores in the other, at each place; a negative one is past the end."""
    if elements is None:
        iterator = iter(make(real))
        elements = take(iterator, None)
        close(iterator)
    count = len(elements)
    for place in sorted({min(place, count) if place >= 0 else count + 1 for place in places}):
        rest = elements[place:]
        for saver, restorer in ((real, grain), (grain, real)):
            if grain_loses and restorer is real:
                continue
            directory = tmp_path / f"{place} by {saver.__name__}"
            directory.mkdir()
            saved_by(saver, make, place, directory)
            found = restored_by(restorer, make, directory)
            assert found == rest, f"{restorer.__name__}, from place {place} of {count}"
    return elements


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_checkpoint_resumes_at_the_same_element(name, tmp_path):
    def make(module):
        return build(module, STAGES[name])

    iterator = iter(make(grain))
    count = len(take(iterator, None))
    close(iterator)
    places = {1, count // 2, -1} | ({0, max(0, count - 1)} if effort.LONG else set())
    check_both_ways(make, places, tmp_path, grain_loses=name in GRAIN_LOSES)


@pytest.mark.parametrize("name", sorted(GRAIN_LOSES))
def test_ours_is_exact_where_grain_loses_data(name, tmp_path):
    """What Grain restores from its own file differs at one place at least; ours never does."""
    iterator = iter(build(real, STAGES[name]))
    elements = take(iterator, None)

    def make(module):
        return build(module, STAGES[name])

    lost = 0
    for place in range(len(elements) + 1):
        (directory := tmp_path / str(place)).mkdir()
        saved_by(grain, make, place, directory)
        assert restored_by(grain, make, directory) == elements[place:]
        (directory := tmp_path / f"{place} by Grain").mkdir()
        saved_by(real, make, place, directory)
        assert restored_by(grain, make, directory) == elements[place:]
        if not lost:
            try:
                lost += restored_by(real, make, directory) != elements[place:]
            except Exception:
                lost += 1
    assert lost, "Grain restores this exactly: take it from the list"


# Grain takes seconds to start workers. `multithread_prefetch` has the same states, and those that
# Grain has saved are among the golden vectors.
@pytest.mark.long
@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", PROCESSES)
def test_checkpoint_of_worker_processes_resumes_at_the_same_element(name, tmp_path):
    """Grain's workers take seconds to start, so one place is tried."""

    def make(module):
        return build(module, STAGES[name])

    iterator = iter(make(grain))
    elements = take(iterator, None)
    close(iterator)
    check_both_ways(make, {len(elements) // 2}, tmp_path, elements=elements)


@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("worker_count", "operations"),
    [
        (0, ()),
        (0, ("Batch",)),
        (0, ("PlusOne", "AddRand", "Batch")),
        pytest.param(2, ("PlusOne", "AddRand", "Batch"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_checkpoint_of_a_loader_resumes_at_the_same_element(worker_count, operations, tmp_path):
    def make(module):
        class PlusOne(module.transforms.Map):
            def map(self, element):
                return element + 1

        class AddRand(module.transforms.RandomMap):
            def random_map(self, element, rng):
                return element + int(rng.integers(0, 100))

        kinds = {"PlusOne": PlusOne, "AddRand": AddRand}
        shard = module.sharding.ShardOptions(1, 2, drop_remainder=True)
        return module.DataLoader(
            data_source=list(range(14)),
            sampler=module.samplers.IndexSampler(14, shard, shuffle=True, num_epochs=2, seed=3),
            operations=[
                module.transforms.Batch(2) if name == "Batch" else kinds[name]()
                for name in operations
            ],
            worker_count=worker_count,
        )

    places = {0, 3, -1} if worker_count == 0 else {3}
    iterator = iter(make(grain))
    elements = take(iterator, None)
    close(iterator)
    check_both_ways(make, places, tmp_path, elements=elements)


def test_checkpoint_of_device_put_resumes_at_the_same_element(tmp_path):
    def make(module):
        ds = module.MapDataset.range(11).shuffle(seed=1).batch(2).to_iter_dataset()
        return module.experimental.device_put(ds, jax.devices()[0]).map(int_list)

    check_both_ways(make, {0, 1, 3, -1}, tmp_path)


def int_list(batch):
    return [int(x) for x in batch]
