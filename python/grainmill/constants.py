"""Names of the features that describe a record rather than contain its data.

Attributes:
    INDEX: The position in the order.
    RECORD_KEY: The index in the data source.
    DATASET_INDEX: The number of the dataset.
    EPOCH: The epoch, from 0.
    SEED: The seed of the record's random numbers.
    RECORD: The record itself.
    META_FEATURES: All of them.
"""

from typing import Final

INDEX: Final = "_index"
RECORD_KEY: Final = "_record_key"
DATASET_INDEX: Final = "_dataset_index"
EPOCH: Final = "_epoch"
SEED: Final = "_seed"
RECORD: Final = "_record"
META_FEATURES: Final = frozenset((INDEX, RECORD_KEY, DATASET_INDEX, EPOCH, SEED, RECORD))

__all__ = ["DATASET_INDEX", "EPOCH", "INDEX", "META_FEATURES", "RECORD", "RECORD_KEY", "SEED"]


def __dir__() -> list[str]:
    return sorted(__all__)
