"""TFRecord files to ArrayRecord files, in the order of their records."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import apache_beam as beam

from grainmill._beam.files import BeamStore, absolute, matched
from grainmill._beam.tfrecord import TFRecordFile, TFRecordReader, counted, records
from grainmill._beam.write import TEMPLATE, Names


class ConvertTFRecordToArrayRecord(beam.PTransform):  # type: ignore[misc]
    """Converts TFRecord files to ArrayRecord files, with their records in the same order.

    The input is the sequence of all records of the files, in the order of their paths. Each output
    file has a range of it: the records of one input file, or with `num_shards` as many as each
    other, within one; so record `j` of shard `s` is record `n * s // num_shards + j` of `n`. No
    record passes through the runner: a worker reads the records of one output file and writes them,
    which costs several times less than a `PCollection` of records. Checksums are verified; damage
    is an error that names the file, the record and its position.

    An output file gets its name when it is complete, and a bundle that is tried again writes it
    again with the same content. Files that exist are refused. It is applied to a pipeline, and
    yields the paths of the output files.

    Args:
        file_pattern: The path or pattern of the input, of any of Beam's file systems.
        file_path_prefix: What the output's paths begin with; followed by `-00000-of-00010`.
        num_shards: The number of output files; as many as input files if `None`. Then the files are
            read twice: once only for the positions of the records.
        file_name_suffix: What the output's paths end with.
        options: Options of an `ArrayRecordWriter`.
        compression_type: The input's compression, one of Beam's `CompressionTypes`; `"auto"`
            detects it by the ends of the names.
        overwrite: Whether files with these names may be replaced.

    Raises:
        ValueError: `num_shards` is less than 1.
        FileExistsError: When it is applied, and there are such files.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.array_record import ArrayRecordReader
        >>> from grainmill.beam import ConvertTFRecordToArrayRecord
        >>> with open("one.tfrecord", "wb") as file:  # one record, "abc"
        ...     _ = file.write(bytes.fromhex("0300000000000000b099490e6162636e57f121"))
        >>> with beam.Pipeline() as pipeline:
        ...     paths = pipeline | ConvertTFRecordToArrayRecord("*.tfrecord", "out")
        >>> ArrayRecordReader("out-00000-of-00001.array_record").read_all()
        [b'abc']
    """

    def __init__(
        self,
        file_pattern: str | os.PathLike[str],
        file_path_prefix: str | os.PathLike[str],
        num_shards: int | None = None,
        *,
        file_name_suffix: str = ".array_record",
        options: str = "group_size:1",
        compression_type: str = "auto",
        overwrite: bool = False,
    ) -> None:
        super().__init__()
        if num_shards is not None and num_shards < 1:
            raise ValueError(f"`num_shards` must be at least 1, got {num_shards}")
        self._pattern = absolute(file_pattern)
        self._names = Names(absolute(file_path_prefix), TEMPLATE, file_name_suffix)
        self._num_shards, self._options = num_shards, options
        self._compression, self._overwrite = compression_type, overwrite

    def expand(self, pbegin: Any) -> Any:
        """Applies the transform; Beam calls this.

        Args:
            pbegin: The pipeline.

        Returns:
            The paths of the output files.
        """
        self._names.check(overwrite=self._overwrite)
        names, num_shards, options = self._names, self._num_shards, self._options
        files = (
            pbegin
            | "Pattern" >> beam.Create([self._pattern])
            | "Match" >> beam.FlatMap(_matching)
            | "Spread files" >> beam.Reshuffle()
        )
        if num_shards is None:
            convert = beam.Map(_converted, names, options, self._compression)
            written = files | "Convert" >> convert
        else:
            counts = beam.pvalue.AsList(files | "Count" >> beam.Map(_counted, self._compression))
            written = (
                pbegin
                | "Shards" >> beam.Create(range(num_shards))
                | "Spread shards" >> beam.Reshuffle()
                | "Write" >> beam.Map(_write_shard, names, num_shards, options, counts)
            )
        finish = beam.FlatMap(_cleaned, names, beam.pvalue.AsList(written))
        return pbegin | "Once" >> beam.Create([None]) | "Finish" >> finish


def _cleaned(_: None, names: Names, paths: list[str]) -> list[str]:
    """The paths, after what writers that were killed have left is deleted."""
    BeamStore().remove_parts(f"{names.prefix}-", names.suffix)
    return paths


def _matching(pattern: str) -> list[tuple[str, int, int]]:
    """The input files, each with its number and the number of all."""
    paths = matched(pattern)
    return [(path, number, len(paths)) for number, path in enumerate(paths)]


def _counted(numbered: tuple[str, int, int], compression: str) -> TFRecordFile:
    return counted(numbered[0], compression)


def _converted(numbered: tuple[str, int, int], names: Names, options: str, compression: str) -> str:
    path, number, count = numbered
    output = names.path(number, count)
    BeamStore().write_records(output, records(path, compression), options)
    return output


def _write_shard(
    shard: int, names: Names, num_shards: int, options: str, files: list[TFRecordFile]
) -> str:
    total = sum(file.num_records for file in files)
    start, stop = total * shard // num_shards, total * (shard + 1) // num_shards
    output = names.path(shard, num_shards)
    BeamStore().write_records(output, _range(files, start, stop), options)
    return output


def _range(files: list[TFRecordFile], start: int, stop: int) -> Iterator[bytes]:
    """The records `start` to `stop - 1` of the files in the order of their paths."""
    begin = 0
    for file in sorted(files, key=lambda file: file.path):
        end = begin + file.num_records
        first, last = max(start, begin), min(stop, end)
        if first < last:
            with contextlib.closing(TFRecordReader(file)) as reader:
                yield from reader.read(first - begin, last - begin)
        begin = end
