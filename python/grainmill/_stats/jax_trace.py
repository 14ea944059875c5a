"""Marks the computing of elements in traces of the JAX profiler, without importing JAX."""

from __future__ import annotations

import sys
from typing import Any


def trace_annotation() -> Any:
    """`jax.profiler.TraceAnnotation` if the program has imported JAX, otherwise `None`.

    Its method `is_enabled` says whether a trace is being taken.
    """
    profiler = getattr(sys.modules.get("jax"), "profiler", None)
    annotation = getattr(profiler, "TraceAnnotation", None)
    return annotation if hasattr(annotation, "is_enabled") else None
