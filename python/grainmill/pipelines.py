"""Pipelines for programs that run them elsewhere, as `grainmill.beam` and `grainmill.ray` do.

Example:
    >>> import pickle
    >>> from grainmill import pipelines
    >>> ds = grain.MapDataset.range(6).map(lambda x: x * 10)
    >>> sent, description = pipelines.dumps(ds), pipelines.describe(ds)
    >>> list(pickle.loads(sent)[2:4])  # in another process, whose share this is
    [20, 30]
    >>> pipelines.differences(description, pipelines.describe(ds))
    []
"""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from grainmill._checkpoint.pipeline import describe, differences
    from grainmill._workers.by_value import dumps
else:
    # What they need takes long to import.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._checkpoint.pipeline": ["describe", "differences"],
            "grainmill._workers.by_value": ["dumps"],
        },
    )


__all__ = ["describe", "differences", "dumps"]
