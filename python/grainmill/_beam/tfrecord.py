"""TFRecord files as streams, wherever Beam's file systems reach, compressed or not."""

import bisect
import dataclasses
import itertools
import struct
from collections.abc import Iterator
from typing import BinaryIO

import google_crc32c
from apache_beam.io.filesystem import CompressionTypes

from grainmill import _native
from grainmill._beam.files import open_bytes

_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_READ_LEN = 1 << 20
# A block is the records of this many bytes.
_BLOCK_LEN = 4 << 20
# No message is longer; a file that claims more would only take memory.
_MAX_RECORD = 1 << 31


@dataclasses.dataclass(frozen=True)
class TFRecordFile:
    """A file whose records have been counted."""

    path: str
    compression: str
    num_records: int
    byte_len: int
    blocks: tuple[tuple[int, int], ...]
    """The number of the first record of each block, and its position; a compressed file is one."""

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def block_len(self) -> float:
        """The mean size of a block in bytes."""
        return self.byte_len / max(self.num_blocks, 1)

    def start(self, block: int) -> int:
        """The number of the first record of a block, or of all records."""
        return self.blocks[block][0] if block < len(self.blocks) else self.num_records


def compression_of(path: str, compression: str) -> str:
    """The compression of a file, by the end of its name if it is to be detected."""
    return (
        str(CompressionTypes.detect_compression_type(path))
        if compression == "auto"
        else (compression)
    )


def counted(path: str, compression: str) -> TFRecordFile:
    """Counts the records of a file, whose data is not verified."""
    compression = compression_of(path, compression)
    blocks: list[tuple[int, int]] = []
    is_plain = compression == CompressionTypes.UNCOMPRESSED
    with open_bytes(path, compression) as file:
        stream = _Stream(path, file)
        for at in stream.skipped(None):
            if not blocks or (is_plain and at - blocks[-1][1] >= _BLOCK_LEN):
                blocks.append((stream.index - 1, at))
        return TFRecordFile(path, compression, stream.index, stream.position, tuple(blocks))


def records(path: str, compression: str) -> Iterator[bytes]:
    """All records of a file, verified."""
    with open_bytes(path, compression_of(path, compression)) as file:
        yield from _Stream(path, file).records()


class TFRecordReader:
    """Reads ranges of a file that has been counted, verified; best those that follow each other."""

    def __init__(self, file: TFRecordFile) -> None:
        self._file = file
        self._bytes = open_bytes(file.path, file.compression)
        self._stream = _Stream(file.path, self._bytes)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The records `start` to `stop - 1`."""
        stream, file = self._stream, self._file
        if stream.index != start:
            block = bisect.bisect_right(file.blocks, start, key=lambda block: block[0]) - 1
            if stream.index > start or stream.index < file.blocks[block][0]:
                stream.seek(file.blocks[block][1], file.blocks[block][0])
            for _ in stream.skipped(start):
                pass
        yield from itertools.islice(stream.records(), stop - start)
        if stream.index != stop:
            raise _native.GrainmillError(
                f"{file.path}: the file had {file.num_records} records, and has {stream.index} now"
            )

    def close(self) -> None:
        """Closes the file."""
        self._bytes.close()


class _Stream:
    """The records of an open file, from a position on."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._buffer, self._at = b"", 0
        self._base, self.index = 0, 0
        self._record_at = 0

    @property
    def position(self) -> int:
        """Where the next record begins."""
        return self._base + self._at

    def seek(self, position: int, index: int) -> None:
        """Goes on at `position`, where record number `index` begins."""
        self._file.seek(position)
        self._buffer, self._at, self._base, self.index = b"", 0, position, index

    def records(self) -> Iterator[bytes]:
        """The records that follow."""
        value, unpack = google_crc32c.value, _CHECKSUM.unpack_from
        while (length := self._length()) is not None:
            if not self._holds(length + 4):
                raise self._error("the file ends within it")
            end = self._at + length
            record = self._buffer[self._at : end]
            crc = value(record)
            (stored,) = unpack(self._buffer, end)
            computed = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
            if stored != computed:
                raise self._error(
                    f"data: checksum mismatch (stored {stored:#010x}, computed {computed:#010x})"
                )
            self._at = end + 4
            self.index += 1
            yield record

    def skipped(self, stop: int | None) -> Iterator[int]:
        """Skips records up to number `stop`, or all, and gives the position of each."""
        while stop is None or self.index < stop:
            position = self.position
            length = self._length()
            if length is None:
                return
            self._skip(length + 4)
            self.index += 1
            yield position

    def _length(self) -> int | None:
        """The length of the next record, behind whose header the stream then is."""
        self._record_at = self.position
        if len(self._buffer) - self._at < _HEADER.size and not self._holds(_HEADER.size):
            if self._at == len(self._buffer):
                return None
            raise self._error("the file ends within its header")
        length, stored = _HEADER.unpack_from(self._buffer, self._at)
        crc = google_crc32c.value(self._buffer[self._at : self._at + 8])
        computed = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
        if stored != computed:
            raise self._error(
                f"length: checksum mismatch (stored {stored:#010x}, computed {computed:#010x})"
            )
        if length > _MAX_RECORD:
            raise self._error(f"its length is {length} bytes, of at most {_MAX_RECORD}")
        self._at += _HEADER.size
        return int(length)

    def _holds(self, length: int) -> bool:
        """Whether the buffer holds so many bytes from here on, after reading more of the file."""
        missing = length - (len(self._buffer) - self._at)
        if missing <= 0:
            return True
        pieces = [self._buffer[self._at :]]
        self._base += self._at
        self._at = 0
        while missing > 0 and (piece := self._file.read(_READ_LEN)):
            pieces.append(piece)
            missing -= len(piece)
        self._buffer = b"".join(pieces)
        return missing <= 0

    def _skip(self, length: int) -> None:
        while length:
            step = min(length, len(self._buffer) - self._at)
            self._at += step
            length -= step
            if length and not self._holds(1):
                raise self._error("the file ends within it")

    def _error(self, problem: str) -> _native.GrainmillError:
        return _native.GrainmillError(
            f"{self._path}: record {self.index} at byte {self._record_at}: {problem}"
        )
