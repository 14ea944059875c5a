"""Elements of a dataset that is read in sequence: in memory within a bound, or in files.

A pass over the dataset stores its elements from the first one on. Only one that begins at the start
and reaches the end finishes a cache in files; whatever else a pass wrote is removed. In memory, the
elements stored so far are used by every pass, also while another one is still storing more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from grainmill import _atomic_file
from grainmill._cache import files
from grainmill._cache.encoding import decoded, encoded
from grainmill._cache.memory import Bounded
from grainmill._interrupts import raise_interrupt
from grainmill._native import GrainmillError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from grainmill._native import RecordFiles
    from grainmill._plan.node import Node

Ahead: TypeAlias = "deque[files.PendingRecords]"

_MAX_PART_BYTES: Final = 1 << 30
# What a pass over a finished cache reads ahead on slow storage: as other readers do.
_MAX_RECORDS_AHEAD: Final = 256
_MAX_BYTES_AHEAD: Final = 64 << 20


class SequenceMemory(Bounded):
    """The first elements of a sequence in memory, as many as take `budget_bytes`.

    It is pickled without its elements. It is what a pass writes to, and what others read.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._records: list[bytearray] = []
        self._frontier: Callable[[], Any] | None = None
        self.is_complete = False

    def for_parent(self, _: Node) -> SequenceMemory:
        """An empty store of this kind for another pipeline; here with the same limit."""
        return SequenceMemory(self.budget_bytes)

    def share(self, _: int, count: int) -> SequenceMemory:
        """The store for the share of one of several workers; here with its share of the memory."""
        return SequenceMemory(self.budget_bytes // count)

    def __reduce__(self) -> Any:
        return SequenceMemory, (self.budget_bytes,)

    def opened(self) -> SequenceMemory:
        """What is stored; `None` if it cannot be used yet.

        Raises:
            ValueError: It is damaged.
        """
        return self

    def begin(self) -> SequenceMemory:
        """What takes the elements of a pass that begins at the start."""
        return self

    @property
    def num_stored(self) -> int:
        """How many elements from the first one on can be read."""
        return len(self._records)

    @property
    def frontier(self) -> tuple[int, Callable[[], Any] | None]:
        """The number of elements stored, and what returns the state after them, if any."""
        with self._lock:
            return len(self._records), self._frontier

    def read(self, start: int, count: int, ahead: Ahead) -> list[Any]:
        """Elements from `start` on, at most `count`.

        Args:
            start: The first of them.
            count: How many.
            ahead: The reads that this pass has in flight, on slow storage.

        Raises:
            GrainmillError: A file is damaged.
            OSError: It cannot be read.
        """
        del ahead
        return [decoded(record[:]) for record in self._records[start : start + count]]

    def append(self, position: int, elements: Sequence[Any], states: Sequence[Any]) -> None:
        """Stores elements if they are the next ones and there is room.

        Args:
            position: The number of the first of them.
            elements: Consecutive elements.
            states: For each, what returns the upstream state after it.

        Raises:
            TypeError: An element cannot be pickled.
        """
        if self.is_full or position + len(elements) <= len(self._records):
            return
        records = [bytearray().join(encoded(element)) for element in elements]
        with self._lock:
            numbers = range(position, position + len(records))
            for number, record, state in zip(numbers, records, states, strict=True):
                if number == len(self._records) and self._takes(len(record)):
                    self._records.append(record)
                    self._frontier = state

    def finish(self, num_elements: int) -> None:
        """Takes note that there are `num_elements`."""
        with self._lock:
            self.is_complete |= num_elements == len(self._records)

    def abandon(self) -> None:
        """Ends a pass in the middle; here what it stored is used."""


class SequenceFiles:
    """The elements of a sequence in files, once a pass has stored all of them.

    It is pickled as its directory.
    """

    def __init__(self, directory: files.CacheDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._finished: FinishedFiles | None = None

    def for_parent(self, parent: Node) -> SequenceFiles:
        """See `SequenceMemory.for_parent`; a store below the same path."""
        return SequenceFiles(self._directory.for_parent(parent))

    def share(self, worker: int, count: int) -> SequenceFiles:
        """See `SequenceMemory.share`."""
        return SequenceFiles(self._directory.share(worker, count))

    def __reduce__(self) -> Any:
        return SequenceFiles, (self._directory,)

    def opened(self) -> FinishedFiles | None:
        """See `SequenceMemory.opened`; the finished cache."""
        with self._lock:
            if self._finished is None:
                manifest = self._directory.manifest()
                if manifest is not None:
                    self._finished = FinishedFiles(self._directory, manifest)
            return self._finished

    def begin(self) -> SequencePass:
        """See `SequenceMemory.begin`."""
        return SequencePass(self._directory)


class FinishedFiles:
    """A finished cache."""

    is_complete = True
    frontier: tuple[int, None] = (0, None)

    def __init__(self, directory: files.CacheDirectory, manifest: dict[str, Any]) -> None:
        parts = manifest["parts"]
        self.num_stored = int(manifest["num_elements"])
        if sum(parts.values()) != self.num_stored:
            raise ValueError(
                f"{directory.path}: the manifest contradicts itself; delete {directory.path}"
            )
        self._files: RecordFiles | None = directory.opened(parts) if parts else None

    def read(self, start: int, count: int, ahead: Ahead) -> list[Any]:
        """See `SequenceMemory.read`."""
        stop = min(start + count, self.num_stored)
        if self._files is None or start >= stop:
            ahead.clear()
            return []
        try:
            if ahead or self._files.is_slow:
                records = self._read_ahead(self._files, start, stop, ahead)
            else:
                records = self._files.read(np.arange(start, stop, dtype=np.int64))
            return [decoded(record) for record in records]
        except Exception as failure:
            raise_interrupt(failure)
            ahead.clear()
            if stop - start == 1:
                raise
            # So that elements before the failing one are delivered.
            return [decoded(self._files.read_one(start))]

    def _read_ahead(self, opened: RecordFiles, start: int, stop: int, ahead: Ahead) -> list[bytes]:
        """Records from `start` to `stop` at most; those that follow are in flight then."""
        if ahead and start not in ahead[0].wanted:  # the pass has moved
            ahead.clear()
        max_records = min(
            _MAX_RECORDS_AHEAD, int(_MAX_BYTES_AHEAD / max(1.0, opened.mean_byte_len))
        )
        following = ahead[-1].wanted.stop if ahead else start
        while not ahead or (following < self.num_stored and following - start < max_records):
            wanted = range(following, min(following + (stop - start), self.num_stored))
            reads = opened.start(np.arange(wanted.start, wanted.stop, dtype=np.int64))
            ahead.append(files.PendingRecords(wanted, reads))
            following = wanted.stop
        pending = ahead.popleft()
        records, first = pending.records(), pending.wanted.start
        if pending.wanted.stop > stop:
            ahead.appendleft(pending)
        return records[start - first : stop - first]


class SequencePass:
    """Writes the elements of one pass to a directory of its own, which is renamed at the end."""

    def __init__(self, target: files.CacheDirectory) -> None:
        self._target = target
        unfinished = f"unfinished-{target.path.name}-"
        self._directory = target.path.with_name(f"{unfinished}{files.new_name()}")
        self._part: files.PartWriter | None = None
        self._parts: dict[str, int] = {}
        self._position = 0
        self._is_over = False
        self._process = os.getpid()
        target.make_root()
        files.remove_leftovers(target.path.parent, f"{unfinished}*")
        self._remove = weakref.finalize(self, _remove, self._directory, self._process)

    def append(self, position: int, elements: Sequence[Any], _: Sequence[Any]) -> None:
        """See `SequenceMemory.append`; a full disk ends it with a warning."""
        if self._is_over:
            return
        if position != self._position or self._process != os.getpid():
            self.abandon()
            return
        records = [encoded(element) for element in elements]
        try:
            for record in records:
                self._write(record)
        except (OSError, GrainmillError) as failure:
            raise_interrupt(failure)
            self._target.warn_unwritable(failure)
            self.abandon()
            return
        self._position += len(elements)

    def _write(self, pieces: list[Any]) -> None:
        if self._part is None:
            self._directory.mkdir(self._target.mode, exist_ok=True)
            self._part = files.PartWriter(self._directory)
        self._part.write(pieces)
        if self._part.byte_len >= _MAX_PART_BYTES:
            self._finish_part()

    def _finish_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            name = f"part-{len(self._parts):05}{files.SUFFIX}"
            part.finish(name)
            self._parts[name] = part.num_records

    def finish(self, num_elements: int) -> None:
        """See `SequenceMemory.finish`; makes the cache visible, unless another pass has done so."""
        if self._is_over or num_elements != self._position:
            self.abandon()
            return
        target = self._target
        try:
            self._directory.mkdir(target.mode, exist_ok=True)
            self._finish_part()
            target.write_description(self._directory)
            target.write_manifest(self._directory, num_elements, self._parts)
            if not (target.path / files.MANIFEST).exists():
                self._directory.rename(target.path)
                _atomic_file.sync_directory(target.path.parent)
        except (OSError, GrainmillError) as failure:
            raise_interrupt(failure)
            if not (target.path / files.MANIFEST).exists():
                target.warn_unwritable(failure)
        self.abandon()

    def abandon(self) -> None:
        """See `SequenceMemory.abandon`; removes what was written and is not visible."""
        self._is_over = True
        part, self._part = self._part, None
        if part is not None:
            part.abandon()
        self._remove()


def _remove(directory: Path, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(OSError):
            shutil.rmtree(directory, ignore_errors=True)
