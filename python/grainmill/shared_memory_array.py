"""Arrays in named shared memory, which are sent to other processes by name."""

import dataclasses
import math
import os
from collections.abc import Iterable
from multiprocessing import shared_memory
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["SharedMemoryArray", "SharedMemoryArrayMetadata"]


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
        if self.unlinks:
            self.unlink()
        try:
            self.close()
        except BufferError:
            # The array that is being freed still holds the mapping and will release it.
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


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
        return cls._over(_Memory(byte_len=max(1, byte_len)), shape, dtype)

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

    def __array_finalize__(self, obj: Any) -> None:
        self._memory = getattr(obj, "_memory", None)

    def __array_wrap__(
        self,
        array: np.ndarray[Any, Any],
        context: Any = None,
        return_scalar: bool = False,  # noqa: FBT001, FBT002 - NumPy's signature
    ) -> Any:
        """Returns results of computations as ordinary NumPy arrays."""
        if array is self:
            return array
        return array[()] if return_scalar else np.asarray(array)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_whole():
            return type(self).from_metadata, (self.metadata,)
        return np.asarray(self).__reduce_ex__(protocol)
