"""Elements by index in memory, in bounds: of one process, or shared by a pipeline's workers."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from grainmill._cache.encoding import MISSING, decoded, encoded
from grainmill._native import create_shared_file
from grainmill._threads import at_fork

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from grainmill._cache.files import PendingRecords
    from grainmill._native import ReadQueue
    from grainmill._plan.node import Node

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

# A random token, by which a worker recognizes the file, and the bytes taken so far.
_HEADER: Final = struct.Struct("<16sQ")
_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 16
# `struct flock`: type, from where, start, length, process.
_WHOLE_FILE: Final = struct.Struct("@hhqqi")


class MemoryStore:
    """The elements of one pipeline by index, until they take `budget_bytes`.

    It is pickled without its elements; in a worker process of this machine, the copy finds them in
    memory that both share. What does not fit is not stored: with a pass over all elements as the
    use, keeping those that came first serves as many reads as any other choice.

    Args:
        budget_bytes: The limit.
        length: The number of elements.
    """

    is_complete = False  # whether all elements are stored for sure
    is_slow = False  # whether it is on slow storage

    def __init__(self, budget_bytes: int, length: int) -> None:
        self.budget_bytes = budget_bytes
        self._length = length
        self._lock = threading.Lock()
        self._elements: _Shared | _Local | None = None

    def for_parent(self, parent: Node) -> MemoryStore:
        """An empty store of this kind for another pipeline; here with the same limit."""
        return MemoryStore(self.budget_bytes, getattr(parent, "length", 0))

    def __reduce__(self) -> Any:
        elements = self._opened()
        key = elements.key() if isinstance(elements, _Shared) else None
        return _unpickled, (self.budget_bytes, self._length, key)

    def _opened(self) -> _Shared | _Local:
        with self._lock:
            if self._elements is None:
                self._elements = _made(self.budget_bytes, self._length)
            return self._elements

    def missing(self, index: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the elements at `index` are not stored."""
        return self._opened().missing(index)

    def start_read(self, index: Indices, reads: ReadQueue) -> None:
        """Starts reading the elements at `index`, for `read`; `None` if that cannot be started.

        Args:
            index: Their indices.
            reads: Limits the reads in flight.
        """

    def read(self, index: Indices, pending: PendingRecords | None = None) -> Iterator[Any]:
        """Yields the elements at `index`, `MISSING` for those that are not stored.

        Args:
            index: Their indices.
            pending: What `start_read` returned for them.

        Raises:
            GrainmillError: A file is damaged.
            OSError: It cannot be read.
        """
        del pending
        elements = self._opened()
        for number in index.tolist():
            record = elements.get(number)
            yield MISSING if record is None else decoded(record)

    def put(self, index: Sequence[int], elements: Sequence[Any]) -> None:
        """Stores elements, as far as there is room.

        Raises:
            TypeError: One cannot be pickled.
        """
        stored = self._opened()
        if not stored.is_full:
            stored.put(index, [encoded(element) for element in elements])


def _unpickled(budget_bytes: int, length: int, key: tuple[str, bytes] | None) -> MemoryStore:
    store = MemoryStore(budget_bytes, length)
    if key is not None:
        with contextlib.suppress(OSError, ValueError):  # it comes from another machine
            store._elements = _Shared.opened(*key, budget_bytes, length)  # noqa: SLF001
    return store


def _made(budget_bytes: int, length: int) -> _Shared | _Local:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, OverflowError):  # no address space for it
            return _Shared.created(budget_bytes, length)
    return _Local(budget_bytes)


class Bounded:
    """What keeps records in this process until one does not fit.

    Attributes:
        budget_bytes: The most bytes that they may take together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._left = budget_bytes  # -1 once a record did not fit
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether a record did not fit, so that none is kept any more."""
        return self._left < 0

    def _takes(self, byte_len: int) -> bool:
        """Whether there is room for another record; called with the lock."""
        self._left = self._left - byte_len if byte_len <= self._left else -1
        return self._left >= 0


