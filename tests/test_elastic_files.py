"""`ElasticIterator` in checkpoint files: another number of processes reads what these have left."""

import itertools
import json

import pytest
from under_test import experimental, grain

from grainmill._checkpoint import files

Handler = grain.checkpoint.CheckpointHandler

pytestmark = pytest.mark.better_than_grain("Grain after 0.2.18 has this in part")


def parts(num=5):
    return [grain.MapDataset.range(10 * k, 10 * k + 3).to_iter_dataset() for k in range(num)]


def interleaved():
    return experimental.InterleaveIterDataset(parts(), cycle_length=2)


def elastic(dataset, index, count, batch=0, **options):
    shard = grain.sharding.ShardOptions(index, count)
    return experimental.ElasticIterator(dataset, batch, shard, **options)


@pytest.fixture
def process(monkeypatch):
    def be(index, count):
        monkeypatch.setattr(files, "process_index_and_count", lambda: (index, count))

    return be


def test_the_worked_example(tmp_path, process):
    """The files and the elements of the specification's example, section 3.2."""
    taken = []
    for index, steps in ((0, 2), (1, 1)):
        process(index, 2)
        iterator = elastic(interleaved(), index, 2)
        taken.append([next(iterator) for _ in range(steps)])
        Handler().save(tmp_path, iterator)
    assert taken == [[0, 20], [10]]
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    at = {0: 1, 1: 1, 2: 1, 3: 0, 4: 0}
    for shard, index in at.items():
        assert found[f"shard_state_{shard}.json"] == {
            "exhausted": 0,
            "state": {"next_index": index},
        }
    assert found["process_0-of-2.json"]["iterators_in_use_states"] == [
        {"next_index": 1},
        {"next_index": 1},
    ]
    assert len(found) == 7

    def restored(index, count):
        process(index, count)
        return list(Handler().restore(tmp_path, elastic(interleaved(), index, count)))

    assert [restored(index, 3) for index in range(3)] == [
        [1, 30, 2, 31, 32],
        [11, 40, 12, 41, 42],
        [21, 22],
    ]
    assert restored(0, 1) == [1, 11, 2, 12, 21, 30, 22, 31, 32, 40, 41, 42]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("saved_count", [2, 4])
def test_filtered_elements_continue_each_once(tmp_path, process, steps, count, saved_count):
    ds = grain.MapDataset.range(96).shuffle(seed=3).filter(lambda x: x % 3 > 0)
    taken = []
    for index in range(saved_count):
        process(index, saved_count)
        iterator = elastic(ds, index, saved_count, 12)
        taken += [int(x) for batch in itertools.islice(iterator, steps) for x in batch]
        Handler().save(tmp_path, iterator)
    for index in range(count):
        process(index, count)
        iterator = Handler().restore(tmp_path, elastic(ds, index, count, 12))
        taken += [int(x) for batch in iterator for x in batch]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= {x for x in range(96) if x % 3 > 0}


def test_one_number_continues_under_another_batch_and_count(tmp_path, process):
    ds = grain.MapDataset.range(20)
    for index in range(2):
        process(index, 2)
        iterator = elastic(ds, index, 2, 4)
        next(iterator), next(iterator)
        Handler().save(tmp_path, iterator)
    process(1, 3)
    iterator = Handler().restore(tmp_path, elastic(ds, 1, 3, 6))
    assert [batch.tolist() for batch in iterator] == [[9, 12], [15, 18]]


def test_another_pipeline_is_refused(tmp_path, process):
    process(0, 1)
    Handler().save(tmp_path, elastic(grain.MapDataset.range(20).shuffle(1), 0, 1, 4))
    with pytest.raises(ValueError, match="seed of ShuffleMapDataset was 1, and is 2 now"):
        Handler().restore(tmp_path, elastic(grain.MapDataset.range(20).shuffle(2), 0, 1, 4))
    process(0, 2)
    with pytest.raises(ValueError, match="seed of ShuffleMapDataset was 1, and is 2 now"):
        Handler().restore(tmp_path, elastic(grain.MapDataset.range(20).shuffle(2), 0, 2, 4))
