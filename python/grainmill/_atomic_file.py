"""Writing files such that each is complete under its name, or not there at all."""

import contextlib
import errno
import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Writes `content` under a temporary name beside `path`, syncs it, and renames it to `path`.

    Processes and threads may write the same file at the same time: one of them wins.

    Raises:
        FileNotFoundError: There is no such directory.
        OSError: The file cannot be written; the one before is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            _sync(file.fileno(), temporary)
        temporary.replace(path)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(failure, FileNotFoundError):
            raise FileNotFoundError(failure.errno, failure.strerror, str(path)) from None
        if isinstance(failure, OSError) and failure.filename is None:  # while writing
            raise OSError(failure.errno, failure.strerror or str(failure), str(path)) from None
        raise
    sync_directory(path.parent)


def _sync(file: int, path: Path) -> None:
    """Writes the file to disk; a lack of disk space may be reported only here."""
    try:
        os.fsync(file)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the file system
            raise OSError(failure.errno, failure.strerror or str(failure), str(path)) from None


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable, where the system can do that."""
    with contextlib.suppress(OSError):
        sync(directory, os.O_RDONLY)


def sync(path: Path, flags: int) -> None:
    """Writes a file, or the names in a directory, to disk; opens it with these flags."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def is_running(process: int) -> bool:
    """Whether a process of this machine has not ended, as far as is known."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        pass
    return True
