"""The files of a cache: parts that are written under other names, and a manifest that names them.

A directory below the user's path holds the cache of one pipeline, and is named by its fingerprint.
A part is an ArrayRecord file of encoded elements that was synced and renamed when it was complete,
so every part is usable, whatever became of its writer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grainmill import _atomic_file
from grainmill._checkpoint.pipeline import reported
from grainmill._native import ArrayRecordWriter, GrainmillError, RecordFiles

if TYPE_CHECKING:
    from grainmill._cache.fingerprint import Fingerprint

MANIFEST: Final = "manifest.json"
PIPELINE: Final = "pipeline.json"
PREFIX: Final = "cache-"
SUFFIX: Final = ".array_record"
UNFINISHED: Final = ".tmp"
# Elements are read one by one in any order, and mostly are arrays that hardly compress.
_OPTIONS: Final = "group_size:1,uncompressed"
_MAX_OTHERS_READ: Final = 16

_logger = logging.getLogger("grainmill")


def directory_of(path: str, fingerprint: Fingerprint) -> Path:
    """The directory of one pipeline's cache below `path`, which need not exist."""
    return Path(path) / f"{PREFIX}{fingerprint.digest}"


def described(fingerprint: Fingerprint) -> dict[str, Any]:
    """What the files of a cache say about its pipeline."""
    return {
        "format": "grainmill cache",
        "fingerprint": fingerprint.digest,
        "pipeline": fingerprint.stages,
        "code": fingerprint.code,
    }


def mode_of(fingerprint: Fingerprint) -> int:
    """The mode of the directory of a cache; the system's mask applies."""
    return 0o700 if fingerprint.is_private else 0o777


def make_parent(directory: Path, fingerprint: Fingerprint) -> None:
    """Makes the directory that a new cache is to be in; warns of other pipelines' caches in it.

    Raises:
        OSError: It cannot be made, or not written to.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(directory.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as failure:
        raise type(failure)(
            failure.errno, f"cannot write a cache: {failure.strerror}", str(directory.parent)
        ) from failure
    with contextlib.suppress(OSError):
        warn_of_others(directory, fingerprint)


def make_directory(directory: Path, fingerprint: Fingerprint) -> None:
    """Makes the directory of a new cache, as `make_parent`, with a description of its pipeline."""
    make_parent(directory, fingerprint)
    directory.mkdir(mode_of(fingerprint), exist_ok=True)
    if not (directory / PIPELINE).exists():
        write_description(directory, fingerprint)


def write_description(directory: Path, fingerprint: Fingerprint) -> None:
    """Writes what made the elements in `directory`, whether or not it is finished."""
    text = json.dumps(described(fingerprint), indent=1)
    _atomic_file.write(directory / PIPELINE, text.encode())


def warn_of_others(directory: Path, fingerprint: Fingerprint) -> None:
    """Logs what differs from the pipelines of the caches that are beside `directory` already."""
    others = []
    if directory.parent.is_dir():
        others = sorted(directory.parent.glob(f"{PREFIX}*/{PIPELINE}"))
    if not others or (directory / PIPELINE).exists():
        return
    closest: list[str] = []
    for other in others[:_MAX_OTHERS_READ]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(other.read_text("utf-8"))
            found = fingerprint.differences(saved["pipeline"], saved["code"])
            if not closest or len(found) < len(closest):
                closest = found
    _logger.warning(
        "%s has a cache of another pipeline, which is not used, and a new one is written beside "
        "it: %s; delete what is no longer needed",
        directory.parent,
        reported(closest) if closest else "its description cannot be read",
    )


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a finished cache; `None` if it is not finished.

    Raises:
        ValueError: It, or a part that it names, is damaged.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest: dict[str, Any] = json.loads(text)
        is_intact = manifest.pop("sha256") == _digest(manifest)
        parts = [
            (str(part["name"]), int(part["num_records"]), int(part["byte_len"]))
            for part in manifest["parts"]
        ]
        int(manifest["num_elements"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_intact, parts = False, []
    if not is_intact:
        raise ValueError(f"{path}: not the manifest of a cache; delete {directory}")
    for name, _, byte_len in parts:
        part = directory / name
        found = part.stat().st_size if part.exists() else None
        if found != byte_len:
            has = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{part}: expected {byte_len} bytes, but it {has}; delete {directory}")
    return manifest


def write_manifest(
    directory: Path, fingerprint: Fingerprint, num_elements: int, parts: dict[str, int], **more: Any
) -> None:
    """Writes the manifest that makes a cache a finished one.

    Args:
        directory: Where the parts are.
        fingerprint: What made them.
        num_elements: The number of elements.
        parts: The names of the files, with the number of records in each.
        more: What else the manifest says.
    """
    listed = [
        {"name": name, "num_records": count, "byte_len": (directory / name).stat().st_size}
        for name, count in parts.items()
    ]
    manifest = {**described(fingerprint), "num_elements": num_elements, **more, "parts": listed}
    manifest["sha256"] = _digest(manifest)
    _atomic_file.write(directory / MANIFEST, json.dumps(manifest, indent=1).encode())


def _digest(manifest: dict[str, Any]) -> str:
    """The checksum of what a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def opened(directory: Path, parts: list[tuple[str, int]]) -> RecordFiles:
    """The records of several parts as one sequence; a file is opened when it is first read.

    Args:
        directory: Where the parts are.
        parts: The name of each file, with the number of its records.
    """
    return RecordFiles([(str(directory / name), 0, count) for name, count in parts], lazy=True)


