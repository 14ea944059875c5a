"""Steps that select the function, or the source, of each element by its dataset's number.

So a mixture of thousands of datasets, each with its own map, is one loop: a column has the dataset
of each element.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.fused import Step
from grainmill._evaluate.fused_blocks import checked_block, costs_by_element
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._plan.node import block_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan import random_access as plan


def step_of(nodes: Sequence[plan.Map]) -> tuple[Step, bool]:
    """One step for `nodes`, all of one kind, and whether it takes the dataset number, too.

    It takes that number as its index; or the pair (dataset, index) if it takes an index anyway.
    """
    kind: Any = nodes[0].step_kind
    if _are_one(nodes):
        return Step.of(nodes[0]), False
    functions = list(map(attrgetter("function"), nodes))
    if kind == "map":
        step = Step("indexed", lambda dataset, x: functions[dataset](x))
        blocks = [block_function(node.transform) for node in nodes]
        if all(block is None for block in blocks):
            return step, True
        return dataclasses.replace(step, block=_BlocksOfDatasets(functions, blocks)), True
    if kind == "filter":
        return Step("indexed", lambda dataset, x: x if functions[dataset](x) else None), True
    if kind == "indexed":
        return Step("indexed", lambda pair, x: functions[pair[0]](pair[1], x)), True
    generators = [IndexedGenerators(node.seed) for node in nodes]  # type: ignore[attr-defined]

    def random(pair: tuple[int, int], x: Any) -> Any:
        dataset, index = pair
        return functions[dataset](x, generators[dataset](index))

    return Step("indexed", random), True


class _BlocksOfDatasets:
    """A function of a block whose elements come from several datasets, each with its own."""

    def __init__(
        self,
        functions: Sequence[Callable[[Any], Any]],
        blocks: Sequence[Callable[[list[Any]], Any] | None],
    ) -> None:
        self._functions = functions
        self._blocks = blocks
        self._costs_by_element = all(block is None or costs_by_element(block) for block in blocks)

    def __call__(self, elements: list[Any], datasets: list[int]) -> list[Any]:
        places: dict[int, list[int]] = defaultdict(list)
        for at, dataset in enumerate(datasets):
            places[dataset].append(at)
        output: list[Any] = [None] * len(elements)
        for dataset, own in places.items():
            inputs, block = [elements[at] for at in own], self._blocks[dataset]
            if block is None or len(inputs) == 1:
                function = self._functions[dataset]
                results = [function(element) for element in inputs]
            else:
                results = checked_block(block(inputs), len(inputs), block)
            for at, result in zip(own, results, strict=True):
                output[at] = result
        return output


def read_step(reads: Sequence[Callable[[int], Any]]) -> Step:
    """A step that reads the element at a pair (dataset, index)."""
    return Step("read", lambda pair: reads[pair[0]](pair[1]))


def _are_one(nodes: Sequence[plan.Map]) -> bool:
    """Whether all `nodes` have the same function and seed."""
    first = _identity(nodes[0])
    return all(_identity(node) == first for node in nodes)


def _identity(node: plan.Map) -> tuple[Any, ...]:
    function, seed = node.function, getattr(node, "seed", None)
    if type(function) is MethodType:
        return (id(function.__self__), id(function.__func__), seed)
    return (id(function), None, seed)
