"""TFRecord files read from begin to end, with the classes that programs derive their own from."""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._native import GrainmillError, TFRecordStream, masked_crc32c

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")


class _TFRecordReader:
    """Reads one record after the other.

    Attributes:
        _reader: The engine's stream of a file. A subclass may set it to any binary file, such as
            one in a bucket, whose `read`, `seek` and `tell` are called instead.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader: TFRecordStream | BinaryIO = TFRecordStream(os.fspath(path))

    def __next__(self) -> bytes:
        """Returns the next record.

        Raises:
            StopIteration: There is none.
            ValueError: It is damaged, or cut short.
        """
        reader = self._reader
        if not isinstance(reader, TFRecordStream):
            return _read(reader)
        try:
            record = reader.next()
        except GrainmillError as error:
            raise ValueError(f"Not a valid TFRecord. {error}") from None
        if record is None:
            raise StopIteration
        return record

    def __del__(self) -> None:
        # Neither does a subclass close the file that it opened.
        close = getattr(getattr(self, "_reader", None), "close", None)
        if close is not None:
            close()

    def seek(self, offset: int) -> None:
        """Makes the record that begins at byte `offset` the next one."""
        self._reader.seek(offset)

    def tell(self) -> int:
        """Where the next record begins, in bytes."""
        return self._reader.tell()


def _read(file: BinaryIO) -> bytes:
    """The next record of a file that is at its begin."""
    head = file.read(_HEAD.size)
    if not head:
        raise StopIteration
    if len(head) < _HEAD.size:
        raise ValueError(
            f"Not a valid TFRecord. Fewer than {_HEAD.size} bytes are left for a length: {head!r}"
        )
    length, stored = _HEAD.unpack(head)
    _check("length", stored, head[:8])
    record = file.read(length)
    tail = file.read(_TAIL.size)
    if len(record) < length or len(tail) < _TAIL.size:
        raise ValueError(
            f"Not a valid TFRecord. Fewer than {length + _TAIL.size} bytes are left for a record "
            f"and its checksum: {len(record) + len(tail)}"
        )
    _check("data", _TAIL.unpack(tail)[0], record)
    return record


def _check(of: str, stored: int, data: bytes) -> None:
    computed = masked_crc32c(data)
    if stored != computed:
        raise ValueError(
            f"Not a valid TFRecord. Checksum mismatch of the {of} (stored {stored:#010x}, computed "
            f"{computed:#010x})"
        )


class _TFRecordDatasetIterator(DatasetIterator[Any]):
    """Iterates over the records of a file; its state is the offset of the next one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._reader = _TFRecordReader(path)

    def __next__(self) -> Any:
        return next(self._reader)

    def get_state(self) -> dict[str, Any]:
        return {"reader_offset": self._reader.tell()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._reader.seek(state["reader_offset"])


class TFRecordIterDataset(IterDataset[bytes]):
    """The records of one TFRecord file, from its begin to its end, without an index.

    Checksums are verified. The state of an iterator is the offset of the next record in bytes,
    `{"reader_offset": 0}` at the start. Files that are compressed as a whole are not supported:
    `TFRecordDataSource` reads these. Several files are read by
    `InterleaveIterDataset(grain.MapDataset.source(paths).map(TFRecordIterDataset), ...)`.

    Args:
        path: The path of the file. It is opened when iteration starts.

    Example:
        >>> import struct
        >>> from grainmill._native import masked_crc32c
        >>> def frame(record):
        ...     head = struct.pack("<Q", len(record))
        ...     crcs = [struct.pack("<I", masked_crc32c(part)) for part in (head, record)]
        ...     return head + crcs[0] + record + crcs[1]
        >>> with open("words.tfrecord", "wb") as file:
        ...     _ = file.write(b"".join(map(frame, [b"one", b"two", b"three"])))
        >>> iterator = iter(grain.experimental.TFRecordIterDataset("words.tfrecord"))
        >>> next(iterator), iterator.get_state()
        (b'one', {'reader_offset': 19})
        >>> list(iterator)
        [b'two', b'three']
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __iter__(self) -> DatasetIterator[bytes]:
        return _TFRecordDatasetIterator(self._path)
