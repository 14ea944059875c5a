"""`grainmill convert`: copies records to files of another format, number or order.

The work is divided by output file. Where there are several, as many are written at a time as there
are threads; the last ones share the threads, since one file is encoded by several, too. Where files
are written, and what an interrupted run leaves, is the business of `outputs`.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._sources.suffixes import COMPRESSED, GZIP
from grainmill._threads import start_thread
from grainmill._tools import formats, parquet_output, verify
from grainmill._tools.bucket_outputs import BucketOutputs
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    Progress,
    byte_text,
    check_at_least,
    count_text,
    print_json,
)
from grainmill._tools.copying import Copying, opened, total_of
from grainmill._tools.local_outputs import LocalOutputs
from grainmill._tools.outputs import Kind, Shard, exists_error, identities
from grainmill._url import identified, is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Outputs: TypeAlias = LocalOutputs | BucketOutputs

_JOURNAL = "grainmill conversion"
_STEP_S = 0.2
_MAX_STEP = 1 << 20
_CONTENTS = ("same", "json", "example")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")

_EXAMPLES = """\
examples:
  grainmill convert train.tfrecord-* out/              one output for each input
  grainmill convert train.tfrecord-* all.array_record  one file with all records, in order
  grainmill convert train.tfrecord train.array_record --options group_size:1,uncompressed
  grainmill convert 'raw/*.jsonl' out/train.array_record --shards 10 --shuffle --seed 1
  grainmill convert train.tfrecord-* s3://bucket/train/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, globs, name@N, directories, URLs"
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a file, for the records of all inputs in order; a directory, for one output for "
        "each input; either may be in a bucket (s3://, gs://, az://)",
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
        "--schema",
        metavar="SCHEMA",
        help="the columns of Parquet outputs, `name:type,...`, with types such as int64, float, "
        "string, binary, list<int32> (default: as the first records have them)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that encode records (default: one per core)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read back each output when it is written"
    )
    parser.add_argument("--force", action="store_true", help="replace existing outputs")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    started = time.monotonic()
    threads = options.threads if options.threads is not None else os.cpu_count() or 1
    check_at_least("--threads", threads, 1)
    check_at_least("--shards", options.shards, 1)
    _check_url(options.output)
    inputs = formats.expanded(options.inputs)
    detected = [formats.detect(path, options.source) for path in inputs]
    target = _target_format(options)
    options.options = _with_compression(options, target)
    if options.schema is not None and target.name != "parquet":
        raise CommandError(f"--schema states the columns of Parquet files, not of {target.title}")
    if target.name == "parquet":
        parquet_output.check(options.options, options.schema)
    shards = _shards(options, inputs, detected, target)
    _check_outputs(shards, inputs)
    _check_mixture(options, shards, detected, target)
    if target.name == "bagz" and options.options:
        _check_compression(shards[0].path, options.options)
    pairs = list(zip(inputs, detected, strict=True))
    conversion = Conversion(options, pairs, target, shards, threads)
    kind = Kind(target, options.options, options.schema)
    header = conversion.header()
    place = BucketOutputs if is_url(options.output) else LocalOutputs
    with place(shards, options.output, kind, header, force=options.force) as outputs:
        if not options.force:
            _refuse_existing(outputs)
        if target.name == "parquet" and len(shards) > 1 and shards[0].count is not None:
            kind.sample.extend(conversion.sample())
        conversion.run(outputs)
        written = outputs.byte_len()
        outputs.remove_journal()
    _show(options, shards, outputs, written, time.monotonic() - started)
    return ExitCode.OK


def _show(
    options: argparse.Namespace,
    shards: list[Shard],
    outputs: Outputs,
    written: int,
    elapsed: float,
) -> None:
    records = sum(outputs.records[shard.name] for shard in shards)
    num_kept = len(outputs.kept())
    if options.json:
        print_json(
            {
                "files": [
                    {"path": shard.path, "records": outputs.records[shard.name]} for shard in shards
                ],
                "records": records,
                "bytes": written,
                "kept": num_kept,
                "seconds": round(elapsed, 3),
            }
        )
        return
    kept = f", {num_kept} of them from an earlier run" if num_kept else ""
    name = shards[0].path if len(shards) == 1 else shards[0].directory
    print(
        f"{name}: {count_text(len(shards), 'file')}{kept}, {count_text(records, 'record')}, "
        f"{byte_text(written)}"
    )


