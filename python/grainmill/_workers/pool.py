"""The parent's side of a pool of workers: tasks out, results back, and what may go wrong between.

A pool is a zygote (`zygote.py`) and the workers forked from it, each at the end of a socket. Small
messages cross the sockets; payload lies in shared slots. One thread at a time gives tasks and
takes results; any thread may close the pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._memory import default_budget_bytes
from grainmill._threads import call_elsewhere, may_wait
from grainmill._workers import failures, messages, wire
from grainmill._workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.options import ReadOptions
    from grainmill._workers.worker import Job

_LOGGER = logging.getLogger("grainmill")


class Limits(NamedTuple):
    """How long to wait, and how much to hold.

    Attributes:
        stall_warning_s: After so many seconds without a result, a warning names the worker and
            the element; `None` for none.
        timeout_s: After so many seconds without a result, an error does; `None` for never.
        budget_bytes: What results may hold in shared memory before they are taken.
    """

    stall_warning_s: float | None
    timeout_s: float | None
    budget_bytes: int

    def share(self, num_tasks: int) -> int:
        """Bytes that each of so many tasks may take, with as much again for what is in use."""
        return self.budget_bytes // (2 * num_tasks)

    @classmethod
    def of(cls, options: ReadOptions | MultiprocessingOptions) -> Limits:
        """Those of `options`, with a quarter of the memory there is where no budget is given."""
        budget_bytes = options.ram_budget_bytes
        if budget_bytes is None:
            budget_bytes = default_budget_bytes()
        return cls(options.stall_warning_s, options.timeout_s, budget_bytes)


class Result(NamedTuple):
    """What became of a task; see `worker.Outcome`.

    Attributes:
        elements: What was made, up to `failure`.
        failure: What hindered the next one, if anything did.
        extra: What else came.
        byte_len: Bytes of shared memory that it takes.
    """

    elements: list[Any]
    failure: BaseException | None
    extra: Any
    byte_len: int


class PendingResult:
    """One task that was given to a worker.

    Attributes:
        number: Tasks are numbered in the order in which they were given.
        worker: The worker it was given to.
        about: The first and the last element that it makes, where they are known.
        answer: What the worker sent, until that is taken.
        dropped: Whether nobody wants the answer any more.
    """

    __slots__ = ("about", "answer", "dropped", "number", "worker")

    def __init__(self, number: int, worker: int, about: tuple[int, int] | None) -> None:
        self.number = number
        self.worker = worker
        self.about = about
        self.answer: tuple[Any, ...] | None = None
        self.dropped = False


class WorkerPool:
    """Workers that do the tasks of one job.

    Args:
        job: What they do; it is pickled with `cloudpickle`, and what cannot be imported from
            where they are goes with it.
        num_workers: How many workers.
        limits: How long to wait, and how much to hold.
        parts: What the job is made of, in the order in which one is to be blamed if the job can
            not be pickled.

    Raises:
        Exception: The job cannot be pickled; whatever the attempt raises, with a note.
    """

    def __init__(
        self, job: Job, num_workers: int, limits: Limits, parts: Iterable[Any] = ()
    ) -> None:
        self._limits = limits
        waits = (limits.stall_warning_s, limits.timeout_s)
        self._patience_s = sorted({wait_s for wait_s in waits if wait_s is not None})
        self._numbers = 0
        self._unpacker = messages.Unpacker()
        self._pid = os.getpid()
        self._group = WorkerGroup(job, num_workers, limits.budget_bytes, parts)
        self._finalizer = weakref.finalize(self, _end_elsewhere, self._group, self._pid)
        self._finalizer.atexit = False  # the group sees to that
        self._unfinished: list[deque[PendingResult]] = [deque() for _ in range(num_workers)]
        self._needs: dict[int, int] = {}
        self._dead: dict[int, Callable[[], BaseException]] = {}
        self._buried: set[int] = set()
        self._poll = select.poll()
        self._controls = [control.fileno() for control in self._group.controls]
        for file in self._controls:
            self._poll.register(file, select.POLLIN)
        files = [connection.fileno() for connection in self._group.connections]
        self._worker_at = {file: worker for worker, file in enumerate(files)}
        for file in files:
            self._poll.register(file, select.POLLIN)

    def submit(self, worker: int, task: Any, about: tuple[int, int] | None = None) -> PendingResult:
        """Sends a task to a worker, which does its tasks one after another."""
        self._numbers += 1
        pending = PendingResult(self._numbers, worker, about)
        self._unfinished[worker].append(pending)
        remote_slots = self._group.remote_slots[worker]
        slots = remote_slots.take_returned(), remote_slots.take_retired_by_fork()
        self._send(worker, (pending.number, task, slots))
        return pending

    def _send(self, worker: int, message: Any) -> None:
        try:
            wire.send(self._group.connections[worker], message)
        except ConnectionError:
            pass  # its end is met by whoever waits for it
        except OSError:
            self._group.check_open()
            raise

    def drop(self, pending: PendingResult) -> None:
        """Gives up the result of a task; what holds it is free once the worker is done."""
        pending.dropped = True
        if pending.answer is not None:
            self._free(pending)

    def _free(self, pending: PendingResult) -> None:
        """Takes the result of a dropped task over and lets it go."""
        answer, pending.answer = pending.answer, None
        for part in answer[:2] if answer else ():
            for slot in part[1] if part else ():
                self._group.remote_slots[pending.worker].borrow(slot)

    def least_busy(self, among: int) -> tuple[int, int]:
        """Of the first `among` workers the one with the fewest unfinished tasks, and how many.

        A task is unfinished until its result was heard of.
        """
        counts = list(map(len, self._unfinished[:among]))
        fewest = min(counts)
        return counts.index(fewest), fewest

    def take(self, pending: PendingResult) -> Result:
        """Waits for the result of a task. Whatever is raised, the pool is best closed then.

        Raises:
            WorkerError: The worker ended instead, or nothing came within `timeout_s`.
            ValueError: The pool was closed meanwhile.
        """
        if pending.answer is None:
            self._wait_for(pending)
        else:
            self._hear(0)
        answer = pending.answer
        if answer is None:
            raise AssertionError("a task that was waited for has an answer")
        made, failed, extra = answer
        pending.answer = None
        worker = pending.worker
        elements, byte_len = self._unpacked(worker, made) if made else ([], 0)
        if failed is None:
            return Result(elements, None, extra, byte_len)
        ((told,), _) = self._unpacked(worker, failed)
        where = f"in worker {worker}"
        if told["element"] is not None:
            where += f", at element {told['element']}"
        return Result(elements, failures.deserialized(told, where), extra, byte_len)

    def _unpacked(self, worker: int, packed: tuple[messages.Text, list[int]]) -> Any:
        """The elements in a message, and the bytes of shared memory that they keep."""
        text, numbers = packed
        slots = list(map(self._group.remote_slots[worker].borrow, numbers))
        return self._unpacker.unpack(text, slots), sum(map(len, slots))

    def _wait_for(self, pending: PendingResult) -> None:
        began = time.monotonic()
        patience = self._patience_s.copy()
        while pending.answer is None:
            if pending.worker in self._dead:
                raise self._dead[pending.worker]()
            if self._needs:
                self._grant(pending)
            left_s = began + patience[0] - time.monotonic() if patience else None
            if left_s is None or left_s > 0:
                self._hear(left_s)
            else:
                self._note_stall(pending, patience.pop(0))

    def _note_stall(self, pending: PendingResult, waited_s: float) -> None:
        doing = self._doing(pending)
        if waited_s == self._limits.timeout_s:
            raise failures.WorkerError(
                f"worker {pending.worker} gave nothing for {waited_s:.1f} s {doing}, which is all "
                f"of `timeout_s={self._limits.timeout_s:g}`"
            )
        _LOGGER.warning(
            "worker %d has given nothing for %.1f s %s", pending.worker, waited_s, doing
        )

    def _doing(self, pending: PendingResult, last_begun: PendingResult | None = None) -> str:
        """Which element the worker of `pending` is at, as far as can be seen from outside.

        With threads it may be at several tasks, up to `last_begun` if that is given.
        """
        marked = self._group.shared_budget.progress(pending.worker)
        about, until = pending.about, (last_begun or pending).about
        if about is not None and until is not None and marked:
            first, last = about[0], min(until[1], marked - 1)
            if marked - 1 > about[1] and first < last:
                return f"while making elements {first} to {last}"
            marked = last + 1
        if marked:
            return f"while making element {marked - 1}"
        if about is None:
            return "while making its next element"
        return f"while making elements {about[0]} to {about[1]}"

    def _hear(self, wait_s: float | None) -> None:
        """Takes in what workers have sent; waits for something if there is nothing."""
        ended = self._group.ended
        for file, _ in self._poll.poll(None if wait_s is None else wait_s * 1000):
            try:
                if file not in self._worker_at:
                    self._group.hear_of_ends(self._controls.index(file))
                elif self._worker_at[file] not in ended:
                    self._hear_from(self._worker_at[file])
            except OSError:
                self._group.check_open()
                raise
        if len(ended) > len(self._buried):
            for worker in ended.keys() - self._buried:
                self._reap(worker)

    def _hear_from(self, worker: int) -> None:
        try:
            message, files = wire.receive(self._group.connections[worker])
        except EOFError:
            self._group.check_open()
            self._group.await_end(worker)
        else:
            self._note(worker, message, files)

    def _reap(self, worker: int) -> None:
        """Takes what is left of a worker that has ended; its children may hold its socket open."""
        self._buried.add(worker)
        connection = self._group.connections[worker]
        self._poll.unregister(connection)
        with contextlib.suppress(EOFError, BlockingIOError):
            while True:
                self._note(worker, *wire.receive(connection, socket.MSG_DONTWAIT))
        queue = self._unfinished[worker]
        doing = self._doing(queue[0], queue[-1]) if queue else "with nothing to do"
        code = self._group.ended[worker]
        self._dead.setdefault(worker, lambda: failures.worker_ended(worker, code, doing))

    def _note(self, worker: int, message: Any, files: list[int]) -> None:
        kind, *rest = message
        if kind == "made":
            number, made, failed, extra, dropped = rest
            pending = self._unfinished[worker].popleft()
            if pending.number != number:
                raise AssertionError("a worker answers its tasks in order")
            pending.answer = (made, failed, extra)
            if pending.dropped:
                self._free(pending)
            for slot in dropped:
                self._group.remote_slots[worker].forget(slot)
        elif kind == "slots":
            for (slot, byte_len), file in zip(rest[0], files, strict=True):
                self._group.remote_slots[worker].add(slot, file, byte_len)
        elif kind == "need":
            self._needs[worker] = rest[0]
            self._grant(None)
        else:
            ((told,), _) = self._unpacked(worker, rest[0])
            self._dead[worker] = lambda: failures.deserialized(told, f"in worker {worker}")

    def _grant(self, awaited: PendingResult | None) -> None:
        """Lets workers go on that wait for memory, those whose tasks are older first.

        The one whose result is awaited gets what it needs in any case; the others only what
        leaves as much for each task before theirs.
        """
        turns = {worker: self._turn(worker) for worker in self._needs if worker not in self._dead}
        for worker in sorted(turns, key=turns.__getitem__):
            byte_len = self._needs[worker]
            earlier = sum(bool(q) and q[0].number < turns[worker] for q in self._unfinished)
            if awaited is not None and worker == awaited.worker:
                # What it is at may have been dropped, but the awaited comes after it.
                self._group.shared_budget.reserve_anyway(byte_len)
            elif not self._group.shared_budget.reserve(byte_len, earlier * byte_len):
                continue
            del self._needs[worker]
            self._send(worker, None)

    def _turn(self, worker: int) -> int:
        queue = self._unfinished[worker]
        return queue[0].number if queue else self._numbers + 1

    def hang_up(self) -> None:
        """Ends all workers, without waiting for that; who waits in `take` gets a `ValueError`."""
        if not self.closed:
            self._group.hang_up()

    def close(self) -> None:
        """Ends all workers, in the middle of what they do; safe to call again."""
        if self._finalizer.detach() is not None:
            if may_wait():
                _end(self._group, self._pid)
            else:
                _end_elsewhere(self._group, self._pid)

    @property
    def closed(self) -> bool:
        """Whether the workers were told to end, or stayed behind in a process forked from."""
        return not self._finalizer.alive or self._pid != os.getpid()


def _end(group: WorkerGroup, pid: int) -> None:
    """Ends a pool; in a child forked from its owner, only lets go of it."""
    if os.getpid() == pid:
        group.end()
    else:
        group.abandon()


def _end_elsewhere(group: WorkerGroup, pid: int) -> None:
    """As `_end`, but does not wait; a garbage collection may call it."""
    if os.getpid() == pid:
        group.hang_up()
        call_elsewhere(group.end)
    else:
        group.abandon()


def threads_take_turns() -> bool:
    """Whether Python code runs on one thread at a time, so that processes are worth their cost."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or bool(enabled())
