"""Iterators in checkpoints of Orbax: its two interfaces, and what programs derive from ours."""

import dataclasses
import json
import subprocess

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1
from pipelines import take
from under_test import grain
from worker_harness import environment

pygrain = __import__(f"{grain.__name__}.python").python

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STATE = {"process_0-of-1.json"}
SaveArgs = grain.checkpoint.CheckpointSave
RestoreArgs = grain.checkpoint.CheckpointRestore


def batches():
    return grain.MapDataset.range(20).shuffle(seed=4).batch(3).to_iter_dataset()


def loader():
    return grain.load(range(20), num_epochs=1, shuffle=True, seed=0, batch_size=3)


MAKERS = [batches, loader]


def after(dataset, count):
    iterator = iter(dataset)
    take(iterator, count)
    return iterator


def states_below(path):
    """The files with states, relative to `path`."""
    return {str(found.relative_to(path)) for found in path.rglob("process_*")}


def check_restored(restored, expected_from):
    assert take(restored, None) == take(expected_from, None) != []


@pytest.mark.parametrize("make", MAKERS)
def test_manager_with_one_item(make, tmp_path):
    iterator = after(make(), 2)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(3, args=SaveArgs(iterator))
        manager.wait_until_finished()
        fresh = iter(make())
        assert manager.restore(3, args=RestoreArgs(fresh)) is fresh
    assert states_below(tmp_path / "3") == {f"default/{name}" for name in STATE}
    check_restored(fresh, iterator)


@pytest.mark.parametrize("make", MAKERS)
def test_manager_with_several_items(make, tmp_path):
    iterator = after(make(), 2)
    model = {"w": np.arange(4.0)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            7, args=ocp.args.Composite(data=SaveArgs(iterator), model=ocp.args.StandardSave(model))
        )
        manager.wait_until_finished()
        fresh = iter(make())
        restored = manager.restore(
            7,
            args=ocp.args.Composite(data=RestoreArgs(fresh), model=ocp.args.StandardRestore(model)),
        )
    assert restored.data is fresh
    np.testing.assert_array_equal(restored.model["w"], model["w"])
    assert states_below(tmp_path / "7") == {f"data/{name}" for name in STATE}
    check_restored(fresh, iterator)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("by", ["item", "args"])
def test_checkpointer_with_the_handler(make, by, tmp_path):
    iterator = after(make(), 2)
    checkpointer = ocp.Checkpointer(grain.checkpoint.CheckpointHandler())
    fresh = iter(make())
    if by == "item":
        checkpointer.save(tmp_path / "one", item=iterator)
        assert checkpointer.restore(tmp_path / "one", item=fresh) is fresh
    else:
        checkpointer.save(tmp_path / "one", args=SaveArgs(iterator))
        assert checkpointer.restore(tmp_path / "one", args=RestoreArgs(fresh)) is fresh
    assert states_below(tmp_path / "one") == STATE
    check_restored(fresh, iterator)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_newer_interface(make, asynchronous, tmp_path):
    iterator = after(make(), 2)
    fresh = iter(make())
    if asynchronous:
        saving = v1.save_checkpointables_async(tmp_path / "one", {"data": iterator})
        state = iterator.get_state()
        next(iterator)
        saving.result()
        iterator.set_state(state)
    else:
        v1.save_checkpointables(tmp_path / "one", {"data": iterator})
    assert v1.load_checkpointables(tmp_path / "one", {"data": fresh})["data"] is fresh
    assert states_below(tmp_path / "one") == {f"data/{name}" for name in STATE}
    check_restored(fresh, iterator)


