"""The key of a random generator, in the form in which NumPy takes it."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from grainmill._native import philox_key


class PhiloxKey(ISeedSequence):
    """Passes its key to `Philox`; otherwise NumPy gathers entropy for each generator.

    Attributes:
        words: The two 64-bit words of the key.
    """

    def __init__(self, seed: int) -> None:
        self.words = philox_key(operator.index(seed))
        self._array = np.array(self.words, np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns the two 64-bit words of the key."""
        return self._array
