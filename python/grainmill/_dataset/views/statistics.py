"""Statistics of iterators: `stats`, `verdict`, and what users' own iterators report."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from grainmill._stats.report import Consumer, as_dict, collected
from grainmill._stats.verdict import verdict_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._stats.report import Report


def stats_of(iterator: Any) -> dict[str, Any]:
    """See `DatasetIterator.stats`."""
    return as_dict(report_on(iterator))


def verdict_of(iterator: Any, *, has_consumer: bool = True) -> str:
    """See `DatasetIterator.verdict`; `has_consumer` as in `verdict_on`."""
    return verdict_on(report_on(iterator), has_consumer=has_consumer).text


def asked_verdict(iterator: Any, *, has_consumer: bool) -> str:
    """`iterator.verdict`, which may be that of a user's class that takes no arguments."""
    asked: Callable[..., str] = iterator.verdict
    try:
        inspect.signature(asked).bind(has_consumer=has_consumer)
    except TypeError:
        return asked()
    return asked(has_consumer=has_consumer)


def report_on(iterator: Any) -> Report:
    """The report on a running iterator over a plan."""
    activity, elements = iterator._activity, iterator._num_delivered  # noqa: SLF001
    return collected(
        iterator._node,  # noqa: SLF001
        iterator._recorder,  # noqa: SLF001
        activity.elapsed_s,
        elements,
        Consumer(
            activity.times,
            iterator._meter.cpu_s,  # noqa: SLF001
            iterator._consumer_away_s,  # noqa: SLF001
        ),
    )
