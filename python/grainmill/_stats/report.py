"""What a pipeline recorded, stage by stage: the meters of all its threads and workers together."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._plan import random_access
from grainmill._plan.node import MapNode
from grainmill._stats.element_specs import SpecText
from grainmill._stats.meters import ReadMeter, StageMeter
from grainmill._stats.numbering import NumberedStage, numbered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from grainmill._plan.node import Node
    from grainmill._stats.meters import Fill, Recorder, ThreadRecord, WorkerReport
    from grainmill._stats.thread_clock import ThreadTimes

# Threads of a process share one interpreter lock: together they hold it nearly always if they need
# this share of the time for computing, or more. Then waits say nothing, and CPU time decides.
LOCK_BOUND = 0.75
_CONTENDS = 0.05
# More threads than this rarely get work where functions hold the lock: then the consumer says
# whether they are fast enough.
_LOCK_HOLDERS = 2
# A function waits, whatever the lock, if its fastest call took so many times its CPU time.
_WAITS = 4.0
# Starting workers is left out, unless less than this share of the time remains.
_STARTED = 0.02
# Threads that have nothing to do for this share of the time are faster than their consumer.
_IDLE = 0.25
# The consumer is away for no longer than this many times what three in four times exceed.
_MOST_AWAY = 2.0

# Functions of these are not called in a loop that is timed: their time is the rest of the blocks'.
_UNTIMED = (random_access.FlatMap, random_access.UserDefined)


@dataclasses.dataclass
class StageReport:
    """One stage.

    Attributes:
        number: Its number; 0 is the output.
        node: Its node.
        inputs: The numbers of the stages that it takes elements from.
        meter: Its counts and times; their sums over threads and workers.
        is_prefetch: Whether stages behind it run in other threads or processes.
        cost_s: Its own seconds: of computing, and of waits that its functions caused.
        wait_s: Seconds in which its consumer waited for it, where it prefetches.
        start_s: Seconds of that in which workers were started.
        ahead: Elements that are prefetched now, where it prefetches.
        stacking: Where it reads: the number of the stage whose batches are computed there, and the
            CPU seconds of that.
        storage_s: Seconds in which blocks waited for storage, where it is their source.
        wait_share: Its share of the time in which the consumer of the pipeline waits.
        workers: The last report of each of its workers.
    """

    number: int
    node: Node
    inputs: list[int]
    meter: StageMeter
    is_prefetch: bool = False
    cost_s: float = 0.0
    wait_s: float = 0.0
    start_s: float = 0.0
    ahead: int = 0
    stacking: tuple[int, float] = (-1, 0.0)
    storage_s: float = 0.0
    wait_share: float = 0.0
    workers: dict[int, WorkerReport] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, as `str` of its iterator."""
        return str(self.node).replace("IterDataset", "DatasetIterator", 1)


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
        away_s: See `PullMeter`.
    """

    times: ThreadTimes
    away_s: float


def collected(  # noqa: PLR0917 - in the order of their use
    output: Node,
    recorders: Sequence[Recorder],
    elapsed_s: float,
    elements: int,
    self_times: Mapping[int, StageMeter],
    consumer: Consumer,
) -> Report:
    """The report on the pipeline that ends in `output`.

    Args:
        output: Its last node.
        recorders: What its iterators recorded: its own, and those that users' iterators read from.
        elapsed_s: Seconds since the first element was asked for.
        elements: Elements delivered.
        self_times: What users' own iterators report about themselves, by the `id` of their node.
        consumer: What the consumer did since then.
    """
    stages = [
        StageReport(stage.number, stage.node, stage.parents, _meter(recorders, stage.node))
        for stage in numbered(output)
    ]
    _add_parts(stages, recorders)
    reads = [read for recorder in recorders for read in recorder.all_reads()]
    totals = [recorder.files() for recorder in recorders]
    work_s = sum(read.work_s for read in reads)
    storage_s = sum(read.storage_s for read in reads)
    for stage in stages:
        stage.is_prefetch = stage.node.prefetches
        stage.wait_s = sum(_wait_s(recorder, stage.node) for recorder in recorders)
        stage.start_s = sum(recorder.start(stage.node)[0] for recorder in recorders)
        stage.workers = _reports(recorders, stage.node)
        for report in stage.workers.values():
            _merge(stages, stage, report)
            work_s += report.reads[0]
            storage_s += report.reads[1]
            totals.append(report.reads[2:])  # type: ignore[arg-type]
    storage = tuple(map(sum, zip(*totals, strict=True)))
    for read in (*reads, *_reads_of_workers(stages)):
        _add_read(stages, read)
    _subtract_lazy(stages)
    for stage in reversed(stages):
        if _runs_plans(stage.node):
            _set_self_time(stages, stage, self_times.get(id(stage.node)))
    _limit_steps(stages, work_s, storage_s)
    running_s, consumer = _without_start(stages, recorders, elapsed_s, consumer)
    of_next = _thread_times(stages, 0) if stages else 0j
    lazy = _lazy_times(stages, stages[0]) if stages else 0j
    own_cpu_s = max(0.0, consumer.times.cpu_s - of_next.imag)
    away_s = math.inf
    if consumer.away_s < math.inf:
        away_s = max(0.0, consumer.away_s * elements - lazy.real)
    threads = _Threads(stages, reads, recorders, running_s, consumer.times)
    if away_s < math.inf:
        threads.consumer_blocked_s -= min(threads.consumer_blocked_s, max(0.0, away_s - own_cpu_s))
    is_lock_bound = threads.are_bound(threads.ready_s)
    _set_costs(stages, threads)
    share = _share_lock(stages, threads) if is_lock_bound else _share_waits(stages, threads)
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
        reads,
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
    stages: Sequence[StageReport],
    recorders: Sequence[Recorder],
    elapsed_s: float,
    consumer: Consumer,
) -> tuple[float, Consumer]:
    """The time and the consumer's without those in which workers were started.

    Threads that wait for the workers make their own consumer wait.
    """
    running_s = elapsed_s - sum(stage.start_s for stage in stages)
    if running_s < _STARTED * elapsed_s:
        for stage in stages:
            stage.start_s = 0.0
        return elapsed_s, consumer
    for recorder in recorders:
        for stage in stages:
            times = consumer.times.plus(recorder.start(stage.node)[1], -1.0)
            consumer = consumer._replace(times=times)
    for stage in stages:
        if stage.wait_s and not stage.start_s:
            started_s = sum(found.start_s for found in _upstream(stages, stage) if found.workers)
            stage.start_s = min(stage.wait_s, started_s)
    return running_s, consumer


class _Shared(NamedTuple):
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


class _Threads:
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
        stages: Sequence[StageReport],
        reads: Sequence[ReadMeter],
        recorders: Sequence[Recorder],
        running_s: float,
        consumer: ThreadTimes,
    ) -> None:
        self._stages = stages
        self._numbers = {id(stage.node): stage.number for stage in stages}
        self._running_s = running_s
        self._consumer_s = min(running_s, consumer.ready_s)
        waits_s = _waits_s(stages, _consumers(stages) or {0}, None) if stages else 0.0
        self.consumer_blocked_s = max(0.0, running_s - self._consumer_s - waits_s)
        waits = [stage.wait_s - stage.start_s for stage in stages if stage.workers]
        self._for_workers_s = sum(waits)
        self.ready_s = self.all_ready_s = 0.0
        self.for_core: dict[int, float] = {}
        self.lanes: dict[int, int] = {}
        self.blocked: list[tuple[set[int], float]] = []
        self.idle: set[int] = set()
        for stage in stages:
            reports = stage.workers.values()
            busy_s = sum(report.busy_s for report in reports)
            ready_s = sum(report.ready_s for report in reports)
            cpu_s = sum(report.cpu_s for report in reports)
            running_s = sum(report.running_s for report in reports)
            self._add_waits(stage.number, busy_s, cpu_s, ready_s, running_s)
        for read in reads:
            self._add_read(read)
        for recorder in recorders:
            for thread in recorder.threads():
                self._add_thread(thread)

    def _add_read(self, read: ReadMeter) -> None:
        use = read.threads()
        is_idle = use.busy_s < (1 - _IDLE) * self._running_s
        if use.active > _LOCK_HOLDERS and use.busy_s < math.inf:
            is_idle |= read.starved_s < _IDLE * self._running_s
        number = self._numbers.get(id(read.node))
        self._add(number, read.fill, use.ready_s, is_idle=is_idle)
        if number is None:
            return
        behind = {found.number for found in _upstream(self._stages, self._stages[number])}
        if use.active > 1:
            self.lanes.update(dict.fromkeys(behind, use.active))
        if 0 < use.busy_s < math.inf:
            self._add_blocked(behind, use.busy_s, use.ready_s)
            busy_s = use.busy_s + read.storage_s
            self._add_waits(number, busy_s, use.cpu_s, use.ready_s, busy_s)

    def _add_thread(self, thread: ThreadRecord) -> None:
        fill = thread.fill()
        if fill is None:
            return
        number = self._numbers.get(id(thread.node))
        cpu_s, ready_s = thread.use.read()
        own: set[int] = set()
        awaited_s = 0.0
        if number is not None:
            stage = self._stages[number]
            awaited_s = stage.wait_s - stage.start_s
            starts = stage.inputs if stage.is_prefetch else [number]
            own = own.union(*(_same_thread(self._stages, each) for each in starts))
        waits_s = _waits_s(self._stages, own, number)
        elapsed_s = thread.use.elapsed_s
        # Of the time until it runs again, it may have waited for a core.
        idle_s = min(fill.idle_s, elapsed_s - ready_s - waits_s)
        is_idle = idle_s > max(awaited_s, _IDLE * self._running_s)
        self._add(number, fill, ready_s, is_idle=is_idle)
        if number is not None and elapsed_s > fill.idle_s:
            busy_s = elapsed_s - fill.idle_s
            self._add_waits(number, busy_s, cpu_s, ready_s, busy_s)
            self._add_blocked(own, busy_s - waits_s, ready_s)

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

    def _add(self, number: int | None, fill: Fill, ready_s: float, *, is_idle: bool) -> None:
        self.all_ready_s += ready_s
        if not is_idle:
            self.ready_s += ready_s * fill.taken_share
        elif number is not None:
            self.idle.add(number)


def _behind_workers(stages: Sequence[StageReport]) -> dict[int, StageReport]:
    """The stage whose workers run a stage, by that one's number."""
    return {
        found.number: owner
        for owner in stages
        if owner.workers
        for found in _upstream(stages, owner)
    }


