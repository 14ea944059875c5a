"""What every sequential stage must say of itself, and that one which does not is found."""

import inspect

import pytest

import grainmill as grain
from grainmill._iterators.batch import Batch
from grainmill._iterators.elementwise import Filter, Map, RandomMap
from grainmill._iterators.interleave import Interleave
from grainmill._iterators.mix import Mix
from grainmill._iterators.node import SequentialNode
from grainmill._iterators.read import Read
from grainmill._iterators.worker_shards import MultiprocessPrefetch
from grainmill._stages.limit import Limit
from grainmill._stages.pack import FitPack
from grainmill._stages.repeat import Repeat
from grainmill._stages.window_shuffle import WindowShuffle
from grainmill._stages.zip import Zip

assert grain  # it imports all stages


def all_nodes():
    """The classes of all sequential stages of the package that have no others derived from them."""
    found = [SequentialNode]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.dataset_name or "dataset" in kind.__annotations__]


def answered(kind, name):
    """Whether a class, or one that it is derived from, gives an answer of its own."""
    classes = kind.__mro__[: kind.__mro__.index(SequentialNode)]
    return any(name in vars(each) for each in classes)


def lacking(kind):
    """The names of what a class of nodes does not say."""
    lacks = [name for name in ("saves", "origins") if not answered(kind, name)]
    if not (kind.is_setting or kind.runner or answered(kind, "open")):
        lacks.append("open")
    # How many elements there are follows from the parent's, or is said.
    if not (answered(kind, "keeps_length") or answered(kind, "num_elements")):
        lacks.append("num_elements")
    # A state that is not the parent's has the parent's somewhere.
    has_state = answered(kind, "saves") and kind.saves and kind is not Read
    if has_state and kind.parent_key is None and not answered(kind, "starts"):
        lacks.append("parent_key")
    # So do the shapes and dtypes, unless elements can be anything.
    if not (kind.keeps_spec or answered(kind, "spec") or is_free(kind)):
        lacks.append("spec")
    return lacks


def is_free(kind):
    """Whether the elements of a stage can be anything."""
    return kind.runs_users_code is True or kind.dataset_name in FREE or not kind.dataset_name


# What they return depends on the values of elements.
FREE = {"ConcatThenSplitIterDataset"}


@pytest.mark.parametrize("kind", all_nodes(), ids=lambda kind: kind.__name__)
def test_a_stage_answers_everything(kind):
    assert not lacking(kind)


OMISSIONS = [
    *((Limit, "saves"), (Read, "open"), (Limit, "runner"), (Repeat, "parent_key")),
    *((WindowShuffle, "keeps_length"), (Batch, "origins"), (Zip, "runner"), (Mix, "saves")),
    *((Interleave, "starts"), (FitPack, "parent_key"), (Batch, "spec"), (Read, "origins")),
]
# Either of two would do.
NAMED = {"runner": "open", "keeps_length": "num_elements", "starts": "parent_key"}


@pytest.mark.parametrize(("kind", "name"), OMISSIONS)
def test_an_answer_that_is_left_out_is_named(kind, name, monkeypatch):
    monkeypatch.delattr(kind, name)
    assert lacking(kind) == [NAMED.get(name, name)]


def test_answers_are_inherited_where_that_is_right():
    assert answered(Filter, "open")
    assert Map.keeps_length
    assert not Filter.keeps_length
    assert RandomMap.saves != Map.saves
    assert inspect.signature(MultiprocessPrefetch.open) == inspect.signature(SequentialNode.open)
