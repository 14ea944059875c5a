"""Whether records come from memory or have to be waited for."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Read = TypeVar("_Read")

_BLOCKS_UNTIL_LOOK: Final = 32
_BLOCKS_UNTIL_COUNT: Final = 8
_WAITS_BESIDE_READING: Final = 4
_RECORDS_PER_WAIT: Final = 16


class StorageWatch:
    """Tells slow storage by how often the reading thread had to sleep.

    A read that the page cache answers never sleeps, and a second thread would only carry the
    bytes from one core's cache to another's. A read that waits for a device sleeps once for each
    piece, and other threads can wait meanwhile. While storage is slow, one block in 32 is read
    at once all the same, since by then it may be in memory. While it is not, sleeps are counted
    for one block in 8: to count them takes as long as to read a few records.

    Attributes:
        slow: Whether it was, when last looked at.
    """

    def __init__(self) -> None:
        self.slow = False
        self._blocks = -1

    def is_slow(self) -> bool:
        """Whether the next block is worth another thread."""
        if self.slow:
            self._blocks += 1
        return self.slow and self._blocks % _BLOCKS_UNTIL_LOOK != 0

    def is_due(self) -> bool:
        """Whether `watched` should read the next block."""
        if self.slow:
            return True
        self._blocks += 1
        return self._blocks % _BLOCKS_UNTIL_COUNT == 0

    def look_next(self) -> None:
        """Makes the next block due, however few there were."""
        self._blocks = -1

    def watched(self, read: Callable[[], _Read], num_records: int) -> _Read:
        """What `read` returns; the sleeps of this thread meanwhile are counted."""
        before = _sleeps()
        made = read()
        waits = _sleeps() - before
        self.slow = waits > _WAITS_BESIDE_READING + num_records / _RECORDS_PER_WAIT
        self._blocks = 0
        return made


def _sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
