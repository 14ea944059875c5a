"""What a worker does: one task after another, until the other end of its socket is closed."""

from __future__ import annotations

import abc
import contextlib
import logging
import mmap
import os
import pickle
import socket
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from grainmill._native import Arena, Board
from grainmill._workers import failures, messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._native import Slot

# A message never comes near this; a socket buffer holds more.
_LARGEST_MESSAGE = 128 << 10
# A message carries at most 253 descriptors.
_FILES_PER_MESSAGE = 200
# What a worker takes without asking leaves room for so many like it from each of the others.
_SPARE_PER_WORKER = 2


class Outcome(NamedTuple):
    """What became of a task.

    Attributes:
        elements: What was made, up to `failure`.
        failure: What hindered the next one, if anything did.
        first: The number of the first element, for messages.
        extra: What else the one who gave the task needs; small.
    """

    elements: list[Any]
    failure: BaseException | None
    first: int
    extra: Any = None


class Runner(abc.ABC):
    """A job under way in one worker."""

    @abc.abstractmethod
    def run(self, task: Any) -> Outcome:
        """Does one task."""


class Place(NamedTuple):
    """Where a job runs.

    Attributes:
        worker: The worker's number, from 0.
        num_workers: How many there are.
        arena: Where arrays that are to be sent are best made.
        mark: Notes the number of the element in the making, for when the worker dies or hangs.
    """

    worker: int
    num_workers: int
    arena: SharedArena
    mark: Callable[[int], None]


class Job(abc.ABC):
    """What the workers of a pool are for; it is pickled once and opened in each of them."""

    @property
    def modules(self) -> Sequence[str]:
        """What is imported once, before the workers are forked."""
        return (type(self).__module__,)

    @abc.abstractmethod
    def open(self, place: Place) -> Runner:
        """Makes the job ready in a worker."""


class SetUp(NamedTuple):
    """What a worker is told when it begins.

    Attributes:
        worker: Its number.
        num_workers: How many there are.
        budget_bytes: What all of them may hold in shared memory.
        job: Bytes of the pickled job, and the place of each buffer of it, in the job's file.
        path: The parent's `sys.path`.
        directory: The parent's working directory.
        environment: The parent's environment.
        log_level: The parent's level of logging.
    """

    worker: int
    num_workers: int
    budget_bytes: int
    job: tuple[int, Sequence[tuple[int, int]]]
    path: list[str]
    directory: str
    environment: dict[str, str]
    log_level: int


class _LeaveError(BaseException):
    """The other end is gone."""


class _Channel:
    """The worker's end of the socket to its parent."""

    def __init__(self, connection: socket.socket, worker: int, count: int, board: Board) -> None:
        self._connection = connection
        self._worker = worker
        self._tasks: deque[Any] = deque()
        self._sent: dict[int, Slot] = {}
        self.arena = SharedArena(board, count, self._ask)

    def _receive(self) -> Any:
        data = self._connection.recv(_LARGEST_MESSAGE)
        if not data:
            raise _LeaveError
        return pickle.loads(data)

    def _send(self, message: Any, files: Sequence[int] = ()) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if files:
            socket.send_fds(self._connection, [data], files)
        else:
            self._connection.send(data)

    def next_task(self) -> tuple[int, Any]:
        """Waits for the next task, and takes back the slots that came with it."""
        number, task, returned = self._tasks.popleft() if self._tasks else self._receive()
        for slot in returned:
            self._sent.pop(slot, None)
        return number, task

    def _ask(self, byte_len: int) -> None:
        """Waits until there is room for `byte_len` bytes more."""
        self._send(("need", byte_len))
        while (message := self._receive()) is not None:
            self._tasks.append(message)

    def reply(self, number: int, outcome: Outcome) -> None:
        """Sends what became of task `number`."""
        elements, failure = outcome.elements, outcome.failure
        packed = None
        if elements:
            try:
                packed = messages.pack(elements, self.arena)
            except messages.UnsendableError as unsendable:
                elements = elements[: unsendable.position]
                packed = messages.pack(elements, self.arena) if elements else None
                failure = TypeError(
                    f"element {outcome.first + unsendable.position} can not be sent by worker "
                    f"{self._worker}: {unsendable.problem}"
                )
        told = None
        if failure is not None:
            where = outcome.first + len(elements)
            told = messages.pack([self._told(failure, where)], self.arena)
        slots = self._lend([*(packed.slots if packed else ()), *(told.slots if told else ())])
        texts = (packed.text if packed else None, told.text if told else None)
        self._send(("made", number, *texts, outcome.extra, slots, self.arena.take_dropped()))

    def _told(self, failure: BaseException, element: int) -> Any:
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
            failure = failures.death(self._worker, code, f"while making element {element}")
        return {**failures.tell(failure), "element": element}

    def broken(self, failure: BaseException) -> None:
        """Tells that the job could not be opened."""
        told = messages.pack([failures.tell(failure)], self.arena)
        self._lend(told.slots)
        self._send(("broken", told.text))

    def _lend(self, slots: list[Slot]) -> list[int]:
        """Keeps `slots` until they are returned; the parent maps those it has not seen before."""
        fresh = []
        numbers = []
        for slot in slots:
            number = slot.shared_id
            if number is None:
                raise TypeError("only slots in shared memory can be sent")
            self._sent[number] = slot
            numbers.append(number)
            given = slot.take_file()
            if given is not None:
                fresh.append((number, *given))
        for start in range(0, len(fresh), _FILES_PER_MESSAGE):
            part = fresh[start : start + _FILES_PER_MESSAGE]
            files = [file for _, file, _ in part]
            self._send(("slots", [(number, length) for number, _, length in part]), files)
            for file in files:
                os.close(file)
        return numbers


