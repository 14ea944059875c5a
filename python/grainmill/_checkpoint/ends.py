"""What states say of the end of the data, beyond what Grain's say.

A window or bins that the end of the data closed are computed again after a restore. In a pipeline
with more data they would be others, unless it is known how many elements they had. A number in the
state, an `int` like Grain's, has that as an attribute, and a checkpoint has it beside the state.
"""

from __future__ import annotations

from typing import Any, Self


class CutCount(int):
    """How much was delivered of what the end of the data closed.

    Attributes:
        num_elements: How many elements the data had after the state of the parent beside it.
    """

    num_elements: int

    def __new__(cls, count: int, num_elements: int) -> Self:
        """Returns `count` with what it is a part of."""
        self = super().__new__(cls, count)
        self.num_elements = num_elements
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied with its attribute."""
        return CutCount, (int(self), self.num_elements)


def found_in(state: Any) -> list[list[Any]]:
    """The path and the number of elements of each `CutCount` in a state, as JSON.

    A path has places, not keys, as JSON changes keys that are no texts.
    """
    if isinstance(state, CutCount):
        return [[[], state.num_elements]]
    parts: Any = state.values() if isinstance(state, dict) else state
    if not isinstance(state, dict | list | tuple):
        parts = ()
    return [
        [[place, *path], number]
        for place, part in enumerate(parts)
        for path, number in found_in(part)
    ]


def put_back(state: Any, ends: list[list[Any]]) -> None:
    """Changes a state that was read from JSON into that of which `found_in` returned `ends`."""
    for (*places, last), num_elements in ends:
        part = state
        for place in places:
            part = part[_key(part, place)]
        key = _key(part, last)
        part[key] = CutCount(part[key], num_elements)


def _key(part: Any, place: int) -> Any:
    return list(part)[place] if isinstance(part, dict) else place
