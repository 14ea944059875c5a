"""Which changes of a pipeline leave every position in a saved state valid.

A state is a position in a sequence of elements. It stays valid where the new sequence begins with
the old one (more epochs, a higher limit), and in a mixture by name, whose state has the position of
each of its datasets. Stages downstream must agree: a shuffle of a longer sequence is another order,
and a bin that is packed again from other elements would repeat some and lose others. It is packed
from the same ones if these are followed by more: states say where the old ones ended.
"""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._checkpoint import pipeline
from grainmill._checkpoint.files import digest
from grainmill._plan.node import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Changes(NamedTuple):
    """What differs between two pipelines.

    Attributes:
        refused: Differences that make a state of the first invalid in the second.
        accepted: Differences that do not.
    """

    refused: list[str]
    accepted: list[str]


class _Effect(enum.Enum):
    """What is different about the elements of a stage."""

    SAME = "nothing"
    LONGER = "there are more of them after the old ones"
    REGROUPED = "the last of the old ones is another, and there are more after it"
    OTHER = "other elements follow from the saved position on"


_LONGER = {_Effect.LONGER, _Effect.REGROUPED}


class _Lengths(NamedTuple):
    """How many elements a stage with random access had and has; `None` if unknown."""

    before: int | None
    after: int | None


_EPOCHS = "num_epochs"
_MIXTURE = "MixedIterDataset"
_JOINED = {_MIXTURE, "ZipIterDataset"}
_SHUFFLES = {"ShuffleMapDataset", "WindowShuffleMapDataset"}
_ELASTIC = "ElasticIterator"  # whose states are those of what it reads, or of the shards of that


def compared(
    saved: Any, now: Any, states: Sequence[Any], nodes: Mapping[str, Node], *, say_ends: bool
) -> Changes:
    """What differs between two descriptions, and whether `states` of the first fit the second.

    States saved at the end of a sequence that is longer now are changed in place, such that they
    continue there.

    Args:
        saved: The description of the pipeline that saved the states.
        now: That of the present one.
        states: The states of one process.
        nodes: A node of each kind of stage, which is asked about the states of such.
        say_ends: Whether states within a last window or bins say that these were not full.
    """
    comparison = _Comparison(nodes, say_ends=say_ends)
    comparison.chain(saved, now, list(states), "")
    return Changes(comparison.refused, comparison.accepted)


