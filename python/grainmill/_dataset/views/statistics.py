"""Statistics of iterators: `stats`, `verdict`, and what users' own iterators report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._dataset.views.user_stats import USER_STATS
from grainmill._stats.report import Consumer, as_dict, collected
from grainmill._stats.verdict import verdict_on

if TYPE_CHECKING:
    from grainmill._iterators.base.stage import Stage
    from grainmill._stats.meters import Recorder, StageMeter
    from grainmill._stats.report import Report


def stats_of(iterator: Any) -> dict[str, Any]:
    """See `DatasetIterator.stats`."""
    return as_dict(report_on(iterator))


def verdict_of(iterator: Any, *, has_consumer: bool = True) -> str:
    """See `DatasetIterator.verdict`; `has_consumer` as in `verdict_on`."""
    return verdict_on(report_on(iterator), has_consumer=has_consumer).text


def report_on(iterator: Any) -> Report:
    """The report on a running iterator over a plan."""
    recorders: list[Recorder] = []
    self_times: dict[int, StageMeter] = {}
    _add_recorders(iterator, recorders, self_times)
    activity, elements = iterator._activity, iterator._num_delivered  # noqa: SLF001
    return collected(
        iterator._node,  # noqa: SLF001
        recorders,
        activity.elapsed_s,
        elements,
        self_times,
        Consumer(activity.times, iterator._consumer_away_s),  # noqa: SLF001
    )


def _add_recorders(
    iterator: Any, recorders: list[Recorder], self_times: dict[int, StageMeter]
) -> None:
    """Adds what `iterator` recorded, and those that users' iterators upstream read from."""
    recorder = getattr(iterator, "_recorder", None)
    if recorder is not None and recorder not in recorders:
        recorders.append(recorder)
    stage = getattr(iterator, "_stage", None)
    if stage is not None:
        _add_of_stage(stage, recorders, self_times)
    for parent in getattr(iterator, "_parents", ()):
        _add_recorders(parent, recorders, self_times)


def _add_of_stage(
    stage: Stage, recorders: list[Recorder], self_times: dict[int, StageMeter]
) -> None:
    inner = getattr(stage, "iterator", None)
    if inner is not None:
        reported = getattr(inner, "__dict__", {}).get(USER_STATS)
        if reported is not None and stage.node is not None:
            self_times[id(stage.node)] = reported.meter
        _add_recorders(inner, recorders, self_times)
    for parent in stage.parents:
        _add_of_stage(parent, recorders, self_times)
