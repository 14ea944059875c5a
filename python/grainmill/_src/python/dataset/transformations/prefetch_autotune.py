"""Names of `grain._src.python.dataset.transformations.prefetch_autotune`."""

from grainmill.experimental import PerformanceConfig, pick_performance_config

__all__ = ["PerformanceConfig", "pick_performance_config"]
