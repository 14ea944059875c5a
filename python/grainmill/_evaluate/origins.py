"""Where the elements of a plan come from, by arithmetic alone: source, record and epoch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grainmill._native import Resolver
from grainmill._plan import random_access as plan
from grainmill._plan.node import Tree, random_access

if TYPE_CHECKING:
    from grainmill._evaluate.chain import Columns
    from grainmill._evaluate.sources.element_sources import Indices
    from grainmill._plan.node import MapNode, Node

_COLUMN = 0


class Origins(NamedTuple):
    """Where elements come from, one entry for each.

    Attributes:
        source: The number of the source, in the order of the plan.
        record: The record's index in that source.
        epoch: The number of passes over the source before; 0 for a `repeat` that does not
            reseed.
    """

    source: Indices
    record: Indices
    epoch: Indices


class OriginTree:
    """Computes the origins of the elements of one plan.

    Elements that a function drops or fails for have origins, too. The origin of an element of
    `flat_map` is that of its input. Batches, tuples of `zip` and selected elements have their stage
    as source, and as record their index in its epoch.

    Attributes:
        sources: The nodes of the source numbers.
    """

    def __init__(self, node: Node) -> None:
        sources: list[MapNode] = []
        num_uses = Counter(id(parent) for each in node.walk() for parent in each.parents)
        trees = dict.fromkeys(key for key, count in num_uses.items() if count > 1)
        self._resolver = Resolver(_tree(random_access(node), sources, trees))
        self.sources = tuple(sources)
        lengths = [source.length if _has_epochs(source) else plan.ENDLESS for source in sources]
        self._lengths = np.array(lengths, np.int64)

    def origins(self, start: int, count: int) -> Origins:
        """Where the elements at `start, ..., start + count - 1` come from."""
        return self._of(self._resolver.resolve_range(start, count))

    def origins_at(self, index: Indices) -> Origins:
        """Where the elements at `index` come from."""
        return self._of(self._resolver.resolve(index))

    def _of(self, columns: Columns) -> Origins:
        _, index, parts = columns.get(_COLUMN, (None, np.empty(0, np.int64), None))
        source = np.zeros_like(index) if parts is None else parts.astype(np.int64)
        length = self._lengths[source]
        epoch = index // length
        return Origins(source, index - epoch * length, epoch)


def _has_epochs(source: MapNode) -> bool:
    """Whether positions beyond the length start over; not if the length is unknown."""
    return source.wraps if isinstance(source, plan.Source) else True


def _shared_tree(node: Node, sources: list[MapNode], trees: dict[int, Tree | None]) -> Tree:
    if id(node) not in trees:
        return _tree(node, sources, trees)
    tree = trees[id(node)]
    if tree is None:
        tree = trees[id(node)] = ("shared", _tree(node, sources, trees))
    return tree


def _tree(node: Any, sources: list[MapNode], trees: dict[int, Tree | None]) -> Tree:
    """The index tree of `node`, in which all sources share one column.

    `trees` has those of nodes that several stages read, by their `id`, once they are known.
    """
    stages = []
    tree: Tree
    while node.rearranges or isinstance(node, plan.Map | plan.FlatMap):
        stages.append(node)
        (node,) = node.parents
    if node.joins:
        tree = node.tree(*[_shared_tree(parent, sources, trees) for parent in node.parents])
    else:
        tree = ("leaf", _COLUMN, len(sources))
        sources.append(node)
    for stage in reversed(stages):
        if isinstance(stage, plan.FlatMap):
            tree = ("divide", stage.transform.max_fan_out, tree)
        elif stage.rearranges:
            tree = stage.tree(tree)
    return tree
