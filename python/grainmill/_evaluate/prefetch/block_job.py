"""The job of workers that compute blocks of a random-access plan."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from grainmill._evaluate.batches.batched import in_batches, run_shared
from grainmill._evaluate.batches.stack import take_arrays_from
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.context import Context, reads_of_process
from grainmill._evaluate.evaluated import defer_interrupts
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.thread_pool import Task as ThreadTask
from grainmill._evaluate.prefetch.thread_pool import ThreadPool
from grainmill._evaluate.prefetch.tuner import Tuner
from grainmill._evaluate.work_clock import work_clock_s
from grainmill._native import (
    ReadQueue,
    index_budget,
    set_chunk_budget,
    set_index_budget,
    share_index,
)
from grainmill._stats import timeline
from grainmill._stats.meters import Recorder, WorkerReport
from grainmill._stats.worker_reporter import WorkerReporter
from grainmill._tree import flatten
from grainmill._workers.accelerators import platforms_may_change
from grainmill._workers.main_classes import is_receivers_container
from grainmill._workers.worker import Job, Outcome, Runner, WorkerContext

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.batches.batch_blocks import BatchBlock
    from grainmill._evaluate.evaluated import Evaluated
    from grainmill._evaluate.program import PendingElements, Program
    from grainmill._plan.node import Node


# Positions of all plans are numbered together in tasks: plan `k` has those from `k * PLAN_LEN` on.
PLAN_LEN = 1 << 63


class BlockTask(NamedTuple):
    """The elements to compute, as batches of `batch_size` if that is not 0.

    It is sent as a plain tuple, which costs less; there, `start` tells the plan: see `PLAN_LEN`.
    """

    start: int
    num_elements: int
    batch_size: int


# Returned with the elements: their number; the seconds they took, without waits for storage; if
# they are stacked, the rows and exactness of each batch, and the bytes of an element; the number of
# tasks that the worker computes at the same time; now and then a report on the worker.
Extra: TypeAlias = tuple[int, float, list[tuple[int, bool]], float, int, WorkerReport | None]


def set_up_worker(
    context: WorkerContext, worker_init_fn: Callable[[int, int], None] | None
) -> None:
    """Prepares the worker for any job, before anything of the user is loaded."""
    defer_interrupts()
    take_arrays_from(context.arena)
    with contextlib.suppress(ValueError):  # no address space left: it reads indices for itself
        share_index(context.index_file, tuning.WORKERS_INDEX_BYTES)
    set_chunk_budget(tuning.WORKERS_CHUNK_BYTES // context.num_workers)
    set_index_budget(index_budget() // tuning.WORKERS_OWN_INDEX_DIVISOR // context.num_workers)
    if worker_init_fn is not None:
        with platforms_may_change():
            worker_init_fn(context.worker, context.num_workers)


class BlockJob(Job):
    """Runs random-access plans.

    Args:
        plans: The last node of each, and what recorded it in the parent.
        worker_init_fn: Prepares a worker.
        num_threads: How many threads a worker may have.
        max_reads_in_flight: The limit of all workers together.
    """

    index_byte_len = tuning.WORKERS_INDEX_BYTES

    def __init__(
        self,
        plans: Sequence[tuple[Node, Recorder]],
        worker_init_fn: Callable[[int, int], None] | None = None,
        num_threads: int = 1,
        max_reads_in_flight: int | None = None,
    ) -> None:
        self._plans = plans
        self._worker_init_fn = worker_init_fn
        self._num_threads = num_threads
        self._max_reads_in_flight = max_reads_in_flight

    def open(self, context: WorkerContext) -> Runner:
        """See `Job.open`."""
        set_up_worker(context, self._worker_init_fn)
        reads = ReadQueue(reads_of_process(self._max_reads_in_flight, context.num_workers))
        return _BlockRunner(self._plans, context.mark, reads, max(1, self._num_threads))


class _BlockRunner(Runner):
    """Computes in the worker's main thread, or on other threads if functions or records wait.

    Those run several tasks at the same time, and the main thread only submits them.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Node, Recorder]],
        mark: Callable[[int], None],
        reads: ReadQueue,
        num_threads: int,
    ) -> None:
        self._nodes, self._mark, self._reads = nodes, mark, reads
        self._plans: dict[int, _PlanRunner] = {}
        self._pool = ThreadPool(num_threads)
        # A worker does not know whether the consumer waits, so it is assumed to.
        self._tuner = Tuner(self._pool, num_threads)
        self._pool.enter(self._tuner.record)
        self._num_in_flight = 0
        self._finished: deque[bool] = deque()  # one for each done task that is still counted
        self._last_poll_s = 0.0

    def _of_plan(self, task: tuple[int, int, int]) -> tuple[_PlanRunner, BlockTask]:
        """The plan of a task, and the task there."""
        number, start = divmod(task[0], PLAN_LEN)
        if number not in self._plans:
            self._plans[number] = self._opened(*self._nodes[number])
        return self._plans[number], BlockTask(start, *task[1:])

    def _opened(self, node: Node, recorder: Recorder) -> _PlanRunner:
        recorder = copy.copy(recorder)  # which does not copy what it recorded
        program = compiled(node, Context(recorder=recorder, reads=self._reads))
        program.mark = self._mark
        return _PlanRunner(program, self._pool, WorkerReporter(recorder, node, self._busy_s))

    def _busy_s(self) -> float:
        """How long the tasks of all plans took."""
        return sum(plan.reporter.busy_s for plan in list(self._plans.values()))

    def run(self, task: tuple[int, int, int]) -> Outcome:
        """See `Runner.run`."""
        plan, of_plan = self._of_plan(task)
        try:
            return self._pool.run_here(lambda: plan.computed(of_plan))
        except BaseException as failure:
            return Outcome([], failure, of_plan.start)

    def start(self, task: tuple[int, int, int], finish: Callable[[Outcome], None]) -> None:
        """See `Runner.start`."""
        plan, of_plan = self._of_plan(task)
        program = plan.program
        is_slow = program.waits_for_storage
        self._count_finished()
        if not self._num_in_flight:
            if self._pool.active == 1 and not is_slow:
                finish(self.run(task))
                return
            self._last_poll_s = time.perf_counter()
        self._num_in_flight += 1
        start, count, _ = of_plan
        pending = program.start_reads(start, count) if is_slow else None

        def compute() -> None:
            try:
                outcome = plan.computed(of_plan, pending)
            except BaseException as failure:
                outcome = Outcome([], failure, start)
            self._finished.append(True)
            finish(outcome)

        self._pool.submit(ThreadTask(compute))

    def poll(self) -> None:
        """See `Runner.poll`."""
        self._count_finished()
        now = time.perf_counter()
        self._tuner.record(self._pool.take_computed(), now - self._last_poll_s)
        self._last_poll_s = now

    def _count_finished(self) -> None:
        while self._finished:
            self._finished.popleft()
            self._num_in_flight -= 1


