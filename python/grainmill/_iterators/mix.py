"""Mixes the elements of several stages in fixed proportions."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from grainmill._interrupts import raise_interrupt, suppressed
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.base.lazy_block import PULL_SIZE, lazy_block
from grainmill._iterators.base.node import Origin, SequentialNode, origins, runs, starts
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._native import MixSchedule
from grainmill._plan.random_access import check_weights, integer_proportions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan.node import Node


_TURNS = 512

_Moved: TypeAlias = "tuple[int, Position, int, bool] | None"
"""The number of the dataset that moved, its position since, the next turn, and whether it ended."""


@lazy_dataclass
class Mix(SequentialNode):
    """Elements of several iterators in fixed proportions, until one is exhausted.

    `names` are the keys if the parents were given as a mapping, else `None`.
    """

    proportions: tuple[int, ...]
    names: tuple[str, ...] | None
    dataset_name: ClassVar[str] = "MixedIterDataset"
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the number of turns"
    is_native: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        parents: Sequence[Node] | Mapping[str, Node],
        weights: Sequence[float] | Mapping[str, float] | None,
    ) -> Self:
        """A node that mixes `parents` by `weights`; named datasets are ordered by name."""
        names = None
        if isinstance(parents, Mapping):
            names = tuple(sorted(parents))
            if weights is not None:
                if not isinstance(weights, Mapping) or set(weights) != set(names):
                    raise ValueError(
                        "`weights` must be a mapping with the same keys as the datasets: "
                        f"{list(names)}, got {weights}."
                    )
                weights = [weights[name] for name in names]
            parents = [parents[name] for name in names]
        elif isinstance(weights, Mapping):
            raise ValueError(
                "`weights` must be a sequence, as the datasets are a sequence, got a mapping with "
                f"keys {list(weights)}"
            )
        chosen = tuple(weights) if weights is not None else (1.0,) * len(parents)
        check_weights(parents, chosen)
        return cls(tuple(parents), integer_proportions(chosen), names)

    def _arguments(self) -> str:
        return f"([{len(self.parents)} parents], proportions={list(self.proportions)})"

    def described(self, max_listed: int) -> dict[str, Any]:
        """See `Node.described`; of many, too, some may be added and removed by name."""
        names = self.names
        if names is None or len(names) <= max_listed:
            return {}
        return {"weights": dict(zip(names, self.proportions, strict=True))}

    def _keys(self) -> Sequence[Any]:
        """The keys of the parents' states."""
        return self.names or range(len(self.parents))

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        parents = zip(self.parents, self._keys(), strict=True)
        return [one for parent, key in parents for one in starts(parent, state["parents"][key])]

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        number = int(MixSchedule(list(self.proportions)).choose(after["index"] - 1, 1)[0][0])
        key = self._keys()[number]
        return origins(self.parents[number], before["parents"][key], after["parents"][key])


@runs(Mix)
class MixStage(Stage):
    """Takes elements of its parents in turn; ends when the parent whose turn it is has ended.

    Consecutive turns of parents that have elements ready are returned as one block.
    """

    pull_size = PULL_SIZE

    def __init__(self, node: Mix, *parents: Stage) -> None:
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

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        self._remember_starts()
        names, index, stop = self._names, self._index, self._stop
        if not stop:
            self._of_turn(Cursor.fill)
        points = [cursor.position() for cursor in self._cursors]
        if stop:
            return Block([], functools.partial(_state_at_end, names, points, index))
        block = self._ready_block(limit, points)
        if block is not None:
            return block
        self._moved = None
        state_of = functools.partial(_state_after_moves, names, points, index)
        is_lazy = self._cursors[self._turns(1)[0]].is_lazy
        return lazy_block(self._step, lambda: self._moved, state_of, limit if is_lazy else 1)

    def _ready_block(self, limit: int, points: list[Position]) -> Block | None:
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
        self._moved = (number, self._cursors[number].position(), self._index, self._stop)
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
                with suppressed(NotImplementedError):
                    self._starts[number] = cursor.state()

    def state(self) -> State:
        """See `Stage.state`."""
        points = [cursor.position() for cursor in self._cursors]
        return _state(self._names, points, self._index, stop=self._stop)

    def restore(self, state: State) -> None:
        """See `Stage.restore`; unknown names are ignored, new ones start at the beginning."""
        saved = CheckedState(self._node, state, ("parents", "index", "stop"))
        index, stop = saved.index("index"), saved.flag("stop")
        self._remember_starts()
        for cursor, parent_state in zip(self._cursors, self._parent_states(saved), strict=True):
            cursor.restore(parent_state)
        self._index = index
        self._stop = stop

    def _parent_states(self, saved: CheckedState) -> Sequence[State]:
        if self._names is None:
            return saved.list_of("parents", len(self._cursors), "the datasets that are mixed")
        parents = saved["parents"]
        if not isinstance(parents, dict):
            expected = f"must be a dict with the names of the datasets {list(self._names)}"
            raise saved.refusal("`parents`", expected, parents)
        starts: list[Any] = self._starts or []
        return [parents.get(name, start) for name, start in zip(self._names, starts, strict=True)]


def _state(
    names: tuple[str, ...] | None, points: list[Position], index: int, *, stop: bool
) -> State:
    states = [state_at(point) for point in points]
    parents = states if names is None else dict(zip(names, states, strict=True))
    return {"parents": parents, "index": index, "stop": stop}


def _state_at_end(
    names: tuple[str, ...] | None, points: list[Position], index: int, _: int
) -> State:
    return _state(names, points, index, stop=True)


def _state_after_moves(
    names: tuple[str, ...] | None, points: list[Position], index: int, moves: list[_Moved]
) -> State:
    points, turn, ended = points.copy(), index, False
    for moved in moves:
        if moved is not None:
            number, point, turn, ended = moved
            points[number] = point
    return _state(names, points, turn, stop=ended)


def _state_after_turns(
    names: tuple[str, ...] | None, points: list[Position], index: int, numbers: list[int], k: int
) -> State:
    taken = Counter(numbers[:k])
    reached = [(after, position + taken[n]) for n, (after, position) in enumerate(points)]
    return _state(names, reached, index + k, stop=False)