# --- what is written ----------------------------------------------------------------------------


def _target_format(options: argparse.Namespace) -> formats.Format:
    if options.to is not None:
        return formats.FORMATS[options.to]
    found = formats.of_name(options.output)
    if found is None and _is_directory(options.output):
        return formats.FORMATS["array_record"]
    if found is None:
        hint = "; a directory of a bucket ends with /" if is_url(options.output) else ""
        raise CommandError(
            f"{options.output}: its format is not known from its name; pass --to "
            f"({', '.join(formats.WRITTEN)}){hint}"
        )
    if not found.written:  # only a WebDataset
        raise CommandError(
            f"{options.output}: {found.title} files are not written: a record does not say which "
            "files it consists of; ArrayRecord and Parquet keep rows; to copy a WebDataset, copy "
            "its .tar files"
        )
    return found


def _with_compression(options: argparse.Namespace, target: formats.Format) -> str:
    """`--options`, with what the name of the output says: readers go by names, too."""
    given: str = options.options
    suffix = "" if _is_directory(options.output) else formats.compression_suffix(options.output)
    if not suffix:
        return given
    if not target.in_order:
        raise CommandError(
            f"{options.output}: {target.title} files are compressed inside, as --options say "
            f"({target.options}), not as a whole; name it without {suffix}"
        )
    if suffix not in GZIP:
        raise CommandError(
            f"{options.output}: {target.title} files are written without compression, or by gzip; "
            f"end the name with .gz, or leave out {suffix}"
        )
    is_stated = any(option.partition(":")[0] == "gzip" for option in given.split(","))
    return given if is_stated else ",".join(filter(None, (given, "gzip")))


def _check_url(path: str) -> None:
    """Refuses an output that is in no bucket."""
    if not is_url(path):
        return
    scheme = path.partition("://")[0]
    if scheme in {"http", "https"}:
        raise CommandError(
            f"{path}: a web server's files cannot be written; name a bucket (s3://, gs://, az://), "
            "or a local file"
        )
    if scheme not in _BUCKETS:
        raise CommandError(
            f"{path}: `{scheme}://` is not supported; buckets are {'://, '.join(_BUCKETS)}://"
        )


def _is_directory(path: str) -> bool:
    if is_url(path):
        return path.endswith("/")
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


