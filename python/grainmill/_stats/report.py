"""What a pipeline recorded, stage by stage: the meters of all its threads and workers together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from grainmill._plan import random_access, sequential
from grainmill._plan.node import MapNode
from grainmill._stats.element_specs import SpecText
from grainmill._stats.meters import StageMeter
from grainmill._stats.numbering import NumberedStage, numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grainmill._plan.node import Node
    from grainmill._stats.meters import ReadMeter, Recorder, WorkerReport

_PREFETCHES = (
    sequential.Read,
    sequential.ThreadPrefetch,
    sequential.MultiprocessPrefetch,
    sequential.MultithreadPrefetch,
)
_IN_WORKERS = (sequential.MultiprocessPrefetch, sequential.MultithreadPrefetch)


@dataclasses.dataclass
class StageReport:
    """One stage.

    Attributes:
        number: Its number; 0 is the output.
        node: Its node.
        inputs: The numbers of the stages that it takes elements from.
        meter: Its counts and times; their sums over threads and workers.
        is_prefetch: Whether stages behind it run in other threads or processes.
        wait_s: Seconds in which its consumer waited for it, where it prefetches.
        ahead: Elements that are prefetched now, where it prefetches.
        wait_share: Its share of the time in which the consumer of the pipeline waits.
        workers: The last report of each of its workers.
    """

    number: int
    node: Node
    inputs: list[int]
    meter: StageMeter
    is_prefetch: bool = False
    wait_s: float = 0.0
    ahead: int = 0
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
        consumer_wait_s: Seconds that the consumer spent in `next`.
        elapsed_s: Seconds since the consumer first asked for an element.
        elements: Elements delivered to it.
    """

    stages: list[StageReport]
    reads: list[ReadMeter]
    storage: tuple[float, float, float, float]
    work_s: float
    storage_s: float
    consumer_wait_s: float
    elapsed_s: float
    elements: int