def _same_thread(stages: Sequence[StageReport], number: int) -> set[int]:
    """The numbers of the stages that the thread runs which runs stage `number`."""
    found: set[int] = set()
    pending = [number]
    while pending:
        stage = stages[pending.pop()]
        is_others = stage.is_prefetch or (stage.wait_s > 0 and stage.number != number)
        if stage.number not in found and (not is_others or _computes_itself(stage)):
            found.add(stage.number)
            pending += stage.inputs
    return found


def _consumers(stages: Sequence[StageReport]) -> set[int]:
    """The numbers of the stages that the consumer's thread runs."""
    is_others = stages and stages[0].wait_s > 0 and not _computes_itself(stages[0])
    return set() if is_others or not stages else _same_thread(stages, 0)


def _waits_s(stages: Sequence[StageReport], own: set[int], number: int | None) -> float:
    """How long the thread that runs `own` waited for others; itself is the one of `number`."""
    near = own.union(*(stages[each].inputs for each in own)) - {number}
    return sum(stages[each].wait_s - stages[each].start_s for each in near)


def _real_waits(stages: Sequence[StageReport], threads: _Threads) -> dict[int, float]:
    """The seconds for which functions of a stage waited, not for a core, by its number.

    A thread was blocked for so long; what the fastest calls waited comes first.
    """
    groups = list(threads.blocked)
    for owner in stages:
        reports = owner.workers.values()
        busy_s = sum(report.busy_s for report in reports)
        ready_s = sum(report.ready_s for report in reports)
        behind = {found.number for found in _upstream(stages, owner)}
        groups += [(behind, max(0.0, 1 - ready_s / busy_s))] if busy_s else []
    real: dict[int, float] = {}
    for numbers, blocked_share in [(_consumers(stages), None), *groups]:
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


