"""Random generators by index, as random maps use them, for stages of a user's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from grainmill._evaluate.rng import IndexedGenerators

if TYPE_CHECKING:
    import numpy as np


class RngPool:
    """Generators that are functions of (seed, index, op seed) alone.

    Args:
        seed: Any non-negative integer.
    """

    def __init__(self, seed: int) -> None:
        self._generators = functools.cache(lambda op_seed: IndexedGenerators(seed, op_seed))

    def acquire_rng(self, index: int, *, op_seed: int = 0) -> np.random.Generator:
        """Returns the generator of `index`, at its beginning."""
        return self._generators(op_seed)(index)

    def release_rng(self, rng: np.random.Generator) -> None:
        """Takes note that `rng` is done with; generators are not reused, so nothing happens."""
