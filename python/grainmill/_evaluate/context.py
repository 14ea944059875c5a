"""What a plan is run with, handed down from where it is opened."""

from __future__ import annotations

import dataclasses
from typing import Any

from grainmill._native import ReadQueue
from grainmill._plan.options import MAX_READS_IN_FLIGHT, DatasetOptions


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What holds for all stages of a pipeline that is being opened.

    Attributes:
        options: The options of the whole plan.
        works_ahead: Whether anything may be computed before it is asked for. What a later element
            does to the process cannot cost an earlier one where it is not.
        num_workers: Where it runs in a worker process, how many of them share the memory that there
            is for elements ahead; 0 in the main process.
        reads: Bounds the reads in flight of all that is opened with it.
    """

    options: DatasetOptions = dataclasses.field(default_factory=DatasetOptions)
    works_ahead: bool = True
    num_workers: int = 0
    reads: ReadQueue = dataclasses.field(default_factory=lambda: ReadQueue(MAX_READS_IN_FLIGHT))

    def limited_to(self, max_reads_in_flight: int | None) -> Context:
        """The same with a bound of its own on reads in flight, if one is given."""
        if max_reads_in_flight is None:
            return self
        return dataclasses.replace(self, reads=ReadQueue(max_reads_in_flight))

    def __reduce__(self) -> Any:
        """Another process has reads in flight of its own."""
        return Context, (self.options, self.works_ahead, self.num_workers)
