"""Arrays in named shared memory, which are sent to other processes by name."""

import contextlib
import dataclasses
import errno
import math
import operator
import os
import queue
from collections.abc import Iterable
from multiprocessing import shared_memory
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from grainmill._threads import at_fork, start_thread

__all__ = ["SharedMemoryArray", "SharedMemoryArrayMetadata"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclasses.dataclass(slots=True, frozen=True)
class SharedMemoryArrayMetadata:
    """What another process needs to open a `SharedMemoryArray`.

    Attributes:
        name: The name of the shared memory.
        shape: Lengths of the axes.
        dtype: Type of the values.
    """

    name: str
    shape: Iterable[int]
    dtype: npt.DTypeLike

    def close_and_unlink_shm(self) -> None:
        """Removes the memory from the system; existing arrays over it stay valid.

        Raises:
            FileNotFoundError: It was removed before.
        """
        memory = _Memory(name=self.name)
        memory.unlink()


class _Memory(shared_memory.SharedMemory):
    """Shared memory that is released with the last array over it.

    Attributes:
        unlinks: Whether it is also removed from the system then.
        address: Its address in this process.
    """

    unlinks = False
    _fd: int

    def __init__(self, name: str | None = None, *, byte_len: int = 0) -> None:
        super().__init__(name=name, create=name is None, size=byte_len)
        self.address = np.ndarray((), np.uint8, buffer=self.buf).ctypes.data

    def __del__(self) -> None:
        closer = _closer[0]
        if closer is None:
            _close(self, unlink=self.unlinks)
        else:  # by a thread, with another object: this one is being freed
            memory = object.__new__(shared_memory.SharedMemory)
            vars(memory).update(vars(self))
            closer.close(memory, unlink=self.unlinks)


def _reserve(memory: Any) -> None:
    """Takes the pages of new shared memory now: writing to one that is missing ends the process.

    Raises:
        OSError: There is less memory; `memory` is closed and removed.
    """
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None:
        return
    try:
        # In steps, since a signal makes the system start again with the current one.
        for start in range(0, memory.size, _RESERVE_BYTES):
            allocate(memory._fd, start, min(_RESERVE_BYTES, memory.size - start))  # noqa: SLF001
    except OSError as failure:
        if failure.errno not in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT}:
            return  # a system that cannot tell
        byte_len = memory.size
        memory.unlink()
        memory.close()
        raise OSError(
            failure.errno, f"{_no_room(byte_len)}: {os.strerror(failure.errno)}"
        ) from None
    except BaseException:  # an interrupt
        memory.unlink()
        memory.close()
        raise


def _no_room(byte_len: int) -> str:
    free = ""
    with contextlib.suppress(OSError):
        room = os.statvfs(_DIRECTORY)
        free = f", `{_DIRECTORY}` has {room.f_bavail * room.f_frsize} bytes left"
    return (
        f"shared memory of {byte_len} bytes cannot be allocated{free}; enlarge it (Docker: "
        "`--shm-size`), or put less into it"
    )


_DIRECTORY = "/dev/shm"
_RESERVE_BYTES = 16 << 20


def _close(memory: Any, *, unlink: bool) -> None:
    if unlink:
        memory.unlink()
    try:
        memory.close()
    except BufferError:
        # The array that is being freed still holds the mapping and will release it.
        if memory._fd >= 0:  # noqa: SLF001 - `close` fails before it closes this
            os.close(memory._fd)  # noqa: SLF001
        memory._buf, memory._mmap, memory._fd = None, None, -1  # noqa: SLF001


class _Closer:
    """Closes shared memory on threads of its own, since unmapping much of it takes long.

    Args:
        num_threads: Number of threads.
        max_pending: Maximum number of memories that wait for a thread.
    """

    def __init__(self, num_threads: int, max_pending: int) -> None:
        self._max_pending = max_pending
        # Its `put` may be called by a finalizer that runs while this thread is in `put`.
        self._pending: queue.SimpleQueue[tuple[Any, bool] | None] = queue.SimpleQueue()
        for number in range(num_threads):
            start_thread(self._run, name=f"grain-shm-close_{number}", stop=self._stop)

    def close(self, memory: Any, *, unlink: bool) -> None:
        """Closes `memory` soon; immediately if too many are waiting."""
        if self._pending.qsize() < self._max_pending:
            self._pending.put((memory, unlink))
        else:
            _close(memory, unlink=unlink)

    def _stop(self) -> None:
        _closer[0] = None
        self._pending.put(None)  # ends one thread, after what waits already

    def _run(self) -> None:
        while (task := self._pending.get()) is not None:
            memory, unlink = task
            del task
            with contextlib.suppress(FileNotFoundError):  # the memory was unlinked before
                _close(memory, unlink=unlink)
            del memory


# What closes the memory of arrays; `None` if the thread that frees an array does so itself.
_closer: list[_Closer | None] = [None]


def _forget_closer() -> None:
    _closer[0] = None


at_fork(after_in_child=_forget_closer)  # its threads are those of the parent


