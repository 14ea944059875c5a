"""A pipeline drawn as text, with the spec of an element after each stage, in the form of Grain."""

from __future__ import annotations

import pprint
from typing import TYPE_CHECKING, Any

from grainmill._plan import random_access
from grainmill._stats.element_specs import spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grainmill._stats.recorded import StageReport

_SEVERAL_PARENTS = "WARNING: Detected multi-parent datasets. Only displaying the first parent.\n\n"


def known_specs(stages: Sequence[StageReport]) -> dict[int, Any]:
    """The spec of each stage's elements, where it was seen or follows from its neighbours."""
    specs = {stage.number: stage.meter.spec for stage in stages if stage.meter.spec is not None}
    for stage in stages:
        if isinstance(stage.node, random_access.Range):
            specs.setdefault(stage.number, spec_of(0))
    for stage in reversed(stages):  # from the sources to the output
        if stage.number not in specs and _passes_on(stage) and stage.inputs:
            spec = specs.get(stage.inputs[0])
            if spec is not None:
                specs[stage.number] = spec
    for stage in stages:  # and back
        if stage.number in specs and _passes_on(stage):
            for number in stage.inputs:
                specs.setdefault(number, specs[stage.number])
    return specs


def _passes_on(stage: StageReport) -> bool:
    """Whether its elements are those of the stages that it reads, or of datasets that it opens."""
    return stage.node.keeps_spec or stage.node.opens is not None


def graph_text(stages: Sequence[StageReport], specs: Mapping[int, Any]) -> str:
    """The text of the pipeline from its source to its output, along first parents.

    What workers run shares of has no spec there.
    """
    shown = {number: spec for number, spec in specs.items() if not stages[number].node.has_shares}
    path = [stages[0]]
    while path[-1].inputs:
        path.append(stages[path[-1].inputs[0]])
    text = _SEVERAL_PARENTS if any(len(stage.inputs) > 1 for stage in path) else ""
    path.reverse()
    text += _node(path[0].name, "", shown.get(path[0].number))
    for stage in path[1:]:
        text += _node("", stage.name, shown.get(stage.number))
    return text


def _node(upstream: str, name: str, spec: Any) -> str:
    arrow = "  ││\n  \u2572\u2571"
    return f"{upstream}\n  ││\n  ││  {name}\n{arrow}\n{pprint.pformat(spec)}\n"
