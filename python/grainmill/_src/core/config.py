"""Names of `grain._src.core.config`."""

from grainmill import config

__all__ = ["config"]
