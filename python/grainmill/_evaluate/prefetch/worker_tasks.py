"""Worker processes, and tasks for them: sent ahead, their results taken in order."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from grainmill._evaluate.prefetch.ahead import Ahead
from grainmill._native import num_cores
from grainmill._plan.closing import closed_error
from grainmill._stats import timeline
from grainmill._stats.thread_clock import ThreadUse
from grainmill._workers.failures import WorkerError
from grainmill._workers.pool import PendingResult, WorkerPool
from grainmill._workers.worker_group import ForkUnavailableError, disable_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.node import Node
    from grainmill._plan.options import ReadOptions
    from grainmill._stats.meters import Recorder
    from grainmill._workers.pool import Result


MIN_PROCESSES = 32
"""As many workers, or as there are cores if these are more, run before any are shared."""


class Workers:
    """Workers that are started when first needed, and again after one has died.

    Args:
        new_pool: Starts them; its argument says whether they are the first.

    Attributes:
        cancelled: Whether `cancel` was called.
        num_starting: How many results until all workers have returned one, about.
        waited: Takes the seconds of waits for tasks of a plan.
        failures: For a plan, the elements at which a worker died or hung while another consumer
            waited for it, and the error.
    """

    def __init__(self, new_pool: Callable[[bool], WorkerPool]) -> None:
        self.cancelled = False
        self.num_starting = 0
        self.waited: dict[int, Callable[[float], object]] = {}
        self.failures: dict[int, tuple[tuple[int, int], WorkerError]] = {}
        self._new_pool = new_pool
        self._pool: WorkerPool | None = None
        self._num_pools = 0

    @classmethod
    def of(
        cls,
        known: dict[Any, list[Any]],
        num_workers: int,
        asked: Sequence[Any],
        new: Callable[[], Self],
    ) -> Self:
        """`new` ones, or those in `known` that who asked for the same may share.

        They are shared in turn once there are as many as are useful. Those that run know all their
        plans. Programs rely on the numbers of workers being below `num_workers`.
        """
        key = (cls, *(id(value) if callable(value) else value for value in asked))
        groups: list[Self] = [each for each in known.get(key, ()) if not each.were_started]
        if len(groups) * num_workers < max(MIN_PROCESSES, num_cores()):
            workers = new()
        else:
            workers = groups.pop(0)
        known[key] = [*groups, workers]
        return workers

    @property
    def were_started(self) -> bool:
        """Whether they run, or did."""
        return bool(self._num_pools)

    def pool(self) -> WorkerPool:
        """The running workers, started if there are none.

        Raises:
            ValueError: `cancel` was called.
        """
        if not self.cancelled and (self._pool is None or self._pool.closed):
            self._num_pools += 1
            self._pool = self._new_pool(self._num_pools == 1)
            self.num_starting = self._pool.num_workers
        if self.cancelled or self._pool is None:  # `cancel` may have found no pool yet
            raise closed_error()
        return self._pool

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

    def give_up(self) -> None:
        """Ends them as one has died, or an interrupt may have lost a message."""
        if not self.cancelled:  # else the closing thread waits for them
            self.close()


def asked_for(options: ReadOptions | MultiprocessingOptions, but: str) -> list[Any]:
    """The values of all options but one."""
    names = [field.name for field in dataclasses.fields(options)]
    return [getattr(options, name) for name in names if name != but]


class Consumer(Protocol):
    """Who submits tasks and takes their results."""

    def submit_tasks(self, pool: WorkerPool) -> None:
        """Submits tasks until enough are ahead."""

    def tasks_lost(self) -> int:
        """Notes that all tasks ended with their workers; returns the position to start at."""


class WorkerTasks(Ahead[PendingResult]):
    """The tasks of one consumer for workers, which may have tasks of others, too.

    If one dies, or an interrupt may have lost a message, all are ended, and with them all tasks:
    new ones get those again. The consumer is passed to each call: kept here, it would live until
    the next garbage collection.

    Args:
        workers: The workers.
        node: The consumer's node.
        recorder: Takes their reports, and the waits while they start.
        waited: Takes the seconds of each wait for a task of its plan.
        plan: The number of that.
    """

    def __init__(
        self,
        workers: Workers,
        node: Node,
        recorder: Recorder,
        waited: Callable[[float], object],
        plan: int = 0,
    ) -> None:
        super().__init__()
        self._workers = workers
        self._node, self._recorder = node, recorder
        self._plan = plan
        workers.waited[plan] = waited
        self._pool: WorkerPool | None = None  # which has the tasks

    def submit(self, worker: int, task: Any, element_range: tuple[int, int] | None = None) -> None:
        """Sends a task to a worker; for `Consumer.submit_tasks`."""
        pool = self._pool or self._workers.pool()
        try:
            self.add(pool.submit(worker, task, element_range, self._plan))
        except BaseException:
            self._workers.give_up()
            raise

    def start(self, consumer: Consumer) -> None:
        """Makes workers run and `consumer` submit tasks."""
        pool = self._workers.pool()
        if pool is not self._pool:
            if self._pool is not None:
                self.drop(consumer.tasks_lost())
            self._pool = pool
        consumer.submit_tasks(pool)

    def take(self, consumer: Consumer) -> tuple[Result, int]:
        """Waits for the result of the first task, and removes that; also returns its `count`.

        Raises:
            BaseException: A worker has died, or an interrupt came. The next call starts new ones.
                If it died in a task of another plan, this call does, and the consumer of that gets
                the error, at the place of the task.
        """
        while True:
            pool = self._pool
            if not self.tasks or pool is None or pool.closed:
                self.start(consumer)
                continue
            first = self.tasks[0]
            self._raise_earlier(first)
            try:
                result = self._wait(pool, first)
                return result, self.tasks.popleft().count
            except BaseException as failure:
                blamed = pool.oldest_task(first.worker) or first
                self._workers.give_up()
                if not self._workers.cancelled:
                    self.drop(consumer.tasks_lost())
                if isinstance(failure, ForkUnavailableError):
                    disable_fork(failure)
                elif isinstance(failure, WorkerError) and blamed.plan != first.plan:
                    met = blamed.element_range or (0, 0), failure.with_traceback(None)
                    self._workers.failures[blamed.plan] = met
                else:
                    raise

    def _raise_earlier(self, first: PendingResult) -> None:
        """Raises what another consumer met in a task of this plan, once that is the next one.

        If tasks do not say what their elements are, the consumer does that.
        """
        (start, last), failure = self._workers.failures.get(first.plan, ((0, -1), None))
        position = -1 if first.element_range is None else first.element_range[0]
        if failure is not None and position >= start:
            del self._workers.failures[first.plan]
            if position <= last:
                raise failure

    def _wait(self, pool: WorkerPool, pending: PendingResult) -> Result:
        """Waits for a result; records for how long, and the report that came with it."""
        workers = self._workers
        if pending.is_done:
            result = pool.wait(pending)
        else:
            use = ThreadUse() if workers.num_starting > 0 else None
            started_s = time.perf_counter()
            awaited = pool.oldest_task(pending.worker) or pending
            result = pool.wait(pending)
            ended_s = time.perf_counter()
            waited_s = ended_s - started_s
            if (taken := timeline.current) is not None:
                taken.add(f"wait for worker {pending.worker}", "wait", started_s, ended_s)
            workers.waited[awaited.plan](waited_s)
            if use is not None:
                self._recorder.started(self._node, waited_s, use.read())
        workers.num_starting -= 1
        report = result.extra[-1] if result.extra else None
        if report is not None:
            self._recorder.report(self._node, pending.worker, report)
        return result

    def drop(self, position: int) -> None:
        """See `Ahead.drop`."""
        pool, self._pool = self._pool, None
        if pool is not None and not pool.closed:
            for pending in self.tasks:
                pool.discard(pending)
        super().drop(position)
