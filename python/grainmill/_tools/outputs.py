"""Where a conversion writes: files of a directory, or objects of a bucket, and the journal of both.

A local file is written under a hidden name, synced and renamed. An object is uploaded while it is
written, and the last request makes it visible, so neither is ever seen before it is complete. A
journal beside the outputs, `.NAME.converting`, lists those that are finished: a later run of the
same command continues there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

from grainmill import _native
from grainmill._atomic_file import sync_directory
from grainmill._threads import start_thread
from grainmill._tools import formats
from grainmill._tools.console import CommandError, ExitCode, byte_text
from grainmill._tools.parquet_output import ParquetOutput

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

# A journal in a bucket is written when it changes, with this pause, and at least once in `_BEAT_S`;
# a process that has not written it for `_DEAD_S` has ended.
_PAUSE_S = 1.0
_BEAT_S = 60.0
_DEAD_S = 300.0
# The journal names so many objects before they are begun, so that not each of them waits for it.
_AHEAD = 64
# After an interruption, for how long the last journal is tried to be written.
_LAST_JOURNAL_S = 5.0


@dataclasses.dataclass(frozen=True)
class Shard:
    """An output file, and the records that it gets.

    Attributes:
        path: Its final path, or its URL.
        inputs: The numbers of the inputs.
        first: The number of its first record among those of the inputs.
        count: How many records; `None`: all of the inputs.
    """

    path: str
    inputs: tuple[int, ...]
    first: int = 0
    count: int | None = None

    @property
    def directory(self) -> str:
        """Where it is; the URL of a bucket's directory ends with a slash."""
        if formats.is_url(self.path):
            return self.path.removesuffix(self.name)
        return str(Path(self.path).parent)

    @property
    def name(self) -> str:
        """Its name there."""
        return self.path.rpartition("/")[2] if formats.is_url(self.path) else Path(self.path).name


class Records(Protocol):
    """An output that records are copied to: `RecordOutput` of the engine, or `ParquetOutput`."""

    def copy_list(self, records: Any, num_threads: int = 1) -> int:
        """Appends `bytes`, or rows."""

    def copy_stream(
        self, stream: _native.RecordStream, max_records: int, num_threads: int = 1
    ) -> int:
        """Appends some of the next records of a stream."""

    def copy_indexed(self, files: _native.RecordFiles, indices: Any, num_threads: int = 1) -> int:
        """Appends records by their position."""

    def close(self) -> None:
        """Completes the file."""

    def abort(self) -> None:
        """Closes it as it is."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How outputs are written.

    Attributes:
        format: Their format.
        options: Its options.
        schema: Of columns, if it has some and one is stated.
        sample: Records that decide about the columns of all outputs; none: each has its own.
    """

    format: formats.Format
    options: str
    schema: str | None
    sample: list[Any] = dataclasses.field(default_factory=list)

    def create(self, path: str, final: str, writer: _native.ObjectWriter | None = None) -> Records:
        """Begins a file, or an object that `writer` writes; `final` is its path at the end."""
        if self.format.name == "parquet":
            return ParquetOutput(
                path, final, self.options, self.schema, sample=self.sample, writer=writer
            )
        options = self.options
        if self.format.name == "bagz" and not path.endswith(".bagz"):
            options = options or "uncompressed"
        return _native.RecordOutput(path, self.format.name, options, writer)


class Writing(Protocol):
    """An output that is being written."""

    @property
    def records(self) -> Records:
        """Where its records go."""

    def finish(self, num_records: int, check: Callable[[str], None]) -> None:
        """Completes it, under its name; `check` raises if what is written is not what it should be.

        Raises:
            CommandError: There is such a file already.
        """

    def abort(self) -> None:
        """Leaves nothing of it."""


