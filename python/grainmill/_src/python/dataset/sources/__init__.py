"""Modules of `grain._src.python.dataset.sources`."""
