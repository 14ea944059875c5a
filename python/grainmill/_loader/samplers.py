"""Samplers: which record stands at which place of the order."""

from __future__ import annotations

import abc
import operator
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from grainmill._dataset.map_dataset import MapDataset
from grainmill._loader.record import RecordMetadata
from grainmill._plan.sharding import NoSharding, ShardOptions, even_split

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALL = NoSharding()
_MAX_SEED_BITS = 32


class Sampler(Protocol):
    """Anything that says by index which record comes.

    Saved states of a loader hold its `repr`, and are refused where it differs.
    """

    def __getitem__(self, index: int) -> RecordMetadata:
        """The record at place `index` of the order of all shards together.

        Raises:
            IndexError: The order has ended.
        """


class _BlockSampler(abc.ABC):
    """A sampler that knows its length and gives many records at once."""

    _len: int

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> RecordMetadata:
        """Returns the record at place `index`."""
        (metadata,) = self.block([index], with_rng=True)
        return metadata

    @abc.abstractmethod
    def block(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """The records at several places; without generators unless they are asked for."""


class SequentialSampler(_BlockSampler):
    """Every record once, in the order of the data source.

    Args:
        num_records: Records in the data source, at least 1.
        shard_options: The part that a loader reads, where the loader does not say it.
        seed: For the generators that random transforms get.

    Raises:
        ValueError: `num_records` is not positive.
    """

    def __init__(
        self,
        num_records: int,
        shard_options: ShardOptions = _ALL,
        seed: int | None = None,
    ) -> None:
        self._num_records = _checked_num_records(num_records)
        self._shard_options = shard_options
        self._seed = None if seed is None else operator.index(seed)
        self._len = self._num_records
        if shard_options.drop_remainder:
            self._len -= self._num_records % shard_options.shard_count

    def block(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """See `_BlockSampler.block`."""
        seed = self._seed if with_rng else None
        return [
            RecordMetadata(index, index, _generator(seed, index))
            for index in _checked_indices(indices, self._len)
        ]

    def __repr__(self) -> str:
        """Text that saved states hold, so it must not change."""
        return (
            f"SequentialSampler(num_records={self._num_records}, "
            f"shard_options={self._shard_options!r})"
        )


class IndexSampler(_BlockSampler):
    """Every record once an epoch, each shard from a consecutive part of the data source.

    Place `g` of the order belongs to shard `g % shard_count`; the order of a shard is that of
    its part, or a permutation of it that each epoch draws anew.

    Args:
        num_records: Records in the data source, at least 1.
        shard_options: How many shards there are, and which one this is.
        shuffle: Whether each epoch has an order of its own.
        num_epochs: How many epochs, at least 1; without end if `None`.
        seed: For the order, and for the generators that random transforms get; below 2**32.

    Raises:
        ValueError: A number is out of range, or there is no seed to shuffle with.
        TypeError: The seed to shuffle with is no `int`.
    """

    def __init__(
        self,
        num_records: int,
        shard_options: ShardOptions = _ALL,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - as programs call it
        num_epochs: int | None = None,
        seed: int | None = None,
    ) -> None:
        if num_epochs is not None and num_epochs <= 0:
            raise ValueError(
                f"Invalid number of epochs in Index Sampler.Got {num_epochs} epochs, but number of "
                "epochs must be greater than 0."
            )
        if shuffle and seed is None:
            raise ValueError("Shuffling requires specifying a seed.")
        if shuffle and not isinstance(seed, int):
            raise TypeError(f"Expected seed of int type. Got seed with type {type(seed)}")
        if seed is not None and (seed < 0 or operator.index(seed) >> _MAX_SEED_BITS):
            raise ValueError("Seed should be positive 32-bit integer.")
        self._num_records = _checked_num_records(num_records)
        self._shard_options = shard_options
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._seed = seed
        start, end = even_split(self._num_records, shard_options)
        keys: Any = MapDataset.range(start, end)
        self._keys = keys.shuffle(seed) if shuffle else keys
        self._len = self._num_places(len(keys))

    def _num_places(self, part_len: int) -> int:
        count = self._num_records
        if self._shard_options.drop_remainder:
            count = part_len * self._shard_options.shard_count
        epochs = sys.maxsize if self._num_epochs is None else self._num_epochs
        return min(sys.maxsize, epochs * count)

    def block(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """See `_BlockSampler.block`."""
        end = None if self._num_epochs is None and self._len else self._len
        indices = _checked_indices(indices, end)
        count = self._shard_options.shard_count
        if not len(self._keys):
            raise ValueError(
                f"shard {self._shard_options.shard_index} of {count} has no record: there are "
                f"{self._num_records} records"
            )
        keys = self._keys.__getitems__([index // count for index in indices])
        seed = self._seed if with_rng else None
        return [
            RecordMetadata(index, key, _generator(seed, index))
            for index, key in zip(indices, keys, strict=True)
        ]

    def __repr__(self) -> str:
        """Text that saved states hold, so it must not change."""
        return (
            f"IndexSampler(num_records={self._num_records}, shard_options={self._shard_options!r}, "
            f"shuffle={self._shuffle}, num_epochs={self._num_epochs}, seed={self._seed})"
        )


def _checked_num_records(num_records: int) -> int:
    num_records = operator.index(num_records)
    if num_records <= 0:
        raise ValueError(
            f"Invalid number of records in Sampler. Got {num_records} records, but number of "
            "records must be greater than 0."
        )
    return num_records


def _checked_indices(indices: Sequence[int], end: int | None) -> list[int]:
    checked = [operator.index(index) for index in indices]
    for index in checked:
        if index < 0 or (end is not None and index >= end):
            raise IndexError(
                f"RecordMetadata object index is out of bounds; Got index {index}, allowed indices "
                f"should be in [0, {end}]"
            )
    return checked


def _generator(seed: int | None, index: int) -> np.random.Generator | None:
    return None if seed is None else np.random.Generator(np.random.Philox(key=seed + index))
