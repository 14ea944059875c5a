"""Pipelines that run in worker processes, each a part of what its parent gives in turn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from grainmill._iterators.cursor import fixed, stays
from grainmill._iterators.pipeline_job import (
    BLOCK_LEN,
    PipelineJob,
    PipelineTask,
    StartPoint,
    ToldPlaces,
)
from grainmill._iterators.stage import Block, Stage, State
from grainmill._plan.closing import closed_error
from grainmill._plan.sequential import Interleave, UserDefined
from grainmill._plan.slicing import sliced
from grainmill._workers.pool import Limits, WorkerPool
from grainmill._workers.worker_group import ForkRefusedError, spawn_from_now_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from grainmill._evaluate.context import Context
    from grainmill._iterators.pipeline_job import OpenPlan
    from grainmill._iterators.stage import After
    from grainmill._plan.node import Node
    from grainmill._plan.sequential import MultiprocessPrefetch
    from grainmill._workers.pool import PendingResult

_TASKS = 2
# So many elements are made one by one after a worker has died.
_SINGLE_LEN = 128


class RemoteWorkers:
    """The workers of one stage; started when first needed, and again after one has died.

    Attributes:
        cancelled: Whether nobody wants anything of them any more.
        generation: Which set of workers is at work.
        task_bytes: Shared memory that the result of one task may take.
    """

    def __init__(self, node: MultiprocessPrefetch, open_plan: OpenPlan, context: Context) -> None:
        self._node = node
        self._open_plan = open_plan
        self._context = context
        self._pool: WorkerPool | None = None
        self.cancelled = False
        self.generation = 0
        self._limits = Limits.of(node.options)
        self.task_bytes = self._limits.share(_TASKS * node.num_workers)

    def part(self, worker: int) -> RemotePart:
        """What one of them makes."""
        return RemotePart(self, worker, self._node.buffer_size)

    def pool(self) -> WorkerPool:
        """The workers at work.

        Raises:
            ValueError: `cancel` was called.
        """
        if not self.cancelled and (self._pool is None or self._pool.closed):
            self._start()
        if self.cancelled or self._pool is None:  # maybe before there was a pool to hang up
            raise closed_error()
        return self._pool

    def _start(self) -> None:
        node = self._node
        plans = [self._plan(worker) for worker in range(node.num_workers)]
        # What a worker dies of must not be met before the elements that stand before it.
        ahead = not self.generation
        context = dataclasses.replace(
            self._context, works_ahead=ahead, num_workers=node.num_workers
        )
        job = PipelineJob(plans, node.worker_init_fn, self._open_plan, context)
        self.generation += 1
        self._pool = WorkerPool(job, node.num_workers, self._limits, node.parent.walk_up())

    def _plan(self, worker: int) -> Node:
        node = self._node
        return sliced(node.parent, worker, node.num_workers, sequential=node.sequential_slice)

    def local(self, worker: int) -> Stage:
        """The same pipeline in this process, from its start."""
        return self._open_plan(self._plan(worker), self._context)

    def check(self, worker: int, state: State) -> None:
        """Raises what that worker would raise on `state`, as long as nothing depends on it.

        What opens and restores the user's own code is left to the worker.
        """
        plan = self._plan(worker)
        if any(isinstance(node, UserDefined | Interleave) for node in plan.walk()):
            return
        stage = self.local(worker)
        try:
            stage.restore(state)
        finally:
            stage.close()

    def drop(self, pending_results: Iterable[PendingResult], generation: int) -> None:
        """Gives up tasks of a set of workers, where that is the one at work."""
        if self._pool is not None and generation == self.generation:
            for pending in pending_results:
                self._pool.drop(pending)

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self.cancelled = True
        pool = self._pool
        if pool is not None:
            pool.hang_up()

    def close(self) -> None:
        """Ends the workers; those that are needed after that are new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class RemotePart(Stage):
    """The elements that one worker makes, up to `buffer_size` of them ahead."""

    def __init__(self, workers: RemoteWorkers, worker: int, buffer_size: int) -> None:
        super().__init__()
        self._workers = workers
        self._worker = worker
        self._size = -(-buffer_size // _TASKS)
        self._pending_results: deque[PendingResult] = deque()
        self._generation = 0
        self._after: After | None = None  # `None`: at the start
        self._count = 0  # since the start, or the state that was restored
        self._from_start = True
        self._single_until = 0
        self._affordable = 1  # until it is known how large elements are
        self._restart = False
        self._ended = False
        self._failure: BaseException | None = None

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; returns what the worker made at once, which may be more."""
        before = self._after
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._ended:
            return Block([], lambda _: self._state(before))
        pool = self._request()
        try:
            result = pool.take(self._pending_results[0])
            self._pending_results.popleft()
        except BaseException as failure:  # Ctrl-C too, which may have cost a message
            if self._workers.cancelled:  # whoever closes this waits for them to end
                raise
            self._workers.close()
            if isinstance(failure, ForkRefusedError):
                spawn_from_now_on(failure)
                return self.pull(limit)
            raise
        self._failure = result.failure
        if result.elements:
            like_it = self._workers.task_bytes * len(result.elements) // max(1, result.byte_len)
            self._affordable = max(1, min(BLOCK_LEN, like_it))
        if result.failure is not None:
            self._drop_pending()
        elif result.elements:
            self._request()
        if not result.elements:
            if result.failure is not None:
                return self.pull(limit)
            self._ended = True
            return Block([], lambda _: self._state(before))
        told, count = ToldPlaces(result.extra), len(result.elements)
        self._after = stays((told, count))
        self._count += count
        return Block(result.elements, lambda k: told(k) if k else self._state(before))

    def _request(self) -> WorkerPool:
        pool = self._workers.pool()
        if self._generation != self._workers.generation:
            if self._generation:  # what a worker dies of must not keep others from being made
                self._single_until = self._count + _SINGLE_LEN
            self._generation = self._workers.generation
            self._pending_results.clear()
            self._restart = self._after is not None
        while len(self._pending_results) < _TASKS:
            state: StartPoint | None = None
            if self._restart:
                state = StartPoint(self.state(), self._count, self._from_start)
            self._restart = False
            most = 1 if self._count < self._single_until else self._affordable
            task = PipelineTask(state, min(most, self._size), most)
            self._pending_results.append(pool.submit(self._worker, task))
        return pool

    def _drop_pending(self) -> None:
        """Has the worker go back to the element after those that were pulled."""
        self._workers.drop(self._pending_results, self._generation)
        self._pending_results.clear()
        self._restart = True

    def _state(self, after: After | None) -> State:
        if after is None:
            stage = self._workers.local(self._worker)
            try:
                return stage.state()
            finally:
                stage.close()
        return after(0)

    def state(self) -> State:
        """See `Stage.state`; starts no process."""
        return self._state(self._after)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        stands_there = self._stands_at(state)
        if not stands_there:
            self._workers.check(self._worker, state)
        self._drop_pending()
        self._failure = None
        self._ended = False
        if not stands_there:
            self._count, self._from_start = 0, False
        self._after = fixed(state)

    def _stands_at(self, state: State) -> bool:
        with contextlib.suppress(Exception):  # what a user's state holds may not compare
            return self._after is not None and bool(self._after(0) == state)
        return False

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        stage = self._here()
        try:
            return stage.next_index()
        finally:
            stage.close()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        stage = self._here()
        try:
            stage.seek(index)
            self.restore(stage.state())
        finally:
            stage.close()

    def _here(self) -> Stage:
        """The pipeline in this process, where the worker's stands for the consumer."""
        stage = self._workers.local(self._worker)
        if self._after is not None:
            stage.restore(self.state())
        return stage

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        if not self._ended and self._failure is None:
            self._request()

    def close(self) -> None:
        """See `Stage.close`; the workers stay, for the other parts."""
        if self._pending_results:
            self._drop_pending()
