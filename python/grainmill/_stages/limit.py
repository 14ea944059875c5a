"""The first elements of a stage."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, Self

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.node import Length, Passing, runs
from grainmill._iterators.base.position import end_at
from grainmill._iterators.base.stage import Block, Stage, State, num_after
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import checked_integer
from grainmill._plan.random_access import PRACTICALLY_ENDLESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._iterators.base.stage import StateAfter
    from grainmill._plan.node import Node


@lazy_dataclass
class Limit(Passing):
    """The first `count` elements."""

    count: int
    dataset_name: ClassVar[str] = "LimitIterDataset"
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the number of elements passed"
    parent_key: ClassVar[str | None] = "parent"
    keeps_positions: ClassVar[bool] = True
    grows_by: ClassVar[str | None] = "count"
    keeps_length: ClassVar[bool] = False

    @classmethod
    def of(cls, parent: Node, count: int) -> Self:
        """A node that ends after `count` elements of `parent`."""
        count = checked_integer(count, "count")
        if count <= 0:
            raise ValueError(f"`count` must be a positive integer, got {count}.")
        return cls((parent,), count)

    def _arguments(self) -> str:
        return f"(count={self.count})"

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        (parent,) = parents
        if parent.count is None:
            return Length(self.count, exact=False)
        exact = parent.exact or parent.count >= PRACTICALLY_ENDLESS
        return Length(min(parent.count, self.count), exact=exact)


class LimitIterDataset(PlannedIterDataset[T_co]):
    """Takes the first `count` elements.

    Args:
        parent: The dataset to read from.
        count: Maximum number of elements, at least 1.

    Raises:
        ValueError: `count` is not positive.
        TypeError: `count` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10).repeat().to_iter_dataset()
        >>> list(grain.experimental.LimitIterDataset(ds, 3))
        [0, 1, 2]
    """

    def __init__(self, parent: AnyDataset[T_co], count: int) -> None:
        super().__init__(Limit.of(node_of(parent), count), (parent,))


@runs(Limit)
class LimitStage(CursorStage):
    """Returns the first `count` elements of its parent, and never pulls more."""

    def __init__(self, node: Limit, parent: Stage) -> None:
        super().__init__(node, parent)
        self._limit = node.count
        self._reset(0)

    def _reset(self, count: int) -> None:
        self._count = count  # elements before the last block
        self._last: Block | None = None

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        self._reset(count := self._count_now())
        num_left = min(limit, self._limit - count)
        if num_left <= 0:
            block = end_at(self._cursor.position())
        else:
            self._last = block = self._cursor.pull_block(num_left)
        return block.with_states(
            functools.partial(_state_after, block.state_after, count, block.dropped)
        )

    def _count_now(self) -> int:
        return self._count if self._last is None else self._count + self._last.num_finished

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._cursor.state(), self._count_now())

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "count_elements_read"))
        count = saved.index("count_elements_read", self._limit)
        self._cursor.restore(saved["parent"])
        self._reset(count)

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._cursor.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._cursor.seek(index)
        self._reset(index)


def _state(parent: State, count: int) -> State:
    return {"parent": parent, "count_elements_read": count}


def _state_after(after: StateAfter, count: int, dropped: list[int] | None, k: int) -> State:
    return _state(after(k), num_after(count, dropped, k))
