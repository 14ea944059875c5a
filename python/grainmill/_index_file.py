"""A small file that says how many records other files hold, so that these need not be opened."""

import errno
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from grainmill import _native

# How many records a file holds, its bytes, and when it was written, in nanoseconds since 1970.
Noted: TypeAlias = tuple[int, int, int]

_FORMAT = "grainmill index of record files"
_VERSION = 1
_COLUMNS = ("paths", "num_records", "byte_len", "modified_ns")


def noted(index: str, paths: Sequence[str]) -> list[Noted]:
    """What the index file at `index` says of `paths`.

    Those that it lacks are opened, and it is written anew with them, as a whole or not at all.

    Raises:
        ValueError: The index file is damaged, or is none.
    """
    known = _read(index)
    missing = [path for path in dict.fromkeys(paths) if path not in known]
    if missing:
        files = _native.RecordFiles([(path, 0, None) for path in missing])
        known.update(zip(missing, files.noted(), strict=True))
        _write(index, known)
    return [known[path] for path in paths]


def _read(index: str) -> dict[str, Noted]:
    try:
        header_line, _, body = Path(index).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    try:
        header = json.loads(header_line)
        is_one = header["format"] == _FORMAT
    except (ValueError, TypeError, KeyError):
        is_one = False
    if not is_one:
        raise ValueError(f"{index}: not an index of record files; delete it or name another")
    if header.get("version") != _VERSION:
        found = header.get("version")
        raise ValueError(f"{index}: version {found!r} of an index, expected {_VERSION}; delete it")
    if header.get("sha256") != _sum(body):
        raise ValueError(f"{index}: the index is damaged (its checksum differs); delete it")
    columns: dict[str, list[Any]] = json.loads(body)
    entries = zip(*(columns[name] for name in _COLUMNS[1:]), strict=True)
    return dict(zip(columns["paths"], entries, strict=True))


def _write(index: str, known: dict[str, Noted]) -> None:
    values = list(itertools.chain([tuple(known)], zip(*known.values(), strict=True)))
    body = json.dumps(dict(zip(_COLUMNS, values, strict=True))).encode()
    header = {"format": _FORMAT, "version": _VERSION, "sha256": _sum(body)}
    part = Path(f"{index}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + body)
            file.flush()
            _sync(file.fileno(), str(part))
        part.replace(index)
    finally:
        part.unlink(missing_ok=True)


def _sync(file: int, path: str) -> None:
    """Has the system write the file, which may be when it finds that there is no room for it."""
    try:
        os.fsync(file)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP):  # there it cannot be asked to
            raise OSError(failure.errno, failure.strerror, path) from None


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
