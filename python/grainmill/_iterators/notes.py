"""Notes on exceptions that say which element of a sequential stage failed, and its origin.

The elements of the random-access plan that it was computed from follow from the states before and
after it. So nothing is counted for this, and the numbers do not change after a restore or in a
worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grainmill._evaluate.notes import described
from grainmill._interrupts import suppressed
from grainmill._iterators.base.node import origins, plan_of
from grainmill._iterators.base.position import state_at
from grainmill._iterators.user_defined import UserDefined
from grainmill._plan.node import MapNode
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from grainmill._iterators.base.node import Origin
    from grainmill._iterators.base.position import Position
    from grainmill._plan.node import Node

_MAX_SHOWN: Final = 4


def note_stage(
    failure: BaseException,
    node: Node,
    before: Position,
    after: Position,
    upstream: Node | None = None,
) -> None:
    """Adds to `failure` which stage failed, and the origin of the element that it computed.

    Args:
        failure: The exception.
        node: The node of the stage that failed.
        before: The position of `upstream` before the elements that it was computed from.
        after: The position after these.
        upstream: The node of the stage that they come from; the parent of `node` if `None`.
    """
    with suppressed():
        upstream = node.parent if upstream is None else upstream
        note(failure, located(node), before, after, upstream)


def note(
    failure: BaseException,
    what: str,
    before: Position,
    after: Position,
    upstream: Node,
) -> None:
    """As `note_stage`, for a stage without a node, which messages call `what`."""
    with suppressed():  # an error in here must not hide the failure
        lines = [f"while computing an element of {what}"]
        with suppressed():
            if _is_plain(upstream):
                for origin in origins(upstream, state_at(before), state_at(after))[:_MAX_SHOWN]:
                    lines += _shown(origin)
        add_note(failure, lines)


def _shown(origin: Origin) -> list[str]:
    if origin.last is None:
        return [f"{described(origin.plan, origin.first, origin.first)[0]}, and later ones"]
    if not 0 <= origin.first <= origin.last:
        return []
    return described(origin.plan, origin.first, origin.last)


def _is_plain(node: Node, known: set[int] | None = None) -> bool:
    """Whether states can be computed without calling a user's iterator.

    Args:
        node: The last node of the plan.
        known: The `id`s of datasets that need not be looked at again.
    """
    known = set() if known is None else known
    for each in node.walk(until=MapNode):
        if isinstance(each, UserDefined):
            return False
        if each.opens is None:
            continue
        if not isinstance(each.opens, list | tuple):
            return False
        for dataset in each.opens:
            if id(dataset) not in known:
                known.add(id(dataset))
                if not _is_plain(plan_of(dataset), known):
                    return False
    return True
