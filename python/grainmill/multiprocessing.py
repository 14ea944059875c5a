"""Worker processes: how many, and how far ahead they work."""

from grainmill._plan.multiprocessing_options import MultiprocessingOptions

__all__ = ["MultiprocessingOptions"]
