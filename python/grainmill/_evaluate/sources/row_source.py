"""Rows of files with columns: elements are dicts, batches are filled from the columns."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.batches.stack import shared_arena
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.sources.element_sources import ElementSource, Indices, one_by_one
from grainmill._interrupts import raise_interrupt
from grainmill._native import allocate_rows

if TYPE_CHECKING:
    from grainmill._native import ParquetFiles, ReadQueue, RowsAhead

_dtype = functools.cache(np.dtype)


class RowSource(ElementSource[Indices]):
    """Rows of files that the engine reads, prefetched where storage is slow.

    Args:
        files: The files.
        reads: Limits the reads in flight of all sources that share it.

    Attributes:
        files: The files.
    """

    runs_user_code = False
    reads_beyond = True
    # What a row costs is its pages, which many rows may share: the files limit what is in flight.
    num_records = 0

    def __init__(self, files: ParquetFiles, reads: ReadQueue | None = None) -> None:
        self.files = files
        self._reads = reads
        self.mean_byte_len = files.mean_byte_len
        self._has_batches = True

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return self.files.is_slow

    @property
    def has_room(self) -> bool:
        """See `ElementSource.has_room`."""
        return self.files.has_room

    def started(self, request: Indices) -> RowsAhead | None:
        """See `ElementSource.started`; it is held while the rows are read, which finds them."""
        return self.files.start(request, self._reads) if self.files.is_slow else None

    def start_beyond(self, request: Indices) -> Any:
        """See `ElementSource.start_beyond`."""
        if not self.files.is_slow or not self.files.has_room_beyond:
            return None
        return self.files.start_beyond(request, self._reads)

    def read(self, request: Indices, reads: RowsAhead | None = None) -> Evaluated:
        """See `ElementSource.read`; up to the first row that cannot be read."""
        if reads is not None:
            reads.wait()
        try:
            return Evaluated(self.files.read(request, self._reads), None)
        except Exception as failure:
            raise_interrupt(failure)  # reading one by one finds the failing row
        return one_by_one(lambda at: self.files.read_one(at, self._reads), request.tolist())

    def batch(self, request: Indices) -> dict[str, Any] | None:
        """The rows as a batch, if each column is an array of numbers."""
        if not self._has_batches:
            return None
        try:
            batch = self.files.read_batch(request, _allocated, self._reads)
        except Exception as failure:
            raise_interrupt(failure)
            return None  # reading the elements finds the failing row
        # Rows that do not form a batch would be read twice.
        self._has_batches = batch is not None
        return batch


def _allocated(shape: tuple[int, ...], dtype_name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """An array for the rows of a batch."""
    return allocate_rows(shared_arena(), shape, _dtype(dtype_name))
