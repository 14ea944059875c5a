"""The job of worker processes that each run a sequential pipeline."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grainmill._evaluate.batches.batch_blocks import block_len, byte_len
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.block_job import set_up_worker
from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.base.position import Position, no_state, state_at
from grainmill._iterators.metering import PullMeter
from grainmill._iterators.open import open_plan
from grainmill._stats import timeline
from grainmill._stats.meters import WorkerReport
from grainmill._stats.worker_reporter import WorkerReporter
from grainmill._workers import messages
from grainmill._workers.worker import PLAN_MARKS, Job, Outcome, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._evaluate.context import Context
    from grainmill._iterators.base.stage import Stage, State
    from grainmill._iterators.workers.shares import WorkersNode
    from grainmill._workers.worker import WorkerContext

# Elements that are computed within `_BLOCK_S` are sent together, whatever the buffer's size.
_BLOCK_S = 0.002
# Fewer than were asked for are sent after so long, where other stages wait for the worker.
_SHARED_BLOCK_S = 0.02
BLOCK_LEN = 64
# Tasks in flight per worker and stage.
TASKS = 2
# Slots of a worker for each: for those, for the result in use, for one being returned, and a free
# one.
RESULTS = TASKS + 3


class StartPoint(NamedTuple):
    """A pickled state to continue from, and how many elements were delivered before it.

    These are counted from the start of the plan if `from_start`, else from a restored state. At the
    start there is no state: the plan is opened again.
    """

    state: bytes | None
    num_delivered: int
    from_start: bool


class PipelineTask(NamedTuple):
    """A request for the next elements, sent as a plain tuple, which costs less.

    Attributes:
        plan: The number of the plan; see `RemoteWorkers`.
        start: Where to start; `None` to continue after the previous task.
        num_elements: How many to compute at least, unless the plan ends or they are large.
        max_elements: How many to compute at most, while they are computed quickly.
    """

    start: StartPoint | None
    num_elements: int
    max_elements: int
    plan: int = 0


class PickledPositions:
    """The pickled positions after a worker's elements: a `state_after` that counts from 1.

    They are unpickled when a state is requested. The state of 100 interleaved datasets has some
    hundred dicts, and one element changes one of these; 64 positions share all the rest.
    """

    __slots__ = ("_points", "_text")

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._points: list[Position] | None = None

    def __call__(self, count: int) -> State:
        if self._points is None:
            self._points = messages.loads(self._text)
        return state_at(self._points[count - 1])


# Returned with the elements: their pickled positions, and how many these are; now and then a report
# on the worker.
Extra: TypeAlias = tuple[bytes, int, WorkerReport | None]


def pickled_positions(points: list[Position]) -> bytes:
    """The argument of `PickledPositions`."""
    try:
        return pickle.dumps(points, pickle.HIGHEST_PROTOCOL)
    except Exception:  # a user's state may have objects of classes of the main script
        try:
            return messages.dumps(points)
        except Exception as failure:  # raised if a state is requested
            text = f"a worker cannot send its state: {type(failure).__name__}: {failure}"
            return pickle.dumps([(no_state(text), 0)] * len(points), pickle.HIGHEST_PROTOCOL)


class PipelineJob(Job):
    """Runs its shares of sequential plans in each worker.

    Args:
        nodes: The nodes of the workers. Each takes its own share of their plans: a user's own
            dataset may have to copy itself for each.
        context: Options of the whole pipeline.
        task_bytes: About how many bytes the elements of a task may take, unless one alone takes
            more.
    """

    index_byte_len = tuning.WORKERS_INDEX_BYTES

    def __init__(self, nodes: Sequence[WorkersNode], context: Context, task_bytes: int) -> None:
        self._nodes = nodes
        self._context = context
        self._task_bytes = task_bytes

    @property
    def modules(self) -> Sequence[str]:
        """See `Job.modules`."""
        modules = {type(each).__module__ for node in self._nodes for each in node.walk()}
        return (type(self).__module__, *sorted(modules))

    def open(self, place: WorkerContext) -> Runner:
        """See `Job.open`."""
        set_up_worker(place, self._nodes[0].worker_init_fn)
        place.arena.limit_free(RESULTS * self._task_bytes * len(self._nodes))
        context = self._context.shared_by(len(self._nodes))
        return _SharesRunner(self._nodes, context, place, self._task_bytes)


class _SharesRunner(Runner):
    """Runs a worker's share of each plan, which is opened at its first task."""

    def __init__(
        self,
        nodes: Sequence[WorkersNode],
        context: Context,
        place: WorkerContext,
        task_bytes: int,
    ) -> None:
        self._nodes, self._context, self._place = nodes, context, place
        self._task_bytes = task_bytes
        self._plans: dict[int, _PipelineRunner] = {}

    def run(self, task: tuple[Any, ...]) -> Outcome:
        """See `Runner.run`."""
        task = PipelineTask(*task)
        if task.start is not None and task.start.state is None and task.plan in self._plans:
            self._plans.pop(task.plan).close()
        if task.plan not in self._plans:
            self._plans[task.plan] = self._opened(task.plan)
        return self._plans[task.plan].run(task)

    def _opened(self, number: int) -> _PipelineRunner:
        plan = self._nodes[number // self._place.num_workers].shard(self._place.worker)
        recorder = copy.copy(self._context.recorder)  # which does not copy what it recorded
        stage = open_plan(plan, dataclasses.replace(self._context, recorder=recorder))
        reporter = WorkerReporter(recorder, plan, self._busy_s)
        max_s = _SHARED_BLOCK_S if len(self._nodes) > 1 else 0.0
        return _PipelineRunner(
            stage, self._place, reporter, task_bytes=self._task_bytes, plan=number, max_s=max_s
        )

    def _busy_s(self) -> float:
        """How long the tasks of all plans took."""
        return sum(plan.reporter.busy_s for plan in self._plans.values())


class _PipelineRunner(Runner):
    """Runs tasks on a stage, and counts its elements; ends them after `max_s`, if that is not 0.

    Messages number elements as the consumer counts them: one of each worker in turn, which holds
    as long as no worker has reached its end.
    """

    def __init__(
        self,
        stage: Stage,
        context: WorkerContext,
        reporter: WorkerReporter,
        *,
        task_bytes: int,
        plan: int = 0,
        max_s: float = 0.0,
    ) -> None:
        self._task_bytes = task_bytes
        self._max_s = max_s
        self._cursor = Cursor(stage)
        self._context = context
        self._first_mark = plan * PLAN_MARKS
        self.reporter = reporter
        self._meter = None if stage.recorder is None else PullMeter(stage, stage.recorder)
        self._count = 0

    def close(self) -> None:
        """Closes the stage."""
        self._cursor.stage.close()

    def _number(self, count: int) -> int:
        return count * self._context.num_workers + self._context.worker

    def _start(self, start: StartPoint) -> None:
        if start.state is not None:
            self._cursor.restore(messages.loads(start.state))
        self._count = start.num_delivered
        if not start.from_start:
            with contextlib.suppress(Exception):  # elements may have no index
                self._count = self._cursor.next_index()

    def run(self, task: PipelineTask) -> Outcome:
        """See `Runner.run`."""
        first = self._count
        elements: list[Any] = []
        points: list[Position] = []
        try:
            if task.start is not None:
                self._start(task.start)
                first = self._count
            self.reporter.start_task()
            started_s = time.perf_counter()
            meter = self._meter
            is_timed = meter is not None and meter.starts()
            try:
                self._compute(task, started_s, elements, points)
            finally:
                if meter is not None:
                    meter.finish(len(elements), is_timed=is_timed)
            pickled = pickled_positions(points)
        except BaseException as failure:
            return self._outcome(elements, failure, first, pickled_positions(points))
        self._cursor.release_taken()  # unreferenced arrays are sent without a copy
        ended_s = time.perf_counter()
        if (taken := timeline.current) is not None:
            taken.add("task", "block", started_s, ended_s, count=len(elements))
        report = self.reporter.report(ended_s - started_s, len(elements))
        return self._outcome(elements, None, first, pickled, report)

    def _compute(
        self, task: PipelineTask, started_s: float, elements: list[Any], points: list[Position]
    ) -> None:
        """Appends the next elements to `elements`, and their positions to `points`.

        Whenever their number has doubled, the size of the last one limits how many more there are.
        """
        max_elements, measured_at = task.max_elements, 1
        while True:
            self._context.mark(self._first_mark + self._number(self._count))
            element = self._cursor.next()
            if element is END:
                break
            self._count += 1
            elements.append(element)
            points.append(self._cursor.position())
            count = len(elements)
            if count == measured_at:
                measured_at *= 2
                max_elements = block_len(byte_len(element), max_elements, self._task_bytes)
            if count >= max_elements:
                break
            limit_s = _BLOCK_S if count >= task.num_elements else self._max_s
            if limit_s and time.perf_counter() - started_s > limit_s:
                break

    def _outcome(
        self,
        elements: list[Any],
        failure: BaseException | None,
        first: int,
        positions: bytes,
        report: WorkerReport | None = None,
    ) -> Outcome:
        extra: Extra = (positions, len(elements), report)
        stride = self._context.num_workers
        return Outcome(elements, failure, self._number(first), extra, stride=stride)
