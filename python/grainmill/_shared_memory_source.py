"""A data source in shared memory; `grainmill.sources` has its name."""

from collections.abc import Iterable
from multiprocessing import shared_memory
from typing import TYPE_CHECKING, Any, Generic

from grainmill._dataset.element_types import Element
from grainmill.shared_memory_array import _reserve


class SharedMemoryDataSource(shared_memory.ShareableList[Any], Generic[Element]):
    """Numbers, booleans, strings, `bytes` and `None` in shared memory, for several processes.

    Its pickle contains only the name of the memory. Call `close` in every process and `unlink` in
    one of them when it is no longer needed.

    Args:
        elements: The elements, which are copied into a new block of shared memory. Integers have 64
            bits.
        name: The name of the new block, chosen by the system if `None`; without `elements`, that of
            an existing block.

    Raises:
        OSError: There is not that much shared memory.
        ValueError: There are neither elements nor a name, or a string or `bytes` ends in a zero
            byte, which cannot be stored.

    Example:
        >>> source = grain.sources.SharedMemoryDataSource(["one", "two"])
        >>> same = grain.sources.SharedMemoryDataSource(name=source.shm.name)  # in another process
        >>> list(grain.MapDataset.source(same).map(len))
        [3, 3]
        >>> same.close()
        >>> source.close()
        >>> source.unlink()
    """

    _is_new = False
    _shm: shared_memory.SharedMemory

    @property
    def shm(self) -> shared_memory.SharedMemory:
        """The shared memory."""
        return self._shm

    @shm.setter
    def shm(self, memory: shared_memory.SharedMemory) -> None:
        # `ShareableList` assigns this before it writes to the memory.
        if self._is_new:
            _reserve(memory)
        self._shm = memory

    if TYPE_CHECKING:

        def __getitem__(self, position: int) -> Element: ...

    def __init__(
        self, elements: Iterable[Element] | None = None, *, name: str | None = None
    ) -> None:
        if elements is None:
            if name is None:
                raise ValueError("Elements or name must be provided.")
            super().__init__(name=name)
            return
        listed = list(elements)
        for index, element in enumerate(listed):
            # `ShareableList` pads with zero bytes, and removes all trailing ones when it reads.
            if isinstance(element, str | bytes) and element[-1:] in {"\0", b"\0"}:
                raise ValueError(
                    f"elements must not end in a zero byte, which shared memory cannot store, got "
                    f"{element!r} as element {index}"
                )
        self._is_new = True
        super().__init__(listed, name=name)

    def __str__(self) -> str:
        return f"InMemoryDataSource(name={self.shm.name}, len={len(self)})"

    def close(self) -> None:
        """Releases the shared memory in this process; elements cannot be read afterwards."""
        self.shm.close()

    def unlink(self) -> None:
        """Removes the shared memory once all processes have released it.

        Raises:
            FileNotFoundError: It has been removed already.
        """
        self.shm.unlink()