def test_newer_interface_needs_an_iterator_to_restore(tmp_path):
    v1.save_checkpointables(tmp_path / "one", {"data": iter(batches())})
    with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`, you must pass an"):
        v1.load_checkpointables(tmp_path / "one")


def test_handler_is_not_asynchronous(tmp_path):
    missing = pytest.raises(AttributeError, match="has no attribute 'async_save'")
    with ocp.AsyncCheckpointer(grain.checkpoint.CheckpointHandler()) as checkpointer, missing:
        checkpointer.save(tmp_path / "one", item=iter(batches()))


def test_older_names_are_the_same_objects():
    assert pygrain.PyGrainCheckpointHandler is grain.checkpoint.CheckpointHandler
    assert pygrain.PyGrainCheckpointSave is SaveArgs
    assert pygrain.PyGrainCheckpointRestore is RestoreArgs
    assert [field.name for field in dataclasses.fields(SaveArgs)] == ["item"]
    assert issubclass(SaveArgs, ocp.args.CheckpointArgs)
    with pytest.raises(TypeError, match="item"):
        SaveArgs()


def test_checkpoints_name_the_handler_as_grain_does(tmp_path):
    name = "grain._src.python.checkpoint.handler.CheckpointHandler"
    assert grain.checkpoint.CheckpointHandler.typestr() == name
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=SaveArgs(iter(batches())))
        manager.wait_until_finished()
    written = json.loads((tmp_path / "1/_CHECKPOINT_METADATA").read_text())
    assert written["item_handlers"] == {"default": name}


@pytest.mark.better_than_grain("grainmill beside Grain")
@pytest.mark.parametrize("first", ["grain", "grainmill"])
def test_handlers_of_grain_and_ours_may_be_in_one_program(first, tmp_path, jax_python):
    program = tmp_path / "program.py"
    program.write_text(f"""
import importlib, pathlib
import orbax.checkpoint as ocp  # and with it, import jax
order = ["{first}", *({{"grain", "grainmill"}} - {{"{first}"}})]
modules = [importlib.import_module(name) for name in order]
saves = [module.checkpoint.CheckpointSave for module in modules]
for number, module in enumerate(modules):
    ds = module.MapDataset.range(5).to_iter_dataset()
    iterator = iter(ds)
    next(iterator)
    with ocp.CheckpointManager({str(tmp_path)!r} + "/" + module.__name__) as manager:
        manager.save(1, args=saves[number](iterator))
        manager.wait_until_finished()
for module, other in (modules, reversed(modules)):
    fresh = iter(module.MapDataset.range(5).to_iter_dataset())
    with ocp.CheckpointManager({str(tmp_path)!r} + "/" + other.__name__) as manager:
        args = module.checkpoint.CheckpointRestore(fresh)
        assert manager.restore(1, args=args) is fresh
    assert list(fresh) == [1, 2, 3, 4]
""")
    done = subprocess.run(
        [jax_python[0], str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment() | jax_python[1],
    )
    assert done.returncode == 0, done.stderr


# --- what programs build on it --------------------------------------------------------------------


class CountingHandler(pygrain.PyGrainCheckpointHandler):
    """A handler of one's own, with arguments of its own, as Kauldron has one."""

    saved = 0

    def __init__(self):  # without the one of the base class
        pass

    def save(self, directory, item=None, args=None):
        type(self).saved += 1
        super().save(directory, item=item, args=args)


@ocp.args.register_with_handler(CountingHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class CountingArgs(ocp.args.CheckpointArgs):
    item: object


def test_handler_may_be_derived_from_and_registered_again(tmp_path):
    iterator = after(batches(), 2)
    before = CountingHandler.saved
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(ds=CountingArgs(iterator)))
        manager.wait_until_finished()
        fresh = iter(batches())
        restored = manager.restore(1, args=ocp.args.Composite(ds=CountingArgs(fresh)))
    assert restored.ds is fresh
    assert CountingHandler.saved == before + 1
    assert CountingHandler.typestr().endswith("test_orbax.CountingHandler")
    check_restored(fresh, iterator)


class AllHostsHandler(pygrain.PyGrainCheckpointHandler):
    """The states of all hosts as JSON in one file, as Orbax' peer-to-peer manager writes them."""

    def save(self, directory, item=None, args=None):
        item = args.item if item is None else item
        of_hosts = {}
        for host in range(2):
            state = item.get_state()
            is_dataset = isinstance(item, grain.DatasetIterator)
            of_hosts[host] = json.dumps(state, indent=4) if is_dataset else state.decode()
        (directory / "state.json").write_text(json.dumps(of_hosts))

    def restore(self, directory, item=None, args=None):
        item = args.item if item is None else item
        text = json.loads((directory / "state.json").read_text())["1"]
        is_dataset = isinstance(item, grain.DatasetIterator)
        item.set_state(json.loads(text) if is_dataset else text.encode())
        return item


@pytest.mark.parametrize("make", MAKERS)
def test_states_of_all_hosts_may_be_in_one_file(make, tmp_path):
    iterator = after(make(), 2)
    checkpointer = ocp.Checkpointer(AllHostsHandler())
    checkpointer.save(tmp_path / "one", item=iterator)
    fresh = checkpointer.restore(tmp_path / "one", item=iter(make()))
    check_restored(fresh, iterator)


def test_states_may_be_gathered_as_arrays():
    """Simply makes each leaf an array, gathers those of all hosts, and makes them lists again."""
    shared = grain.MapDataset.range(30).shuffle(seed=4).repeat(2)[0::2]
    tokens = shared.map(lambda x: {"t": np.full(x % 7 + 1, x)}).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        tokens, length_struct={"t": 9}, num_packing_bins=2
    )
    mixture = grain.IterDataset.mix([packed, packed], [1, 2]).batch(2)
    iterator = after(mixture, 3)
    arrays = jax.tree.map(np.asarray, iterator.get_state())
    assert all(leaf.dtype.kind in "biu" for leaf in jax.tree.leaves(arrays))
    gathered = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), arrays)
    own = jax.tree.map(lambda leaf: leaf[1].tolist(), gathered)
    restored = iter(mixture)
    restored.set_state(own)
    check_restored(restored, iterator)
