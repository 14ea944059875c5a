"""Stages that run in worker processes, one for each shard of a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from grainmill._evaluate.batches.batch_blocks import block_len
from grainmill._evaluate.prefetch.worker_tasks import Workers, WorkerTasks, asked_for
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
from grainmill._stats.meters import Recorder
from grainmill._workers import messages
from grainmill._workers.limits import Limits
from grainmill._workers.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._iterators.base.position import Position
    from grainmill._iterators.workers.shares import WorkersNode
    from grainmill._workers.pool import Result

# How many elements are requested one by one after a worker has died.
_SINGLE_LEN = 128
# Beyond so many tasks of all stages, a worker gets only those that the consumer waits for.
_MAX_UNFINISHED = 64


class RemoteWorkers(Workers):
    """The workers of all stages of a pipeline that ask for the same, with their shares of each.

    The shares of stage `k` are the plans `k * num_workers` and following.
    """

    def __init__(self, node: WorkersNode, context: Context) -> None:
        self._nodes: list[WorkersNode] = []
        options = node.options
        self._num_workers: int = options.num_workers
        self._task_bytes = Limits.of(options).share(TASKS * self._num_workers)
        if options.per_worker_budget_bytes is not None:
            own_share = int(options.per_worker_budget_bytes) // RESULTS
            self._task_bytes = min(self._task_bytes, own_share)
        # The dictionary of all workers of the pipeline would keep these until the next collection.
        context = context.on_other_thread()
        super().__init__(functools.partial(_new_pool, self._nodes, context, self._task_bytes))

    @property
    def are_shared(self) -> bool:
        """Whether several stages use them."""
        return len(self._nodes) > 1

    @property
    def task_bytes(self) -> int:
        """About how much memory the result of one task may use."""
        return self._task_bytes // len(self._nodes)

    def add(self, node: WorkersNode) -> int:
        """Adds a stage before they are started; returns the number of its first plan."""
        self._nodes.append(node)
        return (len(self._nodes) - 1) * self._num_workers


def open_shards(
    node: WorkersNode, context: Context
) -> tuple[RemoteWorkers, Callable[[int], Stage]]:
    """The workers for a stage and others that ask for the same, and what opens its shards."""
    asked = [*asked_for(node.options, but="per_worker_buffer_size"), node.worker_init_fn]
    workers = RemoteWorkers.of(
        context.workers, node.num_workers, asked, lambda: RemoteWorkers(node, context)
    )
    first = workers.add(node)
    return workers, lambda worker: RemoteShard(workers, first + worker, worker, node, context)


def _new_pool(
    nodes: Sequence[WorkersNode],
    context: Context,
    task_bytes: int,
    is_first: bool,  # noqa: FBT001 - see `Workers`
) -> WorkerPool:
    options = nodes[0].options
    # After a crash nothing is prefetched: the elements before the one that crashes a worker must be
    # delivered first.
    context = dataclasses.replace(context, prefetches=is_first, num_workers=options.num_workers)
    job = PipelineJob(nodes, context, task_bytes // len(nodes))
    components = [each for node in nodes for each in node.parent.walk_up()]

    def origin(plan: int, _first: int, _last: int) -> list[str]:
        return [f"in the workers of {located(nodes[plan // options.num_workers])}"]

    return WorkerPool(job, options.num_workers, Limits.of(options), components, origin)


class RemoteShard(Stage):
    """The elements of one worker of a stage, which prefetches up to `buffer_size` of them.

    Args:
        workers: The workers.
        plan: The number of the worker's plan there.
        worker: The number of the worker.
        node: The node of the stage.
        context: The context of the stage.
    """

    moves_start = False  # and reading it opens the worker's plan in this process

    def __init__(
        self, workers: RemoteWorkers, plan: int, worker: int, node: WorkersNode, context: Context
    ) -> None:
        super().__init__()
        self._workers, self._plan, self._worker = workers, plan, worker
        self._node, self._context = node, context
        self._size = -(-node.buffer_size // TASKS)
        waited = functools.partial(context.recorder.waited, node)
        self._ahead = WorkerTasks(workers, node, context.recorder, waited, plan)
        self._num_tasks = TASKS
        self._position: Position | None = None  # `None`: at the start
        self._count = 0  # elements since the start, or since the restored state
        self._from_start = True
        self._single_until = 0  # the count up to which elements are requested one by one
        self._lost_at = 0  # the count at the first task that was lost
        self._max_elements = 1  # per task; 1 until the size of elements is known
        self._restart = workers.were_started  # whether the next task has to say where to start
        self._is_awaited = False
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
        self._raise_earlier()
        self._is_awaited = True
        result, _ = self._ahead.take(self)
        self._is_awaited = False
        self._failure = result.failure
        if result.elements:
            self._choose_tasks(result)
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

    def _choose_tasks(self, result: Result) -> None:
        """Chooses the size and the number of the next tasks."""
        count, task_bytes = len(result.elements), self._workers.task_bytes
        mean = result.byte_len / count
        self._max_elements = block_len(mean, BLOCK_LEN, task_bytes)
        # Where tasks may be short, more of them fill the buffer.
        if self._workers.are_shared and self._count >= self._single_until:
            wanted = math.ceil(block_len(mean, self._node.buffer_size, TASKS * task_bytes) / count)
            self._num_tasks = min(self._num_tasks + 1, max(TASKS, wanted))

    def _raise_earlier(self) -> None:
        """Raises what another stage met in a task of this one, after the elements before that."""
        if self._plan in self._workers.failures:
            self._ahead.start(self)  # unless it has, it learns what is lost
            if self._count >= self._lost_at:
                raise self._workers.failures.pop(self._plan)[1]

    def submit_tasks(self, pool: WorkerPool) -> None:
        """See `Consumer.submit_tasks`."""
        while len(self._ahead.tasks) < self._num_tasks:
            may_wait = self._ahead.tasks or not self._is_awaited
            if may_wait and pool.num_unfinished(self._worker) >= _MAX_UNFINISHED:
                return
            start: StartPoint | None = None
            if self._restart:
                # It may have objects of the main script.
                state = None if self._position is None else messages.dumps(self.state())
                start = StartPoint(state, self._count, self._from_start)
            self._restart = False
            max_elements = 1 if self._count < self._single_until else self._max_elements
            task = PipelineTask(start, min(max_elements, self._size), max_elements, self._plan)
            self._ahead.submit(self._worker, tuple(task))

    def tasks_lost(self) -> int:
        """See `Consumer.tasks_lost`."""
        answers = [task.answer for task in self._ahead.tasks if task.answer is not None]
        num_done = sum(extra[1] for *_, extra in answers if extra is not None)
        self._lost_at = max(self._lost_at, self._count + num_done)
        # An element that crashes a worker must not take others with it.
        self._single_until, self._num_tasks = self._lost_at + _SINGLE_LEN, TASKS
        self._restart = self._position is not None
        return self._count

    def _drop_pending(self) -> None:
        """Drops the tasks in flight; the next one restarts after the last pulled element."""
        self._ahead.drop(self._count)
        self._restart = True

    def _state(self, position: Position | None) -> State:
        if position is None:
            with contextlib.closing(self._local()) as stage:
                return stage.state()
        return state_at(position)

    def state(self) -> State:
        """See `Stage.state`; starts no process."""
        return self._state(self._position)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        is_there = self._is_at(state)
        if not is_there:
            self._check(state)
        self._drop_pending()
        self._failure = None
        self._ended = False
        if not is_there:
            self._count, self._from_start, self._lost_at = 0, False, 0
            self._workers.failures.pop(self._plan, None)
        self._position = of_state(state)

    def _check(self, state: State) -> None:
        """Raises what the worker would raise when `state` is restored.

        Plans that open or restore objects of the user are not checked here: only the worker runs
        those.
        """
        plan = self._node.shard(self._worker)
        if any(isinstance(node, UserDefined) or node.opens is not None for node in plan.walk()):
            return
        with contextlib.closing(self._local()) as stage:
            stage.restore(state)

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

    def _local(self) -> Stage:
        """The worker's pipeline, opened in this process at its start; nothing of it is recorded."""
        context = dataclasses.replace(self._context, recorder=Recorder())
        return open_plan(self._node.shard(self._worker), context)

    def _local_at_position(self) -> Stage:
        """The worker's pipeline in this process, at the consumer's position."""
        stage = self._local()
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
