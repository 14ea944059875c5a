"""The same plan with other options for its readers, for runs that only look at elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grainmill._iterators.read import Read, read
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
    pending = [(node, False)]
    while pending:  # parents first, as there may be thousands in a row
        step, parents_done = pending.pop()
        if id(step) in replaced:
            continue
        if isinstance(step, Read):
            replaced[id(step)] = dataclasses.replace(step, options=options)
        elif isinstance(step, MapNode):  # a `MapDataset` where an `IterDataset` is expected
            replaced[id(step)] = read(step, options)
        elif not parents_done:
            pending.append((step, True))
            pending += [(parent, False) for parent in step.parents]
        elif in_caller and step.prefetches:
            replaced[id(step)] = replaced[id(step.parent)]
        elif step.parents:
            replaced[id(step)] = step.over(tuple(replaced[id(p)] for p in step.parents))
        else:
            replaced[id(step)] = step
    return replaced[id(node)]
