"""A user's own `DatasetIterator` as a stage."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Iterator


class ForeignStage(Stage):
    """Pulls elements one by one from `iterator`, which keeps its own state.

    Such a state can be asked for now but not later, and may be costly. So it is taken only where
    somebody still holds the block it belongs to when the iterator is about to move on.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator
        self._place: weakref.ref[_Place] | None = None
        self._failure: Exception | None = None

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`; returns single elements where states inside a block matter."""
        before = self._settle()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if interior and before is None:
            before = self._current()
        elements = []
        for _ in range(1 if interior else limit):
            try:
                elements.append(next(self._iterator))
            except StopIteration:
                break
            except Exception as failure:
                if not elements:
                    raise
                self._failure = failure
                break
        place = _Place(self._iterator)
        self._place = weakref.ref(place)
        if not interior or before is None:
            return Block(elements, lambda _: place.state())
        return Block(elements, lambda k: place.state() if k else before.state())

    def _current(self) -> _Place:
        place = _Place(self._iterator)
        place.settle()
        return place

    def _settle(self) -> _Place | None:
        """Takes the state here if somebody may still ask for it, and returns the place then."""
        place = self._place() if self._place is not None else None
        if place is not None:
            place.settle()
        return place

    def state(self) -> State:
        """See `Stage.state`."""
        return _Place(self._iterator).state()

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._settle()
        self._place = self._failure = None
        self._iterator.set_state(copy.deepcopy(state))  # type: ignore[attr-defined]

    @property
    def iterator_name(self) -> str:
        """See `Stage.iterator_name`."""
        return type(self._iterator).__name__

    def next_index(self) -> int:
        """See `Stage.next_index`; another of our iterators knows it."""
        known = getattr(self._iterator, "_get_next_index", super().next_index)
        index: int = known()
        return index

    def seek(self, index: int) -> None:
        """See `Stage.seek`; as `next_index`."""
        seek = getattr(self._iterator, "_set_next_index", super().seek)
        self._settle()
        self._place = self._failure = None
        seek(index)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        start = getattr(self._iterator, "start_prefetch", None)
        if start is not None:
            start()

    def close(self) -> None:
        """See `Stage.close`."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _Place:
    """Where a user's iterator stands, read off when asked or before it moves on."""

    __slots__ = ("__weakref__", "_failure", "_iterator", "_state")

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._state: State | None = None
        self._failure: Exception | None = None

    def settle(self) -> None:
        """Takes the state now; where that fails, whoever asks for it learns why."""
        if self._state is None and self._failure is None:
            try:
                self._state = copy.deepcopy(self._iterator.get_state())  # type: ignore[attr-defined]
            except Exception as failure:
                self._failure = failure

    def state(self) -> State:
        """The state at this place, a new dict each time."""
        self.settle()
        if self._state is None:
            raise NotImplementedError(
                f"the state of {type(self._iterator).__name__} can not be saved"
            ) from self._failure
        return copy.deepcopy(self._state)
