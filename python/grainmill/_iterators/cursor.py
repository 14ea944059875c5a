"""A place among the elements of a stage, the one way in which stages take them."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from grainmill._evaluate.fuse import SKIPPED
from grainmill._iterators.stage import After, Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable

ResumePoint: TypeAlias = tuple[After, int]
"""A block's `state_after` and the number of its elements that were taken."""

END: Final = object()
"""What `Cursor.next` returns after the last element."""

_PLAIN: Final = (int, str, float, bool, type(None))


def copied(state: Any) -> Any:
    """A copy of a state that shares nothing with it."""
    kind = type(state)
    if kind is dict:
        return {key: part if type(part) in _PLAIN else copied(part) for key, part in state.items()}
    if kind is list:
        return [part if type(part) in _PLAIN else copied(part) for part in state]
    return state if kind in _PLAIN else copy.deepcopy(state)


def fixed(state: Any) -> After:
    """A function that gives copies of `state`, which may change afterwards."""
    return functools.partial(_copy_of, copied(state))


def _copy_of(state: Any, _: int) -> Any:
    return copied(state)


def stays(place: ResumePoint) -> After:
    """The `state_after` of a block without elements that ends at `place`."""
    return functools.partial(_state_of, place)


def _state_of(place: ResumePoint, _: int) -> State:
    after, position = place
    return after(position)


def _refuse(text: str, _: int) -> State:
    raise NotImplementedError(text)


class _Start:
    """Where a stage stands that was not pulled from yet: its state, read off only if asked for."""

    __slots__ = ("_after", "_failure", "_stage")

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._after: After | None = None
        self._failure: Exception | None = None

    def __call__(self, _: int = 0) -> State:
        if self._failure is not None:
            raise NotImplementedError("the state at the start was not to be had") from self._failure
        return self._stage.state() if self._after is None else self._after(0)

    @property
    def is_settled(self) -> bool:
        """Whether the state is known, however the stage moves."""
        return self._after is not None or self._failure is not None

    def settle(self, after: After) -> None:
        """Takes the state from the first block, which is given by its `state_after`."""
        if self._after is None:
            self._after = after

    def __reduce__(self) -> tuple[Any, ...]:
        """Crosses to another process as the state itself, or as the refusal to tell it."""
        try:
            return fixed, (self(),)
        except Exception as failure:
            return functools.partial, (_refuse, str(failure))

    def freeze(self) -> None:
        """Takes the state now, before the stage is moved; a failure waits for who asks."""
        if self._after is None and self._failure is None:
            try:
                self._after = fixed(self._stage.state())
            except Exception as failure:
                self._failure = failure


def _nowhere(_: int) -> State:
    raise AssertionError("a block is being pulled")


_NO_BLOCK: Final = Block([], _nowhere)