def _shards(
    options: argparse.Namespace,
    inputs: list[str],
    detected: list[formats.Format],
    target: formats.Format,
) -> list[Shard]:
    """The outputs, each with its share of the records."""
    is_remote = is_url(options.output)

    def clean(path: str) -> str:  # without `./`, but a URL stays as it is
        return path if is_remote else str(Path(path))

    output = clean(options.output)
    everything = tuple(range(len(inputs)))
    number = options.shards
    # As sources read it: the numbers of shards are where the `@` is.
    stated = re.fullmatch(r"(.*[^/\\@])@(\d{1,5})((?:\.[^/\\@]*)?)", options.output)
    if stated is not None:
        if number is not None and number != int(stated[2]):
            raise CommandError(f"{options.output} states another number of files than --shards")
        number, output = int(stated[2]), clean(f"{stated[1]}{stated[3]}")
        if number < 1:
            raise CommandError(f"{options.output} must state at least 1 file")
    if _is_directory(options.output):
        if number is not None or options.shuffle:
            raise CommandError(
                f"{options.output}: a directory; give the name of the files, such as "
                f"{output.rstrip('/')}/train{target.extensions[0]}"
            )
        directory = output if is_remote else f"{output}{os.sep}"
        paths = [clean(f"{directory}{_matching_name(path, target)}") for path in inputs]
        if len(set(paths)) < len(paths):
            raise CommandError("two inputs have the same name; name the outputs with --shards")
        return [Shard(path, (at,)) for at, path in enumerate(paths)]
    if number is None:
        count = total_of(inputs, detected) if options.shuffle else None
        return [Shard(output, everything, 0, count)]
    total = total_of(inputs, detected)
    bounds = [total * at // number for at in range(number + 1)]
    shard_of = [f"-{at:05}-of-{number:05}" for at in range(number)]
    if stated is not None and stated[3]:
        paths = [clean(f"{stated[1]}{shard}{stated[3]}") for shard in shard_of]
    else:
        paths = [_named(output, shard, target) for shard in shard_of]
    return [
        Shard(path, everything, bounds[at], bounds[at + 1] - bounds[at])
        for at, path in enumerate(paths)
    ]


def _matching_name(path: str, target: formats.Format) -> str:
    """The name of an input, with the extension of another format and the same shard."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    name = Path(path).name
    shard = re.search(r"-\d{5,}-of-\d{5,}", name)
    if shard is not None:
        name = name.replace(shard[0], "", 1)
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    for found in formats.FORMATS.values():
        for extension in found.extensions:
            name = name.removesuffix(extension)
    return _named(f"{name}{target.extensions[0]}", shard[0] if shard else "", target)


def _named(path: str, shard: str, target: formats.Format) -> str:
    """A path with the number of a shard, where files of a format have it."""
    for extension in target.extensions if target.numbers_first else ():
        if path.endswith(extension):
            return f"{path.removesuffix(extension)}{shard}{extension}"
    return f"{path}{shard}"


def _check_outputs(shards: list[Shard], inputs: list[str]) -> None:
    read = {_absolute(path) for path in inputs}
    for shard in shards:
        if _absolute(shard.path) in read:
            raise CommandError(f"{shard.path}: is an input, too")


def _check_mixture(
    options: argparse.Namespace,
    shards: list[Shard],
    detected: list[formats.Format],
    target: formats.Format,
) -> None:
    """Refuses inputs of several formats where one file cannot have the records of all of them."""
    names = list(dict.fromkeys(found.title for found in detected))
    if len(names) < 2 or all(len(shard.inputs) < 2 for shard in shards):
        return
    found = " and ".join(names)
    if options.shuffle:
        raise CommandError(
            f"inputs of several formats ({found}) cannot be shuffled together; convert them to one "
            "file without --shuffle first"
        )
    if target.rows and options.content == "same" and len({each.rows for each in detected}) > 1:
        raise CommandError(
            f"records of {found} inputs cannot be rows of one {target.title} file; convert them to "
            "JSON Lines first"
        )


def _check_compression(path: str, options: str) -> None:
    """Refuses a Bagz file whose name says something else than what it would contain."""
    if path.endswith(".bagz") == ("uncompressed" in options.split(",")):
        raise CommandError(
            f"{path}: Bagz files are read as compressed if their name ends with .bagz, otherwise "
            f"as uncompressed; --options {options} contradicts that"
        )


def _absolute(path: str) -> str:
    return path if is_url(path) else str(Path(path).resolve())


def _refuse_existing(outputs: Outputs) -> None:
    existing = outputs.existing()
    if existing:
        more = f" (and {len(existing) - 1} more)" if len(existing) > 1 else ""
        raise exists_error(existing[0], more)


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
        self._identities = identities(self._inputs)
        self._byte_lens = [found[0] if found else 0 for found in self._identities]
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
        found = zip(self._inputs, self._identities, strict=True)
        return {
            "format": _JOURNAL,
            "version": 3,
            "inputs": [[identified(_absolute(path)), identity] for path, identity in found],
            "from": [found.name for found in self._formats],
            "to": self._target.name,
            "options": options.options,
            "content": options.content,
            "schema": options.schema,
            "shuffle": options.seed if options.shuffle else None,
            "shards": [shard.name for shard in self._shards],
        }

    def run(self, outputs: Outputs) -> None:
        """Writes all shards that are not finished."""
        self._outputs = outputs
        kept = outputs.kept()
        todo = [shard for shard in self._shards if shard.name not in kept]
        shown = False if self._options.quiet else None
        self._progress = Progress("convert", self._total_bytes(todo), shown=shown)
        self._num_done = len(kept)
        # Files without an index are read once, from start to end, for all outputs.
        in_order = any(found.in_order for found in self._formats)
        is_one_pass = len(self._shards) > 1 and in_order and todo and todo[0].count is not None
        is_one_pass = is_one_pass and not self._options.shuffle
        try:
            if is_one_pass:
                self._run_threads(lambda: self._one_pass(kept), 1)
            else:
                self._by_shard(todo)
        finally:
            self._progress.close()

    def sample(self) -> list[Any]:
        """The first records, which decide about the columns of all outputs."""
        found: Any = parquet_output.Sample()
        copying = self._opened(self._shards[0].inputs)
        while not found.is_enough and copying.copy_to(found, 64, 1)[0]:
            pass
        return list(found.records)

    def _total_bytes(self, todo: list[Shard]) -> float:
        """The bytes of the inputs that have to be read for some outputs."""
        all_inputs = sum(sum(self._byte_lens[number] for number in shard.inputs) for shard in todo)
        # Shards with a number of records have equal shares of the same inputs.
        is_shared = bool(todo) and todo[0].count is not None
        return all_inputs / (len(self._shards) if is_shared else 1)

    def _opened(self, numbers: tuple[int, ...]) -> Copying:
        options = self._options
        keeps_rows = self._target.rows and options.content == "same"
        return opened(
            [self._inputs[number] for number in numbers],
            [self._formats[number] for number in numbers],
            [self._byte_lens[number] for number in numbers],
            seed=options.seed if options.shuffle else None,
            content="rows" if keeps_rows else options.content,
        )

    def _one_pass(self, kept: frozenset[str]) -> None:
        copying = self._opened(self._shards[0].inputs)
        for shard in self._shards:
            assert shard.count is not None
            if shard.name in kept:
                copying.skip(shard.count)
            else:
                self._write(shard, copying, self._threads)

    def _by_shard(self, todo: list[Shard]) -> None:
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
            while not self._stop.is_set():
                shard, threads = next_shard()
                if shard is None:
                    return
                copying = self._opened(shard.inputs)
                copying.skip(shard.first)
                self._write(shard, copying, threads)
                with self._lock:
                    num_left -= 1

        self._run_threads(work, num_workers)

    def _run_threads(self, work: Callable[[], None], count: int) -> None:
        """Runs `work` on threads, so that this one sees an interruption while they wait."""
        begun: set[int] = set()
        ended = [threading.Event() for _ in range(count)]

        def run(number: int) -> None:
            try:
                with self._lock:  # one that has not begun by then is not waited for
                    if self._stop.is_set():
                        return
                    begun.add(number)
                work()
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                self._stop.set()
            finally:
                ended[number].set()

        def stop() -> None:
            self._stop.set()
            self._outputs.cancel()

        try:
            for number in range(count):
                work_of = functools.partial(run, number)
                start_thread(work_of, name=f"grainmill-convert-{number}", stop=stop)
            # Not `Thread.join`: before CPython 3.13, an interruption of it marks a thread as ended.
            for event in ended:
                event.wait()
        except BaseException:
            stop()
            raise
        finally:
            with self._lock:
                waited = list(begun)
            for number in waited:
                ended[number].wait()
        if self._failure is not None:
            raise self._failure

    def _write(self, shard: Shard, copying: Copying, threads: int) -> None:
        """Writes one output."""
        self._note()
        writing = self._outputs.open(shard)
        try:
            copied = self._copy(shard, copying, writing.records, threads)
            writing.finish(copied, lambda path: self._check(path, copied))
        except BaseException:
            writing.abort()
            raise
        with self._lock:
            self._num_done += 1

    def _note(self) -> None:
        parts = [f"{self._num_done} of {len(self._shards)} files", self._outputs.status()]
        self._progress.note("  ".join(filter(None, parts)))

    def _copy(self, shard: Shard, copying: Copying, output: Any, threads: int) -> int:
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
            self._note()
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

    def _check(self, path: str, copied: int) -> None:
        """Reads back what was written, if that is wanted."""
        if not self._options.verify:
            return
        report = verify.check_file(path, self._target.name, 1)
        if report["problems"] or report["records"] != copied:
            problem = report["problems"][0]["problem"] if report["problems"] else "other records"
            raise CommandError(
                f"{path}: what was written cannot be read back: {problem} ({report['records']} of "
                f"{copied} records)",
                ExitCode.DAMAGED,
            )
