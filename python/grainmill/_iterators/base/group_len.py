"""How many elements there are in a group that is computed again after a restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._checkpoint.ends import CutCount

if TYPE_CHECKING:
    from grainmill._iterators.base.cursor import Cursor


class GroupLen(NamedTuple):
    """The length of a group of elements, such as a window or those of a batch of bins.

    Attributes:
        num_elements: Their number, if the end of the data left the group incomplete; `None` if it
            is full.
    """

    num_elements: int | None

    @classmethod
    def of(cls, count: Any) -> GroupLen:
        """That of a number in a state."""
        return cls(count.num_elements) if isinstance(count, CutCount) else FULL

    def in_state(self, count: int) -> int:
        """`count`, of what was delivered, as it is in a state."""
        num_elements = self.num_elements
        return count if num_elements is None or not count else CutCount(count, num_elements)

    def left(self, size: int, num_taken: int = 0) -> int:
        """How many of `size` elements may be taken after `num_taken`."""
        return size if self.num_elements is None else min(size, self.num_elements - num_taken)

    def peek(self, cursor: Cursor, size: int, num_taken: int) -> list[Any]:
        """As `Cursor.peek`, up to the end of the group after `num_taken` elements."""
        left = self.left(size, num_taken)
        return cursor.peek(size)[:left] if left > 0 else []


FULL = GroupLen(None)
