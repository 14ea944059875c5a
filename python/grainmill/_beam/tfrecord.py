"""TFRecord files as streams, wherever Beam's file systems reach, compressed or not."""

import bisect
import dataclasses
from collections.abc import Iterator
from typing import BinaryIO

from apache_beam.io.filesystem import CompressionTypes

from grainmill import _native
from grainmill._beam.files import open_bytes

# A block is the records of this many bytes.
_BLOCK_LEN = 4 << 20
# How many records are taken at most from the engine at once.
_MAX_RECORDS = 4096


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
    """Counts the records of a file, and verifies them."""
    compression = compression_of(path, compression)
    blocks: list[tuple[int, int]] = []
    # Of a compressed file, only the beginning can be found again.
    is_plain = compression == CompressionTypes.UNCOMPRESSED
    with open_bytes(path, compression) as file:
        stream = _stream(path, file)
        while True:
            first, position = stream.num_records, stream.offset
            stream.skip_until(position + _BLOCK_LEN if is_plain else 1 << 63)
            if stream.num_records == first:
                break
            blocks.append((first, position))
        return TFRecordFile(path, compression, stream.num_records, stream.offset, tuple(blocks))


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
            block = bisect.bisect_right(file.blocks, start, key=lambda block: block[0]) - 1
            if at > start or at < file.blocks[block][0]:
                at, position = file.blocks[block]
                self._bytes.seek(position)
                self._stream = _stream(file.path, self._bytes, position, at)
            self._stream.skip(start - at)
        while (at := self._stream.num_records) < stop:
            block_of_records = self._stream.read(min(stop - at, _MAX_RECORDS))
            if not block_of_records:
                raise _native.GrainmillError(
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
