"""Zips the elements of several stages into tuples."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, overload

from grainmill._dataset.element_types import A, B, C, T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, nodes_of
from grainmill._dataset.map_dataset import MapDataset, PlannedMapDataset
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.base.lazy_block import PULL_SIZE, lazy_block
from grainmill._iterators.base.node import (
    UNKNOWN,
    Length,
    Origin,
    SequentialNode,
    origins,
    runs,
    starts,
)
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import random_access

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._iterators.base.position import Position
    from grainmill._plan.node import Node


@lazy_dataclass
class Zip(SequentialNode):
    """Tuples with one element from each of several iterators."""

    strict: bool
    dataset_name: ClassVar[str] = "ZipIterDataset"
    saves: ClassVar[str] = ""
    keeps_length: ClassVar[bool] = False

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return tuple([spec_of(parent) for parent in self.parents])

    def _arguments(self) -> str:
        return f"([{len(self.parents)} parents], strict={self.strict})"

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        if any(parent.count is None for parent in parents):
            return UNKNOWN
        return min(parents, key=lambda parent: parent.count or 0)

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        parents = zip(self.parents, state["parents"], strict=True)
        return [one for parent in parents for one in starts(*parent)]

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        parents = zip(self.parents, before["parents"], after["parents"], strict=True)
        return [one for parent in parents for one in origins(*parent)]


class ZipMapDataset(PlannedMapDataset[T_co]):
    """Zips several datasets: element `i` is the tuple of their elements `i`.

    An element that a dataset dropped is `None` in the tuple. A dataset that is given several times
    computes its element for each of them: two calls of an augmentation give two views, and changing
    one in place leaves the other as it is. So elements of nested zips of the same dataset cost a
    call for each way to it: `map` to a tuple instead where one call is enough.

    Args:
        parents: Datasets of equal length, at least one.

    Raises:
        ValueError: There is no dataset, or lengths differ.

    Example:
        >>> letters = grain.MapDataset.source("abc")
        >>> list(grain.experimental.ZipMapDataset([grain.MapDataset.range(3), letters]))
        [(0, 'a'), (1, 'b'), (2, 'c')]
    """

    @overload
    def __init__(
        self: ZipMapDataset[tuple[A, B]], parents: tuple[MapDataset[A], MapDataset[B]]
    ) -> None: ...
    @overload
    def __init__(
        self: ZipMapDataset[tuple[A, B, C]],
        parents: tuple[MapDataset[A], MapDataset[B], MapDataset[C]],
    ) -> None: ...
    @overload
    def __init__(
        self: ZipMapDataset[tuple[Any, ...]], parents: Sequence[MapDataset[Any]]
    ) -> None: ...
    def __init__(self, parents: Sequence[MapDataset[Any]]) -> None:
        super().__init__(random_access.Zip(nodes_of(parents), 0), parents)


class ZipIterDataset(PlannedIterDataset[T_co]):
    """Zips several datasets: tuples of their first elements, their second elements, and so on.

    Args:
        parents: The datasets, at least one.
        strict: Whether unequal lengths are an error; if not, it ends with the shortest dataset.

    Raises:
        ValueError: There are no datasets. When read, if `strict`: one ends before another.

    Example:
        >>> numbers = grain.MapDataset.range(3).to_iter_dataset()
        >>> letters = grain.MapDataset.source("ab").to_iter_dataset()
        >>> list(grain.experimental.ZipIterDataset([numbers, letters], strict=False))
        [(0, 'a'), (1, 'b')]
    """

    @overload
    def __init__(
        self: ZipIterDataset[tuple[A, B]],
        parents: tuple[AnyDataset[A], AnyDataset[B]],
        *,
        strict: bool = True,
    ) -> None: ...
    @overload
    def __init__(
        self: ZipIterDataset[tuple[A, B, C]],
        parents: tuple[AnyDataset[A], AnyDataset[B], AnyDataset[C]],
        *,
        strict: bool = True,
    ) -> None: ...
    @overload
    def __init__(
        self: ZipIterDataset[tuple[Any, ...]],
        parents: Sequence[AnyDataset[Any]],
        *,
        strict: bool = True,
    ) -> None: ...
    def __init__(self, parents: Sequence[AnyDataset[Any]], *, strict: bool = True) -> None:
        if not len(parents):
            raise ValueError("At least one parent must be provided. `parents` is empty.")
        super().__init__(Zip(nodes_of(parents), strict), parents)


@runs(Zip)
class ZipStage(Stage):
    """Takes an element of each parent, in order, when a tuple is requested.

    If all parents have elements ready, their tuples are returned as one block.
    """

    pull_size = PULL_SIZE

    def __init__(self, node: Zip, *parents: Stage) -> None:
        super().__init__(*parents)
        self._node = node
        self._strict = node.strict
        self._cursors = [Cursor(parent) for parent in parents]
        self._reset()

    def _reset(self) -> None:
        self._partial: list[Any] = []  # the first elements of a tuple
        self._points: list[Position] | None = None  # before these, if known
        self._refusal: str | None = None
        self._ended = False

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        if self._ended:
            return Block([], functools.partial(_state, self._positions_before()))
        if not self._partial:
            count = min(limit, *(cursor.num_ready for cursor in self._cursors))
            if count:
                points = self._positions_before()
                elements = list(zip(*[cursor.take(count) for cursor in self._cursors], strict=True))
                self._points = None
                return Block(elements, functools.partial(_state, points))
        is_lazy = any(cursor.is_lazy for cursor in self._cursors)
        return lazy_block(self._step, self._positions_before, _last_state, limit if is_lazy else 1)

    def _step(self) -> Any:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        partial = self._partial
        if not partial:
            self._positions_before()
        for cursor in self._cursors[len(partial) :]:
            element = cursor.next()
            if element is END:
                return self._end(len(partial))
            partial.append(element)
        self._partial = []
        self._points = None
        return tuple(partial)

    def _end(self, ended: int) -> Any:
        """Ends at the end of parent `ended`; if strict, all other parents must end too."""
        self._points = points = list(self._positions_before())
        points[ended] = self._cursors[ended].position()
        if self._strict:
            if ended:
                self._refuse(f"argument {ended + 1} is shorter than {_arguments(ended)}")
            for number, cursor in enumerate(self._cursors[1:], 1):
                if cursor.next() is not END:
                    self._refuse(f"argument {number + 1} is longer than {_arguments(number)}")
                points[number] = cursor.position()
        self._ended = True
        return END

    def _refuse(self, text: str) -> None:
        self._refusal = f"ZipIterDataset {text}"
        raise ValueError(self._refusal)

    def _positions_before(self) -> list[Position]:
        if self._points is None:
            self._points = [cursor.position() for cursor in self._cursors]
        return self._points

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._positions_before(), 0)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parents",))
        parents = saved.list_of("parents", len(self._cursors), "the datasets that are zipped")
        for cursor, parent_state in zip(self._cursors, parents, strict=True):
            cursor.restore(parent_state)
        self._reset()


def _arguments(count: int) -> str:
    return "argument 1" if count == 1 else f"arguments 1-{count}"


def _state(points: list[Position], count: int) -> State:
    return {"parents": [after(position + count) for after, position in points]}


def _last_state(points: list[list[Position]]) -> State:
    return _state(points[-1], 0)
