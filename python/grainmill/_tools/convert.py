"""`grainmill convert`: copies records to files of another format, number or order.

The work is divided by output file. Where there are several, as many are written at a time as there
are threads; the last ones share the threads, since one file is encoded by several, too. A file is
written under a hidden name, synced and renamed, and noted in a hidden journal beside the outputs,
which a later run of the same command continues from and which is removed at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from grainmill import _native
from grainmill._atomic_file import sync_directory
from grainmill._threads import start_thread
from grainmill._tools import formats, verify
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    Progress,
    byte_text,
    count_text,
    print_json,
)
from grainmill._tools.copying import Copying, opened, total_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import argparse

_JOURNAL = "grainmill conversion"
_STEP_S = 0.2
_MAX_STEP = 1 << 20
_CONTENTS = ("same", "json", "example")

_EXAMPLES = """\
examples:
  grainmill convert train.tfrecord-* out/              one output for each input
  grainmill convert train.tfrecord train.array_record --options group_size:1,uncompressed
  grainmill convert 'raw/*.jsonl' out/train.array_record --shards 10 --shuffle --seed 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, globs, name@N, directories"
    )
    parser.add_argument(
        "output", metavar="OUTPUT", help="a file; a directory, for one output for each input"
    )
    parser.add_argument("--from", dest="source", choices=formats.READ, help="the inputs' format")
    parser.add_argument(
        "--to", choices=formats.WRITTEN, help="the outputs' format (default: by OUTPUT's name)"
    )
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="write N files OUTPUT-00000-of-0000N with equal shares of the records",
    )
    parser.add_argument("--shuffle", action="store_true", help="shuffle all records, globally")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the shuffle (default: 0)"
    )
    options = "; ".join(
        f"{found.name}: {found.options}" for found in formats.FORMATS.values() if found.options
    )
    parser.add_argument(
        "--options",
        default="",
        metavar="OPTIONS",
        help=f"of the outputs, `key:value,...` ({options})",
    )
    parser.add_argument(
        "--content",
        choices=_CONTENTS,
        default="same",
        help="what records contain: the same bytes (rows of a table: JSON), JSON made of "
        "tf.train.Example, or tf.train.Example made of JSON",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that encode records (default: one per core)"
    )
    parser.add_argument("--verify", action="store_true", help="verify each file before it is named")
    parser.add_argument("--force", action="store_true", help="replace existing outputs")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


@dataclasses.dataclass(frozen=True)
class Shard:
    """An output file, and the records that it gets.

    Attributes:
        path: Its final path.
        inputs: The numbers of the inputs.
        first: The number of its first record among those of the inputs.
        count: How many records; `None`: all of the inputs.
    """

    path: Path
    inputs: tuple[int, ...]
    first: int = 0
    count: int | None = None

    @property
    def temporary(self) -> Path:
        """Where it is written before it is complete."""
        return self.path.with_name(f".{self.path.name}.part")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    started = time.monotonic()
    threads = options.threads if options.threads is not None else os.cpu_count() or 1
    for name, value in (("--threads", threads), ("--shards", options.shards)):
        if value is not None and value < 1:
            raise CommandError(f"{name} must be at least 1, got {value}")
    if formats.is_url(options.output):
        raise CommandError(
            f"{options.output}: outputs are written to a file system; copy them to the bucket then"
        )
    inputs = formats.expanded(options.inputs)
    detected = [formats.detect(path, options.source) for path in inputs]
    target = _target_format(options)
    shards = _shards(options, inputs, detected, target)
    pairs = list(zip(inputs, detected, strict=True))
    conversion = Conversion(options, pairs, target, shards, threads)
    _check_outputs(shards, inputs)
    with Journal(shards[0].path.parent, options.output, conversion.header()) as journal:
        finished = journal.finished(shards)
        if not options.force:
            _refuse_existing(shards, finished)
        for shard in shards:
            if shard.path.name in finished:  # killed between the two steps of the renaming
                shard.temporary.unlink(missing_ok=True)
        conversion.run(journal, finished)
        journal.remove()
    elapsed = time.monotonic() - started
    written = sum(shard.path.stat().st_size for shard in shards)
    if options.json:
        files = [
            {"path": str(shard.path), "records": journal.records[shard.path.name]}
            for shard in shards
        ]
        print_json(
            {
                "files": files,
                "records": sum(found["records"] for found in files),
                "bytes": written,
                "kept": len(finished),
                "seconds": round(elapsed, 3),
            }
        )
        return ExitCode.OK
    records = sum(journal.records[shard.path.name] for shard in shards)
    kept = f", {len(finished)} of them from an earlier run" if finished else ""
    name = str(shards[0].path) if len(shards) == 1 else str(shards[0].path.parent)
    print(
        f"{name}: {count_text(len(shards), 'file')}{kept}, {count_text(records, 'record')}, "
        f"{byte_text(written)}"
    )
    return ExitCode.OK


