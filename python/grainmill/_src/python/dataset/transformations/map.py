"""Names of `grain._src.python.dataset.transformations.map`."""

from grainmill.experimental import RngPool

__all__ = ["RngPool"]
