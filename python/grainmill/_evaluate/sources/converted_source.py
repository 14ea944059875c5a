"""Elements that a source makes of the records of its files, which are prefetched as records are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.sources.element_sources import ElementSource, Indices, one_by_one
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
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
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return self._records.waits_for_storage

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> ConvertedRequest:
        """See `ElementSource.request`."""
        return index, self._records.request(index, datasets)

    def start(self, request: ConvertedRequest) -> tuple[Indices, Any]:
        """See `ElementSource.start`."""
        index, numbers = request
        return index, self._records.start(numbers)

    def wait(self, pending: tuple[Indices, Any]) -> tuple[Indices, Any]:
        """See `ElementSource.wait`."""
        index, reads = pending
        return index, self._records.wait(reads)

    def finish(self, pending: tuple[Indices, Any]) -> Evaluated:
        """See `ElementSource.finish`."""
        index, reads = pending
        return self._converted(index, self._records.finish(reads))

    def read(self, request: ConvertedRequest) -> Evaluated:
        """See `ElementSource.read`."""
        index, numbers = request
        return self._converted(index, self._records.read(numbers))

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
