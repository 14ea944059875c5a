"""Steps that select the function, or the source, of each element by its dataset's number.

So a mixture of thousands of datasets, each with its own map, is one loop: a column has the dataset
of each element.
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
    """One step for `nodes`, all of one kind, and whether it takes the dataset number, too.

    It takes that number as its index; or the pair (dataset, index) if it takes an index anyway.
    """
    kind = STEP_KINDS[type(nodes[0])]
    if _are_one(nodes):
        return Step(kind, nodes[0].function, None, _generators(nodes[0])), False
    functions = list(map(attrgetter("function"), nodes))
    if kind == "map":
        return Step("indexed", lambda dataset, x: functions[dataset](x)), True
    if kind == "filter":
        return Step("indexed", lambda dataset, x: x if functions[dataset](x) else None), True
    if kind == "indexed":
        return Step("indexed", lambda pair, x: functions[pair[0]](pair[1], x)), True
    generators = [IndexedGenerators(node.seed) for node in nodes]  # type: ignore[attr-defined]

    def random(pair: tuple[int, int], x: Any) -> Any:
        dataset, index = pair
        return functions[dataset](x, generators[dataset](index))

    return Step("indexed", random), True


def read_step(reads: Sequence[Callable[[int], Any]]) -> Step:
    """A step that reads the element at a pair (dataset, index)."""
    return Step("read", lambda pair: reads[pair[0]](pair[1]))


def _generators(node: plan.Map) -> IndexedGenerators | None:
    return IndexedGenerators(node.seed) if isinstance(node, plan.RandomMap) else None


def _are_one(nodes: Sequence[plan.Map]) -> bool:
    """Whether all `nodes` have the same function and seed."""
    first = _identity(nodes[0])
    return all(_identity(node) == first for node in nodes)


def _identity(node: plan.Map) -> tuple[Any, ...]:
    function, seed = node.function, getattr(node, "seed", None)
    if type(function) is MethodType:
        return (id(function.__self__), id(function.__func__), seed)
    return (id(function), None, seed)