class SharedMemoryArray(np.ndarray[Any, Any]):
    """An array in shared memory; pickling it passes on a name in place of values.

    Arrays computed from it are ordinary NumPy arrays. A process releases the memory with its last
    array over it. Exactly one process should call `unlink_on_del`, so that the memory is removed
    from the system as well.

    Args:
        shape: Lengths of the axes.
        dtype: Type of the values, which may hold no Python objects.

    Raises:
        ValueError: `dtype` holds Python objects.
        OSError: There is not that much shared memory.

    Example:
        >>> array = grain.multiprocessing.SharedMemoryArray((2, 3), np.float32)
        >>> array.unlink_on_del()
        >>> array[0] = 1
        >>> same = grain.multiprocessing.SharedMemoryArray.from_metadata(array.metadata)
        >>> same.tolist()  # in another process, as a rule
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """

    _memory: _Memory | None = None

    def __new__(cls, shape: Iterable[int], dtype: npt.DTypeLike = float) -> Self:
        """Creates an array of zeros in new shared memory."""
        shape = tuple(shape)
        byte_len = math.prod(shape) * np.dtype(dtype).itemsize
        memory = _Memory(byte_len=max(1, byte_len))
        _reserve(memory)
        return cls._over(memory, shape, dtype)

    @classmethod
    def _over(cls, memory: _Memory, shape: Iterable[int], dtype: npt.DTypeLike) -> Self:
        if np.dtype(dtype).hasobject:
            memory.unlinks = True
            raise ValueError(f"`dtype` must be one without Python objects, got {np.dtype(dtype)}")
        array = super().__new__(cls, tuple(shape), dtype, buffer=memory.buf)
        array._memory = memory
        return array

    @classmethod
    def from_shared_memory(
        cls, shm: shared_memory.SharedMemory, shape: Iterable[int], dtype: npt.DTypeLike
    ) -> Self:
        """Returns the array at the start of `shm`, which may be closed afterwards.

        Args:
            shm: Shared memory, which is opened again by its name.
            shape: Lengths of the axes.
            dtype: Type of the values.

        Raises:
            ValueError: `dtype` holds Python objects.
            TypeError: The memory is smaller than the array.
        """
        return cls._over(_Memory(name=shm.name), shape, dtype)

    @classmethod
    def from_metadata(cls, metadata: SharedMemoryArrayMetadata) -> Self:
        """Returns the array that `metadata` names.

        Args:
            metadata: From the property `metadata` of an array, in any process.

        Raises:
            FileNotFoundError: Its memory was removed from the system.
            ValueError: Its dtype holds Python objects.
            TypeError: The memory is smaller than the array.
        """
        return cls._over(_Memory(name=metadata.name), metadata.shape, metadata.dtype)

    @property
    def metadata(self) -> SharedMemoryArrayMetadata:
        """What another process needs to open this array.

        Raises:
            ValueError: It is a copy, or a view that does not start where the memory does or has
                gaps.
        """
        if not self._is_whole():
            raise ValueError(
                "an array has metadata only where it fills shared memory from its start"
            )
        return SharedMemoryArrayMetadata(self._named().name, self.shape, self.dtype)

    def _is_whole(self) -> bool:
        memory = self._memory
        return (
            memory is not None
            and self.ctypes.data == memory.address
            and bool(self.flags.c_contiguous)
        )

    def _named(self) -> _Memory:
        if self._memory is None:
            raise ValueError("this array is not in shared memory")
        return self._memory

    def unlink_on_del(self) -> None:
        """Removes the memory from the system with the last array over it in this process.

        Raises:
            ValueError: The array is not in shared memory.
        """
        self._named().unlinks = True

    @classmethod
    def enable_async_del(cls, num_threads: int = 1, max_outstanding_requests: int = 50) -> None:
        """Makes threads of their own release the memory of arrays, which takes long for large ones.

        It holds for all arrays that this process frees from now on; calling it again does nothing.

        Args:
            num_threads: Number of threads, at least 1.
            max_outstanding_requests: Maximum number of arrays whose memory waits for a thread, and
                occupies memory and a file descriptor meanwhile. If there are more, the thread that
                frees an array releases its memory, too.

        Raises:
            ValueError: A number is out of range.
            TypeError: A number is not an integer.
        """
        num_threads = operator.index(num_threads)
        max_pending = operator.index(max_outstanding_requests)
        if num_threads < 1:
            raise ValueError(f"`num_threads` must be at least 1, got {num_threads}")
        if max_pending < 0:
            raise ValueError(f"`max_outstanding_requests` must not be negative, got {max_pending}")
        if _closer[0] is None:
            _closer[0] = _Closer(num_threads, max_pending)

    @classmethod
    def close_shm_async(cls, shm: shared_memory.SharedMemory, unlink: bool) -> None:  # noqa: FBT001 - as called
        """Closes shared memory, on another thread after `enable_async_del`.

        Args:
            shm: The memory; not to be used afterwards.
            unlink: Whether it is also removed from the system.
        """
        closer = _closer[0]
        if closer is None:
            _close(shm, unlink=unlink)
        else:
            closer.close(shm, unlink=unlink)

    def __array_finalize__(self, obj: Any) -> None:
        self._memory = getattr(obj, "_memory", None)

    def __array_wrap__(
        self,
        array: np.ndarray[Any, Any],
        context: Any = None,
        return_scalar: bool | None = None,  # noqa: FBT001 - NumPy's signature
    ) -> Any:
        """Returns results of computations as ordinary NumPy arrays."""
        if array is self:
            return array
        if return_scalar is None:  # NumPy 1, which does not say
            return_scalar = array.ndim == 0
        return array[()] if return_scalar else np.asarray(array)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_whole():
            return type(self).from_metadata, (self.metadata,)
        return np.asarray(self).__reduce_ex__(protocol)
