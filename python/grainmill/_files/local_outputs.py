"""Files of a directory that a conversion writes, and their journal."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from grainmill._atomic_file import sync_directory
from grainmill._files.outputs import Outputs, busy_error, exists_error, identity

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._files.outputs import Kind, Records, Shard


class LocalOutputs(Outputs):
    """Files of a directory; their journal is locked while a conversion runs.

    Args:
        shards: The files.
        output: The argument that names them.
        kind: See `Outputs`.
        header: See `Outputs`.
        force: See `Outputs`.
    """

    def __init__(
        self, shards: list[Shard], output: str, kind: Kind, header: dict[str, Any], *, force: bool
    ) -> None:
        name = Path(output).name or "output"
        journal = Path(shards[0].directory) / f".{name}.converting"
        super().__init__(shards, str(journal), kind, header, force=force)
        self._file: IO[bytes] | None = None
        self._is_ours = False
        self._temporaries: set[Path] = set()
        self._claiming: set[Path] = set()

    def __enter__(self) -> Self:
        Path(self._shards[0].directory).mkdir(parents=True, exist_ok=True)
        try:
            self._file = _locked(Path(self._journal))
            self._continue()
            self._end_claims()
            return self  # noqa: TRY300 - the `with` block follows, and an interrupt may come here
        except BaseException:
            if self._file is not None:
                self._end(self._file)
            else:  # it may have been created
                _remove_if_free(Path(self._journal))
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._remove_unfinished()
        except BaseException:  # as of a second interrupt
            self._remove_unfinished()
            raise

    def _remove_unfinished(self) -> None:
        for path in list(self._temporaries):  # of a thread that was not waited for
            path.unlink(missing_ok=True)
        for path in self._claiming:  # an interrupt came in the middle
            _remove_if_free(path)
        if self._file is not None and not self._file.closed:
            self._end(self._file)

    def existing(self) -> list[str]:
        """The paths of those that there are already, and that are none of this conversion."""
        return [
            shard.path
            for shard in self._shards
            if shard.name not in self._kept and Path(shard.path).exists()
        ]

    def open(self, shard: Shard) -> LocalWriting:
        """Begins one."""
        with self._lock:
            if not self._is_ours:  # until now the command could be refused
                self._begin()
        claimed = _claimed(shard)
        self._claiming.add(claimed)
        writing = LocalWriting(self, shard, self._kind, self._temporaries, force=self._force)
        self._claiming.discard(claimed)
        return writing

    def byte_len(self) -> int:
        """The bytes of all outputs."""
        return sum(Path(shard.path).stat().st_size for shard in self._shards)

    def remove_journal(self) -> None:
        """Forgets what was finished, as everything is."""
        Path(self._journal).unlink(missing_ok=True)

    def add(self, name: str, records: int, identity: list[int] | None) -> None:
        """Notes that a file is complete, before it gets its name: a later run compares both."""
        with self._lock:
            self._write({"name": name, "records": records, "identity": identity})
            self.records[name] = records

    def take_back(self, name: str) -> None:
        """Notes that a file did not get its name: another conversion finished one first."""
        with self._lock:
            self.records.pop(name, None)

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

    def _end_claims(self) -> None:
        """Removes what runs left that were killed after a file had its name."""
        for shard in self._shards:
            if shard.name in self._kept and _claimed(shard).exists():
                claim = _locked(_claimed(shard))
                _remove_leftovers(shard)
                _claimed(shard).unlink(missing_ok=True)
                claim.close()

    def _begin(self) -> None:
        """Begins a journal, in place of that of another conversion if there is one."""
        assert self._file is not None
        self._file.truncate(0)
        self._is_ours = True
        self._write(self._header)

    def _end(self, journal: IO[bytes]) -> None:
        """Releases the journal; one that says nothing is removed."""
        is_empty = os.fstat(journal.fileno()).st_size == 0
        if is_empty or (self._is_ours and not self.records):
            self.remove_journal()
        journal.close()

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
            raise OSError(error.errno, error.strerror, self._journal) from error


class LocalWriting:
    """A file that is being written, under a hidden name.

    Args:
        outputs: It is one of these.
        shard: The file.
        kind: How it is written.
        temporaries: Its hidden names are among these until it has none.
        force: Whether it replaces an existing one.
    """

    def __init__(
        self,
        outputs: LocalOutputs,
        shard: Shard,
        kind: Kind,
        temporaries: set[Path],
        *,
        force: bool,
    ) -> None:
        self._outputs = outputs
        self._shard = shard
        self._temporary = _temporary(shard)
        self._temporaries = temporaries
        self._force = force
        # Another command may name the same file in another way, and so have another journal.
        self._claimed = _claimed(shard)
        self._claim = _locked(self._claimed)
        temporaries |= {self._claimed, self._temporary}
        try:
            _remove_leftovers(shard)
            self._records = kind.create(str(self._temporary), shard.path)
        except BaseException:
            self._end()
            raise

    @property
    def records(self) -> Records:
        """Where its records go."""
        return self._records

    def finish(self, num_records: int, check: Callable[[str], None]) -> None:
        """Completes it, under its name; `check` raises if what is written is not what it should be.

        Raises:
            FileExistsError: There is such a file already.
        """
        self._records.close()
        check(str(self._temporary))
        self._outputs.add(self._shard.name, num_records, identity(str(self._temporary)))
        try:
            _rename(self._temporary, Path(self._shard.path), force=self._force)
        except FileExistsError:
            self._outputs.take_back(self._shard.name)
            raise
        self._end()

    def abort(self) -> None:
        """Leaves nothing of it."""
        self._records.abort()
        self._end()

    def _end(self) -> None:
        try:
            for path in (self._temporary, self._claimed):
                path.unlink(missing_ok=True)
                self._temporaries.discard(path)
        finally:
            self._claim.close()


def _claimed(shard: Shard) -> Path:
    """A file that is locked by the conversion that writes a shard."""
    return Path(shard.directory) / f".{shard.name}.part"


def _temporary(shard: Shard) -> Path:
    """Where a file is written before it is complete: a name that nobody can have foreseen."""
    # The end of its name says whether a Bagz file is compressed, also to what verifies it.
    end = ".bagz" if shard.name.endswith(".bagz") else ""
    return Path(shard.directory) / f".{shard.name}.{os.urandom(8).hex()}.part{end}"


def _remove_leftovers(shard: Shard) -> None:
    """Removes what conversions to the same file, which were killed, have left."""
    left = re.compile(rf"\.{re.escape(shard.name)}\.[0-9a-f]{{16}}\.part(?:\.bagz)?")
    for path in Path(shard.directory).iterdir():
        if left.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove_if_free(path: Path) -> None:
    """Removes an empty file that no conversion has open, whose own was interrupted."""
    try:
        file = _locked(path, creates=False)
    except OSError:
        return
    if os.fstat(file.fileno()).st_size == 0:
        path.unlink(missing_ok=True)
    file.close()


def _locked(path: Path, *, creates: bool = True) -> IO[bytes]:
    """Opens a file that no other conversion has open, and creates it if there is none.

    Raises:
        FileNotFoundError: There is none, and it is not created.
        FileExistsError: Another conversion has it open.
        OSError: It is no file that a conversion has made.
    """
    flags = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
    # A link would have another file written, and opening a pipe would wait.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    flags |= os.O_CREAT if creates else 0
    while True:
        try:
            number = os.open(path, flags, 0o666)
        except OSError as error:
            if not path.is_symlink():
                raise
            raise _not_ours_error(path) from error
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            os.close(number)
            raise _not_ours_error(path)
        file = os.fdopen(number, "ab+")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(found, path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise busy_error(str(path)) from error
        except FileNotFoundError:
            pass
        except OSError:  # a file system without locks
            return file
        except BaseException:
            file.close()
            raise
        file.close()  # removed by a conversion that has just ended


def _not_ours_error(path: Path) -> OSError:
    return OSError(
        f"{path}: expected a file that a conversion has made, found a link or a device; remove it"
    )


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
            raise exists_error(str(path)) from None
        except OSError:  # a file system without links
            temporary.replace(path)
        else:
            temporary.unlink()
    else:
        temporary.replace(path)
    sync_directory(path.parent)
