"""Reading ArrayRecord files by ranges of records."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import apache_beam as beam
import numpy as np
from apache_beam.coders import BytesCoder, Coder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.core import RestrictionProvider

from grainmill import GrainmillError
from grainmill._beam.files import BlockFile, absolute, matched, opened
from grainmill._beam.tfrecord import TFRecordReader, counted

# Records are read about this many bytes at a time, and a range is split no further.
_BLOCK_LEN = 4 << 20
# Ranges of about this size are offered to workers; a runner may split them again.
_RANGE_LEN = 64 << 20


class ArrayRecordFileReader:
    """Reads ranges of an ArrayRecord file in the engine."""

    def __init__(self, file: BlockFile) -> None:
        self._files = opened(file.path)
        if len(self._files) != file.num_records:
            raise GrainmillError(
                f"{file.path}: the file had {file.num_records} records, and has "
                f"{len(self._files)} now"
            )

    def read(self, start: int, stop: int) -> list[bytes]:
        """The records `start` to `stop - 1`."""
        return self._files.read(np.arange(start, stop, dtype=np.int64))

    def close(self) -> None:
        """Nothing is to be closed: the engine closes files that are not used."""


def described(path: str) -> BlockFile:
    """What readers of a file agree on, in blocks of one or more chunks; reads its index."""
    files = opened(path)
    mean_byte_len = max(files.mean_byte_len, 1.0)
    group_size = max(files.group_sizes[0], 1)
    groups = max(int(_BLOCK_LEN / mean_byte_len) // group_size, 1)
    starts = range(0, len(files), groups * group_size)
    return BlockFile(path, len(files), len(files) * mean_byte_len, starts)


Reader: TypeAlias = ArrayRecordFileReader | TFRecordReader


class _Blocks(RestrictionProvider):  # type: ignore[misc]
    """Ranges of blocks, so that a split never falls into one that is being read."""

    def initial_restriction(self, element: BlockFile) -> OffsetRange:
        return OffsetRange(0, element.num_blocks)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: BlockFile, restriction: OffsetRange) -> float:
        return float(restriction.size() * element.block_len)

    def split(self, element: BlockFile, restriction: OffsetRange) -> Iterator[OffsetRange]:
        blocks = max(int(_RANGE_LEN / max(element.block_len, 1.0)), 1)
        yield from restriction.split(desired_num_offsets_per_split=blocks)


class ReadBlocks(beam.DoFn):  # type: ignore[misc]
    """Reads the blocks of a range."""

    def __init__(
        self, open_file: Callable[[Any], Reader], coder: Coder, *, with_origin: bool
    ) -> None:
        self._open_file, self._coder, self._with_origin = open_file, coder, with_origin
        self._reader: tuple[str, Reader] | None = None

    def process(
        self,
        element: Any,  # a `BlockFile`
        tracker: Any = beam.DoFn.RestrictionParam(_Blocks()),  # noqa: B008 - how Beam marks it
    ) -> Iterator[Any]:
        if self._reader is None or self._reader[0] != element.path:
            self.teardown()
            self._reader = element.path, self._open_file(element)
        reader = self._reader[1]
        decode = None if isinstance(self._coder, BytesCoder) else self._coder.decode
        block = tracker.current_restriction().start
        while tracker.try_claim(block):
            start = element.start(block)
            records: Iterable[Any] = reader.read(start, element.start(block + 1))
            if decode is not None:
                records = map(decode, records)
            if self._with_origin:
                for index, record in enumerate(records, start):
                    yield element.path, index, record
            else:
                yield from records
            block += 1

    def teardown(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
        self._reader = None


class ReadFiles(beam.PTransform):  # type: ignore[misc]
    """From patterns of files to records, whatever the format."""

    def __init__(self, describe: Callable[[str], BlockFile], read: beam.DoFn) -> None:
        super().__init__()
        self._describe, self._read = describe, read

    def expand(self, pcoll: Any) -> Any:
        return (
            pcoll
            | "Match" >> beam.FlatMap(_paths)
            | "Spread files" >> beam.Reshuffle()
            | "Describe" >> beam.Map(self._describe)
            | "Read" >> beam.ParDo(self._read)
        )


def _paths(pattern: str) -> list[str]:
    return matched(absolute(pattern))


class ReadAllFromArrayRecord(beam.PTransform):  # type: ignore[misc]
    """Reads the ArrayRecord files that a `PCollection` of patterns names.

    A file is divided by its index into ranges of records, which workers read at the same time, in
    blocks; a runner may divide them further while they are read. Checksums are verified: damage is
    an error that names the file and the record. Files may be wherever Beam's file systems reach.

    Args:
        coder: Decodes records, which are `bytes` by default.
        with_origin: Whether elements are tuples of the file's path, the record's index in the file
            and the record, by which the order can be restored: a `PCollection` has none.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.array_record import ArrayRecordWriter
        >>> from grainmill.beam import ReadAllFromArrayRecord
        >>> with ArrayRecordWriter("words.array_record") as writer:
        ...     for word in (b"one", b"two"):
        ...         writer.write(word)
        >>> with beam.Pipeline() as pipeline:
        ...     paths = pipeline | beam.Create(["words.array_record"])
        ...     records = paths | ReadAllFromArrayRecord(with_origin=True)
        ...     _ = records | beam.Map(print)
        ('.../words.array_record', 0, b'one')
        ('.../words.array_record', 1, b'two')
    """

    def __init__(self, coder: Coder = BytesCoder(), *, with_origin: bool = False) -> None:  # noqa: B008
        super().__init__()
        self._coder, self._with_origin = coder, with_origin

    def expand(self, pcoll: Any) -> Any:
        """Applies the transform; Beam calls this.

        Args:
            pcoll: The patterns.

        Returns:
            The records.
        """
        read = ReadBlocks(ArrayRecordFileReader, self._coder, with_origin=self._with_origin)
        return pcoll | ReadFiles(described, read)


class _ReadPattern(beam.PTransform):  # type: ignore[misc]
    """Reads the files that match one pattern."""

    def __init__(
        self, file_pattern: str | os.PathLike[str], files: beam.PTransform, *, validate: bool
    ) -> None:
        super().__init__()
        self._pattern, self._files = absolute(file_pattern), files
        if validate:
            matched(self._pattern)

    def expand(self, pbegin: Any) -> Any:
        """Applies the transform; Beam calls this.

        Args:
            pbegin: The pipeline.

        Returns:
            The records.
        """
        return pbegin | "Pattern" >> beam.Create([self._pattern]) | "Files" >> self._files


class ReadFromArrayRecord(_ReadPattern):
    """Reads the ArrayRecord files that match a pattern.

    They are read as by `ReadAllFromArrayRecord`.

    Args:
        file_pattern: A path or pattern of any of Beam's file systems.
        coder: Decodes records, which are `bytes` by default.
        validate: Whether a pattern without any file is an error when the pipeline is built; it is
            one when the pipeline runs in any case.
        with_origin: Whether elements are tuples of the file's path, the record's index in the file
            and the record.

    Raises:
        FileNotFoundError: No file matches.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.array_record import ArrayRecordWriter
        >>> from grainmill.beam import ReadFromArrayRecord
        >>> with ArrayRecordWriter("words.array_record") as writer:
        ...     writer.write(b"one")
        >>> with beam.Pipeline() as pipeline:
        ...     _ = pipeline | ReadFromArrayRecord("*.array_record") | beam.Map(print)
        b'one'
    """

    def __init__(
        self,
        file_pattern: str | os.PathLike[str],
        coder: Coder = BytesCoder(),  # noqa: B008 - it has no state
        validate: bool = True,  # noqa: FBT001, FBT002 - as in Beam's own sources
        *,
        with_origin: bool = False,
    ) -> None:
        files = ReadAllFromArrayRecord(coder, with_origin=with_origin)
        super().__init__(file_pattern, files, validate=validate)


class ReadFromTFRecordIndexed(_ReadPattern):
    """Reads the TFRecord files that match a pattern, by ranges of records.

    Beam's own `ReadFromTFRecord` reads a file from its start to its end on one worker. This one
    scans a file for the positions of its records first, which reads their lengths only; then many
    workers read it at the same time, and know the index of each record. Compressed files are
    decompressed twice, and not divided. Checksums are verified: damage is an error that names the
    file, the record and its position.

    Args:
        file_pattern: A path or pattern of any of Beam's file systems.
        coder: Decodes records, which are `bytes` by default.
        compression_type: One of Beam's `CompressionTypes`; `"auto"` detects it by the ends of the
            names.
        validate: Whether a pattern without any file is an error when the pipeline is built; it is
            one when the pipeline runs in any case.
        with_origin: Whether elements are tuples of the file's path, the record's index in the file
            and the record, by which the order can be restored: a `PCollection` has none.

    Raises:
        FileNotFoundError: No file matches.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.beam import ReadFromTFRecordIndexed
        >>> with open("one.tfrecord", "wb") as file:  # one record, "abc"
        ...     _ = file.write(bytes.fromhex("0300000000000000b099490e6162636e57f121"))
        >>> with beam.Pipeline() as pipeline:
        ...     _ = pipeline | ReadFromTFRecordIndexed("one.tfrecord") | beam.Map(print)
        b'abc'
    """

    def __init__(
        self,
        file_pattern: str | os.PathLike[str],
        coder: Coder = BytesCoder(),  # noqa: B008 - it has no state
        compression_type: str = "auto",
        validate: bool = True,  # noqa: FBT001, FBT002 - as in Beam's own sources
        *,
        with_origin: bool = False,
    ) -> None:
        read = ReadBlocks(TFRecordReader, coder, with_origin=with_origin)
        describe = functools.partial(counted, compression=compression_type)
        super().__init__(file_pattern, ReadFiles(describe, read), validate=validate)
