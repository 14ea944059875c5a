"""Options of worker processes, and arrays in memory that processes share."""

from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill.shared_memory_array import SharedMemoryArray, SharedMemoryArrayMetadata

__all__ = ["MultiprocessingOptions", "SharedMemoryArray", "SharedMemoryArrayMetadata"]
