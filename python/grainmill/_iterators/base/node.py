"""The base class of the nodes that run as stages: what everything else asks about one of them.

Each is defined beside the stage that runs it. What is asked of all of them has no default where
there is no answer that is right for most: `tests/test_stage_answers.py` names what one lacks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from grainmill._plan.node import MapNode, Node
from grainmill._plan.random_access import PRACTICALLY_ENDLESS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._iterators.base.stage import Stage, State


class Length:
    """A number of elements, exact or at most.

    Attributes:
        count: The number; `None` if unknown.
        exact: Whether there are as many, not fewer.
    """

    __slots__ = ("count", "exact")

    def __init__(self, count: int | None, *, exact: bool = True) -> None:
        self.count = count
        self.exact = exact

    def __str__(self) -> str:
        if self.count is None:
            return "an unknown number of"
        if self.count >= PRACTICALLY_ENDLESS:
            return "endlessly many"
        return f"{self.count:,}" if self.exact else f"at most {self.count:,}"

    def by(self, change: Callable[[int], int], *, exact: bool = True) -> Length:
        """The length after a stage that changes the number by `change`."""
        if self.count is None:
            return self
        changed = self.count if self.count >= PRACTICALLY_ENDLESS else change(self.count)
        return Length(changed, exact=self.exact and exact)

    def at_most(self) -> Length:
        """The length after a stage that drops some."""
        return self.by(lambda n: n, exact=False)


UNKNOWN = Length(None)
CALLER = "on the caller's thread"
"""Where a stage runs that nothing runs elsewhere."""


class Origin(NamedTuple):
    """Consecutive elements of a plan with random access.

    Attributes:
        plan: The plan.
        first: The index of the first.
        last: The index of the last; `None` if that is unknown.
    """

    plan: MapNode
    first: int
    last: int | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SequentialNode(Node):
    """A step that a stage runs.

    Attributes:
        runner: The class of the stage that runs it, made with it and the stages of its parents;
            `None` if `open` makes it.
        saves: What a state has of it besides that of its parents; empty if nothing.
        is_native: Whether the engine computes its elements; otherwise Python does, or hands them
            on.
        keeps_length: Whether it has as many elements as its parent.
        starts_again: Whether it goes back to the start of its parent.
    """

    runner: ClassVar[type[Any] | None] = None
    saves: ClassVar[str]
    is_native: ClassVar[bool] = False
    keeps_length: ClassVar[bool]
    starts_again: ClassVar[bool] = False

    def open(self, context: Context) -> Stage:
        """Opens what runs it, and its parents, at the first element, if it has no `runner`."""
        raise NotImplementedError(f"{type(self).__name__} has neither `runner` nor `open`")

    @property
    def has_own_thread(self) -> bool:
        """Whether a thread of its own pulls from its parents."""
        return False

    @property
    def num_readers(self) -> int | None:
        """How many readers it has open at once; `None` for as many as its parents."""
        return None

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """The number of its elements, given those of its parents."""
        return parents[0] if self.keeps_length else UNKNOWN

    def place_of_parents(self, place: str) -> str:
        """Where its parents run, if it runs at `place`, in words."""
        return place

    def parent_state(self, state: State) -> State:
        """The parent's state in a state of it."""
        return state if self.parent_key is None else state[self.parent_key]

    def starts(self, state: State) -> list[Origin]:
        """The next element of each plan with random access that it reads, in `state`."""
        return starts(self.parent, self.parent_state(state))

    def origins(self, before: State, after: State) -> list[Origin]:
        """What its element between two of its states was computed from; empty if unknown."""
        raise NotImplementedError(f"{type(self).__name__} has no `origins`")


StageT = TypeVar("StageT", bound="type[Stage]")


def runs(node_type: type[SequentialNode]) -> Callable[[StageT], StageT]:
    """Makes a class of stages the `runner` of nodes of this type."""

    def register(stage_type: StageT) -> StageT:
        node_type.runner = stage_type
        return stage_type

    return register


class Passing(SequentialNode):
    """A step that hands on elements of its parent, or what it makes of each."""

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        return origins(self.parent, self.parent_state(before), self.parent_state(after))


class OneToOne(Passing):
    """A step each of whose elements is made of the parent's at the same place."""

    keeps_length = True


class Regrouping(SequentialNode):
    """A step that restarts from a state of its parent, and computes several elements again.

    Attributes:
        restarts_before: Whether that is the parent's state before an element, where the last of
            several was delivered; otherwise the one after it.
    """

    restarts_before: ClassVar[bool] = False

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`; only where they start is known."""
        return self.starts(before if self.restarts_before else after)


def starts(node: Node, state: State) -> list[Origin]:
    """See `SequentialNode.starts`."""
    return node.starts(state) if isinstance(node, SequentialNode) else []


def origins(node: Node, before: State, after: State) -> list[Origin]:
    """See `SequentialNode.origins`."""
    return node.origins(before, after) if isinstance(node, SequentialNode) else []


def counted(count: int, one: str, several: str) -> str:
    """Such as "2 threads"."""
    return f"{count} {one if count == 1 else several}"


def plan_of(dataset: Any) -> Node:
    """The plan of one of the datasets that a stage opens."""
    # `__getattr__` of ours is not called: `hasattr` would hide what a signal handler raises in it.
    asked = type(dataset) if hasattr(type(dataset), "_plan_node") else dataset
    if hasattr(asked, "to_iter_dataset"):
        dataset = dataset.to_iter_dataset()
    node: Node = dataset._plan_node()  # noqa: SLF001 - datasets share plans
    return node
