"""Names of `grain._src.python.samplers`."""

from grainmill.samplers import IndexSampler, Sampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler"]
