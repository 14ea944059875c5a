"""What datasets and iterators show of themselves."""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from grainmill._dataset.views.observers import observe
    from grainmill._dataset.views.statistics import asked_verdict, stats_of, verdict_of
else:
    # Imported when they are used, as few programs look at statistics.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._dataset.views.observers": ["observe"],
            "grainmill._dataset.views.statistics": ["asked_verdict", "stats_of", "verdict_of"],
        },
    )

__all__ = ["asked_verdict", "observe", "stats_of", "verdict_of"]
