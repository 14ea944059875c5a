"""Elements that a source makes of the records of its files, which are prefetched as records are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._evaluate.batches.stack import shared_arena
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.sources.element_sources import (
    ElementSource,
    Indices,
    PendingRequest,
    one_by_one,
)
from grainmill._interrupts import raise_interrupt
from grainmill._native import allocate_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._evaluate.sources.element_sources import DatasetNumbers, FileSource


# The indices of elements, and what their records are requested by.
ConvertedRequest: TypeAlias = "tuple[Indices, Any]"


class ConvertedRecords(ElementSource[ConvertedRequest]):
    """The elements of a source with `_elements`, which holds the interpreter lock.

    Args:
        source: The source; `_elements(records, keys)` returns an element for each record.
        records: The records of its files.

    Attributes:
        files: The files.
    """

    def __init__(self, source: Any, records: FileSource) -> None:
        self._source = source
        self._records = records
        self.files = records.files
        self.mean_byte_len = records.mean_byte_len

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return self._records.may_be_slow

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> ConvertedRequest:
        """See `ElementSource.request`."""
        return index, self._records.request(index, datasets)

    def started(self, request: ConvertedRequest) -> PendingRequest | None:
        """See `ElementSource.started`."""
        return PendingRequest(self._records, request[1]).start() if self.files.is_slow else None

    def num_reads(self, request: ConvertedRequest, reads: PendingRequest) -> int:
        """See `ElementSource.num_reads`."""
        return reads.num_reads

    def read(self, request: ConvertedRequest, reads: PendingRequest | None = None) -> Evaluated:
        """See `ElementSource.read`."""
        index, numbers = request
        return self._converted(index, self._records.read(numbers) if reads is None else reads())

    @property
    def has_batches(self) -> bool:
        """Whether `batch` may return one: elements are arrays that consist of a record each."""
        return getattr(self._source, "_row", None) is not None

    def batch(self, request: ConvertedRequest) -> Any:
        """The elements as a batch; `None` on slow storage, where reads are concurrent."""
        if self.files.is_slow:
            return None
        (shape, dtype), numbers = self._source._row, request[1]  # noqa: SLF001 - for this
        batch = allocate_rows(shared_arena(), (len(numbers), *shape), dtype)
        try:
            return batch if self.files.read_rows(numbers, batch) else None
        except Exception as failure:
            raise_interrupt(failure)
            return None  # reading the elements finds the failing one

    def _converted(self, index: Indices, read: Evaluated) -> Evaluated:
        """The elements of the records that could be read, up to the first that fails."""
        records, convert = read.elements, self._source._elements  # noqa: SLF001 - sources keep it for this
        keys = index[: len(records)].tolist()
        try:
            return Evaluated(convert(records, keys), read.failure)
        except Exception as failure:
            raise_interrupt(failure)  # converting one by one finds the failing record
        result = one_by_one(lambda at: convert([records[at]], [keys[at]])[0], range(len(records)))
        return Evaluated(result.elements, result.failure or read.failure)
