"""Keeps the elements of the first pass in a store, from which later passes take them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import END, CursorStage
from grainmill._iterators.base.node import Origin, SequentialNode, origins, runs
from grainmill._iterators.base.position import Position, constant_state, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._cache.make import Pass, SequenceStore, StoredSequence
    from grainmill._cache.sequence import Ahead
    from grainmill._iterators.base.stage import StateAfter
    from grainmill._plan.node import Node, Share

_PULL_SIZE = 64


class Caching(SequentialNode):
    """A step that keeps the elements of its parent, and hands them on."""

    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the position in the cache"
    parent_key: ClassVar[str | None] = "parent"
    keeps_length: ClassVar[bool] = True

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        return []


@lazy_dataclass
class StoredCache(Caching):
    """The elements of the parent, which are kept in `store` during the first pass over them."""

    store: SequenceStore
    dataset_name: ClassVar[str] = "StoredCacheIterDataset"

    @classmethod
    def of(cls, parent: Node, make_store: Callable[[Node], Any]) -> Self:
        """A node that keeps the elements of `parent` in the store that `make_store` returns."""
        return cls((parent,), make_store(parent))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        parent = share.of(self.parent)
        store = self.store.share(share.worker, share.count)
        return dataclasses.replace(self, parents=(parent,), store=store)

    def over(self, parents: tuple[Any, ...]) -> Self:
        """See `Node.over`."""
        if parents[0] is self.parents[0]:
            return self
        return dataclasses.replace(self, parents=parents, store=self.store.for_parent(parents[0]))

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`; what was in the store was computed at another time."""
        if before["parent"] is None or after["parent"] is None:
            return []
        return origins(self.parent, before["parent"], after["parent"])


class CachingStage(CursorStage):
    """Hands on elements of its parent, or those that it kept, from a position on."""

    def __init__(self, node: Caching, parent: Stage) -> None:
        super().__init__(node, parent)
        self._name = node.dataset_name
        self._position = 0

    def _refusal(self, count: int) -> ValueError:
        return ValueError(
            f"state of {self._name} was saved after {self._position} elements but there are "
            f"{count}; restore needs the same data"
        )


@runs(StoredCache)
class StoredCacheStage(CachingStage):
    """Takes an element from the store if it is there, else from its parent.

    A state has the position and, where the parent has been read up to there, the parent's state.
    With it, a restored iterator continues at once; without, it takes elements from the store, and
    only if they are not there any more does it read the parent again from its start.
    """

    def __init__(self, node: StoredCache, parent: Stage) -> None:
        super().__init__(node, parent)
        self._store = node.store
        self._parent_position = 0  # elements that the cursor is past
        self._last: StateAfter = functools.partial(_state_at, 0, [self._cursor.position()])
        self._num_last = 0
        self._pass: Pass | None = None  # takes the elements of the pass that this is
        self._opened: StoredSequence | None = None
        self._ahead: Ahead = deque()  # reads of stored elements in flight
        self._singly = False  # whether to take one element at a time

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return max(_PULL_SIZE, self._cursor.stage.pull_size)

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        self._cursor.first_state()
        if not self._position:  # another pass may have finished the cache
            self._opened = self._store.opened()
        stored = self._opened
        if stored is not None and (stored.is_complete or self._position < stored.num_stored):
            elements = stored.read(self._position, limit, self._ahead)
            after = functools.partial(_state_in_store, self._position)
            if not elements and self._position > stored.num_stored:
                raise self._refusal(stored.num_stored)
            return self._delivered(elements, after)
        self._go_to_position()
        elements, points = self._taken(limit)
        return self._delivered(elements, functools.partial(_state_at, self._position, points))

    def _delivered(self, elements: list[Any], after: StateAfter) -> Block:
        self._position += len(elements)
        self._last, self._num_last = after, len(elements)
        return Block(elements, after)

    def _taken(self, limit: int) -> tuple[list[Any], list[Position]]:
        """The next elements of the parent, with the positions before, between and after."""
        cursor = self._cursor
        cursor.fill()
        points = [cursor.position()]
        elements: list[Any] = []
        for _ in range(1 if self._singly else max(1, min(limit, cursor.num_ready))):
            element = cursor.next()
            if element is END:
                points = [cursor.position()]
                break
            elements.append(element)
            points.append(cursor.position())
        try:
            self._store_elements(elements, points)
        except TypeError as failure:  # one of them cannot be pickled
            raise_interrupt(failure)
            self._return_to(points[0], self._parent_position - len(elements))
            if len(elements) == 1:
                raise
            self._singly = True
            return self._taken(1)
        return elements, points

    def _store_elements(self, elements: list[Any], points: list[Position]) -> None:
        at = self._parent_position
        if at == 0 or self._pass is None:
            self._abandon_pass()
            self._pass = self._store.begin()
        self._parent_position += len(elements)
        if elements:
            self._pass.append(
                at, elements, [functools.partial(state_at, point) for point in points[1:]]
            )
        else:
            self._pass.finish(at)
            self._pass = None
            self._opened = self._store.opened()

    def _return_to(self, point: Position, position: int) -> None:
        self._cursor.restore(state_at(point))
        self._parent_position = position

    def _go_to_position(self) -> None:
        """Moves the parent to the position, if it is elsewhere, and stores what it passes."""
        if self._parent_position == self._position:
            return
        stored = self._opened
        count, state = (0, None) if stored is None else stored.frontier
        if not count <= self._parent_position < self._position:
            self._cursor.restore(self._cursor.first_state() if state is None else state())
            self._parent_position = 0 if state is None else count
        while self._parent_position < self._position:
            elements, _ = self._taken(self._position - self._parent_position)
            if not elements:
                raise self._refusal(self._parent_position)

    def state(self) -> State:
        """See `Stage.state`."""
        return self._last(self._num_last)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._name, state, ("parent", "position"))
        position = saved.index("position")
        self._cursor.first_state()
        self._abandon_pass()
        self._opened = stored = self._store.opened()
        parent = saved["parent"]
        if parent is not None and (stored is None or not stored.is_complete):
            self._cursor.restore(parent)  # raises if it is not a state of the parent
            self._parent_position = position
        self._position = position
        self._last, self._num_last = constant_state(dict(state)), 0

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`; does nothing where all elements are stored."""
        stored = self._store.opened()
        if stored is None or not stored.is_complete:
            super().start_prefetch()

    def close(self) -> None:
        """See `Stage.close`."""
        self._abandon_pass()
        super().close()

    def _abandon_pass(self) -> None:
        if self._pass is not None:
            self._pass.abandon()
            self._pass = None


def _state(position: int, parent: State | None) -> State:
    return {"parent": parent, "position": position}


def _state_in_store(position: int, k: int) -> State:
    return _state(position + k, None)


def _state_at(position: int, points: list[Position], k: int) -> State:
    return _state(position + k, state_at(points[k]))
