"""The records that a sampler selects, as a source; functions of elements, applied to records."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from grainmill._dataset.iter_dataset import IterDataset, node_of
from grainmill._dataset.iterator import DatasetIterator, get_next_index, set_next_index
from grainmill._dataset.map_dataset import MapDataset
from grainmill._evaluate.batches.stack import stack
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.fused_blocks import checked_block
from grainmill._evaluate.program import PendingElements
from grainmill._interrupts import raise_interrupt
from grainmill._loader.record import Record, RecordMetadata
from grainmill._loader.samplers import metadata_of
from grainmill._plan import transforms
from grainmill._plan.node import block_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.program import Program


class SampledRecords:
    """The records of all shards, by position in the order, with the sampler's metadata.

    Where a sampler without a length raises `IndexError`, the record is an end marker.

    Args:
        sampler: Maps positions to records of `data_source`.
        data_source: Anything with indexing.
        with_rng: Whether the sampler's generators are needed; creating them takes time.
    """

    def __init__(self, sampler: Any, data_source: Any, *, with_rng: bool) -> None:
        self._sampler = sampler
        self._source = data_source
        self._with_rng = with_rng
        self._program: Program | None = None

    def __len__(self) -> int:
        return len(self._sampler) if hasattr(self._sampler, "__len__") else sys.maxsize

    def __getitem__(self, index: int) -> Any:
        (record,) = self.__getitems__([index])
        return record

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records at `indices`, read as one block."""
        found = self._metadata(indices)
        data = self._read([metadata.record_key for metadata in found])
        return _records_of(found, data, len(indices))

    def _record_location(self, index: int) -> tuple[str, int]:
        """The data source or file that the record at `index` is in, and its index there."""
        key = self._sampler[index].record_key
        place_of = getattr(self._source, "_record_location", None)
        if place_of is not None:
            place: tuple[str, int] = place_of(key)
            return place
        return f"`{type(self._source).__name__}`", key

    def _metadata(self, indices: Sequence[int]) -> list[RecordMetadata]:
        found = metadata_of(self._sampler, indices, with_rng=self._with_rng)
        if found is not None:
            return found
        found = []
        for index in indices:
            try:
                found.append(self._sampler[index])
            except IndexError as failure:
                raise_interrupt(failure)
                if hasattr(self._sampler, "__len__"):
                    raise
                break
        return found

    def _read(self, keys: Sequence[Any]) -> Sequence[Any]:
        source = self._source
        if not _can_be_read_by_blocks(source) or not _all_inside(keys, len(source)):
            return [source[key] for key in keys]
        evaluated = self._opened().run_at(np.array(keys, np.int64))
        if evaluated.failure is not None:
            raise evaluated.failure
        return evaluated.elements

    def _opened(self) -> Program:
        if self._program is None:
            source = self._source
            dataset = source if isinstance(source, MapDataset) else MapDataset.source(source)
            self._program = compiled(node_of(dataset))
        return self._program

    @property
    def _waits_for_storage(self) -> bool:
        """Whether reads should be started ahead of their use; see `PrefetchedObjectSource`."""
        return _can_be_read_by_blocks(self._source) and self._opened().waits_for_storage

    def _start_reads(self, indices: Sequence[int]) -> _PendingRecords:
        """Starts reading the records at `indices`.

        Raises:
            IndexError: The source itself must accept or refuse a key.
        """
        found = self._metadata(indices)
        keys: list[Any] = [metadata.record_key for metadata in found]
        if not _all_inside(keys, len(self._source)):
            raise IndexError("a key is out of range")
        reads = PendingElements(self._opened(), np.array(keys, np.int64)).start()
        return _PendingRecords(len(indices), found, reads)

    def _finish_reads(self, pending: _PendingRecords) -> list[Any]:
        """The records that `_start_reads` was called for."""
        evaluated = pending.reads()
        if evaluated.failure is not None:
            raise evaluated.failure
        return _records_of(pending.metadata, evaluated.elements, pending.num_requested)

    @property
    def _reads_lists(self) -> bool:
        """Whether the source reads lists; having `__getitems__` here does not show that."""
        return _can_be_read_by_blocks(self._source) and self._opened().reads_lists

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_program": None}


class _PendingRecords(NamedTuple):
    """Records that are being read.

    Attributes:
        num_requested: How many were requested.
        metadata: That of those which the sampler has.
        reads: Their reads.
    """

    num_requested: int
    metadata: list[RecordMetadata]
    reads: PendingElements

    def wait(self) -> None:
        """Waits for the reads."""
        self.reads.wait()


