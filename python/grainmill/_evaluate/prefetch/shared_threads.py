"""Threads that all readers of a pipeline share, so that a mixture of many parts starts no more."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from grainmill._evaluate.prefetch.thread_pool import ThreadPool
from grainmill._evaluate.prefetch.tuner import Tuner
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from grainmill._evaluate.prefetch.thread_pool import Task, Turns
    from grainmill._stats.meters import PoolUse


class SharedThreads:
    """One thread pool for each `num_threads` among the readers of a pipeline.

    Programs rely on the numbers of threads being below `num_threads`, so readers that allow
    different numbers have different pools.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        # Reentrant: garbage collection, which can occur anywhere, may make a reader leave.
        self._lock = threading.RLock()
        self._pools: dict[int, _CommonPool] = {}

    def join(self, num_threads: int) -> PoolShare:
        """A share of the pool for readers that allow `num_threads`."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._forget()
        with self._lock:
            pool = self._pools.get(num_threads)
            share = None if pool is None else PoolShare(pool, self._lock)
            if share is None or share.pool.has_ended:
                pool = self._pools[num_threads] = _CommonPool(num_threads)
                share = PoolShare(pool, self._lock)
        return share


class PoolShare:
    """What one reader uses of a common pool; see `ThreadPool` for its methods.

    Attributes:
        pool: The pool.
    """

    def __init__(self, pool: _CommonPool, lock: threading.RLock) -> None:
        self.pool = pool
        self._lock = lock
        self._tasks: deque[Task] = deque()
        self._token = object()
        pool.readers.add(self._token)

    @property
    def tuner(self) -> Tuner:
        """Decides how many threads work, for all readers."""
        return self.pool.tuner

    @property
    def turns(self) -> Turns:
        """Whether threads take turns."""
        return self.pool.turns

    @property
    def active(self) -> int:
        """How many threads may work."""
        return self.pool.active

    def use(self) -> PoolUse:
        """See `ThreadPool.use`; an equal share of the times, but for when threads had work."""
        use, num_readers = self.pool.use(), max(1, len(self.pool.readers))
        return use._replace(cpu_s=use.cpu_s / num_readers, ready_s=use.ready_s / num_readers)

    def submit(self, task: Task) -> None:
        """Queues `task` behind those of all readers."""
        self._tasks.append(task)
        self.pool.add_turn(self._tasks)

    def set_urgent(self) -> None:
        """Makes threads run this reader's tasks before those of others, as its consumer waits."""
        self.pool.urgent = self._tasks

    def drop(self) -> None:
        """Removes the reader's tasks."""
        self._tasks.clear()

    def shutdown(self) -> None:
        """Ends the threads if no other reader uses them; can be called again, by any thread."""
        with self._lock:
            self.drop()
            self.pool.readers.discard(self._token)
            if not self.pool.readers:
                self.pool.shutdown()


class _CommonPool(ThreadPool):
    """A pool whose tasks are in a queue for each reader.

    Attributes:
        tuner: Decides how many threads work.
        readers: A token for each reader that uses it.
        urgent: The tasks of the reader whose consumer waits, or waited last.
        has_ended: Whether the last reader has left.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.tuner = Tuner(self, num_threads)
        self.readers: set[object] = set()
        self.urgent: deque[Task] = deque()
        self.has_ended = False
        # For each task, in the order of their submission, the queue that it is in; more often than
        # there are tasks once urgent tasks were run before others, or tasks were dropped.
        self._turns: deque[deque[Task]] = deque()

    def add_turn(self, tasks: deque[Task]) -> None:
        """Makes a thread take a task of `tasks` when all that were submitted before are taken."""
        self._turns.append(tasks)
        self._wake_next()

    def _pop_task(self) -> Task | None:
        """See `ThreadPool`; parts of a task that runs come first, then urgent tasks."""
        task = super()._pop_task()
        if task is not None:
            return task
        tasks = self.urgent
        while True:
            try:
                return tasks.popleft()
            except IndexError as failure:
                raise_interrupt(failure)
            try:
                tasks = self._turns.popleft()
            except IndexError as failure:
                raise_interrupt(failure)
                return None

    @property
    def num_queued(self) -> int:
        """See `ThreadPool.num_queued`; an upper bound."""
        return super().num_queued + len(self._turns)

    def shutdown(self) -> None:
        """See `ThreadPool.shutdown`."""
        self.has_ended = True
        super().shutdown()