class _PlanRunner:
    """Computes elements of one plan, on any thread.

    Attributes:
        program: What computes them.
        reporter: Reports on them.
    """

    def __init__(self, program: Program, pool: ThreadPool, reporter: WorkerReporter) -> None:
        self.program, self.reporter = program, reporter
        self._pool = pool
        self._meter = program.recorder.read()
        self._meter.threads = pool.use
        self._parent_stacks = False  # since the main process knows more types of containers

    def computed(self, task: BlockTask, pending: PendingElements | None = None) -> Outcome:
        """Computes the elements of a task, whose reads are `pending` if those were started."""
        waiting_s = 0.0
        if pending is not None:
            waiting_since_s = time.perf_counter()
            pending.wait()
            waiting_s = time.perf_counter() - waiting_since_s
        started_s = time.perf_counter() - waiting_s, work_clock_s()
        if pending is not None:
            rows = pending.batches(task.batch_size) if task.batch_size else None
            self._pool.record(task.num_elements, 0.0)
            if rows is not None:
                return self._batches_outcome(task, rows, started_s)
            return self._outcome(task, pending(), started_s)
        if not task.batch_size or self._parent_stacks:
            result = run_shared(self.program, task.start, task.num_elements)
            return self._outcome(task, result, started_s)
        batches, rest = in_batches(self.program, task.start, task.num_elements, task.batch_size)
        if rest is not None and not batches:
            leaves = flatten(rest.elements)[0]
            self._parent_stacks = any(is_receivers_container(type(leaf)) for leaf in leaves)
            return self._outcome(task, rest, started_s)
        return self._batches_outcome(task, batches, started_s)

    def _batches_outcome(
        self, task: BlockTask, batches: list[BatchBlock], started_s: tuple[float, float]
    ) -> Outcome:
        count = sum(map(len, batches))
        rows = [(len(batch), batch.exact) for batch in batches]
        elapsed_s, report = self._elapsed_s(task.start, count, started_s)
        row_byte_len, num_concurrent = self.program.row_byte_len, self._num_concurrent
        extra: Extra = (count, elapsed_s, rows, row_byte_len, num_concurrent, report)
        stacked = [batch.batch for batch in batches]
        return Outcome(stacked, None, task.start, extra, task.batch_size)

    def _outcome(
        self, task: BlockTask, result: Evaluated, started_s: tuple[float, float]
    ) -> Outcome:
        count = len(result.elements)
        elapsed_s, report = self._elapsed_s(task.start, count, started_s)
        extra: Extra = (count, elapsed_s, [], 0.0, self._num_concurrent, report)
        return Outcome(result.elements, result.failure, task.start, extra)

    def _elapsed_s(
        self, start: int, count: int, started_s: tuple[float, float]
    ) -> tuple[float, WorkerReport | None]:
        """Seconds since `started_s` by the work clock; and a report, if one is due.

        Args:
            start: The first element that was computed since then.
            count: How many were.
            started_s: The time, and that of the work clock.
        """
        now_s, elapsed_s = time.perf_counter(), work_clock_s() - started_s[1]
        self._meter.elements += count
        storage_s = max(0.0, now_s - started_s[0] - elapsed_s)
        if (taken := timeline.current) is not None:
            taken.blocks_s += now_s - started_s[0]
            if taken.blocks_s >= timeline.LEAST_S:
                taken.add_block(start, count, started_s[0], now_s, storage_s)
        self._meter.computed(elapsed_s, storage_s, elapsed_s)
        return elapsed_s, self.reporter.report(now_s - started_s[0], count)

    @property
    def _num_concurrent(self) -> int:
        """Tasks that are computed at the same time, if there are enough."""
        return tuning.TASKS_ON_SLOW_STORAGE if self.program.waits_for_storage else self._pool.active