def _set_costs(stages: Sequence[StageReport], threads: _Threads) -> None:
    """Sets `cost_s`: waits of functions are their own, but for those for the lock or a core."""
    owners = _behind_workers(stages)
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
                stage.cost_s = least_s / max(1.0, lanes)
        if isinstance(stage.node, random_access.Source):
            storage_s = stage.storage_s * (_computing_share(stages, stage) if is_bound else 1.0)
            stage.cost_s = max(stage.cost_s, storage_s + meter.cpu_s)


def _computing_share(stages: Sequence[StageReport], source: StageReport) -> float:
    """The CPU time in that which the blocks with elements of `source` took, storage left out."""
    for read in stages:
        behind = _upstream(stages, read) if read.node.reads else []
        if any(found is source for found in behind):
            work_s = sum(stage.meter.total_s - stage.storage_s for stage in behind)
            return min(1.0, sum(stage.meter.cpu_s for stage in behind) / (work_s or 1.0))
    return 1.0


def runs_users_code(stage: StageReport) -> bool:
    """Whether a stage calls functions or objects of the user."""
    node = stage.node
    return _has_loop(stage) if isinstance(node, random_access.Source) else node.runs_users_code


def _meter(recorders: Sequence[Recorder], node: Node) -> StageMeter:
    """A copy of what all `recorders` have of `node`."""
    meter = StageMeter()
    for recorder in recorders:
        for found in (recorder, *(parts for _, parts in recorder.all_parts())):
            of_node = found.stages().get(id(node))
            if of_node is not None:
                meter.merge(of_node.snapshot())
                meter.spec = meter.spec or of_node.spec
                meter.passes_lazy |= of_node.passes_lazy
    return meter


