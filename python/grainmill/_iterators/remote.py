"""Stages that run in worker processes, one for each shard of a plan."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING

from grainmill._interrupts import suppressed
from grainmill._iterators.open import open_plan
from grainmill._iterators.pipeline_job import (
    BLOCK_LEN,
    RESULTS,
    TASKS,
    PickledPositions,
    PipelineJob,
    PipelineTask,
    StartPoint,
)
from grainmill._iterators.position import of_state, state_at
from grainmill._iterators.stage import Block, Stage, State
from grainmill._iterators.user_defined import UserDefined
from grainmill._plan.closing import closed_error
from grainmill._plan.notes import located
from grainmill._stats.thread_clock import ThreadUse
from grainmill._workers import messages
from grainmill._workers.limits import Limits
from grainmill._workers.pool import WorkerPool
from grainmill._workers.worker_group import ForkUnavailableError, disable_fork

if TYPE_CHECKING:
    from collections.abc import Iterable

    from grainmill._evaluate.context import Context
    from grainmill._iterators.position import Position
    from grainmill._iterators.shares import WorkersNode
    from grainmill._workers.pool import PendingResult, Result

# How many elements are requested one by one after a worker has died.
_SINGLE_LEN = 128


class RemoteWorkers:
    """The workers of one stage; started when first needed, and again after one has died.

    Attributes:
        cancelled: Whether `cancel` was called.
        generation: The number of the current set of workers; 0 before the first.
        task_bytes: About how much memory the result of one task may use.
    """

    def __init__(self, node: WorkersNode, context: Context) -> None:
        self._node = node
        self._context = context
        self._pool: WorkerPool | None = None
        self.cancelled = False
        self.generation = 0
        self._limits = Limits.of(node.options)
        self.task_bytes = self._limits.share(TASKS * node.num_workers)
        if node.options.per_worker_budget_bytes is not None:
            own_share = int(node.options.per_worker_budget_bytes) // RESULTS
            self.task_bytes = min(self.task_bytes, own_share)

    def shard(self, worker: int) -> RemoteShard:
        """The stage for the elements of one worker."""
        return RemoteShard(self, worker, self._node.buffer_size)

    def pool(self) -> WorkerPool:
        """The running workers, started if there are none.

        Raises:
            ValueError: `cancel` was called.
        """
        if not self.cancelled and (self._pool is None or self._pool.closed):
            self._start()
        if self.cancelled or self._pool is None:  # `cancel` may have found no pool yet
            raise closed_error()
        return self._pool

    def _start(self) -> None:
        node = self._node
        # After a crash nothing is prefetched: the elements before the one that crashes a worker
        # must be delivered first.
        ahead = not self.generation
        context = dataclasses.replace(self._context, prefetches=ahead, num_workers=node.num_workers)
        job = PipelineJob(node, context, self.task_bytes)
        self.generation += 1

        def origin(_first: int, _last: int) -> list[str]:
            return [f"in the workers of {located(node)}"]

        workers = node.num_workers
        self._pool = WorkerPool(job, workers, self._limits, node.parent.walk_up(), origin)

    def wait(self, pool: WorkerPool, pending: PendingResult, *, is_first: bool) -> Result:
        """Waits for a result; records for how long, and the worker's report.

        Args:
            pool: The workers.
            pending: The result to wait for.
            is_first: Whether the worker has returned none before.
        """
        if pending.answer is None:
            use = ThreadUse() if is_first else None
            started_s = time.perf_counter()
            result = pool.wait(pending)
            waited_s = time.perf_counter() - started_s
            self._context.recorder.waited(self._node, waited_s)
            if use is not None:
                self._context.recorder.started(self._node, waited_s, use.read())
        else:
            result = pool.wait(pending)
        report = result.extra[1] if result.extra else None
        if report is not None:
            self._context.recorder.report(self._node, pending.worker, report)
        return result

    def local(self, worker: int) -> Stage:
        """The worker's pipeline, opened in this process at its start."""
        return open_plan(self._node.shard(worker), self._context)

    def check(self, worker: int, state: State) -> None:
        """Raises what that worker would raise when `state` is restored.

        Plans that open or restore objects of the user are not checked here: only the worker runs
        those.
        """
        plan = self._node.shard(worker)
        if any(isinstance(node, UserDefined) or node.opens is not None for node in plan.walk()):
            return
        stage = self.local(worker)
        try:
            stage.restore(state)
        finally:
            stage.close()

    def drop(self, pending_results: Iterable[PendingResult], generation: int) -> None:
        """Drops tasks of a set of workers, unless other workers have replaced it."""
        if self._pool is not None and generation == self.generation:
            for pending in pending_results:
                self._pool.discard(pending)

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self.cancelled = True
        pool = self._pool
        if pool is not None:
            pool.disconnect()

    def close(self) -> None:
        """Ends the workers; a later request starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class RemoteShard(Stage):
    """The elements of one worker, which prefetches up to `buffer_size` of them."""

    moves_start = False  # and reading it opens the worker's plan in this process

    def __init__(self, workers: RemoteWorkers, worker: int, buffer_size: int) -> None:
        super().__init__()
        self._workers = workers
        self._worker = worker
        self._size = -(-buffer_size // TASKS)
        self._pending_results: deque[PendingResult] = deque()
        self._generation = 0
        self._position: Position | None = None  # `None`: at the start
        self._count = 0  # elements since the start, or since the restored state
        self._from_start = True
        self._single_until = 0  # the count up to which elements are requested one by one
        self._max_elements = 1  # per task; 1 until the size of elements is known
        self._restart = False  # whether the next task has to say where to start
        self._ended = False
        self._failure: BaseException | None = None

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; returns all elements of a task, which may exceed `limit`."""
        before = self._position
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._ended:
            return Block([], lambda _: self._state(before))
        pool = self._request()
        try:
            first = self._pending_results[0]
            result = self._workers.wait(pool, first, is_first=self._position is None)
            self._pending_results.popleft()
        except BaseException as failure:  # also Ctrl-C, by which a message may be lost
            if self._workers.cancelled:  # `close` will end them
                raise
            self._workers.close()
            if isinstance(failure, ForkUnavailableError):
                disable_fork(failure)
                return self.pull(limit)
            raise
        self._failure = result.failure
        if result.elements:
            fitting = self._workers.task_bytes * len(result.elements) // max(1, result.byte_len)
            self._max_elements = max(1, min(BLOCK_LEN, fitting))
        if result.failure is not None:
            self._drop_pending()
        elif result.elements:
            self._request()
        if not result.elements:
            if result.failure is not None:
                return self.pull(limit)
            self._ended = True
            return Block([], lambda _: self._state(before))
        state_after, count = PickledPositions(result.extra[0]), len(result.elements)
        self._position = (state_after, count)
        self._count += count
        return Block(result.elements, lambda k: state_after(k) if k else self._state(before))

    def _request(self) -> WorkerPool:
        pool = self._workers.pool()
        if self._generation != self._workers.generation:
            if self._generation:  # an element that crashes a worker must not take others with it
                self._single_until = self._count + _SINGLE_LEN
            self._generation = self._workers.generation
            self._pending_results.clear()
            self._restart = self._position is not None
        while len(self._pending_results) < TASKS:
            start: StartPoint | None = None
            if self._restart:
                state = messages.dumps(self.state())  # it may have objects of the main script
                start = StartPoint(state, self._count, self._from_start)
            self._restart = False
            max_elements = 1 if self._count < self._single_until else self._max_elements
            task = PipelineTask(start, min(max_elements, self._size), max_elements)
            self._pending_results.append(pool.submit(self._worker, task))
        return pool

    def _drop_pending(self) -> None:
        """Drops the tasks in flight; the next one restarts after the last pulled element."""
        self._workers.drop(self._pending_results, self._generation)
        self._pending_results.clear()
        self._restart = True

    def _state(self, position: Position | None) -> State:
        if position is None:
            stage = self._workers.local(self._worker)
            try:
                return stage.state()
            finally:
                stage.close()
        return state_at(position)

    def state(self) -> State:
        """See `Stage.state`; starts no process."""
        return self._state(self._position)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        is_there = self._is_at(state)
        if not is_there:
            self._workers.check(self._worker, state)
        self._drop_pending()
        self._failure = None
        self._ended = False
        if not is_there:
            self._count, self._from_start = 0, False
        self._position = of_state(state)

    def _is_at(self, state: State) -> bool:
        with suppressed():  # objects in a user's state may not be comparable
            return self._position is not None and bool(state_at(self._position) == state)
        return False

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        stage = self._local_at_position()
        try:
            return stage.next_index()
        finally:
            stage.close()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        stage = self._local_at_position()
        try:
            stage.seek(index)
            self.restore(stage.state())
        finally:
            stage.close()

    def _local_at_position(self) -> Stage:
        """The worker's pipeline in this process, at the consumer's position."""
        stage = self._workers.local(self._worker)
        if self._position is not None:
            stage.restore(self.state())
        return stage

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        if not self._ended and self._failure is None:
            self._request()

    def close(self) -> None:
        """See `Stage.close`; the workers keep running for the other shards."""
        if self._pending_results:
            self._drop_pending()
