"""What a pipeline recorded, stage by stage: the meters of all its threads and workers together."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._stats.recorded import Recorded
from grainmill._stats.stage_times import (
    add_read,
    blocks_of_workers,
    lazy_times,
    limit_steps,
    runs_plans,
    set_self_time,
    subtract_lazy,
    thread_times,
    upstream,
)
from grainmill._stats.thread_waits import Threads
from grainmill._stats.wait_shares import set_costs, share_lock, share_waits

if TYPE_CHECKING:
    from grainmill._plan.node import Node
    from grainmill._stats.meters import ReadMeter, Recorder
    from grainmill._stats.recorded import StageReport
    from grainmill._stats.thread_clock import ThreadTimes

# Starting workers is left out, unless less than this share of the time remains.
_STARTED = 0.02
# The consumer is away for no longer than this many times what three in four times exceed.
_MOST_AWAY = 2.0


@dataclasses.dataclass
class Report:
    """A pipeline.

    Attributes:
        stages: Its stages, by number.
        reads: The places where blocks of random-access plans are computed in this process.
        storage: Reads of files in all processes: how many, their bytes, how many were timed, and
            their seconds.
        work_s: Seconds spent computing blocks, in all threads and processes.
        storage_s: Seconds in which these waited for storage.
        is_lock_bound: Whether threads of this process hold its interpreter lock nearly always.
        running_s: Seconds since then without those in which workers were started.
        consumer_s: Seconds of that which are the consumer's own, outside of `next`.
        own_s: Those that are the pipeline's; others are waits for the lock or a core.
        consumer_wait_s: Seconds that the consumer spent in `next`.
        for_core_s: Seconds in which the consumer waited for a core.
        elapsed_s: Seconds since the consumer first asked for an element.
        elements: Elements delivered to it.
    """

    stages: list[StageReport]
    reads: list[ReadMeter]
    storage: tuple[float, float, float, float]
    work_s: float
    storage_s: float
    is_lock_bound: bool
    running_s: float
    consumer_s: float
    own_s: float
    consumer_wait_s: float
    for_core_s: float
    elapsed_s: float
    elements: int


class Consumer(NamedTuple):
    """What the thread that asks for elements did.

    Attributes:
        times: Its times since it first asked.
        of_pulls_cpu_s: The CPU seconds of that in which it pulled, so the pipeline's.
        away_s: See `PullMeter`.
    """

    times: ThreadTimes
    of_pulls_cpu_s: float
    away_s: float


def collected(
    output: Node, recorder: Recorder, elapsed_s: float, elements: int, consumer: Consumer
) -> Report:
    """The report on the pipeline that ends in `output`.

    Args:
        output: Its last node.
        recorder: What its iterator recorded.
        elapsed_s: Seconds since the first element was asked for.
        elements: Elements delivered.
        consumer: What the consumer did since then.
    """
    recorded = Recorded(output, recorder)
    stages, reads = recorded.stages, recorded.reads()
    of_workers = [report.reads for stage in stages for report in stage.workers.values()]
    totals = [recorded.files(), *(numbers[2:] for numbers in of_workers)]
    storage = tuple(map(sum, zip(*totals, strict=True)))
    for stage in stages:
        stage.is_prefetch = stage.node.prefetches
    for by_stage in (recorded.reads_by_stage(), recorded.reads_of_workers):
        for number, read in by_stage.items():
            add_read(stages, stages[number], read)
    blocks = sum((blocks_of_workers(stage) for stage in stages), 0j)
    work_s = sum(read.work_s for _, read in reads) + blocks.real
    storage_s = sum(read.storage_s for _, read in reads) + blocks.imag
    subtract_lazy(stages)
    for stage in reversed(stages):
        if runs_plans(stage.node):
            set_self_time(stages, stage)
    limit_steps(stages, work_s, storage_s)
    # Those in which workers were started are among its pulls.
    not_pulling_cpu_s = consumer.times.cpu_s - consumer.of_pulls_cpu_s
    running_s, consumer = _without_start(recorded, elapsed_s, consumer)
    of_next = thread_times(stages, 0) if stages else 0j
    lazy = lazy_times(stages, stages[0]) if stages else 0j
    own_cpu_s = max(0.0, min(not_pulling_cpu_s, consumer.times.cpu_s - of_next.imag))
    away_s = math.inf
    if consumer.away_s < math.inf:
        away_s = max(0.0, consumer.away_s * elements - lazy.real)
    threads = Threads(recorded, running_s, consumer.times)
    if away_s < math.inf:
        threads.consumer_blocked_s -= min(threads.consumer_blocked_s, max(0.0, away_s - own_cpu_s))
    is_lock_bound = threads.are_bound(threads.ready_s)
    set_costs(stages, threads)
    share = share_lock(stages, threads) if is_lock_bound else share_waits(stages, threads)
    if stages:
        stages[0].meter.elements = elements
    wait_s = min(of_next.real, elapsed_s) if elapsed_s else of_next.real
    consumer_s = own_cpu_s
    for_core_s = max(0.0, consumer.times.ready_s - consumer.times.cpu_s)
    if not threads.are_bound(threads.all_ready_s):
        rest_s = running_s - share.passed_s - for_core_s
        consumer_s = max(consumer_s, min(rest_s, _MOST_AWAY * away_s))
    elif away_s < math.inf and not lazy:
        # What else passed may be waits for the lock; functions that run meanwhile have them, too.
        consumer_s = max(consumer_s, away_s)
    return Report(
        stages,
        [read for _, read in reads],
        storage,  # type: ignore[arg-type]
        work_s,
        storage_s,
        is_lock_bound,
        running_s,
        consumer_s,
        share.own_s,
        wait_s,
        for_core_s,
        elapsed_s,
        elements,
    )


def _without_start(
    recorded: Recorded, elapsed_s: float, consumer: Consumer
) -> tuple[float, Consumer]:
    """The time and the consumer's without those in which workers were started.

    Threads that wait for the workers make their own consumer wait.
    """
    stages = recorded.stages
    running_s = elapsed_s - sum(stage.start_s for stage in stages)
    if running_s < _STARTED * elapsed_s:
        for stage in stages:
            stage.start_s = 0.0
        return elapsed_s, consumer
    for recorder in recorded.recorders:
        for stage in stages:
            times = consumer.times.plus(recorder.start(stage.node)[1], -1.0)
            consumer = consumer._replace(times=times)
    for stage in stages:
        if stage.wait_s and not stage.start_s:
            started_s = sum(found.start_s for found in upstream(stages, stage) if found.workers)
            stage.start_s = min(stage.wait_s, started_s)
    return running_s, consumer


def as_dict(report: Report) -> dict[str, Any]:
    """The report as numbers and texts that JSON can represent."""
    reads, read_bytes, timed, timed_s = report.storage
    ahead = [read.ahead() for read in report.reads]
    elapsed_s = report.elapsed_s
    return {
        "elements": report.elements,
        "elapsed_s": elapsed_s,
        "consumer_wait_s": report.consumer_wait_s,
        "consumer_wait_share": report.consumer_wait_s / elapsed_s if elapsed_s else 0.0,
        "storage": {
            "reads": int(reads),
            "bytes": int(read_bytes),
            "mean_latency_s": timed_s / timed if timed else None,
            "wait_s": report.storage_s,
        },
        "prefetch": {
            "elements": sum(count for count, _ in ahead),
            "limit": sum(limit for _, limit in ahead),
        },
        "stages": [_stage_dict(stage) for stage in report.stages],
    }


def _stage_dict(stage: StageReport) -> dict[str, Any]:
    meter = stage.meter
    elements = round(meter.elements)
    is_timed = meter.max_s > 0
    shown: dict[str, Any] = {
        "id": stage.number,
        "name": stage.name,
        "inputs": list(stage.inputs),
        "elements": elements,
        "time_s": meter.total_s,
        "min_s": meter.min_s if is_timed else None,
        "max_s": meter.max_s if is_timed else None,
        "cpu_share": min(1.0, meter.cpu_s / meter.total_s) if meter.total_s else None,
        "wait_share": round(stage.wait_share, 4),
        "wait_s": stage.wait_s if stage.is_prefetch else None,
        "bytes": round(meter.element_bytes * elements) if meter.element_bytes else None,
        "is_prefetch": stage.is_prefetch,
    }
    if stage.workers:
        shown["workers"] = [
            {
                "worker": worker,
                "elements": report.elements,
                "busy_s": report.busy_s,
                "busy_share": min(1.0, report.busy_s / report.alive_s) if report.alive_s else 0.0,
            }
            for worker, report in stage.workers.items()
        ]
    return shown
