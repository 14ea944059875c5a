"""The parent's side of a pool of workers: submits tasks, receives results, detects failures.

A pool is a zygote (`zygote.py`) and the workers forked from it, each connected by a socket. Small
messages use the sockets; payload lies in shared slots. One thread at a time submits tasks and
takes results; any thread may close the pool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._stats import timeline
from grainmill._stats.stalls import Awaited, Stall
from grainmill._threads import call_on_new_thread, may_wait
from grainmill._workers import failures, messages, wire
from grainmill._workers.worker import PLAN_MARKS
from grainmill._workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from grainmill._plan.tracebacks import CodePlace
    from grainmill._workers.limits import Limits
    from grainmill._workers.worker import Job


# As many tasks can be sent to a worker that takes none and waits until its results are taken.
_FEW_TASKS = 4
# How often is looked whether there is space for another.
_SPACE_S = 0.01


class Result(NamedTuple):
    """The result of a task, in the parent; see `worker.Outcome`.

    Attributes:
        elements: The elements computed before `failure`.
        failure: The exception that the next element raised, if any.
        extra: Whatever else the job reported.
        byte_len: Shared memory that the elements take.
    """

    elements: list[Any]
    failure: BaseException | None
    extra: Any
    byte_len: int


class PendingResult:
    """A task that was submitted to a worker.

    Attributes:
        number: Tasks are numbered in the order of submission, from 1.
        worker: The number of the worker that computes it.
        plan: The number of the plan that its elements belong to.
        element_range: The numbers of its first and last element, if they are known.
        answer: What the worker sent, until it is taken.
        discarded: Whether the answer is discarded.
    """

    __slots__ = ("answer", "discarded", "element_range", "number", "plan", "worker")

    def __init__(
        self, number: int, worker: int, plan: int, element_range: tuple[int, int] | None
    ) -> None:
        self.number = number
        self.worker = worker
        self.plan = plan
        self.element_range = element_range
        self.answer: tuple[Any, ...] | None = None
        self.discarded = False

    @property
    def count(self) -> int:
        """Its number of elements, where that is known."""
        return (
            0 if self.element_range is None else self.element_range[1] - self.element_range[0] + 1
        )

    @property
    def is_done(self) -> bool:
        """Whether its result is there."""
        return self.answer is not None


class WorkerPool:
    """Worker processes that run the tasks of one job, each a part of one of its plans.

    Args:
        job: The job; it is pickled with `cloudpickle`, by value where workers cannot import.
        num_workers: How many workers.
        limits: Limits on waiting time and shared memory.
        components: What the job consists of. If the job cannot be pickled, the error names the
            first of them that cannot be pickled either.
        origin: Returns lines that say where the elements of a plan with the numbers of a range come
            from.

    Attributes:
        num_workers: How many there are.

    Raises:
        Exception: The job cannot be pickled; the exception of `cloudpickle`, with a note.
    """

    def __init__(
        self,
        job: Job,
        num_workers: int,
        limits: Limits,
        components: Iterable[Any] = (),
        origin: Callable[[int, int, int], list[str]] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._limits = limits
        self._stall = Stall(self, WorkerPool._awaited, limits, failures.WorkerError)
        self._awaited_result: PendingResult | None = None
        self._origin = origin
        self._num_submitted = 0
        self._unpacker = messages.Unpacker()
        self._pid = os.getpid()
        self._group = WorkerGroup(job, num_workers, limits.budget_bytes, components)
        self._finalizer = weakref.finalize(self, _end_in_background, self._group, self._pid)
        self._finalizer.atexit = False  # `worker_group` ends all groups at exit
        self._unfinished: list[deque[PendingResult]] = [deque() for _ in range(num_workers)]
        self._memory_requests: dict[int, int] = {}
        self._worker_errors: dict[int, Callable[[], BaseException]] = {}
        self._reaped: set[int] = set()
        self._poll = select.poll()
        self._control_files = [control.fileno() for control in self._group.control_sockets]
        for file in self._control_files:
            self._poll.register(file, select.POLLIN)
        files = [connection.fileno() for connection in self._group.connections]
        self._worker_by_file = {file: worker for worker, file in enumerate(files)}
        for file in files:
            self._poll.register(file, select.POLLIN)

    def submit(
        self, worker: int, task: Any, element_range: tuple[int, int] | None = None, plan: int = 0
    ) -> PendingResult:
        """Sends a task to a worker, which replies to its tasks in order."""
        if len(self._unfinished[worker]) >= _FEW_TASKS:
            self._await_space(worker)
        self._num_submitted += 1
        pending = PendingResult(self._num_submitted, worker, plan, element_range)
        self._unfinished[worker].append(pending)
        remote_slots = self._group.remote_slots[worker]
        slots = remote_slots.take_returned(), remote_slots.take_retired_by_fork()
        self._send(worker, (pending.number, task, slots, timeline.number_taken()))
        return pending

    def _await_space(self, worker: int) -> None:
        """Takes results until a task can be sent: a worker may wait until they are taken."""
        space = select.poll()
        space.register(self._group.connections[worker], select.POLLOUT)
        while not space.poll(0):
            self._handle_messages(_SPACE_S)

    def _send(self, worker: int, message: Any) -> None:
        try:
            wire.send(self._group.connections[worker], message)
        except ConnectionError:
            pass  # `wait` reports the exit of the worker
        except OSError:
            self._group.check_open()
            raise

    def discard(self, pending: PendingResult) -> None:
        """Discards the result of a task; its slots are returned when the worker has finished it."""
        pending.discarded = True
        if pending.answer is not None:
            self._free(pending)

    def _free(self, pending: PendingResult) -> None:
        """Borrows and releases the slots of a discarded result, so that they are returned."""
        answer, pending.answer = pending.answer, None
        for packed in answer[:2] if answer else ():
            for slot in packed[1] if packed else ():
                self._group.remote_slots[pending.worker].borrow(slot)

    def least_busy(self, among: int) -> tuple[int, int]:
        """The worker with the fewest unfinished tasks, of the first `among`, and their number.

        A task is unfinished until its result has been received.
        """
        counts = list(map(len, self._unfinished[:among]))
        fewest = min(counts)
        return counts.index(fewest), fewest

    def num_unfinished(self, worker: int) -> int:
        """How many tasks a worker has whose result has not been received."""
        return len(self._unfinished[worker])

    def wait(self, pending: PendingResult) -> Result:
        """Waits for the result of a task. If this raises, the caller should close the pool.

        Raises:
            WorkerError: The worker exited, or sent no result within `timeout_s`.
            ValueError: The pool was closed meanwhile.
        """
        if pending.answer is None:
            self._wait_for(pending)
        else:
            self._handle_messages(0)
        answer = pending.answer
        if answer is None:
            raise AssertionError("a task that was waited for has an answer")
        computed, failed, extra = answer
        pending.answer = None
        worker = pending.worker
        elements, byte_len = self._unpacked(worker, computed) if computed else ([], 0)
        if failed is None:
            return Result(elements, None, extra, byte_len)
        ((serialized,), _) = self._unpacked(worker, failed)
        where = f"in worker {worker}"
        if serialized["element"] is not None:
            where += f", at element {serialized['element']}"
        return Result(elements, failures.deserialized(serialized, where), extra, byte_len)

    def _unpacked(self, worker: int, packed: tuple[messages.Header, list[int]]) -> Any:
        """The elements in a message, and the bytes of the slots that they lie in."""
        header, numbers = packed
        slots = list(map(self._group.remote_slots[worker].borrow, numbers))
        return self._unpacker.unpack(header, slots), sum(map(len, slots))

    def _wait_for(self, pending: PendingResult) -> None:
        self._awaited_result = pending
        started_s = time.perf_counter()
        oldest = self.oldest_task(pending.worker)
        self._stall.begin()
        try:
            while pending.answer is None:
                if pending.worker in self._worker_errors:
                    raise self._worker_errors[pending.worker]()
                if self._memory_requests:
                    self._grant_memory(pending)
                self._handle_messages(self._stall.check_s)
                if oldest is not self.oldest_task(pending.worker):
                    oldest, started_s = self.oldest_task(pending.worker), time.perf_counter()
                    self._stall.end()  # a result before the awaited one has come
                if pending.answer is None:
                    self._stall.check(started_s)
        finally:
            self._stall.end()
            self._awaited_result = None

    def _awaited(self) -> Awaited:
        """What the worker whose result is awaited does; on any thread."""
        pending = self._awaited_result
        if pending is None:
            raise ValueError("no result is awaited")
        worker = pending.worker
        lines: list[str] = []
        elements, oldest = self._elements(worker), self.oldest_task(worker)
        if elements is not None and oldest is not None and self._origin is not None:
            with contextlib.suppress(Exception):  # the report matters more than the origin
                lines = self._origin(oldest.plan, *elements)
        stacks = functools.partial(self._stacks, worker, self._group.shared_budget.progress(worker))
        requests = functools.partial(self._group.requests, worker)
        doing = _activity(elements)
        return Awaited(f"worker {worker}", doing, lines, stacks=stacks, requests=requests)

    def _stacks(self, worker: int, progress: int) -> list[list[CodePlace]]:
        """The calls of a worker; none if it has gone on to another element since `progress`."""
        stacks = self._group.stacks(worker)
        return stacks if self._group.shared_budget.progress(worker) == progress else []

    def oldest_task(self, worker: int) -> PendingResult | None:
        """The task that a worker has to finish first, if it has any."""
        queue = self._unfinished[worker]
        return queue[0] if queue else None

    def _elements(self, worker: int, *, several: bool = False) -> tuple[int, int] | None:
        """The first and last element that a worker is computing, if that is known.

        With threads it may be `several` tasks of a plan, up to the element started last.
        """
        marked = self._group.shared_budget.progress(worker)
        queue, oldest = self._unfinished[worker], self.oldest_task(worker)
        if oldest is None or not marked:
            return None if oldest is None else oldest.element_range
        if oldest.element_range is None:
            plan, element = divmod(marked - 1, PLAN_MARKS)
            return (element, element) if plan == oldest.plan else None
        first, last = oldest.element_range
        element = marked - 1
        ranges = [task.element_range for task in queue if task.plan == oldest.plan]
        if not any(each and each[0] <= element <= each[1] for each in ranges):
            return first, last  # the mark is of an earlier task
        return (first if several and element > last else element), element

    def _handle_messages(self, wait_s: float | None) -> None:
        """Handles the messages that have arrived; waits up to `wait_s` if there are none."""
        exit_codes = self._group.exit_codes
        for file, _ in self._poll.poll(None if wait_s is None else wait_s * 1000):
            try:
                if file not in self._worker_by_file:
                    self._group.receive_exit(self._control_files.index(file))
                elif self._worker_by_file[file] not in exit_codes:
                    self._receive_from(self._worker_by_file[file])
            except OSError:
                self._group.check_open()
                raise
        if len(exit_codes) > len(self._reaped):
            for worker in exit_codes.keys() - self._reaped:
                self._reap(worker)

    def _receive_from(self, worker: int) -> None:
        try:
            message, files = wire.receive(self._group.connections[worker])
        except EOFError:
            self._group.check_open()
            self._group.wait_for_exit(worker)
        else:
            self._handle(worker, message, files)

    def _reap(self, worker: int) -> None:
        """Receives the last messages of a worker that exited; its children may hold its socket."""
        self._reaped.add(worker)
        connection = self._group.connections[worker]
        self._poll.unregister(connection)
        with contextlib.suppress(EOFError, BlockingIOError):
            while True:
                self._handle(worker, *wire.receive(connection, socket.MSG_DONTWAIT))
        has_task = bool(self._unfinished[worker])
        elements = self._elements(worker, several=True)
        activity = _activity(elements) if has_task else "while it had no task"
        code = self._group.exit_codes[worker]
        self._worker_errors.setdefault(
            worker,
            lambda: failures.worker_exited(worker, code, activity, self._group.starter_code),
        )

    def _handle(self, worker: int, message: Any, files: list[int]) -> None:
        kind, *rest = message
        if kind == "result":
            number, computed, failed, extra, freed, events = rest
            if events is not None and (taken := timeline.current) is not None:
                taken.add_worker(worker, events)
            pending = self._unfinished[worker].popleft()
            if pending.number != number:
                raise AssertionError("a worker replies to its tasks in order")
            pending.answer = (computed, failed, extra)
            if pending.discarded:
                self._free(pending)
            for slot in freed:
                self._group.remote_slots[worker].forget(slot)
        elif kind == "slots":
            for (slot, byte_len), file in zip(rest[0], files, strict=True):
                self._group.remote_slots[worker].add(slot, file, byte_len)
        elif kind == "reserve":
            self._memory_requests[worker] = rest[0]
            self._grant_memory(None)
        else:  # "open_failed"
            ((serialized,), _) = self._unpacked(worker, rest[0])
            self._worker_errors[worker] = lambda: failures.deserialized(
                serialized, f"in worker {worker}"
            )

    def _grant_memory(self, awaited: PendingResult | None) -> None:
        """Reserves memory for workers that wait for it, those with the oldest tasks first.

        The worker whose result is awaited always gets it. Another one gets it only if as much is
        left for each worker with an older task.
        """
        oldest = {
            worker: self._oldest_task(worker)
            for worker in self._memory_requests
            if worker not in self._worker_errors
        }
        for worker in sorted(oldest, key=oldest.__getitem__):
            byte_len = self._memory_requests[worker]
            earlier = sum(bool(q) and q[0].number < oldest[worker] for q in self._unfinished)
            if awaited is not None and worker == awaited.worker:
                # Its current task may have been discarded, but the awaited one is behind it.
                self._group.shared_budget.reserve_anyway(byte_len)
            elif not self._group.shared_budget.reserve(byte_len, earlier * byte_len):
                continue
            del self._memory_requests[worker]
            self._send(worker, None)

    def _oldest_task(self, worker: int) -> int:
        queue = self._unfinished[worker]
        return queue[0].number if queue else self._num_submitted + 1

    def disconnect(self) -> None:
        """Ends all workers without waiting; a thread that waits in `take` gets a `ValueError`."""
        if not self.closed:
            self._group.disconnect()

    def close(self) -> None:
        """Ends all workers, even while they compute; safe to call again."""
        if self._finalizer.detach() is not None:
            if may_wait():
                _end(self._group, self._pid)
            else:
                _end_in_background(self._group, self._pid)

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, or belongs to the process that this one was forked from."""
        return not self._finalizer.alive or self._pid != os.getpid()


def _activity(elements: tuple[int, int] | None) -> str:
    """What a worker does that computes the elements with these numbers."""
    if elements is None:
        return "while computing its next element"
    first, last = elements
    if first == last:
        return f"while computing element {first}"
    return f"while computing elements {first} to {last}"


def _end(group: WorkerGroup, pid: int) -> None:
    """Ends a pool; in a child forked from its owner, only closes the child's descriptors."""
    if os.getpid() == pid:
        group.end()
    else:
        group.abandon()


def _end_in_background(group: WorkerGroup, pid: int) -> None:
    """Like `_end`, but does not wait, so that a finalizer may call it."""
    if os.getpid() == pid:
        group.disconnect()
        call_on_new_thread(group.end)
    else:
        group.abandon()
