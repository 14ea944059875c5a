"""TFRecord files as streams, wherever Beam's file systems reach, compressed or not."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from apache_beam.io.filesystem import CompressionTypes

from grainmill import GrainmillError, _native
from grainmill._beam.files import BlockFile, open_bytes

# A block is the records of this many bytes.
_BLOCK_LEN = 4 << 20
# How many records are taken at most from the engine at once.
_MAX_RECORDS = 4096


@dataclasses.dataclass(frozen=True)
class TFRecordFile(BlockFile):
    """A file whose records have been counted; a compressed one is one block.

    Attributes:
        compression: How it is compressed.
        positions: Of the blocks in the file.
    """

    compression: str
    positions: Sequence[int]


def compression_of(path: str, compression: str) -> str:
    """The compression of a file, by the end of its name if it is to be detected."""
    if compression == "auto":
        return str(CompressionTypes.detect_compression_type(path))
    return compression


def counted(path: str, compression: str) -> TFRecordFile:
    """Counts the records of a file, and verifies them."""
    compression = compression_of(path, compression)
    starts, positions = [], []
    # Of a compressed file, only the beginning can be found again.
    is_plain = compression == CompressionTypes.UNCOMPRESSED
    with open_bytes(path, compression) as file:
        stream = _stream(path, file)
        while True:
            first, position = stream.num_records, stream.offset
            stream.skip_until(position + _BLOCK_LEN if is_plain else 1 << 63)
            if stream.num_records == first:
                break
            starts.append(first)
            positions.append(position)
        count, byte_len = stream.num_records, stream.offset
        return TFRecordFile(path, count, byte_len, tuple(starts), compression, tuple(positions))


def records(path: str, compression: str) -> Iterator[bytes]:
    """All records of a file, verified."""
    with open_bytes(path, compression_of(path, compression)) as file:
        stream = _stream(path, file)
        while block := stream.read(_MAX_RECORDS):
            yield from block


class TFRecordReader:
    """Reads ranges of a file that has been counted, verified; best those that follow each other."""

    def __init__(self, file: TFRecordFile) -> None:
        self._file = file
        self._bytes = open_bytes(file.path, file.compression)
        self._stream = _stream(file.path, self._bytes)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The records `start` to `stop - 1`."""
        file, at = self._file, self._stream.num_records
        if at != start:
            block = bisect.bisect_right(file.starts, start) - 1
            if at > start or at < file.starts[block]:
                at, position = file.starts[block], file.positions[block]
                self._bytes.seek(position)
                self._stream = _stream(file.path, self._bytes, position, at)
            self._stream.skip(start - at)
        while (at := self._stream.num_records) < stop:
            block_of_records = self._stream.read(min(stop - at, _MAX_RECORDS))
            if not block_of_records:
                raise GrainmillError(
                    f"{file.path}: the file had {file.num_records} records, and has {at} now"
                )
            yield from block_of_records

    def close(self) -> None:
        """Closes the file."""
        self._bytes.close()


def _stream(
    path: str, file: BinaryIO, position: int = 0, num_records: int = 0
) -> _native.RecordStream:
    """The records of an open file from a position on, where so many records are before it."""
    return _native.RecordStream.pulled(path, file.read, "tfrecord", position, num_records)
