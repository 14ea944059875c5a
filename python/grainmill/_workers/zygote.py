"""The zygote: a small, single-threaded process that forks the workers and watches them.

It is started with `exec`, imports what every worker needs, and forks. It never runs user code. It
reports the exit of each worker; when the parent exits or closes the socket, it ends all workers
and itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from grainmill._native import die_with_parent, open_process_file
from grainmill._workers import stacks, wire, worker

if TYPE_CHECKING:
    from grainmill._workers.worker import WorkerConfig

_GRACE_S = 0.25


def main(control_file: int, parent: int, *, fork: bool) -> None:
    """Forks the workers that `parent` requests over the socket `control_file`.

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
        gc.collect()
        gc.freeze()
        zygote = _Zygote(control, parent_pidfd)
        if fork:
            zygote.serve()
        else:
            zygote.run_worker()
    os._exit(0)


def _ignore(*_: object) -> None:
    """Does nothing: workers end with their parent."""


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
            for number, pid in self._workers.values():
                if number == config.worker:
                    os.kill(pid, config.signal)
            return True
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number matters
        if threads > 1:
            # A lock that another thread holds would stay locked in the child for ever.
            wire.send(self._control, (None, threads))
            return False
        poll.register(self._fork(config, files), select.POLLIN)
        return True

    def run_worker(self) -> None:
        """Runs a worker in this process; exits soon after the parent does, even in user code."""
        with contextlib.suppress(EOFError):
            config, files = wire.receive(self._control)
            threading.Thread(target=self._exit_with_parent, daemon=True).start()
            worker.run(worker.WorkerFiles(*files), config)

    def _exit_with_parent(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._parent_pidfd, select.POLLIN)
        poll.poll()
        time.sleep(_GRACE_S)
        os._exit(0)

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
