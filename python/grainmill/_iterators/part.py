"""Places in a stage, and parts: stages whose elements are handed on piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from grainmill._iterators.stage import Stage, State

After: TypeAlias = Callable[[int], State]
Place: TypeAlias = tuple[After, int]
"""A block's `state_after` and the number of its elements that were taken."""


def fixed(state: Any) -> After:
    """A function that gives copies of `state`, which may change afterwards."""
    kept = copy.deepcopy(state)
    return lambda _: copy.deepcopy(kept)


class Start:
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

    def settle(self, after: After) -> None:
        """Takes the state from the first block, which is given by its `state_after`."""
        if self._after is None:
            self._after = after

    def freeze(self) -> None:
        """Takes the state now, before the stage is moved; a failure waits for who asks."""
        if self._after is None and self._failure is None:
            try:
                self._after = fixed(self._stage.state())
            except Exception as failure:
                self._failure = failure


class Part:
    """One of several stages that take turns.

    What a part's stage raises, or its end, is met when the part has its turn, even where its
    elements were asked for earlier.

    Attributes:
        stage: Where elements come from.
        place: The place after the elements taken.
    """

    __slots__ = ("_elements", "_end", "_failure", "_position", "_start", "place", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._begin()

    def _begin(self) -> None:
        self._elements: list[Any] = []
        self._position = 0
        self._failure: Exception | None = None
        self._end: After | None = None
        self._start = Start(self.stage)
        self.place: Place = (self._start, 0)

    @property
    def at_hand(self) -> int:
        """Elements pulled and not taken."""
        return len(self._elements) - self._position

    def ready(self, want: int) -> int:
        """Returns `at_hand`, after pulling up to `want` elements if there were none."""
        count = len(self._elements) - self._position
        if count or self._end is not None or self._failure is not None:
            return count
        try:
            block = self.stage.pull(max(want, self.stage.burst))
        except Exception as failure:
            self._failure = failure
            return 0
        self._start.settle(block.state_after)
        self._elements, self._position = block.elements, 0
        if block.elements:
            self.place = (block.state_after, 0)
        else:
            self._end = block.state_after
        return len(block.elements)

    def take(self, count: int) -> list[Any]:
        """Returns the next `count` elements of those at hand."""
        start, stop = self._position, self._position + count
        self._position = stop
        self.place = (self.place[0], stop)
        return self._elements[start:stop]

    def finish(self) -> None:
        """Has its turn with nothing at hand: raises what the stage raised, or is at its end."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._end is not None:
            self.place = (self._end, 0)

    def state(self) -> State:
        """The stage's state after the elements taken."""
        after, position = self.place
        return after(position)

    def restore(self, state: State) -> None:
        """Continues where `state`, a state of the stage, was taken."""
        self._start.freeze()
        self.stage.restore(state)
        self._begin()
        self.place = (fixed(state), 0)

    def rewind(self) -> None:
        """Gives back the elements at hand, so that the stage stands where the part does."""
        if self.at_hand:
            self.restore(self.state())

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        self._start.freeze()
        self.stage.seek(index)
        self._begin()
