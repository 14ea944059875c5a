"""Blocks of a program's elements made by worker processes, in order and a bounded way ahead."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import BatchBlock, block_len
from grainmill._evaluate.block_job import BlockJob
from grainmill._evaluate.executor import Blocks, Pace
from grainmill._evaluate.fuse import Evaluated
from grainmill._workers.pool import Limits, WorkerPool
from grainmill._workers.worker_group import ForkRefusedError, spawn_from_now_on

if TYPE_CHECKING:
    from grainmill._evaluate.batch_blocks import Made
    from grainmill._evaluate.program import Program
    from grainmill._plan import sequential as plan
    from grainmill._workers.pool import PendingResult, Result


class ProcessBlocks(Blocks):
    """Makes elements in workers.

    The consumer hands out tasks, each a block of positions, and takes the results in order. Where
    a batch follows, a task is one batch or several, which the workers stack in shared memory. A
    worker that dies is met when its block has its turn; whoever goes on after that gets new ones.
    """

    def __init__(self, program: Program, length: int, node: plan.Read) -> None:
        super().__init__(program, length)
        self._node = node
        options = node.options
        self._workers = options.num_workers
        self._at_most = options.prefetch_buffer_size
        self._least_batches = max(2, self._workers)
        self._at_once = 1  # tasks that a worker has under way at the same time
        self._element_s: float | None = None  # what one costs a worker, once that is known
        by_lists = program.reads_lists
        self._pace = Pace(self._most, tuning.WORKER_BLOCK_S, by_lists=by_lists)
        self._limits = Limits.of(options)
        self._affordable = self._most
        self._pool: WorkerPool | None = None
        self._tasks: deque[tuple[PendingResult, int]] = deque()
        self._row_byte_len = 0.0
        self._element_bytes = 0.0
        self._handed_out = 0
        self._one_by_one_until = 0

    @property
    def _tasks_per_worker(self) -> int:
        """The most that a worker has at a time."""
        more = self._at_once * tuning.TASKS_PER_WORKER_THREAD if self._at_once > 1 else 0
        return tuning.TASKS_PER_WORKER + more

    @property
    def _num_at_work(self) -> int:
        """Workers that get tasks: where they would be short of work, fewer get longer tasks.

        With more than that, `prefetch_buffer_size` cut into as many tasks leaves so few elements
        in each that this process spends more on a task than a worker does.
        """
        if self.batch_size or self._at_once > 1 or self._element_s is None:
            return self._workers
        elements = self._at_most / tuning.TASKS_PER_WORKER
        useful = math.sqrt(self._element_s * elements / tuning.WORKER_TASK_S)
        return min(self._workers, max(tuning.LEAST_AT_WORK, math.ceil(useful)))

    @property
    def _num_tasks(self) -> int:
        """Tasks that keep those workers at work."""
        return (self._at_once + 1) * self._num_at_work

    @property
    def _most(self) -> int:
        """Elements in a task, where they come one by one."""
        most = max(1, min(tuning.MOST_DEMANDED, self._at_most // self._num_tasks))
        return block_len(self._program.mean_byte_len, most, tuning.WORKER_BLOCK_BYTES)

    def _make(self, limit: int) -> None:
        pool = self._pool
        if pool is None or pool.closed or not self._tasks:
            pool = self._hand_out()
            if not self._tasks:
                return
        pending, count = self._tasks[0]
        try:
            result = pool.take(pending)
            self._tasks.popleft()
            self._keep_result(result, count)
            if self._tasks:
                # Workers go on while the consumer has what it takes next.
                self._hand_out_to(pool, self.position + self._len_of_next)
        except BaseException as failure:  # Ctrl-C too, which may have cost a message
            if self._cancelled:  # whoever closes this waits for the workers to end
                raise
            # What a worker dies of must not keep what stands before it from being made.
            self._one_by_one_until = self._handed_out
            self.close()
            if isinstance(failure, ForkRefusedError):
                spawn_from_now_on(failure)
                self._make(limit)
            else:
                raise

    @property
    def _len_of_next(self) -> int:
        """Elements in what the next call of `take` gives, of what is kept."""
        if self.ready:
            return len(self.ready[0])
        return 0 if self._rest is None else len(self._rest.elements)

    def _keep_result(self, result: Result, count: int) -> None:
        elements = result.elements
        rows: list[tuple[int, bool]] = []
        if result.extra:
            num_elements, elapsed_s, rows, row_byte_len, self._at_once = result.extra
            self._row_byte_len = row_byte_len or self._row_byte_len
            num_elements = max(1, num_elements)
            self._element_bytes = result.byte_len / num_elements
            cost_s = elapsed_s / num_elements + self._element_bytes * tuning.WORKER_BYTE_S
            # What comes now and then takes long too: elements like it have to be spread as well.
            self._element_s = max(cost_s, (self._element_s or 0.0) * tuning.COST_LASTS)
            self._pace.most = self._most
            if self._row_byte_len:
                most = tuning.SMALL_TIMES * self._at_most // self._num_tasks
                most = max(1, min(tuning.MOST_DEMANDED, most))
                small = block_len(self._row_byte_len, most, tuning.WORKER_SMALL_BYTES)
                self._pace.most = max(self._most, small)
            self._pace.record(num_elements, elapsed_s)
            # How many elements like these take what one task may.
            share = self._limits.share(self._num_tasks)
            self._affordable = max(1, int(share / max(1.0, self._element_bytes)))
        if rows and elements:
            pairs = zip(elements, rows, strict=False)  # up to the failure
            pieces = [BatchBlock(batch, size, exact=exact) for batch, (size, exact) in pairs]
            made: Made = pieces, None
        else:
            made = [], Evaluated(elements, result.failure)
        num_made = self._keep(made)
        if num_made < count or result.failure is not None:
            self._drop_tasks(self.position + num_made)

    def _hand_out(self) -> WorkerPool:
        if self._pool is None or self._pool.closed:
            self._drop_tasks(self.position)
            plan = self._node.parent
            options = self._node.options
            job = BlockJob(plan, options.worker_init_fn, options.num_threads)
            self._pool = WorkerPool(job, self._workers, self._limits, plan.walk_up())
            self.check_open()  # `cancel` may have come before the pool
        self._hand_out_to(self._pool, self.position)
        return self._pool

    def _hand_out_to(self, pool: WorkerPool, position: int) -> None:
        while True:
            worker, num_unfinished = pool.least_busy(self._num_at_work)
            # What is awaited has to be under way, however much was dropped before it.
            # What may end a worker is done by itself, that the elements before it are not lost.
            alone = self._handed_out < self._one_by_one_until
            if self._tasks and num_unfinished >= (1 if alone else self._tasks_per_worker):
                return
            start, count, batch_size = task = self._next_task()
            most = max(self._at_most, self._least_batches * batch_size)
            if batch_size:  # tasks are as long as small rows allow, and every worker is to have one
                most = max(most, self._num_tasks * self._pace.most)
            if count <= 0:
                return
            ahead = start + count - position
            no_room = ahead * self._element_bytes > self._limits.budget_bytes / 2
            too_many = no_room and num_unfinished >= tuning.TASKS_PER_WORKER
            if self._tasks and (ahead > most or too_many):
                return
            self._tasks.append((pool.submit(worker, task, (start, start + count - 1)), count))
            self._handed_out += count

    def _next_task(self) -> tuple[int, int, int]:
        """As plain numbers what the worker sees as `BlockTask`."""
        start, left = self._handed_out, self._length - self._handed_out
        missing = self._until_batch(start)
        size = self.batch_size
        if size and not missing:
            count = size
            if start >= self._one_by_one_until:
                count *= max(1, min(self._pace.count, self._pace.most, self._affordable) // size)
            return start, min(count, left), size
        count = min(self._pace.count, self._affordable, self._most)
        if start < self._one_by_one_until:
            count = 1
        return start, min(count, missing or left, left), 0

    def _drop_tasks(self, position: int) -> None:
        """Has the elements from `position` on made anew; what is under way is not waited for."""
        for pending, _ in self._tasks:
            if self._pool is not None:
                self._pool.drop(pending)
        self._tasks.clear()
        self._handed_out = position

    def rewind(self, position: int) -> None:
        """See `Blocks.rewind`."""
        super().rewind(position)
        self._drop_tasks(position)

    def start(self) -> None:
        """See `Blocks.start`."""
        self._hand_out()

    def cancel(self) -> None:
        """See `Blocks.cancel`."""
        super().cancel()
        pool = self._pool
        if pool is not None:
            pool.hang_up()

    def close(self) -> None:
        """See `Blocks.close`."""
        pool, self._pool = self._pool, None
        self.rewind(self.position)
        if pool is not None:
            pool.close()
