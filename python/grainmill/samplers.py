"""Samplers for `DataLoader`: which record is at which position of the order."""

from grainmill._loader.samplers import IndexSampler, Sampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler"]
