"""The starter, which forks a zygote for each pool; the zygote forks the workers and watches them.

The starter is started with `exec` and imports what every worker needs. One serves all pools that
would find another one to be the same (`starter.py`); it ends with its parent, or when it has had no
zygotes for a while. Both have a single thread, and never run user code. A zygote reports the exit
of each worker; when the parent exits or closes the socket, it ends all workers and itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

from grainmill._native import die_with_parent, open_process_file
from grainmill._workers import (
    by_value,  # noqa: F401 - what pickled jobs refer to
    stacks,
    wire,
    worker,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from grainmill._workers.worker import WorkerConfig

_GRACE_S = 0.25


def main(control_file: int, parent: int, *, fork: bool, idle_s: float) -> None:
    """Forks the zygotes that `parent` requests over the socket `control_file`.

    Without `fork`, this process itself becomes the first worker that is requested.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A preemption sends it to the whole group of a trainer that still wants to save its state. With
    # a handler in place of `SIG_IGN`, programs that workers run end by it as they always do.
    signal.signal(signal.SIGTERM, _ignore)
    stacks.ignore_signals()
    # Otherwise every worker would ignore or block the signals that the parent does.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=control_file)
    parent_pidfd = open_process_file(parent)
    if os.getppid() == parent:
        if fork:
            _Starter(control, parent_pidfd).serve(idle_s)
        else:
            gc.freeze()
            _run_worker(control, parent_pidfd)
    os._exit(0)


def _ignore(*_: object) -> None:
    """Does nothing: workers end with their parent."""


def _send_signal(wanted: stacks.Wanted, children: Iterable[tuple[int, int]]) -> None:
    for number, pid in children:
        if number == wanted.child:
            os.kill(pid, wanted.signal)


class ZygoteFiles(NamedTuple):
    """The file descriptors that come with the request for a zygote.

    Attributes:
        control: Its socket to the parent.
        exit: The socket that takes its exit code.
        directory: The parent's working directory.
        output: The parent's standard output.
        errors: The parent's standard error.
    """

    control: int
    exit: int
    directory: int
    output: int
    errors: int


class _Starter:
    def __init__(self, control: socket.socket, parent_pidfd: int) -> None:
        self._control = control
        self._parent_pidfd = parent_pidfd
        self._zygotes: dict[int, tuple[int, int]] = {}  # pidfd -> (number, pid)
        self._exit_files: dict[int, int] = {}  # by pidfd, too

    def serve(self, idle_s: float) -> None:
        """Forks zygotes until the parent exits or closes the socket; then waits for their ends.

        After `idle_s` without a zygote, no more are forked.
        """
        # What the parent has open, and where it is, may change.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        _redirect(nowhere, nowhere)
        os.close(nowhere)
        os.chdir("/")
        poll = select.poll()
        sources = [self._control.fileno(), self._parent_pidfd]
        for file in sources:
            poll.register(file, select.POLLIN)
        while sources or self._zygotes:
            events = poll.poll(None if self._zygotes else idle_s * 1000)
            if not events:  # what has been sent already will still be received
                self._control.shutdown(socket.SHUT_RD)
            for file, _ in events:
                if file in self._zygotes:
                    poll.unregister(file)
                    self._report_exit(file)
                elif sources and (file == self._parent_pidfd or not self._handle_request(poll)):
                    while sources:
                        poll.unregister(sources.pop())

    def _handle_request(self, poll: select.poll) -> bool:
        try:
            message, received = wire.receive(self._control)
        except EOFError:
            return False
        if isinstance(message, stacks.Wanted):
            _send_signal(message, self._zygotes.values())
            return True
        number, modules = message
        files = ZygoteFiles(*received)
        with contextlib.suppress(Exception):  # the zygote will raise it, too
            _import(modules, files.directory)
        os.chdir("/")
        code = None
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number matters
        try:
            if threads > 1:
                # A lock that another thread holds would stay locked in the child for ever.
                code = 0
                with socket.socket(fileno=os.dup(files.control)) as control:
                    wire.send(control, (None, threads))
            else:
                poll.register(self._fork(number, modules, files), select.POLLIN)
        except OSError:  # no process or file can be had, or the parent has closed the socket
            code = 1
            os.write(files.errors, traceback.format_exc().encode())
        for file in received:
            if file != files.exit:
                os.close(file)
        if code is not None:
            _send_code(files.exit, code)
        return True

    def _fork(self, number: int, modules: Sequence[str], files: ZygoteFiles) -> int:
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_zygote(modules, files, starter)
        pidfd = open_process_file(pid)
        self._zygotes[pidfd] = (number, pid)
        self._exit_files[pidfd] = files.exit
        return pidfd

    def _become_zygote(self, modules: Sequence[str], files: ZygoteFiles, starter: int) -> None:
        code = 1
        try:
            if not die_with_parent(starter):
                return
            self._control.close()
            for file in (files.exit, *self._zygotes, *self._exit_files.values()):
                os.close(file)
            _redirect(files.output, files.errors)
            _import(modules, files.directory)
            for file in (files.directory, files.output, files.errors):
                os.close(file)
            # Folders may have changed since, by less than their times show.
            sys.path_importer_cache.clear()
            control = socket.socket(fileno=files.control)
            _Zygote(control, self._parent_pidfd).serve()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _report_exit(self, pidfd: int) -> None:
        _, pid = self._zygotes.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        _send_code(self._exit_files.pop(pidfd), os.waitstatus_to_exitcode(status))