def _wait_s(recorder: Recorder, node: Node) -> float:
    return recorder.wait_s(node) + sum(_wait_s(parts, node) for _, parts in recorder.all_parts())


def _reports(recorders: Sequence[Recorder], node: Node) -> dict[int, WorkerReport]:
    reports: dict[int, WorkerReport] = {}
    for recorder in recorders:
        reports |= recorder.reports_of(node)
    return reports


def _add_parts(stages: list[StageReport], recorders: Sequence[Recorder]) -> None:
    """Adds the datasets that stages open while they run, merged stage by stage."""
    for recorder in recorders:
        for node, parts in recorder.all_parts():
            owner = next((stage for stage in stages if stage.node is node), None)
            if owner is None or parts.first is None:
                continue
            if owner.inputs:  # the datasets are shares of its parent
                _merge_numbers(stages, owner.inputs[0], parts.by_number)
                continue
            first = len(stages)
            owner.inputs.append(first)
            of_parts = [_of_part(part, first, parts.by_number) for part in numbered(parts.first)]
            stages += of_parts
            for read in parts.reads:  # its node is that of the dataset opened last
                number = None if read.node is None else parts.numbers.get(read.node)
                if number is not None:
                    read.node = of_parts[number].node


def _of_part(part: NumberedStage, first: int, meters: dict[int, StageMeter]) -> StageReport:
    meter = StageMeter()
    found = meters.get(part.number)
    if found is not None:
        meter.merge(found.snapshot())
        meter.spec = found.spec
    return StageReport(
        first + part.number, part.node, [first + number for number in part.parents], meter
    )


