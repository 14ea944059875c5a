"""Starting the processes that workers come from; successive pools share one where they may."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from grainmill._threads import at_fork
from grainmill._workers import accelerators, stacks, wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Seconds after which a starter without zygotes exits.
_IDLE_S = 60.0
# Seconds within which a starter is expected to do what it is told.
_WAIT_S = 1.5

# NumPy's BLAS would start threads in the starter, from which workers then could not be forked.
_THREAD_COUNT_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LAUNCH_CODE = (
    "import sys; sys.path[:] = {path!r}; import importlib.util as u; "
    "s = u.spec_from_file_location('launch', {launch!r}); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); m.main({control}, {parent}, fork={fork}, idle_s={idle_s})"
)
_LAUNCH_FILE = str(pathlib.Path(__file__).with_name("launch.py"))
_THREAD = pathlib.Path("/proc/thread-self")
# The lines of its `status` with what a process that it starts inherits.
_INHERITED_LINES = (
    *("Umask", "Uid", "Gid", "Groups", "SigIgn", "Cap", "NoNewPrivs", "Seccomp"),
    *("Cpus_allowed", "Mems_allowed", "THP_enabled", "Speculation"),
)
# Files of which it inherits all; and the places in `stat`, after the name, of process group,
# session and terminal, of the nice value, and of priority and policy of scheduling.
_INHERITED_FILES = ("limits", "cgroup", "oom_score_adj")
_INHERITED_FIELDS = operator.itemgetter(2, 3, 4, 16, 37, 38)


class Zygote:
    """The process that forks the workers of one pool; used like a `subprocess.Popen`.

    Attributes:
        control: The socket to it.
        returncode: Its exit code, or that of its starter if that exited first, once it is known.
        refused: Whether the starter had stopped forking when it was asked.
    """

    refused = False

    def __init__(
        self, starter: _Starter, number: int, control: socket.socket, exit_socket: socket.socket
    ) -> None:
        self.control = control
        self.returncode: int | None = None
        self._starter = starter
        self._number = number
        self._exit_socket = exit_socket

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit, for at most `timeout` seconds; see `subprocess.Popen.wait`."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._exit_socket, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
            # Another thread may be waiting, too.
            code = self._exit_socket.recv(16, socket.MSG_PEEK)
            self.returncode = int(code) if code else self._starter.process.wait(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Makes the starter send it a signal."""
        with contextlib.suppress(OSError):
            wire.send(self._starter.requests, stacks.Wanted(self._number, number))

    def kill(self) -> None:
        """Kills it; and all zygotes with the starter, if that does not do it."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            try:
                self.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                self._starter.process.kill()

    def close(self) -> None:
        """Closes what this process has open of it."""
        self.control.close()
        self._exit_socket.close()
        self._starter.release(self)


class _Starter:
    """A process that forks zygotes, and the socket to it."""

    def __init__(self) -> None:
        self.process, self.requests = started_process(fork=True)
        self._num_zygotes = 0
        self._zygotes: set[Zygote] = set()
        self._is_retired = False

    def zygote(self, modules: Sequence[str]) -> Zygote:
        """A new zygote."""
        control, its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        exit_socket, its_exit_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._num_zygotes += 1
        zygote = Zygote(self, self._num_zygotes, control, exit_socket)
        self._zygotes.add(zygote)
        try:
            with its_control, its_exit_socket, _directory() as directory, _output() as output:
                files = [its_control.fileno(), its_exit_socket.fileno(), directory, *output]
                wire.send(self.requests, (self._num_zygotes, list(modules)), files)
        except ConnectionError:
            zygote.refused = True
        except BaseException:
            zygote.close()
            raise
        return zygote

    def retire(self) -> None:
        """Makes it exit with the last of its zygotes."""
        # Forked children of this process may hold the socket, too, so closing would not suffice.
        with contextlib.suppress(OSError):
            self.requests.shutdown(socket.SHUT_RDWR)
        self.requests.close()
        self._is_retired = True
        self._reap()

    def release(self, zygote: Zygote) -> None:
        """Forgets a zygote that has ended."""
        self._zygotes.discard(zygote)
        self._reap()

    def _reap(self) -> None:
        if self._is_retired and not self._zygotes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_WAIT_S)


class _Starters:
    """The starter for new zygotes, and those before it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may start workers
        self._current: _Starter | None = None
        self._inherited: object = None
        self._retired: list[subprocess.Popen[bytes]] = []

    def zygote(self, modules: Sequence[str]) -> Zygote:
        """A new zygote; of the current starter, if this thread would start the same."""
        with self._lock:
            inherited = _inherited()
            if self._current is not None and self._inherited == inherited:
                zygote = self._current.zygote(modules)
                if not zygote.refused:
                    return zygote
                zygote.close()
            self._retire()
            self._current, self._inherited = _Starter(), inherited
            return self._current.zygote(modules)

    def _retire(self) -> None:
        self._retired = [process for process in self._retired if process.poll() is None]
        if self._current is not None:
            self._current.retire()
            self._retired.append(self._current.process)
            self._current = None

    def end(self) -> None:
        """Ends them all."""
        with self._lock:
            self._retire()
            deadline = time.monotonic() + _WAIT_S
            for process in self._retired:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.wait()

    def forget(self) -> None:
        """In a forked child, leaves the parent's processes alone, and drops them."""
        if self._current is not None:
            self._current.requests.close()
            self._retired.append(self._current.process)
        for process in self._retired:
            process.returncode = 0  # or a warning would say that they run
        self.reset()