def _redirect(output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)


def _import(modules: Sequence[str], directory: int) -> None:
    """Imports modules in the parent's directory, to which `sys.path` may be relative."""
    with contextlib.suppress(OSError):
        os.fchdir(directory)
    if not all(module in sys.modules for module in modules):
        for module in modules:
            importlib.import_module(module)
    gc.freeze()  # what little garbage imports leave, too: to find it takes longer than it is worth


def _send_code(file: int, code: int) -> None:
    with socket.socket(fileno=file) as connection, contextlib.suppress(OSError):
        connection.send(b"%d" % code)


def _run_worker(control: socket.socket, parent_pidfd: int) -> None:
    """Runs a worker in this process; exits soon after the parent does, even in user code."""

    def exit_with_parent() -> None:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(parent_pidfd, select.POLLIN)
        poll.poll()
        time.sleep(_GRACE_S)
        os._exit(0)

    with contextlib.suppress(EOFError):
        config, files = wire.receive(control)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        worker.run(worker.WorkerFiles(*files), config)


class _Zygote:
    def __init__(self, control: socket.socket, parent_pidfd: int) -> None:
        self._control = control
        self._parent_pidfd = parent_pidfd
        self._workers: dict[int, tuple[int, int]] = {}  # pidfd -> (number, pid)

    def serve(self) -> None:
        """Forks workers and reports their exits until the parent exits or closes the socket."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._parent_pidfd, select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file in self._workers:
                    poll.unregister(file)
                    self._report_exit(file)
                elif file == self._parent_pidfd or not self._handle_request(poll):
                    self._end_all()
                    return

    def _handle_request(self, poll: select.poll) -> bool:
        try:
            config, files = wire.receive(self._control)
        except EOFError:
            return False
        if isinstance(config, stacks.Wanted):
            _send_signal(config, self._workers.values())
            return True
        poll.register(self._fork(config, files), select.POLLIN)
        return True

    def _fork(self, config: WorkerConfig, files: list[int]) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(config, files, zygote)
        for file in files:
            os.close(file)
        pidfd = open_process_file(pid)
        self._workers[pidfd] = (config.worker, pid)
        return pidfd

    def _become_worker(self, config: WorkerConfig, files: list[int], zygote: int) -> None:
        try:
            if not die_with_parent(zygote):  # the zygote has exited already
                return
            self._control.close()
            for file in (self._parent_pidfd, *self._workers):
                os.close(file)
            worker.run(worker.WorkerFiles(*files), config)
        finally:
            os._exit(1)

    def _report_exit(self, pidfd: int) -> None:
        number, pid = self._workers.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the parent may be gone
            wire.send(self._control, (number, os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        """Kills the workers that do not exit by themselves within `_GRACE_S`."""
        deadline = time.monotonic() + _GRACE_S
        poll = select.poll()
        for pidfd in self._workers:
            poll.register(pidfd, select.POLLIN)
        running = dict(self._workers)
        while running and (wait_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(wait_s * 1000):
                poll.unregister(pidfd)
                _, pid = running.pop(pidfd)
                os.waitpid(pid, 0)
        for _, pid in running.values():
            os.kill(pid, signal.SIGKILL)
        for _, pid in running.values():
            os.waitpid(pid, 0)
