"""What every sequential stage offers: elements by blocks, and the state at each of them."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

State: TypeAlias = dict[str, Any]


class Block:
    """Consecutive elements, and what must be saved to continue after any of them.

    Attributes:
        elements: The elements, in order; empty at the end of the data.
        state_after: Maps `k`, from 0 to `len(elements)`, to the state of the stage once
            the first `k` elements are delivered. It may be called at any later time and
            gives a new dict each time.
    """

    __slots__ = ("elements", "state_after")

    def __init__(self, elements: list[Any], state_after: Callable[[int], State]) -> None:
        self.elements = elements
        self.state_after = state_after


class Stage(abc.ABC):
    """One sequential step of a running pipeline.

    A user's exception leaves through `pull` with the stage as it was before the element that
    caused it, so that elements made before are delivered first and a further `pull` meets the
    same element again. Nothing is lost and the end is not pretended.

    Attributes:
        parents: The stages it pulls from.
    """

    def __init__(self, *parents: Stage) -> None:
        self.parents = parents

    @property
    def burst(self) -> int:
        """Elements to pull where one is wanted: above 1 only if they are made ahead anyway."""
        return 1

    @abc.abstractmethod
    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """Returns the next elements.

        Args:
            limit: The most elements to return, at least 1.
            interior: Whether `state_after` may be asked for any place of the block; if not,
                only the one after its last element is.

        Returns:
            A block of 1 to `limit` elements, or an empty one at the end, then and ever
            after until `restore`.
        """

    @abc.abstractmethod
    def state(self) -> State:
        """The state after all elements pulled so far, a new dict each time."""

    @abc.abstractmethod
    def restore(self, state: State) -> None:
        """Continues where `state` was taken; `state` is left as it is."""

    def next_index(self) -> int:
        """The index of the next element, where elements have one."""
        raise NotImplementedError(f"get_next_index is not supported for {self.iterator_name}.")

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        raise NotImplementedError(f"set_next_index is not supported for {self.iterator_name}.")

    @property
    def iterator_name(self) -> str:
        """What the stage is called in messages."""
        return type(self).__name__.replace("Stage", "DatasetIterator")

    def start_prefetch(self) -> None:
        """Starts what can be made ahead, up to the nearest stage that does so."""
        for parent in self.parents:
            parent.start_prefetch()

    def close(self) -> None:
        """Gives back threads and files; safe to call again."""
        for parent in self.parents:
            parent.close()


class Cursor:
    """A place among the elements of `stage`: pulled blocks are handed on piece by piece.

    It lets a stage look at elements one by one, or keep some for later, and still know the
    parent's exact state at each.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._block: Block | None = None
        self._position = 0

    def peek(self, want: int = 1) -> list[Any]:
        """Returns elements not yet taken; pulls up to `want` if there are none; `[]` at the end."""
        if self._block is None or self._position >= len(self._block.elements):
            self._block = self.stage.pull(want)
            self._position = 0
        return self._block.elements[self._position :] if self._position else self._block.elements

    def advance(self, count: int) -> None:
        """Takes `count` of the elements that `peek` returned."""
        self._position += count

    def state(self) -> State:
        """The parent's state after the elements taken."""
        if self._block is None:
            return self.stage.state()
        return self._block.state_after(self._position)

    def mark(self) -> Callable[[int], State]:
        """A function that stays valid when the cursor moves on: the state some elements ahead.

        It takes how many, up to the number that `peek` returned.
        """
        if self._block is None:
            state = self.stage.state()
            return lambda _: state
        block, position = self._block, self._position
        return lambda ahead: block.state_after(position + ahead)

    def restore(self, state: State) -> None:
        """Continues where `state`, a state of the parent, was taken."""
        self._block = None
        self.stage.restore(state)

    def settle(self) -> None:
        """Moves the parent back to the cursor where it was pulled further."""
        block = self._block
        if block is not None:
            self._block = None
            if self._position < len(block.elements):
                self.stage.restore(block.state_after(self._position))

    def drop(self) -> None:
        """Forgets the pulled block, as after the parent was moved by other means."""
        self._block = None
