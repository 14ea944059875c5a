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
    "s.loader.exec_module(m); m.main({control}, {parent}, {modules!r}, fork={fork})"
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
            self._forks = fork = _can_fork[0]
            self._launched = [_Launched(modules, fork=fork)]
            self.connections = []
            for worker in range(num_workers):
                if worker and not fork:
                    self._launched.append(_Launched(modules, fork=False))
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
                    socket.send_fds(self._launched[-1].control, [message], sent)

    def check_open(self) -> None:
        """Raises `ValueError` where the workers were told to end."""
        if self._ended:
            raise ValueError(_CLOSED)

    def exit_code(self, worker: int) -> int | None:
        """How a worker that is gone has ended; `None` where nobody is left who knows.

        Raises:
            ForkRefusedError: It was never forked.
        """
        if not self._forks:
            return self._launched[worker].exit_code()
        while worker not in self._codes:
            told = self._launched[0].next_report()
            if told is None:
                return None
            number, code = told
            if number is None:
                raise ForkRefusedError(code)
            self._codes[number] = code
        return self._codes[worker]

    def end(self) -> None:
        """Has all processes of the pool end, and waits until they are gone."""
        if self._ended:
            return
        self._ended = True
        # Forked children of this process may hold these sockets too, so closing is not enough.
        for connection in (*self.connections, *(launched.control for launched in self._launched)):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for launched in self._launched:
            launched.wait(deadline)
        self.abandon()

    def abandon(self) -> None:
        """Closes this process's ends, without a word to the others."""
        self._ended = True
        for connection in (*self.connections, *(launched.control for launched in self._launched)):
            connection.close()


class ForkRefusedError(Exception):
    """The zygote has threads that it did not start, so that its children might hang."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.threads = threads


# Whether workers may be forked, as far as is known.
_can_fork = [hasattr(os, "fork")]


def spawn_from_now_on(refused: ForkRefusedError) -> None:
    """Has each worker of every later pool start a Python of its own, and says so."""
    _can_fork[0] = False
    warnings.warn(
        f"a fresh Python process has {refused.threads} threads here, so workers can not be forked "
        "from one: each starts by itself, which takes longer. Threads at start come from a "
        "`sitecustomize` or a `.pth` file",
        RuntimeWarning,
        stacklevel=2,
    )


class _Launched:
    """A process that forks workers, or is one.

    Attributes:
        control: The socket to it.
    """

    def __init__(self, modules: Sequence[str], *, fork: bool) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = _LAUNCH.format(
                path=sys.path,
                launch=_LAUNCHER,
                control=theirs.fileno(),
                parent=os.getpid(),
                modules=list(modules),
                fork=fork,
            )
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as `multiprocessing` starts its own
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
            )

    def next_report(self) -> tuple[int | None, int] | None:
        """What it says next of the workers it forked; `None` if it is gone too."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        if not poll.poll(_STATUS_WAIT_S * 1000):
            return None
        with contextlib.suppress(ConnectionError):
            data = self.control.recv(_LARGEST_MESSAGE)
            if data:
                told: tuple[int | None, int] = pickle.loads(data)
                return told
        return None

    def exit_code(self) -> int | None:
        """How it ended, once it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_STATUS_WAIT_S)
        return None

    def wait(self, deadline: float) -> None:
        """Waits until it is gone; from `deadline` on, ends it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers go with it
            self._process.wait()


def _end(crew: _Crew, pid: int) -> None:
    """Ends a pool; in a child forked from its owner, only lets go of it."""
    if os.getpid() == pid:
        crew.end()
    else:
        crew.abandon()


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
