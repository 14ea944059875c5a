"""How each sequential node runs: the one table from plan to stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grainmill._iterators import elementwise
from grainmill._iterators.batch import BatchStage
from grainmill._iterators.foreign import ForeignStage
from grainmill._iterators.read import ReadStage
from grainmill._plan import sequential as plan
from grainmill._plan.options import DatasetOptions

if TYPE_CHECKING:
    from grainmill._iterators.stage import Stage
    from grainmill._plan.node import Node


def open_stage(node: Node) -> Stage:
    """Makes the plan that ends in `node` ready to run, from its first element."""
    return _open(node, _options(node))


def _options(node: Node) -> DatasetOptions:
    """The options of a whole plan; of two that set the same, the one further down wins."""
    options = DatasetOptions()
    for above in node.walk():
        if isinstance(above, plan.WithOptions):
            options = options.merge(above.options)
    return options


def _open(node: Node, options: DatasetOptions) -> Stage:
    try:
        make = _STAGES[type(node)]
    except KeyError:
        raise TypeError(f"{node} can not be iterated over") from None
    return make(node, options)


def _parent(node: Node, options: DatasetOptions) -> Stage:
    return _open(node.parent, options)


def _parents(node: Node, options: DatasetOptions) -> list[Stage]:
    return [_open(parent, options) for parent in node.parents]


_STAGES: dict[type[Node], Callable[[Any, DatasetOptions], Stage]] = {
    plan.Read: ReadStage,
    plan.Foreign: lambda node, _: ForeignStage(iter(node.dataset)),
    plan.Map: lambda node, o: elementwise.MapStage(node, _parent(node, o)),
    plan.MapWithIndex: lambda node, o: elementwise.MapWithIndexStage(node, _parent(node, o)),
    plan.RandomMap: lambda node, o: elementwise.RandomMapStage(node, _parent(node, o)),
    plan.Filter: lambda node, o: elementwise.FilterStage(node, _parent(node, o), o),
    plan.Batch: lambda node, o: BatchStage(node, _parent(node, o)),
    plan.Seed: _parent,
    plan.WithOptions: _parent,
}
