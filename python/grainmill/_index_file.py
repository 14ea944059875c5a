"""A small file with the number of records of other files, so that these need not be opened."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from grainmill import _atomic_file, _native
from grainmill._url import identified, shown

# A file's number of records, length in bytes, and modification time in nanoseconds since 1970.
FileEntry: TypeAlias = tuple[int, int, int]

_FORMAT = "grainmill index of record files"
_VERSION = 1
_COLUMNS = ("paths", "num_records", "byte_len", "modified_ns")


def read_entries(index: str, paths: Sequence[str]) -> list[FileEntry]:
    """The entries of `paths` in the index file at `index`.

    Files without an entry are opened, and the index file is atomically replaced by one with them.

    Raises:
        ValueError: The index file is damaged or is not an index file.
    """
    entries = _read(index)
    names: dict[str, str] = {}
    for path in paths:
        if names.setdefault(identified(path), path) != path:
            raise ValueError(
                f"{index}: an index cannot tell files apart that differ only in the query of their "
                f"URL, as several do of {shown(path)}; leave out `index`"
            )
    missing = {name: path for name, path in names.items() if name not in entries}
    if missing:
        files = _native.RecordFiles([(path, 0, None) for path in missing.values()])
        entries.update(zip(missing, files.file_infos(), strict=True))
        _write(index, entries)
    return [entries[identified(path)] for path in paths]


def _read(index: str) -> dict[str, FileEntry]:
    path = Path(index)
    if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe would wait
        raise ValueError(f"{index}: not a regular file")
    try:
        header_line, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    try:
        header = json.loads(header_line)
        is_index = header["format"] == _FORMAT
    except (ValueError, TypeError, KeyError):
        is_index = False
    if not is_index:
        raise ValueError(
            f"{index}: not an index of record files; pass another path as `index`, or delete it"
        )
    if header.get("version") != _VERSION:
        raise ValueError(
            f"{index}: expected an index of version {_VERSION}, got version "
            f"{header.get('version')!r}; delete it"
        )
    if header.get("sha256") != _checksum(body):
        raise ValueError(f"{index}: checksum mismatch, the index is damaged; delete it")
    columns: dict[str, list[Any]] = json.loads(body)
    entries = zip(*(columns[name] for name in _COLUMNS[1:]), strict=True)
    return dict(zip(columns["paths"], entries, strict=True))


def _write(index: str, entries: dict[str, FileEntry]) -> None:
    values = list(itertools.chain([tuple(entries)], zip(*entries.values(), strict=True)))
    body = json.dumps(dict(zip(_COLUMNS, values, strict=True))).encode()
    header = {"format": _FORMAT, "version": _VERSION, "sha256": _checksum(body)}
    _atomic_file.write(Path(index), json.dumps(header).encode() + b"\n" + body)


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
