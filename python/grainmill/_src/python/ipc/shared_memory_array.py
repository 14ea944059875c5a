"""Names of `grain._src.python.ipc.shared_memory_array`."""

from grainmill.multiprocessing import SharedMemoryArray, SharedMemoryArrayMetadata

__all__ = ["SharedMemoryArray", "SharedMemoryArrayMetadata"]
