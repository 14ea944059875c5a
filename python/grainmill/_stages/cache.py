"""Caches the elements of the first epoch in memory for later ones."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._evaluate.evaluated import SKIPPED
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.node import Origin, origins, runs
from grainmill._iterators.base.position import Position, of_state, state_at
from grainmill._iterators.base.stage import Block, Finish, Stage, State, StateAfter, num_after
from grainmill._iterators.stored_cache import Caching, CachingStage
from grainmill._lazy_dataclass import lazy_dataclass

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset

_PULL_SIZE = 64
_ALL = 1 << 62


@lazy_dataclass
class Cache(Caching):
    """Caches the elements of the first epoch."""

    dataset_name: ClassVar[str] = "CacheIterDataset"

    def _arguments(self) -> str:
        return f"(parent={self.parent})"

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        if after["cache_filled"]:
            return []
        return origins(self.parent, before["parent"], after["parent"])


class CacheIterDataset(PlannedIterDataset[T_co]):
    """Caches the elements of the first epoch; useful upstream of `RepeatIterDataset`.

    All elements are kept in memory, and later epochs deliver the same objects. Restoring a state in
    another iterator reads the parent again, up to the saved position.

    Args:
        parent: The dataset to read from.

    Example:
        >>> calls = []
        >>> ds = grain.MapDataset.range(3).to_iter_dataset().map(lambda x: calls.append(x) or -x)
        >>> ds = grain.experimental.CacheIterDataset(ds)
        >>> list(grain.experimental.RepeatIterDataset(ds, num_epochs=2)), calls
        ([0, -1, -2, 0, -1, -2], [0, 1, 2])
    """

    def __init__(self, parent: AnyDataset[T_co]) -> None:
        super().__init__(Cache((node_of(parent),)), (parent,))


@runs(Cache)
class CacheStage(CachingStage):
    """Reads its parent once.

    Restoring a state whose elements are not in memory reads the parent again from its start, up to
    the state's position.
    """

    def __init__(self, node: Cache, parent: Stage) -> None:
        super().__init__(node, parent)
        self._memory: list[Any] = []
        self._filled = False
        self._missing: int | None = None  # how many elements to read again after a restore
        self._last: Block | None = None  # `_position` is the one before it
        self._reported_filled = False  # `cache_filled` in states
        self._restored: Position | None = None  # of the parent, until it is pulled from

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return _PULL_SIZE if self._filled else self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        self._cursor.first_state()
        self._position, self._last = self._position_now(), None
        self._refill()
        if self._filled:
            return self._from_memory(limit)
        block = self._cursor.pull_block(limit)
        self._restored = None
        after, position = block.state_after, self._position
        self._filled = self._reported_filled = filled = not block.elements
        self._last, dropped = block, block.dropped
        state_after = functools.partial(_state_after, after, position, dropped, filled)
        if block.finish is None:
            self._memory += block.elements
            return Block(block.elements, state_after)
        finish = self._caching(block.finish)
        lazy = Block(block.elements, state_after, finish, dropped)
        lazy.finisher = block.finisher
        return lazy

    def _caching(self, finish: Finish) -> Finish:
        keep = self._memory.append

        def finish_and_cache(raw: Any, at: int) -> Any:
            element = finish(raw, at)
            if element is not SKIPPED:
                keep(element)
            return element

        return finish_and_cache

    def _position_now(self) -> int:
        return self._position if self._last is None else self._position + self._last.num_finished

    def _from_memory(self, limit: int) -> Block:
        position = self._position
        elements = self._memory[position : position + limit]
        self._position += len(elements)
        self._reported_filled = True
        return Block(
            elements, functools.partial(_state_after_cached, self._parent_point(), position)
        )

    def _parent_point(self) -> Position:
        return self._restored or self._cursor.position()

    def _refill(self) -> None:
        """Reads the elements before a restored state again."""
        while self._missing is not None and len(self._memory) < self._missing:
            elements = self._cursor.take(min(self._missing - len(self._memory), _PULL_SIZE))
            self._memory += elements
            if not elements:
                self._filled = True
                if not self._reported_filled or len(self._memory) < self._position:
                    raise self._refusal(len(self._memory))
                break
        self._missing = None

    def state(self) -> State:
        """See `Stage.state`."""
        parent = state_at(self._parent_point())
        return _state(parent, self._position_now(), filled=self._reported_filled)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._name, state, ("parent", "position", "cache_filled"))
        maximum = len(self._memory) if self._filled else sys.maxsize
        position, filled = saved.index("position", maximum), saved.flag("cache_filled")
        initial = self._cursor.first_state()
        self._cursor.restore(saved["parent"])  # raises if it is not a state of the parent
        self._restored = of_state(saved["parent"])
        self._last = None
        self._position = position
        self._reported_filled = filled or self._filled
        if self._filled:
            return
        if not filled and self._position <= len(self._memory) and not self._missing:
            del self._memory[self._position :]
        else:
            self._memory = []
            self._cursor.restore(initial)
            self._missing = _ALL if filled else self._position

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`; does nothing once all elements are in memory."""
        if not self._filled:
            super().start_prefetch()


def _state(parent: State, position: int, *, filled: bool) -> State:
    return {"parent": parent, "position": position, "cache_filled": filled}


def _state_after(
    after: StateAfter,
    position: int,
    dropped: list[int] | None,
    filled: bool,  # noqa: FBT001 - bound by position
    k: int,
) -> State:
    return _state(after(k), num_after(position, dropped, k), filled=filled)


def _state_after_cached(parent: Position, position: int, k: int) -> State:
    return _state(state_at(parent), position + k, filled=True)
