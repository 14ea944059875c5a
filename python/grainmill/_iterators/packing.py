"""What the stages that pack sequences have in common: they take elements in groups."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.group_len import FULL
from grainmill._iterators.notes import note_stage

if TYPE_CHECKING:
    from grainmill._iterators.base.group_len import GroupLen
    from grainmill._iterators.base.stage import Stage
    from grainmill._plan.node import Node


class PackingStage(CursorStage):
    """Packs the elements of `parent`, a group of them at a time."""

    packs = True

    def __init__(self, node: Node, parent: Stage) -> None:
        super().__init__(node, parent)
        self._group_len = FULL  # of the last group, or that of a restored state
        self._num_of_group = 0  # elements packed since the group began
        self._num_taken = 0  # elements packed since this was created or restored

    @abc.abstractmethod
    def _push(self, elements: list[Any]) -> tuple[int, bool]:
        """Packs elements; returns how many, and whether the group is full without the others."""

    def _note_packed(self) -> None:
        """Called when elements were packed."""

    def _fill_group(self, group_len: GroupLen, pull_len: int) -> bool:
        """Packs the elements of a group; returns whether it is full, else the data have ended."""
        while elements := group_len.peek(self._cursor, pull_len, self._num_of_group):
            try:
                count, is_full = self._push(elements)
            except Exception as failure:
                raise_interrupt(failure)
                failure.add_note(
                    f"Element {self._num_taken} of those that {self._node} took since it was "
                    "created or restored cannot be packed."
                )
                cursor = self._cursor
                note_stage(failure, self._node, cursor.position(), cursor.position_after_first())
                raise
            self._cursor.advance(count)
            self._num_of_group += count
            self._num_taken += count
            self._note_packed()
            if is_full:
                return True
        return False

    def _restart(self, group_len: GroupLen) -> None:
        """Begins with the group at the cursor, which was restored."""
        self._group_len = group_len
        self._num_of_group = self._num_taken = 0
