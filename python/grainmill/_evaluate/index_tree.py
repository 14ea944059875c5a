"""Index trees: how the engine sees the stages that only rearrange elements."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan.node import MapNode

Tree: TypeAlias = tuple[Any, ...]


def joined(node: plan.Mix | plan.Concatenate, trees: Sequence[Tree]) -> Tree:
    """The tree of a mixture or concatenation over those of its parents."""
    if isinstance(node, plan.Mix):
        return ("mix", node.proportions, tuple(trees))
    lengths = tuple([parent.length for parent in node.parents])  # type: ignore[attr-defined]
    return ("concatenate", lengths, tuple(trees))


def _parent_len(node: MapNode) -> int:
    return random_access(node.parents[0]).length


def _shuffle(node: plan.Shuffle, upstream: Tree) -> Tree:
    return ("shuffle", node.length, node.seed, upstream)


def _window_shuffle(node: plan.WindowShuffle, upstream: Tree) -> Tree:
    return ("window_shuffle", node.length, node.window_size, node.seed, upstream)


def _slice(node: plan.Slice, upstream: Tree) -> Tree:
    return ("slice", node.start, node.step, node.length, _parent_len(node), upstream)


def _take(node: plan.Take, upstream: Tree) -> Tree:
    indices = np.array([operator.index(i) for i in node.indices], np.int64)
    return ("take", indices, _parent_len(node), upstream)


def _repeat(node: plan.Repeat, upstream: Tree) -> Tree:
    return upstream if node.reseed_each_epoch else ("wrap", _parent_len(node), upstream)


# Every stage that only rearranges indices, with a function from its parent's tree to its own.
INDEX_STAGES: dict[type[MapNode], Callable[[Any, Tree], Tree]] = {
    plan.Shuffle: _shuffle,
    plan.WindowShuffle: _window_shuffle,
    plan.Slice: _slice,
    plan.Take: _take,
    plan.Repeat: _repeat,
    plan.Seed: lambda _, upstream: upstream,
}
