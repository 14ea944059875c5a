"""The options and limits of a pipeline, passed to all its stages when it is opened."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.shared_threads import SharedThreads
from grainmill._native import ReadQueue
from grainmill._plan.options import MAX_READS_IN_FLIGHT, DatasetOptions
from grainmill._stats.meters import Recorder

if TYPE_CHECKING:
    from grainmill._evaluate.prefetch.worker_tasks import Workers


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The options and limits of all stages of a pipeline.

    Attributes:
        options: The options of the whole plan.
        prefetches: Whether elements may be prefetched. Otherwise, whatever a later element does
            to the process cannot affect an earlier one.
        num_workers: In a worker process, the number of workers that share the memory for
            prefetched elements; 0 in the main process.
        reads: Limits the reads in flight of the whole pipeline.
        limited_reads: The same for readers that have a limit of their own, by that limit.
        num_readers: How many readers of the pipeline share its memory.
        threads: The threads that its readers share; `None` for one reader, which has its own.
        workers: The worker processes that readers share from which one thread pulls, by what they
            ask for.
        recorder: Takes the times of all stages in this process.
    """

    options: DatasetOptions = dataclasses.field(default_factory=DatasetOptions)
    prefetches: bool = True
    num_workers: int = 0
    reads: ReadQueue = dataclasses.field(default_factory=lambda: ReadQueue(MAX_READS_IN_FLIGHT))
    limited_reads: dict[int, ReadQueue] = dataclasses.field(default_factory=dict)
    num_readers: int = 1
    threads: SharedThreads | None = None
    workers: dict[Any, list[Workers]] = dataclasses.field(default_factory=dict)
    recorder: Recorder = dataclasses.field(default_factory=Recorder)

    def of_reader(self, max_reads_in_flight: int | None) -> Context:
        """The same for one of the readers, which take turns; with a limit of its own, if given."""
        reads = self.reads
        if max_reads_in_flight is not None:
            queue = ReadQueue(reads_of_process(max_reads_in_flight, self.num_workers))
            reads = self.limited_reads.setdefault(max_reads_in_flight, queue)
        return dataclasses.replace(self, reads=reads.for_another_owner())

    def on_other_thread(self) -> Context:
        """The same for readers from which another thread pulls."""
        return dataclasses.replace(self, workers={})

    def shared_by(self, num_readers: int) -> Context:
        """The same for each of several readers that share what this one has."""
        if num_readers <= 1:
            return self
        threads = SharedThreads() if self.threads is None else self.threads
        num_readers *= self.num_readers
        return dataclasses.replace(self, num_readers=num_readers, threads=threads)

    def __reduce__(self) -> Any:
        """Another process gets its own threads, `reads` and `recorder`, for its plan."""
        args = self.options, self.prefetches, self.num_workers, self.recorder
        return _context_in_worker, args


def _context_in_worker(
    options: DatasetOptions,
    prefetches: bool,  # noqa: FBT001 - in the order of the fields
    num_workers: int,
    recorder: Recorder,
) -> Context:
    reads = ReadQueue(reads_of_process(None, num_workers))
    return Context(options, prefetches, num_workers, reads, recorder=recorder)


def reads_of_process(max_reads_in_flight: int | None, num_workers: int) -> int:
    """The limit for each of `num_workers` processes that read, or for the only one if 0."""
    num_processes = max(1, num_workers)
    if max_reads_in_flight is not None:
        return -(-max_reads_in_flight // num_processes)
    share = tuning.WORKERS_READS_IN_FLIGHT // num_processes
    return min(MAX_READS_IN_FLIGHT, max(tuning.MIN_READS_IN_FLIGHT, share))
