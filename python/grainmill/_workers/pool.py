"""The parent's side of a pool of workers: tasks out, results back, and what may go wrong between.

A pool is a zygote (`zygote.py`) and the workers forked from it, each at the end of a socket. Small
messages cross the sockets; payload lies in shared slots. One thread at a time gives tasks and
takes results; any thread may close the pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import pickle
import select
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from grainmill._native import Board, Lender
from grainmill._workers import failures, messages
from grainmill._workers.worker import SetUp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from grainmill._workers.worker import Job

_LARGEST_MESSAGE = 128 << 10
_FILES_PER_MESSAGE = 253
_ALIGNMENT = 64
_CLOSE_WAIT_S = 1.5
_STATUS_WAIT_S = 1.0
_BUDGET_SHARE = 4
_CLOSED = "Attempting to use a closed iterator."
_LOGGER = logging.getLogger("grainmill")

# Libraries that would start threads of their own in the process that workers are forked from.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LAUNCH = (
    "import sys; sys.path[:] = {path!r}; import importlib.util as u; "
    "s = u.spec_from_file_location('launch', {launch!r}); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); m.main({control}, {parent}, {modules!r})"
)
_LAUNCHER = str(pathlib.Path(__file__).with_name("launch.py"))


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

    @classmethod
    def of(
        cls, stall_warning_s: float | None, timeout_s: float | None, budget_bytes: int | None
    ) -> Limits:
        """The limits, with a quarter of the machine's memory where none is given."""
        if budget_bytes is None:
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            budget_bytes = pages // _BUDGET_SHARE
        return cls(stall_warning_s, timeout_s, budget_bytes)


class Result(NamedTuple):
    """What became of a task; see `worker.Outcome`."""

    elements: list[Any]
    failure: BaseException | None
    extra: Any


class Ticket:
    """One task that was given to a worker.

    Attributes:
        worker: The worker it was given to.
        about: What it makes, for messages.
        number: Its place among all tasks of the pool.
        answer: What came back of it, until it is taken.
        dropped: Whether nobody wants what comes back.
    """

    __slots__ = ("about", "answer", "dropped", "number", "worker")

    def __init__(self, number: int, worker: int, about: str) -> None:
        self.number = number
        self.worker = worker
        self.about = about
        self.answer: tuple[Any, ...] | None = None
        self.dropped = False