class Cursor:
    """A place among the elements of `stage`, which are finished and handed on from here.

    Attributes:
        stage: Where elements come from.
    """

    __slots__ = ("_after", "_at", "_block", "_held", "_next", "_start", "_taken", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._begin()

    def _begin(self, after: After | None = None) -> None:
        self._start: _Start | None = None
        if after is None:
            after = self._start = _Start(self.stage)
        self._block = Block([], after)
        self._at = 0  # raw elements of the block that were finished
        self._held: list[Any] | None = None  # finished by `peek`, from `_taken` on not yet taken
        self._taken = 0
        self._after: list[int] = []  # for each of those, the raw elements up to it and with it

    def next(self) -> Any:
        """Takes the next element, or returns `END`."""
        while True:
            block, at = self._block, self._at
            elements = block.elements
            held = self._held
            if held is not None:
                if self._taken < len(held):
                    self._taken += 1
                    return held[self._taken - 1]
                self._held = None
            if at < len(elements):
                finish = block.finish
                if finish is None:
                    self._at = at + 1
                    return elements[at]
                try:
                    element = finish(elements[at], at)
                except Exception as failure:
                    block.note(failure, at)
                    raise
                self._at = at + 1
                if element is not SKIPPED:
                    return element
            elif not self._pull(self.stage.pull_size):
                return END

    def _pull(self, limit: int) -> bool:
        """Goes on to the next block; `False` at the end."""
        start = self._start
        self._block = _NO_BLOCK  # or a user's iterator would have to keep the state there
        try:
            block = self.stage.pull(limit)
        except BaseException:
            if start is None:
                self._begin()
            else:
                self._block = Block([], start)
            raise
        if start is not None:
            start.settle(block.state_after)
            self._start = None
        self._block, self._at = block, 0
        return bool(block.elements)

    @property
    def at_hand(self) -> int:
        """Elements that `take` gives without a call of anything."""
        held = 0 if self._held is None else len(self._held) - self._taken
        block = self._block
        if held or block.finish is not None:
            return held
        return max(0, len(block.elements) - self._at)

    def fill(self) -> None:
        """Has the stage give elements if there are none left, as `next` would."""
        if self._held is not None and self._taken >= len(self._held):
            self._held = None
        if self._held is None and self._at >= len(self._block.elements):
            self._pull(self.stage.pull_size)

    @property
    def is_lazy(self) -> bool:
        """Whether elements were lately finished one by one."""
        return self._block.finish is not None

    def block(self, limit: int) -> Block:
        """Takes the next block as the stage gives it; who takes it finishes its elements."""
        self._held = None
        self._pull(limit)
        self._at = len(self._block.elements)
        return self._block

    def take(self, count: int) -> list[Any]:
        """Takes 1 to `count` elements, none at the end; pulls no more than these."""
        elements = self.peek(count)[:count]
        self.advance(len(elements))
        return elements

    def peek(self, count: int) -> list[Any]:
        """Returns elements not yet taken, at the start or if there are none `count` at most.

        They stay there until `advance`. There are none at the end.
        """
        held = self._held
        if held is not None:
            if self._taken < len(held):
                return held[self._taken :] if self._taken else held
            self._held = None
        while True:
            block, at = self._block, self._at
            left = len(block.elements) - at
            if left <= 0:
                if not self._pull(count):
                    return []
                continue
            if block.finish is None and not at and left <= count:
                elements = block.elements
                self._hold(elements, range(1, left + 1))
                self._at = left
                return elements
            num_dropped = len(block.dropped) if block.dropped is not None else 0
            made, failure = block.finished(at, count)
            dropped = block.dropped[num_dropped:] if block.dropped is not None else []
            self._at = stop = at + len(made) + len(dropped)
            if made:
                if dropped:
                    gone = set(dropped)
                    self._hold(made, [k + 1 for k in range(at, stop) if k not in gone])
                else:
                    self._hold(made, range(at + 1, stop + 1))
                return made
            if failure is not None:
                block.note(failure, stop)
                raise failure

    def take_rows(self, count: int) -> tuple[dict[str, Any], list[int]] | None:
        """Takes 1 to `count` elements as rows of columns, where that is what the stage gives."""
        block, at = self._block, self._at
        if at >= len(block.elements):
            if self._held is not None and self._taken < len(self._held):
                return None
            self._held = None
            self._pull(count)
            block, at = self._block, 0
        if block.columns is None or not block.elements:
            return None
        rows = block.elements[at : at + count]
        self._at = at + len(rows)
        return block.columns, rows

    def forget(self) -> None:
        """Lets go of elements that were taken, where that loses nothing."""
        all_taken = self._held is None or self._taken == len(self._held)
        if all_taken and 0 < len(self._block.elements) <= self._at:
            after, position = self.place()
            self._held, self._at = None, position
            self._block = Block([], after)

    def look(self) -> None:
        """Stands where the stage was moved by other means."""
        if self._start is None or self._start.is_settled or self._held is not None:
            self._begin()

    def _hold(self, elements: list[Any], after: Any) -> None:
        self._held, self._taken, self._after = elements, 0, after

    def advance(self, count: int) -> None:
        """Takes `count` of the elements that `peek` returned."""
        self._taken += count

    def after_first(self) -> State:
        """The stage's state after the first of the elements that `peek` returned."""
        return self._block.state_after(self._after[self._taken])

    def place(self) -> ResumePoint:
        """The place after the elements taken, whose state can be had at any time."""
        if self._held is None:
            return self._block.state_after, self._at
        if self._taken:
            return self._block.state_after, self._after[self._taken - 1]
        return self._block.state_after, self._after[0] - 1

    def mark(self) -> Callable[[], State]:
        """A function that gives the state after the elements taken, at any time."""
        after, position = self.place()
        return functools.partial(after, position)

    def state(self) -> State:
        """The stage's state after the elements taken."""
        after, position = self.place()
        return after(position)

    def restore(self, state: State) -> None:
        """Continues where `state`, a state of the stage, was taken."""
        self.freeze()
        self.stage.restore(state)
        self._begin(fixed(state))

    def freeze(self) -> None:
        """Takes the state at the start, if that is where the cursor stands, before it is moved."""
        if self._start is not None:
            self._start.freeze()

    def settle(self) -> None:
        """Moves the stage back to the cursor where it was pulled further."""
        ahead = self._held is not None and self._taken < len(self._held)
        if ahead or self._at < len(self._block.elements):
            self.restore(self.state())

    def next_index(self) -> int:
        """The index of the next element, where elements have one."""
        self.settle()
        return self.stage.next_index()

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        self.freeze()
        self.stage.seek(index)
        self._begin()
