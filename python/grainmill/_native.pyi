"""Types of the compiled module."""

from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "GrainmillError",
    "MixSchedule",
    "Permutation",
    "Resolver",
    "derived_seed",
    "index_shuffle",
    "philox_key",
    "window_order",
]

class GrainmillError(RuntimeError): ...

# --- order ---------------------------------------------------------------------------------

@final
class Permutation:
    def __new__(cls, num_records: int, seed: int, rounds: int = 4) -> Self: ...
    def apply(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def block(self, start: int, count: int) -> npt.NDArray[np.int64]: ...
    def __len__(self) -> int: ...

@final
class MixSchedule:
    def __new__(cls, proportions: Sequence[int]) -> Self: ...
    def choose(
        self, start: int, count: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]: ...

@final
class Resolver:
    def __new__(cls, tree: tuple[Any, ...]) -> Self: ...
    def resolve(
        self, index: npt.NDArray[np.int64]
    ) -> dict[int, tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]]: ...
    def resolve_range(
        self, start: int, count: int
    ) -> dict[int, tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]]: ...

def index_shuffle(index: int, max_index: int, seed: int, rounds: int) -> int: ...
def window_order(window_len: int, seed: int) -> npt.NDArray[np.int64]: ...
def philox_key(seed: int) -> tuple[int, int]: ...
def derived_seed(seeds: Sequence[tuple[int, int]]) -> int: ...

# --- end of order --------------------------------------------------------------------------
