"""Names of `grain._src.python.load`."""

from grainmill import load

__all__ = ["load"]
