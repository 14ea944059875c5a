"""Worker processes: how many, how far ahead they work, and arrays in memory they share."""

from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill.shared_memory_array import SharedMemoryArray, SharedMemoryArrayMetadata

__all__ = ["MultiprocessingOptions", "SharedMemoryArray", "SharedMemoryArrayMetadata"]
