"""What an exception is told of an element of a sequential stage.

Which element of the plan with random access it was made of follows from the states before and
after it, so nothing is counted for it, and what was restored or runs in a worker has the numbers
that it always has.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill._evaluate.notes import described
from grainmill._native import MixSchedule
from grainmill._plan import sequential as plan
from grainmill._plan.notes import add_note, located
from grainmill._plan.slicing import sliced

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import State
    from grainmill._plan.node import MapNode, Node

_MOST_SHOWN: Final = 4


def note_stage(
    failure: BaseException,
    node: Node,
    before: Callable[[], State],
    after: Callable[[], State],
    above: Node | None = None,
) -> None:
    """Notes on `failure` that an element of `node` could not be made, and what it is made of.

    Args:
        failure: What was raised.
        node: The stage that failed.
        before: The state of `above` before the elements that it is made of.
        after: The state after these.
        above: Where the elements come from; the parent of `node` if `None`.
    """
    with contextlib.suppress(Exception):
        note(failure, located(node), before, after, node.parent if above is None else above)


def note(
    failure: BaseException,
    what: str,
    before: Callable[[], State],
    after: Callable[[], State],
    above: Node,
) -> None:
    """As `note_stage`, for what has no node."""
    with contextlib.suppress(Exception):  # the failure matters more than what is told of it
        lines = [f"while computing an element of {what}"]
        with contextlib.suppress(Exception):
            if _is_ours(above):
                for origin in _origins(above, before(), after())[:_MOST_SHOWN]:
                    if 0 <= origin.first <= origin.last:
                        lines += described(*origin)
        add_note(failure, lines)


def note_part(failure: BaseException, node: Node, number: int) -> None:
    """Notes on `failure` that it hindered element `number` of a batch of `node`."""
    with contextlib.suppress(Exception):
        add_note(failure, [f"which is element {number} of a batch of {located(node)}"])


class _Origin(NamedTuple):
    """Consecutive elements of a plan with random access."""

    plan: MapNode
    first: int
    last: int


def _is_ours(node: Node) -> bool:
    """Whether states are to be had without asking an iterator of the user's."""
    for above in node.walk(until=plan.Read):
        if isinstance(above, plan.UserDefined):
            return False
        if isinstance(above, plan.Interleave) and not (
            isinstance(above.datasets, list | tuple)
            and all(_is_ours(_part(above, number)) for number in range(len(above.datasets)))
        ):
            return False
    return True


def _part(node: plan.Interleave, number: int) -> Node:
    dataset: Any = node.datasets[number]
    to_iter_dataset = getattr(dataset, "to_iter_dataset", None)
    if to_iter_dataset is not None:
        dataset = to_iter_dataset()
    part: Node = dataset._plan_node()  # noqa: SLF001 - datasets share plans
    return part


def _origins(node: Node, before: State, after: State) -> list[_Origin]:
    """What the elements of `node` between two states of its are made of; empty where unknown."""
    find = _FINDERS.get(type(node))
    return [] if find is None else find(node, before, after)


def _read(node: Any, _: State, after: State) -> list[_Origin]:
    index = after["next_index"] - 1
    return [_Origin(node.parent, index, index)]


def _same(node: Node, before: State, after: State) -> list[_Origin]:
    return _origins(node.parent, before, after)


def _wrapped(node: Node, before: State, after: State) -> list[_Origin]:
    return _origins(node.parent, before["parent"], after["parent"])


def _cache(node: Node, before: State, after: State) -> list[_Origin]:
    return [] if after["cache_filled"] else _wrapped(node, before, after)


def _batch(node: Node, before: State, after: State) -> list[_Origin]:
    firsts = _origins(node.parent, before, before)
    lasts = _origins(node.parent, after, after)
    if len(firsts) != 1 or len(lasts) != 1 or firsts[0].plan is not lasts[0].plan:
        return []
    return [_Origin(lasts[0].plan, firsts[0].last + 1, lasts[0].last)]


def _zip(node: Node, before: State, after: State) -> list[_Origin]:
    parts = zip(node.parents, before["parents"], after["parents"], strict=True)
    return [origin for part in parts for origin in _origins(*part)]


def _mix(node: Any, before: State, after: State) -> list[_Origin]:
    part = int(MixSchedule(list(node.proportions)).choose(after["index"] - 1, 1)[0][0])
    key = part if node.names is None else node.names[part]
    return _origins(node.parents[part], before["parents"][key], after["parents"][key])


def _in_turn(state_before: State, after: State) -> tuple[int, State, State]:
    """The part that had its turn last, and its states."""
    indices = after["iterators_in_use_indices"]
    slot = (after["next_index_in_cycle"] - 1) % len(indices)
    states = [state["iterators_in_use_states"][slot] for state in (state_before, after)]
    return indices[slot], states[0], states[1]


def _interleave(node: Any, before: State, after: State) -> list[_Origin]:
    number, *states = _in_turn(before, after)
    return _origins(_part(node, number), *states)


def _workers(node: Any, before: State, after: State) -> list[_Origin]:
    number, *states = _in_turn(before, after)
    part = sliced(node.parent, number, node.num_workers, sequential=node.sequential_slice)
    return _origins(part, *states)


_FINDERS: Final[dict[type[Node], Callable[[Any, State, State], list[_Origin]]]] = {
    plan.Read: _read,
    **dict.fromkeys((plan.Map, plan.Filter, plan.Seed, plan.WithOptions), _same),
    plan.ThreadPrefetch: _same,
    **dict.fromkeys((plan.MapWithIndex, plan.RandomMap, plan.TakeWhile), _wrapped),
    **dict.fromkeys((plan.Limit, plan.Repeat), _wrapped),
    plan.Cache: _cache,
    plan.Batch: _batch,
    plan.Zip: _zip,
    plan.Mix: _mix,
    plan.Interleave: _interleave,
    **dict.fromkeys((plan.MultiprocessPrefetch, plan.MultithreadPrefetch), _workers),
}
