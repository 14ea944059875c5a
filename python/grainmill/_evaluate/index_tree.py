"""What the stages of a plan that only rearrange elements are to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan.node import MapNode

Tree: TypeAlias = tuple[Any, ...]


def joined(node: plan.Mix | plan.Concatenate, trees: Sequence[Tree]) -> Tree:
    """The tree of a stage that takes turns between its parents, over theirs."""
    if isinstance(node, plan.Mix):
        return ("mix", node.proportions, tuple(trees))
    lengths = tuple([parent.length for parent in node.parents])  # type: ignore[attr-defined]
    return ("concatenate", lengths, tuple(trees))


def _parent_len(node: MapNode) -> int:
    return random_access(node.parents[0]).length


def _shuffle(node: plan.Shuffle, below: Tree) -> Tree:
    return ("shuffle", node.length, node.seed, below)


def _window_shuffle(node: plan.WindowShuffle, below: Tree) -> Tree:
    return ("window_shuffle", node.length, node.window_size, node.seed, below)


def _slice(node: plan.Slice, below: Tree) -> Tree:
    return ("slice", node.start, node.step, node.length, _parent_len(node), below)


def _take(node: plan.Take, below: Tree) -> Tree:
    indices = np.array([int(i) for i in node.indices], np.int64)
    return ("take", indices, _parent_len(node), below)


def _repeat(node: plan.Repeat, below: Tree) -> Tree:
    return below if node.reseed_each_epoch else ("wrap", _parent_len(node), below)


# Every stage that only rearranges indices, and its tree over that of its parent.
INDEX_STAGES: dict[type[MapNode], Callable[[Any, Tree], Tree]] = {
    plan.Shuffle: _shuffle,
    plan.WindowShuffle: _window_shuffle,
    plan.Slice: _slice,
    plan.Take: _take,
    plan.Repeat: _repeat,
    plan.Seed: lambda _, below: below,
}
