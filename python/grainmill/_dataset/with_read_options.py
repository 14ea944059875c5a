"""The same plan with other options for its readers, for runs that only look at elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grainmill._iterators.read import Read, read
from grainmill._plan.deep_pickling import each_once
from grainmill._plan.node import MapNode, Node

if TYPE_CHECKING:
    from grainmill._plan.options import ReadOptions


def with_read_options(node: Node, options: ReadOptions, *, in_caller: bool = False) -> Node:
    """The plan that ends in `node`, all of whose readers have `options`.

    Args:
        node: A sequential plan.
        options: The options.
        in_caller: Whether to leave out the stages that start threads or processes.
    """
    replaced: dict[int, Node] = {}
    for step in each_once(node, _parents_to_replace):  # as there may be thousands in a row
        parents = tuple(replaced[id(parent)] for parent in _parents_to_replace(step))
        if isinstance(step, Read):
            replaced[id(step)] = dataclasses.replace(step, options=options)
        elif isinstance(step, MapNode):  # a `MapDataset` where an `IterDataset` is expected
            replaced[id(step)] = read(step, options)
        elif in_caller and step.prefetches:
            (replaced[id(step)],) = parents
        else:
            replaced[id(step)] = step.over(parents) if parents else step
    return replaced[id(node)]


def _parents_to_replace(step: Node) -> tuple[Node, ...]:
    return () if isinstance(step, Read | MapNode) else step.parents
