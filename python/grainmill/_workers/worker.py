"""A worker process: receives tasks and sends results until its parent closes the socket."""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from grainmill._native import SharedBudget, limit_threads, num_cores
from grainmill._stats import timeline
from grainmill._threads import serves_parent
from grainmill._workers import (
    accelerators,
    at_exit,
    failures,
    main_classes,
    messages,
    stacks,
    wire,
)
from grainmill._workers.shared_arena import SharedArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._native import Slot


# A job may run several plans. Where the elements of a task have no known numbers, what it marks
# tells the plan, too: element `i` of plan `k` is `k * PLAN_MARKS + i`.
PLAN_MARKS = 1 << 44
# How often a worker calls `Runner.poll` while tasks run on its threads.
_POLL_MS = 20
# Empties the pipe: each finished task writes one byte, and there are fewer tasks.
_MAX_WAKE_BYTES = 1 << 16


class Outcome(NamedTuple):
    """The outcome of a task, in the worker.

    Attributes:
        elements: The elements computed before `failure`.
        failure: The exception that the next element raised, if any.
        first: The number of the first element, for messages.
        extra: Whatever else the job reports to the parent.
        batch_size: Elements in each batch, where `elements` are batches; otherwise 0.
        stride: The difference between the numbers of two consecutive elements.
    """

    elements: list[Any]
    failure: BaseException | None
    first: int | None
    extra: Any = None
    batch_size: int = 0
    stride: int = 1

    def number(self, position: int) -> int | None:
        """The number of `elements[position]`, or of the first element of that batch."""
        if self.first is None:
            return None
        return self.first + position * max(1, self.batch_size) * self.stride


class Runner(abc.ABC):
    """A job that is open in one worker."""

    @abc.abstractmethod
    def run(self, task: Any) -> Outcome:
        """Runs one task and returns its outcome."""

    def start(self, task: Any, finish: Callable[[Outcome], None]) -> None:
        """Starts one task, or runs it; any thread may then call `finish` with the outcome."""
        finish(self.run(task))

    def poll(self) -> None:  # noqa: B027 - a runner without threads needs none
        """Called on the main thread every few milliseconds while tasks run on other threads."""


class WorkerContext(NamedTuple):
    """Where a job runs.

    Attributes:
        worker: The worker's number, from 0.
        num_workers: How many workers the pool has.
        arena: Allocates arrays that can be sent without a copy.
        mark: Records the number of the element being computed, to be named if the worker dies or
            hangs.
        index_file: A descriptor of memory in which all workers of the pool share the indices of
            files; the job closes it.
    """

    worker: int
    num_workers: int
    arena: SharedArena
    mark: Callable[[int], None]
    index_file: int


class Job(abc.ABC):
    """What the workers of a pool run; it is pickled once and opened in each of them.

    Attributes:
        index_byte_len: The most bytes of file indices that the workers share.
    """

    index_byte_len = 0

    @property
    def modules(self) -> Sequence[str]:
        """The modules that are imported once, before the workers are forked."""
        return (type(self).__module__,)

    @abc.abstractmethod
    def open(self, context: WorkerContext) -> Runner:
        """Opens the job in a worker."""


