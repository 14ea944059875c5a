"""Splits each element into a sequence of elements."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._checkpoint.ends import CutCount
from grainmill._interrupts import listed, raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import END, CursorStage
from grainmill._iterators.base.group_len import GroupLen
from grainmill._iterators.base.node import Origin, SequentialNode, runs
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.notes import note_stage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.node import Node, transform_name
from grainmill._plan.random_access import check_flat_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan import transforms


@lazy_dataclass
class FlatMap(SequentialNode):
    """The elements of a sequence for each element."""

    transform: transforms.FlatMapLike[Any, Any]
    dataset_name: ClassVar[str] = "FlatMapIterDataset"
    runs_users_code: ClassVar[bool] = True
    saves: ClassVar[str] = "the position in the element that is split"
    parent_key: ClassVar[str | None] = "parent"
    restart_key: ClassVar[str | None] = "next_index_in_buffer"
    keeps_length: ClassVar[bool] = False

    @classmethod
    def of(cls, parent: Node, transform: transforms.FlatMapLike[Any, Any]) -> Self:
        """A node that replaces each element of `parent` by several."""
        check_flat_map(transform)
        return cls((parent,), transform)

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`; the element that is split is computed again."""
        starts = self.starts(after)
        if len(starts) == 1 and not any(step.drops_elements for step in self.walk()):
            return [start._replace(last=start.first) for start in starts]
        return starts


@runs(FlatMap)
class FlatMapStage(CursorStage):
    """Pulls one element at a time and returns the elements that it is split into.

    A state holds the parent's state before the element being split, and how many of the resulting
    elements ("outputs") were delivered.
    """

    pull_size = 1 << 20  # all outputs of an element are computed together

    def __init__(self, node: FlatMap, parent: Stage) -> None:
        super().__init__(node, parent)
        self._split = node.transform.flat_map
        self._reset(0)

    def _reset(self, taken: int) -> None:
        self._outputs: Sequence[Any] = ()
        self._taken = 0
        self._skip = 0 if isinstance(taken, CutCount) else taken  # at the end of the data
        self._before = self._cursor.position()  # before the element being split
        self._point = (self._before, taken)
        self._element: Any = _NONE  # taken but not yet split

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        last, last_taken = self._point
        while self._taken == len(self._outputs):
            if not self._advance():
                return self._end()
        start, outputs, point = self._taken, self._outputs, self._before
        self._taken = end = min(start + limit, len(outputs))
        self._point = (point, end)
        state_after = functools.partial(_state_after, (last, last_taken), point, start)
        if type(outputs) is list:
            whole = not start and end == len(outputs)
            return Block(outputs[:] if whole else outputs[start:end], state_after)
        if isinstance(outputs, list | tuple):
            return Block(list(outputs[start:end]), state_after)
        return Block(list(range(start, end)), state_after, lambda output, _: outputs[output])

    def _end(self) -> Block:
        return Block([], functools.partial(_state_after, self._point, *self._point))

    def _advance(self) -> bool:
        """Splits the next element; `False` at the end of the parent."""
        if self._element is _NONE:
            before = self._cursor.position()
            element = self._cursor.next()
            if element is END:
                self._point = (self._cursor.position(), CutCount(self._point[1], 0))
                return False
            self._before, self._element = before, element
        try:
            outputs = self._split(self._element)
            if not hasattr(outputs, "__len__"):  # a generator
                outputs = listed(outputs)
        except Exception as failure:
            raise_interrupt(failure)
            note_stage(failure, self._node, self._before, self._cursor.position())
            raise
        if self._skip > len(outputs):
            raise ValueError(
                f"state of {self._node} was saved after {self._skip} outputs of an element that "
                f"has {len(outputs)} outputs now; restore needs the same data and function"
            )
        self._element = _NONE
        self._point = (self._before, self._skip)
        self._outputs, self._taken, self._skip = outputs, self._skip, 0
        return True

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._point)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "next_index_in_buffer"))
        taken = GroupLen.of(saved["next_index_in_buffer"]).in_state(
            saved.index("next_index_in_buffer")
        )
        self._cursor.restore(saved["parent"])
        self._reset(taken)


_NONE = object()


def _state(point: Position, taken: int) -> State:
    return {"parent": state_at(point), "next_index_in_buffer": taken}


def _state_after(last: tuple[Position, int], point: Position, start: int, k: int) -> State:
    return _state(point, start + k) if k else _state(*last)
