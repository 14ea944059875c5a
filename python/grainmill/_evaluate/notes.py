"""Notes on exceptions: the element, stage and record, computed only when one is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.loops import passed_by
from grainmill._interrupts import raise_interrupt, suppressed
from grainmill._native import Resolver
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._evaluate.chain import Chain
    from grainmill._plan.node import MapNode, Node

_COLUMN = 0
# So many records of an element are shown.
_MAX_SHOWN = 4


def add_element_notes(failure: BaseException, node: Node, whole: Chain, position: int) -> None:
    """Adds notes to `failure`: which element of which stage failed, and its record.

    The index is that in the stage that failed. Where it differs from the index in the plan's last
    stage, as downstream of a shuffle, that is noted, too. Indices within a worker's share are
    converted to those of the user's plan.

    Args:
        failure: The exception.
        node: The last stage of the plan.
        whole: The plan's chain.
        position: The position of the element.
    """
    with suppressed():  # the failure matters more than its notes
        passed = list(stages_passed(node, position))
        failed = passed.index(_failed(failure, passed, whole))
        _, index = passed[failed]
        number, text = _numbered(passed, failed)
        lines = [f"while computing element {number} of {text}"]
        last = _last(passed)
        if passed[last][1] != index and last < failed:
            number, text = _numbered(passed, last)
            lines.append(f"for element {number} of {text}")
        add_note(failure, lines + _records(*passed[-1]))


def described(node: Node, first: int, last: int) -> list[str]:
    """Note lines for the elements `first` to `last` of a plan, and their records."""
    paths = [list(stages_passed(node, at)) for at in (first, last)]
    (start, stage), (end, _) = (_numbered(passed, _last(passed)) for passed in paths)
    if first == last:
        return [f"from element {start} of {stage}", *_records(*paths[0][-1])]
    return [f"from elements {start} to {end} of {stage}"]


def computing(node: Node, first: int, last: int) -> tuple[str, list[str]]:
    """What computes the elements `first` to `last` of a plan, and further lines on them."""
    try:
        computed, *lines = described(node, first, last)
    except Exception as failure:
        raise_interrupt(failure)
        return f"while computing element {first}", []
    return f"while computing {computed.removeprefix('from ')}", lines


def stages_passed(node: Node, index: int) -> Iterator[tuple[MapNode, int]]:
    """The stages that an element passes, from the last one upstream, with its index in each.

    The last of them is a source, or makes elements of others: a batch, a tuple of `zip`.
    """
    while True:
        stage, number = random_access(node), 0
        yield stage, index
        if stage.joins or stage.rearranges:
            leaves = [("leaf", _COLUMN, at) for at in range(len(stage.parents))]
            index, number = _upstream_index(stage.tree(*leaves), index)
        elif stage.step_kind is None:
            return
        node = stage.parents[number]


def _upstream_index(tree: Any, index: int) -> tuple[int, int]:
    """The index that `tree` takes element `index` from, and the number of the parent."""
    _, indices, numbers = Resolver(tree).resolve(np.array([index], np.int64))[_COLUMN]
    return int(indices[0]), 0 if numbers is None else int(numbers[0])


def _last(passed: list[tuple[MapNode, int]]) -> int:
    """The last of these stages that the user added, rather than one that cuts a worker's share."""
    return next((at for at, (node, _) in enumerate(passed) if node.added_at != ""), 0)


def _numbered(passed: list[tuple[MapNode, int]], at: int) -> tuple[int, str]:
    """The index in the stage at `passed[at]` as the user counts, and the stage's text."""
    node, index = passed[at]
    upstream = passed[at + 1 :]
    shares = [step for step, (stage, _) in enumerate(upstream) if stage.added_at == ""]
    if shares and all(isinstance(stage, plan.Map) for stage, _ in upstream[: shares[0]]):
        share, _ = upstream[shares[0]]
        if isinstance(share, plan.Slice):
            return upstream[shares[0] + 1][1], located(node)
    if any(stage.added_at == "" for stage in node.walk()):  # its source was cut for each worker
        return index, f"a worker's share of {located(node)}"
    return index, located(node)


def _failed(
    failure: BaseException, passed: list[tuple[MapNode, int]], whole: Chain
) -> tuple[MapNode, int]:
    """The stage of `passed` that raised `failure`, and the index there."""
    frames = passed_by(failure)
    found = _chain_of(whole, frames[0].functions, 0) if frames else None
    if found is not None and frames[0].step is not None:
        chain, num_after = found
        number = len(chain.fused.steps) - 1 - frames[0].step
        if chain.reads_in_loop and not frames[0].step:
            return passed[-1]
        mapped = [stage for stage in passed if isinstance(stage[0], plan.Map)]
        return mapped[num_after + number]
    return passed[-1]


def _chain_of(chain: Chain, functions: Any, num_after: int) -> tuple[Chain, int] | None:
    """The chain that calls `functions`, and how many functions are called after these."""
    if chain.fused.runs(functions):
        return chain, num_after
    for child in chain.upstream:
        found = _chain_of(child, functions, num_after + len(chain.fused.steps))
        if found is not None:
            return found
    return None


def _records(node: Node, position: int) -> list[str]:
    """Note lines with the record of an element, or with those of several that it has.

    Many ways may lead to the sources of a plan, so `node` is the last one on that of the element.
    """
    *_, (source, index) = stages_passed(node, position)
    if source.parents:
        return _records_of_inputs(source, index)
    epoch, record = 0, index
    if not isinstance(source, plan.Source) or source.wraps:
        epoch, record = divmod(index, source.length)
    where = located(source)
    place_of = getattr(getattr(source, "source", None), "_record_location", None)
    if place_of is not None:
        with suppressed():
            where, record = place_of(record)
    return [f"from record {record} of {where}" + (f" (epoch {epoch})" if epoch else "")]


def _records_of_inputs(node: MapNode, index: int) -> list[str]:
    """Note lines with the records, or the elements, that element `index` of a stage is made of."""
    lines: list[str] = []
    with suppressed():  # a selection is the user's
        for number, at in node.inputs(index):
            if len(lines) >= _MAX_SHOWN:
                break
            parent = node.parents[number]
            if isinstance(at, int):
                lines += _records(parent, at)
            else:
                lines.append(f"from elements {at[0]} to {at[-1]} of {located(parent)}")
    return lines[:_MAX_SHOWN]
