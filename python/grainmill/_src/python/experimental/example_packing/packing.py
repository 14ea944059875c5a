"""Names of `grain._src.python.experimental.example_packing.packing`."""

from grainmill.experimental import PackAndBatchOperation

__all__ = ["PackAndBatchOperation"]
