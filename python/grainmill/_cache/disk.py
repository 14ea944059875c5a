"""Elements of a dataset with random access in files, which any number of processes write.

Each process appends the elements that it computes to a part of its own, so processes, also of other
machines, need no lock: a part belongs to one writer, and is visible when it is complete. Its last
record lists the indices of its elements. An element that two processes computed is in two parts,
of which each reader uses one. Whoever finds all elements in parts writes the manifest, with an
index that later runs map into memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grainmill._cache import files
from grainmill._cache.encoding import MISSING, decoded, encoded
from grainmill._interrupts import raise_interrupt
from grainmill._native import GrainmillError, RecordFiles
from grainmill._threads import at_fork
from grainmill._workers.at_exit import call_at_exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from grainmill._cache.memory import Indices
    from grainmill._native import ReadQueue
    from grainmill._plan.node import Node

# An open part is lost if its process is killed, so it becomes visible at this size, or at a share
# of what was written before if that is more: few parts, and little to compute again.
_MIN_PART_BYTES: Final = 1 << 20
_MAX_PART_BYTES: Final = 64 << 20
_PART_SHARE: Final = 4
# A checksum is of so many entries of the index.
_TABLE_BLOCK: Final = 1 << 13
# Parts that become visible within this time may leave the directory with the same time of change.
_TICK_S: Final = 0.02
# In the table of a process: absent, or in its own open part; else the number of the record, plus 1.
_ABSENT: Final = 0
_IN_OPEN_PART: Final = -1


class DiskStore:
    """The elements of one pipeline by index, in files.

    It is pickled as its directory, so a worker process reads and writes the same files. Until the
    cache is finished, a table of 8 bytes per element is kept in each process.

    Args:
        directory: Where the files are.
        length: The number of elements.
    """

    def __init__(self, directory: files.CacheDirectory, length: int) -> None:
        self._directory = directory
        self._length = length
        self._lock = threading.RLock()
        self._is_open = False
        _stores.add(self)

    def for_parent(self, parent: Node) -> DiskStore:
        """See `MemoryStore.for_parent`; a store below the same path."""
        return DiskStore(self._directory.for_parent(parent), getattr(parent, "length", 0))

    def __reduce__(self) -> Any:
        return DiskStore, (self._directory, self._length)

    def _open(self) -> None:
        """Finds what is stored already; called before anything else."""
        if self._is_open:
            return
        with self._lock:
            if self._is_open:
                return
            self._writer: files.PartWriter | None = None
            self._own: list[int] = []
            self._num_open = 0  # those of them that no other process has made visible
            self._num_flushed_bytes = 0
            self._can_write = True
            self._parts: dict[str, int] = {}
            self._listed_ns = -1
            self._changed_ns, self._change_seen_s = -1, 0.0
            self._is_verified = np.zeros(0, bool)  # of blocks of a finished cache's index
            manifest = self._directory.manifest()
            self._is_finished = manifest is not None
            if manifest is not None:
                self._open_finished(manifest)
            else:
                self._files: RecordFiles | None = None
                self._table: Any = np.zeros(self._length, np.int64)
                self._num_known = 0
                self._directory.make()
                files.remove_leftovers(self.directory, f"*{files.UNFINISHED}")
                self._refresh()
                self._finish_if_complete()
            self._is_open = True

    @property
    def directory(self) -> Path:
        """The directory of this pipeline's cache."""
        return self._directory.path

    def _open_finished(self, manifest: dict[str, Any]) -> None:
        index = self.directory / str(manifest.get("index"))
        try:
            self._table = np.load(index, mmap_mode="r")
        except Exception as failure:  # it evaluates the header, which raises anything
            raise ValueError(f"{index}: damaged; delete {self.directory}") from failure
        if self._table.shape != (self._length,) or self._table.dtype != np.int64:
            raise ValueError(f"{index}: expected {self._length} numbers; delete {self.directory}")
        self._index, self._checksums = index, bytes.fromhex(str(manifest.get("index_crc32")))
        self._is_verified = np.zeros(-(-self._length // _TABLE_BLOCK), bool)
        self._parts = manifest["parts"]
        self._files = self._directory.opened(self._parts) if self._parts else None
        self._num_known = self._length

    @property
    def is_complete(self) -> bool:
        """See `MemoryStore.is_complete`."""
        self._open()
        return self._num_known == self._length

    @property
    def is_slow(self) -> bool:
        """See `MemoryStore.is_slow`; by recent reads."""
        return self._is_open and self._files is not None and self._files.is_slow

    def missing(self, index: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `MemoryStore.missing`; also those that are not visible yet."""
        self._open()
        rows = self._rows(index)
        if self._num_known < self._length and (rows <= _ABSENT).any():
            with self._lock:
                self._check_process()
                self._refresh()
                if (self._table[index] == _IN_OPEN_PART).any() and self._flush_is_worth():
                    self._flush()
            rows = self._table[index]
        absent: np.ndarray[Any, np.dtype[np.bool_]] = rows <= _ABSENT
        return absent

    def _rows(self, index: Indices) -> Any:
        """The entries of the table; those of a finished cache are verified when first used."""
        if not self._is_verified.all():
            for block in set((np.asarray(index) // _TABLE_BLOCK).tolist()):
                if not self._is_verified[block]:
                    entries = self._table[block * _TABLE_BLOCK : (block + 1) * _TABLE_BLOCK]
                    if _crc32(entries) != self._checksums[4 * block : 4 * block + 4]:
                        first = block * _TABLE_BLOCK
                        raise ValueError(
                            f"{self._index}: checksum mismatch at element {first}; delete "
                            f"{self.directory}"
                        )
                    self._is_verified[block] = True
        return self._table[index]

    def _flush_is_worth(self) -> bool:
        """Whether the open part is large enough that there will be few of them."""
        return self._num_open * _PART_SHARE >= self._num_known

    def start_read(self, index: Indices, reads: ReadQueue) -> files.PendingRecords | None:
        """See `MemoryStore.start_read`."""
        self._open()
        try:
            rows = self._rows(index)
            opened = self._files
            wanted = rows[rows > _ABSENT] - 1
            if opened is None or not len(wanted):
                return None
            return files.PendingRecords(rows, opened.start(wanted, reads))
        except Exception as failure:
            raise_interrupt(failure)
            return None  # `read` finds the failing element

    def read(self, index: Indices, pending: files.PendingRecords | None = None) -> Iterator[Any]:
        """See `MemoryStore.read`."""
        self._open()
        rows = self._rows(index) if pending is None else pending.wanted
        opened = self._files  # after the table: it has all records that the table refers to
        wanted = rows[rows > _ABSENT] - 1
        try:
            if pending is None:
                records = iter(opened.read(wanted) if opened is not None and len(wanted) else ())
            else:
                records = iter(pending.records())
        except Exception as failure:  # reading one by one finds the failing element
            raise_interrupt(failure)
            assert opened is not None
            records = map(opened.read_one, wanted.tolist())
        for row in rows.tolist():
            yield decoded(next(records)) if row > _ABSENT else MISSING

    def put(self, index: Sequence[int], elements: Sequence[Any]) -> None:
        """See `MemoryStore.put`; a full disk ends the caching, with a warning."""
        self._open()
        if not self._can_write or self._num_known == self._length:
            return
        records = [encoded(element) for element in elements]
        with self._lock:
            self._check_process()
            try:
                self._append(index, records)
            except (OSError, GrainmillError) as failure:
                raise_interrupt(failure)
                self._stop_writing(failure)
            except BaseException:  # the part may have a record more than `_own`
                self._forget_open_part()
                raise

    def _append(self, index: Sequence[int], records: Sequence[list[Any]]) -> None:
        for number, pieces in zip(index, records, strict=True):
            if self._table[number] != _ABSENT:
                continue
            if self._writer is None:
                self._writer = files.PartWriter(self.directory)
            self._writer.write(pieces)
            self._own.append(number)
            self._table[number] = _IN_OPEN_PART
            self._num_open += 1
        if self._writer is not None:
            share = self._num_flushed_bytes // _PART_SHARE
            limit = min(_MAX_PART_BYTES, max(_MIN_PART_BYTES, share))
            is_last = self._num_known + self._num_open == self._length
            if is_last or self._writer.byte_len >= limit:
                self._flush()

    def flush(self) -> None:
        """Makes the open part visible to others."""
        if self._is_open:
            with self._lock:
                self._check_process()
                self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            return
        try:
            self._finish_part(self._writer)
        except (OSError, GrainmillError) as failure:
            raise_interrupt(failure)
            # Whoever finished the cache has removed what was unfinished.
            is_finished = (self.directory / files.MANIFEST).exists()
            self._stop_writing(None if is_finished else failure)
            self._refresh()
            return
        except BaseException:
            self._forget_open_part()
            raise
        self._refresh()
        self._finish_if_complete()

    def _finish_part(self, writer: files.PartWriter) -> None:
        own = np.array(self._own, np.int64)
        name = f"part-{files.new_name()}{files.SUFFIX}"
        writer.write([own.astype("<i8").tobytes()])
        writer.finish(name)
        self._num_flushed_bytes += writer.byte_len
        self._add(name, own)
        self._writer, self._own = None, []

    def _stop_writing(self, failure: BaseException | None) -> None:
        self._can_write = False
        self._forget_open_part()
        if failure is not None:
            self._directory.warn_unwritable(failure)

    def _forget_open_part(self) -> None:
        writer, self._writer = self._writer, None
        own, self._own = np.array(self._own, np.int64), []
        own = own[self._table[own] == _IN_OPEN_PART]
        self._table[own] = _ABSENT
        self._num_open = 0
        if writer is not None:
            writer.abandon()

    def _check_process(self) -> None:
        """In a forked child: leaves the open part to the parent."""
        if self._writer is not None and not self._writer.is_own:
            self._forget_open_part()

    def _refresh(self) -> None:
        """Adds the parts that others have made visible."""
        try:
            changed_ns, now = self.directory.stat().st_mtime_ns, time.monotonic()
            if changed_ns == self._listed_ns:
                return
            if changed_ns != self._changed_ns:
                self._changed_ns, self._change_seen_s = changed_ns, now
            names = [entry.name for entry in os.scandir(self.directory)]
        except FileNotFoundError:
            return  # deleted by the user
        for name in sorted(names):
            if name.startswith("part-") and name.endswith(files.SUFFIX) and name not in self._parts:
                part = RecordFiles([(str(self.directory / name), 0, None)], lazy=True)
                count = len(part) - 1
                listed = np.frombuffer(part.read_one(count), "<i8") if count >= 0 else ()
                if len(listed) != count or min(listed) < 0 or max(listed) >= self._length:
                    raise ValueError(
                        f"{self.directory / name}: not a part of this cache; delete the file"
                    )
                self._add(name, listed)
        if now - self._change_seen_s > _TICK_S:
            self._listed_ns = changed_ns

    def _add(self, name: str, index: Any) -> None:
        """Makes the elements of a part visible in this process."""
        first = sum(self._parts.values())
        added = {name: len(index) + 1}
        parts, part = self._parts | added, self._directory.opened(added)
        joined = part if self._files is None else RecordFiles.joined([self._files, part])
        rows = self._table[index]
        new = index[rows <= _ABSENT]
        numbers = (first + 1 + np.arange(len(index)))[rows <= _ABSENT]
        num_known = self._num_known + len(new)
        num_open = self._num_open - int((rows == _IN_OPEN_PART).sum())
        # Nothing is called between these, so an interrupt leaves all of them as they were, or none.
        self._parts, self._files = parts, joined
        self._table[new] = numbers
        self._num_known, self._num_open = num_known, num_open

    def _finish_if_complete(self) -> None:
        """Writes the manifest if all elements are visible; several processes may do so."""
        if self._is_finished or self._num_known < self._length:
            return
        self._is_finished = True
        name = f"index-{files.new_name()}.npy"
        try:
            with (self.directory / name).open("xb") as file:
                np.save(file, self._table)
                file.flush()
                os.fsync(file.fileno())
            starts = range(0, self._length, _TABLE_BLOCK)
            checksums = [_crc32(self._table[start : start + _TABLE_BLOCK]) for start in starts]
            self._directory.write_manifest(
                self.directory,
                self._length,
                self._parts,
                index=name,
                index_crc32=b"".join(checksums).hex(),
            )
            for unfinished in self.directory.glob(f"*{files.UNFINISHED}"):
                unfinished.unlink(missing_ok=True)
        except BaseException as failure:
            # All elements are there, and later runs find them in the parts.
            with contextlib.suppress(OSError, ValueError):
                manifest = self._directory.manifest()
                if manifest is None or manifest.get("index") != name:
                    (self.directory / name).unlink()
            if not isinstance(failure, OSError):
                raise
            self._directory.warn_unwritable(failure)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.flush()


def _crc32(entries: Any) -> bytes:
    table: Any = np.ascontiguousarray(entries, "<i8")
    return zlib.crc32(table).to_bytes(4, "little")


_stores: Final[weakref.WeakSet[DiskStore]] = weakref.WeakSet()


@call_at_exit
def _flush_all() -> None:
    for store in list(_stores):
        with contextlib.suppress(Exception):
            store.flush()


def _after_fork() -> None:
    for store in list(_stores):
        store._lock = threading.RLock()  # noqa: SLF001 - another thread may have held it


at_fork(after_in_child=_after_fork)
