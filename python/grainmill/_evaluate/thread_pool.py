"""Threads that do the tasks of one pipeline, oldest first, and help each other with large ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
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
    """What threads that run user functions are called; programs rely on that."""
    return f"grain-prefetch_{number}"


class Task:
    """One call on its way through a threads.

    Args:
        call: What to do.
        prepare: What to wait for before that, if anything; it is no work.

    Attributes:
        call: What to do; `None` once nobody wants it any more.
        result: What `call` returned, once `done` can be acquired.
        failure: What it raised.
        elapsed_s: How long it took, waits for storage left out.
        done: Released when the task is done or given up.
    """

    __slots__ = ("_prepare", "call", "done", "elapsed_s", "failure", "result")

    def __init__(
        self, call: Callable[[], Any], prepare: Callable[[], object] | None = None
    ) -> None:
        self.call: Callable[[], Any] | None = call
        self._prepare = prepare
        self.result: Any = None
        self.failure: BaseException | None = None
        self.elapsed_s = 0.0
        self.done = threading.Lock()
        self.done.acquire()

    def prepare(self) -> None:
        """Waits for what it needs, unless nobody wants it any more."""
        if self._prepare is not None and self.call is not None:
            try:
                self._prepare()
            except BaseException as failure:
                self.failure = failure

    def run(self) -> None:
        """Does it, unless nobody wants it any more."""
        call = self.call
        if call is not None and self.failure is None:
            began = work_clock_s()
            try:
                self.result = call()
            except BaseException as failure:
                self.failure = failure
            self.elapsed_s = work_clock_s() - began
        self.done.release()


class Totals(NamedTuple):
    """What a threads has done so far.

    Attributes:
        tasks: Tasks that are done.
        busy_s: Seconds its threads spent in tasks.
        cpu_s: Seconds of CPU they used.
        ready_s: Those, and their waits for a core.
    """

    tasks: int
    busy_s: float
    cpu_s: float
    ready_s: float


class ThreadPool:
    """Threads named `grain-prefetch_<n>` that do tasks, the oldest first.

    A thread is started when it first has something to do. The threads knows nothing of who gives it
    tasks, and its threads hold nothing else: they end with whoever owns the threads.

    Args:
        owner_is_first: Whether the one who gives the tasks does some of them itself, as thread 0.
        owner_steps_in: Whether it does some of them itself while no thread is at work.

    Attributes:
        active: How many threads may be at work; those beyond stay idle.
    """

    def __init__(self, *, owner_is_first: bool = False, owner_steps_in: bool = False) -> None:
        self.active = 1
        self._first = 1 if owner_is_first else 0  # the number of the first thread of its own
        self._owner = _Worker(0) if owner_is_first or owner_steps_in else None
        self._computed: deque[int] | None = None
        self._waiting: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._dismissed = False
        self._waking = threading.Lock()  # the owner gives tasks, and threads share theirs

    def submit(self, task: Task) -> None:
        """Has a thread do `task` once those before it are begun."""
        self._waiting.append(task)
        self._wake(1)

    def start_all(self, count: int, init: Callable[[int], object]) -> list[Task]:
        """Has `count` threads, the owner's among them if it is first, call `init(number)` first.

        Returns:
            Those calls. A thread whose call fails does nothing more; the owner's is for the
            owner to do.

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
        """Makes the calling thread the owner's, which does tasks of its own.

        Args:
            progress: Called amid those with the number of elements that were computed, on any
                thread, and the seconds that took.
        """
        _of_thread.threads = self
        _of_thread.progress = progress
        self._computed = deque()

    def note(self, num_elements: int, elapsed_s: float) -> None:
        """Takes note of elements that the calling thread has computed amid a task."""
        if self._computed is None:
            return
        self._computed.append(num_elements)
        progress: Callable[[int, float], None] | None = getattr(_of_thread, "progress", None)
        if progress is not None:
            progress(self.take_computed(), elapsed_s)

    def take_computed(self) -> int:
        """How many elements were computed since this was last asked."""
        computed = self._computed
        return sum(computed.popleft() for _ in range(len(computed))) if computed else 0

    def do_here(self, call: Callable[[], T]) -> T:
        """What `call` returns, called in the owner's thread as a task of the threads."""
        if self._owner is None:
            raise AssertionError("the owner of this threads does no tasks")
        task = Task(call)
        self._owner.do(task)
        if task.failure is not None:
            raise task.failure
        result: T = task.result
        return result

    @property
    def is_short_of_tasks(self) -> bool:
        """Whether there are threads that nothing waits for."""
        num_busy = sum(not worker.is_idle for worker in self._workers)
        return len(self._waiting) < self.active - num_busy

    def help_until(self, task: Task) -> None:
        """Does tasks in the owner's thread, `task` first, until a thread has done that."""
        owner = self._owner
        if owner is None:
            raise AssertionError("the owner of this threads does no tasks")
        with contextlib.suppress(ValueError):  # a thread has begun it
            self._waiting.remove(task)
            owner.do(task)
        while task.done.locked() and (other := self.next_task(0)) is not None:
            owner.do(other)

    def next_task(self, number: int) -> Task | None:
        """The oldest task that nobody has begun, if thread `number` may work."""
        if number < self.active:
            try:
                return self._waiting.popleft()
            except IndexError:
                pass
        return None

    def resize(self, active: int) -> None:
        """Lets `active` threads work from now on; those beyond finish the task in hand."""
        self.active = active
        self._wake(len(self._waiting))

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What `calls` return, in order; idle threads help with them.

        For threads of this threads, in the middle of a task.

        Raises:
            BaseException: What the first call that failed raised.
        """
        shared = _Shared(calls)
        helpers = min(self.active, len(calls)) - 1
        self._waiting.extendleft([Task(shared.work) for _ in range(helpers)])
        self._wake(helpers)
        return shared.results()

    def _wake(self, count: int) -> None:
        with self._waking:
            self._wake_some(count)

    def _wake_some(self, count: int) -> None:
        first = self._first
        for place in range(self.active - first):
            if count <= 0:
                return
            if place == len(self._workers):
                worker = _Worker(place + first)
                try:
                    worker.start(self)
                except RuntimeError:  # those there are do it all
                    if not place + first:
                        raise
                    self.active = place + first
                    return
                self._workers.append(worker)
                if self._dismissed:  # meanwhile, so that this one was not told
                    worker.stop()
                count -= 1
            elif self._workers[place].is_idle:
                self._workers[place].wake()
                count -= 1

    def totals(self) -> Totals:
        """What has been done so far, the tasks under way included as far as they are."""
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
        """Forgets the tasks that no thread has begun."""
        self._waiting.clear()

    def dismiss(self) -> None:
        """Lets the threads end once they are through with the task in hand; takes no lock.

        Any thread may do so, and a garbage collection, which comes anywhere.
        """
        self._dismissed = True
        self.drop()
        for worker in self._workers.copy():
            worker.stop()


_of_thread = threading.local()


def current_thread_pool() -> ThreadPool | None:
    """The threads that the calling thread does a task of, if it does."""
    threads: ThreadPool | None = getattr(_of_thread, "threads", None)
    return threads


class _Worker:
    """A thread of a threads, and what it has done.

    Attributes:
        is_idle: Whether it waits to be woken.
        num_done: Tasks that it has done.
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
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # False: it is to end
        self._clock: ThreadClock | None = None
        self._busy_s = 0.0
        self._since: float | None = None

    def start(self, threads: ThreadPool, init: Task | None = None) -> None:
        """Starts it, at work; with `init`, once that is done and did not fail."""

        def work() -> None:
            if init is not None:
                init.run()
                if init.failure is not None:
                    return
            self._work(threads)

        start_thread(work, name=thread_name(self._number), stop=self.stop)

    def wake(self) -> None:
        """Has it look for tasks."""
        self.is_idle = False
        self._wakes.put(True)  # noqa: FBT003 - one of two messages

    def stop(self) -> None:
        """Has it end."""
        self._wakes.put(False)  # noqa: FBT003 - one of two messages

    def _work(self, threads: ThreadPool) -> None:
        _of_thread.threads = threads
        while True:
            while (task := threads.next_task(self._number)) is not None:
                self.do(task)
                del task
            self.is_idle = True
            # Who gave a task before this thread was known to be idle has not woken it.
            task = threads.next_task(self._number)
            if task is not None:
                self.is_idle = False
                self.do(task)
                del task
            elif self._wakes.get():
                self.is_idle = False
            else:
                return

    def do(self, task: Task) -> None:
        """Does `task` in the calling thread."""
        if self._clock is None:
            self._clock = ThreadClock()
        task.prepare()
        self._since = time.perf_counter()
        task.run()
        self._since = None
        self._busy_s += task.elapsed_s
        self.num_done += 1

    def busy_until(self, now: float) -> float:
        """Seconds in tasks; of the one under way, waits for storage too."""
        since = self._since
        return self._busy_s + (0.0 if since is None else max(0.0, now - since))

    def times(self) -> ThreadTimes:
        """Its times since its first task; where threads have no clock, seconds in tasks."""
        if self._clock is None or not self._clock.is_known:
            return ThreadTimes(self._busy_s, self._busy_s)
        return self._clock.read()


class _Shared:
    """Calls that several threads do together, each the next that nobody has begun."""

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
        """Does calls until none is left that nobody has begun."""
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
        """Helps, waits for the others, and returns what came of it."""
        self.work()
        self._done.acquire()
        if self._failures:
            raise self._failures[min(self._failures)]
        return self._results
