"""Names of `grain._src.python.options`."""

from grainmill import MultiprocessingOptions, ReadOptions

__all__ = ["MultiprocessingOptions", "ReadOptions"]