class WorkerConfig(NamedTuple):
    """What a worker receives at its start.

    Attributes:
        worker: The worker's number, from 0.
        num_workers: How many workers the pool has.
        budget_bytes: Shared memory that all workers together may hold.
        job: The length of the pickled job in the job file, and the offset and length of each of its
            out-of-band buffers.
        path: The parent's `sys.path`.
        directory: The parent's working directory.
        environment: The parent's environment, with the platforms that JAX may use in workers.
        log_level: The level of the parent's root logger.
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


class _PendingTask:
    """A task that was started, and its outcome once it has finished."""

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
        num_workers: int,
        shared_budget: SharedBudget,
        budget_bytes: int,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._tasks: deque[Any] = deque()
        self._pending: deque[_PendingTask] = deque()
        self._thread = threading.get_ident()
        self._wake_reader, self._wake_writer = os.pipe()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._wake_reader, select.POLLIN)
        self._sent_slots: dict[int, Slot] = {}
        self.arena = SharedArena(shared_budget, num_workers, budget_bytes, self._request_memory)

    def _receive(self) -> Any:
        message, _ = wire.receive(self._connection)
        return message

    def _send(self, message: Any, files: Sequence[int] = ()) -> None:
        wire.send(self._connection, message, files)

    def next_task(self, poll: Callable[[], None]) -> tuple[Callable[[Outcome], None], Any]:
        """Waits for the next task, and reclaims the slots that the parent returns with it.

        Args:
            poll: Called every few milliseconds while earlier tasks are pending.

        Returns:
            The function that takes the outcome of the task, on any thread; and the task.
        """
        while self._pending:
            self._reply_to_finished()
            if self._tasks or not self._pending:
                break
            for file, _ in self._poll.poll(_POLL_MS):
                if file == self._wake_reader:
                    os.read(file, _MAX_WAKE_BYTES)
                else:
                    self._tasks.append(self._receive())
            poll()
        number, task, slots, timeline_number = (
            self._tasks.popleft() if self._tasks else self._receive()
        )
        timeline.follow(timeline_number)
        returned, retired_by_fork = slots
        for slot in retired_by_fork:
            self.arena.retire(self._sent_slots.pop(slot))
        for slot in returned:
            self._sent_slots.pop(slot, None)
        self.arena.trim_unused()
        pending = _PendingTask(number)
        self._pending.append(pending)

        def finish(outcome: Outcome) -> None:
            pending.outcome = outcome
            if threading.get_ident() != self._thread:
                os.write(self._wake_writer, b"!")

        return finish, task

    def _reply_to_finished(self) -> None:
        """Sends the outcomes of the tasks that have finished, in the order of the tasks."""
        while self._pending and (outcome := self._pending[0].outcome) is not None:
            first = self._pending.popleft()
            first.outcome = None  # frees its memory even while `_reply` waits for shared memory
            self._reply(first.number, outcome)

    def _request_memory(self, byte_len: int) -> None:
        """Waits until the parent has reserved `byte_len` more bytes for this worker."""
        self._send(("reserve", byte_len))
        while (message := self._receive()) is not None:
            self._tasks.append(message)

    def _reply(self, number: int, outcome: Outcome) -> None:
        """Sends the outcome of task `number`."""
        elements, failure = outcome.elements, outcome.failure
        packed, started_s = None, time.perf_counter()
        if elements:
            try:
                packed = messages.pack(elements, self.arena)
            except messages.UnsendableError as unsendable:
                elements = elements[: unsendable.position]
                packed = messages.pack(elements, self.arena) if elements else None
                failure = TypeError(
                    f"{_described(outcome, unsendable.position)} cannot be sent by worker "
                    f"{self._worker}: {unsendable.problem}"
                )
        packed_failure = None
        if failure is not None:
            serialized = self._serialized(failure, outcome.number(len(elements)))
            packed_failure = messages.pack([serialized], self.arena)
        computed, failed = self._publish_slots(packed), self._publish_slots(packed_failure)
        events = None
        if (taken := timeline.current) is not None:
            taken.add("send", "transfer", started_s, time.perf_counter())
            events = taken.drain()
        freed = self.arena.take_freed()
        self._send(("result", number, computed, failed, outcome.extra, freed, events))

    def _serialized(self, failure: BaseException, element: int | None) -> Any:
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
            activity = "while computing" + ("" if element is None else f" element {element}")
            failure = failures.worker_exited(self._worker, code, activity)
        return {**failures.serialized(failure), "element": element}

    def send_open_failure(self, failure: BaseException) -> None:
        """Reports that the job could not be opened."""
        packed = messages.pack([failures.serialized(failure)], self.arena)
        self._send(("open_failed", self._publish_slots(packed)))

    def _publish_slots(
        self, packed: messages.Packed | None
    ) -> tuple[messages.Header, list[int]] | None:
        """Sends the descriptors of new slots; returns the header and the numbers of all slots.

        The slots are retained here until the parent returns them.
        """
        if packed is None:
            return None
        new_slots = []
        numbers = []
        for slot in packed.slots:
            number = messages.slot_number(slot)
            self._sent_slots[number] = slot
            numbers.append(number)
            file_and_len = slot.take_file()
            if file_and_len is not None:
                new_slots.append((number, *file_and_len))
        self.arena.record_sent([number for number, *_ in new_slots])
        for start in range(0, len(new_slots), wire.MAX_FILES):
            group = new_slots[start : start + wire.MAX_FILES]
            files = [file for _, file, _ in group]
            self._send(("slots", [(number, length) for number, _, length in group]), files)
            for file in files:
                os.close(file)
        return packed.header, numbers


def _described(outcome: Outcome, position: int) -> str:
    first = outcome.number(position)
    if first is None:
        return "an element"
    if not outcome.batch_size:
        return f"element {first}"
    return f"the batch of elements {first} to {first + outcome.batch_size - 1}"


class WorkerFiles(NamedTuple):
    """The file descriptors that a worker receives and owns.

    Attributes:
        connection: The socket to the parent.
        job: The file with the pickled job.
        shared_budget: The page that all workers share.
        shared_index: See `WorkerContext.index_file`.
        stacks: The pipe for `stacks.write_on_signals`.
    """

    connection: int
    job: int
    shared_budget: int
    shared_index: int
    stacks: int


def run(files: WorkerFiles, config: WorkerConfig) -> NoReturn:
    """Runs tasks until the parent closes the socket, then exits."""
    code = 1
    gc.enable()  # which the starter disabled
    try:
        _serve(files, config)
        code = 0
    except (EOFError, ConnectionError):  # the parent has closed the socket
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        at_exit.run_calls()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _serve(files: WorkerFiles, config: WorkerConfig) -> None:
    stacks.write_on_signals(files.stacks)
    serves_parent[0] = True
    connection = socket.socket(fileno=files.connection)
    shared_budget = SharedBudget.open(files.shared_budget, config.num_workers, config.budget_bytes)
    channel = _Channel(
        connection, config.worker, config.num_workers, shared_budget, config.budget_bytes
    )
    fork_detector = _ForkDetector()
    try:
        _apply_config(config)

        def mark(element: int) -> None:
            if fork_detector.is_child:
                # The child finishes the element it was forked in, and computes no others.
                fork_detector.exit_if_child(None)
            shared_budget.set_progress(config.worker, element + 1)

        context = WorkerContext(
            config.worker, config.num_workers, channel.arena, mark, files.shared_index
        )
        runner = _loaded_job(files.job, config).open(context)
    except BaseException as failure:
        fork_detector.exit_if_child(failure)
        channel.send_open_failure(failure)
        return
    while True:
        finish, task = channel.next_task(runner.poll)

        def finish_unless_child(
            outcome: Outcome, finish: Callable[[Outcome], None] = finish
        ) -> None:
            fork_detector.exit_if_child(outcome.failure)
            finish(outcome)

        try:
            runner.start(task, finish_unless_child)
        except BaseException as failure:
            finish_unless_child(Outcome([], failure, None))


def _loaded_job(job_file: int, config: WorkerConfig) -> Job:
    """The unpickled job; its buffers are copy-on-write memory that all workers share."""
    length, buffer_ranges = config.job
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(job_file, 0, flags=mmap.MAP_PRIVATE, prot=access)
    os.close(job_file)
    view = memoryview(mapping)
    buffers = [view[offset : offset + size] for offset, size in buffer_ranges]
    job: Job = pickle.loads(view[:length], buffers=buffers)
    return job


def _apply_config(config: WorkerConfig) -> None:
    sys.path[:] = config.path
    main_classes.set_receiver_classes(config.main_classes)
    for name in os.environ.keys() - config.environment.keys():
        del os.environ[name]
    for name, value in config.environment.items():  # nearly all are inherited
        if os.environ.get(name) != value:
            os.environ[name] = value
    accelerators.restrict_jax()
    # Processes are what runs in parallel here; else each would use a thread for every core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    limit_threads(num_cores() // config.num_workers)
    with contextlib.suppress(OSError):
        os.chdir(config.directory)
    if "numpy.random" in sys.modules:  # all workers were forked with the same global generator
        np.random.seed()  # noqa: NPY002
    with contextlib.suppress(Exception):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"worker {config.worker}: %(levelname)s:%(name)s:%(message)s")
    )
    logging.basicConfig(handlers=[handler], level=config.log_level, force=True)


class _ForkDetector:
    """Distinguishes the worker from a child process that a user's function forked."""

    def __init__(self) -> None:
        self.is_child = False
        os.register_at_fork(after_in_child=self._record_fork)

    def _record_fork(self) -> None:
        self.is_child = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or `multiprocessing` could not end it

    def exit_if_child(self, failure: BaseException | None) -> None:
        """Exits, if this is a forked child whose user function returned; sends nothing."""
        if self.is_child:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            code = failure.code if isinstance(failure, SystemExit) else int(failure is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))
