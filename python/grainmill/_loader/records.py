"""The records a sampler chooses, as a source, and functions of elements as functions of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grainmill._dataset.iter_dataset import IterDataset, node_of
from grainmill._dataset.iterator import DatasetIterator, get_next_index, set_next_index
from grainmill._dataset.map_dataset import MapDataset
from grainmill._evaluate.program import Program
from grainmill._evaluate.stack import shared_arena, stack
from grainmill._loader.record import Record, RecordMetadata
from grainmill._plan import transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class SampledRecords:
    """By place in the order of all shards: the record there, with what its sampler says of it.

    Where the sampler does not know its length and raises `IndexError`, there is an end marker.

    Args:
        sampler: Says by place which record of `data_source` it is.
        data_source: Anything with indexing.
        with_rng: Whether the sampler's generators are needed; they take time to make.
    """

    def __init__(self, sampler: Any, data_source: Any, *, with_rng: bool) -> None:
        self._sampler = sampler
        self._source = data_source
        self._with_rng = with_rng
        self._program: Program | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: int) -> Any:
        (record,) = self.__getitems__([index])
        return record

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records at `indices`, read as one block."""
        chosen = self._chosen(indices)
        data = self._read([metadata.record_key for metadata in chosen])
        records: list[Any] = [
            Record(metadata.remove_record_key(), element)
            for metadata, element in zip(chosen, data, strict=True)
        ]
        return records + [END] * (len(indices) - len(records))

    def _chosen(self, indices: Sequence[int]) -> list[RecordMetadata]:
        block = getattr(self._sampler, "block", None)
        if block is not None:
            found: list[RecordMetadata] = block(indices, with_rng=self._with_rng)
            return found
        found = []
        for index in indices:
            try:
                found.append(self._sampler[index])
            except IndexError:
                if hasattr(self._sampler, "__len__"):
                    raise
                break
        return found

    def _read(self, keys: Sequence[Any]) -> Sequence[Any]:
        source = self._source
        if not _can_be_read_by_blocks(source) or not _all_inside(keys, len(source)):
            return [source[key] for key in keys]
        if self._program is None:
            planned = source if isinstance(source, MapDataset) else MapDataset.source(source)
            self._program = Program(node_of(planned))
        made = self._program.run_at(np.array(keys, np.int64))
        if made.failure is not None:
            raise made.failure
        return made.elements

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_program": None}


def _can_be_read_by_blocks(source: Any) -> bool:
    return isinstance(source, MapDataset) or hasattr(type(source), "__getitems__")


def _all_inside(keys: Sequence[Any], length: int) -> bool:
    """Whether `keys` are places in the source; others are the source's own to judge."""
    return all(isinstance(key, int | np.integer) and 0 <= key < length for key in keys)


class _End:
    """Stands where a record would if the order had not ended."""

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
        __wrapped__: What the user gave, after which messages name this.
    """

    def __init__(self, function: Callable[..., Any], transform: Any) -> None:
        self._function = function
        self.__wrapped__ = transform


class MapData(_OfData):
    """The record with another element in it."""

    def __call__(self, record: Record[Any]) -> Record[Any]:
        return Record(record.metadata, self._function(record.data))


class RandomMapData(_OfData):
    """The record with another element in it, made with the record's generator.

    A record that comes again, as after a failure further on, meets its generator as it was.
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
    """Whether the record's element stays."""

    def __call__(self, record: Record[Any]) -> bool:
        return bool(self._function(record.data))


class BatchData:
    """One record of several, with what is known of the last."""

    def __init__(self, batch_fn: Callable[[Sequence[Any]], Any] | None) -> None:
        self._batch_fn = batch_fn

    def __call__(self, records: Sequence[Record[Any]]) -> Record[Any]:
        data = [record.data for record in records]
        batch_fn = self._batch_fn
        batch = stack(data, shared_arena()) if batch_fn is None else batch_fn(data)
        return Record(records[-1].metadata, batch)


class SplitData(transforms.FlatMap):
    """A record for each piece of a record's element.

    Where generators are needed later, each piece has its own, which follows from the record's.
    """

    def __init__(self, transform: transforms.FlatMap, *, with_rng: bool) -> None:
        self.max_fan_out = transform.max_fan_out
        self._transform = transform
        self._with_rng = with_rng

    def flat_map(self, element: Record[Any]) -> list[Record[Any]]:
        """Returns the pieces."""
        of_all = element.metadata
        pieces = self._transform.flat_map(element.data)
        if not self._with_rng or of_all.rng is None:
            return [Record(of_all, piece) for piece in pieces]
        bits: Any = of_all.rng.bit_generator
        return [
            Record(
                RecordMetadata(of_all.index, None, np.random.Generator(bits.jumped(number))), piece
            )
            for number, piece in enumerate(pieces, start=1)
        ]


def data_of(record: Record[Any]) -> Any:
    """The element of a record."""
    return record.data
