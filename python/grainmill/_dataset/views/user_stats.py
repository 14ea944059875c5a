"""What `self._stats` is in users' own datasets and iterators: the times that they report."""

from __future__ import annotations

import time
from typing import Any, Final, Self, TypeVar

from grainmill._stats.element_specs import spec_of
from grainmill._stats.meters import StageMeter
from grainmill._stats.recorded import USER_STATS

T = TypeVar("T")


class UserStats:
    """What a user's own dataset or iterator reports, as `self._stats`.

    Attributes:
        meter: Counts and times so far.
    """

    def __init__(self) -> None:
        self.meter = StageMeter()

    def record_self_time(self, *, num_elements: int = 1, offset_ns: int = 0) -> _Timed:
        """A context whose duration counts as that of the dataset or iterator itself.

        Args:
            num_elements: Elements produced in it.
            offset_ns: Nanoseconds to add to its duration.
        """
        return _Timed(self.meter, offset_ns, num_elements)

    def record_output_spec(self, element: T) -> T:
        """Records the spec of an element, once; returns `element`."""
        if self.meter.spec is None and element is not None:
            self.meter.spec = spec_of(element)
        return element

    def record_bytes_produced(self, element: T) -> T:
        """Records the bytes of an array or of bytes; returns `element`."""
        size: Any = getattr(element, "nbytes", None)
        if size is None and isinstance(element, str | bytes):
            size = len(element)
        if isinstance(size, int):
            self.meter.element_bytes = size
        return element

    def record_bytes_consumed(self, element: T) -> T:
        """Returns `element`."""
        return element


class _Timed:
    """See `UserStats.record_self_time`."""

    __slots__ = ("_count", "_meter", "_offset_s", "_started_s")

    def __init__(self, meter: StageMeter, offset_ns: float, count: int) -> None:
        self._meter = meter
        self._offset_s = offset_ns * 1e-9
        self._count = count
        self._started_s = 0.0

    def __enter__(self) -> Self:
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        # The CPU time is that of the whole call, which is timed now and then: see `report`.
        self._meter.add(self._count, time.perf_counter() - self._started_s + self._offset_s, 0.0)


class _OfEachObject:
    """An attribute that is a `UserStats` of its own for each object."""

    def __get__(self, owner: Any, kind: type | None = None) -> UserStats:
        if owner is None:
            return UserStats()
        stats: UserStats | None = owner.__dict__.get(USER_STATS)
        if stats is None:
            stats = owner.__dict__[USER_STATS] = UserStats()
        return stats


STATS: Final = _OfEachObject()
"""The attribute `_stats` of the classes that users derive from."""
