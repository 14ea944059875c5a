"""Modules of `grain._src.python.experimental.device_put`."""