class Pool:
    """Workers that do the tasks of one job.

    Args:
        job: What they do; it is pickled with `cloudpickle`, and what can not be imported from
            where they are goes with it.
        num_workers: How many workers.
        limits: How long to wait, and how much to hold.
        parts: What the job is made of, in the order in which one is to be blamed if the job can
            not be pickled.

    Raises:
        Exception: The job can not be pickled; whatever the attempt raises, with a note.
    """

    def __init__(
        self, job: Job, num_workers: int, limits: Limits, parts: Iterable[Any] = ()
    ) -> None:
        self.num_workers = num_workers
        self._limits = limits
        self._numbers = 0
        self._pid = os.getpid()
        data, buffers = _pickled(job, parts)
        self._crew = _Crew(num_workers, limits.budget_bytes, data, buffers, job.modules)
        self._finalizer = weakref.finalize(self, _end, self._crew, self._pid)
        self._unfinished: list[deque[Ticket]] = [deque() for _ in range(num_workers)]
        self._needs: dict[int, int] = {}
        self._lent: dict[tuple[int, int], int] = {}
        self._dead: dict[int, BaseException] = {}
        self._poll = select.poll()
        self._by_file: dict[int, int] = {}
        for worker, connection in enumerate(self._crew.connections):
            self._by_file[connection.fileno()] = worker
            self._poll.register(connection, select.POLLIN)

    def give(self, worker: int, task: Any, about: str) -> Ticket:
        """Sends a task to a worker, which does its tasks one after another."""
        self._numbers += 1
        ticket = Ticket(self._numbers, worker, about)
        self._unfinished[worker].append(ticket)
        message = (ticket.number, task, self._returned(worker))
        with contextlib.suppress(ConnectionError):  # its end is met by whoever waits for it
            self._crew.connections[worker].send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Gives up the result of a task; what holds it is free once the worker is done."""
        ticket.dropped = True
        if ticket.answer is not None:
            self._free(ticket)

    def _free(self, ticket: Ticket) -> None:
        """Takes the result of a dropped task over and lets it go."""
        answer, ticket.answer = ticket.answer, None
        for slot in answer[3] if answer else ():
            self._lend(ticket.worker, slot)

    def num_unfinished(self, worker: int) -> int:
        """How many of a worker's tasks are not done yet, as far as it was heard."""
        return len(self._unfinished[worker])

    def take(self, ticket: Ticket) -> Result:
        """Waits for the result of a task.

        Raises:
            WorkerError: The worker ended instead, or nothing came within `timeout_s`.
            ValueError: The pool was closed meanwhile.
        """
        if ticket.answer is None:
            self._wait_for(ticket)
        else:
            self._hear(0)
        answer = ticket.answer
        if answer is None:
            raise AssertionError("a task that was waited for has an answer")
        text, failure_text, extra, _ = answer
        ticket.answer = None
        worker = ticket.worker
        elements = messages.unpack(text, lambda slot: self._lend(worker, slot)) if text else []
        failure = self._rebuilt(worker, failure_text) if failure_text else None
        return Result(elements, failure, extra)

    def _rebuilt(self, worker: int, text: Any) -> BaseException:
        (told,) = messages.unpack(text, lambda slot: self._lend(worker, slot))
        element = told.get("element")
        where = f"in worker {worker}" + ("" if element is None else f", at element {element}")
        return failures.rebuilt(told, where)

    def _lend(self, worker: int, slot: int) -> Any:
        """A slot for the user; what the user holds no longer counts as the pool's."""
        lent = self._crew.lenders[worker].lend(slot)
        self._lent[worker, slot] = len(lent)
        self._crew.board.release(len(lent))
        return lent

    def _returned(self, worker: int) -> list[int]:
        """The worker's slots that the user is through with; they count again."""
        returned = self._crew.lenders[worker].take_returned()
        for slot in returned:
            self._crew.board.reserve_anyway(self._lent.pop((worker, slot)))
        return returned

    def _wait_for(self, ticket: Ticket) -> None:
        began = time.monotonic()
        warned = False
        while ticket.answer is None:
            if ticket.worker in self._dead:
                raise self._dead[ticket.worker]
            waited_s = time.monotonic() - began
            waits = []
            if self._limits.stall_warning_s is not None and not warned:
                waits.append(self._limits.stall_warning_s - waited_s)
            if self._limits.timeout_s is not None:
                waits.append(self._limits.timeout_s - waited_s)
            if not waits or min(waits) > 0:
                if self._needs:
                    self._grant(ticket)
                self._hear(min(waits) if waits else None)
                continue
            doing = self._doing(ticket)
            if self._limits.timeout_s is not None and waited_s >= self._limits.timeout_s:
                raise failures.WorkerError(
                    f"worker {ticket.worker} gave nothing for {waited_s:.1f} s {doing}, which is "
                    f"more than `timeout_s={self._limits.timeout_s:g}`"
                )
            warned = True
            _LOGGER.warning(
                "worker %d has given nothing for %.1f s %s", ticket.worker, waited_s, doing
            )

    def _doing(self, ticket: Ticket) -> str:
        """Which element the worker of `ticket` is at, as far as can be seen from outside."""
        marked = self._crew.board.marked(ticket.worker)
        return f"while making {f'element {marked - 1}' if marked else ticket.about}"

    def _hear(self, wait_s: float | None) -> None:
        """Takes in what workers have sent; waits for something if there is nothing."""
        for file, _ in self._poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000):
            worker = self._by_file[file]
            connection = self._crew.connections[worker]
            try:
                data, files, _, _ = socket.recv_fds(
                    connection, _LARGEST_MESSAGE, _FILES_PER_MESSAGE
                )
            except ConnectionError:
                data, files = b"", []
            except OSError:
                self._crew.check_open()
                raise
            if data:
                self._note(worker, pickle.loads(data), files)
                continue
            self._crew.check_open()
            self._poll.unregister(file)
            self._dead.setdefault(worker, self._death(worker))

    def _note(self, worker: int, message: Any, files: list[int]) -> None:
        kind, *rest = message
        if kind == "made":
            number, text, failure_text, extra, slots, dropped = rest
            ticket = self._unfinished[worker].popleft()
            if ticket.number != number:
                raise AssertionError("a worker answers its tasks in order")
            ticket.answer = (text, failure_text, extra, slots)
            if ticket.dropped:
                self._free(ticket)
            for slot in dropped:
                self._crew.lenders[worker].forget(slot)
        elif kind == "slots":
            for (slot, byte_len), file in zip(rest[0], files, strict=True):
                self._crew.lenders[worker].add(slot, file, byte_len)
        elif kind == "need":
            self._needs[worker] = rest[0]
            self._grant(None)
        else:
            self._dead[worker] = self._rebuilt(worker, rest[0])

    def _grant(self, awaited: Ticket | None) -> None:
        """Lets workers go on that wait for memory, those whose tasks are older first.

        The one whose result is awaited gets what it needs in any case; the others only what
        leaves as much for each task before theirs.
        """
        waiting = (worker for worker in self._needs if worker not in self._dead)
        for worker in sorted(waiting, key=lambda worker: self._unfinished[worker][0].number):
            byte_len = self._needs[worker]
            number = self._unfinished[worker][0].number
            earlier = sum(bool(queue) and queue[0].number < number for queue in self._unfinished)
            if awaited is not None and number == awaited.number:
                self._crew.board.reserve_anyway(byte_len)
            elif not self._crew.board.reserve(byte_len, earlier * byte_len):
                continue
            del self._needs[worker]
            with contextlib.suppress(ConnectionError):
                self._crew.connections[worker].send(pickle.dumps(None))

    def _death(self, worker: int) -> BaseException:
        code = self._crew.exit_code(worker)
        queue = self._unfinished[worker]
        doing = self._doing(queue[0]) if queue else "with nothing to do"
        return failures.death(worker, code, doing)

    def close(self) -> None:
        """Ends all workers, in the middle of what they do; safe to call again."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether the workers were told to end, or stayed behind in a process forked from."""
        return not self._finalizer.alive or self._pid != os.getpid()


