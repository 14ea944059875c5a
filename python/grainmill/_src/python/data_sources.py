"""Names of `grain._src.python.data_sources`."""

from grainmill.sources import ArrayRecordDataSource, RangeDataSource, SharedMemoryDataSource

__all__ = ["ArrayRecordDataSource", "RangeDataSource", "SharedMemoryDataSource"]
