"""Statistics of iterators: `stats`, `verdict`, and what users' own iterators report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._stats.report import collected

if TYPE_CHECKING:
    from grainmill._iterators.stage import Stage
    from grainmill._stats.meters import Recorder
    from grainmill._stats.report import Report


def report_on(iterator: Any) -> Report:
    """The report on a running iterator over a plan."""
    recorders: list[Recorder] = []
    _add_recorders(iterator, recorders)
    return collected(
        iterator._node,
        recorders,
        iterator._activity.elapsed_s,
        iterator._num_delivered,
    )


def _add_recorders(iterator: Any, recorders: list[Recorder]) -> None:
    """Appends the recorder of `iterator`, and of those that users' iterators upstream read from."""
    recorder = getattr(iterator, "_recorder", None)
    if recorder is not None and recorder not in recorders:
        recorders.append(recorder)
    stage = getattr(iterator, "_stage", None)
    if stage is not None:
        _add_of_stage(stage, recorders)
    for parent in getattr(iterator, "_parents", ()):
        _add_recorders(parent, recorders)


def _add_of_stage(stage: Stage, recorders: list[Recorder]) -> None:
    inner = getattr(stage, "iterator", None)
    if inner is not None:
        _add_recorders(inner, recorders)
    for parent in stage.parents:
        _add_of_stage(parent, recorders)