class _Crew:
    """The processes of a pool and the sockets to them.

    Attributes:
        connections: One socket for each worker.
        lenders: The slots of each worker.
        board: The page they share.
    """

    def __init__(
        self,
        num_workers: int,
        budget_bytes: int,
        data: bytes,
        buffers: Sequence[Any],
        modules: Sequence[str],
    ) -> None:
        self._ended = False
        self._codes: dict[int, int] = {}
        self.lenders = [Lender() for _ in range(num_workers)]
        self.board, board_file = Board.create(num_workers, budget_bytes)
        with contextlib.ExitStack() as files:
            files.callback(os.close, board_file)
            job_file, job = _job_file(data, buffers)
            files.callback(os.close, job_file)
            self._zygote, self._control = _start_zygote(modules)
            self.connections = []
            for worker in range(num_workers):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.connections.append(ours)
                set_up = SetUp(
                    worker,
                    num_workers,
                    budget_bytes,
                    job,
                    list(sys.path),
                    _directory(),
                    dict(os.environ),
                    logging.getLogger().getEffectiveLevel(),
                )
                with theirs, contextlib.suppress(ConnectionError):
                    message = pickle.dumps(set_up, pickle.HIGHEST_PROTOCOL)
                    sent = [theirs.fileno(), job_file, board_file]
                    socket.send_fds(self._control, [message], sent)

    def check_open(self) -> None:
        """Raises `ValueError` where the workers were told to end."""
        if self._ended:
            raise ValueError(_CLOSED)

    def exit_code(self, worker: int) -> int | None:
        """How a worker that is gone has ended; `None` where nobody is left who knows."""
        deadline = time.monotonic() + _STATUS_WAIT_S
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while worker not in self._codes:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or not poll.poll(wait_s * 1000):
                return None
            with contextlib.suppress(ConnectionError):
                data = self._control.recv(_LARGEST_MESSAGE)
                if data:
                    number, code = pickle.loads(data)
                    self._codes[number] = code
                    continue
            return None
        return self._codes[worker]

    def end(self) -> None:
        """Has all processes of the pool end, and waits until they are gone."""
        if self._ended:
            return
        self._ended = True
        # Forked children of this process may hold these sockets too, so closing is not enough.
        for connection in (*self.connections, self._control):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        try:
            self._zygote.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()  # its workers go with it
            self._zygote.wait()
        self.abandon()

    def abandon(self) -> None:
        """Closes this process's ends, without a word to the others."""
        self._ended = True
        for connection in (*self.connections, self._control):
            connection.close()


def _end(crew: _Crew, pid: int) -> None:
    """Ends a pool; in a child forked from its owner, only lets go of it."""
    if os.getpid() == pid:
        crew.end()
    else:
        crew.abandon()


def _start_zygote(modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = _LAUNCH.format(
            path=sys.path,
            launch=_LAUNCHER,
            control=theirs.fileno(),
            parent=os.getpid(),
            modules=list(modules),
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as `multiprocessing` starts its own
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
        )
    return process, ours


def _directory() -> str:
    try:
        return str(os.getcwd())  # noqa: PTH109 - `Path.cwd` is the same
    except FileNotFoundError:
        return "/"


def _pickled(job: Job, parts: Iterable[Any]) -> tuple[bytes, list[Any]]:
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = cloudpickle.dumps(job, protocol=5, buffer_callback=buffers.append)
    except Exception as failure:
        for part in parts:
            try:
                cloudpickle.dumps(part)
            except Exception:
                failure.add_note(f"Dataset: {part} cannot be pickled!")
                break
        raise
    return data, [buffer.raw() for buffer in buffers]


def _job_file(data: bytes, buffers: Sequence[Any]) -> tuple[int, tuple[int, list[tuple[int, int]]]]:
    """An anonymous file with the pickled job, and where in it everything is."""
    file = os.memfd_create("grainmill-job", os.MFD_CLOEXEC)
    places = []
    at = _written(file, data, 0)
    for buffer in buffers:
        places.append((at, len(buffer)))
        at = _written(file, buffer, at)
    os.ftruncate(file, max(at, 1))
    return file, (len(data), places)


def _written(file: int, data: Any, at: int) -> int:
    """Writes `data` at `at`; returns the next aligned place."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def warn_of_spawn() -> None:
    """Says once that workers start slowly here."""
    warnings.warn(
        "this system can not fork: each worker starts a Python of its own",
        RuntimeWarning,
        stacklevel=2,
    )
