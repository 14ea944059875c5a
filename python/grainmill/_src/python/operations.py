"""Names of `grain._src.python.operations`."""

from grainmill.python import (
    BatchOperation,
    FilterOperation,
    MapOperation,
    Operation,
    RandomMapOperation,
)

__all__ = ["BatchOperation", "FilterOperation", "MapOperation", "Operation", "RandomMapOperation"]
