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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from grainmill import _atomic_file
from grainmill._cache import files
from grainmill._cache.encoding import decoded, encoded
from grainmill._cache.fingerprint import Fingerprint
from grainmill._interrupts import raise_interrupt
from grainmill._memory import default_budget_bytes
from grainmill._native import GrainmillError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from grainmill._native import PendingRead, RecordFiles
    from grainmill._plan.node import Node

_MAX_PART_BYTES: Final = 1 << 30
# What a pass over a finished cache reads ahead on slow storage: as other readers do.
_MAX_RECORDS_AHEAD: Final = 256
_MAX_BYTES_AHEAD: Final = 64 << 20


class _PendingRecords(NamedTuple):
    """Records from `start` to `stop`, or the read that will return them."""

    start: int
    stop: int
    reads: PendingRead | list[bytes]


Ahead: TypeAlias = "deque[_PendingRecords]"


class SequenceMemory:
    """The first elements of a sequence in memory, as many as take `budget_bytes`.

    It is pickled without its elements.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
        self._reset()

    def _reset(self) -> None:
        self._records: list[bytearray] = []
        self._num_bytes = 0
        self._is_full = False
        self._frontier: Callable[[], Any] | None = None
        self._lock = threading.Lock()
        self.is_complete = False

    def for_parent(self, _: Node) -> SequenceMemory:
        """An empty store with the same limit, for another pipeline."""
        return SequenceMemory(self.budget_bytes)

    def share(self, _: Node, __: int, count: int) -> SequenceMemory:
        """The store for the share of one of several workers, with its share of the memory."""
        return SequenceMemory(self.budget_bytes // count)

    def __reduce__(self) -> Any:
        return SequenceMemory, (self.budget_bytes,)

    def opened(self) -> SequenceMemory:
        """The store itself, which has what was stored so far."""
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

    def read(self, start: int, count: int, ahead: Ahead) -> list[Any]:  # noqa: ARG002 - as below
        """Elements from `start` on, at most `count`."""
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
        if self._is_full or position + len(elements) <= len(self._records):
            return
        records = [bytearray().join(encoded(element)) for element in elements]
        with self._lock:
            for number, record, state in zip(
                range(position, position + len(records)), records, states, strict=True
            ):
                if number != len(self._records) or self._is_full:
                    continue
                if self._num_bytes + len(record) > self.budget_bytes:
                    self._is_full = True
                    continue
                self._records.append(record)
                self._num_bytes += len(record)
                self._frontier = state

    def finish(self, num_elements: int) -> None:
        """Takes note that there are `num_elements`."""
        with self._lock:
            self.is_complete |= num_elements == len(self._records)

    def abandon(self) -> None:
        """Ends a pass in the middle; what it stored is used."""


class SequenceFiles:
    """The elements of a sequence in files below `path`, once a pass has stored all of them.

    It is pickled as the path and the fingerprint.
    """

    def __init__(
        self, path: str, parent: Node | None, fingerprint: Fingerprint | None = None
    ) -> None:
        self._path = os.path.abspath(path)  # noqa: PTH100 - workers have other directories
        self._parent = parent
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._finished: FinishedFiles | None = None

    def for_parent(self, parent: Node) -> SequenceFiles:
        """A store below the same path, for another pipeline."""
        return SequenceFiles(self._path, parent)

    def share(self, parent: Node, worker: int, count: int) -> SequenceFiles:
        """The store for the share of one of several workers."""
        if count == 1:
            return SequenceFiles(self._path, parent, self.fingerprint())
        return SequenceFiles(self._path, parent, self.fingerprint().share(worker, count))

    def __reduce__(self) -> Any:
        return SequenceFiles, (self._path, None, self.fingerprint())

    def fingerprint(self) -> Fingerprint:
        """What makes the elements."""
        if self._fingerprint is None:
            assert self._parent is not None
            self._fingerprint = Fingerprint.of(self._parent, "sequence")
        return self._fingerprint

    @property
    def directory(self) -> Path:
        """The directory of this pipeline's cache."""
        return files.directory_of(self._path, self.fingerprint())

    def opened(self) -> FinishedFiles | None:
        """The finished cache; `None` if there is none.

        Raises:
            ValueError: It is damaged.
        """
        with self._lock:
            if self._finished is None:
                manifest = files.read_manifest(self.directory)
                if manifest is not None:
                    self._finished = FinishedFiles(self.directory, manifest)
            return self._finished

    def begin(self) -> SequencePass:
        """What takes the elements of a pass that begins at the start."""
        return SequencePass(self)


