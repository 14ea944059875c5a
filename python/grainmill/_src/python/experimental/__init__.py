"""Modules of `grain._src.python.experimental`."""
