"""One sentence on what holds a pipeline back, and what would change that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from grainmill._plan import random_access
from grainmill._plan.node import MapNode, transform_name
from grainmill._stats.meters import NO_POOL, ReadMeter, StageMeter
from grainmill._stats.stage_times import runs_users_code
from grainmill._stats.thread_waits import LOCK_BOUND

if TYPE_CHECKING:
    from grainmill._stats.meters import WorkerReport
    from grainmill._stats.recorded import StageReport
    from grainmill._stats.report import Report

# The consumer holds the pipeline back if the pipeline takes less than this share of the time that
# both need.
_CONSUMER_WAITS = 0.33
# A function waits, rather than computes, if its CPU time is less than this share of its fastest
# call: the mean call may have waited for a core or for the interpreter lock.
_COMPUTES = 0.3
# Threads that keep more cores busy than this run functions that release the interpreter lock.
_SEVERAL_CORES = 1.1
# A worker is slow if its elements take this many times as long as those of the others.
_SLOW_WORKER = 3.0
# Fewer elements of a worker say nothing of it.
_ENOUGH = 4
# A worker holds the others up only if it is busy for this share of the time.
_BUSY_WORKER = 0.5
# Workers wait for the main process if they are busy for a smaller share of the time, and of what it
# waited for them: those that are ahead of it, or it has no core, are idle, too.
_IDLE_WORKERS = 0.25


class Verdict(NamedTuple):
    """What holds a pipeline back.

    Attributes:
        kind: "nothing", "consumer", "storage", "function", "lock", "workers" or "stage".
        text: The sentence.
    """

    kind: str
    text: str


def verdict_on(report: Report, *, has_consumer: bool = True) -> Verdict:
    """What holds the pipeline back, by its statistics.

    Args:
        report: The statistics.
        has_consumer: Whether elements are used for anything; if not, a stage is named in any case.
    """
    if not report.elapsed_s or not report.stages:
        return Verdict("nothing", "no element has been requested yet; ask again later")
    slow = max(report.stages, key=lambda stage: stage.wait_share)
    if has_consumer:
        waits = report.own_s / ((report.own_s + report.consumer_s) or 1.0)
        if report.is_lock_bound:
            if report.consumer_s > slow.cost_s:
                share = min(1.0, report.consumer_s / report.running_s)
                return Verdict(
                    "consumer",
                    f"the consumer holds the pipeline back: its own step computes {share:.0%} of "
                    "the time, so make that faster; a faster pipeline would gain little",
                )
        elif waits < _CONSUMER_WAITS:
            return Verdict(
                "consumer",
                "the consumer holds the pipeline back: it waits for elements only "
                f"{waits:.0%} of the time, so make its own step faster; a faster pipeline would "
                "gain little",
            )
    owner = _workers_of(report, slow)
    if report.storage[0] > 0 and slow.storage_s > slow.meter.cpu_s:
        return _storage(report)
    if owner is not None:
        return _in_workers(report, slow, owner)
    return _in_process(report, slow)


def _workers_of(report: Report, stage: StageReport) -> StageReport | None:
    """The stage whose workers run `stage`, or which is it."""
    by_number = {found.number: found for found in report.stages}
    for owner in report.stages:
        pending = [owner.number] if owner.workers else []
        while pending:
            number = pending.pop()
            if number == stage.number:
                return owner
            pending += by_number[number].inputs
    return None


def _own_s(worker: WorkerReport) -> float:
    """The seconds that a worker needed, without waits for a core."""
    for_core_s = worker.ready_s - worker.cpu_s
    return worker.running_s * (1 - for_core_s / (max(worker.busy_s, worker.ready_s) or 1.0))


def _least_s(worker: WorkerReport) -> float:
    """The seconds that its functions need for its elements, if all calls are as the fastest ones.

    0 where it has no other threads. With them, how long its main thread was busy says little: that
    of a worker which is ahead of the others finds elements that were prefetched.
    """
    of_threads_s = sum(thread.busy_s for thread in worker.threads.values())
    taken_share = min((each.fill.taken_share for each in worker.threads.values()), default=1.0)
    least_s = 0.0
    for numbers in worker.blocks.values():
        read = ReadMeter()
        read.merge(numbers)
        of_threads_s += read.work_s - read.caller_s
        taken_share = min(taken_share, read.fill.taken_share)
    for numbers in worker.stages.values():
        meter = StageMeter()
        meter.merge(numbers)
        least_s += meter.cpu_s + meter.least_wait_s
    return least_s * taken_share if of_threads_s > 0 else 0.0


def _is_bound(worker: WorkerReport) -> bool:
    """Whether several tasks at a time need the lock of a worker nearly always."""
    is_busy = worker.ready_s >= LOCK_BOUND * worker.running_s
    return is_busy and worker.busy_s > worker.alive_s


def _storage(report: Report) -> Verdict:
    reads, read_bytes, timed, timed_s = report.storage
    latency = f"{timed_s / timed * 1e3:.1f} ms" if timed else "an unknown time"
    return Verdict(
        "storage",
        f"storage holds the pipeline back: {reads:.0f} reads of {read_bytes / reads / 1024:.0f} "
        f"KiB took {latency} each, and computing waited for them; raise `prefetch_buffer_size` "
        "and `max_reads_in_flight` of `ReadOptions`, or bring the files closer",
    )


def _in_workers(report: Report, slow: StageReport, owner: StageReport) -> Verdict:
    workers = {number: worker for number, worker in owner.workers.items() if worker.elements}
    by_cpu = any(_is_bound(worker) for worker in workers.values())
    costs = {
        number: (worker.cpu_s if by_cpu else _own_s(worker)) / worker.elements
        for number, worker in workers.items()
    }
    are_known = all(worker.elements >= _ENOUGH for worker in workers.values())
    if len(costs) > 1 and are_known:
        worst = max(costs, key=costs.__getitem__)
        others = _median(
            [
                cost if by_cpu else max(cost, _least_s(workers[number]) / workers[number].elements)
                for number, cost in costs.items()
                if number != worst
            ]
        )
        is_busy = workers[worst].busy_s > _BUSY_WORKER * workers[worst].alive_s
        if is_busy and costs[worst] > _SLOW_WORKER * others:
            return Verdict(
                "workers",
                f"worker {worst} holds the pipeline back: its elements take "
                f"{_seconds(costs[worst])} each, those of the other {len(costs) - 1} "
                f"{_seconds(others)}, and elements are delivered in order; look for what is slow "
                "in its share of the data or on its core",
            )
    busy = [worker.busy_s / worker.alive_s for worker in workers.values() if worker.alive_s]
    mean_busy = min(1.0, sum(busy) / len(busy)) if busy else 0.0
    busy_s = sum(worker.busy_s for worker in workers.values()) / (len(workers) or 1)
    waited_s = owner.wait_s - owner.start_s - report.for_core_s
    keeps_up = slow is owner or busy_s < _IDLE_WORKERS * waited_s
    if mean_busy < _IDLE_WORKERS and keeps_up:
        return Verdict(
            "workers",
            f"the transfer from the {len(owner.workers)} workers holds the pipeline back: they are "
            f"busy only {mean_busy:.0%} of the time; use fewer of them, and batch in the workers "
            "so that fewer and larger elements are sent",
        )
    computes = _computes(slow)
    advice = "more workers (`num_workers`)" if computes else "more threads (`num_threads`)"
    return Verdict(
        "function",
        f"{_subject(slow)} holds the pipeline back: all {len(owner.workers)} workers are busy "
        f"{mean_busy:.0%} of the time, and it takes {_cost(slow)}{_waiting(slow)}; make it faster, "
        f"or use {advice}",
    )


# For all functions but those of ours that can run nowhere else.
_MOVE_IT: Final = (
    "move it before `to_iter_dataset`, where threads and workers run it, or append `mp_prefetch`"
)


def _in_process(report: Report, slow: StageReport) -> Verdict:
    if not runs_users_code(slow):
        return Verdict(
            "stage",
            f"{_subject(slow)} holds the pipeline back: it takes {_cost(slow)}; "
            + (
                "run the pipeline in worker processes (`mp_prefetch`), or prefetch it on a thread "
                "(`experimental.ThreadPrefetchIterDataset`)"
                if not isinstance(slow.node, MapNode)
                else "give `ReadOptions` more threads or workers"
            ),
        )
    if isinstance(slow.node, random_access.Source) and not _computes(slow):
        return Verdict(
            "storage",
            f"the source of {_subject(slow)} holds the pipeline back: reading takes {_cost(slow)}"
            f"{_waiting(slow)}; read more elements at the same time (`num_threads` and "
            "`prefetch_buffer_size` of `ReadOptions`), or bring the data closer",
        )
    if not isinstance(slow.node, MapNode):
        return Verdict(
            "function",
            f"{_subject(slow)} holds the pipeline back: it takes {_cost(slow)}"
            f"{_waiting(slow)} on the thread that asks for the elements; "
            + getattr(getattr(slow.node, "transform", None), "_advice_if_slow", _MOVE_IT),
        )
    use = max((read.threads() for read in report.reads), default=NO_POOL)
    active, allowed = use.active, use.allowed
    cores = use.cpu_s / report.elapsed_s
    if allowed > 1 and _computes(slow) and cores < _SEVERAL_CORES:
        return Verdict(
            "lock",
            f"{_subject(slow)} holds the pipeline back: it takes {_cost(slow)} and holds the "
            "interpreter lock (GIL), so threads do not help; run it in processes with "
            "`ReadOptions(num_workers=...)`, or make it faster",
        )
    if _computes(slow):
        advice = (
            "make it faster, or use worker processes (`ReadOptions(num_workers=...)`)"
            if allowed <= 1
            else f"make it faster, or use workers: {active:.0f} threads keep {cores:.1f} cores busy"
        )
    else:
        advice = (
            f"raise `num_threads` of `ReadOptions`, {allowed:.0f} now, and with it "
            "`prefetch_buffer_size`, or let it wait less"
        )
    return Verdict(
        "function",
        f"{_subject(slow)} holds the pipeline back: it takes {_cost(slow)}{_waiting(slow)}; "
        f"{advice}",
    )


def _computes(stage: StageReport) -> bool:
    meter = stage.meter
    if not meter.total_s or not meter.elements:
        return True
    cpu_s = meter.cpu_s / meter.elements
    # Threads that wait at the same time leave the lock free until what they compute needs it.
    share = min(LOCK_BOUND, _COMPUTES * stage.lanes)
    return meter.cpu_s >= share * stage.cost_s or cpu_s >= _COMPUTES * meter.min_s


def _waiting(stage: StageReport) -> str:
    if _computes(stage):
        return ""
    computing = min(1.0, stage.meter.cpu_s / (stage.lanes * stage.cost_s))
    return f", {1 - computing:.0%} of it waiting"


def _subject(stage: StageReport) -> str:
    transform = getattr(stage.node, "transform", None)
    if transform is not None:
        return f"`{transform_name(transform)}`, stage {stage.number},"
    return f"stage {stage.number}, {stage.name},"


def _cost(stage: StageReport) -> str:
    meter = stage.meter
    if not meter.elements:
        return _seconds(stage.cost_s)
    return f"{_seconds(stage.cost_s / meter.elements)} per element"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _median(values: list[float]) -> float:
    """The median; the module `statistics` takes milliseconds to import."""
    values = sorted(values)
    middle = len(values) // 2
    return (values[middle] + values[~middle]) / 2
