"""Names of `grain._src.python.record`."""

from grainmill import Record, RecordMetadata

__all__ = ["Record", "RecordMetadata"]
