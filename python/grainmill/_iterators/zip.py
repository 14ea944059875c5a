"""Tuples of one element of each of several stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._iterators.part import Part, Place
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.sequential import Zip


class ZipStage(Stage):
    """Pulls as many elements from one parent as from the next."""

    def __init__(self, node: Zip, parents: Sequence[Stage]) -> None:
        super().__init__(*parents)
        self._strict = node.strict
        self._parts = [Part(parent) for parent in parents]

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return min(parent.burst for parent in self.parents)

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        count = limit
        for number, part in enumerate(self._parts):
            at_hand = part.ready(count)
            if not at_hand:
                part.finish()
                self._check_ends(number)
                count = 0
                break
            count = min(count, at_hand)
        places = [part.place for part in self._parts]
        elements = list(zip(*[part.take(count) for part in self._parts], strict=True))
        return Block(elements, lambda k: _state(places, k))

    def _check_ends(self, ended: int) -> None:
        if not self._strict:
            return
        if ended:
            raise ValueError(f"ZipIterDataset argument {ended + 1} is shorter than {_first(ended)}")
        for number, part in enumerate(self._parts):
            if part.ready(1):
                raise ValueError(
                    f"ZipIterDataset argument {number + 1} is longer than {_first(number)}"
                )
            part.finish()

    def state(self) -> State:
        """See `Stage.state`."""
        return _state([part.place for part in self._parts], 0)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        parents = state["parents"]
        if len(parents) != len(self._parts):
            raise ValueError(f"a state of {len(parents)} iterators for {len(self._parts)}")
        for part, saved in zip(self._parts, parents, strict=True):
            part.restore(saved)


def _first(count: int) -> str:
    return "argument 1" if count == 1 else f"arguments 1-{count}"


def _state(places: list[Place], count: int) -> State:
    return {"parents": [after(position + count) for after, position in places]}
