"""A small intact file of every format, and how its records are read; for tests of damage."""

import dataclasses
import gzip
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import record_formats as formats
from pyarrow import feather

import grainmill as grain
from grainmill import _native

OBJECTS = [{"number": n, "text": f"abcd {n * 7}"} for n in range(12)]
LINES = [json.dumps(each).encode() for each in OBJECTS]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format in one of its forms.

    Attributes:
        family: Formats of one family recognise each other's files.
        extension: Of its files.
        source: The name of its class in `grainmill.sources`.
        make: Writes a file with the elements of `OBJECTS`, or with `LINES`, to a path.
        options: Of the source.
        command: Its name on the command line; "" if it is unknown there.
        may_be_empty: Whether an empty file has no records; else it is an error.
    """

    family: str
    extension: str
    source: str
    make: Callable[[Path], None]
    options: dict = dataclasses.field(default_factory=dict)
    command: str = ""
    may_be_empty: bool = True

    def open(self, paths):
        """The source of the files at a path or several."""
        paths = paths if isinstance(paths, list) else str(paths)
        return getattr(grain.sources, self.source)(paths, **self.options)

    def read(self, path):
        """All records: one by one, as a list, and through a pipeline."""
        source = self.open(path)
        singly = [source[number] for number in range(len(source))]
        together = source.__getitems__(range(len(source)))
        piped = list(grain.MapDataset.source(source))
        assert plain(singly) == plain(together) == plain(piped)
        return singly


def plain(elements):
    return [
        {
            name: getattr(value, "tolist", lambda value=value: value)()
            for name, value in each.items()
        }
        if isinstance(each, dict)
        else each
        for each in elements
    ]


def _written(data):
    return lambda path: path.write_bytes(data)


def _array_record(options):
    def make(path):
        with grain.array_record.ArrayRecordWriter(str(path), options) as writer:
            for line in LINES:
                writer.write(line)

    return make


def _zstd_bagz(path):
    output = _native.RecordOutput(str(path), "bagz", options="zstd:3")
    output.copy_list(LINES, 1)
    output.close()


def _separate_bagz(path):
    data = formats.bagz(LINES)
    size = sum(map(len, LINES))
    path.write_bytes(data[:size])
    path.with_name(f"limits.{path.name}").write_bytes(data[size:])


def _parquet(compression):
    def make(path):
        pq.write_table(pa.Table.from_pylist(OBJECTS), path, compression=compression)

    return make


def _arrow(path):
    table = pa.Table.from_pylist(OBJECTS)
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


_TAR = formats.tar([(f"{n}.json", line) for n, line in enumerate(LINES)])
_FRAMES, _TEXT = formats.tfrecord(LINES), b"".join(line + b"\n" for line in LINES)

FORMATS = {
    "array_record": Format(
        "array_record",
        ".array_record",
        "ArrayRecordDataSource",
        _array_record("group_size:5,zstd:3"),
        command="array_record",
        may_be_empty=False,
    ),
    "tfrecord": Format(
        "tfrecord", ".tfrecord", "TFRecordDataSource", _written(_FRAMES), command="tfrecord"
    ),
    "tfrecord_gzip": Format(
        "tfrecord",
        ".tfrecord.gz",
        "TFRecordDataSource",
        _written(gzip.compress(_FRAMES, mtime=0)),
        command="tfrecord",
    ),
    "tfrecord_zlib": Format(
        "tfrecord",
        ".tfrecord",
        "TFRecordDataSource",
        _written(zlib.compress(_FRAMES)),
        command="tfrecord",
    ),
    "json_lines": Format(
        "json_lines",
        ".jsonl",
        "JsonLinesDataSource",
        _written(_TEXT),
        {"parse": True},
        command="jsonl",
    ),
    "json_lines_gzip": Format(
        "json_lines",
        ".jsonl.gz",
        "JsonLinesDataSource",
        _written(gzip.compress(_TEXT, mtime=0)),
        {"parse": True},
        command="jsonl",
    ),
    "bagz": Format("bagz", ".bag", "BagzDataSource", _written(formats.bagz(LINES)), command="bagz"),
    "bagz_zstd": Format("bagz", ".bagz", "BagzDataSource", _zstd_bagz, command="bagz"),
    "bagz_separate": Format(
        "bagz", ".bag", "BagzDataSource", _separate_bagz, {"limits": "separate"}
    ),
    "web_dataset": Format(
        "web_dataset", ".tar", "WebDatasetDataSource", _written(_TAR), command="webdataset"
    ),
    "web_dataset_gzip": Format(
        "web_dataset",
        ".tar.gz",
        "WebDatasetDataSource",
        _written(gzip.compress(_TAR, mtime=0)),
        command="webdataset",
    ),
    "parquet": Format(
        "parquet",
        ".parquet",
        "ParquetDataSource",
        _parquet("zstd"),
        command="parquet",
        may_be_empty=False,
    ),
    "arrow": Format(
        "hugging_face",
        ".feather",
        "ArrowDataSource",
        lambda path: feather.write_feather(pa.Table.from_pylist(OBJECTS), path, chunksize=5),
        command="arrow",
        may_be_empty=False,
    ),
    "hugging_face": Format(
        "hugging_face", ".arrow", "HuggingFaceDataSource", _arrow, may_be_empty=False
    ),
}


def made(name, directory):
    """The path of an intact file in `directory`."""
    path = Path(directory) / f"file{FORMATS[name].extension}"
    FORMATS[name].make(path)
    return path


def outcomes(names_and_paths):
    """For each name of a format and path, what reading gives: a number of records or an error."""
    found = []
    for name, path in names_and_paths:
        try:
            found.append(len(FORMATS[name].read(path)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def main():
    """Prints the outcomes of the names and paths in the arguments, as user `nobody` if told so."""
    as_nobody, *arguments = sys.argv[1:]
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    if as_nobody == "nobody":
        import os  # noqa: PLC0415
        import tempfile  # noqa: PLC0415

        # What is imported when a source is first used may be out of that user's reach.
        with tempfile.TemporaryDirectory() as directory:
            for name, each in FORMATS.items():
                each.read(made(name, directory))
        if os.geteuid() == 0:  # permission checks do not apply to root
            os.setgroups([])
            os.setegid(65534)
            os.seteuid(65534)
    print(json.dumps(outcomes(pairs)))


if __name__ == "__main__":
    main()
