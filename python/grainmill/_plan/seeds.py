"""Seeds that random stages take from `ds.seed(...)` further up."""

from __future__ import annotations

import operator
from collections import deque
from typing import TYPE_CHECKING

from grainmill._native import derived_seed as seed_below
from grainmill._plan.arguments import checked_integer

if TYPE_CHECKING:
    from grainmill._plan.node import Node

MAX_SHUFFLE_SEED = 2**32


def derived_seed(node: Node) -> int | None:
    """The 32-bit seed a random `node` draws from the seeds above it, or `None` without any.

    Parents are visited breadth first; each branch contributes its nearest seed together
    with its distance, so two stages below one seed draw different ones.
    """
    seeds: list[tuple[int, int]] = []
    waiting = deque((parent, 1) for parent in node.parents)
    while waiting:
        above, distance = waiting.popleft()
        if above.own_seed is not None:
            seeds.append((operator.index(above.own_seed), distance))
        elif above.passes_seeds:
            waiting.extend((parent, distance + 1) for parent in above.parents)
    return seed_below(seeds) if seeds else None


def checked_shuffle_seed(seed: int) -> int:
    """Returns `seed` as an `int`.

    Raises:
        TypeError: It is no integer.
        ValueError: It does not fit in 32 bits.
    """
    seed = checked_integer(seed, "seed")
    if not 0 <= seed < MAX_SHUFFLE_SEED:
        raise ValueError(f"Seed must be an integer between 0 and 2**32-1 (got seed={seed}).")
    return seed
