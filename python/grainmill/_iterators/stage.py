"""What every sequential stage offers: elements by blocks, and the state at each of them."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from grainmill._evaluate.fuse import SKIPPED, Evaluated, evaluated, passed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.fuse import Passed
    from grainmill._plan.node import Node

State: TypeAlias = dict[str, Any]
After: TypeAlias = "Callable[[int], State]"
Finish: TypeAlias = "Callable[[Any, int], Any]"
FinishMany: TypeAlias = "Callable[[Sequence[Any], int, Callable[[Any], None]], None]"


class Finisher(Protocol):
    """A stage whose functions finish the elements of a block."""

    def note(self, failure: BaseException, at: int, passed: Sequence[Passed]) -> None:
        """Notes where the element at `at` comes from; `passed` begins with the stage's code."""


class Block:
    """Consecutive elements, and what must be saved to continue after any of them.

    Elements of a *lazy* block are raw: a user's function has yet to be called for each, which is
    done when it is asked for, in order and once each. A raw element may turn out not to be one.

    Attributes:
        elements: The elements, in order; empty at the end of the data.
        state_after: Maps `k`, from 0 to `len(elements)`, to the state of the stage once
            the first `k` elements are delivered. It may be called at any later time and
            gives a new dict each time; in a lazy block, for no `k` beyond the elements finished.
            It can be pickled and holds no elements: workers send it in place of states.
        finish: Makes an element of a raw one, given that and its place in the block, or returns
            `SKIPPED`; `None` where elements are ready.
        finish_many: Does so for consecutive raw elements from a place on, and appends what comes
            out; `None` where that is no faster.
        dropped: The places of the raw elements that were skipped so far, in order, if any can be.
        columns: Arrays of which the raw elements are the numbers of rows, by the keys of an
            element, if that is how it comes.
        finisher: The stage whose functions finish the elements, if they are a user's.
    """

    __slots__ = (
        "columns",
        "dropped",
        "elements",
        "finish",
        "finish_many",
        "finisher",
        "state_after",
    )

    def __init__(
        self,
        elements: list[Any],
        state_after: After,
        finish: Finish | None = None,
        dropped: list[int] | None = None,
        finish_many: FinishMany | None = None,
        *,
        columns: dict[str, Any] | None = None,
    ) -> None:
        self.elements = elements
        self.state_after = state_after
        self.finish = finish
        self.dropped = dropped
        self.finish_many = finish_many
        self.columns = columns
        self.finisher: Finisher | None = None

    @property
    def num_finished(self) -> int:
        """How many elements came out, once all were finished."""
        return len(self.elements) - (len(self.dropped) if self.dropped else 0)

    def with_states(self, state_after: After) -> Block:
        """The same elements, with the states of a stage that hands them on."""
        more = self.finish, self.dropped, self.finish_many
        block = Block(self.elements, state_after, *more, columns=self.columns)
        block.finisher = self.finisher
        return block

    def note(self, failure: BaseException, at: int) -> None:
        """Notes on `failure`, which the element at `at` raised, where that comes from."""
        if self.finisher is not None:
            with contextlib.suppress(Exception):
                self.finisher.note(failure, at, passed_by(failure))

    def finished(self, start: int, count: int) -> Evaluated:
        """What comes out of `count` raw elements from `start` on, up to a failure."""
        raw = self.elements[start : start + count]
        finish, finish_many = self.finish, self.finish_many
        if finish is None:
            return Evaluated(raw, None)
        if finish_many is not None:
            return evaluated(finish_many, raw, start)

        def one_by_one(raw: list[Any], at: int, append: Callable[[Any], None]) -> None:
            for place, element in enumerate(raw, at):
                made = finish(element, place)
                if made is not SKIPPED:
                    append(made)

        return evaluated(one_by_one, raw, start)


RUNNERS: Final[dict[type[Node], Callable[[Any, Stage], Stage]]] = {}
"""What runs each node that has one parent, where nothing else has to be known; see `runs`."""

_StageT = TypeVar("_StageT", bound="type[Stage]")


def runs(node_type: type[Node]) -> Callable[[_StageT], _StageT]:
    """Marks the stage class that runs nodes of this type: it is called with one and its parent."""

    def mark(stage_type: _StageT) -> _StageT:
        RUNNERS[node_type] = stage_type
        return stage_type

    return mark


class Stage(abc.ABC):
    """One sequential step of a running pipeline.

    A user's exception leaves through `pull`, or through `Block.finish`, with the stage as it was
    before the element that caused it, so that elements made before are delivered first and a
    further attempt meets the same element again. Nothing is lost and the end is not pretended.

    Attributes:
        parents: The stages it pulls from.
    """

    def __init__(self, *parents: Stage) -> None:
        self.parents = parents

    @property
    def pull_size(self) -> int:
        """How many elements to pull where one is asked for: those that are made anyway."""
        return 1

    @abc.abstractmethod
    def pull(self, limit: int) -> Block:
        """Returns the next elements, after those of the block before were all finished.

        Args:
            limit: The most elements to return, at least 1.

        Returns:
            A block of 1 to `limit` elements, or an empty one at the end, then and ever
            after until `restore`.
        """

    @abc.abstractmethod
    def state(self) -> State:
        """The state after all elements pulled so far, a new dict each time."""

    @abc.abstractmethod
    def restore(self, state: State) -> None:
        """Continues where `state` was taken; `state` is left as it is."""

    def next_index(self) -> int:
        """The index of the next element, where elements have one."""
        raise NotImplementedError(f"get_next_index is not supported for {self.iterator_name}.")

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        raise NotImplementedError(f"set_next_index is not supported for {self.iterator_name}.")

    @property
    def iterator_name(self) -> str:
        """What the stage is called in messages."""
        return type(self).__name__.replace("Stage", "DatasetIterator")

    def start_prefetch(self) -> None:
        """Starts what can be made ahead, up to the nearest stage that does so."""
        for parent in self.parents:
            parent.start_prefetch()

    def cancel(self) -> None:
        """Has threads and processes end, and a `pull` that waits for them raise `ValueError`.

        Any thread may call it, at any time, before whoever moves the stage closes it. It waits
        for nothing. Parts that are opened later are cancelled by those who open them.
        """
        for parent in self.parents:
            parent.cancel()

    def close(self) -> None:
        """Gives back threads and files; safe to call again."""
        for parent in self.parents:
            parent.close()
