"""Names of `grain._src.python.experimental.device_put.device_put`."""

from grainmill.experimental import device_put

__all__ = ["device_put"]