_starters = _Starters()
atexit.register(_starters.end)
at_fork(after_in_child=_starters.forget)


def start_zygote(modules: Sequence[str]) -> Zygote:
    """Starts the process that forks the workers of a pool, once it has imported `modules`."""
    return _starters.zygote(modules)


def started_process(*, fork: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that forks zygotes, or is a worker, and the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _output() as (output, errors):
        code = _LAUNCH_CODE.format(
            path=sys.path,
            launch=_LAUNCH_FILE,
            control=theirs.fileno(),
            parent=os.getpid(),
            fork=fork,
            idle_s=_IDLE_S,
        )
        # The child lets these through once it has handlers for them.
        signals = [signal.SIGTERM, stacks.SIGNAL, stacks.REQUESTS_SIGNAL]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process, ours


def _flags() -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as `multiprocessing` starts its own
    return flags


def _environment() -> dict[str, str]:
    environment = accelerators.worker_environment(os.environ)
    return {**environment, **dict.fromkeys(_THREAD_COUNT_VARIABLES, "1")}


def _inherited() -> object:
    """What a process that this thread starts would have of it; equal if that is the same.

    Not what a request for a zygote says (the working directory and the standard streams, though the
    former may say what `sys.path` means), nor what workers set themselves.
    """
    try:
        directory, root = os.stat("."), os.stat("/")  # noqa: PTH116 - faster
        status = (_THREAD / "status").read_text("utf-8", "replace").splitlines()
        stat = (_THREAD / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (
            [sys.executable, *_flags()],
            sys.path.copy(),
            _environment(),
            [(place.st_dev, place.st_ino) for place in (directory, root)],
            [line for line in status if line.startswith(_INHERITED_LINES)],
            [(_THREAD / name).read_bytes() for name in _INHERITED_FILES],
            {space.name: space.readlink() for space in (_THREAD / "ns").iterdir()},
            _INHERITED_FIELDS(stat),
        )
    except OSError:  # no such files
        return object()


@contextlib.contextmanager
def _directory() -> Iterator[int]:
    """A descriptor of the working directory, even if it has no path or cannot be read."""
    file = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _output() -> Iterator[tuple[int, int]]:
    """The descriptors of standard output and errors; of nothing, if they are closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        output, errors = (file if _is_open(file) else nowhere for file in (1, 2))
        yield output, errors
    finally:
        os.close(nowhere)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True
