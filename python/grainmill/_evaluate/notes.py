"""What an exception is told of an element of a random-access plan, by arithmetic alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.fuse import passed_by
from grainmill._evaluate.index_tree import INDEX_STAGES, joined
from grainmill._evaluate.origins import OriginTree
from grainmill._native import Resolver
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._evaluate.chain import Chain
    from grainmill._plan.node import MapNode, Node

_COLUMN = 0


def note_element(failure: BaseException, node: Node, whole: Chain, position: int) -> None:
    """Notes on `failure` which element of which stage could not be made, and its record.

    An element has the index that it has in the stage that failed. Where it is another element of
    what is read, a shuffle or so lies between, that is told too. Workers count as everybody does.

    Args:
        failure: What was raised.
        node: The end of the plan.
        whole: What makes its elements.
        position: Which of these.
    """
    with contextlib.suppress(Exception):  # the failure matters more than what is told of it
        path = list(_path(random_access(node), position))
        failed = path.index(_failed(failure, path, whole))
        stage, index = path[failed]
        number, text = _numbered(path, failed)
        lines = [f"while computing element {number} of {text}"]
        last = _last(path)
        if path[last][1] != index and last < failed:
            number, text = _numbered(path, last)
            lines.append(f"for element {number} of {text}")
        if isinstance(stage, plan.Batch):
            lines.append(_batched(stage, index))
        add_note(failure, lines + _record(node, position))


def described(node: Node, first: int, last: int) -> list[str]:
    """Lines that tell which elements of a plan something is made of, `first` to `last`."""
    paths = [list(_path(random_access(node), at)) for at in (first, last)]
    (begin, stage), (end, _) = (_numbered(path, _last(path)) for path in paths)
    if first == last:
        return [f"from element {begin} of {stage}", *_record(node, first)]
    return [f"from elements {begin} to {end} of {stage}"]


def _path(node: MapNode, index: int) -> Iterator[tuple[MapNode, int]]:
    """Each stage that an element comes through, from the last one on, with its index there."""
    while True:
        yield node, index
        part = 0
        if isinstance(node, plan.Mix | plan.Concatenate):
            leaves = [("leaf", _COLUMN, number) for number in range(len(node.parents))]
            index, part = _below(joined(node, leaves), index)
        elif type(node) in INDEX_STAGES:
            index, _ = _below(INDEX_STAGES[type(node)](node, ("leaf", _COLUMN, 0)), index)
        elif not isinstance(node, plan.Map):
            return
        node = random_access(node.parents[part])


def _below(tree: Any, index: int) -> tuple[int, int]:
    """The index, and the part, that `tree` takes element `index` from."""
    _, indices, parts = Resolver(tree).resolve(np.array([index], np.int64))[_COLUMN]
    return int(indices[0]), 0 if parts is None else int(parts[0])


def _last(path: list[tuple[MapNode, int]]) -> int:
    """Where on `path` the last stage is that is the user's, and no share of one for a worker."""
    return next((at for at, (node, _) in enumerate(path) if node.added_at != ""), 0)


def _numbered(path: list[tuple[MapNode, int]], at: int) -> tuple[int, str]:
    """Which element it is of the stage at `at` on `path`, and what that is called."""
    node, index = path[at]
    above = path[at + 1 :]
    shares = [place for place, (stage, _) in enumerate(above) if stage.added_at == ""]
    if shares and all(isinstance(stage, plan.Map) for stage, _ in above[: shares[0]]):
        share, _ = above[shares[0]]
        if isinstance(share, plan.Slice):
            return above[shares[0] + 1][1], located(node)
    if any(stage.added_at == "" for stage in node.walk()):  # its source was cut for each worker
        return index, f"a worker's share of {located(node)}"
    return index, located(node)


def _failed(
    failure: BaseException, path: list[tuple[MapNode, int]], whole: Chain
) -> tuple[MapNode, int]:
    """The stage on `path` that raised `failure`, and the index there."""
    passed = passed_by(failure)
    found = _chain_of(whole, passed[0].functions, 0) if passed else None
    if found is not None and passed[0].step is not None:
        chain, num_after = found
        number = len(chain.fused.steps) - 1 - passed[0].step
        if chain.reads_in_loop and not passed[0].step:
            return path[-1]
        mapped = [stage for stage in path if isinstance(stage[0], plan.Map)]
        return mapped[num_after + number]
    return path[-1]


def _chain_of(chain: Chain, functions: Any, num_after: int) -> tuple[Chain, int] | None:
    """The chain that calls `functions`, and how many functions come after these."""
    if chain.fused.runs(functions):
        return chain, num_after
    if chain.leaf is None:
        chains: Any = chain.below
        for below in chains:
            found = _chain_of(below, functions, num_after + len(chain.fused.steps))
            if found is not None:
                return found
    return None


def _batched(node: plan.Batch, index: int) -> str:
    """Which elements a batch is made of."""
    parent = random_access(node.parent)
    epoch, number = divmod(index, node.length)
    first = number * node.batch_size
    stop = min(parent.length, first + node.batch_size)
    start = epoch * parent.length
    return f"from elements {start + first} to {start + stop - 1} of {located(parent)}"


def _record(node: Node, position: int) -> list[str]:
    """Which record an element is made of, where it is one."""
    tree = OriginTree(node)
    origins = tree.origins_at(np.array([position], np.int64))
    source: Any = tree.sources[int(origins.source[0])]
    if source.parents or not isinstance(source, plan.Source | plan.Range | plan.UserDefined):
        return []
    record, epoch = int(origins.record[0]), int(origins.epoch[0])
    where = located(source)
    place_of = getattr(getattr(source, "source", None), "_place_of", None)
    if place_of is not None:
        with contextlib.suppress(Exception):
            where, record = place_of(record)
    return [f"from record {record} of {where}" + (f" (epoch {epoch})" if epoch else "")]
