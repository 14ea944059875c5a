"""The random generators of random maps, for user-defined stages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from grainmill._evaluate.rng import IndexedGenerators

if TYPE_CHECKING:
    import numpy as np


class RngPool:
    """The random generator for each index that `random_map` uses, for your own stages.

    They are Philox generators keyed by the seed, with the op seed and the index in their counter
    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so generators of
    different indices do not overlap.

    Args:
        seed: Any non-negative integer.

    Example:
        >>> pool = grain.experimental.RngPool(seed=0)
        >>> round(pool.acquire_rng(2).uniform(), 3), round(pool.acquire_rng(2).uniform(), 3)
        (0.85, 0.85)
    """

    def __init__(self, seed: int) -> None:
        self._generators = functools.cache(lambda op_seed: IndexedGenerators(seed, op_seed))

    def acquire_rng(self, index: int, *, op_seed: int = 0) -> np.random.Generator:
        """Returns the generator of `index`, in its initial state.

        Args:
            index: Any non-negative integer below 2**64.
            op_seed: Distinguishes stages that use the same seed; 0 in `random_map`.

        Raises:
            ValueError: The seed of the pool is negative.
            OverflowError: `index` is negative.
        """
        return self._generators(op_seed)(index)

    def release_rng(self, rng: np.random.Generator) -> None:
        """Does nothing: generators are not reused.

        Args:
            rng: A generator that is no longer needed.
        """
