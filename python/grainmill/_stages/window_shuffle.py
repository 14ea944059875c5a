"""Shuffles elements within each window of consecutive ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._dataset.map_dataset import MapDataset, PlannedMapDataset
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.group_len import FULL, GroupLen
from grainmill._iterators.base.node import Regrouping, runs
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._native import window_order
from grainmill._plan import random_access
from grainmill._plan.arguments import checked_integer
from grainmill._plan.seeds import checked_shuffle_seed

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset
    from grainmill._plan.node import Node

_WindowPosition: TypeAlias = "tuple[Position, int, int, GroupLen]"
"""The position at a window's start, its number, how many elements were delivered, its end."""


@lazy_dataclass
class WindowShuffle(Regrouping):
    """Shuffles each window of `window_size` consecutive elements."""

    window_size: int
    seed: int
    dataset_name: ClassVar[str] = "WindowShuffleIterDataset"
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the window and the position in it"
    parent_key: ClassVar[str | None] = "parent_window_start_state"
    restart_key: ClassVar[str | None] = "pos_in_window"
    completes_last: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, window_size: int, seed: int) -> Self:
        """A node that permutes each window of `parent`."""
        window_size = checked_integer(window_size, "window_size", minimum=1)
        return cls((parent,), window_size, checked_shuffle_seed(seed))


class WindowShuffleMapDataset(PlannedMapDataset[T_co]):
    """Shuffles elements within windows of `window_size` consecutive ones.

    So records that are adjacent in a file are still read close together. Every window of every
    epoch has a different order, by the algorithm of `MapDataset.shuffle`. Every epoch is a
    permutation: if the window size does not divide its length, its last window is shorter.

    Args:
        parent: The dataset to read from.
        window_size: Elements in a window, at least 1.
        seed: From 0 to 2**32 - 1.

    Raises:
        ValueError: `window_size` or `seed` is out of range.
        TypeError: `window_size` or `seed` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10)
        >>> list(grain.experimental.WindowShuffleMapDataset(ds, window_size=4, seed=0))
        [0, 3, 1, 2, 5, 6, 7, 4, 8, 9]
    """

    def __init__(self, parent: MapDataset[T_co], *, window_size: int, seed: int) -> None:
        node = random_access.WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


class WindowShuffleIterDataset(PlannedIterDataset[T_co]):
    """Shuffles each window of `window_size` consecutive elements.

    A window is held in memory. Each has a different order, by the algorithm of
    `MapDataset.shuffle`. A saved state refers to the start of the window, so restoring computes its
    elements again.

    Args:
        parent: The dataset to read from.
        window_size: Elements in a window, at least 1; the last one may be shorter.
        seed: From 0 to 2**32 - 1.

    Raises:
        ValueError: `window_size` or `seed` is out of range.
        TypeError: `window_size` or `seed` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10).to_iter_dataset()
        >>> list(grain.experimental.WindowShuffleIterDataset(ds, window_size=4, seed=0))
        [2, 1, 3, 0, 4, 7, 6, 5, 9, 8]
    """

    def __init__(self, parent: AnyDataset[T_co], *, window_size: int, seed: int) -> None:
        node = WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


@runs(WindowShuffle)
class WindowShuffleStage(CursorStage):
    """Fills a window from its parent, then delivers it in a random order.

    A state holds the parent's state at the start of the window; restoring fills the window again.
    In the last window, if that is shorter, it has the number of elements: there may be more now.
    """

    def __init__(self, node: WindowShuffle, parent: Stage) -> None:
        super().__init__(node, parent)
        self._size = self.pull_size = node.window_size
        self._seed = node.seed
        self._reset(0, 0, FULL)

    def _reset(self, index: int, position: int, group_len: GroupLen) -> None:
        """Sets the position to the window that starts at the cursor and is not yet filled."""
        self._filling_start = self._cursor.position()
        self._current = (self._filling_start, index, position, group_len)
        self._group_len = group_len
        self._index = index
        self._skip = position
        self._window: list[Any] = []
        self._position = 0
        self._filling: list[Any] = []

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        last = self._current
        while self._position == len(self._window):
            if not self._fill():
                return Block([], functools.partial(_state_after, last, last, 0))
        begin, index, length = self._position, self._index, len(self._window)
        start = self._filling_start
        elements = self._window[begin : begin + limit]
        self._position = end = begin + len(elements)
        if end == length:
            self._index += 1
        group_len = self._group_len
        self._current = (start, self._index, end, group_len)
        first = (start, index, begin, group_len)
        return Block(elements, functools.partial(_state_after, last, first, length))

    def _fill(self) -> bool:
        """Fills the next window, or that of a restored state; `False` at the end."""
        size = self._group_len.left(self._size) if self._skip else self._size
        while len(self._filling) < size:
            start = None if self._filling else self._cursor.position()
            elements = self._cursor.take(size - len(self._filling))
            if not elements:
                break
            if start is not None:
                self._filling_start = start
            self._filling += elements
        if self._skip > len(self._filling):
            raise ValueError(
                f"state of {self._node} was saved {self._skip} elements into a window that has "
                f"{len(self._filling)} elements now; restore needs the same data"
            )
        if not self._filling:
            return False
        filling, self._filling = self._filling, []
        self._group_len = FULL if len(filling) == self._size else GroupLen(len(filling))
        order = window_order(len(filling), (self._seed + self._index) % 2**32).tolist()
        self._window = [filling[at] for at in order]
        self._position, self._skip = self._skip, 0
        return True

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._current)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        keys = ("parent_window_start_state", "window_index", "pos_in_window")
        saved = CheckedState(self._node, state, keys)
        index, position = saved.index("window_index"), saved.index("pos_in_window", self._size)
        group_len = GroupLen.of(saved["pos_in_window"])
        self._cursor.restore(saved["parent_window_start_state"])
        self._reset(index, position, group_len)


def _state(window: _WindowPosition) -> State:
    start, index, position, group_len = window
    return {
        "parent_window_start_state": state_at(start),
        "window_index": index,
        "pos_in_window": group_len.in_state(position),
    }


def _state_after(last: _WindowPosition, first: _WindowPosition, length: int, k: int) -> State:
    if not k:
        return _state(last)
    start, index, begin, group_len = first
    return _state((start, index + (begin + k == length), begin + k, group_len))
