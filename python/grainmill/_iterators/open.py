"""Opens the stages of a plan."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grainmill._evaluate.context import Context
from grainmill._iterators.base.node import SequentialNode
from grainmill._iterators.read import read
from grainmill._iterators.settings import options_of
from grainmill._plan.node import MapNode
from grainmill._stats.meters import Recorder
from grainmill._stats.numbering import numbered

if TYPE_CHECKING:
    from grainmill._iterators.base.stage import Stage
    from grainmill._plan.node import Node


def open_stage(node: Node, recorder: Recorder | None = None) -> Stage:
    """Opens the plan that ends in `node` at its first element.

    Args:
        node: The plan's last node.
        recorder: Takes the times of its stages; a new one if `None`.
    """
    return open_plan(node, Context(options_of(node), recorder=recorder or Recorder()))


def open_plan(node: Node, context: Context) -> Stage:
    """Opens a plan that one thread pulls from; its readers share threads and memory."""
    return open_node(node, context.on_other_thread().shared_by(_num_readers(node)))


def open_node(node: Node, context: Context) -> Stage:
    """Opens a step of a plan with all those upstream of it."""
    while node.is_setting:
        node = node.parent
    # A `MapDataset` where an `IterDataset` is expected; the plan has no node of `to_iter_dataset`
    # for it, since derived seeds depend on the number of nodes.
    if isinstance(node, MapNode):
        node = read(node)
    if not isinstance(node, SequentialNode):
        raise TypeError(f"nothing runs {node}")
    if node.runner is None:
        stage = node.open(context)
    else:
        upstream = context.on_other_thread() if node.has_own_thread else context
        stage = node.runner(node, *[open_node(parent, upstream) for parent in node.parents])
    if stage.node is None:
        stage.node, stage.recorder = node, context.recorder
    return stage


def open_part(node: Node, output: Node, context: Context) -> Stage:
    """Opens a dataset that the stage of `node` reads, recorded with its others as one.

    Args:
        node: The node whose datasets are recorded together.
        output: The dataset's last node.
        context: The context of `node`.
    """
    parts = context.recorder.parts(node)
    parts.opened(output, [(stage.number, stage.node) for stage in numbered(output)])
    return open_plan(output, dataclasses.replace(context, recorder=parts))


def _num_readers(node: Node) -> int:
    """How many stages that read random-access plans are open at once, for the plan in `node`."""
    count = 0
    pending = [node]
    while pending:
        upstream = pending.pop()
        readers = upstream.num_readers if isinstance(upstream, SequentialNode) else 1
        if readers is None:
            pending += upstream.parents
        else:
            count += readers
    return count
