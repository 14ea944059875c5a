"""Names of `grain._src.python.dataset.base`."""

from grainmill.experimental import (
    DatasetOptions,
    ExecutionTrackingMode,
    ShapeDtypeStruct,
    ShapeDtypeStructProtocol,
)
from grainmill.sources import RandomAccessDataSource
from grainmill.transforms import DatasetSelectionMap

__all__ = [
    "DatasetOptions",
    "DatasetSelectionMap",
    "ExecutionTrackingMode",
    "RandomAccessDataSource",
    "ShapeDtypeStruct",
    "ShapeDtypeStructProtocol",
]
