"""Samplers for `DataLoader`: which record comes at which place of the order."""

from grainmill._loader.samplers import IndexSampler, Sampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler"]
