"""TFRecord files as a sequential dataset; `grainmill.experimental` has its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._native import GrainmillError, RecordCursor
from grainmill._sources.files_in_order import FilesIterator, position_of, state_of
from grainmill._sources.paths import expand, shown
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import absolute

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT: Final = "tfrecord"


class TFRecordIterDataset(IterDataset[bytes]):
    """The records of TFRecord files, in order, as `bytes`.

    Nothing is scanned first and no index is needed; `grain.sources.TFRecordDataSource` has random
    access. All checksums are verified. A saved state is the offset of the next record in bytes, and
    the number of its file if there are several. These are read one after another;
    `MapDataset.source(expand_paths(path)).map(TFRecordIterDataset)` is a dataset of datasets, which
    `InterleaveIterDataset` reads at the same time and worker processes share. Of a file in a bucket
    or on a web server as much is requested ahead as is needed to take records without waiting, up
    to 32 MiB.

    Args:
        path: A path, or a sequence of paths, as for `expand_paths`: patterns, directories and URLs
            are expanded when the dataset is made. A file that is compressed as a whole by gzip,
            zlib, zstd, xz or bzip2 is recognised by its first bytes. Its offsets are those of the
            decompressed data; continuing at a state decompresses it as `JsonLinesIterDataset` does.

    Raises:
        FileNotFoundError: No file matches a pattern, or is in a directory. When iterated: there is
            no such file.
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

    _is_native = True  # not where a derived class has another `__iter__`

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        super().__init__()
        # Programs derive from this class and read it.
        self._path = path
        self._paths = expand(
            os.fsdecode(path) if isinstance(path, bytes) else path, suffixes=suffixes_of("tfrecord")
        )

    def __iter__(self) -> DatasetIterator[bytes]:
        if len(self._paths) == 1:
            return _TFRecordDatasetIterator(self._paths[0])
        return FilesIterator(self._paths, _TFRecordDatasetIterator)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._paths)})"


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
        cursor = getattr(self._reader, "cursor", None)
        return state_of(*cursor.place()) if cursor else state_of(self._reader.tell())

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a record.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: The offset is negative.
        """
        offset, start = position_of(state)
        # Readers of programs have one argument.
        self._reader.seek(*((offset,) if start is None else (offset, start)))


class _TFRecordReader:
    """The records of a file from any offset on.

    Programs derive from it to read other files: their `__init__` sets `_reader` to a binary file
    that can seek, and does not call this one's. The reader closes the file when it is deleted.
    """

    # The records of a file that Python reads, which is then ahead of them.
    _stream: RecordCursor | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # The engine may open the file again, after the working directory has changed.
        self._reader: RecordCursor | BinaryIO = RecordCursor(absolute(os.fsdecode(path)), _FORMAT)

    def __next__(self) -> bytes:
        reader = self._reader
        if isinstance(reader, RecordCursor):
            stream = reader
        else:
            if self._stream is None:
                name = str(getattr(reader, "name", reader))
                self._stream = RecordCursor.pulled(name, reader.read, _FORMAT, reader.tell())
            stream = self._stream
        try:
            record = stream.next()
        except BaseException as error:
            if not isinstance(reader, RecordCursor):
                self.seek(stream.tell())  # the next call tries again
            if isinstance(error, GrainmillError):
                raise ValueError(f"Not a valid TFRecord. {error}") from error
            raise
        if record is None:
            raise StopIteration
        return record

    def tell(self) -> int:
        """Where the next record begins, in bytes."""
        return (self._stream or self._reader).tell()

    @property
    def cursor(self) -> RecordCursor | None:
        """The records of a file that the engine reads."""
        return self._reader if isinstance(self._reader, RecordCursor) else None

    def seek(self, offset: int, start: tuple[int, int] | None = None) -> None:
        """Makes the record that begins at byte `offset` the next one."""
        self._stream = None
        if self.cursor:
            self.cursor.seek(offset, start)
        else:
            self._reader.seek(offset)

    def __del__(self) -> None:
        close = getattr(self.__dict__.get("_reader"), "close", None)
        if close is not None:
            close()
