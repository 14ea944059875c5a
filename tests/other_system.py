"""Makes this process look like one on macOS or Windows, as far as `grainmill` can tell from Python.

It is a plugin of pytest, too: `GRAINMILL_IMITATE=darwin python -m pytest -p other_system` runs the
tests that run there. What the compiled module does on these systems is not imitated.
"""

# Some of these ask which system this is when they are imported, and must see the real one.
import ctypes
import multiprocessing.shared_memory  # noqa: F401
import os
import select
import socket
import sys
import time
import types

import numpy as np  # noqa: F401

_MISSING = {
    "darwin": {
        os: "eventfd memfd_create pidfd_open posix_fadvise sched_getaffinity",
        socket: "MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_SEQPACKET",
        time: "pthread_getcpuclockid",
    },
    "win32": {
        os: "O_CLOEXEC eventfd fork getppid memfd_create pidfd_open pread pwrite register_at_fork "
        "sched_getaffinity set_blocking sysconf",
        select: "poll",
        socket: "AF_UNIX CMSG_LEN MSG_CMSG_CLOEXEC MSG_DONTWAIT SCM_RIGHTS SOCK_CLOEXEC "
        "SOCK_SEQPACKET recv_fds send_fds",
        time: "pthread_getcpuclockid",
    },
}


def imitate(platform: str) -> None:
    """Removes what `platform` lacks; to be called before `grainmill` is imported."""
    for module, names in _MISSING[platform].items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    if platform == "win32":
        kernel32 = types.SimpleNamespace(GlobalMemoryStatusEx=_memory_status)
        ctypes.windll = types.SimpleNamespace(kernel32=kernel32)
    sys.platform = platform


def _memory_status(pointer):
    """What Windows has in place of `sysconf`, on a machine of 8 GiB."""
    words = pointer._obj
    assert words[0] == ctypes.sizeof(words) == 64
    words[1] = 8 << 30
    return 1


def pytest_collection_finish():
    """Not earlier: other modules that tests import ask, too, which system this is."""
    imitate(os.environ["GRAINMILL_IMITATE"])
