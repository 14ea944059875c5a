"""The options and limits of a pipeline, passed to all its stages when it is opened."""

from __future__ import annotations

import dataclasses
from typing import Any

from grainmill._native import ReadQueue
from grainmill._plan.options import MAX_READS_IN_FLIGHT, DatasetOptions
from grainmill._stats.meters import Recorder


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
        recorder: Takes the times of all stages in this process.
    """

    options: DatasetOptions = dataclasses.field(default_factory=DatasetOptions)
    prefetches: bool = True
    num_workers: int = 0
    reads: ReadQueue = dataclasses.field(default_factory=lambda: ReadQueue(MAX_READS_IN_FLIGHT))
    recorder: Recorder = dataclasses.field(default_factory=Recorder)

    def limited_to(self, max_reads_in_flight: int | None) -> Context:
        """The same with its own limit on reads in flight, if one is given."""
        if max_reads_in_flight is None:
            return self
        return dataclasses.replace(self, reads=ReadQueue(max_reads_in_flight))

    def __reduce__(self) -> Any:
        """Another process gets its own `reads` and `recorder`."""
        args = self.options, self.prefetches, self.num_workers, self.recorder.tracks
        return _context_in_worker, args


def _context_in_worker(
    options: DatasetOptions,
    prefetches: bool,  # noqa: FBT001 - in the order of the fields
    num_workers: int,
    tracks: bool,  # noqa: FBT001
) -> Context:
    return Context(options, prefetches, num_workers, recorder=Recorder(tracks=tracks))
