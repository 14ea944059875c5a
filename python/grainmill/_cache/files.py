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
from grainmill._cache.fingerprint import Fingerprint
from grainmill._checkpoint.pipeline import reported
from grainmill._interrupts import raise_interrupt
from grainmill._native import ArrayRecordWriter, GrainmillError, RecordFiles

if TYPE_CHECKING:
    from grainmill._native import PendingRead
    from grainmill._plan.node import Node

MANIFEST: Final = "manifest.json"
PIPELINE: Final = "pipeline.json"
PREFIX: Final = "cache-"
SUFFIX: Final = ".array_record"
UNFINISHED: Final = ".tmp"
# Elements are read one by one in any order, and mostly are arrays that hardly compress.
_OPTIONS: Final = "group_size:1,uncompressed"
_MAX_OTHERS_READ: Final = 16

_logger = logging.getLogger("grainmill")


class CacheDirectory:
    """The directory of one pipeline's cache, below the user's path and named by the fingerprint.

    It is pickled with the fingerprint, so a worker process uses the same one.

    Args:
        root: The user's path.
        kind: What kind of cache it is for.
        parent: The plan whose elements are stored; `None` if the fingerprint is given.
        fingerprint: What makes the elements.
    """

    def __init__(
        self, root: str, kind: str, parent: Node | None, fingerprint: Fingerprint | None = None
    ) -> None:
        self._root = os.path.abspath(root)  # noqa: PTH100 - workers have other directories
        self._kind = kind
        self._parent = parent
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def for_parent(self, parent: Node) -> CacheDirectory:
        """The one of another pipeline, below the same path."""
        return CacheDirectory(self._root, self._kind, parent)

    def share(self, worker: int, count: int) -> CacheDirectory:
        """The one of the share of one of several workers."""
        share = self.fingerprint.share(worker, count)
        return CacheDirectory(self._root, self._kind, None, share)

    def __reduce__(self) -> Any:
        return CacheDirectory, (self._root, self._kind, None, self.fingerprint)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """What makes the elements."""
        assert self._parent is not None
        return Fingerprint.of(self._parent, self._kind)

    @functools.cached_property
    def path(self) -> Path:
        """The directory, which need not exist."""
        return Path(self._root) / f"{PREFIX}{self.fingerprint.digest}"

    @property
    def mode(self) -> int:
        """The mode of the directory; the system's mask applies."""
        return 0o700 if self.fingerprint.is_private else 0o777

    def make_root(self) -> None:
        """Makes the user's path; warns of other pipelines' caches in it.

        Raises:
            OSError: It cannot be made, or not written to.
        """
        root = self.path.parent
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as failure:
            raise type(failure)(
                failure.errno, f"cannot write a cache: {failure.strerror}", str(root)
            ) from failure
        with contextlib.suppress(OSError):
            self._warn_of_others()

    def make(self) -> None:
        """Makes the directory, as `make_root`, with a description of the pipeline."""
        self.make_root()
        self.path.mkdir(self.mode, exist_ok=True)
        if not (self.path / PIPELINE).exists():
            self.write_description(self.path)

    def _described(self) -> dict[str, Any]:
        """What the files say about the pipeline."""
        return {
            "format": "grainmill cache",
            "fingerprint": self.fingerprint.digest,
            "pipeline": self.fingerprint.stages,
            "code": self.fingerprint.code,
        }

    def write_description(self, directory: Path) -> None:
        """Writes what made the elements in `directory`, whether or not it is finished."""
        text = json.dumps(self._described(), indent=1)
        _atomic_file.write(directory / PIPELINE, text.encode())

    def _warn_of_others(self) -> None:
        """Logs what differs from the pipelines of the caches that are beside it already."""
        others = sorted(self.path.parent.glob(f"{PREFIX}*/{PIPELINE}"))
        if not others or (self.path / PIPELINE).exists():
            return
        closest: list[str] = []
        for other in others[:_MAX_OTHERS_READ]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                saved = json.loads(other.read_text("utf-8"))
                found = self.fingerprint.differences(saved["pipeline"], saved["code"])
                if not closest or len(found) < len(closest):
                    closest = found
        _logger.warning(
            "%s has a cache of another pipeline, which is not used, and a new one is written "
            "beside it: %s; delete what is no longer needed",
            self.path.parent,
            reported(closest) if closest else "its description cannot be read",
        )

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of a finished cache, as `write_manifest` takes it; `None` if there is none.

        Raises:
            ValueError: It, or a part that it names, is damaged.
        """
        path = self.path / MANIFEST
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            content: dict[str, Any] = json.loads(text)
            is_intact = content.pop("sha256") == _digest(content)
            parts = [
                (str(part["name"]), int(part["num_records"]), int(part["byte_len"]))
                for part in content["parts"]
            ]
            int(content["num_elements"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_intact, parts = False, []
        if not is_intact:
            raise ValueError(f"{path}: not the manifest of a cache; delete {self.path}")
        for name, _, byte_len in parts:
            part = self.path / name
            found = part.stat().st_size if part.exists() else None
            if found != byte_len:
                has = "is missing" if found is None else f"has {found} bytes"
                raise ValueError(
                    f"{part}: expected {byte_len} bytes, but it {has}; delete {self.path}"
                )
        return {**content, "parts": {name: count for name, count, _ in parts}}

    def write_manifest(
        self, directory: Path, num_elements: int, parts: dict[str, int], **more: Any
    ) -> None:
        """Writes the manifest that makes a cache a finished one.

        Args:
            directory: Where the parts are.
            num_elements: The number of elements.
            parts: The names of the files, with the number of records in each.
            more: What else the manifest says.
        """
        listed = [
            {"name": name, "num_records": count, "byte_len": (directory / name).stat().st_size}
            for name, count in parts.items()
        ]
        content = {**self._described(), "num_elements": num_elements, **more, "parts": listed}
        content["sha256"] = _digest(content)
        _atomic_file.write(directory / MANIFEST, json.dumps(content, indent=1).encode())

    def opened(self, parts: dict[str, int]) -> RecordFiles:
        """The records of some parts as one sequence; a file is opened when it is first read."""
        files = [(str(self.path / name), 0, count) for name, count in parts.items()]
        return RecordFiles(files, lazy=True)

    def warn_unwritable(self, failure: BaseException) -> None:
        """Logs, once, that elements are computed but no longer cached."""
        with _warn_lock:
            if str(self.path) in _warned:
                return
            _warned.add(str(self.path))
        _logger.warning(
            "%s: elements are no longer cached, as writing failed: %s", self.path, failure
        )


_warned: Final[set[str]] = set()
_warn_lock = threading.Lock()


def _digest(manifest: dict[str, Any]) -> str:
    """The checksum of what a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class PendingRecords:
    """Records of a cache that are being read.

    Attributes:
        wanted: What they are the records of.
    """

    def __init__(self, wanted: Any, reads: PendingRead) -> None:
        self.wanted = wanted
        self._reads = reads
        self._records: list[bytes] | Exception | None = None

    def wait(self) -> None:
        """Waits for the reads."""
        try:
            self._records = self._reads.finish()
        except Exception as failure:
            raise_interrupt(failure)
            self._records = failure

    def records(self) -> list[bytes]:
        """The records.

        Raises:
            Exception: One cannot be read.
        """
        if self._records is None:
            self.wait()
        if isinstance(self._records, Exception):
            raise self._records
        assert self._records is not None
        return self._records


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
        if found is None or _atomic_file.is_running(int(found[1])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


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
            _atomic_file.sync(self._path, os.O_RDWR)
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
        """Removes the file; a forked child that inherited it leaves it to its parent."""
        if not self.is_own:
            _inherited.append(self)
            return
        with contextlib.suppress(OSError, GrainmillError):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


# Dropping the parent's writer would write to the file.
_inherited: Final[list[PartWriter]] = []
