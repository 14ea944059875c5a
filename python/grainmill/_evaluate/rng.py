"""The random generator of each element, a function of a seed and an index alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from grainmill._evaluate.philox_key import PhiloxKey


class IndexedGenerators:
    """Makes `Generator(Philox(key(seed), counter=[0, 0, op_seed, index]))`.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Streams of
    different indices do not overlap below 2**64 draws each.
    """

    def __init__(self, seed: int, op_seed: int = 0) -> None:
        self._seed = seed
        # Computed by the first call: a plan may have thousands, few of which are called soon.
        self._key: PhiloxKey | None = None
        self._op_seed = op_seed

    def __call__(self, index: int) -> np.random.Generator:
        """A fresh generator for `index`.

        Raises:
            OverflowError: `index` is negative.
        """
        if index < 0:
            raise OverflowError(f"random maps need a non-negative index, got {index}")
        if self._key is None:
            # `numpy.random`, which it imports, takes a tenth of the time that the package does.
            from grainmill._evaluate.philox_key import PhiloxKey  # noqa: PLC0415

            self._key = PhiloxKey(self._seed)
        counter = np.array((0, 0, self._op_seed, index), np.uint64)
        key: Any = self._key
        return np.random.Generator(np.random.Philox(key, counter=counter))
