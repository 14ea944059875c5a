"""The processes of a pool: starting them, learning of their exits, ending them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from grainmill._native import (
    RemoteSlots,
    SharedBudget,
    after_fork,
    before_fork,
    create_shared_file,
    create_shared_index,
)
from grainmill._plan.closing import closed_error
from grainmill._threads import at_fork, begin_exit
from grainmill._workers import accelerators, by_value, messages, stacks, starter, wire
from grainmill._workers.worker import WorkerConfig

if TYPE_CHECKING:
    import pickle
    from collections.abc import Iterable, Sequence

    from grainmill._plan.tracebacks import CodePlace
    from grainmill._workers.stacks import Requests
    from grainmill._workers.worker import Job

_ALIGNMENT = 64
_CLOSE_WAIT_S = 1.5
_STATUS_WAIT_S = 1.0


class WorkerGroup:
    """The processes of a pool and the sockets to them.

    Args:
        job: The job of the workers.
        num_workers: How many workers.
        budget_bytes: Shared memory that they may hold together.
        components: See `WorkerPool`.

    Attributes:
        connections: The socket to each worker.
        control_sockets: The socket to the zygote, which reports the exits of workers; or one to
            each worker, if workers cannot be forked.
        exit_codes: The exit code of each worker that has exited by itself; `None` if it is unknown.
        starter_code: The exit code of the zygote, or of what started it, if either has exited by
            itself.
        remote_slots: The slots of each worker.
        shared_budget: The page that all workers share.
    """

    def __init__(
        self, job: Job, num_workers: int, budget_bytes: int, components: Iterable[Any]
    ) -> None:
        data, buffers = _pickled(job, components)
        self._is_closing = False
        self._end_lock = threading.Lock()
        self._forks = _can_fork[0]
        self._processes: list[starter.Zygote | subprocess.Popen[bytes]] = []
        self.control_sockets: list[socket.socket] = []
        self.exit_codes: dict[int, int | None] = {}
        self.starter_code: int | None = None
        self.connections: list[socket.socket] = []
        self._stack_readers: list[stacks.StackReader] = []
        self.shared_budget, budget_file = SharedBudget.create(num_workers, budget_bytes)
        self.remote_slots = [RemoteSlots(self.shared_budget) for _ in range(num_workers)]
        with contextlib.ExitStack() as files:
            files.callback(os.close, budget_file)
            job_file, job_layout = _job_file(data, buffers)
            files.callback(os.close, job_file)
            index_file = create_shared_index(job.index_byte_len)
            files.callback(os.close, index_file)
            _live_groups[id(self)] = self
            try:
                for worker in range(num_workers):
                    if not worker or not self._forks:
                        self._launch(job.modules)
                    config = _worker_config(worker, num_workers, budget_bytes, job_layout)
                    self._start_worker(config, [job_file, budget_file, index_file])
            except BaseException:
                self.end()
                raise

    def _launch(self, modules: Sequence[str]) -> None:
        if self._forks:
            zygote = starter.start_zygote(modules)
            self._processes.append(zygote)
            self.control_sockets.append(zygote.control)
        else:
            process, control = starter.started_process(fork=False)
            self._processes.append(process)
            self.control_sockets.append(control)

    def _start_worker(self, config: WorkerConfig, files: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.append(ours)
        reads_stacks, writes_stacks = os.pipe()
        self._stack_readers.append(stacks.StackReader(reads_stacks))
        os.set_blocking(writes_stacks, False)
        try:
            with theirs, contextlib.suppress(ConnectionError):  # `receive_exit` reports that later
                files = [theirs.fileno(), *files, writes_stacks]
                wire.send(self.control_sockets[-1], config, files)
        finally:
            os.close(writes_stacks)

    def stacks(self, worker: int) -> list[list[CodePlace]]:
        """The calls on each thread of a worker, the innermost one last; none if it is stopped.

        The worker writes them when it gets a signal, whatever it is doing. Any thread may call it.
        """
        return self._stack_readers[worker].stacks(lambda: self._signal(worker, stacks.SIGNAL))

    def requests(self, worker: int) -> Requests:
        """What a worker waits for; none if it is stopped, or calls what does not return."""
        send = self._signal
        return self._stack_readers[worker].requests(lambda: send(worker, stacks.REQUESTS_SIGNAL))

    def _signal(self, worker: int, number: int) -> None:
        if self._forks:  # the zygote sends the signal
            wire.send(self.control_sockets[0], stacks.Wanted(worker, number))
        else:
            self._processes[worker].send_signal(number)

    def check_open(self) -> None:
        """Raises `ValueError` if the workers were told to end."""
        if self._is_closing:
            raise closed_error()

    def receive_exit(self, control: int) -> None:
        """Waits for the exit of a worker, at the control socket with the index `control`.

        Raises:
            ForkUnavailableError: The zygote cannot fork.
        """
        try:
            (worker, code), _ = wire.receive(self.control_sockets[control])
        except EOFError:
            self.check_open()
            if self._forks:  # the zygote is gone, and no worker outlives it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.starter_code = self._processes[control].wait(_CLOSE_WAIT_S)
                for worker in range(len(self.connections)):
                    self.exit_codes.setdefault(worker, None)
            elif control not in self.exit_codes:
                self.exit_codes[control] = self._processes[control].wait(_CLOSE_WAIT_S)
        else:
            if worker is None:
                raise ForkUnavailableError(code)
            self.exit_codes[worker] = code

    def wait_for_exit(self, worker: int) -> None:
        """Waits up to a second for the exit code of a worker whose socket was closed."""
        deadline = time.monotonic() + _STATUS_WAIT_S
        control = 0 if self._forks else worker
        poll = select.poll()
        poll.register(self.control_sockets[control], select.POLLIN)
        while worker not in self.exit_codes:
            wait_s = deadline - time.monotonic()
            if wait_s > 0 and poll.poll(wait_s * 1000):
                self.receive_exit(control)
            else:
                self.exit_codes[worker] = None

    def disconnect(self) -> None:
        """Makes all processes of the pool exit, and wakes threads that wait for one of them.

        Any thread may call it at any time; it does not block.
        """
        self._is_closing = True
        # Forked children of this process may hold these sockets too, so closing would not suffice.
        for connection in (*self.connections, *self.control_sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Ends all processes of the pool, and waits until they have exited."""
        self.disconnect()
        with self._end_lock:
            deadline = time.monotonic() + _CLOSE_WAIT_S
            try:
                for process in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                for process in self._processes:
                    process.kill()  # the workers of a zygote die with it
                    process.wait()
                self.abandon()

    def forget_processes(self) -> None:
        """Makes a forked child drop the processes, which are not its own, without a warning."""
        for process in self._processes:
            process.returncode = 0

    def abandon(self) -> None:
        """Closes the sockets of this process only, and leaves the workers running."""
        self._is_closing = True
        _live_groups.pop(id(self), None)
        for connection in (*self.connections, *self.control_sockets):
            connection.close()
        for process in self._processes:
            if isinstance(process, starter.Zygote):
                process.close()
        self._stack_readers.clear()


