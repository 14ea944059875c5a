"""Which part of the records this process reads, when several read different ones."""

from grainmill._plan.sharding import NoSharding, ShardOptions, even_split

__all__ = ["NoSharding", "ShardByJaxProcess", "ShardOptions", "even_split"]


class ShardByJaxProcess(ShardOptions):
    """One part for each JAX process; all records in one part where JAX is not installed.

    The part is that of `jax.process_index()` among `jax.process_count()`. Asking JAX starts its
    devices, so call `jax.distributed.initialize` before.

    Args:
        drop_remainder: Whether records that would make some parts longer than others are left out.

    Raises:
        ImportError: JAX is installed but cannot be imported. What it raised is passed on: every
            process would read all records otherwise.

    Example:
        >>> shard = grain.sharding.ShardByJaxProcess(drop_remainder=True)
        >>> shard.shard_index, shard.shard_count
        (0, 1)
    """

    def __init__(self, drop_remainder: bool = False) -> None:  # noqa: FBT001, FBT002 - as called
        try:
            from grainmill.jax import process_place  # noqa: PLC0415
        except ModuleNotFoundError as missing:
            if missing.name != "jax":  # a part of JAX, or what JAX needs
                raise
            index, count = 0, 1
        else:
            index, count = process_place()
        super().__init__(index, count, drop_remainder)
