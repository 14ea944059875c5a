"""The interface of all sequential stages: elements in blocks, with a state after each element."""

from __future__ import annotations

import abc
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias

from grainmill._evaluate.evaluated import SKIPPED, Evaluated, evaluated
from grainmill._evaluate.loops import passed_by
from grainmill._interrupts import is_interrupt, suppressed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.loops import Passed
    from grainmill._plan.node import Node
    from grainmill._stats.meters import Recorder
    from grainmill._stats.stalls import Awaited

State: TypeAlias = dict[str, Any]
StateAfter: TypeAlias = "Callable[[int], State]"
Finish: TypeAlias = "Callable[[Any, int], Any]"
FinishMany: TypeAlias = "Callable[[Sequence[Any], int, Callable[[Any], None]], None]"


class Finisher(Protocol):
    """A stage whose functions finish the elements of a block."""

    def note(self, failure: BaseException, at: int, passed: Sequence[Passed]) -> None:
        """Adds the origin of the element at `at` to `failure` as a note.

        Args:
            failure: What a function raised.
            at: The element's index in the block.
            passed: The generated code that `failure` passed through, this stage's first.
        """


class Block:
    """Consecutive elements, and the state to save for resuming after any of them.

    Elements of a *lazy* block are raw: the consumer calls `finish` for each one, in order and once,
    when it is requested. This runs the user's functions, which may filter out the element.

    Attributes:
        elements: The elements, in order; empty at the end of the data.
        state_after: Maps `k`, from 0 to `len(elements)`, to the state of the stage once
            the first `k` elements are delivered. It may be called at any later time and
            returns a new dict each time; in a lazy block, `k` must not exceed the number of
            elements finished. It can be pickled and holds no elements: workers send it instead of
            states.
        finish: Computes an element from a raw one and its index in the block, or returns `SKIPPED`;
            `None` where elements are ready.
        finish_many: Does so for consecutive raw elements, given the index of the first, and appends
            the results; `None` where that is no faster.
        dropped: The indices of the raw elements that were skipped so far, in order; `None` where
            none can be skipped.
        columns: Arrays by key, where the raw elements are row numbers in these; otherwise `None`.
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
        state_after: StateAfter,
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
        """How many elements were not skipped, once all are finished."""
        return num_after(0, self.dropped, len(self.elements))

    def with_states(self, state_after: StateAfter) -> Block:
        """The same elements, with the states of a stage that passes them on."""
        rest = self.finish, self.dropped, self.finish_many
        block = Block(self.elements, state_after, *rest, columns=self.columns)
        block.finisher = self.finisher
        return block

    def note(self, failure: BaseException, at: int) -> None:
        """Adds the origin of the element at `at` to `failure`, which computing it raised."""
        if self.finisher is not None and not is_interrupt(failure):
            with suppressed():
                self.finisher.note(failure, at, passed_by(failure))

    def finished(self, start: int, count: int) -> Evaluated:
        """The results of `count` raw elements from `start` on, up to a failure."""
        raw = self.elements[start : start + count]
        finish, finish_many = self.finish, self.finish_many
        if finish is None:
            return Evaluated(raw, None)
        if finish_many is not None:
            return evaluated(finish_many, raw, start)

        def one_by_one(raw: list[Any], at: int, append: Callable[[Any], None]) -> None:
            for index, raw_element in enumerate(raw, at):
                element = finish(raw_element, index)
                if element is not SKIPPED:
                    append(element)

        return evaluated(one_by_one, raw, start)


def num_after(before: int, dropped: list[int] | None, k: int) -> int:
    """How many elements there are after the first `k` raw ones of a block, `before` before it."""
    return before + k - (bisect_left(dropped, k) if dropped else 0)


def _no_state(_: int) -> State:
    raise AssertionError("there is no block")


NO_BLOCK: Final = Block([], _no_state)
"""What stands where there is no block: it has no elements, and no state."""


class Stage(abc.ABC):
    """One sequential step of a running pipeline.

    `pull` and `Block.finish` raise a user's exception with the stage in its state before the
    element that caused it: elements computed before are delivered first, and the next call
    computes the same element again. No element is lost, and the iterator does not end early.

    Attributes:
        parents: The stages that this one pulls from.
        moves_start: Whether `state` no longer returns the state at the start once an element is
            being pulled, so that it may have to be read before.
        node: The node that it runs, the last one of several; `None` if it has none.
        recorder: Takes the times of that node, if it is set.
        is_elementwise: Whether its own times are taken where elements of lazy blocks are finished.
        has_own_thread: Whether another thread pulls from its parents.
        packs: Whether it joins elements into rows, and runs no code of a user.
        pull_size: How many elements to pull when one is requested: those that are computed
            together.
    """

    moves_start: ClassVar[bool] = True
    packs: ClassVar[bool] = False
    pull_size = 1
    node: Node | None = None
    recorder: Recorder | None = None
    is_elementwise = False
    has_own_thread = False

    def __init__(self, *parents: Stage) -> None:
        self.parents = parents

    @abc.abstractmethod
    def pull(self, limit: int) -> Block:
        """Returns the next elements; all those of the previous block must be finished.

        Args:
            limit: The maximum number of elements, at least 1.

        Returns:
            A block of 1 to `limit` elements; an empty one at the end, and at each further call
            until `restore`.
        """

    @abc.abstractmethod
    def state(self) -> State:
        """The state after all elements pulled so far, a new dict each time."""

    @abc.abstractmethod
    def restore(self, state: State) -> None:
        """Continues where `state` was taken; does not modify `state`."""

    def next_index(self) -> int:
        """The index of the next element, where elements have one."""
        raise NotImplementedError(f"get_next_index is not supported for {self.iterator_name}.")

    def seek(self, index: int) -> None:
        """Makes `index` the next element, where elements have an index."""
        raise NotImplementedError(f"set_next_index is not supported for {self.iterator_name}.")

    @property
    def iterator_name(self) -> str:
        """The name of the stage in messages."""
        return type(self).__name__.replace("Stage", "DatasetIterator")

    def awaited(self) -> Awaited | None:
        """What the thread in `pull` waits for or computes, where the readers upstream can tell."""
        found = [each for parent in self.parents if (each := parent.awaited()) is not None]
        return found[0] if len(found) == 1 else None

    def start_prefetch(self) -> None:
        """Starts prefetching in the nearest upstream stages that can."""
        for parent in self.parents:
            parent.start_prefetch()

    def cancel(self) -> None:
        """Stops threads and processes, and makes a `pull` that waits for them raise `ValueError`.

        Any thread may call it at any time before `close`. It does not block. Stages that are
        opened later must be cancelled by the stage that opens them.
        """
        for parent in self.parents:
            parent.cancel()

    def close(self) -> None:
        """Releases threads and files; safe to call again."""
        for parent in self.parents:
            parent.close()
