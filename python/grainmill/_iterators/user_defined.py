"""A user's own `DatasetIterator` as a stage."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._iterators.cursor import END, constant_state_at, copied
from grainmill._iterators.stage import Block, Stage, State
from grainmill._plan.notes import add_note, located
from grainmill._threads import not_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._plan.node import Node


class UserDefinedStage(Stage):
    """Pulls elements one by one from `iterator`, which keeps its own state.

    Such a state can be asked for now but not later, and may be costly. So it is taken only where
    somebody still holds the block it belongs to when the iterator is about to move on.
    """

    def __init__(self, iterator: Iterator[Any], node: Node | None = None) -> None:
        super().__init__()
        self._iterator = iterator
        self._node = node
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
        try:
            element = next(self._iterator, END)
        except Exception as failure:
            if self._node is not None and _is_users(self._node):
                add_note(failure, [f"while computing an element of {located(self._node)}"])
            raise
        place = _Place(self._iterator, before)
        self._place = weakref.ref(place)
        if element is END:
            return Block([], constant_state_at((place, 1)))
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


def _is_users(node: Node) -> bool:
    package, _, _ = __name__.partition(".")
    return not type(getattr(node, "dataset", None)).__module__.startswith(f"{package}.")


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Crosses to another process as the two states it tells of."""
        told = _told(self._before), _told(self.settled())
        return functools.partial, (_state_of, type(self._iterator).__name__, *told)

    def __call__(self, count: int) -> State:
        state = self.settled() if count else self._before
        if state is None or isinstance(state, Exception):
            raise NotImplementedError(
                f"the state of {type(self._iterator).__name__} cannot be saved"
            ) from state
        copy: State = copied(state)
        return copy


# A state, or why it cannot be had.
_Told: TypeAlias = "tuple[State | None, str]"


def _told(state: State | Exception | None) -> _Told:
    if isinstance(state, Exception):
        return None, f" ({type(state).__name__}: {state})"
    return state, ""


def _state_of(name: str, before: _Told, after: _Told, count: int) -> State:
    """What a `_Place` of another process tells."""
    state, reason = after if count else before
    if state is None:
        raise NotImplementedError(f"the state of {name} cannot be saved{reason}")
    copy: State = copied(state)
    return copy