class Outputs(Protocol):
    """The outputs of a conversion.

    Attributes:
        records: Of each output that is finished, by name.
    """

    records: dict[str, int]

    def __enter__(self) -> Self:
        """Begins the conversion: no other one writes the same files then."""

    def __exit__(self, *error: object) -> None:
        """Ends it."""

    def kept(self) -> frozenset[str]:
        """The names of those that an interrupted run of this conversion has finished."""

    def existing(self) -> list[str]:
        """The paths of those that there are already, and that are none of this conversion."""

    def open(self, shard: Shard) -> Writing:
        """Begins one."""

    def cancel(self) -> None:
        """Makes all that wait for the network fail."""

    def status(self) -> str:
        """What is done besides encoding, for the progress line."""

    def byte_len(self) -> int:
        """The bytes of all outputs."""

    def remove_journal(self) -> None:
        """Forgets what was finished, as everything is."""


def outputs_of(
    shards: list[Shard], output: str, kind: Kind, header: dict[str, Any], *, force: bool
) -> Outputs:
    """The outputs of a conversion, which `header` describes and `output` names."""
    place = BucketOutputs if formats.is_url(output) else LocalOutputs
    return place(shards, output, kind, header, force=force)


# --- files --------------------------------------------------------------------------------------


class LocalOutputs:
    """Files of a directory; their journal is locked while a conversion runs.

    Args:
        shards: The files.
        output: The argument that names them.
        kind: How they are written.
        header: What is converted how; files of another conversion are not kept.
        force: Whether existing files are replaced.
    """

    def __init__(
        self, shards: list[Shard], output: str, kind: Kind, header: dict[str, Any], *, force: bool
    ) -> None:
        name = Path(output).name or "output"
        self._shards = shards
        self._journal = Path(shards[0].directory) / f".{name}.converting"
        self._kind = kind
        self._header = header
        self._force = force
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._is_ours = False
        self._kept: frozenset[str] = frozenset()
        self.records: dict[str, int] = {}

    def __enter__(self) -> Self:
        Path(self._shards[0].directory).mkdir(parents=True, exist_ok=True)
        self._file = _locked(self._journal)
        try:
            self._continue()
        except BaseException:
            self._file.close()
            raise
        for shard in self._shards:
            if shard.name in self._kept:  # killed between the two steps of the renaming
                _temporary(shard).unlink(missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            if self._is_ours and not self.records:
                self.remove_journal()
            self._file.close()

    def kept(self) -> frozenset[str]:
        """See `Outputs`."""
        return self._kept

    def existing(self) -> list[str]:
        """See `Outputs`."""
        return [
            shard.path
            for shard in self._shards
            if shard.name not in self._kept and Path(shard.path).exists()
        ]

    def open(self, shard: Shard) -> LocalWriting:
        """See `Outputs`."""
        with self._lock:
            if not self._is_ours:  # until now the command could be refused
                self._begin()
        return LocalWriting(self, shard, self._kind, force=self._force)

    def cancel(self) -> None:
        """Nothing: no file waits for the network."""

    def status(self) -> str:
        """See `Outputs`."""
        return ""

    def byte_len(self) -> int:
        """See `Outputs`."""
        return sum(Path(shard.path).stat().st_size for shard in self._shards)

    def remove_journal(self) -> None:
        """See `Outputs`."""
        self._journal.unlink(missing_ok=True)

    def add(self, name: str, records: int, identity: list[int] | None) -> None:
        """Notes that a file is complete, before it gets its name: a later run compares both."""
        with self._lock:
            self._write({"name": name, "records": records, "identity": identity})
            self.records[name] = records

    def _continue(self) -> None:
        """Keeps the entries of files that an interrupted run of this conversion has finished."""
        assert self._file is not None
        self._file.seek(0)
        entries, byte_len = _entries(self._file.read())
        if not entries:
            self._begin()
            return
        if entries[0] != self._header:
            return
        self._is_ours = True
        self._file.truncate(byte_len)  # what was not written whole
        paths = {shard.name: shard.path for shard in self._shards}
        for entry in entries[1:]:
            path = paths.get(entry.get("name", ""))
            if path is not None and identity(path) == entry.get("identity"):
                self.records[entry["name"]] = entry["records"]
        self._kept = frozenset(self.records)

    def _begin(self) -> None:
        """Begins a journal, in place of that of another conversion if there is one."""
        assert self._file is not None
        self._is_ours = True
        self._file.truncate(0)
        try:
            self._write(self._header)
        except BaseException:
            self.remove_journal()
            raise

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        file = self._file.fileno()
        before = os.fstat(file).st_size
        try:
            left = memoryview(_line_of(entry))
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, before)  # what others append must not follow half a line
            raise OSError(error.errno, error.strerror, str(self._journal)) from error


