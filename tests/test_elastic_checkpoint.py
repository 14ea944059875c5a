"""Checkpoints of iterators that another number of processes continues, and their files."""

import asyncio
import itertools
import json

import pytest
from under_test import grain

from grainmill._checkpoint import files, states

pytestmark = pytest.mark.better_than_grain("files of Grain after 0.2.18, with checks of our own")

Handler = grain.checkpoint.CheckpointHandler


class Shards(grain.DatasetIterator):
    """The interface of an `ElasticIterator` over sequential datasets, as short as it can be.

    Shard `k` has the elements `10 * k` to `10 * k + 2`; those of a process are read one after
    another.
    """

    def __init__(self, index, count, num_shards=5):
        super().__init__()
        self.shard_options = grain.sharding.ShardOptions(index, count)
        self.at = dict.fromkeys(range(index, num_shards, count), 0)

    def __next__(self):
        for shard, at in self.at.items():
            if at < 3:
                self.at[shard] += 1
                return 10 * shard + at
        raise StopIteration

    def get_state(self):
        return {"at": list(self.at.values())}

    def set_state(self, state):
        self.at = dict(zip(self.at, state["at"], strict=True))

    def get_shard_states(self):
        return {
            shard: {"exhausted": int(at == 3), "state": {"next_index": at}}
            for shard, at in self.at.items()
        }

    def set_shard_states(self, shard_states):
        found = {int(shard): entry["state"]["next_index"] for shard, entry in shard_states.items()}
        assert found.keys() == self.at.keys()
        self.at = found


class ByIndex(grain.DatasetIterator):
    """The interface of an `ElasticIterator` over a `MapDataset`: one number is its state."""

    def __init__(self, index, count):
        super().__init__()
        self.shard_options = grain.sharding.ShardOptions(index, count)
        self.at = 0

    def __next__(self):
        self.at += 4
        return self.at

    def get_state(self):
        return {"global_next_index": self.at}

    def set_state(self, state):
        self.at = state["global_next_index"]

    def get_shard_states(self):
        raise NotImplementedError("only for IterDataset-based")

    def set_shard_states(self, shard_states):
        raise NotImplementedError("only for IterDataset-based")


@pytest.fixture
def process(monkeypatch):
    """Makes this process one of several."""

    def be(index, count):
        monkeypatch.setattr(files, "process_index_and_count", lambda: (index, count))

    return be


@pytest.fixture
def save_all(process):
    """Saves what `count` processes have after so many elements each."""

    def save(directory, steps, make=Shards, **options):
        elements = []
        for index, num_steps in enumerate(steps):
            process(index, len(steps))
            iterator = make(index, len(steps), **options)
            elements += [next(iterator) for _ in range(num_steps)]
            Handler().save(directory, iterator)
        return elements

    return save


@pytest.fixture
def restore(process):
    """An iterator of one of several processes, restored."""

    def restored(directory, index, count, make=Shards, **options):
        process(index, count)
        iterator = make(index, count, **options)
        assert Handler().restore(directory, iterator) is iterator
        return iterator

    return restored


ALL = [10 * shard + at for shard in range(5) for at in range(3)]


def test_each_process_writes_its_state_and_those_of_its_shards(tmp_path, save_all):
    assert save_all(tmp_path, [2, 1]) == [0, 1, 10]
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {name for name in written if name.endswith(".json")} == {
        *("process_0-of-2.json", "process_1-of-2.json"),
        *(f"shard_state_{shard}.json" for shard in range(5)),
    }
    assert written["shard_state_0.json"] == json.dumps(
        {"exhausted": 0, "state": {"next_index": 2}}, indent=4
    )
    assert json.loads(written["process_1-of-2.json"]) == {"at": [1, 0]}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("by_grain", [False, True])
def test_another_number_of_processes_continues(tmp_path, save_all, restore, count, by_grain):
    taken = save_all(tmp_path, [4, 1])
    if by_grain:
        for path in tmp_path.glob("*.grainmill"):
            path.unlink()
    rest = [list(restore(tmp_path, index, count)) for index in range(count)]
    assert sorted([*taken, *itertools.chain(*rest)]) == ALL


def test_the_newer_interface_also_writes_shards(tmp_path, process):
    for index in range(2):
        process(index, 2)

        async def save(index=index):
            await (await Shards(index, 2).save(tmp_path))

        asyncio.run(save())
    process(0, 1)
    only = Shards(0, 1)

    async def load():
        await (await only.load(tmp_path))

    asyncio.run(load())
    assert list(only) == ALL


