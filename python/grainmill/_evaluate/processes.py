"""Blocks of a program's elements computed by worker processes, in order, with bounded prefetch."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import BatchBlock, block_len
from grainmill._evaluate.block_job import BlockJob
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.executor import Blocks, Pace, weak_call
from grainmill._evaluate.notes import described
from grainmill._stats.thread_clock import ThreadUse
from grainmill._workers.limits import Limits
from grainmill._workers.pool import WorkerPool
from grainmill._workers.worker_group import ForkUnavailableError, disable_fork

if TYPE_CHECKING:
    from grainmill._evaluate.batch_blocks import BlockResult
    from grainmill._evaluate.program import Program
    from grainmill._plan.node import Node
    from grainmill._plan.options import ReadOptions
    from grainmill._workers.pool import PendingResult, Result


class ProcessBlocks(Blocks):
    """Computes elements in workers.

    The consumer submits tasks, each a block of positions, and takes the results in order. If
    batches follow, a task is one or several, which the workers stack in shared memory. The death of
    a worker is raised when its block is taken; later calls start new workers.
    """

    def __init__(self, program: Program, length: int, node: Node, options: ReadOptions) -> None:
        super().__init__(program, length)
        self._node = node
        self._options = options
        self._recorder = program.recorder
        self.meter.ahead = weak_call(self, ProcessBlocks._num_ahead)
        self._workers = options.num_workers
        self._buffer_size = options.prefetch_buffer_size
        self._min_batches = max(2, self._workers)
        self._num_concurrent = 1  # tasks that a worker computes at the same time
        self._element_s: float | None = None  # a worker's cost of an element, once known
        by_lists = program.reads_lists or program.maps_blocks
        self._pace = Pace(self._max_task_len, tuning.WORKER_BLOCK_S, by_lists=by_lists)
        self._limits = Limits.of(options)
        self._affordable = self._max_task_len
        self._pool: WorkerPool | None = None
        self._num_starting = 0  # results until all workers have returned one, about
        self._tasks: deque[tuple[PendingResult, int]] = deque()
        self._row_byte_len = 0.0
        self._element_bytes = 0.0
        self._dispatched_until = 0
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
            return self._workers
        elements = self._buffer_size / tuning.TASKS_PER_WORKER
        useful = math.sqrt(self._element_s * elements / tuning.WORKER_TASK_S)
        return min(self._workers, max(tuning.MIN_ACTIVE_WORKERS, math.ceil(useful)))

    @property
    def _num_tasks(self) -> int:
        """Tasks that keep those workers busy."""
        return (self._num_concurrent + 1) * self._num_active_workers

    @property
    def _max_task_len(self) -> int:
        """The maximum number of elements in a task that returns no batches."""
        max_count = max(1, min(tuning.MAX_REQUESTED, self._buffer_size // self._num_tasks))
        return block_len(self._program.mean_byte_len, max_count, tuning.WORKER_BLOCK_BYTES)

    def _compute_next(self, limit: int) -> None:
        pool = self._pool
        if pool is None or pool.closed or not self._tasks:
            pool = self._dispatch()
            if not self._tasks:
                return
        pending, count = self._tasks[0]
        try:
            cpu_started_s = time.thread_time()
            if pending.answer is None:
                use = ThreadUse() if self._num_starting > 0 else None
                started_s = time.perf_counter()
                result = pool.wait(pending)
                waited_s = time.perf_counter() - started_s
                self.meter.starved_s += waited_s
                if use is not None:
                    self._recorder.started(self._node, waited_s, use.read())
            else:
                result = pool.wait(pending)
            self._num_starting -= 1
            self._tasks.popleft()
            report = result.extra[5] if result.extra else None
            if report is not None:
                self._recorder.report(self._node, pending.worker, report)
            self._enqueue_result(result, count)
            if self._tasks:
                # Workers continue while the consumer uses what it takes next.
                self._dispatch_to(pool, self.position + self._next_len)
            self.meter.transfer_cpu_s += time.thread_time() - cpu_started_s
        except BaseException as failure:  # also an interrupt, which may have lost a message
            if self._cancelled:  # the closing thread waits for the workers
                raise
            # The elements before the one that killed the worker must still be delivered.
            self._one_by_one_until = self._dispatched_until
            self.close()
            if isinstance(failure, ForkUnavailableError):
                disable_fork(failure)
                self._compute_next(limit)
            else:
                raise

    def _num_ahead(self) -> tuple[int, int]:
        """How many elements are computed and not yet taken, and the limit; on any thread."""
        count = sum(map(len, list(self.ready)))
        count += sum(count for pending, count in list(self._tasks) if pending.answer is not None)
        rest = self._rest
        return count + (0 if rest is None else len(rest.elements)), self._buffer_size

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
                max_count = tuning.SMALL_TIMES * self._buffer_size // self._num_tasks
                max_count = max(1, min(tuning.MAX_REQUESTED, max_count))
                small = block_len(self._row_byte_len, max_count, tuning.WORKER_SMALL_BYTES)
                self._pace.max_count = max(self._max_task_len, small)
            self._pace.record(num_elements, elapsed_s)
            # How many such elements fit into the memory share of a task.
            share = self._limits.share(self._num_tasks)
            self._affordable = max(1, int(share / max(1.0, self._element_bytes)))
        if rows and elements:
            pairs = zip(elements, rows, strict=False)  # up to the failure
            batches = [BatchBlock(batch, size, exact=exact) for batch, (size, exact) in pairs]
            block_result: BlockResult = batches, None
        else:
            block_result = [], Evaluated(elements, result.failure)
        num_computed = self._enqueue(block_result)
        if num_computed < count or result.failure is not None:
            self._drop_tasks(self.position + num_computed)

    def _dispatch(self) -> WorkerPool:
        if self._pool is None or self._pool.closed:
            self._drop_tasks(self.position)
            plan = self._node.parent
            options = self._options
            job = BlockJob(
                plan,
                options.worker_init_fn,
                options.num_threads,
                self._recorder,
                options.max_reads_in_flight,
            )
            self._pool = WorkerPool(
                job, self._workers, self._limits, plan.walk_up(), functools.partial(described, plan)
            )
            self._num_starting = self._workers
            self.check_open()  # `cancel` may have been called before the pool existed
        self._dispatch_to(self._pool, self.position)
        return self._pool

    def _dispatch_to(self, pool: WorkerPool, position: int) -> None:
        while True:
            worker, num_unfinished = pool.least_busy(self._num_active_workers)
            # The task that is taken next is submitted, however many dropped ones run before it.
            # Elements that may kill a worker get their own tasks, so that those before them arrive.
            alone = self._dispatched_until < self._one_by_one_until
            if self._tasks and num_unfinished >= (1 if alone else self._tasks_per_worker):
                return
            start, count, batch_size = task = self._next_task()
            max_ahead = max(self._buffer_size, self._min_batches * batch_size)
            if batch_size:  # tasks are as long as small rows allow, and every worker needs one
                max_ahead = max(max_ahead, self._num_tasks * self._pace.max_count)
            if count <= 0:
                return
            num_ahead = start + count - position
            over_budget = num_ahead * self._element_bytes > self._limits.budget_bytes / 2
            too_many = over_budget and num_unfinished >= tuning.TASKS_PER_WORKER
            if self._tasks and (num_ahead > max_ahead or too_many):
                return
            self._tasks.append((pool.submit(worker, task, (start, start + count - 1)), count))
            self._dispatched_until += count

    def _next_task(self) -> tuple[int, int, int]:
        """The next `BlockTask`, as a plain tuple."""
        start, left = self._dispatched_until, self._length - self._dispatched_until
        to_boundary = self._len_to_batch_start(start)
        size = self.batch_size
        if size and not to_boundary:
            count = size
            if start >= self._one_by_one_until:
                count *= max(
                    1, min(self._pace.count, self._pace.max_count, self._affordable) // size
                )
            return start, min(count, left), size
        count = min(self._pace.count, self._affordable, self._max_task_len)
        if start < self._one_by_one_until:
            count = 1
        return start, min(count, to_boundary or left, left), 0

    def _drop_tasks(self, position: int) -> None:
        """Drops the tasks from `position` on, without waiting for them."""
        for pending, _ in self._tasks:
            if self._pool is not None:
                self._pool.discard(pending)
        self._tasks.clear()
        self._dispatched_until = position

    def rewind(self, position: int) -> None:
        """See `Blocks.rewind`."""
        super().rewind(position)
        self._drop_tasks(position)

    def start(self) -> None:
        """See `Blocks.start`."""
        self._dispatch()

    def cancel(self) -> None:
        """See `Blocks.cancel`."""
        super().cancel()
        pool = self._pool
        if pool is not None:
            pool.disconnect()

    def close(self) -> None:
        """See `Blocks.close`."""
        pool, self._pool = self._pool, None
        self.rewind(self.position)
        if pool is not None:
            pool.close()
