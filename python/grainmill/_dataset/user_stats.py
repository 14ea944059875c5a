"""What `self._stats` is in users' own datasets and iterators; nothing is recorded."""

from __future__ import annotations

import contextlib
from typing import TypeVar

T = TypeVar("T")

_NO_TIME = contextlib.nullcontext()


class UserStats:
    """The interface through which users' own classes report timings; nothing is recorded."""

    __slots__ = ()

    def record_self_time(
        self, *, num_elements: int = 1, offset_ns: int = 0
    ) -> contextlib.nullcontext[None]:
        """A context whose duration counts as that of the dataset or iterator itself."""
        del num_elements, offset_ns
        return _NO_TIME

    def record_output_spec(self, element: T) -> T:
        """Returns `element`."""
        return element

    def record_bytes_produced(self, element: T) -> T:
        """Returns `element`."""
        return element

    def record_bytes_consumed(self, element: T) -> T:
        """Returns `element`."""
        return element


STATS = UserStats()
