"""Notes on exceptions that say which element of a sequential stage failed, and its origin.

The elements of the random-access plan that it was computed from follow from the states before and
after it. So nothing is counted for this, and the numbers do not change after a restore or in a
worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill._evaluate.notes import described
from grainmill._interrupts import suppressed
from grainmill._native import MixSchedule
from grainmill._plan import sequential as plan
from grainmill._plan.node import random_access
from grainmill._plan.notes import add_note, located
from grainmill._plan.slicing import sliced

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import State
    from grainmill._plan.node import MapNode, Node

_MAX_SHOWN: Final = 4


def note_stage(
    failure: BaseException,
    node: Node,
    before: Callable[[], State],
    after: Callable[[], State],
    upstream: Node | None = None,
) -> None:
    """Adds to `failure` which stage failed, and the origin of the element that it computed.

    Args:
        failure: The exception.
        node: The node of the stage that failed.
        before: Returns the state of `upstream` before the elements that it was computed from.
        after: Returns the state after these.
        upstream: The node of the stage that they come from; the parent of `node` if `None`.
    """
    with suppressed():
        note(failure, located(node), before, after, node.parent if upstream is None else upstream)


def note(
    failure: BaseException,
    what: str,
    before: Callable[[], State],
    after: Callable[[], State],
    upstream: Node,
) -> None:
    """As `note_stage`, for a stage without a node, which messages call `what`."""
    with suppressed():  # an error in here must not hide the failure
        lines = [f"while computing an element of {what}"]
        with suppressed():
            if _is_plain(upstream):
                for origin in _origins(upstream, before(), after())[:_MAX_SHOWN]:
                    lines += _shown(origin)
        add_note(failure, lines)


def note_part(failure: BaseException, node: Node, number: int) -> None:
    """Adds to `failure` that it concerns element `number` of a batch of `node`."""
    with suppressed():
        add_note(failure, [f"which is element {number} of a batch of {located(node)}"])


class _Origin(NamedTuple):
    """Consecutive elements of a plan with random access.

    Attributes:
        plan: The plan.
        first: The index of the first.
        last: The index of the last; `None` if that is unknown.
    """

    plan: MapNode
    first: int
    last: int | None


def _shown(origin: _Origin) -> list[str]:
    if origin.last is None:
        return [f"{described(origin.plan, origin.first, origin.first)[0]}, and later ones"]
    if not 0 <= origin.first <= origin.last:
        return []
    return described(origin.plan, origin.first, origin.last)


def _starts(node: Node, state: State) -> list[_Origin]:
    """The next element of each plan with random access that `node` reads, in `state`."""
    if isinstance(node, plan.Read):
        return [_Origin(random_access(node.parent), state["next_index"], None)]
    if isinstance(node, plan.Mix | plan.Zip):
        keys = getattr(node, "names", None) or range(len(node.parents))
        pairs = zip(node.parents, keys, strict=True)
        return [start for parent, key in pairs for start in _starts(parent, state["parents"][key])]
    if key := _STATES_OF_STARTS.get(type(node)):
        return _starts(node.parent, state[key])
    if len(node.parents) != 1 or isinstance(node, _UNLIKE_THEIR_PARENTS):
        return []
    is_nested = "parent" in state
    return _starts(node.parent, state["parent"] if is_nested else state)


def _computed_again(node: Node, before: State, after: State) -> list[_Origin]:
    """Of stages whose states have the state of the parent before several elements together."""
    # After the last row of a batch, these two are where the next one begins.
    starts = _starts(node, before if isinstance(node, plan.FitPack | plan.Rebatch) else after)
    is_exact = not any(step.drops_elements for step in node.walk())
    if isinstance(node, plan.FlatMap) and len(starts) == 1 and is_exact:
        return [start._replace(last=start.first) for start in starts]
    return starts


def _is_plain(node: Node, known: set[int] | None = None) -> bool:
    """Whether states can be computed without calling a user's iterator.

    Args:
        node: The last node of the plan.
        known: The `id`s of datasets of interleaves that need not be looked at again.
    """
    known = set() if known is None else known
    for each in node.walk(until=plan.Read):
        if isinstance(each, plan.UserDefined):
            return False
        if not isinstance(each, plan.Interleave):
            continue
        if not isinstance(each.datasets, list | tuple):
            return False
        for number, dataset in enumerate(each.datasets):
            if id(dataset) not in known:
                known.add(id(dataset))
                if not _is_plain(_dataset(each, number), known):
                    return False
    return True


def _dataset(node: plan.Interleave, number: int) -> Node:
    dataset: Any = node.datasets[number]
    to_iter_dataset = getattr(dataset, "to_iter_dataset", None)
    if to_iter_dataset is not None:
        dataset = to_iter_dataset()
    plan_node: Node = dataset._plan_node()  # noqa: SLF001 - datasets share plans
    return plan_node


def _origins(node: Node, before: State, after: State) -> list[_Origin]:
    """The origins of the elements of `node` between two of its states; empty if unknown."""
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


def _stored_cache(node: Node, before: State, after: State) -> list[_Origin]:
    """Elements that were taken from the store were computed at another time."""
    is_computed = before["parent"] is not None and after["parent"] is not None
    return _wrapped(node, before, after) if is_computed else []


def _batch(node: Node, before: State, after: State) -> list[_Origin]:
    lasts = _origins(node.parent, after, after)
    # Asked twice, each batch upstream would double the number of questions.
    firsts = lasts if before is after else _origins(node.parent, before, before)
    if len(firsts) != 1 or len(lasts) != 1 or firsts[0].plan is not lasts[0].plan:
        return firsts if any(origin.last is None for origin in firsts) else []
    last = firsts[0].last
    return firsts if last is None else [_Origin(lasts[0].plan, last + 1, lasts[0].last)]


def _zip(node: Node, before: State, after: State) -> list[_Origin]:
    parents = zip(node.parents, before["parents"], after["parents"], strict=True)
    return [origin for parent in parents for origin in _origins(*parent)]


def _mix(node: Any, before: State, after: State) -> list[_Origin]:
    number = int(MixSchedule(list(node.proportions)).choose(after["index"] - 1, 1)[0][0])
    key = number if node.names is None else node.names[number]
    return _origins(node.parents[number], before["parents"][key], after["parents"][key])


def _in_turn(state_before: State, after: State) -> tuple[int, State, State]:
    """The number of the dataset whose turn was last, and its two states."""
    indices = after["iterators_in_use_indices"]
    slot = (after["next_index_in_cycle"] - 1) % len(indices)
    states = [state["iterators_in_use_states"][slot] for state in (state_before, after)]
    return indices[slot], states[0], states[1]


def _interleave(node: Any, before: State, after: State) -> list[_Origin]:
    number, *states = _in_turn(before, after)
    return _origins(_dataset(node, number), *states)


def _workers(node: Any, before: State, after: State) -> list[_Origin]:
    number, *states = _in_turn(before, after)
    shard = sliced(node.parent, number, node.num_workers, sequential=node.sequential_slice)
    return _origins(shard, *states)


# Where their states have that of the parent before the elements that they compute together.
_STATES_OF_STARTS: Final[dict[type[Node], str]] = {
    plan.FitPack: "parent",
    plan.Rebatch: "parent",
    plan.FlatMap: "parent",
    plan.WindowShuffle: "parent_window_start_state",
    plan.ConcatThenSplit: "parent_state",
}
_UNLIKE_THEIR_PARENTS: Final = (
    *(plan.Interleave, plan.MultiprocessPrefetch, plan.MultithreadPrefetch),
    *(plan.Cache, plan.StoredCache, plan.UserDefined),
)
_FINDERS: Final[dict[type[Node], Callable[[Any, State, State], list[_Origin]]]] = {
    plan.Read: _read,
    **dict.fromkeys((plan.Map, plan.Filter, plan.Seed, plan.WithOptions), _same),
    plan.ThreadPrefetch: _same,
    **dict.fromkeys((plan.MapWithIndex, plan.RandomMap, plan.TakeWhile), _wrapped),
    **dict.fromkeys((plan.Limit, plan.Repeat), _wrapped),
    plan.Cache: _cache,
    plan.StoredCache: _stored_cache,
    **dict.fromkeys(_STATES_OF_STARTS, _computed_again),
    plan.Batch: _batch,
    plan.Zip: _zip,
    plan.Mix: _mix,
    plan.Interleave: _interleave,
    **dict.fromkeys((plan.MultiprocessPrefetch, plan.MultithreadPrefetch), _workers),
}
