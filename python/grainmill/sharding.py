"""Which shard of the records this process reads, where several processes read different ones."""

from grainmill._plan.sharding import NoSharding, ShardOptions, even_split

__all__ = ["NoSharding", "ShardByJaxProcess", "ShardOptions", "even_split"]


def __dir__() -> list[str]:
    return sorted(__all__)


class ShardByJaxProcess(ShardOptions):
    """One shard for each JAX process; all records in one shard if JAX is not installed.

    The shard is `jax.process_index()` of `jax.process_count()`. These calls initialize JAX's
    devices, so call `jax.distributed.initialize` before.

    Args:
        drop_remainder: Whether to drop the records that would make some shards longer than others.

    Raises:
        ImportError: JAX is installed but cannot be imported. The error is raised unchanged, as
            every process would read all records otherwise.

    Example:
        >>> shard = grain.sharding.ShardByJaxProcess(drop_remainder=True)
        >>> shard.shard_index, shard.shard_count
        (0, 1)
    """

    def __init__(self, drop_remainder: bool = False) -> None:  # noqa: FBT001, FBT002 - as called
        try:
            from grainmill.jax import process_index_and_count  # noqa: PLC0415
        except ModuleNotFoundError as missing:
            if missing.name != "jax":  # a module of JAX, or one that JAX depends on
                raise
            index, count = 0, 1
        else:
            index, count = process_index_and_count()
        super().__init__(index, count, drop_remainder)
