"""Samplers for `DataLoader`: the order of records."""

from grainmill._loader.samplers import IndexSampler, Sampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler"]