def test_another_number_of_shards_in_one_process_uses_the_states_of_shards(tmp_path, process):
    """Grain looks at the number of processes only, and restores the wrong state."""
    for index in range(2):
        process(index, 2)
        Handler().save(tmp_path, Shards(index, 2))
    process(0, 2)
    iterator = Shards(0, 4)
    Handler().restore(tmp_path, iterator)
    assert set(iterator.at) == {0, 4}


def test_lost_shard_is_named(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 1])
    (tmp_path / "shard_state_3.json").unlink()
    with pytest.raises(ValueError, match=r"File .*shard_state_3\.json does not exist"):
        restore(tmp_path, 0, 1)
    assert list(restore(tmp_path, 2, 3))  # it has the shard 2 only


def test_lost_state_of_a_process_is_named(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 1, 0])
    (tmp_path / "process_1-of-3.json").unlink()
    with pytest.raises(ValueError, match=r"process_1-of-3\.json does not exist.* 3 processes"):
        restore(tmp_path, 0, 2)


def test_empty_directory_is_an_error(tmp_path, restore):
    for make in (Shards, ByIndex):
        with pytest.raises(ValueError, match=r"process_0-of-1\.json does not exist"):
            restore(tmp_path, 0, 1, make)


def test_files_of_an_earlier_number_of_processes_are_recognized(tmp_path, save_all, restore):
    """Both where the number has grown since and where it has shrunk."""
    save_all(tmp_path, [3, 3, 3])
    taken = save_all(tmp_path, [1, 2])
    rest = [list(restore(tmp_path, index, 4)) for index in range(4)]
    assert sorted([*taken, *itertools.chain(*rest)]) == ALL
    rest = [list(restore(tmp_path, index, 2)) for index in range(2)]
    assert sorted([*taken, *itertools.chain(*rest)]) == ALL
    taken = save_all(tmp_path, [1, 1, 1, 1])
    rest = [list(restore(tmp_path, index, 2)) for index in range(2)]
    assert sorted([*taken, *itertools.chain(*rest)]) == ALL


def test_files_that_cannot_be_told_apart_are_named(tmp_path, save_all, restore):
    save_all(tmp_path, [3, 3, 3])
    for path in tmp_path.glob("*.grainmill"):
        path.unlink()
    save_all(tmp_path, [1, 2])
    with pytest.raises(ValueError, match=r"of 2 and of 3 processes.*process_0-of-3\.json"):
        restore(tmp_path, 0, 1)


def test_changed_shard_is_named(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 1])
    (tmp_path / "shard_state_1.json").write_text('{"exhausted": 0, "state": {"next_index": 2}}')
    with pytest.raises(ValueError, match=r"shard_state_1\.json was not written with"):
        restore(tmp_path, 0, 1)


def test_fewer_datasets_than_were_saved_are_refused(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 1])
    with pytest.raises(ValueError, match=r"shard_state_4\.json belongs to a dataset that the"):
        restore(tmp_path, 0, 1, num_shards=4)
    with pytest.raises(ValueError, match=r"shard_state_5\.json does not exist"):
        restore(tmp_path, 0, 1, num_shards=6)


def test_one_number_continues_under_any_number_of_processes(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 2], ByIndex)
    assert not list(tmp_path.glob("shard_state_*"))
    for count in (1, 2, 3):
        assert restore(tmp_path, count - 1, count, ByIndex).at == 8


def test_unequal_numbers_are_refused(tmp_path, save_all, restore):
    save_all(tmp_path, [2, 1], ByIndex)
    assert restore(tmp_path, 1, 2, ByIndex).at == 4
    with pytest.raises(ValueError, match=r"process_0-of-2\.json and process_1-of-2\.json"):
        restore(tmp_path, 0, 1, ByIndex)


def test_nothing_is_written_where_a_shard_is_not_json(tmp_path, process):
    process(0, 1)
    iterator = Shards(0, 1)
    iterator.get_shard_states = lambda: {0: {"exhausted": 0, "state": {"rng": object()}}}
    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        Handler().save(tmp_path, iterator)
    assert not list(tmp_path.iterdir())


def test_iterators_without_shard_options_write_no_shards():
    class Listed(Shards):
        def get_shard_states(self):
            return [{"exhausted": 0, "state": {}}]

    listed = Listed(0, 1)
    del listed.shard_options
    assert not any(name.startswith("shard") for name in states.files_of(listed))
