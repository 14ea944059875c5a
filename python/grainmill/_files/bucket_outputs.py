"""Objects of a bucket that a conversion writes, and their journal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from grainmill import _atomic_file, _native
from grainmill._files.outputs import Outputs, busy_error, exists_error, identities
from grainmill._native import GrainmillError
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._files.outputs import Kind, Records, Shard

# A journal in a bucket is written when it changes, with this pause, and at least once in `_BEAT_S`;
# a process that has not written it for `_DEAD_S` has ended.
_PAUSE_S = 1.0
_BEAT_S = 60.0
_DEAD_S = 300.0
# The journal names so many objects before they are begun, so that not each of them waits for it.
_AHEAD = 64
# After an interruption, for how long the last journal is tried to be written.
_LAST_JOURNAL_S = 5.0


class BucketOutputs(Outputs):
    """Objects that start with the same URL, and a journal which is an object, too.

    A bucket has no locks: the journal says which process writes, and when it has last said so. The
    journal also has the uploads that are not complete, whose parts would stay in the bucket if the
    process was killed: the next run removes them. A thread writes it, so that it is up to date also
    while nothing else can be done.

    Args:
        shards: The objects.
        output: The argument that names them.
        kind: See `Outputs`.
        header: See `Outputs`.
        force: See `Outputs`.
    """

    def __init__(
        self, shards: list[Shard], output: str, kind: Kind, header: dict[str, Any], *, force: bool
    ) -> None:
        name = output.rstrip("/").rpartition("/")[2]
        self._directory = shards[0].directory
        journal = f"{self._directory}.{name}.converting"
        super().__init__(shards, journal, kind, header, force=force)
        # Those that may be visible without being known as complete, or have parts.
        self._begun: dict[str, str | None] = {}
        self._done: dict[str, list[Any]] = {}
        self._open: list[BucketWriting] = []
        self._begun_before: frozenset[str] = frozenset()
        self._present: frozenset[str] = frozenset()
        self._before: dict[str, Any] | None = None
        self._is_cancelled = False
        # Of the journal.
        self._writing_lock = threading.RLock()
        self._writer: _native.ObjectWriter | None = None
        self._named: frozenset[str] = frozenset()
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        before = self._before = self._read()
        if before is not None:
            self._check_ended(before)
        self._present = self._listed()
        is_same = before is not None and before["header"] == self._header
        if before is not None and is_same:
            names = {shard.name for shard in self._shards}
            found = [name for name in before["done"] if name in names & self._present]
            urls = [self._directory + name for name in found]
            for name, now in zip(found, identities(urls), strict=True):
                if before["done"][name][1] == now:
                    self._done[name] = before["done"][name]
            # What that run had begun is written again, also if its last request has succeeded.
            self._begun_before = frozenset(name for name in before["begun"] if name in names)
            self._begun = dict.fromkeys(self._begun_before)
        self._kept = frozenset(self._done)
        self.records = {name: records for name, (records, _) in self._done.items()}
        if before is None or is_same:
            self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        self._end_thread()
        timer = threading.Timer(_LAST_JOURNAL_S, self._cancel_journal)
        timer.daemon = True
        if self._is_cancelled:
            timer.start()
        is_needed = bool(self._done or self._begun)
        # The error that ends the conversion says more than one of these requests.
        with contextlib.suppress(OSError, GrainmillError):
            if is_needed or self._is_cancelled:  # which shows whether the server still answers
                self._write(frozenset(), has_ended=True)
            if not is_needed:
                self.remove_journal()
        timer.cancel()

    def existing(self) -> list[str]:
        """See `LocalOutputs`."""
        ours = self._kept | self._begun_before
        return [
            shard.path
            for shard in self._shards
            if shard.name in self._present and shard.name not in ours
        ]

    def open(self, shard: Shard) -> BucketWriting:
        """See `LocalOutputs`."""
        self._name(shard)
        replaces = self._force or shard.name in self._begun_before
        writing = BucketWriting(self, shard, self._kind, replaces=replaces)
        with self._lock:
            self._open.append(writing)
        if self._is_cancelled:
            writing.cancel()
        return writing

    def cancel(self) -> None:
        """See `Outputs`."""
        self._is_cancelled = True
        self._cancel_journal()
        for writing in list(self._open):
            writing.cancel()

    def num_sent(self) -> int:
        """See `Outputs`."""
        return self.byte_len() + sum(writing.num_sent for writing in list(self._open))

    def byte_len(self) -> int:
        """See `LocalOutputs`."""
        return sum(found[0] for _, found in list(self._done.values()))

    def remove_journal(self) -> None:
        """See `LocalOutputs`."""
        self._end_thread()
        _native.remove_object(self._journal)
        self._thread = None

    def ended(
        self, writing: BucketWriting, done: tuple[int, list[Any]] | None, *, may_be_visible: bool
    ) -> None:
        """Notes that an object is complete, with its records and its identity, or is given up."""
        name = writing.name
        with self._lock:
            if writing in self._open:
                self._open.remove(writing)
            if done is not None:
                self._begun.pop(name, None)
                self._done[name] = list(done)
                self.records[name] = done[0]
            elif may_be_visible or name in self._begun_before:
                self._begun[name] = None
            else:
                self._begun.pop(name, None)

    # --- the journal ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins a journal, in place of that of another conversion if there is one."""
        for name, upload_id in (self._before or {"begun": {}})["begun"].items():
            if upload_id:
                try:
                    _native.abort_upload(self._directory + name, upload_id)
                except OSError:  # perhaps it is not allowed; the next run tries it again
                    if name in self._begun_before:
                        self._begun[name] = upload_id
        self._write()
        self._thread = start_thread(
            self._keep_journal, name="grainmill-journal", stop=self._ends.set
        )

    def _name(self, shard: Shard) -> None:
        """Writes a journal that names an object, and those that follow it, as begun."""
        if self._failure is not None:
            raise self._failure
        if shard.name in self._named:
            return
        with self._writing_lock:
            if shard.name in self._named:
                return
            if self._thread is None:  # until now the command could be refused
                self._begin()
            first = self._shards.index(shard)
            following = {each.name for each in self._shards[first : first + _AHEAD]}
            self._write(self._named | following)

    def _keep_journal(self) -> None:
        """Writes the journal when it has changed, and now and then: this process lives."""
        while not self._ends.wait(_PAUSE_S):
            is_due = time.monotonic() - self._written_at > _BEAT_S
            if is_due or self._content(self._named) != self._written:
                try:
                    self._write()
                except (OSError, GrainmillError) as error:
                    self._failure = error
                    return

    def _end_thread(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _cancel_journal(self) -> None:
        if self._writer is not None:
            self._writer.cancel()

    def _content(self, named: frozenset[str]) -> dict[str, Any]:
        with self._lock:
            begun = {name: None for name in named if name not in self._done} | self._begun
            begun |= {writing.name: writing.upload_id for writing in self._open}
            return {"begun": begun, "done": dict(self._done)}

    def _write(self, named: frozenset[str] | None = None, *, has_ended: bool = False) -> None:
        with self._writing_lock:
            self._writer = _native.ObjectWriter(self._journal)
            if self._is_cancelled and not has_ended:
                raise InterruptedError(f"{self._journal}: the conversion was interrupted")
            named = self._named if named is None else named
            content = self._content(named)
            head = {
                "header": self._header,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "time": time.time(),
                "has_ended": has_ended,
            }
            self._writer.write(json.dumps(head | content).encode())
            self._writer.close()
            self._named = named
            self._written = content
            self._written_at = time.monotonic()

    def _listed(self) -> frozenset[str]:
        """The names of the objects there are."""
        names = sorted(shard.path for shard in self._shards)
        pairs = zip(names[0], names[-1], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        prefix = names[0][:shared]
        start = len(self._directory)
        return frozenset(
            url[start:]
            for url, _ in _native.list_objects(prefix)
            if url.startswith(self._directory) and "/" not in url[start:]
        )

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(_native.read_object(self._journal))
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        names = {"header", "host", "process", "time", "has_ended", "begun", "done"}
        if not isinstance(found, dict) or not names <= found.keys():
            raise FileExistsError(f"{self._journal}: not the journal of a conversion; remove it")
        return found

    def _check_ended(self, before: dict[str, Any]) -> None:
        if before["has_ended"]:
            return
        age = time.time() - before["time"]
        is_alive = age < _DEAD_S
        if is_alive and before["host"] == socket.gethostname() and os.name == "posix":
            is_alive = before["process"] != os.getpid() and _atomic_file.is_running(
                before["process"]
            )
        if is_alive:
            where = f"process {before['process']} on {before['host']}"
            raise busy_error(self._journal, f" ({where}, {max(age, 0):.0f} s ago)")


class BucketWriting:
    """An object that is being uploaded.

    Args:
        outputs: It is one of these.
        shard: The object.
        kind: How it is written.
        replaces: Whether it replaces an existing one.
    """

    def __init__(self, outputs: BucketOutputs, shard: Shard, kind: Kind, *, replaces: bool) -> None:
        self._outputs = outputs
        self._shard = shard
        self._writer = _native.ObjectWriter(shard.path, replaces=replaces)
        self._records = kind.create(shard.path, shard.path, self._writer)
        self._is_removed = False

    @property
    def name(self) -> str:
        """The object's name."""
        return self._shard.name

    @property
    def upload_id(self) -> str | None:
        """What the service calls the upload, if it has parts."""
        return self._writer.upload_id

    @property
    def records(self) -> Records:
        """See `LocalWriting`."""
        return self._records

    @property
    def num_sent(self) -> int:
        """How many bytes the server has received."""
        return self._writer.num_sent

    def finish(self, num_records: int, check: Callable[[str], None]) -> None:
        """See `LocalWriting`. An object can be checked only once it is visible."""
        try:
            self._records.close()
        except FileExistsError:
            raise exists_error(self._shard.path) from None
        try:
            check(self._shard.path)
        except GrainmillError:
            _native.remove_object(self._shard.path)
            self._is_removed = True
            raise
        found = list(_native.object_identities([self._shard.path])[0])
        self._outputs.ended(self, (num_records, found), may_be_visible=True)

    def cancel(self) -> None:
        """Makes the thread that writes it fail, also while it waits for the server."""
        self._writer.cancel()

    def abort(self) -> None:
        """See `LocalWriting`."""
        self._writer.abort()
        self._records.abort()
        may_be_visible = self._writer.may_be_visible and not self._is_removed
        self._outputs.ended(self, None, may_be_visible=may_be_visible)