def collected(
    output: Node,
    recorders: Sequence[Recorder],
    elapsed_s: float,
    elements: int,
    self_times: Mapping[int, StageMeter],
) -> Report:
    """The report on the pipeline that ends in `output`.

    Args:
        output: Its last node.
        recorders: What its iterators recorded: its own, and those that users' iterators read from.
        elapsed_s: Seconds since the first element was asked for.
        elements: Elements delivered.
        self_times: What users' own iterators report about themselves, by the `id` of their node.
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
        stage.is_prefetch = isinstance(stage.node, _PREFETCHES)
        stage.wait_s = sum(_wait_s(recorder, stage.node) for recorder in recorders)
        stage.workers = _reports(recorders, stage.node)
        for report in stage.workers.values():
            _merge(stages, stage, report)
            work_s += report.reads[0]
            storage_s += report.reads[1]
            totals.append(report.reads[2:])  # type: ignore[arg-type]
    storage = tuple(map(sum, zip(*totals, strict=True)))
    for read in reads:
        _add_read(stages, read)
    own = {id(read.node) for read in reads}
    for stage in stages:
        if isinstance(stage.node, sequential.Read) and id(stage.node) not in own:
            _count(stages, stage, stage.meter.elements)
    _subtract_lazy(stages)
    for stage in reversed(stages):
        if isinstance(stage.node, sequential.UserDefined | sequential.Interleave):
            _set_self_time(stages, stage, self_times.get(id(stage.node)))
    _limit_steps(stages, work_s, storage_s)
    _share_waits(stages)
    if stages:
        stages[0].meter.elements = elements
    wait_s = _thread_s(stages, 0)
    if elapsed_s:
        wait_s = min(wait_s, elapsed_s)
    return Report(stages, reads, storage, work_s, storage_s, wait_s, elapsed_s, elements)  # type: ignore[arg-type]


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


def _add_read(stages: list[StageReport], read: ReadMeter) -> None:
    """Adds what a read recorded to its own stage and to those behind it."""
    stage = next((stage for stage in stages if stage.node is read.node), None)
    if stage is None:
        return
    meter = stage.meter
    for found in _upstream(stages, stage):
        meter.element_bytes = meter.element_bytes or found.meter.element_bytes
    meter.elements += read.elements
    meter.total_s += read.caller_s + read.starved_s
    stage.wait_s += read.starved_s
    stage.ahead += read.ahead()[0]
    in_workers = list(stage.workers.values())
    _count(stages, stage, max(read.elements, sum(report.elements for report in in_workers)))
    work_s = read.work_s + sum(report.reads[0] for report in in_workers)
    storage_s = read.storage_s + sum(report.reads[1] for report in in_workers)
    behind = _upstream(stages, stage)
    steps_s = sum(found.meter.total_s for found in behind)
    sources = [found for found in behind if not found.inputs]
    if not sources:
        return
    source = sources[0]
    if 0 < steps_s < work_s and (isinstance(source.node, random_access.Range) or _has_loop(source)):
        for found in behind:  # nothing else takes long, so the timed calls were short ones
            found.meter.total_s *= work_s / steps_s
        steps_s = work_s
    # Reading, decoding and copying, which the engine does, is the source's.
    source.meter.total_s += storage_s + max(0.0, work_s - steps_s)


def _has_loop(source: StageReport) -> bool:
    """Whether the loop of functions reads the elements of `source`, and takes its time."""
    return source.meter.cpu_of_s > 0


def _count(stages: Sequence[StageReport], stage: StageReport, elements: float) -> None:
    """Counts the elements of stages behind a read that have no loop, or whose loop missed some."""
    meter = stage.meter
    if meter.elements < elements:
        if meter.elements:  # those after the last timed call
            meter.total_s *= elements / meter.elements
        meter.elements = elements
    of_inputs = meter.elements
    if isinstance(stage.node, random_access.Batch):
        of_inputs *= stage.node.batch_size
    if len(stage.inputs) > 1 and not isinstance(stage.node, random_access.Zip):
        of_inputs /= len(stage.inputs)
    for number in stage.inputs:
        _count(stages, stages[number], of_inputs)


def _subtract_lazy(stages: Sequence[StageReport]) -> None:
    """Subtracts the functions that run while a later stage takes their elements from its time."""
    for stage in stages:
        if _is_elementwise(stage) or stage.is_prefetch or stage.meter.passes_lazy:
            continue
        lazy_s = sum(_lazy_s(stages, stages[number]) for number in stage.inputs)
        stage.meter.total_s = max(0.0, stage.meter.total_s - lazy_s)


def _lazy_s(stages: Sequence[StageReport], stage: StageReport) -> float:
    """Seconds of the functions that run when elements of `stage` are taken."""
    if not _is_elementwise(stage) and not stage.meter.passes_lazy:
        return 0.0
    own_s = stage.meter.total_s if _is_elementwise(stage) else 0.0
    return own_s + sum(_lazy_s(stages, stages[number]) for number in stage.inputs)


def _set_self_time(
    stages: Sequence[StageReport], stage: StageReport, reported: StageMeter | None
) -> None:
    """Sets the time of a stage that opens iterators to its own: as they report, or the rest."""
    if reported is not None and reported.elements:
        stage.meter.spec = stage.meter.spec or reported.spec
        stage.meter.total_s = reported.total_s
        stage.meter.min_s, stage.meter.max_s = reported.min_s, reported.max_s
        stage.meter.element_bytes = reported.element_bytes or stage.meter.element_bytes
    else:
        upstream_s = sum(_thread_s(stages, number) for number in stage.inputs)
        stage.meter.total_s = max(0.0, stage.meter.total_s - upstream_s)


def _is_elementwise(stage: StageReport) -> bool:
    return isinstance(stage.node, sequential.Map) and not isinstance(
        stage.node, sequential.TakeWhile
    )


def _limit_steps(stages: Sequence[StageReport], work_s: float, storage_s: float) -> None:
    """Functions of random-access stages cannot have taken longer than their blocks."""
    steps = [stage for stage in stages if isinstance(stage.node, MapNode)]
    total_s = sum(stage.meter.total_s for stage in steps)
    limit_s = work_s + storage_s
    if total_s > limit_s > 0:
        for stage in steps:
            stage.meter.total_s *= limit_s / total_s


def _thread_s(stages: Sequence[StageReport], number: int) -> float:
    """Seconds that the thread which takes elements of a stage spent in it and behind it."""
    stage = stages[number]
    if isinstance(stage.node, sequential.Read):
        return stage.meter.total_s
    if stage.is_prefetch or stage.wait_s:
        return stage.wait_s
    return stage.meter.total_s + sum(_thread_s(stages, parent) for parent in stage.inputs)


def _share_waits(stages: Sequence[StageReport]) -> None:
    """Computes `wait_share`: each prefetching stage passes its share on to those behind it."""

    def share(starts: Sequence[int], total: float) -> None:
        reached: dict[int, StageReport] = {}
        pending = list(starts)
        while pending:
            stage = stages[pending.pop()]
            if stage.number not in reached:
                reached[stage.number] = stage
                if not stage.is_prefetch:
                    pending += stage.inputs
        times = {
            number: stage.wait_s if isinstance(stage.node, _IN_WORKERS) else stage.meter.total_s
            for number, stage in reached.items()
        }
        all_s = sum(times.values())
        for number, stage in reached.items():
            of_stage = total * times[number] / all_s if all_s else 0.0
            if stage.is_prefetch and stage.inputs:
                share(stage.inputs, of_stage)
            else:
                stage.wait_share += of_stage

    if stages:
        share([0], 1.0)


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
        "cpu_share": min(1.0, meter.cpu_s / meter.cpu_of_s) if meter.cpu_of_s else None,
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
