"""Elements of several stages in fixed proportions."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from grainmill._iterators.part import Part, Place
from grainmill._iterators.stage import Block, Stage, State
from grainmill._native import MixSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import Mix

_TURNS = 512


class MixStage(Stage):
    """Stops at the first parent found at its end when its turn comes."""

    def __init__(self, node: Mix, parents: Sequence[Stage]) -> None:
        super().__init__(*parents)
        self._schedule = MixSchedule(list(node.proportions))
        self._known: tuple[int, list[int]] = (0, [])
        self._names = node.names
        self._parts = [Part(parent) for parent in parents]
        self._starts: list[State | None] | None = None
        self._index = 0
        self._stop = False

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return min(parent.burst for parent in self.parents)

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        self._remember_starts()
        if self._stop:
            return self._block([], [])
        turns = self._turns(limit)
        for number, want in Counter(turns).items():
            self._parts[number].ready(want)
        left = [part.at_hand for part in self._parts]
        run = 0
        for number in turns:
            if not left[number]:
                break
            left[number] -= 1
            run += 1
        if not run:
            self._finish(turns[0])
        return self._block(turns[:run], left)

    def _turns(self, count: int) -> list[int]:
        """Which part has each of the next `count` turns, looked up for many turns at once."""
        start, known = self._known
        at = self._index - start
        if not 0 <= at <= len(known) - count:
            known = self._schedule.choose(self._index, max(count, _TURNS))[0].tolist()
            self._known, at = (self._index, known), 0
        return known[at : at + count]

    def _block(self, turns: list[int], left: list[int]) -> Block:
        places = [part.place for part in self._parts]
        pieces = {
            number: iter(part.take(part.at_hand - left[number]))
            for number, part in enumerate(self._parts)
            if turns and part.at_hand != left[number]
        }
        elements: list[Any] = [next(pieces[number]) for number in turns]
        index, stop, names = self._index, self._stop, self._names
        self._index += len(turns)
        return Block(elements, lambda k: _state(names, places, turns[:k], index + k, stop=stop))

    def _finish(self, number: int) -> None:
        try:
            self._parts[number].finish()
        except Exception as failure:
            name = f" (`{self._names[number]}`)" if self._names is not None else ""
            note = f"Exception caught while processing dataset @ input_index={number}{name}"
            if note not in getattr(failure, "__notes__", ()):
                failure.add_note(note)
            raise
        self._index += 1
        self._stop = True

    def _remember_starts(self) -> None:
        """Keeps the first states of named parents: a state may lack a parent added since."""
        if self._names is not None and self._starts is None:
            self._starts = [None] * len(self._parts)
            for number, part in enumerate(self._parts):
                with contextlib.suppress(NotImplementedError):
                    self._starts[number] = part.state()

    def state(self) -> State:
        """See `Stage.state`."""
        places = [part.place for part in self._parts]
        return _state(self._names, places, [], self._index, stop=self._stop)

    def restore(self, state: State) -> None:
        """See `Stage.restore`; unknown names are left out and new ones start at the beginning."""
        self._remember_starts()
        for part, saved in zip(self._parts, self._saved(state["parents"]), strict=True):
            part.restore(saved)
        self._index = state["index"]
        self._stop = state["stop"]

    def _saved(self, parents: Any) -> list[State]:
        if self._names is None:
            if len(parents) != len(self._parts):
                raise ValueError(
                    f"state was saved with {len(parents)} datasets but {len(self._parts)} are mixed"
                )
            return list(parents)
        starts = self._starts or []
        return [parents.get(name, start) for name, start in zip(self._names, starts, strict=True)]


def _state(
    names: tuple[str, ...] | None,
    places: list[Place],
    turns: list[int],
    index: int,
    *,
    stop: bool,
) -> State:
    taken = Counter(turns)
    states = [after(position + taken[n]) for n, (after, position) in enumerate(places)]
    parents = states if names is None else dict(zip(names, states, strict=True))
    return {"parents": parents, "index": index, "stop": stop}
