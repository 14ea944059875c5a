"""The stages of a plan as reports number them: 0 is the output, parents follow, depth first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from grainmill._plan.node import Node


class NumberedStage(NamedTuple):
    """A stage in a report.

    Attributes:
        number: Its number.
        node: Its node.
        parents: The numbers of the stages that it takes elements from.
    """

    number: int
    node: Node
    parents: list[int]


def is_hidden(node: Node) -> bool:
    """Whether reports leave out `node`: it only sets options, or cuts the share of a worker."""
    return node.is_setting or (bool(node.parents) and node.added_at == "")


def numbered(output: Node) -> list[NumberedStage]:
    """The stages of the plan that ends in `output`, each once, however many others read it.

    The numbers are the same in each worker that runs a share.
    """
    stages: list[NumberedStage] = []
    known: dict[int, NumberedStage] = {}
    pending: list[tuple[Node, list[int]]] = [(output, [])]
    while pending:
        node, numbers = pending.pop()
        while is_hidden(node):
            (node,) = node.parents
        stage = known.get(id(node))
        if stage is None:
            stage = known[id(node)] = NumberedStage(len(stages), node, [])
            stages.append(stage)
            pending += [(parent, stage.parents) for parent in reversed(node.parents)]
        numbers.append(stage.number)
    return stages
