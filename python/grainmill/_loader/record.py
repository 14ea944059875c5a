"""Records and their metadata, as samplers and operations pass them on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class RecordMetadata:
    """Which record it is, and its position in the order.

    Attributes:
        index: Position in the order of all shards together, counted on over epochs.
        record_key: Index in the data source, as the sampler returns it; `None` in the records that
            operations get.
        rng: The record's own generator; `None` if the sampler has no seed.
    """

    index: int
    record_key: int | None = None
    rng: np.random.Generator | None = None

    def remove_record_key(self) -> RecordMetadata:
        """Returns a copy without the record key."""
        return RecordMetadata(self.index, None, self.rng)

    def __str__(self) -> str:
        # `repr` of a generator holds its address, which differs from run to run.
        return f"RecordMetadata(index={self.index}, record_key={self.record_key}, rng={self.rng})"


@dataclasses.dataclass(slots=True)
class Record(Generic[T]):
    """An element and its metadata.

    Attributes:
        metadata: Where the element comes from.
        data: The element.
    """

    metadata: RecordMetadata
    data: T
