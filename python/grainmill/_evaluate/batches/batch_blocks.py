"""Consecutive elements as one batch; how many elements a block has."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.prefetch import tuning
from grainmill._native import SLOT_BYTES
from grainmill._tree import branch, flatten

# About the size of a Python number.
_OBJECT_BYTES = 32
_NUMBERS = frozenset({int, float, bool, type(None)})
# The size of a longer list is estimated from this many elements.
_MAX_SAMPLED_CHILDREN = 32


def block_len(mean_byte_len: float, max_count: int, block_bytes: int = tuning.BLOCK_BYTES) -> int:
    """Elements in a block of about `block_bytes`, 1 to `max_count`."""
    if mean_byte_len <= 0:
        return max(1, max_count)
    return max(1, min(max_count, int(block_bytes / mean_byte_len)))


def byte_len(element: Any, depth: int = 4) -> int:
    """The approximate size of `element`'s leaves, down to `depth` nested containers."""
    if type(element) is np.ndarray:
        return element.nbytes
    if type(element) in _NUMBERS:
        return _OBJECT_BYTES
    if isinstance(element, (bytes, str)):
        return len(element)
    container = branch(element) if depth else None
    if container is None:
        nbytes = getattr(element, "nbytes", _OBJECT_BYTES)
        return nbytes if isinstance(nbytes, int) else _OBJECT_BYTES
    sampled = container.children[:_MAX_SAMPLED_CHILDREN]
    seen = sum(byte_len(child, depth - 1) for child in sampled)
    return seen * len(container.children) // max(1, len(sampled))


class BatchBlock:
    """Consecutive elements as one batch.

    Attributes:
        batch: The elements, stacked.
        count: How many there are.
        exact: Whether stacking any of `elements()` again gives the same values and dtypes.
    """

    __slots__ = ("batch", "count", "exact")

    def __init__(self, batch: Any, count: int, *, exact: bool) -> None:
        self.batch = batch
        self.count = count
        self.exact = exact

    def __len__(self) -> int:
        return self.count

    def elements(self) -> list[Any]:
        """The elements one by one, as views of the batch."""
        leaves, structure = flatten(self.batch)
        return [structure.unflatten([leaf[row] for leaf in leaves]) for row in range(len(self))]

    def is_small(self, batch_size: int) -> bool:
        """Whether batches of `batch_size` rows should be copied from a larger one.

        That is cheaper for small ones, but not the same with strings, whose width depends on
        the other strings of their batch.
        """
        leaves, _ = flatten(self.batch)
        return self.exact and all(
            leaf.dtype.kind not in "SU" and leaf[:1].nbytes * batch_size < SLOT_BYTES
            for leaf in leaves
        )

    def split(self, batch_size: int) -> list[BatchBlock]:
        """Copies into batches of `batch_size` rows, the last may be smaller; with 0, itself."""
        if not 0 < batch_size < self.count:
            return [self]
        leaves, structure = flatten(self.batch)
        batches: list[BatchBlock] = []
        for at in range(0, self.count, batch_size):
            stop = min(at + batch_size, self.count)
            rows = structure.unflatten([leaf[at:stop].copy() for leaf in leaves])
            batches.append(BatchBlock(rows, stop - at, exact=self.exact))
        return batches


# Blocks that can be split into whole batches, and the elements after them that form no batch.
BlockResult: TypeAlias = tuple[list[BatchBlock], Evaluated | None]
