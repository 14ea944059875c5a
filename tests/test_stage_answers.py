"""What every stage must say of itself, and that one which does not is found."""

import importlib
import inspect
import pkgutil
import re
import sys

import pytest
import test_notes
from pipelines import build
from stages import STAGES

import grainmill as grain
from grainmill import _stages
from grainmill._checkpoint import changes
from grainmill._iterators.base.node import SequentialNode
from grainmill._iterators.base.stage import Stage
from grainmill._iterators.batch import Batch
from grainmill._iterators.elementwise import Filter, Map, RandomMap
from grainmill._iterators.interleave import Interleave
from grainmill._iterators.mix import Mix
from grainmill._iterators.read import Read
from grainmill._iterators.user_defined import UserDefined
from grainmill._iterators.workers.worker_shards import MultiprocessPrefetch
from grainmill._plan import random_access
from grainmill._plan.node import MapNode
from grainmill._stages.limit import Limit, LimitStage
from grainmill._stages.pack import FitPack
from grainmill._stages.repeat import Repeat
from grainmill._stages.window_shuffle import WindowShuffle
from grainmill._stages.zip import Zip


def all_nodes(base=SequentialNode):
    """The classes of all stages of the package that have no others derived from them."""
    for module in pkgutil.iter_modules(_stages.__path__):  # which nothing may have used yet
        importlib.import_module(f"{_stages.__name__}.{module.name}")
    found = [base]
    for kind in found:
        found += kind.__subclasses__()
    # Not the classes that methods of others were generated with, which are gone some time later.
    found = [kind for kind in found if getattr(sys.modules[kind.__module__], kind.__name__) is kind]
    return [kind for kind in found if kind.dataset_name or "dataset" in kind.__annotations__]


def answered(kind, name):
    """Whether a class, or one that it is derived from, gives an answer of its own."""
    base = MapNode if issubclass(kind, MapNode) else SequentialNode
    classes = kind.__mro__[: kind.__mro__.index(base)]
    return any(name in vars(each) for each in classes)


def lacking(kind):
    """The names of what a class of nodes does not say."""
    lacks = [name for name in ("saves", "origins") if not answered(kind, name)]
    if not (kind.is_setting or kind.runner or answered(kind, "open")):
        lacks.append("open")
    # Those of the class that runs it.
    lacks += sorted(getattr(kind.runner, "__abstractmethods__", ()))
    # How many elements there are follows from the parent's, or is said.
    if not (answered(kind, "keeps_length") or answered(kind, "num_elements")):
        lacks.append("num_elements")
    # A state that is not the parent's has the parent's somewhere.
    has_state = answered(kind, "saves") and kind.saves and kind is not Read
    if has_state and kind.parent_key is None and not answered(kind, "starts"):
        lacks.append("parent_key")
    if kind not in EXAMPLES:
        lacks.append("a pipeline in `tests/stages.py`")
    return lacks + lacking_note(kind) + lacking_spec(kind)


def lacking_note(kind):
    """Where a function of the user fails, notes say for which element: each is tried."""
    is_tried = kind in NOTED or not kind.runs_users_code
    return [] if is_tried else ["a failing function in `tests/test_notes.py`"]


NOTED = {
    *(type(make()._plan_node()) for make in test_notes.STAGES.values()),
    *(type(make()._plan_node()) for make in test_notes.ITER_STAGES.values()),
    *(random_access.UserDefined, UserDefined),  # whose class is named
}


def lacking_spec(kind):
    """Shapes and dtypes follow from the parent's, or are said, unless elements can be anything."""
    return [] if kind.keeps_spec or answered(kind, "spec") or is_free(kind) else ["spec"]


def lacking_by_index(kind):
    """The names of what a class of nodes with random access does not say."""
    lacks = []
    if kind.rearranges or kind.joins:
        lacks += [] if answered(kind, "tree") else ["tree"]
    elif not (kind.step_kind or kind.computed_by or kind in SOURCES):
        lacks.append("computed_by")
    if kind.computed_by or kind is random_access.Cache:
        lacks += [] if answered(kind, "inputs") else ["inputs"]
    node = EXAMPLES.get(kind)
    if node is None:
        lacks.append("a pipeline in `tests/stages.py`")
    elif node.parents and not node.slices_own_epoch:
        lacks += [] if node.over(node.parents).length == node.length else ["length"]
    return lacks + lacking_note(kind) + lacking_spec(kind)


# What computes them needs more than the node and its parents.
SOURCES = {
    random_access.Source,
    random_access.Range,
    random_access.UserDefined,
    random_access.Cache,
}
# What Grain does not have, and what has no state; other tests resume them.
ELSEWHERE = [
    grain.MapDataset.range(3).slice([2, 0]).cache(),
    grain.MapDataset.range(3).to_iter_dataset().seed(1).cache(),
]
EXAMPLES = {
    type(node): node
    for dataset in (*ELSEWHERE, *(build(grain, ops) for ops in STAGES.values()))
    for node in dataset._plan_node().walk()
}


