"""The random generator of each element, a function of a seed and an index alone."""

from __future__ import annotations

import sys
from sys import getrefcount
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from grainmill._evaluate.philox_key import PhiloxKey

# A generator, its bit generator, a state of that as of a new one, and the counter in this state.
_Reusable: TypeAlias = "tuple[np.random.Generator, np.random.BitGenerator, Any, list[int]]"


class IndexedGenerators:
    """Makes `Generator(Philox(key(seed), counter=[0, 0, op_seed, index]))`.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Streams of
    different indices do not overlap below 2**64 draws each.

    Creating a generator takes longer than drawing some numbers from it. So one that nobody refers
    to any more is returned again, in the state of a new one.
    """

    def __init__(self, seed: int, op_seed: int = 0) -> None:
        self._seed = seed
        # Computed by the first call: a plan may have thousands, few of which are called soon.
        self._key: PhiloxKey | None = None
        self._op_seed = op_seed
        self._made: list[_Reusable] = []  # the last one; several where threads call
        self._num_own_references = 0  # to a generator that only `_made` refers to

    def __call__(self, index: int) -> np.random.Generator:
        """A generator for `index`, in its initial state.

        Raises:
            OverflowError: `index` is negative.
        """
        if index < 0:
            raise OverflowError(f"random maps need a non-negative index, got {index}")
        try:
            made = self._made.pop()  # other threads do not find it meanwhile
            if _num_references(made) == self._num_own_references:
                generator, bits, state, counter = made
                counter[3] = index
                bits.state = state
                self._made.append(made)
                return generator
        except (IndexError, OverflowError) as failure:
            raise_interrupt(failure)
        return self._new(index)

    def _new(self, index: int) -> np.random.Generator:
        if self._key is None:
            # `numpy.random`, which it imports, takes a tenth of the time that the package does.
            from grainmill._evaluate.philox_key import PhiloxKey  # noqa: PLC0415

            self._key = PhiloxKey(self._seed)
        made = _made(self._key, (0, 0, self._op_seed, index))
        if _counts_references():
            self._num_own_references = _num_references(made)
            self._made.append(made)
        return made[0]


def _made(key: Any, counter: tuple[int, ...]) -> _Reusable:
    bits = np.random.Philox(key, counter=np.array(counter, np.uint64))
    words = list(counter)
    state = {
        "bit_generator": "Philox",
        "state": {"counter": words, "key": key.words},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits), bits, state, words


def _num_references(made: _Reusable) -> int:
    """How many references there are to a generator and its bit generator."""
    return getrefcount(made[0]) + getrefcount(made[1])


def _counts_references() -> bool:
    """Whether an object is certainly unused where the interpreter counts no other references."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
