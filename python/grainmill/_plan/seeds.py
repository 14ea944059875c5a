"""Seeds that random stages derive from `ds.seed(...)` upstream."""

from __future__ import annotations

import operator
from collections import deque
from typing import TYPE_CHECKING

from grainmill._native import derived_seed as seed_from_upstream
from grainmill._plan.arguments import checked_integer

if TYPE_CHECKING:
    from grainmill._plan.node import Node

MAX_SHUFFLE_SEED = 2**32


def derived_seed(node: Node) -> int | None:
    """The 32-bit seed a random `node` derives from the seeds upstream, `None` if there are none.

    Parents are visited breadth first; each branch contributes its nearest seed together
    with its distance, so two stages downstream of one seed derive different ones.
    """
    seeds: list[tuple[int, int]] = []
    seeded = _seeded(node)
    pending = deque((parent, 1) for parent in node.parents if id(parent) in seeded)
    while pending:
        upstream, distance = pending.popleft()
        if upstream.own_seed is not None:
            seeds.append((operator.index(upstream.own_seed), distance))
        elif upstream.passes_seeds:
            pending.extend((p, distance + 1) for p in upstream.parents if id(p) in seeded)
    return seed_from_upstream(seeds) if seeds else None


def _seeded(node: Node) -> set[int]:
    """Which nodes set a seed or pass one on, by `id`: many ways may lead to those that do not."""
    found: set[int] = set()
    for upstream in node.walk_up():
        passed = upstream.passes_seeds and any(id(p) in found for p in upstream.parents)
        if passed or upstream.own_seed is not None:
            found.add(id(upstream))
    return found


def checked_seed(seed: int) -> int:
    """Returns `seed` as an `int`.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is negative.
    """
    return checked_integer(seed, "seed", minimum=0)


def checked_shuffle_seed(seed: int) -> int:
    """Returns `seed` as an `int`.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` does not fit in 32 bits.
    """
    seed = checked_integer(seed, "seed")
    if not 0 <= seed < MAX_SHUFFLE_SEED:
        raise ValueError(f"Seed must be an integer between 0 and 2**32-1 (got seed={seed}).")
    return seed
