"""A source of WebDataset shards; `grainmill.sources` has its name."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from grainmill._sources.record_files import ScannedFilesSource

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD = struct.Struct("<II")
_LENGTHS = struct.Struct("<IQ")


class WebDatasetDataSource(ScannedFilesSource[dict[str, Any]]):
    """The samples of WebDataset tar files, as one sequence of dicts with random access.

    Consecutive files in a tar file that differ only in what follows the first dot of their name
    are a sample: `images/0001.jpg` and `images/0001.json` give `{"__key__": "images/0001",
    "jpg": b"...", "json": b"..."}`. Extensions are lower case. Directories, links and files
    without an extension are not part of any sample. Long names of GNU and POSIX tar are read; bytes
    of names that are not UTF-8 become lone surrogates, as in Python's `tarfile`. Sparse files are
    refused, and so is an extension `__key__`.

    Samples are found by one scan of each file, which skips the files' contents, and kept in an
    index file, as by `TFRecordDataSource`. tar protects headers by checksums, but not contents, and
    as for other programs the zeros at its end may be missing: a tar file that was cut exactly
    between two files is read up to there.

    Args:
        paths: A path or a sequence of paths.
        compression: `"auto"` recognises gzip and zstd by the first bytes of each file; otherwise
            `"none"`, `"gzip"`, `"zlib"` or `"zstd"`.
        index_dir: The directory of index files; see `TFRecordDataSource`.

    Raises:
        ValueError: There is no path, or `compression` is unknown.
        FileNotFoundError: There is no such file.
        GrainmillError: A file is not a tar file, is cut short, or has sparse files. When a sample
            is read: two of its files have one extension, or one has the extension `__key__`.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open("shard.tar", "w") as tar:
        ...     for name, data in [("0.cls", b"7"), ("0.txt", b"seven"), ("1.cls", b"8")]:
        ...         info = tarfile.TarInfo(name)
        ...         info.size = len(data)
        ...         tar.addfile(info, io.BytesIO(data))
        >>> source = grain.sources.WebDatasetDataSource("shard.tar")
        >>> len(source), source[0]
        (2, {'__key__': '0', 'cls': b'7', 'txt': b'seven'})
    """

    _yields_records = False
    _format = "webdataset"
    _scan = "web_dataset"

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[Any]:  # noqa: ARG002
        return [_sample(record) for record in records]


def _sample(record: bytes) -> dict[str, Any]:
    """The files of a sample, as the engine packs them into one record."""
    key_len, count = _HEAD.unpack_from(record)
    at = _HEAD.size + count * _LENGTHS.size
    files: dict[str, Any] = {"__key__": _text(record[at : at + key_len])}
    at += key_len
    for name_len, data_len in _LENGTHS.iter_unpack(record[_HEAD.size : at - key_len]):
        name = _text(record[at : at + name_len])
        at += name_len
        files[name] = record[at : at + data_len]
        at += data_len
    return files


def _text(name: bytes) -> str:
    """A name; bytes that are not UTF-8 stay apart, as in Python's names of files."""
    return name.decode("utf-8", "surrogateescape")
