"""What the threads of a pipeline did: which of them compute, wait, or have nothing to do."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from grainmill._stats.meters import ThreadTotals
from grainmill._stats.stage_times import computes_itself, upstream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from grainmill._stats.meters import Fill, ReadMeter
    from grainmill._stats.recorded import Recorded, StageReport
    from grainmill._stats.thread_clock import ThreadTimes

# Threads of a process share one interpreter lock: together they hold it nearly always if they need
# this share of the time for computing, or more. Then waits say nothing, and CPU time decides.
LOCK_BOUND = 0.75
_CONTENDS = 0.05
# More threads than this rarely get work where functions hold the lock: then the consumer says
# whether they are fast enough.
_LOCK_HOLDERS = 2
# Threads that have nothing to do for this share of the time are faster than their consumer.
_IDLE = 0.25


class Threads:
    """The threads of this process that run stages for the consumer, which is another one.

    Attributes:
        ready_s: Seconds in which those computed, or could have, that may hold the consumer up.
        all_ready_s: That of all of them.
        for_core: The share of their time in which threads waited for a core, by the stage's number.
        consumer_blocked_s: Seconds in which the consumer waited for something else than these.
        lanes: How many threads run a stage at a time, by its number, where several do.
        blocked: Stages, and which share of their time their threads neither computed nor could.
        idle: The numbers of stages whose threads do not, since they wait for their consumer.
    """

    def __init__(
        self,
        recorded: Recorded,
        running_s: float,
        consumer: ThreadTimes,
    ) -> None:
        stages = self._stages = recorded.stages
        self._running_s = running_s
        self._consumer_s = min(running_s, consumer.ready_s)
        near = awaited_by(stages, consumers(stages) or {0}) if stages else set()
        waits_s = sum(stages[each].wait_s - stages[each].start_s for each in near)
        self.consumer_blocked_s = max(0.0, running_s - self._consumer_s - waits_s)
        waits = [stage.wait_s - stage.start_s for stage in stages if stage.workers]
        self._for_workers_s = sum(waits)
        self.ready_s = self.all_ready_s = 0.0
        self.for_core: dict[int, float] = {}
        self.lanes: dict[int, int] = {}
        self.blocked: list[tuple[set[int], float]] = []
        self.idle: set[int] = set()
        for stage in stages:
            if stage.workers:
                self._add_workers(stage, recorded)
        for of_read, read in recorded.reads():
            self._add_read(of_read, read)
        groups: dict[int | None, list[ThreadTotals]] = {}
        for of_thread, totals in recorded.threads():
            groups.setdefault(None if of_thread is None else of_thread.number, []).append(totals)
        for number, threads in groups.items():
            self._add_threads(None if number is None else stages[number], threads)

    def _add_read(self, stage: StageReport | None, read: ReadMeter) -> None:
        use = read.threads()
        is_idle = use.busy_s < (1 - _IDLE) * self._running_s
        if use.active > _LOCK_HOLDERS and use.busy_s < math.inf:
            is_idle |= read.starved_s < _IDLE * self._running_s
        self._add(stage, read.fill, use.ready_s, is_idle=is_idle)
        if stage is None:
            return
        behind = {found.number for found in upstream(self._stages, stage)}
        if use.active > 1:
            self.lanes.update(dict.fromkeys(behind, use.active))
        if 0 < use.busy_s < math.inf:
            self._add_blocked(behind, use.busy_s, use.ready_s)
            busy_s = use.busy_s + read.storage_s
            self._add_waits(stage.number, busy_s, use.cpu_s, use.ready_s, busy_s)

    def _add_threads(self, stage: StageReport | None, threads: Sequence[ThreadTotals]) -> None:
        """Adds the threads that `stage` waits for."""
        _, waits_s = self._of_threads(stage)
        awaited_s = 0.0 if stage is None else stage.wait_s - stage.start_s
        # Of the time until one runs again, it may have waited for a core.
        is_idle = all(
            min(each.fill.idle_s, each.elapsed_s - each.ready_s - waits_s / len(threads))
            > max(awaited_s, _IDLE * self._running_s)
            for each in threads
        )
        for each in threads:
            self._add(stage, each.fill, each.ready_s, is_idle=is_idle)
        if stage is not None:
            self._add_busy(stage, functools.reduce(ThreadTotals.plus, threads))

    def _of_threads(self, stage: StageReport | None) -> tuple[set[int], float]:
        """The stages that run on the threads that `stage` waits for, and how long these waited."""
        if stage is None:
            return set(), 0.0
        starts = stage.inputs if stage.is_prefetch else [stage.number]
        own = same_threads(self._stages, starts)
        near = awaited_by(self._stages, own) - {stage.number}
        return own, sum(self._stages[each].wait_s for each in near)

    def _add_busy(self, stage: StageReport, totals: ThreadTotals) -> set[int]:
        """Adds what the threads did that `stage` waits for; returns the stages that they run."""
        own, waits_s = self._of_threads(stage)
        busy_s = totals.busy_s
        if busy_s > 0:
            self._add_waits(stage.number, busy_s, totals.cpu_s, totals.ready_s, busy_s)
            self._add_blocked(own, busy_s - waits_s, totals.ready_s)
        return own

    def _add_workers(self, owner: StageReport, recorded: Recorded) -> None:
        """Adds the workers of `owner`: their main threads and pools, and other threads, as one."""
        reports = owner.workers.values()
        busy_s, ready_s, cpu_s, running_s = (
            sum(getattr(report, name) for report in reports)
            for name in ("busy_s", "ready_s", "cpu_s", "running_s")
        )
        rest = {found.number for found in upstream(self._stages, owner)}
        threads = {n: each for n, each in recorded.threads_of_workers.items() if n in rest}
        for number, totals in threads.items():
            rest -= self._add_busy(self._stages[number], totals)
            ready_s, cpu_s = ready_s - totals.ready_s, cpu_s - totals.cpu_s
        self._add_waits(owner.number, busy_s, cpu_s, ready_s, running_s)
        if threads:
            near = awaited_by(self._stages, same_threads(self._stages, owner.inputs))
            busy_s -= sum(self._stages[each].wait_s for each in near)
        if busy_s > 0:
            self._add_blocked(rest, busy_s, ready_s)

    def _add_waits(
        self, number: int, busy_s: float, cpu_s: float, ready_s: float, running_s: float
    ) -> None:
        """Sets the share of waits for a core in `busy_s` of threads, of which some run at a time.

        They may also have waited for one before they were busy.
        """
        if busy_s > 0:
            share = (ready_s - cpu_s) / max(busy_s, ready_s)
            self.for_core[number] = max(0.0, min(share, 1 - cpu_s / running_s))

    def _add_blocked(self, numbers: set[int], busy_s: float, ready_s: float) -> None:
        self.blocked.append((numbers, 1 - ready_s / busy_s if busy_s > ready_s else 0.0))

    def are_bound(self, ready_s: float) -> bool:
        """Whether threads that compute for `ready_s`, and the consumer, need the lock all the time.

        Without other threads, the consumer waits for no lock; nor do those that wait for workers.
        """
        if not self._running_s or ready_s < _CONTENDS * self._running_s:
            return False
        if self._for_workers_s > (1 - LOCK_BOUND) * self._running_s:
            return False
        return ready_s + self._consumer_s >= LOCK_BOUND * self._running_s

    def _add(self, stage: StageReport | None, fill: Fill, ready_s: float, *, is_idle: bool) -> None:
        self.all_ready_s += ready_s
        if not is_idle:
            self.ready_s += ready_s * fill.taken_share
        elif stage is not None:
            self.idle.add(stage.number)


def behind_workers(stages: Sequence[StageReport]) -> dict[int, StageReport]:
    """The stage whose workers run a stage, by that one's number."""
    return {
        found.number: owner
        for owner in stages
        if owner.workers
        for found in upstream(stages, owner)
    }


def same_thread(stages: Sequence[StageReport], number: int) -> set[int]:
    """The numbers of the stages that the thread runs which runs stage `number`."""
    found: set[int] = set()
    pending = [number]
    while pending:
        stage = stages[pending.pop()]
        is_others = stage.is_prefetch or (stage.wait_s > 0 and stage.number != number)
        if stage.number not in found and (not is_others or computes_itself(stage)):
            found.add(stage.number)
            pending += stage.inputs
    return found


def same_threads(stages: Sequence[StageReport], numbers: Iterable[int]) -> set[int]:
    """The numbers of the stages that the threads run which run those of `numbers`."""
    return set().union(*(same_thread(stages, number) for number in numbers))


def consumers(stages: Sequence[StageReport]) -> set[int]:
    """The numbers of the stages that the consumer's thread runs."""
    is_others = stages and stages[0].wait_s > 0 and not computes_itself(stages[0])
    return set() if is_others or not stages else same_thread(stages, 0)


def awaited_by(stages: Sequence[StageReport], own: set[int]) -> set[int]:
    """The numbers of the stages that a thread may wait for which runs those of `own`."""
    return own.union(*(stages[each].inputs for each in own))
