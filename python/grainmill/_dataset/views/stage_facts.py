"""What is known of each stage of a plan before it runs: its length, and where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._evaluate.compile import runs_in_engine
from grainmill._iterators.base.node import CALLER, UNKNOWN, Length, SequentialNode
from grainmill._plan.node import MapNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.node import Node


def runs_in(node: Node) -> str:
    """What computes the elements of `node`."""
    if isinstance(node, MapNode):
        return "Rust" if runs_in_engine(node) else "Python"
    return "Rust" if isinstance(node, SequentialNode) and node.is_native else "Python"


def state_of(node: Node) -> str:
    """What a state holds of `node`; empty if nothing."""
    return node.saves if isinstance(node, SequentialNode) else ""


def place_of(node: Node, place: str = CALLER) -> dict[int, str]:
    """Where each node of a plan that runs at `place` runs, by its `id`."""
    places = {id(node): place}
    for reader in node.walk():
        place = places[id(reader)]
        if isinstance(reader, SequentialNode):
            place = reader.place_of_parents(place)
        for parent in reader.parents:
            places.setdefault(id(parent), place)
    return places


def joined_length(node: Node) -> dict[int, str]:
    """The number of elements of each node of a plan, by its `id`."""
    return {key: str(length) for key, length in _lengths(node).items()}


def length_of(node: Node) -> int | None:
    """How many elements a plan has; `None` if that is not known exactly."""
    length = _lengths(node)[id(node)]
    return length.count if length.exact else None


def _lengths(node: Node) -> dict[int, Length]:
    lengths: dict[int, Length] = {}
    for step in node.walk_up():
        lengths[id(step)] = _length(step, [lengths[id(parent)] for parent in step.parents])
    return lengths


def _length(node: Node, parents: Sequence[Length]) -> Length:
    if isinstance(node, SequentialNode):
        return node.num_elements(parents)
    try:
        return Length(node.length) if isinstance(node, MapNode) else UNKNOWN
    except Exception:  # a user's dataset or source may have none
        return UNKNOWN