class LocalWriting:
    """A file that is being written, under a hidden name.

    Args:
        outputs: It is one of these.
        shard: The file.
        kind: How it is written.
        force: Whether it replaces an existing one.
    """

    def __init__(self, outputs: LocalOutputs, shard: Shard, kind: Kind, *, force: bool) -> None:
        self._outputs = outputs
        self._shard = shard
        self._temporary = _temporary(shard)
        self._force = force
        # Another command may name the same file in another way, and so have another journal.
        self._claim = _locked(self._temporary)
        try:
            self._records = kind.create(str(self._temporary), shard.path)
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            self._claim.close()
            raise

    @property
    def records(self) -> Records:
        """See `Writing`."""
        return self._records

    def finish(self, num_records: int, check: Callable[[str], None]) -> None:
        """See `Writing`."""
        self._records.close()
        check(str(self._temporary))
        self._outputs.add(self._shard.name, num_records, identity(str(self._temporary)))
        _rename(self._temporary, Path(self._shard.path), force=self._force)
        self._claim.close()

    def abort(self) -> None:
        """See `Writing`."""
        self._records.abort()
        self._temporary.unlink(missing_ok=True)
        self._claim.close()


def identity(path: str) -> list[Any] | None:
    """What tells a file from one that has replaced it; `None` for none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def identities(paths: list[str]) -> list[list[Any] | None]:
    """The same of files and objects.

    Raises:
        OSError: One of the objects is not there, or cannot be reached.
    """
    urls = [path for path in paths if formats.is_url(path)]
    objects = map(list, _native.object_identities(urls))
    return [next(objects) if formats.is_url(path) else identity(path) for path in paths]


def _temporary(shard: Shard) -> Path:
    """Where a file is written before it is complete."""
    # The end of its name says whether a Bagz file is compressed, also to what verifies it.
    end = ".bagz" if shard.name.endswith(".bagz") else ""
    return Path(shard.directory) / f".{shard.name}.part{end}"


def _locked(path: Path) -> IO[bytes]:
    """Opens a file that no other conversion has open, and creates it if there is none.

    Raises:
        CommandError: Another conversion has it open.
    """
    while True:
        file = path.open("ab+")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise _busy(str(path)) from error
        except FileNotFoundError:
            pass
        except OSError:  # a file system without locks
            return file
        file.close()  # removed by a conversion that has just ended


def _line_of(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entries(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries of a journal up to the first that is damaged, and how many bytes they have."""
    entries: list[dict[str, Any]] = []
    byte_len = 0
    for line in content.splitlines(keepends=True):
        text = line[9:].removesuffix(b"\n")
        if line != b"%08x %s\n" % (zlib.crc32(text), text):
            break
        entries.append(json.loads(text))
        byte_len += len(line)
    return entries, byte_len


def _rename(temporary: Path, path: Path, *, force: bool) -> None:
    """Gives a complete file its name; without `force`, only if no file has it."""
    if not force:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise _exists(str(path)) from None
        except OSError:  # a file system without links
            temporary.replace(path)
        else:
            temporary.unlink()
    else:
        temporary.replace(path)
    sync_directory(path.parent)


def _busy(journal: str, more: str = "") -> CommandError:
    return CommandError(
        f"{journal}: another conversion is writing these files{more}", ExitCode.EXISTS
    )


def _exists(path: str) -> CommandError:
    return CommandError(f"{path}: exists already; --force replaces it", ExitCode.EXISTS)


# --- objects ------------------------------------------------------------------------------------


