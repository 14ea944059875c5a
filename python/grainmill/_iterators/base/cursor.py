"""A position among the elements of a stage; stages take their parents' elements through it only."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from grainmill._evaluate.evaluated import SKIPPED
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.position import constant_state, no_state, state_at
from grainmill._iterators.base.stage import NO_BLOCK, Block, Stage

if TYPE_CHECKING:
    from grainmill._iterators.base.position import Position
    from grainmill._iterators.base.stage import State, StateAfter
    from grainmill._plan.node import Node

END: Final = object()
"""What `Cursor.next` returns after the last element."""


class _StartState:
    """The state of a stage before the first pull, read only when requested.

    If it is referenced when the stage is about to move, it is saved before that: an interrupt, or
    another thread, may request it before the first block is there.
    """

    __slots__ = ("__weakref__", "_failure", "_stage", "_state_after")

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._state_after: StateAfter | None = None
        self._failure: Exception | None = None

    def __call__(self, _: int = 0) -> State:
        if not self.is_known:
            try:
                state = self._stage.state()
            except Exception as failure:
                raise_interrupt(failure)
                if not self.is_known:
                    raise
            else:
                if not self.is_known:  # else another thread may have pulled meanwhile
                    return state
        if self._failure is not None:
            raise NotImplementedError("the state at the start is unavailable") from self._failure
        return {} if self._state_after is None else self._state_after(0)

    @property
    def is_known(self) -> bool:
        """Whether the state no longer depends on the stage's position."""
        return self._state_after is not None or self._failure is not None

    def learn(self, state_after: StateAfter) -> None:
        """Takes the state from the first block's `state_after`."""
        if self._state_after is None:
            self._state_after = state_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the state itself, or as the error that reading it raises."""
        try:
            return constant_state, (self(),)
        except Exception as failure:
            return no_state, (str(failure),)

    def save(self) -> None:
        """Reads the state now, before the stage moves; a failure is raised on request."""
        if self._state_after is None and self._failure is None:
            try:
                self._state_after = constant_state(self._stage.state())
            except Exception as failure:
                raise_interrupt(failure)
                self._failure = failure


class Cursor:
    """A position among the elements of `stage`; finishes the elements of its lazy blocks.

    Attributes:
        stage: The stage that elements are taken from.
    """

    __slots__ = (
        "_block",
        "_first_state",
        "_num_taken",
        "_offset",
        "_offsets",
        "_peeked",
        "_start",
        "stage",
    )

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._first_state: State | None = None
        self._reset()

    def _reset(self, state_after: StateAfter | None = None) -> None:
        self._start: _StartState | None = None
        if state_after is None:
            state_after = self._start = _StartState(self.stage)
        self._block = Block([], state_after)
        self._offset = 0  # how many raw elements of the block were finished
        self._peeked: list[Any] | None = None  # elements that `peek` finished
        self._num_taken = 0  # how many of these were taken
        self._offsets: list[int] = []  # the offset in the block after each of these

    def next(self) -> Any:
        """Takes the next element, or returns `END`."""
        while True:
            block, at = self._block, self._offset
            elements = block.elements
            peeked = self._peeked
            if peeked is not None:
                if self._num_taken < len(peeked):
                    self._num_taken += 1
                    return peeked[self._num_taken - 1]
                self._peeked = None
            if at < len(elements):
                finish = block.finish
                if finish is None:
                    self._offset = at + 1
                    return elements[at]
                try:
                    element = finish(elements[at], at)
                except Exception as failure:
                    block.note(failure, at)
                    raise
                self._offset = at + 1
                if element is not SKIPPED:
                    return element
            elif not self._pull(self.stage.pull_size):
                return END

    def _pull(self, limit: int) -> bool:
        """Moves to the next block; `False` at the end."""
        start = self._start
        self._block = NO_BLOCK  # else a user's iterator would have to save the state before it
        if start is not None and self.stage.moves_start:
            held = weakref.ref(start)
            self._start = start = None
            start = held()
            if start is not None:
                start.save()
        try:
            block = self.stage.pull(limit)
        except BaseException:
            if start is None:
                self._reset()
            else:
                self._block = Block([], start)
            raise
        if start is not None:
            start.learn(block.state_after)
            self._start = None
        self._block, self._offset = block, 0
        return bool(block.elements)

    @property
    def num_ready(self) -> int:
        """How many elements `take` can return without pulling or running user code."""
        num_peeked = 0 if self._peeked is None else len(self._peeked) - self._num_taken
        block = self._block
        if num_peeked or block.finish is not None:
            return num_peeked
        return max(0, len(block.elements) - self._offset)

    def fill(self) -> None:
        """Pulls the next block if no elements are left, as `next` would."""
        if self._peeked is not None and self._num_taken >= len(self._peeked):
            self._peeked = None
        if self._peeked is None and self._offset >= len(self._block.elements):
            self._pull(self.stage.pull_size)

    @property
    def is_lazy(self) -> bool:
        """Whether the current block is lazy."""
        return self._block.finish is not None

    def pull_block(self, limit: int) -> Block:
        """Takes the next block as the stage returns it; the caller finishes its elements."""
        self._peeked = None
        self._pull(limit)
        self._offset = len(self._block.elements)
        return self._block

    def take(self, count: int) -> list[Any]:
        """Takes 1 to `count` elements, none at the end; pulls at most `count`."""
        elements = self.peek(count)[:count]
        self.advance(len(elements))
        return elements

    def peek(self, count: int) -> list[Any]:
        """Returns the next elements, to be taken by `advance`; none at the end.

        Elements of an earlier `peek` that are not yet taken are returned as they are; otherwise
        at most `count` are pulled.
        """
        peeked = self._peeked
        if peeked is not None:
            if self._num_taken < len(peeked):
                return peeked[self._num_taken :] if self._num_taken else peeked
            self._peeked = None
        while True:
            block, at = self._block, self._offset
            left = len(block.elements) - at
            if left <= 0:
                if not self._pull(count):
                    return []
                continue
            if block.finish is None and not at and left <= count:
                elements = block.elements
                self._set_peeked(elements, range(1, left + 1))
                self._offset = left
                return elements
            num_dropped = len(block.dropped) if block.dropped is not None else 0
            finished, failure = block.finished(at, count)
            dropped = block.dropped[num_dropped:] if block.dropped is not None else []
            self._offset = stop = at + len(finished) + len(dropped)
            if finished:
                if dropped:
                    skipped = set(dropped)
                    self._set_peeked(finished, [k + 1 for k in range(at, stop) if k not in skipped])
                else:
                    self._set_peeked(finished, range(at + 1, stop + 1))
                return finished
            if failure is not None:
                block.note(failure, stop)
                raise failure

    def take_rows(self, count: int) -> tuple[dict[str, Any], list[int]] | None:
        """Takes 1 to `count` elements as row numbers of columns; `None` if the block has none."""
        block, at = self._block, self._offset
        if at >= len(block.elements):
            if self._peeked is not None and self._num_taken < len(self._peeked):
                return None
            self._peeked = None
            self._pull(count)
            block, at = self._block, 0
        if block.columns is None or not block.elements:
            return None
        rows = block.elements[at : at + count]
        self._offset = at + len(rows)
        return block.columns, rows

    def release_taken(self) -> None:
        """Drops the reference to the current block once all its elements were taken."""
        all_taken = self._peeked is None or self._num_taken == len(self._peeked)
        if all_taken and 0 < len(self._block.elements) <= self._offset:
            state_after, self._offset = self.position()
            self._block, self._peeked = Block([], state_after), None

    def resync(self) -> None:
        """Moves to the stage's position, after elements were pulled without this cursor."""
        if self._start is None or self._start.is_known or self._peeked is not None:
            self._reset()

    def _set_peeked(self, elements: list[Any], offsets: Any) -> None:
        self._peeked, self._num_taken, self._offsets = elements, 0, offsets

    def advance(self, count: int) -> None:
        """Takes `count` of the elements that `peek` returned."""
        self._num_taken += count

    def position_after_first(self) -> Position:
        """The position after the first of the elements that `peek` returned."""
        return self._block.state_after, self._offsets[self._num_taken]

    def position(self) -> Position:
        """The position after the elements taken; its state can be computed at any later time."""
        if self._peeked is None:
            return self._block.state_after, self._offset
        if self._num_taken:
            return self._block.state_after, self._offsets[self._num_taken - 1]
        return self._block.state_after, self._offsets[0] - 1

    def state(self) -> State:
        """The stage's state after the elements taken."""
        return state_at(self.position())

    def first_state(self) -> State:
        """The stage's state at its start; the first call must come before the stage moves."""
        if self._first_state is None:
            self._first_state = self.stage.state()
        return self._first_state

    def restore(self, state: State) -> None:
        """Continues where `state`, a state of the stage, was taken."""
        self.save_start()
        self.stage.restore(state)
        self._reset(constant_state(state))

    def save_start(self) -> None:
        """Reads the state at the start before the stage moves, if the cursor is there."""
        if self._start is not None:
            self._start.save()

    def rewind_stage(self) -> None:
        """Moves the stage back to the cursor's position, if it is past that."""
        has_peeked = self._peeked is not None and self._num_taken < len(self._peeked)
        if has_peeked or self._offset < len(self._block.elements):
            self.restore(self.state())

    def next_index(self) -> int:
        """The index of the next element, where elements have one."""
        self.rewind_stage()
        return self.stage.next_index()

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        self.save_start()
        self.stage.seek(index)
        self._reset()


class CursorStage(Stage):
    """A stage that takes the elements of one parent."""

    def __init__(self, node: Node, parent: Stage) -> None:
        super().__init__(parent)
        self._node: Any = node
        self._cursor = Cursor(parent)