def new_name() -> str:
    """The name of a file that no other process chooses, with what made it."""
    return f"{_host()}-{os.getpid()}-{os.urandom(6).hex()}"


@functools.cache
def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:32] or "host"


def remove_leftovers(directory: Path, pattern: str) -> None:
    """Removes unfinished files and directories of processes of this machine that have ended."""
    if os.name != "posix":  # elsewhere, asking whether a process runs may end it
        return
    for path in directory.glob(pattern):
        found = re.search(rf"(?:^|-){_host()}-(\d+)-[0-9a-f]{{12}}", path.name)
        if found is None or _is_running(int(found[1])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        pass
    return True


class PartWriter:
    """A part that is being written under a temporary name.

    Attributes:
        num_records: How many records were written.
        byte_len: Their bytes.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{new_name()}{UNFINISHED}"
        self._writer = ArrayRecordWriter(str(self._path), _OPTIONS)
        self._pid = os.getpid()
        self.num_records = 0
        self.byte_len = 0

    def write(self, pieces: list[Any]) -> None:
        """Appends a record.

        Raises:
            OSError: The disk is full, for instance.
        """
        record = b"".join(pieces)
        self._writer.write(record)
        self.num_records += 1
        self.byte_len += len(record)

    def finish(self, name: str) -> None:
        """Makes the file complete, durable, and visible under `name`.

        Raises:
            OSError: The disk is full, or another process has removed the file.
        """
        try:
            self._writer.close()
            file = os.open(self._path, os.O_RDWR)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            self._path.replace(self._path.with_name(name))
        except BaseException:
            self.abandon()
            raise
        _atomic_file.sync_directory(self._path.parent)

    @property
    def is_own(self) -> bool:
        """Whether this process has created it, and not one that it was forked from."""
        return self._pid == os.getpid()

    def abandon(self) -> None:
        """Removes the file, unless a forked child inherited it."""
        if not self.is_own:
            return
        with contextlib.suppress(OSError, GrainmillError):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


_inherited: Final[list[PartWriter]] = []


def keep_if_inherited(writer: PartWriter) -> None:
    """In a forked child, keeps the parent's writer: dropping it would write to the file."""
    if not writer.is_own:
        _inherited.append(writer)


@functools.cache
def _warned() -> set[str]:
    return set()


_warn_lock = threading.Lock()


def warn_unwritable(directory: Path, failure: BaseException) -> None:
    """Logs, once, that elements are computed but no longer cached."""
    with _warn_lock:
        if str(directory) in _warned():
            return
        _warned().add(str(directory))
    _logger.warning("%s: elements are no longer cached, as writing failed: %s", directory, failure)