class SharedArena:
    """The worker's slots, within the memory that all workers have together."""

    def __init__(self, board: Board, count: int, ask: Callable[[int], None]) -> None:
        self._arena = Arena(shared=True)
        self._private = Arena()
        self._board = board
        self._spare = _SPARE_PER_WORKER * count
        self._ask = ask
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._dropped: list[int] = []

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """An array in a slot of its own, where it is large enough for that.

        Only the thread that does the tasks can wait for room: where there is none, the arrays of
        others lie in memory of their own, to be copied when they are sent.
        """
        byte_len = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if byte_len < messages.OWN_SLOT_BYTES:
            return self._private.array(shape, dtype)
        with self._lock:
            growth = self._missing(byte_len)
            if not growth:
                return self._arena.array(shape, dtype)
            if threading.get_ident() != self._thread:
                return self._private.array(shape, dtype)
            self._ask(growth)
            return self._arena.array(shape, dtype)

    def slot(self, byte_len: int) -> Slot:
        """A slot of `byte_len` bytes."""
        with self._lock:
            growth = self._missing(byte_len)
            if growth:
                self._ask(growth)
            return self._arena.slot(byte_len)

    def _missing(self, byte_len: int) -> int:
        """Makes room for a slot of `byte_len` bytes; returns how many must be asked for."""
        growth = self._arena.growth(byte_len)
        if not growth or self._board.reserve(growth, self._spare * growth):
            return 0
        free = self._arena.free_bytes
        if free:
            self._dropped += self._arena.trim(0)
            self._board.release(free)
            if self._board.reserve(growth, self._spare * growth):
                return 0
        return growth

    def take_dropped(self) -> list[int]:
        """The slots that are gone since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped


def run(connection: socket.socket, job_file: int, board_file: int, set_up: SetUp) -> NoReturn:
    """Does tasks until told to leave, then ends the process."""
    code = 1
    try:
        _serve(connection, job_file, board_file, set_up)
        code = 0
    except (_LeaveError, ConnectionError):
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _serve(connection: socket.socket, job_file: int, board_file: int, set_up: SetUp) -> None:
    board = Board.open(board_file, set_up.num_workers, set_up.budget_bytes)
    channel = _Channel(connection, set_up.worker, set_up.num_workers, board)
    forked = _ForkWatch()
    try:
        _settle_in(set_up)
        place = Place(
            set_up.worker,
            set_up.num_workers,
            channel.arena,
            lambda element: board.mark(set_up.worker, element + 1),
        )
        runner = _job(job_file, set_up).open(place)
    except BaseException as failure:
        forked.leave_if_child(failure)
        channel.broken(failure)
        return
    while True:
        number, task = channel.next_task()
        try:
            outcome = runner.run(task)
        except BaseException as failure:
            forked.leave_if_child(failure)
            outcome = Outcome([], failure, 0)
        forked.leave_if_child(outcome.failure)
        channel.reply(number, outcome)
        del outcome  # its memory is free while this waits


def _job(job_file: int, set_up: SetUp) -> Job:
    """The job, over memory that all workers share until one of them writes to it."""
    length, places = set_up.job
    access = mmap.PROT_READ | mmap.PROT_WRITE
    whole = mmap.mmap(job_file, 0, flags=mmap.MAP_PRIVATE, prot=access)
    os.close(job_file)
    view = memoryview(whole)
    buffers = [view[offset : offset + size] for offset, size in places]
    job: Job = pickle.loads(view[:length], buffers=buffers)
    return job


def _settle_in(set_up: SetUp) -> None:
    sys.path[:] = set_up.path
    if set_up.environment != dict(os.environ):
        os.environ.clear()
        os.environ.update(set_up.environment)
    with contextlib.suppress(OSError):
        os.chdir(set_up.directory)
    if "numpy.random" in sys.modules:  # forked with every worker, but not to be the same in all
        np.random.seed()  # noqa: NPY002
    with contextlib.suppress(Exception):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"worker {set_up.worker}: %(levelname)s:%(name)s:%(message)s")
    )
    logging.basicConfig(handlers=[handler], level=set_up.log_level, force=True)


class _ForkWatch:
    """Knows the worker from a child that a user's function forked off it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def leave_if_child(self, failure: BaseException | None) -> None:
        """Ends a child that came back from the user's function, without a word to the parent."""
        if os.getpid() != self._pid:
            code = failure.code if isinstance(failure, SystemExit) else int(failure is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))