class _Comparison:
    def __init__(self, nodes: Mapping[str, Node], *, say_ends: bool) -> None:
        self._nodes = nodes
        self._say_ends = say_ends
        self.refused: list[str] = []
        self.accepted: list[str] = []

    def chain(self, saved: Any, now: Any, states: list[Any] | None, where: str) -> _Effect:
        """Compares the stages of a plan; returns how its elements differ."""
        if _equal(saved, now):
            return _Effect.SAME
        saved, now = _with_mixture_apart(saved), _with_mixture_apart(now)
        if not (isinstance(saved, list) and isinstance(now, list)) or [
            stage.get("stage") for stage in saved
        ] != [stage.get("stage") for stage in now]:
            self.refused += [where + text for text in pipeline.differences(saved, now)]
            return _Effect.OTHER
        effect, lengths = _Effect.SAME, _Lengths(None, None)
        stages = zip(saved, now, self._by_stage(saved, states), strict=True)
        for number, (before, after, of_stage) in enumerate(stages):
            num_refused = len(self.refused)
            later = saved[number + 1 :]
            is_counted = all(
                self._node(other).keeps_positions or not other["stage"].endswith("MapDataset")
                for other in later
            )
            node = self._node(before)
            stage = _Stage(before, after, node, of_stage, lengths, where, is_counted)
            effect = self._stage(stage, effect)
            if effect is not _Effect.SAME and len(self.refused) == num_refused:
                self._continue_at_end(stage)
            lengths = _Lengths(
                _length(before, node, lengths.before), _length(after, node, lengths.after)
            )
        return effect

    def _node(self, stage: dict[str, Any]) -> Node | type[Node]:
        """What answers for a stage: as nodes do by default where it is none of the package's."""
        return self._nodes.get(stage["stage"], Node)

    def _by_stage(
        self, stages: list[dict[str, Any]], states: list[Any] | None
    ) -> list[list[Any] | None]:
        """What `states` of a plan have of each stage and of all upstream of it."""
        found: list[list[Any] | None] = []
        for stage in reversed(stages):
            found.append(states)
            if states is not None:
                states = _upstream(stage["stage"], self._node(stage), states)
        return found[::-1]

    def _stage(self, stage: _Stage, upstream: _Effect) -> _Effect:
        before, after, name = stage.before, stage.after, stage.name
        own = {key for key in before.keys() | after.keys() if not stage.has_same(key)}
        texts = [stage.where + text for text in pipeline.parameters(before, after)]
        if name in _JOINED:
            return self._joined(stage, own - {"of"})
        if upstream is not _Effect.SAME and (why := self._disturbed(stage, upstream)):
            self._refuse_after(stage, why)
            return upstream
        completes = stage.node.completes_last and not before.get("drop_remainder")
        if upstream is _Effect.LONGER and completes:
            upstream = _Effect.REGROUPED
        if not texts:
            return upstream
        grows_by = stage.node.grows_by
        if grows_by is not None and own == {grows_by} and _has_grown(stage, grows_by):
            self.accepted += texts
            return _Effect.LONGER if upstream is _Effect.SAME else upstream
        if upstream in _LONGER and name == "SliceMapDataset" and own == {"stop"}:
            # A slice to the end; `_disturbed` has compared it.
            return upstream
        self.refused += texts
        return upstream

    def _refuse_after(self, stage: _Stage, why: str) -> None:
        """A change upstream was accepted, but `stage` makes positions invalid."""
        self.refused += [f"{text}, and {stage.name} after it {why}" for text in self.accepted]
        self.accepted = []

    def _joined(self, stage: _Stage, own: set[str]) -> _Effect:
        before, after = stage.before, stage.after
        olds, news = before.get("of"), after.get("of")
        weights, new_weights = _weights(before), _weights(after)
        if "weights" not in before or "weights" not in after:
            own.discard("weights")
        if isinstance(olds, list) and isinstance(news, list):
            by_name = own <= {"names", "proportions", "weights"}
            if by_name and weights and new_weights and weights.keys() & new_weights.keys():
                effect = self._parts(
                    stage,
                    dict(zip(weights, olds, strict=True)),
                    dict(zip(new_weights, news, strict=True)),
                )
                return self._mixture(stage, weights, new_weights, effect)
            if not own and len(olds) == len(news):
                return self._parts(stage, dict(enumerate(olds)), dict(enumerate(news)))
        self.refused += [stage.where + text for text in pipeline.parameters(before, after)]
        return _Effect.OTHER

    def _mixture(
        self, stage: _Stage, weights: dict[str, int], new_weights: dict[str, int], effect: _Effect
    ) -> _Effect:
        where = f"{stage.where}{stage.name}"
        changed = [f"{where} has the new dataset `{name}`" for name in new_weights.keys() - weights]
        changed += [
            f"{where} no longer has the dataset `{name}`" for name in weights.keys() - new_weights
        ]
        if not changed and weights != new_weights:
            changed = [f"proportions of {where} were {weights}, and are {new_weights} now"]
        self.accepted += sorted(changed)
        return _Effect.OTHER if changed else effect

    def _parts(self, stage: _Stage, olds: dict[Any, Any], news: dict[Any, Any]) -> _Effect:
        effects = set()
        for name, new in news.items():
            if name in olds:
                states = None if stage.states is None else _of_part(stage.states, name)
                shown = name if isinstance(name, int) else f"`{name}`"
                where = f"{stage.where}in dataset {shown} of {stage.name}: "
                effects.add(self.chain(olds[name], new, states, where))
        worst_first = _Effect.OTHER, _Effect.REGROUPED, _Effect.LONGER
        return next((effect for effect in worst_first if effect in effects), _Effect.SAME)

    def _disturbed(self, stage: _Stage, upstream: _Effect) -> str:
        """Why a changed parent makes positions in `stage` invalid; empty if it does not."""
        name = stage.name
        if stage.node.keeps_positions or name == _ELASTIC:
            return ""
        if stage.node.restart_key is not None:
            is_same = upstream is _Effect.LONGER and self._say_ends
            return "" if is_same else _recomputed(stage, stage.node.restart_key)
        is_longer = upstream in _LONGER
        if name == "RepeatIterDataset":
            return "has repeated fewer" if is_longer else ""
        if stage.node.has_shares:
            is_split_anew = is_longer and stage.before.get("sequential_slice")
            return "splits them anew among its workers" if is_split_anew else ""
        check = _RANDOM_ACCESS.get(name)
        return check(stage) if check and is_longer else "depends on all of its elements"

    @staticmethod
    def _continue_at_end(stage: _Stage) -> None:
        """Changes states that were saved at the end such that the new elements follow."""
        for state in stage.states or ():
            if not isinstance(state, dict):
                continue
            if stage.name == "RepeatIterDataset" and not stage.has_same(_EPOCHS):
                # At the end of the last epoch, not of the one that was to come.
                if state.get("epoch") == stage.before.get(_EPOCHS):
                    state["epoch"] -= 1
            elif stage.name == _MIXTURE and state.get("stop"):
                state["stop"] = False
                state["index"] -= 1  # it is the turn of the dataset that had ended
            elif stage.node.has_shares and "exhausted" in state:
                state["exhausted"] = [0] * len(state["exhausted"])
            elif isinstance(shards := state.get("shards"), dict) and "exhausted" in shards:
                shards["exhausted"] = [0] * len(shards["exhausted"])


