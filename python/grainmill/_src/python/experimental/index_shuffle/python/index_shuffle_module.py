"""Names of `grain._src.python.experimental.index_shuffle.python.index_shuffle_module`."""

from grainmill.experimental import index_shuffle

__all__ = ["index_shuffle"]
