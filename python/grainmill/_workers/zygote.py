"""The process that workers are forked from: small, with one thread, and watching all of them.

It is started with `exec`, imports what every worker needs, and forks. It never runs a line of the
user's code. When a worker ends it says so; when the parent ends, or asks it to, it ends all
workers and itself.
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

from grainmill._native import die_with_parent
from grainmill._workers import wire, worker

if TYPE_CHECKING:
    from grainmill._workers.worker import SetUp

_GRACE_S = 0.25


def main(control_file: int, parent: int, *, fork: bool) -> None:
    """Serves the process `parent`, at the other end of the socket `control_file`.

    Without `fork` this process is the first worker asked for, and has no others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the parent ignores or blocks would be so here and in every worker.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=control_file)
    parent_file = os.pidfd_open(parent)
    if os.getppid() == parent:
        gc.collect()
        gc.freeze()
        zygote = _Zygote(control, parent_file)
        if fork:
            zygote.serve()
        else:
            zygote.work()
    os._exit(0)


class _Zygote:
    def __init__(self, control: socket.socket, parent_file: int) -> None:
        self._control = control
        self._parent_file = parent_file
        self._workers: dict[int, tuple[int, int]] = {}  # pidfd -> (number, pid)

    def serve(self) -> None:
        """Forks and reports until the parent is gone or has hung up."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._parent_file, select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file in self._workers:
                    poll.unregister(file)
                    self._report(file)
                elif file == self._parent_file or not self._obey(poll):
                    self._end_all()
                    return

    def _obey(self, poll: select.poll) -> bool:
        try:
            set_up, files = wire.receive(self._control)
        except EOFError:
            return False
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - nothing but their number
        if threads > 1:
            # Locks that another thread holds would stay closed in the child for ever.
            wire.send(self._control, (None, threads))
            return False
        poll.register(self._fork(set_up, files), select.POLLIN)
        return True

    def work(self) -> None:
        """Is a worker itself, and ends as soon as the parent does, whatever it is at."""
        with contextlib.suppress(EOFError):
            set_up, files = wire.receive(self._control)
            threading.Thread(target=self._die_with_parent, daemon=True).start()
            worker.run(worker.Files(*files), set_up)

    def _die_with_parent(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._parent_file, select.POLLIN)
        poll.poll()
        time.sleep(_GRACE_S)
        os._exit(0)

    def _fork(self, set_up: SetUp, files: list[int]) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(set_up, files, zygote)
        for file in files:
            os.close(file)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = (set_up.worker, pid)
        return pidfd

    def _become_worker(self, set_up: SetUp, files: list[int], zygote: int) -> None:
        try:
            if not die_with_parent(zygote):
                return
            self._control.close()
            for file in (self._parent_file, *self._workers):
                os.close(file)
            worker.run(worker.Files(*files), set_up)
        finally:
            os._exit(1)

    def _report(self, pidfd: int) -> None:
        number, pid = self._workers.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the parent may be gone
            wire.send(self._control, (number, os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        """Gives workers that have nothing to do a moment to leave by themselves."""
        deadline = time.monotonic() + _GRACE_S
        poll = select.poll()
        for pidfd in self._workers:
            poll.register(pidfd, select.POLLIN)
        left = dict(self._workers)
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(wait_s * 1000):
                poll.unregister(pidfd)
                _, pid = left.pop(pidfd)
                os.waitpid(pid, 0)
        for _, pid in left.values():
            os.kill(pid, signal.SIGKILL)
        for _, pid in left.values():
            os.waitpid(pid, 0)
