"""Whose the times are that were recorded where stages run together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grainmill._plan import random_access
from grainmill._plan.node import MapNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.node import Node
    from grainmill._stats.meters import ReadMeter, StageMeter
    from grainmill._stats.recorded import StageReport

# Functions of these are not called in a loop that is timed: their time is the rest of the blocks'.
_UNTIMED = (random_access.FlatMap, random_access.UserDefined)


def upstream(stages: Sequence[StageReport], stage: StageReport) -> list[StageReport]:
    """The stages behind `stage`, each once."""
    seen: dict[int, StageReport] = {}
    pending = list(stage.inputs)
    while pending:
        found = stages[pending.pop()]
        if found.number not in seen:
            seen[found.number] = found
            pending += found.inputs
    return [seen[number] for number in sorted(seen)]


def runs_users_code(stage: StageReport) -> bool:
    """Whether a stage calls functions or objects of the user."""
    node = stage.node
    return has_loop(stage) if isinstance(node, random_access.Source) else node.runs_users_code


def thread_times(stages: Sequence[StageReport], number: int) -> complex:
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
    behind = sum((thread_times(stages, parent) for parent in stage.inputs), 0j)
    return complex(meter.total_s, meter.cpu_s) + behind


def computes_itself(stage: StageReport) -> bool:
    """Whether the thread that takes the elements of a reading stage computes them, too."""
    return stage.node.reads and stage.meter.total_s > stage.wait_s


def add_read(  # noqa: PLR0912 - one case for each place where time is not measured
    stages: list[StageReport], stage: StageReport, read: ReadMeter
) -> None:
    """Adds what a read recorded to the stage that takes its elements and to those behind it."""
    meter = stage.meter
    behind = upstream(stages, stage)
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
    of_workers = blocks_of_workers(stage)
    work_s, storage_s = read.work_s + of_workers.real, read.storage_s + of_workers.imag
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
        if not isinstance(found.node, random_access.Range) and not has_loop(found)
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


def blocks_of_workers(stage: StageReport) -> complex:
    """The seconds that workers of `stage` spent on blocks, and waited in them for storage.

    They report a few times a second: what they have not reported yet cost the same.
    """
    reports = stage.workers.values()
    reported = sum(report.elements for report in reports)
    times = sum((complex(*report.reads[:2]) for report in reports), 0j)
    return times * max(1.0, stage.meter.elements / (reported or math.inf))


def has_loop(source: StageReport) -> bool:
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


def subtract_lazy(stages: Sequence[StageReport]) -> None:
    """Subtracts the functions that run while a later stage takes their elements from its time."""
    for stage in stages:
        if stage.node.is_elementwise or stage.is_prefetch or stage.meter.passes_lazy:
            continue
        if runs_plans(stage.node):  # `set_self_time` subtracts all that is behind it
            continue
        lazy = sum((lazy_times(stages, stages[number]) for number in stage.inputs), 0j)
        _subtract(stage.meter, lazy)


def _subtract(meter: StageMeter, times: complex) -> None:
    meter.total_s = max(0.0, meter.total_s - times.real)
    meter.cpu_s = max(0.0, meter.cpu_s - times.imag)


def lazy_times(stages: Sequence[StageReport], stage: StageReport) -> complex:
    """The times of the functions that run when elements of `stage` are taken.

    Returns:
        Those of `thread_times`.
    """
    if not stage.node.is_elementwise and not stage.meter.passes_lazy:
        return 0j
    if stage.node.opens is not None:  # it opens these, and reads from them, only then
        return sum((thread_times(stages, number) for number in stage.inputs), 0j)
    own = complex(stage.meter.total_s, stage.meter.cpu_s) if stage.node.is_elementwise else 0j
    return own + sum((lazy_times(stages, stages[number]) for number in stage.inputs), 0j)


def set_self_time(stages: Sequence[StageReport], stage: StageReport) -> None:
    """Sets the time of a stage that opens iterators to its own: as they report, or the rest."""
    behind = 0j
    if not stage.meter.is_own:
        behind = sum((thread_times(stages, number) for number in stage.inputs), 0j)
    _subtract(stage.meter, behind)
    if stage.meter.max_s:
        behind_s = behind.real / max(1.0, stage.meter.elements)
        stage.meter.min_s = max(0.0, stage.meter.min_s - behind_s)
        stage.meter.max_s = max(stage.meter.min_s, stage.meter.max_s - behind_s)
    reported = stage.reported
    if reported.elements:
        stage.meter.spec = stage.meter.spec or reported.spec
        if stage.meter.total_s:
            stage.meter.cpu_s *= min(1.0, reported.total_s / stage.meter.total_s)
        stage.meter.total_s = reported.total_s
        stage.meter.min_s, stage.meter.max_s = reported.min_s, reported.max_s
        stage.meter.element_bytes = reported.element_bytes or stage.meter.element_bytes


def runs_plans(node: Node) -> bool:
    """Whether a sequential stage runs other plans, or a user's iterator."""
    own = node.users_dataset is not None or node.opens is not None
    return own and not isinstance(node, MapNode)


def limit_steps(stages: Sequence[StageReport], work_s: float, storage_s: float) -> None:
    """Functions of random-access stages cannot have taken longer than their blocks."""
    steps = [stage for stage in stages if isinstance(stage.node, MapNode)]
    total_s = sum(stage.meter.total_s for stage in steps)
    limit_s = work_s + storage_s
    if total_s > limit_s > 0:
        for stage in steps:
            stage.meter.total_s *= limit_s / total_s
