"""What a worker does: one task after another, until the other end of its socket is closed."""

from __future__ import annotations

import abc
import contextlib
import logging
import mmap
import os
import pickle
import select
import socket
import sys
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from grainmill._native import SharedBudget
from grainmill._workers import failures, messages, wire
from grainmill._workers.shared_arena import SharedArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._native import Slot


# How often a worker looks after tasks that are under way on its threads.
_LOOK_MS = 20
# More messages than there can be.
_MANY = 1 << 16


class Outcome(NamedTuple):
    """What became of a task.

    Attributes:
        elements: What was made, up to `failure`.
        failure: What hindered the next one, if anything did.
        first: The number of the first element, for messages.
        extra: What else the one who gave the task needs.
        batch_size: Where `elements` are batches, how many of those numbered are in each.
        stride: How far the number of an element is from that of the one before.
    """

    elements: list[Any]
    failure: BaseException | None
    first: int | None
    extra: Any = None
    batch_size: int = 0
    stride: int = 1

    def number(self, position: int) -> int | None:
        """The number of the first element of `elements[position]`, for messages."""
        if self.first is None:
            return None
        return self.first + position * max(1, self.batch_size) * self.stride


class Runner(abc.ABC):
    """A job under way in one worker."""

    @abc.abstractmethod
    def run(self, task: Any) -> Outcome:
        """Does one task."""

    def start(self, task: Any, finish: Callable[[Outcome], None]) -> None:
        """Begins one task, or does it; `finish` is called with its outcome, on any thread."""
        finish(self.run(task))

    def look(self) -> None:  # noqa: B027 - there may be nothing to look after
        """Called again and again while tasks are under way on other threads."""


class WorkerContext(NamedTuple):
    """Where a job runs.

    Attributes:
        worker: The worker's number, from 0.
        num_workers: How many there are.
        arena: Where arrays that are to be sent are best made.
        mark: Notes the number of the element in the making, for when the worker dies or hangs.
        index_file: A descriptor, for the job to close, of memory in which all workers of the pool
            share the indices of files.
    """

    worker: int
    num_workers: int
    arena: SharedArena
    mark: Callable[[int], None]
    index_file: int


class Job(abc.ABC):
    """What the workers of a pool are for; it is pickled once and opened in each of them.

    Attributes:
        index_byte_len: How many bytes of the indices of files they share at most.
    """

    index_byte_len = 0

    @property
    def modules(self) -> Sequence[str]:
        """What is imported once, before the workers are forked."""
        return (type(self).__module__,)

    @abc.abstractmethod
    def open(self, place: WorkerContext) -> Runner:
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
        main_classes: The classes of the parent's main script, by name; see
            `messages.main_classes`.
    """

    worker: int
    num_workers: int
    budget_bytes: int
    job: tuple[int, Sequence[tuple[int, int]]]
    path: list[str]
    directory: str
    environment: dict[str, str]
    log_level: int
    main_classes: dict[str, bool]


class _UnderWay:
    """A task, and what became of it, once it is done."""

    __slots__ = ("number", "outcome")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: Outcome | None = None


class _Channel:
    """The worker's end of the socket to its parent."""

    def __init__(
        self,
        connection: socket.socket,
        worker: int,
        count: int,
        shared_budget: SharedBudget,
        budget_bytes: int,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._tasks: deque[Any] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._thread = threading.get_ident()
        self._finished, self._note_finished = os.pipe()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._finished, select.POLLIN)
        self._sent: dict[int, Slot] = {}
        self.arena = SharedArena(shared_budget, count, budget_bytes, self._ask)

    def _receive(self) -> Any:
        message, _ = wire.receive(self._connection)
        return message

    def _send(self, message: Any, files: Sequence[int] = ()) -> None:
        wire.send(self._connection, message, files)

    def next_task(self, look: Callable[[], None]) -> tuple[Callable[[Outcome], None], Any]:
        """Waits for the next task, and takes back the slots that came with it.

        Args:
            look: Called again and again while there is something under way.

        Returns:
            What is to be called with the outcome of the task, on any thread, and the task.
        """
        while self._under_way:
            self._reply_to_finished()
            if self._tasks or not self._under_way:
                break
            for file, _ in self._poll.poll(_LOOK_MS):
                if file == self._finished:
                    os.read(file, _MANY)
                else:
                    self._tasks.append(self._receive())
            look()
        number, task, slots = self._tasks.popleft() if self._tasks else self._receive()
        returned, left_to_children = slots
        for slot in left_to_children:
            self.arena.give_up(self._sent.pop(slot))
        for slot in returned:
            self._sent.pop(slot, None)
        self.arena.tidy()
        under_way = _UnderWay(number)
        self._under_way.append(under_way)

        def finish(outcome: Outcome) -> None:
            under_way.outcome = outcome
            if threading.get_ident() != self._thread:
                os.write(self._note_finished, b"!")

        return finish, task

    def _reply_to_finished(self) -> None:
        """Replies to tasks in the order in which they came, as far as they are done."""
        while self._under_way and (outcome := self._under_way[0].outcome) is not None:
            first = self._under_way.popleft()
            first.outcome = None  # its memory is free while this waits
            self._reply(first.number, outcome)

    def _ask(self, byte_len: int) -> None:
        """Waits until there is room for `byte_len` bytes more."""
        self._send(("need", byte_len))
        while (message := self._receive()) is not None:
            self._tasks.append(message)

    def _reply(self, number: int, outcome: Outcome) -> None:
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
                    f"{_name_of(outcome, unsendable.position)} cannot be sent by worker "
                    f"{self._worker}: {unsendable.problem}"
                )
        told = None
        if failure is not None:
            told = messages.pack([self._told(failure, outcome.number(len(elements)))], self.arena)
        made, failed = self._lent(packed), self._lent(told)
        self._send(("made", number, made, failed, outcome.extra, self.arena.take_dropped()))

    def _told(self, failure: BaseException, element: int | None) -> Any:
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
            doing = "at work" if element is None else f"while making element {element}"
            failure = failures.worker_ended(self._worker, code, doing)
        return {**failures.serialized(failure), "element": element}

    def broken(self, failure: BaseException) -> None:
        """Tells that the job could not be opened."""
        self._send(
            ("broken", self._lent(messages.pack([failures.serialized(failure)], self.arena)))
        )

    def _lent(self, packed: messages.Packed | None) -> tuple[messages.Text, list[int]] | None:
        """The text and the numbers of the slots, which are kept until they are returned.

        The parent maps those it has not seen before.
        """
        if packed is None:
            return None
        fresh = []
        numbers = []
        for slot in packed.slots:
            number = messages.number_of(slot)
            self._sent[number] = slot
            numbers.append(number)
            given = slot.take_file()
            if given is not None:
                fresh.append((number, *given))
        self.arena.note_sent([number for number, *_ in fresh])
        for start in range(0, len(fresh), wire.MOST_FILES):
            part = fresh[start : start + wire.MOST_FILES]
            files = [file for _, file, _ in part]
            self._send(("slots", [(number, length) for number, _, length in part]), files)
            for file in files:
                os.close(file)
        return packed.text, numbers


