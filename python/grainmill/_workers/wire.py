"""Messages between the processes of a pool, each with the file descriptors that belong to it.

A message is one packet, so it arrives whole or not at all, whichever process dies. A message that
is too large for a packet is sent in an anonymous file.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
from typing import TYPE_CHECKING, Any

from grainmill._native import create_shared_file

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FILES = 64
"""The most file descriptors in one message."""

_MAX_PACKET_BYTES = 32 << 10
_IN_FILE = b"\0"  # no pickle starts with this byte
# Systems that lack these have no worker processes; see `limits.workers_are_processes`.
_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_FILES_SPACE = (
    socket.CMSG_LEN((MAX_FILES + 1) * array.array("i").itemsize)
    if hasattr(socket, "CMSG_LEN")
    else 0
)


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Sends `message`; the caller still closes its `files`.

    Raises:
        ConnectionError: The other end is closed.
    """
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(data) > _MAX_PACKET_BYTES:
        file = create_shared_file("grainmill-message", len(data))
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
    """The next message and its file descriptors, which the caller must close.

    Raises:
        EOFError: The other end is closed, or its process has exited.
        BlockingIOError: There is no message, and `flags` say not to wait.
    """
    try:
        data, files = _packet(connection, flags)
    except ConnectionResetError:  # raised once if the other end was closed with packets unread
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
    """Like `socket.recv_fds`, which ignores its `flags`."""
    data, extras, _, _ = connection.recvmsg(_MAX_PACKET_BYTES, _FILES_SPACE, flags | _FLAGS)
    if not extras:
        return data, []
    files = array.array("i")
    for level, kind, extra in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(extra[: len(extra) - len(extra) % files.itemsize])
    return data, files.tolist()


def write(file: int, data: Any, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
