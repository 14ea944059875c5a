"""What was recorded of a plan, stage by stage: in this process, and in its workers.

Several recorders have a part of it: that of the iterator, those of datasets that a stage opens
while it runs, and those of iterators that a user's own one takes elements from. A worker gathers
them as its parent does, and sends the numbers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from grainmill._stats.element_specs import SpecText
from grainmill._stats.meters import ReadMeter, StageMeter
from grainmill._stats.numbering import numbered
from grainmill._stats.users_iterators import parents_of, users_behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._plan.node import Node
    from grainmill._stats.meters import PartsRecorder, Recorder, ThreadTotals, WorkerReport
    from grainmill._stats.numbering import NumberedStage

USER_STATS: Final = "_user_stats"
"""The key of an object's `UserStats` in its `__dict__`, once it has used them."""


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
        lanes: How many threads wait in its functions at a time, if `cost_s` is divided by it.
        wait_s: Seconds in which its consumer waited for it, where it prefetches.
        start_s: Seconds of that in which workers were started.
        ahead: Elements that are prefetched now, where it prefetches.
        stacking: Where it reads: the number of the stage whose batches are computed there, and the
            CPU seconds of that.
        storage_s: Seconds in which blocks waited for storage, where it is their source.
        wait_share: Its share of the time in which the consumer of the pipeline waits.
        workers: The last report of each of its workers.
        reported: What users' own iterators report about themselves, where it runs such.
    """

    number: int
    node: Node
    inputs: list[int]
    meter: StageMeter
    is_prefetch: bool = False
    cost_s: float = 0.0
    lanes: float = 1.0
    wait_s: float = 0.0
    start_s: float = 0.0
    ahead: int = 0
    stacking: tuple[int, float] = (-1, 0.0)
    storage_s: float = 0.0
    wait_share: float = 0.0
    workers: dict[int, WorkerReport] = dataclasses.field(default_factory=dict)
    reported: StageMeter = dataclasses.field(default_factory=StageMeter)

    @property
    def name(self) -> str:
        """Its name, as `str` of its iterator."""
        return str(self.node).replace("IterDataset", "DatasetIterator", 1)


class Recorded:
    """What was recorded of the plan that ends in `output`.

    Attributes:
        stages: Its stages by number; those of datasets that a stage opens follow the others.
        roots: What recorded it, without the recorders of such datasets.
        recorders: All of them.
        parts: The number of the first stage of the datasets that a stage opens, by that one's.
        reads_of_workers: The places in workers where blocks are computed, those of all workers of a
            stage as one.
        threads_of_workers: What the threads in workers did that pull for a stage, likewise.
    """

    def __init__(self, output: Node, recorder: Recorder) -> None:
        self.stages = [_stage(each) for each in numbered(output)]
        self._by_node = {stage.node: stage for stage in self.stages}
        self.roots: list[Recorder] = [recorder]
        self.recorders: list[Recorder] = [recorder]
        self.parts: dict[int, int] = {}
        self.reads_of_workers: dict[int, ReadMeter] = {}
        self.threads_of_workers: dict[int, ThreadTotals] = {}
        self._known: dict[Recorder, Recorder] = {}
        for found in self.recorders:  # which grows
            self._add(found)
            self._add_users(found)
            for node, parts in found.all_parts():
                self._add_parts(self._of(found, node), parts)
        for stage in list(self.stages):
            for worker, report in self._reports(stage.node).items():
                stage.workers[worker] = report
                self._add_worker(stage, report)

    def _of(self, recorder: Recorder, node: Node | None) -> StageReport | None:
        """The stage of a node that `recorder` has."""
        node = self._known.get(recorder, recorder).known(node)
        return None if node is None else self._by_node.get(node)

    def reads_by_stage(self) -> dict[int, ReadMeter]:
        """The places in this process where blocks are computed, those of a stage as one."""
        merged: dict[int, ReadMeter] = {}
        for stage, read in self.reads():
            if stage is not None:
                merged.setdefault(stage.number, ReadMeter()).merge(read.snapshot())
        return merged

    def reads(self) -> list[tuple[StageReport | None, ReadMeter]]:
        """The places in this process where blocks are computed, with the stages that take them."""
        return [
            (self._of(recorder, read.node), read)
            for recorder in self.recorders
            for read in recorder.reads
        ]

    def threads(self) -> list[tuple[StageReport | None, ThreadTotals]]:
        """The threads of this process that pull from stages, with the stages that wait for them."""
        return [
            (self._of(recorder, thread.node), totals)
            for recorder in self.recorders
            for thread in recorder.threads()
            if (totals := thread.totals()) is not None
        ]

    def files(self) -> tuple[float, ...]:
        """See `Recorder.files`."""
        totals = [recorder.files() for recorder in self.roots]
        return tuple(map(sum, zip(*totals, strict=True)))

    def _reports(self, node: Node) -> dict[int, WorkerReport]:
        reports: dict[int, WorkerReport] = {}
        for recorder in self.recorders:
            reports |= recorder.reports_of(node)
        return reports

    def _add(self, recorder: Recorder) -> None:
        """Adds what `recorder` itself has."""
        for node, meter in recorder.stages():
            stage = self._of(recorder, node)
            if stage is not None:
                stage.meter.merge(meter.snapshot())
                stage.meter.spec = stage.meter.spec or meter.spec
        for node, wait_s in recorder.waits():
            stage = self._of(recorder, node)
            if stage is not None:
                stage.wait_s += wait_s
        for stage in self.stages:
            stage.start_s += recorder.start(stage.node)[0]

    def _add_users(self, recorder: Recorder) -> None:
        """Adds what users' iterators report, and the recorders of those that they read from."""
        for opened in recorder.users():
            self._add_reported(self._of(recorder, opened.node), opened.iterator)
            for node, iterator in users_behind(opened):
                self._add_reported(self._of(recorder, node), iterator)
            for iterator in (opened.iterator, *parents_of(opened)):
                for inner in _recorders_of(iterator):
                    if inner not in self.recorders:
                        self.recorders.append(inner)
                        self.roots.append(inner)
                        self._known[inner] = self._known.get(recorder, recorder)

    def _add_reported(self, stage: StageReport | None, iterator: Any) -> None:
        reported = _reported_by(iterator)
        if stage is not None and reported is not None:
            stage.reported.merge(reported.snapshot())
            stage.reported.spec = stage.reported.spec or reported.spec

    def _add_parts(self, owner: StageReport | None, parts: PartsRecorder) -> None:
        """Adds the datasets that `owner` opens, merged stage by stage."""
        if owner is None or parts.first is None:
            return
        first = self._opened(owner, parts.first)
        for part in numbered(parts.first):
            if first + part.number < len(self.stages):
                self._by_node[part.node] = self.stages[first + part.number]
        self.recorders.append(parts)

    def _opened(self, owner: StageReport, output: Node) -> int:
        """The number of the first stage behind `owner`, which opens datasets like `output`.

        Where it has one, they are shares of that.
        """
        if not owner.inputs:
            first = self.parts[owner.number] = len(self.stages)
            owner.inputs.append(first)
            self.stages += [_stage(each, first) for each in numbered(output)]
        return owner.inputs[0]

    def _add_worker(self, owner: StageReport, report: WorkerReport) -> None:
        """Adds what a worker of `owner` reports about the stages behind it."""
        if not owner.inputs:
            return
        for number, stage in self._of_worker(owner, report).items():
            if number not in report.stages:
                continue
            stage.meter.merge(report.stages[number])
            stage.wait_s += report.waits.get(number, 0.0)
            if number in report.specs and stage.meter.spec is None:
                stage.meter.spec = SpecText(report.specs[number])
            if number in report.reported:
                stage.reported.merge(report.reported[number])
            if number in report.blocks:
                read = self.reads_of_workers.setdefault(stage.number, ReadMeter())
                read.merge(report.blocks[number])
            if number in report.threads:
                before = self.threads_of_workers.get(stage.number)
                totals = report.threads[number]
                self.threads_of_workers[stage.number] = totals.plus(before)

    def _of_worker(self, owner: StageReport, report: WorkerReport) -> dict[int, StageReport]:
        """The stages behind `owner`, by their number in its workers."""
        first, count = owner.inputs[0], len(self.stages)
        own = min(report.parts.values(), default=count)
        found = {number: self.stages[first + number] for number in range(min(own, count - first))}
        for start, number in sorted((start, number) for number, start in report.parts.items()):
            opened = found[number].node.opened_plan if number in found else None
            if opened is not None:
                behind = self._opened(found[number], opened)
                of_parts = range(len(numbered(opened)))
                found |= {start + number: self.stages[behind + number] for number in of_parts}
        return found


def _stage(stage: NumberedStage, first: int = 0) -> StageReport:
    inputs = [first + number for number in stage.parents]
    return StageReport(first + stage.number, stage.node, inputs, StageMeter())


def _reported_by(iterator: Any) -> StageMeter | None:
    """What a user's own iterator reports about itself."""
    stats = getattr(iterator, "__dict__", {}).get(USER_STATS)
    return None if stats is None else stats.meter


def _recorders_of(iterator: Any) -> Iterator[Recorder]:
    """The recorders of `iterator`, or of those that it takes elements from."""
    recorder = getattr(iterator, "_recorder", None)
    if recorder is not None:
        yield recorder
    for parent in getattr(iterator, "_parents", ()):
        yield from _recorders_of(parent)
