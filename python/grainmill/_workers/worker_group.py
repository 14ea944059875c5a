"""The processes of a pool: how they start, how their ends are heard of, how they are ended."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import cloudpickle

from grainmill._native import RemoteSlots, SharedBudget, create_shared_index, note_fork, note_forked
from grainmill._plan.closing import closed_error
from grainmill._workers import messages, wire
from grainmill._workers.worker import SetUp

if TYPE_CHECKING:
    import pickle
    from collections.abc import Iterable, Sequence

    from grainmill._workers.worker import Job

_ALIGNMENT = 64
_CLOSE_WAIT_S = 1.5
_STATUS_WAIT_S = 1.0

# Libraries that would start threads of their own in the process that workers are forked from.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LAUNCH = (
    "import sys; sys.path[:] = {path!r}; import importlib.util as u; "
    "s = u.spec_from_file_location('launch', {launch!r}); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); m.main({control}, {parent}, {modules!r}, fork={fork})"
)
_LAUNCHER = str(pathlib.Path(__file__).with_name("launch.py"))


class WorkerGroup:
    """The processes of a pool and the sockets to them.

    Args:
        job: What the workers do.
        num_workers: How many.
        budget_bytes: What they may hold in shared memory together.
        parts: What the job is made of, in the order in which one is to be blamed if the job can
            not be pickled.

    Attributes:
        connections: One socket for each worker.
        controls: The sockets to the zygote, or to each worker where none can be forked, which
            tell of workers that have ended.
        ended: The workers that have ended by themselves, each with its exit code; `None` where
            nobody is left who knows it.
        remote_slots: The slots of each worker.
        shared_budget: The page they share.
    """

    def __init__(self, job: Job, num_workers: int, budget_bytes: int, parts: Iterable[Any]) -> None:
        data, buffers = _pickled(job, parts)
        self._told_to_end = False
        self._ending = threading.Lock()
        self._forks = _can_fork[0]
        self._launched: list[subprocess.Popen[bytes]] = []
        self.controls: list[socket.socket] = []
        self.ended: dict[int, int | None] = {}
        self.connections: list[socket.socket] = []
        self.shared_budget, board_file = SharedBudget.create(num_workers, budget_bytes)
        self.remote_slots = [RemoteSlots(self.shared_budget) for _ in range(num_workers)]
        with contextlib.ExitStack() as files:
            files.callback(os.close, board_file)
            job_file, places = _job_file(data, buffers)
            files.callback(os.close, job_file)
            index_file = create_shared_index(job.index_byte_len)
            files.callback(os.close, index_file)
            _crews[id(self)] = self
            try:
                for worker in range(num_workers):
                    if not worker or not self._forks:
                        self._launch(job.modules)
                    set_up = _set_up(worker, num_workers, budget_bytes, places)
                    self._start_worker(set_up, [job_file, board_file, index_file])
            except BaseException:
                self.end()
                raise

    def _launch(self, modules: Sequence[str]) -> None:
        process, control = _launched(modules, fork=self._forks)
        self._launched.append(process)
        self.controls.append(control)

    def _start_worker(self, set_up: SetUp, files: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.append(ours)
        with theirs, contextlib.suppress(ConnectionError):  # then its end is heard of
            wire.send(self.controls[-1], set_up, [theirs.fileno(), *files])

    def check_open(self) -> None:
        """Raises `ValueError` where the workers were told to end."""
        if self._told_to_end:
            raise closed_error()

    def hear_of_ends(self, control: int) -> None:
        """Takes in what is told by the socket number `control`; waits for it.

        Raises:
            ForkRefusedError: The zygote cannot fork.
        """
        try:
            (worker, code), _ = wire.receive(self.controls[control])
        except EOFError:
            self.check_open()
            if self._forks:  # the zygote is gone, and no worker outlives it
                for worker in range(len(self.connections)):
                    self.ended.setdefault(worker, None)
            elif control not in self.ended:
                self.ended[control] = self._launched[control].wait(_CLOSE_WAIT_S)
        else:
            if worker is None:
                raise ForkRefusedError(code)
            self.ended[worker] = code

    def await_end(self, worker: int) -> None:
        """Waits a moment for the exit code of a worker that has hung up."""
        deadline = time.monotonic() + _STATUS_WAIT_S
        control = 0 if self._forks else worker
        poll = select.poll()
        poll.register(self.controls[control], select.POLLIN)
        while worker not in self.ended:
            wait_s = deadline - time.monotonic()
            if wait_s > 0 and poll.poll(wait_s * 1000):
                self.hear_of_ends(control)
            else:
                self.ended[worker] = None

    def hang_up(self) -> None:
        """Has all processes of the pool end, and whoever waits for one of them learn of that.

        Any thread may do so, at any time; it waits for nothing.
        """
        self._told_to_end = True
        # Forked children of this process may hold these sockets too, so closing is not enough.
        for connection in (*self.connections, *self.controls):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Has all processes of the pool end, and waits until they are gone."""
        self.hang_up()
        with self._ending:
            deadline = time.monotonic() + _CLOSE_WAIT_S
            try:
                for process in self._launched:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                for process in self._launched:
                    process.kill()  # the workers of a zygote go with it
                    process.wait()
                self.abandon()

    def abandon(self) -> None:
        """Closes this process's ends, without a word to the others."""
        self._told_to_end = True
        _crews.pop(id(self), None)
        for connection in (*self.connections, *self.controls):
            connection.close()


# Those that have not ended yet, by `id`.
_crews: dict[int, WorkerGroup] = {}


@atexit.register
def _end_all() -> None:
    """At exit, ends all of them at the same time, those too that a thread is waiting for."""
    crews = list(_crews.values())
    for group in crews:
        group.hang_up()
    for group in crews:
        group.end()


# The processes of a parent are not those of its forked child, which must not wait for them.
os.register_at_fork(after_in_child=_crews.clear)


def _set_up(
    worker: int, num_workers: int, budget_bytes: int, job: tuple[int, list[tuple[int, int]]]
) -> SetUp:
    return SetUp(
        worker,
        num_workers,
        budget_bytes,
        job,
        list(sys.path),
        _directory(),
        dict(os.environ),
        logging.getLogger().getEffectiveLevel(),
        messages.main_classes(),
    )


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
        f"a fresh Python process has {refused.threads} threads here, so workers cannot be forked "
        "from one: each starts by itself, which takes longer. Threads at start come from a "
        "`sitecustomize` or a `.pth` file",
        RuntimeWarning,
        stacklevel=2,
    )


def _launched(
    modules: Sequence[str], *, fork: bool
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that forks workers, or is one, and the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    if messages.MAIN_OF_CHILD in sys.modules:  # a worker has no such module
        cloudpickle.register_pickle_by_value(sys.modules[messages.MAIN_OF_CHILD])
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
    at = wire.write(file, data, 0)
    for buffer in buffers:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        places.append((at, len(buffer)))
        at = wire.write(file, buffer, at)
    os.ftruncate(file, max(at, 1))
    return file, (len(data), places)


os.register_at_fork(before=note_fork, after_in_parent=note_forked, after_in_child=note_forked)
