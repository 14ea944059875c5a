"""The table of formats: how each is recognised, read by position, read in order, and written."""

from __future__ import annotations

import codecs
import dataclasses
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grainmill import _native, sources
from grainmill._sources.suffixes import COMPRESSED, EXTENSIONS
from grainmill._tools.console import CommandError, ExitCode
from grainmill._url import identified, is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

_SHARD = re.compile(r"-\d{5,}-of-\d{5,}|@\d+")
_RIEGELI = bytes.fromhex("83af70d10d884a3f")


class Source(Protocol):
    """The records of files by position."""

    def __len__(self) -> int:
        """Returns the number of records."""

    def __getitems__(self, record_keys: Sequence[int], /) -> list[Any]:
        """Returns records in the order of their positions."""

    def _record_location(self, index: int, /) -> tuple[str, int]:
        """The file of a record, and its number there."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        name: The name in options.
        title: The name for people.
        source: The name of its class in `grainmill.sources`.
        scanned: Whether its source finds records by a scan, and keeps what it found in an index.
        in_order: Whether the engine reads it without an index, from start to end.
        written: Whether files of it can be written.
        rows: Whether records are rows, `dict`s, not `bytes`.
        options: What `--options` may contain, for help.
        numbers_first: Whether the number of a shard stands before the extension, since readers
            look at the end of the name.
    """

    name: str
    title: str
    source: str
    scanned: bool = False
    in_order: bool = False
    written: bool = False
    rows: bool = False
    options: str = ""
    numbers_first: bool = False

    @property
    def extensions(self) -> tuple[str, ...]:
        """Of its files, the one for new files first."""
        return EXTENSIONS[self.name]

    def open(self, paths: Sequence[str]) -> Source:
        """Opens files as one sequence of records."""
        make: Callable[[Sequence[str]], Source] | None = getattr(sources, self.source, None)
        if make is None:
            raise CommandError(
                f"{self.title} files cannot be read by position; convert them to ArrayRecord first"
            )
        return make(list(paths))


FORMATS = {
    found.name: found
    for found in (
        Format(
            "array_record",
            "ArrayRecord",
            "ArrayRecordDataSource",
            written=True,
            options="group_size:N, zstd:LEVEL, brotli:LEVEL, snappy, uncompressed, ...",
        ),
        Format(
            "tfrecord",
            "TFRecord",
            "TFRecordDataSource",
            scanned=True,
            in_order=True,
            written=True,
            options="gzip:LEVEL",
        ),
        Format(
            "jsonl",
            "JSON Lines",
            "JsonLinesDataSource",
            scanned=True,
            in_order=True,
            written=True,
            options="gzip:LEVEL",
        ),
        Format(
            "bagz",
            "Bagz",
            "BagzDataSource",
            written=True,
            options="zstd:LEVEL in .bagz files, none in .bag files",
            numbers_first=True,
        ),
        Format(
            "parquet",
            "Parquet",
            "ParquetDataSource",
            written=True,
            rows=True,
            options="zstd:LEVEL, gzip:LEVEL, brotli:LEVEL, snappy, lz4, uncompressed, "
            "row_group_bytes:N, record",
            numbers_first=True,
        ),
        Format("webdataset", "WebDataset", "WebDatasetDataSource", scanned=True, rows=True),
    )
}
READ = tuple(FORMATS)
WRITTEN = tuple(name for name, found in FORMATS.items() if found.written)
# Of whole files; other names say nothing about that.
_OTHER_COMPRESSED = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".sz", ".snappy", ".zip")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that reads files: which, and their format."""
    parser.add_argument(
        "paths", nargs="+", metavar="FILE", help="files, globs, name@N, directories"
    )
    parser.add_argument("--from", dest="format", choices=READ, help="the files' format")


def of_name(path: str) -> Format | None:
    """The format that the name of a file says, whatever the shard and the compression."""
    name = _SHARD.sub("", Path(identified(path)).name.lower())
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    for found in FORMATS.values():
        if name.endswith(found.extensions):
            return found
    # As in `train.tfrecord-gzip` and `name.tfrecord.v2`.
    for found in FORMATS.values():
        if any(f"{extension}{end}" in name for extension in found.extensions for end in ".-_"):
            return found
    return None


def compression_suffix(path: str) -> str:
    """What the name of a file, whatever its shard, ends with that says how it is compressed."""
    name = _SHARD.sub("", Path(path).name.lower())
    suffixes = (*COMPRESSED, *_OTHER_COMPRESSED)
    return next((suffix for suffix in suffixes if name.endswith(suffix)), "")


def of_content(path: str) -> Format | None:
    """The format that the first bytes of a file say, if they do."""
    first = _native.FileBytes(path).read(512)
    if first[:8] == _RIEGELI:
        return FORMATS["array_record"]
    if first[:4] == b"PAR1":
        return FORMATS["parquet"]
    if len(first) >= 12 and struct.unpack("<I", first[8:12])[0] == _native.masked_crc32c(first[:8]):
        return FORMATS["tfrecord"]
    if first[257:262] == b"ustar":
        return FORMATS["webdataset"]
    if first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{":
        return FORMATS["jsonl"]
    return None


def detect(path: str, given: str | None = None) -> Format:
    """The format of an input file: the given one, or what its content or its name says."""
    if given is not None:
        return FORMATS[given]
    if is_url(path):  # each look at its content is a request
        found = of_name(path) or of_content(path)
    else:
        check_readable(path)
        found, by_name = of_content(path), of_name(path)
        # A Bagz file has no mark of its own: it begins with its first record, which may be JSON.
        may_be_bagz = found is FORMATS["jsonl"] and by_name is FORMATS["bagz"]
        if found is None or may_be_bagz:
            found = by_name
    if found is None:
        raise CommandError(
            f"{path}: its format is not known from its name or content; pass --from "
            f"({', '.join(READ)})"
        )
    return found


def check_readable(path: str) -> None:
    """Raises an error for what is not a file."""
    place = Path(path)
    if not place.exists():
        raise CommandError(f"{path}: no such file", ExitCode.SYSTEM)
    if not place.is_file():
        raise CommandError(f"{path}: not a regular file", ExitCode.SYSTEM)


def expanded(paths: Sequence[str]) -> list[str]:
    """The files that arguments name: paths, globs, `name@N`, URLs, and all files of directories."""
    return [file for path in paths for file in _expanded(path)]


def _expanded(path: str) -> list[str]:
    try:
        found = sources.expand_paths(path)
    except FileNotFoundError as error:
        raise CommandError(str(error), ExitCode.SYSTEM) from error
    if len(found) > 1 and Path(path).is_dir():  # without what is no file of records
        return [file for file in found if of_name(file) is not None] or found
    return found
