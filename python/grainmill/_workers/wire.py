"""Messages between the processes of a pool, each with the descriptors that go with it.

A message is one packet, so it arrives whole or not at all, whoever dies meanwhile. What does not
fit in a packet crosses in an anonymous file of its own.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_FILES = 64
"""The most descriptors that go with one message."""

_LARGEST_PACKET = 32 << 10
_IN_FILE = b"\0"  # no pickled object begins so
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_FILES_SPACE = socket.CMSG_LEN((MOST_FILES + 1) * array.array("i").itemsize)


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Sends `message`; the caller still closes its `files`.

    Raises:
        ConnectionError: The other end is closed.
    """
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(data) > _LARGEST_PACKET:
        file = os.memfd_create("grainmill-message", os.MFD_CLOEXEC)
        try:
            write(file, data, 0)
            socket.send_fds(connection, [_IN_FILE], [file, *files])
        finally:
            os.close(file)
    elif files:
        socket.send_fds(connection, [data], files)
    else:
        connection.send(data)


def receive(connection: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """The next message and the descriptors that came with it, which are the caller's.

    Raises:
        EOFError: The other end is closed, or the process that had it has ended.
        BlockingIOError: There is none, and `flags` say not to wait.
    """
    try:
        data, files = _packet(connection, flags)
    except ConnectionResetError:  # told once where the other end left packets unread
        data, files = _packet(connection, flags)
    if not data:
        raise EOFError
    if data != _IN_FILE:
        return pickle.loads(data), files
    file = files.pop(0)
    try:
        return pickle.loads(os.pread(file, os.fstat(file).st_size, 0)), files
    finally:
        os.close(file)


def _packet(connection: socket.socket, flags: int) -> tuple[bytes, list[int]]:
    """As `socket.recv_fds`, which leaves out the flags."""
    data, extras, _, _ = connection.recvmsg(_LARGEST_PACKET, _FILES_SPACE, flags | _FLAGS)
    if not extras:
        return data, []
    files = array.array("i")
    for level, kind, extra in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(extra[: len(extra) - len(extra) % files.itemsize])
    return data, files.tolist()


def write(file: int, data: Any, at: int) -> int:
    """Writes all of `data` at the offset `at`; returns where it ends."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count
    return at