# The groups that have not ended yet, by `id`.
_live_groups: dict[int, WorkerGroup] = {}


@atexit.register
def _end_all() -> None:
    """At exit, ends all groups in parallel, including those that a thread is waiting for."""
    begin_exit()
    groups = list(_live_groups.values())
    for group in groups:
        group.disconnect()
    for group in groups:
        group.end()


def _forget_groups() -> None:
    """In a forked child, leaves the parent's processes alone, and drops them without a warning."""
    for group in _live_groups.values():
        group.forget_processes()
    _live_groups.clear()


at_fork(after_in_child=_forget_groups)


def _worker_config(
    worker: int, num_workers: int, budget_bytes: int, job_layout: tuple[int, list[tuple[int, int]]]
) -> WorkerConfig:
    return WorkerConfig(
        worker,
        num_workers,
        budget_bytes,
        job_layout,
        list(sys.path),
        _working_directory(),
        accelerators.worker_environment(os.environ),
        logging.getLogger().getEffectiveLevel(),
        messages.main_classes(),
    )


class ForkUnavailableError(Exception):
    """The zygote has threads that it did not start, so processes forked from it might hang."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.threads = threads


# Whether workers may be forked; a list, so that `disable_fork` can change it.
_can_fork = [hasattr(os, "fork")]


def disable_fork(refused: ForkUnavailableError) -> None:
    """Makes later pools start a Python process for each worker instead of forking, and warns."""
    _can_fork[0] = False
    warnings.warn(
        f"a fresh Python process has {refused.threads} threads here, so workers cannot be forked "
        "from one: each is started on its own, which takes longer. Threads at startup come from a "
        "`sitecustomize` or a `.pth` file",
        RuntimeWarning,
        stacklevel=2,
    )


def _working_directory() -> str:
    try:
        return str(os.getcwd())  # noqa: PTH109 - `Path.cwd` is the same
    except FileNotFoundError:
        return "/"


def _pickled(job: Job, components: Iterable[Any]) -> tuple[bytes, list[Any]]:
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = by_value.dumps(job, buffers.append)
    except Exception as failure:
        for component in components:
            try:
                by_value.dumps(component)
            except Exception:
                notes = failure.__notes__ if hasattr(failure, "__notes__") else []
                failure.__notes__ = [f"Dataset: {component} cannot be pickled!", *notes]
                break
        raise
    return data, [buffer.raw() for buffer in buffers]


def _job_file(data: bytes, buffers: Sequence[Any]) -> tuple[int, tuple[int, list[tuple[int, int]]]]:
    """An anonymous file with the pickled job, and its layout; see `WorkerConfig.job`."""
    buffer_ranges = []
    end = len(data)
    for buffer in buffers:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        buffer_ranges.append((start, len(buffer)))
        end = start + len(buffer)
    file = create_shared_file("grainmill-job", end)
    wire.write(file, data, 0)
    for buffer, (start, _) in zip(buffers, buffer_ranges, strict=True):
        wire.write(file, buffer, start)
    return file, (len(data), buffer_ranges)


at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=after_fork)