def _merge_numbers(stages: list[StageReport], first: int, meters: dict[int, StageMeter]) -> None:
    for number, meter in meters.items():
        if first + number < len(stages):
            stages[first + number].meter.merge(meter.snapshot())


def _reads_of_workers(stages: Sequence[StageReport]) -> Iterable[ReadMeter]:
    """The places in workers where blocks are computed, those of all workers as one."""
    reads: dict[int, ReadMeter] = {}
    for owner in stages:
        for report in owner.workers.values():
            for of_worker, numbers in report.blocks.items():
                number = owner.inputs[0] + of_worker
                if number < len(stages):
                    read = reads.setdefault(number, ReadMeter())
                    read.node = stages[number].node
                    read.merge(numbers)
    return reads.values()


def _merge(stages: list[StageReport], owner: StageReport, report: WorkerReport) -> None:
    """Adds what a worker of `owner` reports about the stages behind it."""
    if not owner.inputs:
        return
    first = owner.inputs[0]
    for number, numbers in report.stages.items():
        if first + number < len(stages):
            stages[first + number].meter.merge(numbers)
    for number, text in report.specs.items():
        if first + number < len(stages) and stages[first + number].meter.spec is None:
            stages[first + number].meter.spec = SpecText(text)


def _upstream(stages: Sequence[StageReport], stage: StageReport) -> list[StageReport]:
    """The stages behind `stage`, each once."""
    seen: dict[int, StageReport] = {}
    pending = list(stage.inputs)
    while pending:
        found = stages[pending.pop()]
        if found.number not in seen:
            seen[found.number] = found
            pending += found.inputs
    return [seen[number] for number in sorted(seen)]


def _add_read(  # noqa: PLR0912 - one case for each place where time is not measured
    stages: list[StageReport], read: ReadMeter
) -> None:
    """Adds what a read recorded to its own stage and to those behind it."""
    stage = next((stage for stage in stages if stage.node is read.node), None)
    if stage is None:
        return
    meter = stage.meter
    behind = _upstream(stages, stage)
    for found in behind:
        meter.element_bytes = meter.element_bytes or found.meter.element_bytes
    meter.elements += read.elements
    meter.total_s += read.caller_s + read.starved_s
    meter.cpu_s += read.transfer_cpu_s + (read.cpu_s if read.caller_s else 0.0)
    stage.cost_s += read.transfer_cpu_s
    stage.wait_s += read.starved_s
    stage.ahead += read.ahead()[0]
    in_workers = list(stage.workers.values())
    if not in_workers:
        for found in behind:  # without what the consumer did not take
            found.meter.scale(read.fill.taken_share)
            found.meter.elements *= read.fill.taken_share
    _count(stages, stage, max(read.elements, sum(report.elements for report in in_workers)))
    work_s = read.work_s + sum(report.reads[0] for report in in_workers)
    storage_s = read.storage_s + sum(report.reads[1] for report in in_workers)
    steps_s = sum(found.meter.total_s for found in behind)
    steps_cpu_s = sum(found.meter.cpu_s for found in behind)
    cpu_s = read.cpu_s
    if in_workers:  # whose blocks are not timed with the CPU clock
        cpu_s = work_s * (steps_cpu_s / steps_s) if steps_s else work_s
        cpu_s = min(cpu_s, sum(report.cpu_s for report in in_workers))
    sources = [found for found in behind if not found.inputs]
    if not sources:
        return
    # Those of numbers, and those that functions read from, read nothing here.
    readers = [
        found
        for found in sources
        if not isinstance(found.node, random_access.Range) and not _has_loop(found)
    ]
    source = (readers or sources)[0]
    untimed = [found for found in behind if isinstance(found.node, _UNTIMED)]
    stacking = [
        found for found in stages if found.node.stacks and found.inputs == [stage.number]
    ] + [found for found in behind if isinstance(found.node, random_access.Batch)]
    if untimed:
        source = untimed[0]
    elif not readers:
        if stacking:
            source = stacking[0]
        else:  # the calls that were timed were short ones
            for found in behind:
                if 0 < steps_s < work_s:
                    found.meter.total_s *= work_s / steps_s
                if 0 < steps_cpu_s < cpu_s:
                    found.meter.cpu_s *= cpu_s / steps_cpu_s
            steps_s, steps_cpu_s = (work_s, cpu_s) if steps_s else (0.0, 0.0)
    if source not in behind:  # the thread that computes the rows of a batch copies them
        stage.stacking = source.number, max(0.0, cpu_s - steps_cpu_s)
    # Reading, decoding and copying, which the engine does, is the source's.
    source.meter.total_s += max(0.0, work_s - steps_s) + storage_s
    source.meter.cpu_s += max(0.0, cpu_s - steps_cpu_s)
    source.storage_s += storage_s


