"""Modules of `grain._src.python.checkpoint`."""
