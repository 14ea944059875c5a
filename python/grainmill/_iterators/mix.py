"""Mixes the elements of several stages in fixed proportions."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._interrupts import raise_interrupt
from grainmill._iterators.cursor import END, Cursor, ResumePoint
from grainmill._iterators.lazy_block import PULL_SIZE, lazy_block
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State
from grainmill._native import MixSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan.sequential import Mix

_TURNS = 512

_Moved: TypeAlias = "tuple[int, ResumePoint, int, bool] | None"
"""The number of the dataset that moved, its position since, the next turn, and whether it ended."""


class MixStage(Stage):
    """Takes elements of its parents in turn; ends when the parent whose turn it is has ended.

    Consecutive turns of parents that have elements ready are returned as one block.
    """

    is_native = True
    saves = "the number of turns"

    def __init__(self, node: Mix, parents: Sequence[Stage]) -> None:
        super().__init__(*parents)
        self._schedule = MixSchedule(list(node.proportions))
        self._known: tuple[int, list[int]] = (0, [])
        self._node = node
        self._names = node.names
        self._cursors = [Cursor(parent) for parent in parents]
        self._starts: list[State | None] | None = None
        self._index = 0
        self._stop = False
        self._moved: _Moved = None

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return PULL_SIZE

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        self._remember_starts()
        names, index, stop = self._names, self._index, self._stop
        if not stop:
            self._of_turn(Cursor.fill)
        points = [cursor.resume_point() for cursor in self._cursors]
        if stop:
            return Block([], functools.partial(_state_at_end, names, points, index))
        block = self._ready_block(limit, points)
        if block is not None:
            return block
        self._moved = None
        state_of = functools.partial(_state_after_moves, names, points, index)
        is_lazy = self._cursors[self._turns(1)[0]].is_lazy
        return lazy_block(self._step, lambda: self._moved, state_of, limit if is_lazy else 1)

    def _ready_block(self, limit: int, points: list[ResumePoint]) -> Block | None:
        """The elements that are ready, up to the first turn of a parent that has none."""
        left = [cursor.num_ready for cursor in self._cursors]
        numbers = self._turns(limit)
        run = 0
        for number in numbers:
            if not left[number]:
                break
            left[number] -= 1
            run += 1
        if not run:
            return None
        numbers = numbers[:run]
        cursors = self._cursors
        takers: list[Any] = [None] * len(cursors)
        for number, count in Counter(numbers).items():
            takers[number] = iter(cursors[number].take(count)).__next__
        state_after = functools.partial(
            _state_after_turns, self._names, points, self._index, numbers
        )
        self._index += run
        return Block([takers[number]() for number in numbers], state_after)

    def _step(self) -> Any:
        element = self._of_turn(Cursor.next)
        number = self._turns(1)[0]
        self._index += 1
        self._stop = element is END
        self._moved = (number, self._cursors[number].resume_point(), self._index, self._stop)
        return element

    def _of_turn(self, act: Callable[[Cursor], Any]) -> Any:
        """Calls `act` for the dataset whose turn it is; a failure gets a note with its number."""
        number = self._turns(1)[0]
        try:
            return act(self._cursors[number])
        except Exception as failure:
            raise_interrupt(failure)
            name = f" (`{self._names[number]}`)" if self._names is not None else ""
            note = f"Exception caught while processing dataset @ input_index={number}{name}"
            if note not in getattr(failure, "__notes__", ()):
                failure.add_note(note)
            raise

    def _turns(self, count: int) -> list[int]:
        """The dataset of each of the next `count` turns, looked up for many turns at once."""
        start, known = self._known
        at = self._index - start
        if not 0 <= at <= len(known) - count:
            known = self._schedule.choose(self._index, max(count, _TURNS))[0].tolist()
            self._known, at = (self._index, known), 0
        return known[at : at + count]

    def _remember_starts(self) -> None:
        """Saves the first states of named parents: a state may lack a parent added later."""
        if self._names is not None and self._starts is None:
            self._starts = [None] * len(self._cursors)
            for number, cursor in enumerate(self._cursors):
                with contextlib.suppress(NotImplementedError):
                    self._starts[number] = cursor.state()

    def state(self) -> State:
        """See `Stage.state`."""
        points = [cursor.resume_point() for cursor in self._cursors]
        return _state(self._names, points, self._index, stop=self._stop)

    def restore(self, state: State) -> None:
        """See `Stage.restore`; unknown names are ignored, new ones start at the beginning."""
        saved = Saved(self._node, state, ("parents", "index", "stop"))
        index, stop = saved.index("index"), saved.flag("stop")
        self._remember_starts()
        for cursor, parent_state in zip(self._cursors, self._parent_states(saved), strict=True):
            cursor.restore(parent_state)
        self._index = index
        self._stop = stop

    def _parent_states(self, saved: Saved) -> Sequence[State]:
        if self._names is None:
            return saved.list_of("parents", len(self._cursors), "the datasets that are mixed")
        parents = saved["parents"]
        if not isinstance(parents, dict):
            expected = f"must be a dict with the names of the datasets {list(self._names)}"
            raise saved.refusal("`parents`", expected, parents)
        starts: list[Any] = self._starts or []
        return [parents.get(name, start) for name, start in zip(self._names, starts, strict=True)]


def _state(
    names: tuple[str, ...] | None, points: list[ResumePoint], index: int, *, stop: bool
) -> State:
    states = [after(position) for after, position in points]
    parents = states if names is None else dict(zip(names, states, strict=True))
    return {"parents": parents, "index": index, "stop": stop}


def _state_at_end(
    names: tuple[str, ...] | None, points: list[ResumePoint], index: int, _: int
) -> State:
    return _state(names, points, index, stop=True)


def _state_after_moves(
    names: tuple[str, ...] | None, points: list[ResumePoint], index: int, moves: list[_Moved]
) -> State:
    points, turn, ended = points.copy(), index, False
    for moved in moves:
        if moved is not None:
            number, point, turn, ended = moved
            points[number] = point
    return _state(names, points, turn, stop=ended)


def _state_after_turns(
    names: tuple[str, ...] | None, points: list[ResumePoint], index: int, numbers: list[int], k: int
) -> State:
    taken = Counter(numbers[:k])
    reached = [(after, position + taken[n]) for n, (after, position) in enumerate(points)]
    return _state(names, reached, index + k, stop=False)
