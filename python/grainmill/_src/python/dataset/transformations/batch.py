"""Names of `grain._src.python.dataset.transformations.batch`."""

from grainmill.experimental import batch_and_pad

__all__ = ["batch_and_pad"]