class FinishedFiles:
    """A finished cache."""

    is_complete = True
    frontier: tuple[int, None] = (0, None)

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        parts = [(part["name"], part["num_records"]) for part in manifest["parts"]]
        self.num_stored = int(manifest["num_elements"])
        if sum(count for _, count in parts) != self.num_stored:
            raise ValueError(f"{directory}: the manifest contradicts itself; delete {directory}")
        self._files: RecordFiles | None = files.opened(directory, parts) if parts else None

    def read(self, start: int, count: int, ahead: Ahead) -> list[Any]:
        """Elements from `start` on, at most `count`.

        Args:
            start: The first of them.
            count: How many.
            ahead: The reads that this pass has in flight, on slow storage.

        Raises:
            GrainmillError: The file is damaged.
            OSError: It cannot be read.
        """
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

    def _read_ahead(self, files: RecordFiles, start: int, stop: int, ahead: Ahead) -> list[bytes]:
        """Records from `start` to `stop` at most; those that follow are in flight then."""
        if ahead and ahead[0].start != start:  # the pass has moved
            ahead.clear()
        max_records = min(_MAX_RECORDS_AHEAD, int(_MAX_BYTES_AHEAD / max(1.0, files.mean_byte_len)))
        following = ahead[-1].stop if ahead else start
        while not ahead or (following < self.num_stored and following - start < max_records):
            first, following = following, min(following + (stop - start), self.num_stored)
            reads = files.start(np.arange(first, following, dtype=np.int64))
            ahead.append(_PendingRecords(first, following, reads))
        first, last, pending = ahead.popleft()
        records = pending if isinstance(pending, list) else pending.finish()
        if last > stop:
            ahead.appendleft(_PendingRecords(stop, last, records[stop - first :]))
        return records[: stop - first]


class SequencePass:
    """Writes the elements of one pass to a directory of its own, which is renamed at the end."""

    def __init__(self, store: SequenceFiles) -> None:
        self._store = store
        target = store.directory
        self._directory = target.with_name(f"unfinished-{target.name}-{files.new_name()}")
        self._part: files.PartWriter | None = None
        self._parts: dict[str, int] = {}
        self._position = 0
        self._is_over = False
        files.make_parent(target, store.fingerprint())
        files.remove_leftovers(target.parent, f"unfinished-{target.name}-*")
        self._remove = weakref.finalize(self, _remove, self._directory, os.getpid())

    def append(self, position: int, elements: Sequence[Any], _: Sequence[Any]) -> None:
        """Writes elements; see `SequenceMemory.append`. A full disk ends it with a warning.

        Raises:
            TypeError: An element cannot be pickled.
        """
        if self._is_over:
            return
        if position != self._position or (self._remove.alive and not self._is_own()):
            self.abandon()
            return
        records = [encoded(element) for element in elements]
        try:
            for record in records:
                self._write(record)
        except (OSError, GrainmillError) as failure:
            raise_interrupt(failure)
            files.warn_unwritable(self._store.directory, failure)
            self.abandon()
            return
        self._position += len(elements)

    def _is_own(self) -> bool:
        found = self._remove.peek()
        return found is not None and found[2][1] == os.getpid()

    def _write(self, pieces: list[Any]) -> None:
        if self._part is None:
            self._directory.mkdir(files.mode_of(self._store.fingerprint()), exist_ok=True)
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
        """Makes the cache visible, unless another pass has done so meanwhile."""
        if self._is_over or num_elements != self._position:
            self.abandon()
            return
        target, fingerprint = self._store.directory, self._store.fingerprint()
        try:
            self._directory.mkdir(files.mode_of(fingerprint), exist_ok=True)
            self._finish_part()
            files.write_description(self._directory, fingerprint)
            files.write_manifest(self._directory, fingerprint, num_elements, self._parts)
            if not (target / files.MANIFEST).exists():
                self._directory.rename(target)
                _atomic_file.sync_directory(target.parent)
        except (OSError, GrainmillError) as failure:
            raise_interrupt(failure)
            if not (target / files.MANIFEST).exists():
                files.warn_unwritable(target, failure)
        self.abandon()

    def abandon(self) -> None:
        """Removes what was written and is not visible."""
        self._is_over = True
        part, self._part = self._part, None
        if part is not None:
            files.keep_if_inherited(part)
            part.abandon()
        self._remove()


def _remove(directory: Path, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(OSError):
            shutil.rmtree(directory, ignore_errors=True)
