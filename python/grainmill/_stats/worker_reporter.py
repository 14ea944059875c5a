"""What a worker process sends to its parent about itself."""

from __future__ import annotations

import pprint
from typing import TYPE_CHECKING

from grainmill._stats.meters import WorkerReport, clock_s
from grainmill._stats.numbering import numbered
from grainmill._stats.thread_clock import ThreadClock, ThreadTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.node import Node
    from grainmill._stats.meters import Recorder

# The least seconds between two reports, after the first few.
_INTERVAL_S = 0.05
_FIRST_REPORTS = 3
# The seconds between two tasks that are timed with the clock of their thread.
_PAUSE_S = 0.01


class WorkerReporter:
    """Reports on a worker a few times a second, with the results of its tasks.

    Args:
        recorder: What the worker records.
        output: The last node of the plan that it runs.
        all_busy_s: Returns how long the tasks took of all plans that it runs; `None` for one plan.

    Attributes:
        busy_s: How long the tasks of this plan took.
    """

    def __init__(
        self, recorder: Recorder, output: Node, all_busy_s: Callable[[], float] | None = None
    ) -> None:
        self._recorder = recorder
        self._output = output
        self._numbers: dict[int, int] | None = None
        self._started_s = self._next_s = clock_s()
        self._num_reports = 0
        self._clock = ThreadClock()
        self._before = self._clock.read()
        self._times = ThreadTimes(0.0, 0.0)  # of the calling thread
        self._timed_s = 0.0  # seconds of the tasks that these are of
        self._next_timed_s = 0.0
        self._is_timed = self._starts_tasks = False
        self.busy_s = 0.0
        self._elements = 0
        self._all_busy_s = all_busy_s or (lambda: self.busy_s)
        self._busy_before_s = self._all_busy_s()

    def start_task(self) -> None:
        """Leaves out for how long the calling thread, which runs all tasks, waited before this one.

        Reading its clock takes microseconds, so some tasks stand for the others.
        """
        self._starts_tasks = True
        self._is_timed = clock_s() >= self._next_timed_s
        if self._is_timed:
            self._before = self._clock.read()

    def report(self, busy_s: float, elements: int) -> WorkerReport | None:
        """Records a task that took `busy_s` for `elements`; returns a report if one is due."""
        self.busy_s += busy_s
        self._elements += elements
        now_s = clock_s()
        is_due = self._num_reports < _FIRST_REPORTS or now_s >= self._next_s
        if self._is_timed if self._starts_tasks else is_due:
            before, self._before = self._before, self._clock.read()
            self._times = self._times.plus(self._before).plus(before, -1.0)
            self._timed_s = self._timed_s + busy_s if self._starts_tasks else self.busy_s
            self._next_timed_s = now_s + _PAUSE_S
        if not is_due:
            return None
        self._num_reports += 1
        self._next_s = now_s + _INTERVAL_S
        if self._numbers is None:
            self._numbers = {id(stage.node): stage.number for stage in numbered(self._output)}
        numbers = self._numbers
        stages = {
            numbers[key]: meter.snapshot()
            for key, meter in self._recorder.stages().items()
            if key in numbers
        }
        specs = {
            numbers[key]: pprint.pformat(meter.spec)
            for key, meter in self._recorder.stages().items()
            if key in numbers and meter.spec is not None
        }
        blocks = {
            numbers[id(read.node)]: read.snapshot()
            for read in self._recorder.reads
            if read.node is not None
        }
        work_s = sum(read.work_s for read in self._recorder.reads)
        storage_s = sum(read.storage_s for read in self._recorder.reads)
        reads = (work_s, storage_s, *self._recorder.files())
        alive_s, all_s = now_s - self._started_s, self._all_busy_s() - self._busy_before_s
        alive_s = max(min(alive_s, self.busy_s), alive_s - (all_s - self.busy_s))
        share = self.busy_s / all_s if all_s and not self._starts_tasks else 1.0
        cpu_s, ready_s = (share * each for each in self._all_times())
        return WorkerReport(
            self.busy_s, alive_s, self._elements, stages, reads, blocks, specs, cpu_s, ready_s
        )

    def _all_times(self) -> tuple[float, float]:
        """The CPU seconds of all threads of the worker, and these with the waits for a core."""
        others = [read.threads() for read in self._recorder.all_reads()]
        threads = [thread.use.read() for thread in self._recorder.threads()]
        cpu_s = sum(use.cpu_s for use in others) + sum(times.cpu_s for times in threads)
        ready_s = sum(use.ready_s for use in others) + sum(times.ready_s for times in threads)
        factor = self.busy_s / self._timed_s if self._timed_s else 1.0
        return factor * self._times.cpu_s + cpu_s, factor * self._times.ready_s + ready_s
