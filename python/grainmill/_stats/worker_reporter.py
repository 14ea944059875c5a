"""What a worker process sends to its parent about itself."""

from __future__ import annotations

import pprint
from typing import TYPE_CHECKING

from grainmill._stats.meters import WorkerReport, clock_s
from grainmill._stats.recorded import Recorded
from grainmill._stats.thread_clock import ThreadClock, ThreadTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.node import Node
    from grainmill._stats.meters import PoolUse, Recorder, ThreadTotals

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
        recorded = Recorded(self._output, self._recorder)
        stages = recorded.stages
        specs = {
            stage.number: pprint.pformat(stage.meter.spec)
            for stage in stages
            if stage.meter.spec is not None
        }
        reads = [read for _, read in recorded.reads()]
        threads: dict[int, ThreadTotals] = {}
        for stage, totals in recorded.threads():
            if stage is not None:
                threads[stage.number] = totals.plus(threads.get(stage.number))
        work_s = sum(read.work_s for read in reads)
        storage_s = sum(read.storage_s for read in reads)
        alive_s, all_s = now_s - self._started_s, self._all_busy_s() - self._busy_before_s
        alive_s = max(min(alive_s, self.busy_s), alive_s - (all_s - self.busy_s))
        share = self.busy_s / all_s if all_s and not self._starts_tasks else 1.0
        others: list[PoolUse | ThreadTotals] = [read.threads() for read in reads]
        others += [totals for _, totals in recorded.threads()]
        cpu_s, ready_s = (share * each for each in self._all_times(others))
        return WorkerReport(
            self.busy_s,
            alive_s,
            self._elements,
            {stage.number: stage.meter.snapshot() for stage in stages},
            (work_s, storage_s, *recorded.files()),
            {number: read.snapshot() for number, read in recorded.reads_by_stage().items()},
            specs,
            cpu_s,
            ready_s,
            {stage.number: stage.wait_s for stage in stages if stage.wait_s},
            threads,
            {
                stage.number: stage.reported.snapshot()
                for stage in stages
                if stage.reported.elements
            },
            recorded.parts,
        )

    def _all_times(self, others: list[PoolUse | ThreadTotals]) -> tuple[float, float]:
        """The CPU seconds of all threads of the worker, and these with the waits for a core."""
        cpu_s = sum(use.cpu_s for use in others)
        ready_s = sum(use.ready_s for use in others)
        factor = self.busy_s / self._timed_s if self._timed_s else 1.0
        return factor * self._times.cpu_s + cpu_s, factor * self._times.ready_s + ready_s