def _has_loop(source: StageReport) -> bool:
    """Whether the loop of functions reads the elements of `source`, and takes its time."""
    return source.meter.num_steps > 0


def _count(stages: Sequence[StageReport], stage: StageReport, elements: float) -> None:
    """Counts the elements of stages behind a read that have no loop, or whose loop missed some."""
    meter = stage.meter
    if meter.elements < elements:
        if meter.elements:  # those after the last timed call
            meter.scale(elements / meter.elements)
        meter.elements = elements
    of_inputs = meter.elements
    if isinstance(stage.node, random_access.Batch):
        of_inputs *= stage.node.batch_size
    shares = [1.0] * len(stage.inputs)
    if len(stage.inputs) > 1 and not isinstance(stage.node, random_access.Zip):
        known = [_known_elements(stages, stages[number]) for number in stage.inputs]
        total = sum(known)
        shares = [each / total if total else 1 / len(known) for each in known]
    for number, share in zip(stage.inputs, shares, strict=True):
        _count(stages, stages[number], of_inputs * share)


def _known_elements(stages: Sequence[StageReport], stage: StageReport) -> float:
    """The elements of `stage`, or of the nearest stage behind that counts them."""
    while not stage.meter.elements and len(stage.inputs) == 1:
        stage = stages[stage.inputs[0]]
    return stage.meter.elements


def _subtract_lazy(stages: Sequence[StageReport]) -> None:
    """Subtracts the functions that run while a later stage takes their elements from its time."""
    for stage in stages:
        if stage.node.is_elementwise or stage.is_prefetch or stage.meter.passes_lazy:
            continue
        lazy = sum((_lazy_times(stages, stages[number]) for number in stage.inputs), 0j)
        _subtract(stage.meter, lazy)


def _subtract(meter: StageMeter, times: complex) -> None:
    meter.total_s = max(0.0, meter.total_s - times.real)
    meter.cpu_s = max(0.0, meter.cpu_s - times.imag)


def _lazy_times(stages: Sequence[StageReport], stage: StageReport) -> complex:
    """The times of the functions that run when elements of `stage` are taken.

    Returns:
        Those of `_thread_times`.
    """
    if not stage.node.is_elementwise and not stage.meter.passes_lazy:
        return 0j
    own = complex(stage.meter.total_s, stage.meter.cpu_s) if stage.node.is_elementwise else 0j
    return own + sum((_lazy_times(stages, stages[number]) for number in stage.inputs), 0j)


def _set_self_time(
    stages: Sequence[StageReport], stage: StageReport, reported: StageMeter | None
) -> None:
    """Sets the time of a stage that opens iterators to its own: as they report, or the rest."""
    upstream = sum((_thread_times(stages, number) for number in stage.inputs), 0j)
    _subtract(stage.meter, upstream)
    if reported is not None and reported.elements:
        stage.meter.spec = stage.meter.spec or reported.spec
        if stage.meter.total_s:
            stage.meter.cpu_s *= min(1.0, reported.total_s / stage.meter.total_s)
        stage.meter.total_s = reported.total_s
        stage.meter.min_s, stage.meter.max_s = reported.min_s, reported.max_s
        stage.meter.element_bytes = reported.element_bytes or stage.meter.element_bytes


