"""What stages cost, and their shares of the time in which the consumer waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from grainmill._plan import random_access
from grainmill._stats.stage_times import computes_itself, runs_users_code, upstream
from grainmill._stats.thread_waits import LOCK_BOUND, behind_workers, consumers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grainmill._stats.recorded import StageReport
    from grainmill._stats.thread_waits import Threads

# A function waits, whatever the lock, if its fastest call took so many times its CPU time.
_WAITS = 4.0


def set_costs(stages: Sequence[StageReport], threads: Threads) -> None:
    """Sets `cost_s`: waits of functions are their own, but for those for the lock or a core."""
    owners = behind_workers(stages)
    is_contended = threads.are_bound(threads.all_ready_s)
    real = _real_waits(stages, threads)
    for stage in stages:
        owner = owners.get(stage.number)
        is_bound, lanes = is_contended, float(threads.lanes.get(stage.number, 1))
        if owner is not None:
            reports = owner.workers.values()
            running_s = sum(report.running_s for report in reports)
            is_bound = sum(report.ready_s for report in reports) >= LOCK_BOUND * running_s
            lanes = sum(report.busy_s for report in reports) / (running_s or 1.0)
        meter = stage.meter
        if stage.node.reads:
            continue  # its cost is known
        stage.cost_s = meter.cpu_s
        if runs_users_code(stage):
            waits_s = real.get(stage.number, max(0.0, meter.total_s - meter.cpu_s))
            least_s = meter.cpu_s + meter.least_wait_s
            if not is_bound:
                stage.cost_s += waits_s
            elif least_s > _WAITS * meter.cpu_s:
                stage.lanes = max(1.0, lanes)
                stage.cost_s = least_s / stage.lanes
        if isinstance(stage.node, random_access.Source):
            storage_s = stage.storage_s * (_computing_share(stages, stage) if is_bound else 1.0)
            stage.cost_s = max(stage.cost_s, storage_s + meter.cpu_s)


def _real_waits(stages: Sequence[StageReport], threads: Threads) -> dict[int, float]:
    """The seconds for which functions of a stage waited, not for a core, by its number.

    A thread was blocked for so long; what the fastest calls waited comes first.
    """
    real: dict[int, float] = {}
    for numbers, blocked_share in [(consumers(stages), None), *threads.blocked]:
        # Reads are those of other threads.
        found = [n for n in numbers if not stages[n].node.reads]
        meters = {number: stages[number].meter for number in found}
        waits = {n: max(0.0, meter.total_s - meter.cpu_s) for n, meter in meters.items()}
        least = {n: min(waits[n], meter.least_wait_s) for n, meter in meters.items()}
        limit_s = threads.consumer_blocked_s
        if blocked_share is not None:
            limit_s = blocked_share * sum(meter.total_s for meter in meters.values())
        least_s, waits_s = sum(least.values()), sum(waits.values())
        of_least = min(1.0, limit_s / least_s) if least_s else 0.0
        of_rest = min(1.0, max(0.0, limit_s - least_s) / ((waits_s - least_s) or 1.0))
        real |= {n: of_least * least[n] + of_rest * (waits[n] - least[n]) for n in found}
    return real


def _computing_share(stages: Sequence[StageReport], source: StageReport) -> float:
    """The CPU time in that which the blocks with elements of `source` took, storage left out."""
    for read in stages:
        behind = upstream(stages, read) if read.node.reads else []
        if any(found is source for found in behind):
            work_s = sum(stage.meter.total_s - stage.storage_s for stage in behind)
            return min(1.0, sum(stage.meter.cpu_s for stage in behind) / (work_s or 1.0))
    return 1.0


class Shared(NamedTuple):
    """The time of a thread in stages.

    Attributes:
        passed_s: Seconds in stages on it, and waiting for others.
        own_s: Those of them in which stages, there or behind, did not wait for a core.
        shares: The share of a stage in these, by its number.
    """

    passed_s: float
    own_s: float
    shares: Mapping[int, float]

    @property
    def running_share(self) -> float:
        """The share of the time in which stages did not wait for a core."""
        return self.own_s / self.passed_s if self.passed_s else 1.0


def share_waits(stages: Sequence[StageReport], threads: Threads) -> Shared:
    """Computes `wait_share`: each prefetching stage passes its share on to those behind it."""
    if not stages:
        return Shared(0.0, 0.0, {})
    first = stages[0]
    shared = _shared(stages, threads, [0])
    for number, part in shared.shares.items():
        stages[number].wait_share = part
    if first.wait_s and not first.is_prefetch:
        running_share = shared.running_share * _running_share(threads, 0)
        return shared._replace(passed_s=first.wait_s, own_s=first.wait_s * running_share)
    return shared


def _shared(
    stages: Sequence[StageReport],
    threads: Threads,
    starts: Sequence[int],
    stacking: tuple[int, float] = (-1, 0.0),
) -> Shared:
    """The time of a thread that takes the elements of `starts`.

    Args:
        stages: All stages.
        threads: Those that stages run in.
        starts: The numbers of stages whose elements it takes.
        stacking: See `StageReport`; what it computes besides.
    """
    own = dict([stacking] if stacking[1] else [])  # seconds of stages on the same thread
    passed: dict[int, float] = {}  # those in which it waited, or computed, for the ones behind
    pending = list(starts)
    while pending:
        stage = stages[pending.pop()]
        number = stage.number
        if number in own or number in passed:
            continue
        if computes_itself(stage):
            own[number] = stage.cost_s
            if stage.wait_s:
                passed[number] = stage.wait_s
            pending += stage.inputs
        elif stage.is_prefetch:
            own[number], passed[number] = stage.cost_s, stage.wait_s - stage.start_s
        elif stage.wait_s and number not in starts:  # another thread does its work
            passed[number] = stage.wait_s
        else:
            reads = [stages[each] for each in stage.inputs if not computes_itself(stages[each])]
            stacked_s = sum(read.stacking[1] for read in reads if read.stacking[0] == number)
            own[number] = max(0.0, stage.cost_s - stacked_s)
            pending += stage.inputs
    seconds = dict(own)
    for number, wait_s in passed.items():
        stage = stages[number]
        passed_s = wait_s * _running_share(threads, number)
        behind = Shared(0.0, 0.0, {number: 1.0})
        if stage.inputs:
            inputs = stage.inputs if number in own else [number]
            behind = _shared(stages, threads, inputs, stage.stacking)
            passed_s *= behind.running_share
        for found, part in behind.shares.items():
            seconds[found] = seconds.get(found, 0.0) + passed_s * part
    own_s = sum(seconds.values())
    shares = {number: each / own_s for number, each in seconds.items()} if own_s else {}
    return Shared(sum(own.values()) + sum(passed.values()), own_s, shares)


def _running_share(threads: Threads, number: int) -> float:
    """The share of their time in which the threads of a stage did not wait for a core."""
    return max(0.0, 1 - threads.for_core.get(number, 0.0))


def share_lock(stages: Sequence[StageReport], threads: Threads) -> Shared:
    """Computes `wait_share` where all wait for the interpreter lock: by what stages cost."""
    seen: set[int] = set()
    pending = [0]
    while pending:
        stage = stages[pending.pop()]
        if stage.number in seen:
            continue
        seen.add(stage.number)
        if not stage.workers and stage.number not in threads.idle:
            pending += stage.inputs
    costs = {number: stages[number].cost_s for number in seen}
    all_s = sum(costs.values())
    for number, cost_s in costs.items():
        stages[number].wait_share = cost_s / all_s if all_s else 0.0
    return Shared(all_s, all_s, {})
