"""Modules of `grain._src.core`."""
