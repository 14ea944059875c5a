"""Whether records come from memory or have to be waited for."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCKS_UNTIL_LOOK: Final = 32
_WAITS_BESIDE_READING: Final = 4
_RECORDS_PER_WAIT: Final = 16


class StorageWatch:
    """Tells slow storage by how often the reading thread had to sleep.

    A read that the page cache answers never sleeps, and a second thread would only carry the
    bytes from one core's cache to another's. A read that waits for a device sleeps once for each
    piece, and other threads can wait meanwhile. While storage is slow, one block in 32 is read
    at once all the same, since by then it may be in memory.

    Attributes:
        slow: Whether it was, when last looked at.
    """

    def __init__(self) -> None:
        self.slow = False
        self._blocks = 0

    def is_slow(self) -> bool:
        """Whether the next block is worth another thread."""
        if self.slow:
            self._blocks += 1
        return self.slow and self._blocks % _BLOCKS_UNTIL_LOOK != 0

    @contextlib.contextmanager
    def watching(self, num_records: int) -> Iterator[None]:
        """Counts the sleeps of this thread while it reads `num_records`."""
        before = _sleeps()
        yield
        waits = _sleeps() - before
        self.slow = waits > _WAITS_BESIDE_READING + num_records / _RECORDS_PER_WAIT


def _sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
