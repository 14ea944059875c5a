"""Options of worker processes, and arrays in memory that processes share."""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names
from grainmill._plan.multiprocessing_options import MultiprocessingOptions

if TYPE_CHECKING:
    from grainmill.shared_memory_array import SharedMemoryArray, SharedMemoryArrayMetadata
else:
    # What they need takes long to import.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill.shared_memory_array": ["SharedMemoryArray", "SharedMemoryArrayMetadata"],
        },
    )


__all__ = ["MultiprocessingOptions", "SharedMemoryArray", "SharedMemoryArrayMetadata"]
