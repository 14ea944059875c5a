"""The table of formats: how each is recognised, read by position, read in order, and written."""

from __future__ import annotations

import codecs
import dataclasses
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grainmill import _native, sources
from grainmill._files.messages import Argument, Message, check_choice
from grainmill._sources import other_kinds
from grainmill._sources.suffixes import COMPRESSED, EXTENSIONS
from grainmill._url import identified, is_url, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHARD = re.compile(r"-\d{5,}-of-\d{5,}|@\d+")
# What files begin with.
_MARKS = {
    bytes.fromhex("83af70d10d884a3f"): "array_record",
    b"PAR1": "parquet",
    b"\x93NUMPY": "npy",
    b"ARROW1": "arrow",
}
# Of a stream of Arrow: a mark, the length of the header, and where its table is.
_ARROW_STREAM = re.compile(rb"\xff{4}.{2}\x00\x00[\x04-\x40]\x00\x00\x00", re.DOTALL)


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
    """A format of files of records; `FORMATS` has all.

    Attributes:
        name: The name that functions take.
        title: The name for people.
        source: The name of its class in `grainmill.sources`.
        scanned: Whether its source finds records by a scan, and keeps what it found in an index.
        in_order: Whether files are read without an index, from start to end.
        written: Whether files of it can be written.
        rows: Whether records are rows, `dict`s, or arrays, not `bytes`.
        options: What the `options` of `convert` may contain, in words.
        numbers_first: Whether the number of a shard stands before the extension, since readers
            look at the end of the name.

    Example:
        >>> from grainmill import files
        >>> files.FORMATS["jsonl"].title, files.FORMATS["jsonl"].extensions
        ('JSON Lines', ('.jsonl', '.ndjson', '.jsonlines'))
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
        """What the names of its files end with; the first is that of new files."""
        return EXTENSIONS[self.name]

    def open(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Source:
        """Opens files as one sequence of records, by position.

        Args:
            paths: As for `grainmill.sources.expand_paths`.

        Returns:
            The source, of the class that `source` names.
        """
        source: Source = getattr(sources, self.source)(paths)
        return source


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
        Format("megatron", "Megatron-LM", "MegatronDataSource", rows=True),
        Format("npy", "NumPy", "NpyDataSource", rows=True),
        Format("mds", "MDS", "MDSDataSource", rows=True),
        Format("arrow", "Arrow", "ArrowDataSource", rows=True),
    )
}
READ = tuple(FORMATS)
WRITTEN = tuple(name for name, found in FORMATS.items() if found.written)
# Of whole files; other names say nothing about that.
_OTHER_COMPRESSED = (".lzma", ".lz4", ".br", ".sz", ".snappy", ".zip")


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
    first = _first_bytes(path)
    for mark, name in _MARKS.items():
        if first.startswith(mark):
            return FORMATS[name]
    if len(first) >= 12 and struct.unpack("<I", first[8:12])[0] == _native.masked_crc32c(first[:8]):
        return FORMATS["tfrecord"]
    if _ARROW_STREAM.match(first):
        return FORMATS["arrow"]
    if first[257:262] == b"ustar":
        return FORMATS["webdataset"]
    if first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{":
        return FORMATS["jsonl"]
    return None


def _first_bytes(path: str) -> bytes:
    return _native.FileBytes(path).read(512)


def detect_format(path: str | os.PathLike[str], format: str | None = None) -> Format:  # noqa: A002 - of the file
    """Returns the format of a file, which its content says, or its name.

    Args:
        path: The file, or its URL, of which the name decides first: each look is a request.
        format: The name of the format, if it is known; then the file is not looked at.

    Raises:
        ValueError: Neither says it, there is no format of this name, or the file is of a kind that
            is not read: the message says what to use.
        FileNotFoundError: There is no such file.
        OSError: It is no regular file, or cannot be read.

    Example:
        >>> from grainmill import files
        >>> with open("words", "w") as file:
        ...     _ = file.write('{"word": "one"}')
        >>> files.detect_format("words").title
        'JSON Lines'
    """
    check_choice("format", format, READ)
    if format is not None:
        return FORMATS[format]
    path = os.fspath(path)
    # These have no mark of their own: they begin with their first record, which may be anything.
    by_name = of_name(path)
    has_no_mark = by_name in {FORMATS[name] for name in ("bagz", "megatron", "mds")}
    if is_url(path):
        found = by_name or of_content(path)
    else:
        _check_readable(path)
        found = of_content(path)
        if found is None or (found is FORMATS["jsonl"] and has_no_mark):
            found = by_name
    if found is None or not (has_no_mark or is_url(path)):
        first = _first_bytes(path)
        kind = other_kinds.of_file(identified(path), first)
        if kind is not None and (found is None or kind.whatever_name):
            raise ValueError(kind.message(shown(path)))
    if found is None:
        empty = "" if first else "it is empty, and "
        head = f"{path}: {empty}its format is not known from its name or content; pass "
        raise ValueError(Message(head, Argument("format"), f" ({', '.join(READ)})"))
    return found


def _check_readable(path: str) -> None:
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{path}: no such file")
    _check_directory(place)
    if not place.is_file():
        raise OSError(f"{path}: not a regular file")


def _check_directory(place: Path) -> None:
    if not place.is_dir():
        return
    path = str(place)
    kind = other_kinds.of_directory(path, other_kinds.entries(path))
    if kind is not None:
        raise ValueError(kind.message(path))


def find_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns the files that paths stand for, as `grainmill.sources.expand_paths` does.

    Of directories it takes the files of all formats: those whose name says one, or all if none has
    such a name.

    Args:
        paths: A path or several: files, patterns, `name@N`, directories, URLs.

    Raises:
        FileNotFoundError: No file matches a pattern, or is in a directory.
        ValueError: There is no path, or a directory is of a kind that is not read.

    Example:
        >>> from grainmill import files
        >>> for name in ("a.jsonl", "b.tfrecord", "notes.txt"):
        ...     with open(name, "w") as file:
        ...         _ = file.write("")
        >>> files.find_files(["."])
        ['./a.jsonl', './b.tfrecord']
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not several:
        raise ValueError("`paths` must name a file, got none")
    return [file for path in several for file in _files_of(os.fspath(path))]


def _files_of(path: str) -> list[str]:
    if not is_url(path):
        _check_directory(Path(path))
    found = sources.expand_paths(path)
    if len(found) > 1 and Path(path).is_dir():  # without what is no file of records
        return [file for file in found if of_name(file) is not None] or found
    return found
