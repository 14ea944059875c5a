"""Modules of `grain._src.python.testing`."""
