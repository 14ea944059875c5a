"""Samplers: which record is at which position of the order."""

from __future__ import annotations

import abc
import operator
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from grainmill._dataset.map_dataset import MapDataset
from grainmill._loader.record import RecordMetadata
from grainmill._plan.arguments import checked_integer
from grainmill._plan.sharding import NoSharding, ShardOptions, even_split

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALL = NoSharding()
_MAX_SEED_BITS = 32


class Sampler(Protocol):
    """Anything that maps positions of the order to records.

    One that has no `__len__` ends where it raises `IndexError`. Saved states of a loader hold its
    `repr`, and are refused where it differs.

    Example:
        >>> class Backwards:
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __getitem__(self, index):
        ...         return grain.RecordMetadata(index=index, record_key=2 - index)
        ...
        ...     def __repr__(self):
        ...         return "Backwards()"
        >>> loader = grain.DataLoader(
        ...     data_source="abc", sampler=Backwards(), shard_options=grain.sharding.NoSharding()
        ... )
        >>> list(loader)
        ['c', 'b', 'a']
    """

    def __getitem__(self, index: int) -> RecordMetadata:
        """Returns the metadata of the record at a position.

        Args:
            index: The position in the order of all shards together, from 0.

        Raises:
            IndexError: The order has ended.
        """


class _BlockSampler(abc.ABC):
    """A sampler that has a length and returns the metadata of many records at once."""

    _len: int

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> RecordMetadata:
        """Returns the metadata of the record at position `index`."""
        (metadata,) = self._metadata([index], with_rng=True)
        return metadata

    @abc.abstractmethod
    def _metadata(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """Returns what is known of several records; `DataLoader` asks for many at once.

        Args:
            indices: Positions in the order of all shards together.
            with_rng: Whether the generators are needed, which take time to create.

        Raises:
            IndexError: A position is negative or beyond the end.
        """


def metadata_of(
    sampler: Any, indices: Sequence[int], *, with_rng: bool
) -> list[RecordMetadata] | None:
    """The metadata of several records, if `sampler` computes them together; otherwise `None`."""
    getitem = getattr(type(sampler), "__getitem__", None)
    if getitem is not _BlockSampler.__getitem__:  # a derived class may define its own
        return None
    found: list[RecordMetadata] = sampler._metadata(indices, with_rng=with_rng)  # noqa: SLF001
    return found


class SequentialSampler(_BlockSampler):
    """Every record once, in the order of the data source.

    Args:
        num_records: Records in the data source, at least 1.
        shard_options: The part that a loader reads, where the loader does not say it. With
            `drop_remainder`, the sampler leaves out the last `num_records % shard_count` records.
        seed: For the generators that random transforms get: `Philox(key=seed + index)`, any
            non-negative integer; no generators if `None`.

    Raises:
        ValueError: `num_records` is not positive.
        TypeError: A number is not an integer.

    Example:
        >>> sampler = grain.samplers.SequentialSampler(num_records=3)
        >>> list(grain.DataLoader(data_source="abc", sampler=sampler))
        ['a', 'b', 'c']
    """

    def __init__(
        self,
        num_records: int,
        shard_options: ShardOptions = _ALL,
        seed: int | None = None,
    ) -> None:
        self._num_records = _checked_num_records(num_records)
        self._shard_options = shard_options
        self._seed = _checked_seed(seed)
        self._len = self._num_records
        if shard_options.drop_remainder:
            self._len -= self._num_records % shard_options.shard_count

    def _metadata(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """Returns what is known of several records; `DataLoader` asks for many at once.

        Args:
            indices: Positions in the order of all shards together.
            with_rng: Whether the generators are needed, which take time to create.

        Raises:
            IndexError: A position is negative or beyond the end.
        """
        seed = self._seed if with_rng else None
        return [
            RecordMetadata(index, index, _generator(seed, index))
            for index in _checked_indices(indices, self._len)
        ]

    def __repr__(self) -> str:
        """The text in saved states, so it must not change."""
        return (
            f"SequentialSampler(num_records={self._num_records}, "
            f"shard_options={self._shard_options!r})"
        )


class IndexSampler(_BlockSampler):
    """Every record once an epoch, each shard from a consecutive part of the data source.

    Position `g` of the order belongs to shard `g % shard_count`; the order of a shard is that of
    its part, or a permutation of it that differs in each epoch, by the algorithm of
    `MapDataset.shuffle`. If parts differ in length by one record, so do their epochs.

    Args:
        num_records: Records in the data source, at least 1.
        shard_options: How many shards there are, and which one this is.
        shuffle: Whether each epoch has an order of its own.
        num_epochs: How many epochs, at least 1; without end if `None`.
        seed: For the order, and for the generators that random transforms get,
            `Philox(key=seed + index)`; from 0 to 2**32 - 1. No generators if `None`.

    Raises:
        ValueError: A number is out of range, or there is no seed to shuffle with.
        TypeError: A number or the seed is not an integer.

    Example:
        >>> sampler = grain.samplers.IndexSampler(5, shuffle=True, num_epochs=2, seed=0)
        >>> [sampler[index].record_key for index in range(len(sampler))]
        [0, 4, 1, 2, 3, 1, 2, 3, 0, 4]
    """

    def __init__(
        self,
        num_records: int,
        shard_options: ShardOptions = _ALL,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - as programs call it
        num_epochs: int | None = None,
        seed: int | None = None,
    ) -> None:
        num_epochs = None if num_epochs is None else checked_integer(num_epochs, "num_epochs")
        if num_epochs is not None and num_epochs <= 0:
            raise ValueError(
                f"Invalid number of epochs in Index Sampler.Got {num_epochs} epochs, but number of "
                "epochs must be greater than 0."
            )
        if shuffle and seed is None:
            raise ValueError("Shuffling requires specifying a seed.")
        seed = _checked_seed(seed)
        if seed is not None and (seed < 0 or seed >> _MAX_SEED_BITS):
            raise ValueError("Seed should be positive 32-bit integer.")
        self._num_records = _checked_num_records(num_records)
        self._shard_options = shard_options
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._seed = seed
        start, end = even_split(self._num_records, shard_options)
        keys: Any = MapDataset.range(start, end)
        self._keys = keys.shuffle(seed) if shuffle else keys
        self._len = self._num_positions(len(keys))

    def _num_positions(self, shard_len: int) -> int:
        count = self._num_records
        if self._shard_options.drop_remainder:
            count = shard_len * self._shard_options.shard_count
        epochs = sys.maxsize if self._num_epochs is None else self._num_epochs
        return min(sys.maxsize, epochs * count)

    def _metadata(self, indices: Sequence[int], *, with_rng: bool) -> list[RecordMetadata]:
        """Returns what is known of several records; `DataLoader` asks for many at once.

        Args:
            indices: Positions in the order of all shards together.
            with_rng: Whether the generators are needed, which take time to create.

        Raises:
            IndexError: A position is negative or beyond the end.
            ValueError: This shard has no record.
        """
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
        """The text in saved states, so it must not change."""
        return (
            f"IndexSampler(num_records={self._num_records}, shard_options={self._shard_options!r}, "
            f"shuffle={self._shuffle}, num_epochs={self._num_epochs}, seed={self._seed})"
        )


def _checked_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    try:
        return checked_integer(seed, "seed")
    except TypeError:
        raise TypeError(
            f"Expected seed of int type. Got seed with type {type(seed)}: `seed` was {seed!r}"
        ) from None


def _checked_num_records(num_records: int) -> int:
    num_records = checked_integer(num_records, "num_records")
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
