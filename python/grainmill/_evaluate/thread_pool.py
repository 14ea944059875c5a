"""A pool of threads that run the tasks of one pipeline, oldest first, and share large ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from grainmill._evaluate.storage import work_clock_s
from grainmill._evaluate.thread_clock import ThreadClock, ThreadTimes
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def thread_name(number: int) -> str:
    """The name of a thread that runs user functions; programs rely on it."""
    return f"grain-prefetch_{number}"


class Task:
    """A call that a thread pool makes.

    Args:
        call: What to call.
        prepare: What to call before that, to wait for storage; it does not count as work.

    Attributes:
        call: What to call; `None` once cancelled.
        result: What `call` returned, once `done` can be acquired.
        failure: What `call` or `prepare` raised.
        elapsed_s: How long `call` took, without waits for storage.
        waited_s: How long `prepare` and `call` waited for storage.
        thread: The identifier of the thread that runs it, once one does.
        done: Released when the task is done or cancelled.
    """

    __slots__ = (
        "_prepare",
        "call",
        "done",
        "elapsed_s",
        "failure",
        "result",
        "thread",
        "waited_s",
    )

    def __init__(
        self, call: Callable[[], Any], prepare: Callable[[], object] | None = None
    ) -> None:
        self.call: Callable[[], Any] | None = call
        self._prepare = prepare
        self.result: Any = None
        self.failure: BaseException | None = None
        self.elapsed_s = 0.0
        self.waited_s = 0.0
        self.thread: int | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def prepare(self) -> None:
        """Calls the `prepare` that was given, unless cancelled."""
        if self._prepare is not None and self.call is not None:
            started_s = time.perf_counter()
            try:
                self._prepare()
            except BaseException as failure:
                self.failure = failure
            self.waited_s = time.perf_counter() - started_s

    def run(self) -> None:
        """Calls `call`, unless cancelled."""
        call = self.call
        if call is not None and self.failure is None:
            started_s, work_started_s = time.perf_counter(), work_clock_s()
            try:
                self.result = call()
            except BaseException as failure:
                self.failure = failure
            self.elapsed_s = work_clock_s() - work_started_s
            self.waited_s += max(0.0, time.perf_counter() - started_s - self.elapsed_s)
        self.done.release()


class Totals(NamedTuple):
    """The work of a pool so far.

    Attributes:
        tasks: Tasks that are done.
        busy_s: Seconds its threads spent in tasks.
        cpu_s: CPU seconds they used.
        ready_s: CPU seconds, and seconds they waited for a core.
    """

    tasks: int
    busy_s: float
    cpu_s: float
    ready_s: float


class ThreadPool:
    """Threads named `grain-prefetch_<n>` that run tasks, the oldest first.

    A thread is started when it first has a task. Threads refer only to the pool, and the pool not
    to the source of its tasks; so they end when the pool's owner is gone.

    Args:
        owner_is_first: Whether the owner's thread runs some tasks itself, as thread 0.
        owner_steps_in: Whether the owner's thread runs some tasks itself while no thread works.

    Attributes:
        active: How many threads may work; the others stay idle.
    """

    def __init__(self, *, owner_is_first: bool = False, owner_steps_in: bool = False) -> None:
        self.active = 1
        self._first = 1 if owner_is_first else 0  # the number of the pool's first own thread
        self._owner = _Worker(0) if owner_is_first or owner_steps_in else None
        self._computed: deque[int] | None = None
        self._queue: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._is_shut_down = False
        self._wake_lock = threading.Lock()  # held to start or wake threads

    def submit(self, task: Task) -> None:
        """Queues `task`."""
        self._queue.append(task)
        self._wake(1)

    def start_all(self, count: int, init: Callable[[int], object]) -> list[Task]:
        """Starts `count` threads with a call of `init(number)`; the owner's is one if it is first.

        Returns:
            The tasks of those calls. A thread whose call fails ends; the owner must run its own.

        Raises:
            RuntimeError: No more threads can be started.
        """
        tasks = [Task(functools.partial(init, number)) for number in range(count)]
        for number in range(self._first, count):
            worker = _Worker(number)
            worker.start(self, tasks[number])
            self._workers.append(worker)
        return tasks

    def enter(self, progress: Callable[[int, float], None]) -> None:
        """Makes the calling thread the owner's, so that tasks run in it can be shared.

        Args:
            progress: Called during those with the number of elements computed, on any thread, and
                the seconds that took.
        """
        _thread_local.pool = self
        _thread_local.progress = progress
        self._computed = deque()

    def record(self, num_elements: int, elapsed_s: float) -> None:
        """Records elements that the calling thread has computed within a task."""
        if self._computed is None:
            return
        self._computed.append(num_elements)
        progress: Callable[[int, float], None] | None = getattr(_thread_local, "progress", None)
        if progress is not None:
            progress(self.take_computed(), elapsed_s)

    def take_computed(self) -> int:
        """The number of elements computed since the last call."""
        computed = self._computed
        return sum(computed.popleft() for _ in range(len(computed))) if computed else 0

    def run_here(self, call: Callable[[], T]) -> T:
        """Calls `call` in the owner's thread as a task of the pool, and returns its result."""
        if self._owner is None:
            raise AssertionError("the owner of this pool runs no tasks")
        task = Task(call)
        self._owner.do(task)
        if task.failure is not None:
            raise task.failure
        result: T = task.result
        return result

    @property
    def num_queued(self) -> int:
        """The number of tasks that no thread has started."""
        return len(self._queue)

    @property
    def is_short_of_tasks(self) -> bool:
        """Whether there are fewer queued tasks than idle threads."""
        num_busy = sum(not worker.is_idle for worker in self._workers)
        return self.num_queued < self.active - num_busy

    def help_until(self, task: Task) -> None:
        """Runs tasks in the owner's thread, `task` first, until `task` is done."""
        owner = self._owner
        if owner is None:
            raise AssertionError("the owner of this pool runs no tasks")
        with contextlib.suppress(ValueError):  # a thread has started it
            self._queue.remove(task)
            owner.do(task)
        while task.done.locked() and (other := self.next_task(0)) is not None:
            owner.do(other)

    def next_task(self, number: int) -> Task | None:
        """Removes and returns the oldest task of the queue, if thread `number` may work."""
        if number < self.active:
            try:
                return self._queue.popleft()
            except IndexError:
                pass
        return None

    def resize(self, active: int) -> None:
        """Makes `active` threads work from now on; others finish their current task."""
        self.active = active
        self._wake(self.num_queued)

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Makes `calls`, with the help of idle threads, and returns their results in order.

        For use within a task, by threads of this pool.

        Raises:
            BaseException: What the first failing call raised.
        """
        shared = _SharedCalls(calls)
        helpers = min(self.active, len(calls)) - 1
        self._queue.extendleft([Task(shared.work) for _ in range(helpers)])
        self._wake(helpers)
        return shared.results()

    def _wake(self, count: int) -> None:
        with self._wake_lock:
            self._wake_locked(count)

    def _wake_locked(self, count: int) -> None:
        first = self._first
        for place in range(self.active - first):
            if count <= 0:
                return
            if place == len(self._workers):
                worker = _Worker(place + first)
                try:
                    worker.start(self)
                except RuntimeError:  # the threads that exist run all tasks
                    if not place + first:
                        raise
                    self.active = place + first
                    return
                self._workers.append(worker)
                if self._is_shut_down:  # meanwhile, without stopping this one
                    worker.stop()
                count -= 1
            elif self._workers[place].is_idle:
                self._workers[place].wake()
                count -= 1

    def totals(self) -> Totals:
        """The work so far, including that of running tasks."""
        workers = self._workers if self._owner is None else [self._owner, *self._workers]
        now = time.perf_counter()
        times = [worker.times() for worker in workers]
        return Totals(
            sum(worker.num_done for worker in workers),
            sum(worker.busy_until(now) for worker in workers),
            sum(of_worker.cpu_s for of_worker in times),
            sum(of_worker.ready_s for of_worker in times),
        )

    def drop(self) -> None:
        """Removes all tasks from the queue."""
        self._queue.clear()

    def shutdown(self) -> None:
        """Ends the threads after their current tasks; waits for nothing and takes no lock.

        Any thread may call it, also within a garbage collection, which can occur anywhere.
        """
        self._is_shut_down = True
        self.drop()
        for worker in self._workers.copy():
            worker.stop()


_thread_local = threading.local()


def current_thread_pool() -> ThreadPool | None:
    """The pool for which the calling thread runs a task, if any."""
    pool: ThreadPool | None = getattr(_thread_local, "pool", None)
    return pool


class _Worker:
    """A thread of a pool, and its work so far.

    Attributes:
        is_idle: Whether it waits to be woken.
        num_done: Tasks that it has run.
    """

    __slots__ = (
        "_busy_s",
        "_clock",
        "_cpu_s",
        "_number",
        "_since",
        "_wakes",
        "is_idle",
        "num_done",
    )

    def __init__(self, number: int) -> None:
        self.is_idle = False
        self.num_done = 0
        self._number = number
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # `False` ends the thread
        self._clock: ThreadClock | None = None
        self._busy_s = 0.0
        self._since: float | None = None

    def start(self, pool: ThreadPool, init: Task | None = None) -> None:
        """Starts the thread, which runs `init` first, if given, and ends if that fails."""

        def work() -> None:
            if init is not None:
                init.run()
                if init.failure is not None:
                    return
            self._work(pool)

        start_thread(work, name=thread_name(self._number), stop=self.stop)

    def wake(self) -> None:
        """Makes it look for tasks."""
        try:
            self.is_idle = False
            self._wakes.put(True)  # noqa: FBT003 - one of two messages
        except BaseException:  # an interrupt: nobody else would wake it
            self._wakes.put(True)  # noqa: FBT003 - twice does no harm
            raise

    def stop(self) -> None:
        """Makes it end."""
        self._wakes.put(False)  # noqa: FBT003 - one of two messages

    def _work(self, pool: ThreadPool) -> None:
        _thread_local.pool = pool
        process = os.getpid()
        while True:
            while (task := pool.next_task(self._number)) is not None:
                self.do(task)
                del task
                if os.getpid() != process:  # a child that a user's function forked, and returned in
                    os._exit(0)
            self.is_idle = True
            # A task submitted before `is_idle` was set has not woken this thread.
            task = pool.next_task(self._number)
            if task is not None:
                self.is_idle = False
                self.do(task)
                del task
            elif self._wakes.get():
                self.is_idle = False
            else:
                return

    def do(self, task: Task) -> None:
        """Runs `task` in the calling thread."""
        if self._clock is None:
            self._clock = ThreadClock()
        task.thread = threading.get_ident()
        task.prepare()
        self._since = time.perf_counter()
        task.run()
        self._since = None
        self._busy_s += task.elapsed_s
        self.num_done += 1

    def busy_until(self, now: float) -> float:
        """Seconds in tasks; of the running one, waits for storage included."""
        since = self._since
        return self._busy_s + (0.0 if since is None else max(0.0, now - since))

    def times(self) -> ThreadTimes:
        """Its times since its first task; seconds in tasks if threads have no clock."""
        if self._clock is None or not self._clock.is_known:
            return ThreadTimes(self._busy_s, self._busy_s)
        return self._clock.read()


class _SharedCalls:
    """Calls that several threads make together; each takes the next call in turn."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls
        self._numbers = itertools.count()
        self._results: list[Any] = [None] * len(calls)
        self._failures: dict[int, BaseException] = {}
        self._num_left = len(calls)
        self._counting = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def work(self) -> None:
        """Makes calls until all have been started."""
        for number in self._numbers:
            if number >= len(self._calls):
                return
            try:
                self._results[number] = self._calls[number]()
            except BaseException as failure:
                self._failures[number] = failure
            with self._counting:
                self._num_left -= 1
                if not self._num_left:
                    self._done.release()

    def results(self) -> list[Any]:
        """Makes calls, waits for the other threads, and returns all results."""
        self.work()
        self._done.acquire()
        if self._failures:
            raise self._failures[min(self._failures)]
        return self._results
