"""Stages that run in worker processes, one for each shard of a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

from grainmill._evaluate.batches.batch_blocks import block_len
from grainmill._evaluate.prefetch.worker_tasks import Workers, WorkerTasks
from grainmill._interrupts import suppressed
from grainmill._iterators.base.position import of_state, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.open import open_plan
from grainmill._iterators.user_defined import UserDefined
from grainmill._iterators.workers.pipeline_job import (
    BLOCK_LEN,
    RESULTS,
    TASKS,
    PickledPositions,
    PipelineJob,
    PipelineTask,
    StartPoint,
)
from grainmill._plan.notes import located
from grainmill._workers import messages
from grainmill._workers.limits import Limits
from grainmill._workers.pool import WorkerPool

if TYPE_CHECKING:
    from grainmill._evaluate.context import Context
    from grainmill._iterators.base.position import Position
    from grainmill._iterators.workers.shares import WorkersNode

# How many elements are requested one by one after a worker has died.
_SINGLE_LEN = 128


class RemoteWorkers(Workers):
    """The workers of one stage, each with a pipeline of its own.

    Attributes:
        task_bytes: About how much memory the result of one task may use.
    """

    def __init__(self, node: WorkersNode, context: Context) -> None:
        self._node, self._context = node, context
        limits = Limits.of(node.options)
        self.task_bytes = task_bytes = limits.share(TASKS * node.num_workers)
        if node.options.per_worker_budget_bytes is not None:
            own_share = int(node.options.per_worker_budget_bytes) // RESULTS
            self.task_bytes = task_bytes = min(task_bytes, own_share)

        def new_pool(is_first: bool) -> WorkerPool:  # noqa: FBT001 - see `Workers`
            workers = node.num_workers
            # After a crash nothing is prefetched: the elements before the one that crashes a
            # worker must be delivered first.
            in_worker = dataclasses.replace(context, prefetches=is_first, num_workers=workers)
            job = PipelineJob(node, in_worker, task_bytes)
            return WorkerPool(job, workers, limits, node.parent.walk_up(), origin)

        def origin(_first: int, _last: int) -> list[str]:
            return [f"in the workers of {located(node)}"]

        super().__init__(new_pool)

    def shard(self, worker: int) -> RemoteShard:
        """The stage for the elements of one worker."""
        return RemoteShard(self, worker, self._node.buffer_size)

    def tasks(self) -> WorkerTasks:
        """The tasks of one of these stages."""
        recorder = self._context.recorder
        waited = functools.partial(recorder.waited, self._node)
        return WorkerTasks(self, self._node, recorder, waited)

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
        with contextlib.closing(self.local(worker)) as stage:
            stage.restore(state)


class RemoteShard(Stage):
    """The elements of one worker, which prefetches up to `buffer_size` of them."""

    moves_start = False  # and reading it opens the worker's plan in this process

    def __init__(self, workers: RemoteWorkers, worker: int, buffer_size: int) -> None:
        super().__init__()
        self._workers = workers
        self._worker = worker
        self._size = -(-buffer_size // TASKS)
        self._ahead = workers.tasks()
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
        result, _ = self._ahead.take(self)
        self._failure = result.failure
        if result.elements:
            mean = result.byte_len / len(result.elements)
            self._max_elements = block_len(mean, BLOCK_LEN, self._workers.task_bytes)
        if result.failure is not None:
            self._drop_pending()
        elif result.elements:
            self._ahead.start(self)
        if not result.elements:
            if result.failure is not None:
                return self.pull(limit)
            self._ended = True
            return Block([], lambda _: self._state(before))
        state_after, count = PickledPositions(result.extra[0]), len(result.elements)
        self._position = (state_after, count)
        self._count += count
        return Block(result.elements, lambda k: state_after(k) if k else self._state(before))

    def submit_tasks(self, _: WorkerPool) -> None:
        """See `Consumer.submit_tasks`."""
        while len(self._ahead.tasks) < TASKS:
            start: StartPoint | None = None
            if self._restart:
                state = messages.dumps(self.state())  # it may have objects of the main script
                start = StartPoint(state, self._count, self._from_start)
            self._restart = False
            max_elements = 1 if self._count < self._single_until else self._max_elements
            task = PipelineTask(start, min(max_elements, self._size), max_elements)
            self._ahead.submit(self._worker, task)

    def tasks_lost(self) -> int:
        """See `Consumer.tasks_lost`."""
        # An element that crashes a worker must not take others with it.
        self._single_until = self._count + _SINGLE_LEN
        self._restart = self._position is not None
        return self._count

    def _drop_pending(self) -> None:
        """Drops the tasks in flight; the next one restarts after the last pulled element."""
        self._ahead.drop(self._count)
        self._restart = True

    def _state(self, position: Position | None) -> State:
        if position is None:
            with contextlib.closing(self._workers.local(self._worker)) as stage:
                return stage.state()
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
        with contextlib.closing(self._local_at_position()) as stage:
            return stage.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        with contextlib.closing(self._local_at_position()) as stage:
            stage.seek(index)
            self.restore(stage.state())

    def _local_at_position(self) -> Stage:
        """The worker's pipeline in this process, at the consumer's position."""
        stage = self._workers.local(self._worker)
        if self._position is not None:
            stage.restore(self.state())
        return stage

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        if not self._ended and self._failure is None:
            self._ahead.start(self)

    def close(self) -> None:
        """See `Stage.close`; the workers keep running for the other shards."""
        if self._ahead.tasks:
            self._drop_pending()
