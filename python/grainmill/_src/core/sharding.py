"""Names of `grain._src.core.sharding`."""

from grainmill.sharding import NoSharding, ShardByJaxProcess, ShardOptions, even_split

__all__ = ["NoSharding", "ShardByJaxProcess", "ShardOptions", "even_split"]
