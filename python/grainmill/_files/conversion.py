"""Writes the outputs of a conversion, some at a time.

The work is divided by output file. Where there are several, as many are written at a time as there
are threads; the last ones share the threads, since one file is encoded by several, too. Where files
are written, and what an interrupted run leaves, is the business of `outputs`.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grainmill._files import parquet_output, verify
from grainmill._files.copying import Copying, opened
from grainmill._files.outputs import identities, resolved
from grainmill._native import GrainmillError
from grainmill._threads import start_thread
from grainmill._url import identified, is_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._files import formats
    from grainmill._files.bucket_outputs import BucketOutputs
    from grainmill._files.local_outputs import LocalOutputs
    from grainmill._files.outputs import Shard

    Outputs: TypeAlias = LocalOutputs | BucketOutputs

_JOURNAL = "grainmill conversion"
_STEP_S = 0.2
_MAX_STEP = 1 << 20
# How many files are read at a time where they are far: most of them wait for the network.
_MAX_FAR = 32
# How many blocks are read ahead in all files that are far, and in each at least.
_MAX_BLOCKS, _MIN_BLOCKS = 64, 4


class ConversionProgress(NamedTuple):
    """How far `convert` is.

    Attributes:
        byte_len: The bytes of the inputs that are to be read, about; 0 if that is unknown.
        bytes_read: How many of them have been.
        num_records: The records written so far.
        num_files: The number of outputs.
        num_files_done: Those that are complete, some perhaps by an earlier run.
        bytes_sent: The bytes that a bucket has received; `None` for local outputs.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}')
        >>> def tell(now):
        ...     print(f"{now.num_files_done} of {now.num_files} files, {now.num_records} records")
        >>> _ = files.convert("words.jsonl", "words.tfrecord", progress=tell)
        0 of 1 files, 1 records
    """

    byte_len: float
    bytes_read: float
    num_records: int
    num_files: int
    num_files_done: int
    bytes_sent: int | None


class Request(NamedTuple):
    """What `convert` was asked for, besides the files."""

    target: formats.Format
    options: str
    content: str
    schema: str | None
    seed: int | None  # of the order; none if that is the one of the inputs
    num_threads: int
    reads_back: bool
    progress: Callable[[ConversionProgress], object] | None


class Conversion:
    """Writes the shards, some at a time.

    Args:
        request: What was asked for.
        inputs: The paths of the inputs.
        found: Their formats.
        shards: The outputs.
    """

    def __init__(
        self,
        request: Request,
        inputs: list[str],
        found: list[formats.Format],
        shards: list[Shard],
    ) -> None:
        self._request = request
        self._inputs = inputs
        self._identities = identities(inputs)
        self._byte_lens = [identity[0] if identity else 0 for identity in self._identities]
        self._formats = found
        self._shards = shards
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # More files than that may be open, and read ahead.
        self._may_copy = threading.BoundedSemaphore(request.num_threads)
        self._failure: BaseException | None = None
        self._byte_len = self._bytes_read = 0.0
        self._num_records = self._num_done = 0

    def header(self) -> dict[str, Any]:
        """What determines the outputs."""
        request = self._request
        found = zip(self._inputs, self._identities, strict=True)
        return {
            "format": _JOURNAL,
            "version": 3,
            "inputs": [[identified(resolved(path)), identity] for path, identity in found],
            "from": [found.name for found in self._formats],
            "to": request.target.name,
            "options": request.options,
            "content": request.content,
            "schema": request.schema,
            "shuffle": request.seed,
            "shards": [shard.name for shard in self._shards],
        }

    def run(self, outputs: Outputs) -> None:
        """Writes all shards that are not finished."""
        self._outputs = outputs
        kept = outputs.kept()
        todo = [shard for shard in self._shards if shard.name not in kept]
        self._byte_len = self._total_bytes(todo)
        self._num_done = len(kept)
        # Files without an index are read once, from start to end, for all outputs.
        in_order = any(found.in_order for found in self._formats)
        is_one_pass = len(self._shards) > 1 and in_order and todo and todo[0].count is not None
        if is_one_pass and self._request.seed is None:
            self._run_threads(lambda: self._one_pass(kept), 1)
        else:
            self._by_shard(todo)

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
        request = self._request
        keeps_rows = request.target.rows and request.content == "same"
        return opened(
            [self._inputs[number] for number in numbers],
            [self._formats[number] for number in numbers],
            [self._byte_lens[number] for number in numbers],
            seed=request.seed,
            content="rows" if keeps_rows else request.content,
        )

    def _one_pass(self, kept: frozenset[str]) -> None:
        copying = self._opened(self._shards[0].inputs)
        for shard in self._shards:
            assert shard.count is not None
            if shard.name in kept:
                copying.skip(shard.count)
            else:
                self._write(shard, copying, self._request.num_threads)

    def _by_shard(self, todo: list[Shard]) -> None:
        """Writes shards in threads of their own, each with its part of the engine's."""
        waiting = iter(todo)
        num_left = len(todo)
        num_threads = self._request.num_threads
        num_copying = min(num_threads, len(todo))
        is_far = any(is_url(path) for path in self._inputs)
        # One thread writes file after file.
        num_open = min(_MAX_FAR if is_far and num_threads > 1 else num_threads, len(todo))

        def next_shard() -> tuple[Shard | None, int]:
            nonlocal num_left
            with self._lock:
                shard = next(waiting, None)
                share = max(1, num_threads // max(1, min(num_left, num_copying)))
                return shard, share

        def work() -> None:
            nonlocal num_left
            while not self._stop.is_set():
                shard, threads = next_shard()
                if shard is None:
                    return
                copying = self._opened(shard.inputs)
                copying.skip(shard.first)
                copying.start(shard.count, max(_MIN_BLOCKS, _MAX_BLOCKS // num_open))
                self._write(shard, copying, threads)
                with self._lock:
                    num_left -= 1

        self._run_threads(work, num_open)

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
        """Writes one output, whose records are copied when a thread may."""
        writing = self._outputs.open(shard)
        try:
            with self._may_copy:
                copied = self._copy(shard, copying, writing.records, threads)
            writing.finish(copied, lambda path: self._check(path, copied))
        except BaseException:
            writing.abort()
            raise
        with self._lock:
            self._num_done += 1

    def _tell(self, num_bytes: float, num_records: int) -> None:
        """Adds to what was copied, and says how far that is."""
        with self._lock:
            self._bytes_read += num_bytes
            self._num_records += num_records
            if self._request.progress is not None:
                progress = ConversionProgress(
                    self._byte_len,
                    self._bytes_read,
                    self._num_records,
                    len(self._shards),
                    self._num_done,
                    self._outputs.num_sent(),
                )
                self._request.progress(progress)

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
            self._tell(done, count)
            # So that the line moves, and that an interrupt is seen.
            scale = _STEP_S / max(time.monotonic() - began, 1e-4)
            step = max(1, min(_MAX_STEP, int(step * min(max(scale, 0.25), 4.0))))
        if shard.count is not None and copied < shard.count:
            raise GrainmillError(
                f"the inputs have fewer records than before: {shard.count} were expected for "
                f"{shard.path}, got {copied}"
            )
        return copied

    def _check(self, path: str, copied: int) -> None:
        """Reads back what was written, if that is wanted."""
        if not self._request.reads_back:
            return
        report = verify.verify(path, format=self._request.target.name, max_problems=1)
        if report["problems"] or report["records"] != copied:
            problem = report["problems"][0]["problem"] if report["problems"] else "other records"
            raise GrainmillError(
                f"{path}: what was written cannot be read back: {problem} ({report['records']} of "
                f"{copied} records)"
            )
