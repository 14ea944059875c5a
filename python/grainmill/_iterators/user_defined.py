"""A user's own `DatasetIterator` as a stage."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from grainmill._iterators.cursor import END, copied
from grainmill._iterators.stage import Block, Stage, State
from grainmill._threads import not_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator


class UserDefinedStage(Stage):
    """Pulls elements one by one from `iterator`, which keeps its own state.

    Such a state can be asked for now but not later, and may be costly. So it is taken only where
    somebody still holds the block it belongs to when the iterator is about to move on.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator
        self._closed = False
        self._place: weakref.ref[_Place] | None = None

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; returns single elements."""
        if self._place is None:  # whoever stands here may have said so before
            before: State | Exception | None = _Place(self._iterator, None).settled()
        else:
            held = self._place()
            before = None if held is None else held.settled()
        self._place = None
        element = next(self._iterator, END)
        place = _Place(self._iterator, before)
        self._place = weakref.ref(place)
        if element is END:
            return Block([], lambda _: place(1))
        return Block([element], place)

    def state(self) -> State:
        """See `Stage.state`."""
        return _Place(self._iterator, None)(1)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._leave()
        self._iterator.set_state(copied(state))  # type: ignore[attr-defined]

    def _leave(self) -> None:
        """Takes the state here if somebody may still ask for it."""
        held = self._place() if self._place is not None else None
        if held is not None:
            held.settled()
        self._place = None

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
        self._leave()
        seek(index)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        start = getattr(self._iterator, "start_prefetch", None)
        if start is not None:
            start()

    def cancel(self) -> None:
        """See `Stage.cancel`; what a user's iterator waits for may end when that is closed."""
        cancel = getattr(self._iterator, "_cancel_waiting", self.close)
        with contextlib.suppress(Exception), not_waiting():  # it may be closed later
            cancel()

    def close(self) -> None:
        """See `Stage.close`."""
        close = getattr(self._iterator, "close", None)
        if close is not None and not self._closed:
            close()
            self._closed = True


class _Place:
    """Where a user's iterator stands after an element, read off when asked or before it moves on.

    It is the `state_after` of the element's block.
    """

    __slots__ = ("__weakref__", "_before", "_iterator", "_state")

    def __init__(self, iterator: Iterator[Any], before: State | Exception | None) -> None:
        self._iterator = iterator
        self._before = before
        self._state: State | Exception | None = None

    def settled(self) -> State | Exception:
        """Takes the state now; where that fails, whoever asks for it learns why."""
        if self._state is None:
            try:
                self._state = copied(self._iterator.get_state())  # type: ignore[attr-defined]
            except Exception as failure:
                self._state = failure
        return self._state

    def __call__(self, count: int) -> State:
        state = self.settled() if count else self._before
        if state is None or isinstance(state, Exception):
            raise NotImplementedError(
                f"the state of {type(self._iterator).__name__} cannot be saved"
            ) from state
        copy: State = copied(state)
        return copy
