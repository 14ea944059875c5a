"""Which shard of the records one process reads."""

from __future__ import annotations

import dataclasses

from grainmill._plan.arguments import checked_integer


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """The shard of the records that one of several processes reads.

    Attributes:
        shard_index: The shard, from 0.
        shard_count: Number of shards, at least 1.
        drop_remainder: Whether to drop the records that would make some shards longer than others.

    Raises:
        TypeError: A number is not an integer.
        ValueError: `shard_count` is not positive, or there is no shard `shard_index`.

    Example:
        >>> shard = grain.sharding.ShardOptions(shard_index=1, shard_count=3)
        >>> loader = grain.load(range(7), num_epochs=1, shard_options=shard)
        >>> [int(x) for x in loader]
        [3, 4]
    """

    shard_index: int
    shard_count: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        for name in ("shard_index", "shard_count"):  # as `int`: saved states contain the `repr`
            object.__setattr__(self, name, checked_integer(getattr(self, name), name))
        if self.shard_count <= 0:
            raise ValueError(
                f"Number of shards must be a positive integer but got {self.shard_count}."
            )
        if not 0 <= self.shard_index < self.shard_count:
            raise ValueError(
                "Shard shard_index must be in [0, shard_count - 1], shard_count was "
                f"{self.shard_count} and shard_index was {self.shard_index}."
            )


class NoSharding(ShardOptions):
    """All records in one shard.

    Example:
        >>> grain.sharding.NoSharding()
        NoSharding(shard_index=0, shard_count=1, drop_remainder=False)
    """

    def __init__(self) -> None:
        super().__init__(shard_index=0, shard_count=1, drop_remainder=False)


def even_split(num_examples: int, options: ShardOptions) -> tuple[int, int]:
    """Splits `num_examples` records into consecutive ranges whose lengths differ by at most one.

    Without `drop_remainder` the first `num_examples % shard_count` shards have one record more.

    Args:
        num_examples: Number of records.
        options: The shard.

    Returns:
        Start and end (exclusive) of the shard.

    Example:
        >>> [grain.sharding.even_split(10, grain.sharding.ShardOptions(i, 3)) for i in range(3)]
        [(0, 4), (4, 7), (7, 10)]
    """
    size, longer = divmod(num_examples, options.shard_count)
    start = size * options.shard_index
    if options.drop_remainder:
        return start, start + size
    start += min(options.shard_index, longer)
    return start, start + size + (options.shard_index < longer)