def _records_of(
    found: Sequence[RecordMetadata], data: Sequence[Any], count: int
) -> list[Record[Any] | _End]:
    """`count` records, those after the last that the sampler has found as end markers."""
    records: list[Any] = [
        Record(metadata.remove_record_key(), element)
        for metadata, element in zip(found, data, strict=True)
    ]
    return records + [END] * (count - len(records))


def _can_be_read_by_blocks(source: Any) -> bool:
    return isinstance(source, MapDataset) or hasattr(type(source), "__getitems__")


def _all_inside(keys: Sequence[Any], length: int) -> bool:
    """Whether all `keys` are valid indices; the source itself must accept or refuse others."""
    return all(isinstance(key, int | np.integer) and 0 <= key < length for key in keys)


class _End:
    """The marker in place of the records behind the end of the order."""

    def __reduce__(self) -> str:
        return "END"


END: Final = _End()


class UntilEnd(IterDataset[Any]):
    """Records up to the first end marker."""

    def __iter__(self) -> DatasetIterator[Any]:
        return _UntilEndIterator(self._parent.__iter__())


class _UntilEndIterator(DatasetIterator[Any]):
    """Stops before the first end marker."""

    def __next__(self) -> Any:
        record = next(self._parent)
        if record is END:
            set_next_index(self._parent, get_next_index(self._parent) - 1)
            raise StopIteration
        return record

    def get_state(self) -> dict[str, Any]:
        """See `DatasetIterator.get_state`."""
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `DatasetIterator.set_state`."""
        self._parent.set_state(state)


class _OfData:
    """A function of an element, called on the element of a record.

    Attributes:
        __wrapped__: The user's transform, which messages name instead of this object.
    """

    def __init__(self, function: Callable[..., Any], transform: Any) -> None:
        self._function = function
        self.__wrapped__ = transform


class MapData(_OfData):
    """The record with its element replaced by the function's result."""

    def __call__(self, record: Record[Any]) -> Record[Any]:
        return Record(record.metadata, self._function(record.data))

    @property
    def map_block(self) -> Callable[[list[Record[Any]]], list[Record[Any]]] | None:
        """The transform's function of a block, called on the elements of records, if it has one."""
        return None if block_function(self.__wrapped__) is None else self._map_block

    @property
    def _costs_by_element(self) -> bool:
        return bool(getattr(self.__wrapped__, "_costs_by_element", False))

    def _map_block(self, records: list[Record[Any]]) -> list[Record[Any]]:
        block: Any = block_function(self.__wrapped__)
        data = checked_block(block([record.data for record in records]), len(records), block)
        return [Record(record.metadata, own) for record, own in zip(records, data, strict=True)]


class RandomMapData(_OfData):
    """The record with another element in it, computed with the record's generator.

    If the same record is passed again, because of a failure downstream, its generator is reset.
    """

    def __init__(self, function: Callable[..., Any], transform: Any) -> None:
        super().__init__(function, transform)
        self._last: tuple[RecordMetadata | None, Any] = (None, None)

    def __call__(self, record: Record[Any]) -> Record[Any]:
        metadata = record.metadata
        if metadata.rng is not None:
            last, state = self._last
            if last is metadata:
                metadata.rng.bit_generator.state = state
            else:
                self._last = (metadata, metadata.rng.bit_generator.state)
        return Record(metadata, self._function(record.data, metadata.rng))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": (None, None)}


class FilterData(_OfData):
    """Whether the record's element passes the filter."""

    def __call__(self, record: Record[Any]) -> bool:
        return bool(self._function(record.data))


class BatchData:
    """One record for a batch of records, with the metadata of the last."""

    def __init__(self, batch_fn: Callable[[list[Any]], Any] | None) -> None:
        self._batch_fn = batch_fn

    def __call__(self, records: Sequence[Record[Any]]) -> Record[Any]:
        data = [record.data for record in records]
        return Record(records[-1].metadata, stack(data, batch_fn=self._batch_fn))


class SplitData(transforms.FlatMap):
    """A record for each element that a `FlatMap` returns for a record's element.

    If generators are needed downstream, each gets its own, derived from the record's.
    """

    def __init__(self, transform: transforms.FlatMap, *, with_rng: bool) -> None:
        self.max_fan_out = transform.max_fan_out
        self._transform = transform
        self._with_rng = with_rng

    def flat_map(self, element: Record[Any]) -> list[Record[Any]]:
        """Returns the records."""
        metadata = element.metadata
        elements = self._transform.flat_map(element.data)
        if not self._with_rng or metadata.rng is None:
            return [Record(metadata, data) for data in elements]
        bits: Any = metadata.rng.bit_generator
        return [
            Record(
                RecordMetadata(metadata.index, None, np.random.Generator(bits.jumped(number))), data
            )
            for number, data in enumerate(elements, start=1)
        ]


def data_of(record: Record[Any]) -> Any:
    """The element of a record."""
    return record.data