class _Stage(NamedTuple):
    """A stage of both pipelines.

    Attributes:
        before: Its description when the state was saved.
        after: Its description now.
        node: What answers for it.
        states: What was saved of it and of all upstream, once for each worker; `None` if unknown.
        parents: How many elements its parent had and has.
        where: Which plan it is in, for messages.
        is_counted: Whether positions in states count its elements, as far as it has random access.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    node: Node | type[Node]
    states: list[Any] | None
    parents: _Lengths
    where: str
    is_counted: bool

    @property
    def name(self) -> str:
        return str(self.before["stage"])

    def has_same(self, key: str) -> bool:
        """Whether the parameter `key` has not changed."""
        return bool(self.before.get(key) == self.after.get(key))


def _equal(one: Any, other: Any) -> bool:
    """Whether two plans are the same; of a large one only the digest may be known."""
    if isinstance(one, str) != isinstance(other, str):
        one, other = (
            each if isinstance(each, str) else digest(json.dumps(each, sort_keys=True))
            for each in (one, other)
        )
    return bool(one == other)


def _with_mixture_apart(stages: Any) -> Any:
    """A plan in which a mixture of one dataset has that nested in it, as of several."""
    if isinstance(stages, list):
        for number, stage in reversed(list(enumerate(stages))):
            if number and stage.get("stage") == _MIXTURE and "of" not in stage:
                return [{**stage, "of": [stages[:number]]}, *stages[number + 1 :]]
    return stages


def _weights(mixture: dict[str, Any]) -> dict[str, int] | None:
    """The weights of the datasets of a mixture by name; `None` if it has no names."""
    if "weights" in mixture:
        found: dict[str, int] = mixture["weights"]
        return found
    names, proportions = mixture.get("names"), mixture.get("proportions")
    if not isinstance(names, list) or not isinstance(proportions, list):
        return None
    return dict(zip(names, proportions, strict=True))


def _has_grown(stage: _Stage, key: str) -> bool:
    before, after = stage.before.get(key), stage.after.get(key)
    if before is None:  # endless
        return False
    return after is None or after > before


def _recomputed(stage: _Stage, key: str) -> str:
    for state in stage.states or [None]:
        if not isinstance(state, dict) or state.get(key) != 0 or _cut(state):
            return (
                "computes elements again of which it has delivered a part; go on with the pipeline "
                f"that saved it until `{key}` of its state is 0, and change it then"
            )
    return ""


def _cut(state: dict[str, Any]) -> bool:
    """Whether concat-then-split packing continues within a sequence."""
    slices = state.get("remainder_slices")
    return isinstance(slices, dict) and any(list(ends) != [-1, -1] for ends in slices.values())


def _sliced_anew(stage: _Stage) -> str:
    before, after = stage.before, stage.after
    same = stage.has_same("start") and stage.has_same("step") and before.get("step", 0) > 0
    if same and None not in stage.parents:
        ends_before = before.get("stop") == stage.parents.before
        ends_after = after.get("stop") == stage.parents.after
        if stage.has_same("stop") or (ends_before and ends_after):
            return ""
    return "takes other elements of it"


def _batched_anew(stage: _Stage) -> str:
    """The last batch of an epoch may have been shorter than it is now."""
    length = stage.parents.before
    if stage.before.get("drop_remainder"):
        return ""
    if length is not None:
        full, rest = divmod(length, stage.before["batch_size"])
        if not rest:
            return ""
        positions = [_next_index(state) for state in stage.states or [None]]
        is_known = stage.is_counted and len(positions) == 1 and positions[0] is not None
        if is_known and positions[0] <= full:
            return ""
    return "fills its last batch, which was shorter"


_RANDOM_ACCESS = {"SliceMapDataset": _sliced_anew, "BatchMapDataset": _batched_anew}


def _next_index(state: Any) -> Any:
    if not isinstance(state, dict):
        return None
    return state.get("next_index", state.get("global_next_index"))


def _length(stage: dict[str, Any], node: Node | type[Node], parent: int | None) -> int | None:
    """How many elements a stage with random access has; `None` if that is unknown."""
    if "length" in stage:
        return int(stage["length"])
    if parent is None:
        return None
    length = None
    match stage["stage"]:
        case "RepeatMapDataset":
            epochs = stage.get(_EPOCHS)
            length = min(sys.maxsize, parent * (sys.maxsize if epochs is None else epochs))
        case "SliceMapDataset":
            length = len(range(stage["start"], stage["stop"], stage["step"]))
        case "BatchMapDataset":
            full, rest = divmod(parent, stage["batch_size"])
            length = full + bool(rest and not stage.get("drop_remainder"))
        case name if node.keeps_positions or name in _SHUFFLES:
            length = parent
    return length


# --- the states of stages -----------------------------------------------------------------------


def _upstream(name: str, node: Node | type[Node], states: list[Any]) -> list[Any] | None:
    """What states of a stage have of its parent; `None` if that is unknown."""
    if node.parent_key is not None:
        return _values(states, node.parent_key)
    if name == _ELASTIC:
        if not all(isinstance(state, dict) and "shards" in state for state in states):
            return states
        states = [state["shards"] for state in states]
    if node.has_shares or name == _ELASTIC:
        parts = _values(states, "iterators_in_use_states")
        return None if parts is None else [state for part in parts for state in part]
    return states if node.keeps_positions or name.endswith("MapDataset") else None


def _of_part(states: list[Any], name: Any) -> list[Any] | None:
    """What states of a stage with several parents have of one of these."""
    parents = _values(states, "parents")
    if parents is None:
        return None
    try:
        return [parent[name] for parent in parents]
    except (LookupError, TypeError):
        return None


def _values(states: list[Any], key: str) -> list[Any] | None:
    if all(isinstance(state, dict) and key in state for state in states):
        return [state[key] for state in states]
    return None
