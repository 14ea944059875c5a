"""Samplers for `DataLoader`: the order of records."""

from grainmill._loader.samplers import IndexSampler, Sampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler"]


def __dir__() -> list[str]:
    return sorted(__all__)
