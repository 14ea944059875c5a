"""A TFRecord file as a sequential dataset; `grainmill.experimental` has its name."""

from __future__ import annotations

import operator
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._native import GrainmillError, TFRecordStream, masked_crc32c

_HEAD: Final = struct.Struct("<QI")  # the length and its checksum
_TAIL: Final = struct.Struct("<I")  # the checksum of the data
# A length may be wrong, so no more than this is read at once.
_MAX_READ_LEN: Final = 64 << 20


class TFRecordIterDataset(IterDataset[bytes]):
    """The records of a TFRecord file, in order, as `bytes`.

    Nothing is scanned first and no index is needed; `grain.sources.TFRecordDataSource` has random
    access, and reads compressed files. All checksums are verified. A saved state is the offset of
    the next record in bytes. Several files are interleaved by `InterleaveIterDataset`.

    Args:
        path: The path of a local file that is not compressed.

    Raises:
        FileNotFoundError: When iterated: there is no such file.
        ValueError: When read: a record is damaged or cut short. The message has its offset, and
            the records before it are delivered.

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
        >>> next(iterator), iterator.get_state(), list(iterator)
        (b'one', {'reader_offset': 19}, [b'two', b'three'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = path

    def __iter__(self) -> DatasetIterator[bytes]:
        return _TFRecordDatasetIterator(self._path)


class _TFRecordDatasetIterator(DatasetIterator[bytes]):
    """Reads the records of one file in order.

    Programs derive from it to read other files: their `__init__` sets `_reader` to a
    `_TFRecordReader` of their own, and does not call this one's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._reader = _TFRecordReader(path)

    def __next__(self) -> bytes:
        return next(self._reader)

    def get_state(self) -> dict[str, Any]:
        """Returns the offset of the next record."""
        return {"reader_offset": self._reader.tell()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a record.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: The offset is negative.
        """
        offset = operator.index(state["reader_offset"])
        if offset < 0:
            raise ValueError(f"`reader_offset` of a state must not be negative, got {offset}")
        self._reader.seek(offset)


class _TFRecordReader:
    """The records of a file from any offset on.

    Programs derive from it to read other files: their `__init__` sets `_reader` to a binary file
    that can seek, and does not call this one's. The reader closes the file when it is deleted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # The engine may open the file again, after the working directory has changed.
        name = os.fsdecode(path)
        absolute = name if "://" in name else str(Path(name).absolute())
        self._reader: TFRecordStream | BinaryIO = TFRecordStream(absolute)

    def __next__(self) -> bytes:
        reader = self._reader
        try:
            record = reader.next() if isinstance(reader, TFRecordStream) else _next_record(reader)
        except GrainmillError as error:
            raise ValueError(f"Not a valid TFRecord. {error}") from error
        if record is None:
            raise StopIteration
        return record

    def tell(self) -> int:
        """Where the next record begins, in bytes."""
        return self._reader.tell()

    def seek(self, offset: int) -> None:
        """Makes the record that begins at byte `offset` the next one."""
        self._reader.seek(offset)

    def __del__(self) -> None:
        close = getattr(self.__dict__.get("_reader"), "close", None)
        if close is not None:
            close()


def _next_record(file: BinaryIO) -> bytes | None:
    """The next record of a file that Python reads, verified; `None` at the end."""
    offset = file.tell()
    try:
        return _verified_record(file)
    except BaseException as error:
        file.seek(offset)  # a state taken now, and the next call, are at this record
        if isinstance(error, GrainmillError):
            name = getattr(file, "name", file)
            raise GrainmillError(f"{name}: record at byte {offset}: {error}") from None
        raise


def _verified_record(file: BinaryIO) -> bytes | None:
    head = _read(file, _HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise _cut_short(_HEAD.size, len(head))
    length, stored = _HEAD.unpack(head)
    _check("length", head[:8], stored)
    rest = _read(file, length + _TAIL.size)
    if len(rest) < length + _TAIL.size:
        raise _cut_short(_HEAD.size + length + _TAIL.size, _HEAD.size + len(rest))
    record = rest[:length]
    (stored,) = _TAIL.unpack_from(rest, length)
    _check("data", record, stored)
    return record


def _read(file: BinaryIO, byte_len: int) -> bytes:
    """The next `byte_len` bytes, or fewer at the file's end."""
    piece = file.read(min(byte_len, _MAX_READ_LEN))
    if len(piece) == byte_len:
        return piece
    pieces = []
    while piece:
        pieces.append(piece)
        byte_len -= len(piece)
        piece = file.read(min(byte_len, _MAX_READ_LEN))
    return b"".join(pieces)


def _check(part: str, data: bytes, stored: int) -> None:
    computed = masked_crc32c(data)
    if stored != computed:
        raise GrainmillError(
            f"checksum mismatch of the {part} (stored {stored:#010x}, computed {computed:#010x})"
        )


def _cut_short(needed: int, left: int) -> GrainmillError:
    return GrainmillError(f"record is cut short: takes {needed} bytes, {left} are left")