# --- what is written ----------------------------------------------------------------------------


def _target_format(options: argparse.Namespace) -> formats.Format:
    if options.to is not None:
        return formats.FORMATS[options.to]
    found = formats.of_name(options.output)
    if found is None and _is_directory(options.output):
        return formats.FORMATS["array_record"]
    if found is None:
        raise CommandError(
            f"{options.output}: its format is not known from its name; pass --to "
            f"({', '.join(formats.WRITTEN)})"
        )
    if not found.written:
        raise CommandError(
            f"{options.output}: {found.title} files are not written, only "
            f"{', '.join(formats.FORMATS[name].title for name in formats.WRITTEN)}"
        )
    return found


def _is_directory(path: str) -> bool:
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


def _shards(
    options: argparse.Namespace,
    inputs: list[str],
    detected: list[formats.Format],
    target: formats.Format,
) -> list[Shard]:
    """The outputs, each with its share of the records."""
    output = Path(options.output)
    everything = tuple(range(len(inputs)))
    number = options.shards
    if match := re.fullmatch(r"(.*)@(\d{1,5})([^/]*)", options.output):
        if number is not None and number != int(match[2]):
            raise CommandError(f"{options.output} states another number of files than --shards")
        number, output = int(match[2]), Path(f"{match[1]}{match[3]}")
    if number is None and not options.shuffle:
        if _is_directory(options.output):
            paths = [output / _matching_name(path, target) for path in inputs]
            if len(set(paths)) < len(paths):
                raise CommandError("two inputs have the same name; name the outputs with --shards")
        elif len(inputs) == 1:
            paths = [output]
        else:
            paths = [_numbered(output, at, len(inputs)) for at in everything]
        return [Shard(path, (at,)) for at, path in enumerate(paths)]
    if _is_directory(options.output):
        raise CommandError(
            f"{options.output}: a directory; give the name of the files, such as "
            f"{output / f'train{target.extensions[0]}'}"
        )
    if number is None or number == 1:
        path = output if number is None else _numbered(output, 0, 1)
        return [Shard(path, everything, 0, total_of(inputs, detected))]
    total = total_of(inputs, detected)
    bounds = [total * at // number for at in range(number + 1)]
    return [
        Shard(_numbered(output, at, number), everything, bounds[at], bounds[at + 1] - bounds[at])
        for at in range(number)
    ]


def _matching_name(path: str, target: formats.Format) -> str:
    """The name of an input, with the extension of another format and the same shard."""
    name = Path(path).name
    shard = re.search(r"-\d{5,}-of-\d{5,}", name)
    if shard is not None:
        name = name.replace(shard[0], "", 1)
    for suffix in formats.COMPRESSED:
        name = name.removesuffix(suffix)
    for found in formats.FORMATS.values():
        for extension in found.extensions:
            name = name.removesuffix(extension)
    return f"{name}{target.extensions[0]}{shard[0] if shard else ''}"


def _numbered(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.name}-{number:05}-of-{count:05}")


def _check_outputs(shards: list[Shard], inputs: list[str]) -> None:
    read = {Path(path).resolve() for path in inputs}
    for shard in shards:
        if shard.path.resolve() in read:
            raise CommandError(f"{shard.path}: is an input, too")
    shards[0].path.parent.mkdir(parents=True, exist_ok=True)


def _refuse_existing(shards: list[Shard], finished: dict[str, int]) -> None:
    existing = [
        shard.path for shard in shards if shard.path.name not in finished and shard.path.exists()
    ]
    if existing:
        more = f" (and {len(existing) - 1} more)" if len(existing) > 1 else ""
        raise CommandError(
            f"{existing[0]}: exists already{more}; --force replaces it", ExitCode.EXISTS
        )


# --- the journal --------------------------------------------------------------------------------


class Journal:
    """A hidden file beside the outputs that lists those that are finished.

    It is locked while a conversion runs, so that two do not write the same files.

    Args:
        directory: Of the outputs.
        output: The argument that names them.
        header: What is converted how; files of another conversion are not kept.
    """

    def __init__(self, directory: Path, output: str, header: dict[str, Any]) -> None:
        name = Path(output).name or "output"
        self._path = directory / f".{name}.converting"
        self._header = header
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self.records: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._file = _locked(self._path)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            if not self.records:
                self.remove()
            self._file.close()

    def finished(self, shards: list[Shard]) -> dict[str, int]:
        """The records of each file that an interrupted run of this conversion has finished."""
        assert self._file is not None
        self._file.seek(0)
        entries, byte_len = _entries(self._file.read())
        if not entries or entries[0] != self._header:
            self._file.truncate(0)
            self._write(self._header)
            return {}
        self._file.truncate(byte_len)  # what was not written whole
        names = {shard.path.name: shard.path for shard in shards}
        for entry in entries[1:]:
            path = names.get(entry.get("name", ""))
            if path is not None and _identity(path) == entry.get("identity"):
                self.records[path.name] = entry["records"]
        return dict(self.records)

    def add(self, name: str, records: int, identity: list[int] | None) -> None:
        """Notes that a file is complete, before it gets its name: a later run compares both."""
        with self._lock:
            self._write({"name": name, "records": records, "identity": identity})
            self.records[name] = records

    def remove(self) -> None:
        """Removes the journal."""
        self._path.unlink(missing_ok=True)

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
            raise OSError(error.errno, error.strerror, str(self._path)) from error


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
            raise CommandError(
                f"{path}: another conversion is writing these files", ExitCode.EXISTS
            ) from error
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


def _identity(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


# --- the work -----------------------------------------------------------------------------------


class Conversion:
    """Writes the shards, some at a time.

    Args:
        options: The command's.
        inputs: The paths of the inputs, and their formats.
        target: The format of the outputs.
        shards: The outputs.
        threads: How many threads encode records.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        inputs: list[tuple[str, formats.Format]],
        target: formats.Format,
        shards: list[Shard],
        threads: int,
    ) -> None:
        self._options = options
        self._inputs = [path for path, _ in inputs]
        self._formats = [found for _, found in inputs]
        self._target = target
        self._shards = shards
        self._threads = threads
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._num_done = 0

    def header(self) -> dict[str, Any]:
        """What determines the outputs."""
        options = self._options
        inputs = [
            [str(Path(path).resolve()), _identity(Path(path))]
            if "://" not in path
            else [path, None]
            for path in self._inputs
        ]
        return {
            "format": _JOURNAL,
            "version": 2,
            "inputs": inputs,
            "from": [found.name for found in self._formats],
            "to": self._target.name,
            "options": options.options,
            "content": options.content,
            "shuffle": options.seed if options.shuffle else None,
            "shards": [shard.path.name for shard in self._shards],
        }

    def run(self, journal: Journal, finished: dict[str, int]) -> None:
        """Writes all shards that are not finished."""
        todo = [shard for shard in self._shards if shard.path.name not in finished]
        shown = False if self._options.quiet else None
        self._progress = Progress("convert", self._total_bytes(), shown=shown)
        self._num_done = len(finished)
        # Files without an index are read once, from start to end, for all outputs.
        in_order = any(
            found.streams(path) for path, found in zip(self._inputs, self._formats, strict=True)
        )
        is_one_pass = len(self._shards) > 1 and in_order and todo and todo[0].count is not None
        is_one_pass = is_one_pass and not self._options.shuffle
        try:
            if is_one_pass:
                self._one_pass(journal, finished)
            else:
                self._by_shard(journal, todo)
        finally:
            self._progress.close()

    def _total_bytes(self) -> float:
        return float(sum(verify._size(path) for path in self._inputs))  # noqa: SLF001

    def _opened(self, numbers: tuple[int, ...]) -> Copying:
        options = self._options
        return opened(
            [self._inputs[number] for number in numbers],
            [self._formats[number] for number in numbers],
            seed=options.seed if options.shuffle else None,
            content=options.content,
        )

    def _one_pass(self, journal: Journal, finished: dict[str, int]) -> None:
        with self._opened(self._shards[0].inputs) as copying:
            for shard in self._shards:
                assert shard.count is not None
                if shard.path.name in finished:
                    copying.skip(shard.count)
                else:
                    self._write(shard, copying, self._threads, journal)

    def _by_shard(self, journal: Journal, todo: list[Shard]) -> None:
        """Writes shards in threads of their own, each with its part of the engine's."""
        waiting = iter(todo)
        num_left = len(todo)
        num_workers = min(self._threads, len(todo))

        def next_shard() -> tuple[Shard | None, int]:
            nonlocal num_left
            with self._lock:
                shard = next(waiting, None)
                share = max(1, self._threads // max(1, min(num_left, num_workers)))
                return shard, share

        def work() -> None:
            nonlocal num_left
            try:
                while not self._stop.is_set():
                    shard, threads = next_shard()
                    if shard is None:
                        return
                    with self._opened(shard.inputs) as copying:
                        copying.skip(shard.first)
                        self._write(shard, copying, threads, journal)
                    with self._lock:
                        num_left -= 1
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                self._stop.set()

        if num_workers == 1:
            work()
        else:
            workers = [
                start_thread(work, name=f"grainmill-convert-{number}", stop=self._stop.set)
                for number in range(num_workers)
            ]
            try:
                for worker in workers:
                    worker.join()
            finally:
                self._stop.set()
                for worker in workers:
                    worker.join()
        if self._failure is not None:
            raise self._failure

    def _write(self, shard: Shard, copying: Copying, threads: int, journal: Journal) -> None:
        """Writes one output: under a hidden name until it is complete."""
        temporary = shard.temporary
        with self._lock:
            self._progress.note(f"{self._num_done} of {len(self._shards)} files")
        # Another command may name the same file in another way, and so have another journal.
        claim = _locked(temporary)
        try:
            output = _native.RecordOutput(
                str(temporary), self._target.name, options=self._options.options
            )
            copied = self._copy(shard, copying, output, threads)
            output.close()
            if self._options.verify:
                _check(temporary, self._target, copied)
            journal.add(shard.path.name, copied, _identity(temporary))
            _rename(temporary, shard.path, force=self._options.force)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            claim.close()
        with self._lock:
            self._num_done += 1

    def _copy(
        self, shard: Shard, copying: Copying, output: _native.RecordOutput, threads: int
    ) -> int:
        copied, step = 0, 256
        while shard.count is None or copied < shard.count:
            if self._stop.is_set():
                raise KeyboardInterrupt
            began = time.monotonic()
            wanted = step if shard.count is None else min(step, shard.count - copied)
            count, done = copying.copy_to(output, wanted, threads)
            if count == 0:
                break
            copied += count
            self._progress.add(done, count)
            # So that the line moves, and that an interrupt is seen.
            scale = _STEP_S / max(time.monotonic() - began, 1e-4)
            step = max(1, min(_MAX_STEP, int(step * min(max(scale, 0.25), 4.0))))
        if shard.count is not None and copied < shard.count:
            raise CommandError(
                f"the inputs have fewer records than before: {shard.count} were expected for "
                f"{shard.path}, got {copied}",
                ExitCode.DAMAGED,
            )
        return copied


def _check(path: Path, target: formats.Format, copied: int) -> None:
    report = verify.check_file(str(path), target.name, 1)
    if report["problems"] or report["records"] != copied:
        problem = report["problems"][0]["problem"] if report["problems"] else "other records"
        raise CommandError(
            f"{path}: what was written cannot be read back: {problem} ({report['records']} of "
            f"{copied} records)",
            ExitCode.DAMAGED,
        )


def _rename(temporary: Path, path: Path, *, force: bool) -> None:
    """Gives a complete file its name; without `force`, only if no file has it."""
    if not force:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise CommandError(
                f"{path}: exists already; --force replaces it", ExitCode.EXISTS
            ) from None
        except OSError:  # a file system without links
            temporary.replace(path)
        else:
            temporary.unlink()
    else:
        temporary.replace(path)
    sync_directory(path.parent)