def is_free(kind):
    """Whether the elements of a stage can be anything."""
    return kind.runs_users_code is True or kind.dataset_name in FREE or not kind.dataset_name


# What they return depends on the values of elements.
FREE = {"ConcatThenSplitIterDataset", "SourceMapDataset"}


@pytest.mark.parametrize("kind", all_nodes(), ids=lambda kind: kind.__name__)
def test_a_stage_answers_everything(kind):
    assert not lacking(kind)


@pytest.mark.parametrize("kind", all_nodes(MapNode), ids=lambda kind: kind.__name__)
def test_a_stage_with_random_access_answers_everything(kind):
    assert not lacking_by_index(kind)


@pytest.mark.parametrize("name", STAGES)
def test_keys_that_a_stage_names_are_in_its_states(name):
    dataset = build(grain, STAGES[name])
    iterator = iter(dataset)
    next(iterator, None)
    node, state = dataset._plan_node(), iterator.get_state()
    while isinstance(node, SequentialNode) and len(node.parents) == 1:
        for key in (node.parent_key, node.restart_key):
            assert key is None or key in state, (node, key)
        if node.saves and node.parent_key is None:  # the states of several are in it, or a user's
            break
        node, state = node.parent, node.parent_state(state)


def test_what_changes_of_a_pipeline_mean_is_said_by_its_stages():
    """Named are only those whose fields, or the places of whose states, are looked at."""
    named = set(re.findall(r'"(\w+(?:Map|Iter)Dataset)"', inspect.getsource(changes)))
    assert named == {
        *("MixedIterDataset", "ZipIterDataset", "RepeatIterDataset", "RepeatMapDataset"),
        *("SliceMapDataset", "BatchMapDataset", "ShuffleMapDataset", "WindowShuffleMapDataset"),
    }


OMISSIONS = [
    *((Limit, "saves"), (Read, "open"), (Limit, "runner"), (Repeat, "parent_key")),
    *((WindowShuffle, "keeps_length"), (Batch, "origins"), (Zip, "runner"), (Mix, "saves")),
    *((Interleave, "starts"), (FitPack, "parent_key"), (Batch, "spec"), (Read, "origins")),
]
# Either of two would do.
NAMED = {"runner": "open", "keeps_length": "num_elements", "starts": "parent_key"}


def leave_out(kind, name, monkeypatch):
    if name == "length":  # which is set where the fields are checked
        monkeypatch.setattr(kind, "__post_init__", lambda _: None)
        return
    owner = next(each for each in kind.__mro__ if name in vars(each))
    monkeypatch.delattr(owner, name)


@pytest.mark.parametrize(("kind", "name"), OMISSIONS)
def test_an_answer_that_is_left_out_is_named(kind, name, monkeypatch):
    leave_out(kind, name, monkeypatch)
    assert lacking(kind) == [NAMED.get(name, name)]


@pytest.mark.parametrize("name", ["pull", "state", "restore"])
def test_what_runs_a_stage_has_all_methods(name, monkeypatch):
    rest = {key: value for key, value in vars(LimitStage).items() if key != name}
    monkeypatch.setattr(Limit, "runner", type("LimitStage", (Stage,), rest))
    assert lacking(Limit) == [name]


OMISSIONS_BY_INDEX = [
    *((random_access.Shuffle, "tree"), (random_access.Mix, "tree"), (random_access.Zip, "spec")),
    *((random_access.Batch, "spec"), (random_access.Range, "spec")),
    *((random_access.Batch, "length"), (random_access.Repeat, "length")),
    *((random_access.FlatMap, "length"), (random_access.Batch, "computed_by")),
    *((random_access.Zip, "computed_by"), (random_access.FlatMap, "computed_by")),
    *((random_access.Zip, "inputs"), (random_access.Cache, "inputs")),
]


@pytest.mark.parametrize(("kind", "name"), OMISSIONS_BY_INDEX)
def test_an_answer_of_random_access_that_is_left_out_is_named(kind, name, monkeypatch):
    leave_out(kind, name, monkeypatch)
    assert lacking_by_index(kind) == [name]


@pytest.mark.parametrize("kind", [Filter, Batch, random_access.FlatMap], ids=lambda k: k.__name__)
def test_a_stage_whose_function_no_test_fails_is_named(kind, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "NOTED", NOTED - {kind})
    lacks = lacking_by_index if issubclass(kind, MapNode) else lacking
    assert lacks(kind) == ["a failing function in `tests/test_notes.py`"]


def test_a_stage_that_no_test_resumes_is_named(monkeypatch):
    monkeypatch.delitem(EXAMPLES, random_access.Zip)
    assert lacking_by_index(random_access.Zip) == ["a pipeline in `tests/stages.py`"]
    monkeypatch.delitem(EXAMPLES, Limit)
    assert lacking(Limit) == ["a pipeline in `tests/stages.py`"]


def test_answers_are_inherited_where_that_is_right():
    assert answered(Filter, "open")
    assert Map.keeps_length
    assert not Filter.keeps_length
    assert RandomMap.saves != Map.saves
    assert inspect.signature(MultiprocessPrefetch.open) == inspect.signature(SequentialNode.open)