def _runs_plans(node: Node) -> bool:
    """Whether a sequential stage runs other plans, or a user's iterator."""
    own = node.users_dataset is not None or node.opens is not None
    return own and not isinstance(node, MapNode)


def _limit_steps(stages: Sequence[StageReport], work_s: float, storage_s: float) -> None:
    """Functions of random-access stages cannot have taken longer than their blocks."""
    steps = [stage for stage in stages if isinstance(stage.node, MapNode)]
    total_s = sum(stage.meter.total_s for stage in steps)
    limit_s = work_s + storage_s
    if total_s > limit_s > 0:
        for stage in steps:
            stage.meter.total_s *= limit_s / total_s


def _thread_times(stages: Sequence[StageReport], number: int) -> complex:
    """What the thread that takes elements of a stage spent in it and behind it.

    Returns:
        Seconds, and CPU seconds as the imaginary part.
    """
    stage = stages[number]
    meter = stage.meter
    if stage.node.reads:
        return complex(meter.total_s, meter.cpu_s)
    if stage.is_prefetch or stage.wait_s:
        return complex(stage.wait_s, meter.cpu_s if stage.is_prefetch else 0.0)
    behind = sum((_thread_times(stages, parent) for parent in stage.inputs), 0j)
    return complex(meter.total_s, meter.cpu_s) + behind


def _computes_itself(stage: StageReport) -> bool:
    """Whether the thread that takes the elements of a reading stage computes them, too."""
    return stage.node.reads and stage.meter.total_s > stage.wait_s


def _share_waits(stages: Sequence[StageReport], threads: _Threads) -> _Shared:
    """Computes `wait_share`: each prefetching stage passes its share on to those behind it."""
    if not stages:
        return _Shared(0.0, 0.0, {})
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
    threads: _Threads,
    starts: Sequence[int],
    stacking: tuple[int, float] = (-1, 0.0),
) -> _Shared:
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
        if _computes_itself(stage):
            own[number] = stage.cost_s
            if stage.wait_s:
                passed[number] = stage.wait_s
            pending += stage.inputs
        elif stage.is_prefetch:
            own[number], passed[number] = stage.cost_s, stage.wait_s - stage.start_s
        elif stage.wait_s and number not in starts:  # another thread does its work
            passed[number] = stage.wait_s
        else:
            reads = [stages[each] for each in stage.inputs if not _computes_itself(stages[each])]
            stacked_s = sum(read.stacking[1] for read in reads if read.stacking[0] == number)
            own[number] = max(0.0, stage.cost_s - stacked_s)
            pending += stage.inputs
    seconds = dict(own)
    for number, wait_s in passed.items():
        stage = stages[number]
        passed_s = wait_s * _running_share(threads, number)
        behind = _Shared(0.0, 0.0, {number: 1.0})
        if stage.inputs:
            inputs = stage.inputs if number in own else [number]
            behind = _shared(stages, threads, inputs, stage.stacking)
            passed_s *= behind.running_share
        for found, part in behind.shares.items():
            seconds[found] = seconds.get(found, 0.0) + passed_s * part
    own_s = sum(seconds.values())
    shares = {number: each / own_s for number, each in seconds.items()} if own_s else {}
    return _Shared(sum(own.values()) + sum(passed.values()), own_s, shares)


def _running_share(threads: _Threads, number: int) -> float:
    """The share of their time in which the threads of a stage did not wait for a core."""
    return max(0.0, 1 - threads.for_core.get(number, 0.0))


def _share_lock(stages: Sequence[StageReport], threads: _Threads) -> _Shared:
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
    return _Shared(all_s, all_s, {})


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
