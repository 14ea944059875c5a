"""A pool of threads that run the tasks of one pipeline, oldest first, and share large ones."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections import deque
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.work_clock import work_clock_s
from grainmill._interrupts import raise_interrupt
from grainmill._stats import timeline
from grainmill._stats.meters import PoolUse
from grainmill._stats.thread_clock import ThreadClock, ThreadTimes
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
# Shorter waits for storage are not shown: the bytes were there.
_SHOWN_S: Final = 0.00001


def thread_name(number: int) -> str:
    """The name of a thread that runs user functions; programs rely on it."""
    return f"grain-prefetch_{number}"


class Turns:
    """Whether the threads of a pool take turns.

    Attributes:
        are_taken: Whether a function of the user has asked which thread it runs on.
    """

    __slots__ = ("are_taken",)

    def __init__(self) -> None:
        self.are_taken = False


class NumberedThread(threading.Thread):
    """A thread with the name of `thread_name`; notices when what it runs asks which one it is.

    Attributes:
        turns: Those of the pool whose tasks it runs.
    """

    turns: Turns | None = None

    @property
    def name(self) -> str:
        """Its name."""
        self._notice()
        return super().name

    @name.setter
    def name(self, name: str) -> None:
        threading.Thread.name.fset(self, name)  # type: ignore[attr-defined]

    @property
    def ident(self) -> int | None:
        """Its identifier."""
        self._notice()
        return super().ident

    @property
    def native_id(self) -> int | None:
        """Its identifier in the system."""
        self._notice()
        return super().native_id

    def _notice(self) -> None:
        if self.turns is not None and super().ident == threading.get_ident():
            self.turns.are_taken = True


def _runs_tasks_of(pool: ThreadPool) -> None:
    """Makes the calling thread notice for `pool` when a function asks which it is."""
    thread = threading.current_thread()
    if isinstance(thread, NumberedThread):
        thread.turns = pool.turns


class Task:
    """A call that a thread pool makes.

    Args:
        call: What to call.
        prepare: What to call before that, to wait for storage; it does not count as work.
        num_records: How many records its elements are made of.
        elements: Which elements it computes, for a timeline.

    Attributes:
        call: What to call; `None` once cancelled.
        num_records: How many records its elements are made of.
        result: What `call` returned, once `done` can be acquired.
        failure: What `call` or `prepare` raised.
        elapsed_s: How long `call` took, without waits for storage.
        cpu_s: The CPU seconds of `call`.
        waited_s: How long `prepare` and `call` waited for storage.
        thread: The identifier of the thread that runs it, once one does.
        done: Released when the task is done or cancelled.
    """

    __slots__ = (
        "_elements",
        "_prepare",
        "call",
        "cpu_s",
        "done",
        "elapsed_s",
        "failure",
        "num_records",
        "result",
        "thread",
        "waited_s",
    )

    def __init__(
        self,
        call: Callable[[], Any],
        prepare: Callable[[], object] | None = None,
        num_records: int = 0,
        elements: tuple[int, int] | None = None,
    ) -> None:
        self._elements = elements
        self.call: Callable[[], Any] | None = call
        self.num_records = num_records
        self._prepare = prepare
        self.result: Any = None
        self.failure: BaseException | None = None
        self.elapsed_s = self.cpu_s = 0.0
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
            ended_s = time.perf_counter()
            self.waited_s = ended_s - started_s
            if self.waited_s > _SHOWN_S and (taken := timeline.current) is not None:
                taken.add("wait for storage", "read", started_s, ended_s)

    def run(self) -> bool:
        """Calls `call`, unless cancelled; returns whether nothing failed."""
        call = self.call
        if call is not None and self.failure is None:
            started_s, work_started_s = time.perf_counter(), work_clock_s()
            cpu_started_s = time.thread_time()
            try:
                self.result = call()
            except BaseException as failure:
                self.failure = failure
            self.cpu_s = time.thread_time() - cpu_started_s
            self.elapsed_s = work_clock_s() - work_started_s
            ended_s = time.perf_counter()
            waited_s = max(0.0, ended_s - started_s - self.elapsed_s)
            self.waited_s += waited_s
            if self._elements is not None and (taken := timeline.current) is not None:
                taken.blocks_s += ended_s - started_s
                if taken.blocks_s >= timeline.LEAST_S:
                    taken.add_block(*self._elements, started_s, ended_s, waited_s)
        succeeded = self.failure is None
        self.done.release()
        return succeeded

    def outcome(self) -> tuple[Any, BaseException | None]:
        """What `call` returned and what it raised, once; afterwards nothing here refers to them.

        The thread may still be on its way out of `run`. The traceback of a failure refers to that
        frame, and so to this task: together they would live until garbage collection.
        """
        outcome = self.result, self.failure
        self.result = self.failure = None
        return outcome


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

    Where one thread is enough, that is always the same one, whose core has its data in the cache.
    But programs may keep something per thread that has to see its share of the elements, such as a
    stream of data. Once a function of the user has asked its thread for a name or identifier, each
    gets as many records as any other: the next task is for the idle thread that has had the fewest,
    once the one that had the last task has had its turn. `threading.get_ident` and
    `threading.local` are not noticed, nor need be by functions: what the busy thread keeps is all.

    A thread is started when it first has a task. Threads refer only to the pool, and the pool not
    to the source of its tasks; so they end when the pool's owner is gone.

    Args:
        num_threads: How many threads to have at most.

    Attributes:
        active: How many threads may work at the same time.
        turns: Whether threads take turns.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.active = 1
        self.turns = Turns()
        self._num_threads = num_threads
        self._owner = _Worker(0)
        self._computed: deque[int] | None = None
        self._queue: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._num_running = 0  # threads with a task
        self._turn = 0  # the number of the thread that had the last task
        self._turn_records = 0  # how many records it had in this turn
        self._turn_len = max(1, tuning.ROUND_LEN // num_threads)
        self._is_shut_down = False
        # Held to choose, start and wake threads. Only threads of the pool change what they find by
        # `next_task`, so an interrupt, which comes in the main thread, leaves it whole.
        self._lock = threading.Lock()

    def submit(self, task: Task) -> None:
        """Queues `task`."""
        self._queue.append(task)
        self._wake_next()

    def start_all(self, count: int, init: Callable[[int], object]) -> list[Task]:
        """Starts `count` threads with a call of `init(number)`.

        Returns:
            The tasks of those calls. A thread whose call fails ends.

        Raises:
            RuntimeError: No more threads can be started.
        """
        tasks = [Task(functools.partial(init, number)) for number in range(count)]
        with self._lock:
            for number, task in enumerate(tasks):
                worker = _Worker(number)
                worker.start(self, task)
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
        task = Task(call)
        _runs_tasks_of(self)
        self._owner.do(task)
        result, failure = task.outcome()
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    @property
    def num_queued(self) -> int:
        """The number of tasks that no thread has started."""
        return len(self._queue)

    @property
    def is_short_of_tasks(self) -> bool:
        """Whether there are fewer queued tasks than idle threads."""
        return self.num_queued < self.active - self._num_running

    def next_task(self, worker: _Worker) -> Task | None:
        """Ends the task of `worker`, and removes and returns the next one if it is for that thread.

        Wakes the thread that another task is for, if there is one.
        """
        task = None
        with self._lock:
            self._num_running -= worker.is_running
            worker.is_running = worker.is_woken = False
            if self._next_thread() == worker.number and (task := self._pop_task()) is not None:
                worker.is_running = True
                self._num_running += 1
                if self._turn != worker.number:
                    self._turn, self._turn_records = worker.number, 0
                self._turn_records += task.num_records
                worker.num_records += task.num_records
            self._wake_locked()
        return task

    def _pop_task(self) -> Task | None:
        """Removes and returns the oldest task."""
        try:
            return self._queue.popleft()
        except IndexError as failure:  # `drop` takes no lock
            raise_interrupt(failure)
            return None

    def _next_thread(self) -> int | None:
        """The number of the thread that the next task is for; it may have to be started first."""
        workers = self._workers
        if self._num_running >= self.active or self._num_running >= self._num_threads:
            return None
        if not self.turns.are_taken:
            numbers = (worker.number for worker in workers if not worker.is_running)
            return next(numbers, len(workers))
        goes_on = self._turn < len(workers) and self._turn_records < self._turn_len
        if goes_on and not workers[self._turn].is_running:
            return self._turn
        if len(workers) < self._num_threads:
            return len(workers)
        after = workers[self._turn + 1 :] + workers[: self._turn + 1]
        idle = [worker for worker in after if not worker.is_running]
        return min(idle, key=attrgetter("num_records")).number

    def resize(self, active: int) -> None:
        """Makes `active` threads work from now on; others finish their current task."""
        self.active = active
        self._wake_next()

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Makes `calls`, with the help of idle threads, and returns their results in order.

        For use within a task, by threads of this pool.

        Raises:
            BaseException: What the first failing call raised.
        """
        shared = _SharedCalls(calls)
        helpers = min(self.active, len(calls)) - 1
        self._queue.extendleft([Task(shared.work) for _ in range(helpers)])
        self._wake_next()
        return shared.results()

    def _wake_next(self) -> None:
        with self._lock:
            self._wake_locked()

    def _wake_locked(self) -> None:
        """Wakes the thread that the next task is for; once it has that, it wakes the next one."""
        number = self._next_thread() if self.num_queued else None
        if number is None:
            return
        if number < len(self._workers):
            self._workers[number].wake()
            return
        worker = _Worker(number)
        try:
            worker.start(self)
            self._workers.append(worker)
        except BaseException as failure:
            worker.stop()  # if this is an interrupt, it may have started
            del self._workers[number:]
            raise_interrupt(failure)
            if not number or not isinstance(failure, RuntimeError):
                raise
            # The threads that exist run all tasks.
            self.active = self._num_threads = number
            self._wake_locked()
        if self._is_shut_down:  # meanwhile, without stopping this one
            worker.stop()

    def totals(self) -> Totals:
        """The work so far, including that of running tasks."""
        workers = [self._owner, *self._workers]
        now = time.perf_counter()
        times = [worker.times() for worker in workers]
        return Totals(
            sum(worker.num_done for worker in workers),
            sum(worker.busy_until(now) for worker in workers),
            sum(of_worker.cpu_s for of_worker in times),
            sum(of_worker.ready_s for of_worker in times),
        )

    def use(self) -> PoolUse:
        """What its own threads did, without the owner's."""
        workers, now = self._workers.copy(), time.perf_counter()
        return PoolUse(
            self.active,
            self._num_threads,
            sum(worker.times().cpu_s for worker in workers),
            sum(worker.times().ready_s for worker in workers),
            sum(worker.busy_until(now) for worker in workers),
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
        number: That of its name.
        is_running: Whether it has a task.
        is_woken: Whether it was woken and has not looked for a task since.
        num_done: Tasks that it has run.
        num_records: How many records its tasks had.
    """

    __slots__ = (
        "_busy_s",
        "_clock",
        "_cpu_s",
        "_since",
        "_wakes",
        "is_running",
        "is_woken",
        "num_done",
        "num_records",
        "number",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_running = self.is_woken = False
        self.num_done = self.num_records = 0
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # `False` ends the thread
        self._clock: ThreadClock | None = None
        self._busy_s = 0.0
        self._since: float | None = None

    def start(self, pool: ThreadPool, init: Task | None = None) -> None:
        """Starts the thread, which runs `init` first, if given, and ends if that fails."""

        def work() -> None:
            if init is not None and not init.run():
                return
            self._work(pool)

        name = thread_name(self.number)
        start_thread(work, name=name, stop=self.stop, kind=NumberedThread)

    def wake(self) -> None:
        """Makes it look for a task."""
        if not self.is_woken:
            self._wakes.put(True)  # noqa: FBT003 - one of two messages
            self.is_woken = True  # an interrupt before this only wakes it twice

    def stop(self) -> None:
        """Makes it end."""
        self._wakes.put(False)  # noqa: FBT003 - one of two messages

    def _work(self, pool: ThreadPool) -> None:
        _thread_local.pool = pool
        _runs_tasks_of(pool)
        process = os.getpid()
        while True:
            while (task := pool.next_task(self)) is not None:
                self.do(task)
                del task
                if os.getpid() != process:  # a child that a user's function forked, and returned in
                    os._exit(0)
            if not self._wakes.get():
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
        """Makes calls, waits for the other threads, and returns all results, once."""
        self.work()
        self._done.acquire()
        failures, results = self._failures, self._results
        self._failures, self._results = {}, []  # see `Task.outcome`
        if failures:
            raise failures[min(failures)]
        return results
