"""Blocks of a program's elements computed by worker processes, in order, with bounded prefetch."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.batches.batch_blocks import BatchBlock, block_len
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.notes import described
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.ahead import Planned
from grainmill._evaluate.prefetch.block_job import PLAN_LEN, BlockJob
from grainmill._evaluate.prefetch.blocks import Blocks
from grainmill._evaluate.prefetch.pace import Pace
from grainmill._evaluate.prefetch.worker_tasks import Workers, WorkerTasks, asked_for
from grainmill._workers.limits import Limits
from grainmill._workers.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from grainmill._evaluate.batches.batch_blocks import BlockResult
    from grainmill._evaluate.program import Program
    from grainmill._plan.node import Node
    from grainmill._plan.options import ReadOptions
    from grainmill._stats.meters import Recorder
    from grainmill._workers.pool import Result


class ProcessBlocks(Blocks):
    """Computes elements in workers, which those of other plans may share.

    The consumer submits tasks, each a block of positions, and takes the results in order. If
    batches follow, a task is one or several, which the workers stack in shared memory. The death of
    a worker is raised when its block is taken; later calls start new workers.
    """

    _ahead: WorkerTasks

    def __init__(
        self,
        program: Program,
        length: int,
        node: Node,
        options: ReadOptions,
        known: dict[Any, list[Workers]],
    ) -> None:
        super().__init__(program, length, options.prefetch_buffer_size)
        self._num_workers = options.num_workers
        self._min_batches = max(2, self._num_workers)
        self._num_concurrent = 1  # tasks that a worker computes at the same time
        self._element_s: float | None = None  # a worker's cost of an element, once known
        by_lists = program.reads_lists or program.maps_blocks
        self._pace = Pace(self._max_task_len, tuning.WORKER_BLOCK_S, by_lists=by_lists)
        self._limits = Limits.of(options)
        self._affordable = self._max_task_len
        asked = asked_for(options, but="prefetch_buffer_size")
        self._workers = BlockWorkers.of(
            known, self._num_workers, asked, lambda: BlockWorkers(options)
        )
        plan = self._workers.add(node.parent, program.recorder)
        self._first = PLAN_LEN * plan
        recorder, starved = program.recorder, self.meter.starved
        self._ahead = WorkerTasks(self._workers, node, recorder, starved, plan)
        self._row_byte_len = 0.0
        self._element_bytes = 0.0
        self._one_by_one_until = 0

    @property
    def _tasks_per_worker(self) -> int:
        """The maximum number of unfinished tasks of a worker."""
        more = (
            self._num_concurrent * tuning.TASKS_PER_WORKER_THREAD if self._num_concurrent > 1 else 0
        )
        return tuning.TASKS_PER_WORKER + more

    @property
    def _num_active_workers(self) -> int:
        """Workers that get tasks; fewer than all get longer tasks, if elements are cheap.

        `prefetch_buffer_size`, divided among too many tasks, leaves so few elements in each that
        this process spends more time on a task than a worker does.
        """
        if self.batch_size or self._num_concurrent > 1 or self._element_s is None:
            return self._num_workers
        elements = self.buffer_size / tuning.TASKS_PER_WORKER
        useful = math.sqrt(self._element_s * elements / tuning.WORKER_TASK_S)
        return min(self._num_workers, max(tuning.MIN_ACTIVE_WORKERS, math.ceil(useful)))

    @property
    def _num_tasks(self) -> int:
        """Tasks that keep those workers busy."""
        return (self._num_concurrent + 1) * self._num_active_workers

    @property
    def _max_task_len(self) -> int:
        """The maximum number of elements in a task that returns no batches."""
        max_count = max(1, min(tuning.MAX_REQUESTED, self.buffer_size // self._num_tasks))
        return block_len(self._program.mean_byte_len, max_count, tuning.WORKER_BLOCK_BYTES)

    def _compute_next(self, limit: int) -> None:
        if not self._ahead.tasks:
            self._ahead.start(self)
            if not self._ahead.tasks:
                return
        cpu_started_s = time.thread_time()
        self._enqueue_result(*self._ahead.take(self))
        if self._ahead.tasks:  # workers continue while the consumer uses what it takes next
            self._ahead.start(self)
        self.meter.transfer_cpu_s += time.thread_time() - cpu_started_s

    @property
    def _next_len(self) -> int:
        """Elements that the next call of `take` returns, if they are ready."""
        if self.ready:
            return len(self.ready[0])
        return 0 if self._rest is None else len(self._rest.elements)

    def _enqueue_result(self, result: Result, count: int) -> None:
        elements = result.elements
        rows: list[tuple[int, bool]] = []
        if result.extra:
            num_elements, elapsed_s, rows, row_byte_len, self._num_concurrent, _ = result.extra
            self._row_byte_len = row_byte_len or self._row_byte_len
            num_elements = max(1, num_elements)
            self._element_bytes = result.byte_len / num_elements
            cost_s = elapsed_s / num_elements + self._element_bytes * tuning.WORKER_BYTE_S
            # A slow element now and then counts, too: tasks must be short enough to spread these.
            self._element_s = max(cost_s, (self._element_s or 0.0) * tuning.COST_DECAY)
            self._pace.max_count = self._max_task_len
            if self._row_byte_len:
                max_count = tuning.SMALL_TIMES * self.buffer_size // self._num_tasks
                max_count = max(1, min(tuning.MAX_REQUESTED, max_count))
                small = block_len(self._row_byte_len, max_count, tuning.WORKER_SMALL_BYTES)
                self._pace.max_count = max(self._max_task_len, small)
            self._pace.record(num_elements, elapsed_s)
            # How many such elements fit into the memory share of a task.
            share = self._limits.share(self._num_tasks * self._workers.num_plans)
            self._affordable = max(1, int(share / max(1.0, self._element_bytes)))
        if rows and elements:
            pairs = zip(elements, rows, strict=False)  # up to the failure
            batches = [BatchBlock(batch, size, exact=exact) for batch, (size, exact) in pairs]
            block_result: BlockResult = batches, None
        else:
            block_result = [], Evaluated(elements, result.failure)
        self._enqueue_block(block_result, count)

    def submit_tasks(self, pool: WorkerPool) -> None:
        """See `Consumer.submit_tasks`."""
        self._ahead.start_all(self._planned(pool), self.position + self._next_len)

    def _planned(self, pool: WorkerPool) -> Iterator[Planned]:
        """The next tasks, while a worker has few that are unfinished."""
        while True:
            worker, num_unfinished = pool.least_busy(self._num_active_workers)
            # What the consumer waits for is submitted, however many other tasks run before it.
            # Elements that may kill a worker get their own tasks, so that those before them arrive.
            alone = self._ahead.until < self._one_by_one_until
            may_wait = self._ahead.tasks or not self._is_computing
            if may_wait and num_unfinished >= (1 if alone else self._tasks_per_worker):
                return
            start, count, batch_size = self._next_task()
            max_ahead = max(self.buffer_size, self._min_batches * batch_size)
            if batch_size:  # tasks are as long as small rows allow, and every worker needs one
                max_ahead = max(max_ahead, self._num_tasks * self._pace.max_count)
            if num_unfinished >= tuning.TASKS_PER_WORKER:
                half = self._limits.share(self._workers.num_plans)
                max_ahead = block_len(self._element_bytes, max_ahead, half)
            task = self._first + start, count, batch_size
            submit = functools.partial(self._ahead.submit, worker, task, (start, start + count - 1))
            yield Planned(count, max_ahead, submit)

    def tasks_lost(self) -> int:
        """See `Consumer.tasks_lost`."""
        # The elements before the one that killed the worker must still be delivered.
        self._one_by_one_until = self._ahead.until
        return self.position + self._num_ready

    def _next_task(self) -> tuple[int, int, int]:
        """The start, length and batch size of the next task."""
        start, size = self._ahead.until, self.batch_size
        alone = start < self._one_by_one_until
        if size and not self._len_to_batch_start(start):
            count = min(self._pace.count, self._pace.max_count, self._affordable)
            count = size * (1 if alone else max(1, count // size))
            return start, self._block_len(start, count), size
        count = min(self._pace.count, self._affordable, self._max_task_len)
        return start, self._block_len(start, 1 if alone else count), 0

    def start(self) -> None:
        """See `Blocks.start`."""
        self._ahead.start(self)

    def cancel(self) -> None:
        """See `Blocks.cancel`."""
        super().cancel()
        self._workers.cancel()

    def close(self) -> None:
        """See `Blocks.close`."""
        self._workers.close()
        self.rewind(self.position)


class BlockWorkers(Workers):
    """The workers of all readers of a pipeline that ask for the same, each with its plan."""

    def __init__(self, options: ReadOptions) -> None:
        self._plans: list[tuple[Node, Recorder]] = []
        super().__init__(functools.partial(_new_pool, options, self._plans))

    @property
    def num_plans(self) -> int:
        """How many readers share them."""
        return len(self._plans)

    def add(self, plan: Node, recorder: Recorder) -> int:
        """Adds a plan before they are started; returns its number."""
        self._plans.append((plan, recorder))
        return len(self._plans) - 1


def _new_pool(
    options: ReadOptions,
    plans: Sequence[tuple[Node, Recorder]],
    _: bool,  # noqa: FBT001 - see `Workers`
) -> WorkerPool:
    init, reads = options.worker_init_fn, options.max_reads_in_flight
    job = BlockJob(plans, init, options.num_threads, reads)
    components = [node for plan, _ in plans for node in plan.walk_up()]
    origin = functools.partial(_described, [plan for plan, _ in plans])
    return WorkerPool(job, options.num_workers, Limits.of(options), components, origin)


def _described(plans: Sequence[Node], plan: int, first: int, last: int) -> list[str]:
    return described(plans[plan], first, last)