class BucketOutputs:
    """Objects that start with the same URL, and a journal which is an object, too.

    A bucket has no locks: the journal says which process writes, and when it has last said so. The
    journal also has the uploads that are not complete, whose parts would stay in the bucket if the
    process was killed: the next run removes them. A thread writes it, so that it is up to date also
    while nothing else can be done.

    Args:
        shards: The objects.
        output: The argument that names them.
        kind: How they are written.
        header: What is converted how; objects of another conversion are not kept.
        force: Whether existing objects are replaced.
    """

    def __init__(
        self, shards: list[Shard], output: str, kind: Kind, header: dict[str, Any], *, force: bool
    ) -> None:
        name = output.rstrip("/").rpartition("/")[2]
        self._shards = shards
        self._directory = shards[0].directory
        self._journal = f"{self._directory}.{name}.converting"
        self._kind = kind
        self._header = header
        self._force = force
        self._lock = threading.Lock()
        # Those that may be visible without being known as complete, or have parts.
        self._begun: dict[str, str | None] = {}
        self._done: dict[str, list[Any]] = {}
        self._open: list[BucketWriting] = []
        self._kept: frozenset[str] = frozenset()
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
        self.records: dict[str, int] = {}

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
        with contextlib.suppress(OSError, _native.GrainmillError):
            if is_needed or self._is_cancelled:  # which shows whether the server still answers
                self._write(frozenset(), has_ended=True)
            if not is_needed:
                self.remove_journal()
        timer.cancel()

    def kept(self) -> frozenset[str]:
        """See `Outputs`."""
        return self._kept

    def existing(self) -> list[str]:
        """See `Outputs`."""
        ours = self._kept | self._begun_before
        return [
            shard.path
            for shard in self._shards
            if shard.name in self._present and shard.name not in ours
        ]

    def open(self, shard: Shard) -> BucketWriting:
        """See `Outputs`."""
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

    def status(self) -> str:
        """See `Outputs`."""
        sent = self.byte_len() + sum(writing.num_sent for writing in list(self._open))
        return f"{byte_text(sent)} uploaded"

    def byte_len(self) -> int:
        """See `Outputs`."""
        return sum(found[0] for _, found in list(self._done.values()))

    def remove_journal(self) -> None:
        """See `Outputs`."""
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
                except (OSError, _native.GrainmillError) as error:
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
            raise CommandError(
                f"{self._journal}: not the journal of a conversion; remove it", ExitCode.EXISTS
            )
        return found

    def _check_ended(self, before: dict[str, Any]) -> None:
        if before["has_ended"]:
            return
        age = time.time() - before["time"]
        is_alive = age < _DEAD_S
        if is_alive and before["host"] == socket.gethostname() and os.name == "posix":
            is_alive = before["process"] != os.getpid() and _is_alive(before["process"])
        if is_alive:
            where = f"process {before['process']} on {before['host']}"
            raise _busy(self._journal, f" ({where}, {max(age, 0):.0f} s ago)")


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
        """See `Writing`."""
        return self._records

    @property
    def num_sent(self) -> int:
        """How many bytes the server has received."""
        return self._writer.num_sent

    def finish(self, num_records: int, check: Callable[[str], None]) -> None:
        """See `Writing`. An object can be checked only once it is visible."""
        try:
            self._records.close()
        except FileExistsError:
            raise _exists(self._shard.path) from None
        try:
            check(self._shard.path)
        except CommandError:
            _native.remove_object(self._shard.path)
            self._is_removed = True
            raise
        found = list(_native.object_identities([self._shard.path])[0])
        self._outputs.ended(self, (num_records, found), may_be_visible=True)

    def cancel(self) -> None:
        """Makes the thread that writes it fail, also while it waits for the server."""
        self._writer.cancel()

    def abort(self) -> None:
        """See `Writing`."""
        self._writer.abort()
        self._records.abort()
        may_be_visible = self._writer.may_be_visible and not self._is_removed
        self._outputs.ended(self, None, may_be_visible=may_be_visible)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
