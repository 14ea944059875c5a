"""The elements of a stage up to the first that a predicate rejects."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.node import Length, Passing, runs
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.notes import note_stage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.applying import Filtering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._plan import transforms


@lazy_dataclass
class TakeWhile(Filtering, Passing):
    """The elements before the first for which a predicate is false."""

    dataset_name: ClassVar[str] = "TakeWhileIterDataset"
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "whether it has ended"
    parent_key: ClassVar[str | None] = "parent"
    keeps_length: ClassVar[bool] = False

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        return parents[0].at_most()


class TakeWhileIterDataset(PlannedIterDataset[T_co]):
    """Takes the elements before the first for which `predicate` is false.

    Args:
        parent: The dataset to read from.
        predicate: A function of an element, or a `transforms.Filter`. It is called once for each
            element, when the element is requested.

    Raises:
        TypeError: `predicate` is neither.

    Example:
        >>> ds = grain.MapDataset.range(10).to_iter_dataset()
        >>> list(grain.experimental.TakeWhileIterDataset(ds, lambda x: x < 3))
        [0, 1, 2]
    """

    def __init__(
        self,
        parent: AnyDataset[T_co],
        predicate: transforms.FilterLike[T_co] | Callable[[T_co], bool | np.bool_],
    ) -> None:
        super().__init__(TakeWhile.of(node_of(parent), predicate), (parent,))


@runs(TakeWhile)
class TakeWhileStage(CursorStage):
    """Calls the predicate once for each element, when that is requested.

    The rejected element is taken from the parent; the state then says that the stage has ended.
    """

    def __init__(self, node: TakeWhile, parent: Stage) -> None:
        super().__init__(node, parent)
        self._predicate = node.function
        self._ended = False

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        elements: list[Any] = []
        points = [self._point()]
        while len(elements) < limit and not self._ended:
            element: list[Any] = []
            try:
                element = self._cursor.peek(1)
                keep = bool(element) and self._predicate(element[0])
            except Exception as failure:
                raise_interrupt(failure)
                if not elements:
                    if element:
                        cursor = self._cursor
                        note_stage(
                            failure, self._node, cursor.position(), cursor.position_after_first()
                        )
                    raise
                break  # It is computed again once those before it are delivered.
            self._cursor.advance(len(element))
            if keep:
                elements += element
                points.append(self._point())
            else:
                self._ended = True
        if not elements:
            points = [self._point()]
        return Block(elements, functools.partial(_state_at, points))

    def _point(self) -> tuple[Position, bool]:
        return self._cursor.position(), self._ended

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(*self._point())

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "ended"))
        ended = saved.flag("ended")
        self._cursor.restore(saved["parent"])
        self._ended = ended


def _state(point: Position, ended: bool) -> State:  # noqa: FBT001 - the pair is stored like this
    return {"parent": state_at(point), "ended": ended}


def _state_at(points: list[tuple[Position, bool]], k: int) -> State:
    return _state(*points[k])