def _name_of(outcome: Outcome, position: int) -> str:
    first = outcome.number(position)
    if first is None:
        return "an element"
    if not outcome.batch_size:
        return f"element {first}"
    return f"the batch of elements {first} to {first + outcome.batch_size - 1}"


class Files(NamedTuple):
    """Descriptors that a worker is given, each its own.

    Attributes:
        connection: Of the socket to the main process.
        job: Of the pickled job.
        shared_budget: Of the page that all workers share.
        shared_index: See `WorkerContext.index_file`.
    """

    connection: int
    job: int
    shared_budget: int
    shared_index: int


def run(files: Files, set_up: SetUp) -> NoReturn:
    """Does tasks until told to leave, then ends the process."""
    code = 1
    try:
        _serve(files, set_up)
        code = 0
    except (EOFError, ConnectionError):  # the other end is gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _serve(files: Files, set_up: SetUp) -> None:
    connection = socket.socket(fileno=files.connection)
    shared_budget = SharedBudget.open(files.shared_budget, set_up.num_workers, set_up.budget_bytes)
    channel = _Channel(
        connection, set_up.worker, set_up.num_workers, shared_budget, set_up.budget_bytes
    )
    forked = _ForkWatch()
    try:
        _settle_in(set_up)

        def mark(element: int) -> None:
            if forked.is_child:
                forked.leave_if_child(None)  # it was to make one element, not those after it
            shared_budget.set_progress(set_up.worker, element + 1)

        place = WorkerContext(
            set_up.worker, set_up.num_workers, channel.arena, mark, files.shared_index
        )
        runner = _job(files.job, set_up).open(place)
    except BaseException as failure:
        forked.leave_if_child(failure)
        channel.broken(failure)
        return
    while True:
        finish, task = channel.next_task(runner.look)

        def leave_or_finish(outcome: Outcome, finish: Callable[[Outcome], None] = finish) -> None:
            forked.leave_if_child(outcome.failure)
            finish(outcome)

        try:
            runner.start(task, leave_or_finish)
        except BaseException as failure:
            leave_or_finish(Outcome([], failure, None))


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
    messages.expect_classes(set_up.main_classes)
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
        self.is_child = False
        os.register_at_fork(after_in_child=self._note_fork)

    def _note_fork(self) -> None:
        self.is_child = True

    def leave_if_child(self, failure: BaseException | None) -> None:
        """Ends a child that came back from the user's function, without a word to the parent."""
        if self.is_child:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            code = failure.code if isinstance(failure, SystemExit) else int(failure is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))
