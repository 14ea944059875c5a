"""How many elements a stage had for what the end of the data left incomplete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._checkpoint.ends import CutCount

if TYPE_CHECKING:
    from grainmill._iterators.base.cursor import Cursor


class Cut(NamedTuple):
    """Where the elements end that are computed again after a restore.

    Attributes:
        num_elements: Their number; `None` if the window or the bins were full.
    """

    num_elements: int | None

    @classmethod
    def of(cls, count: Any) -> Cut:
        """That of a number in a state."""
        return cls(count.num_elements) if isinstance(count, CutCount) else NOT_CUT

    def noted(self, count: int) -> int:
        """`count`, of what was delivered, as it is in a state."""
        cut = self.num_elements
        return count if cut is None or not count else CutCount(count, cut)

    def left(self, size: int, num_taken: int = 0) -> int:
        """How many of `size` elements may be taken after `num_taken`."""
        return size if self.num_elements is None else min(size, self.num_elements - num_taken)

    def peek(self, cursor: Cursor, size: int, num_taken: int) -> list[Any]:
        """As `Cursor.peek`, up to the end after `num_taken` elements."""
        left = self.left(size, num_taken)
        return cursor.peek(size)[:left] if left > 0 else []


NOT_CUT = Cut(None)
