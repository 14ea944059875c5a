"""Rows of files with columns: elements are dicts, batches are filled from the columns."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.element_sources import ElementSource, Indices, one_by_one
from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.stack import SLOT_BYTES, shared_arena

if TYPE_CHECKING:
    from grainmill._native import ParquetFiles

_dtype = functools.cache(np.dtype)


class RowSource(ElementSource[Indices]):
    """Rows of files that the engine reads.

    Args:
        files: The files.

    Attributes:
        files: The files.
    """

    runs_user_code = False

    def __init__(self, files: ParquetFiles) -> None:
        self.files = files
        self.mean_byte_len = files.mean_byte_len
        self._has_batches = True

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`; up to the first row that cannot be read."""
        try:
            return Evaluated(self.files.read(pending), None)
        except Exception:
            pass  # reading one by one finds the failing row
        return one_by_one(self.files.read_one, pending.tolist())

    def batch(self, index: Indices) -> dict[str, Any] | None:
        """The rows at `index` as a batch, if each column is an array of numbers."""
        if not self._has_batches:
            return None
        try:
            batch = self.files.read_batch(index, _allocated)
        except Exception:
            return None  # reading the elements finds the failing row
        # Rows that do not form a batch would be read twice.
        self._has_batches = batch is not None
        return batch


def _allocated(shape: tuple[int, ...], dtype_name: str) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = _dtype(dtype_name)
    if math.prod(shape) * dtype.itemsize < SLOT_BYTES:
        return np.empty(shape, dtype)
    return shared_arena().array(shape, dtype)
