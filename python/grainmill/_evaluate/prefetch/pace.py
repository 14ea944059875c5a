"""How many elements to compute at once, by how long the last ones took."""

from __future__ import annotations

import sys

from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.thread_pool import Turns


class Pace:
    """How many elements to compute at once, so that a block takes about `block_s` seconds.

    Attributes:
        max_count: The limit of `count`.
        count: How many elements to compute at once.
        by_lists: Whether users' functions are called for all these elements at once.
        equal_share: How many of `SHARED_LEN` elements each thread gets, if several do.
        turns: Whether those of the pool take turns; then a block is no longer than one.
        element_s: Seconds per element of the last block; `None` before the first.
        is_growing: Whether later blocks will probably be larger.
    """

    def __init__(self, max_count: int, block_s: float, *, by_lists: bool = False) -> None:
        self.max_count = max(1, max_count)
        self.count = 1
        self.is_growing = True
        self.element_s: float | None = None
        self._block_s = block_s
        self.by_lists = by_lists
        self.equal_share = sys.maxsize
        self.turns = Turns()
        self._previous: tuple[int, float] | None = None  # another list length and its `element_s`
        self._num_held = 0  # blocks for which the length is not changed

    def record(self, count: int, elapsed_s: float) -> None:
        """Records that `count` elements took `elapsed_s`."""
        self.element_s = elapsed_s / count
        is_long = elapsed_s >= self._block_s / 2
        max_count = min(self.max_count, self.turn_len)
        if self.by_lists and is_long:
            if count == self.count:
                self.count = self._list_len(count, self.element_s)
        elif elapsed_s > self._block_s:
            self.count = max(1, min(self.count, count) // 2)
        elif not is_long and count >= self.even(self.count):
            self.count *= 2
            self._previous, self._num_held = None, 0
        self.count = min(self.count, max_count)
        grows_anyway = self.by_lists and self.count < tuning.MIN_LIST_LEN
        self.is_growing = (not is_long or grows_anyway) and self.count < max_count

    def even(self, count: int) -> int:
        """The length of blocks of at most `count` elements of which threads get equal shares."""
        share = self.equal_share
        if self.turn_len == sys.maxsize or not share // 10 < count <= share:
            return max(1, count)
        return share // -(-share // count)

    @property
    def turn_len(self) -> int:
        """The maximum number of elements that a thread computes before another has its turn."""
        if self.by_lists or self.equal_share == sys.maxsize or not self.turns.are_taken:
            return sys.maxsize
        return max(1, self.equal_share // 5)

    def _list_len(self, count: int, element_s: float) -> int:
        """The length of the next list after one of `count` elements, which took long.

        A call may cost the same whatever the number of elements, or not. So longer lists are kept
        only if they make an element cheaper, shorter ones unless they make it more expensive.
        """
        least, share = tuning.MIN_LIST_LEN, tuning.CHEAPER_SHARE
        if self._num_held:
            self._num_held -= 1
            return count
        previous, self._previous = self._previous, (count, element_s)
        if count < least:
            return 2 * count
        if previous is None or previous[0] == count:
            return 2 * count if count == least else max(least, count // 2)
        if previous[0] < count:
            return 2 * count if element_s < share * previous[1] else max(least, count // 2)
        if previous[1] < share * element_s:
            self._previous, self._num_held = None, tuning.LISTS_HELD
            return previous[0]
        if count == least:
            self._previous, self._num_held = None, tuning.LISTS_HELD
        return max(least, count // 2)
