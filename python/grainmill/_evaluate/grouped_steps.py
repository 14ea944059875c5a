"""Functions and sources of parts that are alike, called by the number of the part.

A mixture of thousands of datasets, each with a map of its own, is one loop: its columns tell of
each element which part it is of, and these functions which function that part has.
"""

from __future__ import annotations

from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.fuse import Step
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._plan import random_access as plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.fuse import StepKind
    from grainmill._plan.node import MapNode

STEP_KINDS: dict[type[MapNode], StepKind] = {
    plan.Map: "map",
    plan.Filter: "filter",
    plan.MapWithIndex: "indexed",
    plan.RandomMap: "random",
}


def step_of(nodes: Sequence[plan.Map]) -> tuple[Step, bool]:
    """One step for `nodes`, all of one kind, and whether it is called with the part too.

    A step that is called with the part has it as its index; one that would be called with an index
    anyway has the pair (part, index).
    """
    kind = STEP_KINDS[type(nodes[0])]
    if _are_one(nodes):
        return Step(kind, nodes[0].function, None, _generators(nodes[0])), False
    functions = list(map(attrgetter("function"), nodes))
    if kind == "map":
        return Step("indexed", lambda part, x: functions[part](x)), True
    if kind == "filter":
        return Step("indexed", lambda part, x: x if functions[part](x) else None), True
    if kind == "indexed":
        return Step("indexed", lambda place, x: functions[place[0]](place[1], x)), True
    generators = [IndexedGenerators(node.seed) for node in nodes]  # type: ignore[attr-defined]

    def random(place: tuple[int, int], x: Any) -> Any:
        part, index = place
        return functions[part](x, generators[part](index))

    return Step("indexed", random), True


def read_step(reads: Sequence[Callable[[int], Any]]) -> Step:
    """A step that reads the element at a pair (part, index)."""
    return Step("read", lambda place: reads[place[0]](place[1]))


def _generators(node: plan.Map) -> IndexedGenerators | None:
    return IndexedGenerators(node.seed) if isinstance(node, plan.RandomMap) else None


def _are_one(nodes: Sequence[plan.Map]) -> bool:
    """Whether all `nodes` do the same."""
    first = _identity(nodes[0])
    return all(_identity(node) == first for node in nodes)


def _identity(node: plan.Map) -> tuple[Any, ...]:
    function, seed = node.function, getattr(node, "seed", None)
    if type(function) is MethodType:
        return (id(function.__self__), id(function.__func__), seed)
    return (id(function), None, seed)
