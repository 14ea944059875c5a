"""A directory on a disk that is full at any size one likes: a file system in memory of its own.

Where the system lets this process mount none, the length of its files is limited instead, which
fails in the same way at the same places, if not at as many.
"""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

_NEWNS, _NEWUSER, _REMOUNT, _PRIVATE = 0x20000, 0x10000000, 32, 0x4000 | 1 << 18
PAGE = resource.getpagesize()


class SmallDisk:
    """The disk at `path`; it is gone when this process, which must have one thread, ends."""

    def __init__(self, path):
        self.path = Path(path)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.is_mounted = self._mounts()
        if not self.is_mounted:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def _mounts(self):
        uid, gid = os.getuid(), os.getgid()
        if self._libc.unshare(_NEWNS | (_NEWUSER if uid else 0)):
            return False
        if uid:
            with contextlib.suppress(OSError):
                Path("/proc/self/setgroups").write_text("deny", "ascii")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", "ascii")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", "ascii")
        return not self._mount(b"none", b"/", None, _PRIVATE, None) and not self._mount(
            b"tmpfs", os.fsencode(self.path), b"tmpfs", 0, b"size=1g"
        )

    def _mount(self, *arguments):
        return self._libc.mount(*arguments)

    def resize(self, room):
        """Leaves `room` more bytes than there are now; `None`: enough for anything."""
        if self.is_mounted:
            found = os.statvfs(self.path)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            option = f"size={1 << 30 if room is None else max(used + room, PAGE)}".encode()
            if self._mount(b"tmpfs", os.fsencode(self.path), b"tmpfs", _REMOUNT, option):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if room is None else room, hard))
