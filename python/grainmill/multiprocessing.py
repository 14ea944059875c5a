"""Options of worker processes, and arrays in memory that processes share."""

from typing import TYPE_CHECKING

from grainmill._plan.multiprocessing_options import MultiprocessingOptions

if TYPE_CHECKING:
    from grainmill.shared_memory_array import SharedMemoryArray, SharedMemoryArrayMetadata
else:

    def __getattr__(name: str) -> object:
        if name in {"SharedMemoryArray", "SharedMemoryArrayMetadata"}:
            # What they need takes long to import.
            from grainmill import shared_memory_array  # noqa: PLC0415

            return getattr(shared_memory_array, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["MultiprocessingOptions", "SharedMemoryArray", "SharedMemoryArrayMetadata"]


def __dir__() -> list[str]:
    return sorted(__all__)