class _Local(Bounded):
    """Records by index, in this process."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._records: dict[int, bytearray] = {}

    def missing(self, index: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        records = self._records
        return np.array([number not in records for number in index.tolist()], bool)

    def get(self, number: int) -> bytearray | None:
        record = self._records.get(number)
        return None if record is None else record[:]

    def put(self, index: Sequence[int], records: Sequence[list[Any]]) -> None:
        with self._lock:
            for number, pieces in zip(index, records, strict=True):
                record = bytearray().join(pieces)
                if number not in self._records and self._takes(len(record)):
                    self._records[number] = record


class _Shared:
    """Records by index in an anonymous file that several processes map.

    It has a header, then for each element the offset of its record or 0, then the records, each
    after its length. Room is taken under a lock of the open file, of which each copy of the store
    and each process has its own: it keeps out all others, and ends with the process. The offset is
    written after the record, so a reader sees all of it or nothing. Only pages that were written to
    take memory.
    """

    def __init__(self, file: int, token: bytes, budget_bytes: int, length: int) -> None:
        self._file = file
        self._token = token
        self._end = budget_bytes
        self._map = mmap.mmap(file, budget_bytes)
        offset = -(-_HEADER.size // 8) * 8
        self._offsets = np.frombuffer(self._map, np.uint64, length, offset)
        self._first = offset + 8 * length
        self._lock = threading.Lock()
        self.is_full = False
        _opened.add(self)

    @classmethod
    def created(cls, budget_bytes: int, length: int) -> _Shared | _Local:
        """An empty one; one that stores nothing if the offsets alone need more."""
        if budget_bytes < _HEADER.size + 8 * (length + 2):
            return _Local(0)
        token = os.urandom(16)
        file = create_shared_file("grainmill-cache", budget_bytes)
        shared = cls(file, token, budget_bytes, length)
        _HEADER.pack_into(shared._map, 0, token, shared._first)
        return shared

    @classmethod
    def opened(cls, path: str, token: bytes, budget_bytes: int, length: int) -> _Shared:
        """The one that another process created."""
        file = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            if os.fstat(file).st_size != budget_bytes or os.pread(file, 16, 0) != token:
                raise ValueError("not the file that was meant")  # noqa: TRY301
            return cls(file, token, budget_bytes, length)
        except BaseException:
            os.close(file)
            raise

    def reopen(self) -> None:
        """In a forked child, gets an open file and thus a lock of its own."""
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)
            os.dup2(file, self._file, inheritable=False)
            os.close(file)

    def key(self) -> tuple[str, bytes]:
        """What another process opens it by."""
        return f"/proc/{os.getpid()}/fd/{self._file}", self._token

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # `__init__` may have failed
            os.close(self._file)

    def missing(self, index: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        absent: np.ndarray[Any, np.dtype[np.bool_]] = self._offsets[index] == 0
        return absent

    def get(self, number: int) -> bytearray | None:
        offset = int(self._offsets[number])
        if not offset:
            return None
        (size,) = _LENGTH.unpack_from(self._map, offset)
        start = offset + _ALIGNMENT
        return bytearray(memoryview(self._map)[start : start + size])

    def put(self, index: Sequence[int], records: Sequence[list[Any]]) -> None:
        sizes = [sum(map(len, pieces)) for pieces in records]
        offsets = self._take([_ALIGNMENT + size + -size % _ALIGNMENT for size in sizes])
        target = memoryview(self._map)
        for offset, size, pieces in zip(offsets, sizes, records, strict=False):
            _LENGTH.pack_into(self._map, offset, size)
            at = offset + _ALIGNMENT
            for piece in pieces:
                target[at : at + len(piece)] = piece
                at += len(piece)
        if offsets:
            with self._locked():  # orders what was written above before the offsets
                pass
            self._offsets[np.array(index[: len(offsets)], np.int64)] = offsets

    def _take(self, sizes: list[int]) -> list[int]:
        """The offsets of new records of these sizes, as many as there is room for."""
        offsets = []
        with self._locked():
            token, at = _HEADER.unpack_from(self._map)
            at += -at % _ALIGNMENT
            for size in sizes:
                if at + size > self._end:
                    self.is_full = True
                    break
                offsets.append(at)
                at += size
            _HEADER.pack_into(self._map, 0, token, at)
        return offsets

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # noqa: PLC0415 - Windows has none

        with self._lock:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _WHOLE_FILE.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
            try:
                yield
            finally:
                lock = _WHOLE_FILE.pack(fcntl.F_UNLCK, 0, 0, 0, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)


_opened: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _reopen_all() -> None:
    for shared in list(_opened):
        shared.reopen()


at_fork(after_in_child=_reopen_all)
