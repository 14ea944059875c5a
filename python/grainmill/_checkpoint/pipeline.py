"""Descriptions of pipelines, by which a state of another pipeline is recognized.

A description is JSON: the stages from the source to the end. It has what determines which element
a position refers to, and leaves out what may change between two runs of the same pipeline:
directories, options of reading and prefetching, and the code of functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from grainmill._checkpoint.files import digest
from grainmill._plan import random_access
from grainmill._plan.node import MapNode, Node
from grainmill._url import identified

Stages: TypeAlias = "list[dict[str, Any]]"

_FIELDS_LEFT_OUT = {
    # Described elsewhere, or of the package.
    *("parents", "added_at", "length", "dataset", "datasets", "with_parents", "function", "source"),
    "store",
    # They change neither elements nor states.
    *("worker_init_fn", "buffer_size", "iter_buffer_size"),
    *("num_make_iter_threads", "make_iter_buffer_size"),
}
# Longer lists of values, files or datasets are described by digests.
_MAX_LISTED = 16
_MAX_STAGES = 64
_MAX_REPORTED = 3


def describe(dataset: Any) -> Stages:
    """Returns what a checkpoint says about a pipeline, by which another one is recognised.

    It has what determines which element a position refers to, and leaves out what may change
    between two runs: directories, options of reading and prefetching, and the code of functions. It
    can be kept beside states, or beside elements that a pipeline has computed.

    Args:
        dataset: A `MapDataset` or `IterDataset`.

    Returns:
        The stages from the source on: dicts of what JSON can represent.

    Raises:
        TypeError: It is no dataset of this package.

    Example:
        >>> ds = grain.MapDataset.range(3).map(abs)
        >>> from grainmill import pipelines
        >>> [stage["stage"] for stage in pipelines.describe(ds)]
        ['RangeMapDataset', 'MapMapDataset']
    """
    plan_of = getattr(dataset, "_plan_node", None)
    if plan_of is None:
        raise TypeError(f"`dataset` must be a dataset, got {type(dataset).__name__}")
    stages: Stages = json.loads(json.dumps(described(plan_of())))
    return stages


class _Stage(dict[str, Any]):
    """The description of a stage, with its node; a copy, or one that is sent, has none."""

    node: Node

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def nodes_in(stages: Any) -> dict[str, Node]:
    """A node for each kind of stage in a description that was made of a plan, nested ones too."""
    found: dict[str, Node] = {}
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, _Stage):
            found[stage["stage"]] = stage.node
        for part in stage.get("of", ()):
            found |= nodes_in(part)
    return found


def described(node: Node) -> Stages:
    """The stages of the plan that ends in `node`, from its source on."""
    return _Describer().stages(node)


class _Describer:
    """Describes each node once, however many stages read it."""

    def __init__(self) -> None:
        # By the `id` of a plan or dataset, which is held so that the `id` stays its own.
        self._known: dict[int, tuple[Any, Stages]] = {}
        self._sizes: dict[int, int] = {}

    def stages(self, node: Node) -> Stages:
        """The stages of the plan that ends in `node`."""
        chain = [node]
        while len(chain[-1].parents) == 1:
            chain.append(chain[-1].parents[0])
        stages = [] if len(chain[-1].parents) == 0 else self._joined(chain.pop())
        for step in reversed(chain):
            if not step.passes_on:  # seeds are in the stages that use them
                stages.append(self._stage(step))
        return stages

    def _joined(self, node: Node) -> Stages:
        """A stage that combines several plans, which are nested in it."""
        stage = _own(node)
        stage["of"] = self._parts(node.parents)
        return [stage]

    def _stage(self, node: Node) -> dict[str, Any]:
        stage = _own(node)
        datasets = node.opens
        if datasets is not None:
            plan_of = getattr(datasets, "_plan_node", None)
            if plan_of is not None:  # a `MapDataset` of datasets, which is not evaluated here
                stage["of"] = [self._once(plan_of())]
            elif isinstance(datasets, list | tuple):
                stage["of"] = self._parts(datasets)
            with contextlib.suppress(Exception):
                stage["datasets"] = len(datasets)
        return stage

    def _parts(self, parts: Sequence[Any]) -> list[Any]:
        """Their stages, or digests of these where they are too long."""
        stages = [self._once(part) for part in parts]
        sizes = [self._sizes[id(one)] for one in stages]
        if sum(sizes) <= _MAX_STAGES:
            return stages
        digests: dict[int, str] = {}
        for one in stages:
            if id(one) not in digests:
                digests[id(one)] = digest(json.dumps(one, sort_keys=True))
        return [digests[id(one)] for one in stages]

    def _once(self, part: Any) -> Stages:
        key = id(part)
        if key not in self._known:
            node = part
            if not isinstance(part, Node):
                plan_of = getattr(part, "_plan_node", None)
                node = None if plan_of is None else plan_of()
            stages = [{"stage": type(part).__name__}] if node is None else self.stages(node)
            self._known[key] = (part, stages)
            self._sizes[id(stages)] = _size(stages)
        return self._known[key][1]


def _size(stages: Stages) -> int:
    """How many stages a description has, those of nested plans included."""
    return sum(
        1 + sum(_size(one) for one in stage.get("of", ()) if isinstance(one, list))
        for stage in stages
    )


def _own(node: Node) -> dict[str, Any]:
    """A stage without what it reads from."""
    stage = _Stage(stage=node.dataset_name or str(node).partition("(")[0])
    stage.node = node
    if node.users_dataset is not None:
        stage["stage"] = type(node.users_dataset).__qualname__.rpartition("<locals>.")[2]
    if isinstance(node, random_access.Source):
        stage["source"] = type(node.source).__name__
        if names := _file_names(node.source):
            stage["files"] = names
    if isinstance(node, random_access.UserDefined) or (
        isinstance(node, MapNode) and not node.parents
    ):
        with contextlib.suppress(Exception):  # a user's dataset may not know its length
            stage["length"] = int(node.length)
    stage |= node.described(_MAX_LISTED)
    for field in dataclasses.fields(node):
        if field.name in _FIELDS_LEFT_OUT:
            continue
        value = getattr(node, field.name)
        if field.name != "options" and value is not None:
            stage[field.name] = _value(value)
    return stage


def _file_names(source: Any) -> list[str]:
    """The names of the files of a source, without directories."""
    paths = getattr(source, "paths", None)
    if not isinstance(paths, list | tuple) or not paths:
        return []
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        return []
    names = [re.split(r"[\\/]", identified(os.fspath(path)))[-1] for path in paths]
    if len(names) > _MAX_LISTED:
        return [names[0], f"{len(names) - 2} more, {digest(json.dumps(names))}", names[-1]]
    return names


def _value(value: Any) -> Any:
    """A parameter as JSON; functions and objects by name."""
    match value:
        case bool() | int() | float() | str():
            described: Any = value
        case enum.Enum():
            described = value.name
        case np.generic():
            described = _value(value.item())
        case np.ndarray():
            described = _value(value.tolist())
        case range():
            described = [value.start, value.stop, value.step]
        case Mapping():
            described = {str(key): _value(value[key]) for key in sorted(value, key=str)}
        case list() | tuple() if len(value) > _MAX_LISTED:
            described = f"{len(value)} values, {digest(json.dumps(value, default=_value))}"
        case list() | tuple():
            described = [_value(inner) for inner in value]
            if all(isinstance(inner, str) for inner in value):
                described.sort()  # names may have been given as a set
        case _:
            described = function_name(value)
    return described


def function_name(function: Any) -> str:
    """The name of a function as written, or of the class of another callable object.

    Without the module: programs move functions.
    """
    while isinstance(function, functools.partial):
        function = function.func
    with contextlib.suppress(ValueError):
        function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def differences(saved: Any, now: Any) -> list[str]:
    """Returns what differs between two descriptions, one sentence each.

    Args:
        saved: What `describe` has returned before, or what JSON has made of it.
        now: What it returns now.

    Example:
        >>> from grainmill import pipelines
        >>> one, other = (grain.MapDataset.range(9).shuffle(seed=seed) for seed in (1, 2))
        >>> pipelines.differences(pipelines.describe(one), pipelines.describe(other))
        ['seed of ShuffleMapDataset was 1, and is 2 now']
    """
    if saved == now:
        return []
    if not isinstance(saved, list) or not isinstance(now, list):
        return ["the datasets are others"]
    found: list[str] = []
    for number in range(max(len(saved), len(now))):
        before = saved[number] if number < len(saved) else None
        after = now[number] if number < len(now) else None
        if before is None or after is None or before.get("stage") != after.get("stage"):
            # The stages that follow are shifted, so that comparing them says nothing.
            return [
                *found,
                f"stage {number + 1} was {_shown(before)} when it was saved, and is "
                f"{_shown(after)} now",
            ]
        found += parameters(before, after)
    return found


def parameters(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two stages of the same kind."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        if name != "of" or not isinstance(was, list) or not isinstance(now, list):
            found.append(f"{name} of {before['stage']} was {was}, and is {now} now")
        elif len(was) != len(now):
            found.append(f"{before['stage']} had {len(was)} datasets, and has {len(now)} now")
        else:
            for number, (one, other) in enumerate(zip(was, now, strict=True)):
                inner = f"in dataset {number} of {before['stage']}: "
                found += [inner + difference for difference in differences(one, other)]
    return found


def _shown(stage: dict[str, Any] | None) -> str:
    if stage is None:
        return "absent"
    arguments = [f"{name}={stage[name]}" for name in stage if name not in {"stage", "of"}]
    return f"{stage['stage']}({', '.join(arguments)})"


def reported(found: Sequence[str]) -> str:
    """The first of the differences as one text."""
    more = len(found) - _MAX_REPORTED
    return "; ".join([*found[:_MAX_REPORTED], *([f"and {more} more"] if more > 0 else [])])
