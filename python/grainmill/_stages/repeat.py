"""Repeats the elements of a stage for several epochs."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ClassVar, Self

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._interrupts import suppressed
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.cursor import CursorStage
from grainmill._iterators.base.node import Length, Passing, runs
from grainmill._iterators.base.position import Position, end_at, state_at
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.random_access import ENDLESS, checked_epochs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._iterators.base.stage import Block, Stage, State, StateAfter
    from grainmill._plan.node import Node


@lazy_dataclass
class Repeat(Passing):
    """The same epoch several times."""

    num_epochs: int | None
    dataset_name: ClassVar[str] = "RepeatIterDataset"
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the epoch"
    parent_key: ClassVar[str | None] = "parent"
    grows_by: ClassVar[str | None] = "num_epochs"
    keeps_length: ClassVar[bool] = False
    starts_again: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, num_epochs: int | None) -> Self:
        """A node that reads `parent` `num_epochs` times, endlessly if `None`."""
        return cls((parent,), checked_epochs(num_epochs))

    def _arguments(self) -> str:
        return f"(num_epochs={self.num_epochs})"

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        num_epochs = self.num_epochs
        return Length(ENDLESS) if num_epochs is None else parents[0].by(lambda n: n * num_epochs)


class RepeatIterDataset(PlannedIterDataset[T_co]):
    """Repeats the same epoch; each one starts from the parent's initial state.

    So all epochs have the same order and random numbers, unlike those of `MapDataset.repeat`. If an
    epoch is empty, the repetition ends.

    Args:
        parent: The dataset to read from.
        num_epochs: Number of epochs; infinite if `None`.

    Raises:
        ValueError: `num_epochs` is not positive.
        TypeError: `num_epochs` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(3).to_iter_dataset()
        >>> list(grain.experimental.RepeatIterDataset(ds, num_epochs=2))
        [0, 1, 2, 0, 1, 2]
    """

    def __init__(self, parent: AnyDataset[T_co], num_epochs: int | None = None) -> None:
        super().__init__(Repeat.of(node_of(parent), num_epochs), (parent,))


@runs(Repeat)
class RepeatStage(CursorStage):
    """Restores its parent to its initial state whenever it ends.

    An epoch without any element is the last one, since repeating it would never end.
    """

    def __init__(self, node: Repeat, parent: Stage) -> None:
        super().__init__(node, parent)
        self._num_epochs = node.num_epochs
        self._reset(0, empty=True)

    def _reset(self, epoch: int, *, empty: bool) -> None:
        self._epoch = epoch
        self._ended = self._num_epochs is not None and epoch >= self._num_epochs
        self._last: Block | None = None
        # The first end of an epoch since the last element: there is the state until the next one.
        self._before: tuple[Position, int] | None = None
        self._empty = empty  # whether nothing was seen of this epoch

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        initial = self._cursor.first_state()
        if self._last is not None and self._last.num_finished:
            self._empty, self._before = False, None
        while not self._ended:
            self._last = block = self._cursor.pull_block(limit)
            if block.elements:  # which may all be dropped
                return self._block(block)
            self._next_epoch(initial)
        end = end_at(self._cursor.position())
        return end.with_states(functools.partial(_state_after, end.state_after, self._epoch))

    def _block(self, block: Block) -> Block:
        before, after, epoch = self._before, block.state_after, self._epoch
        if before is None:
            return block.with_states(functools.partial(_state_after, after, epoch))
        return block.with_states(functools.partial(_state_from, before, after, epoch))

    def _next_epoch(self, initial: State) -> None:
        """Goes on to the next epoch, if there is one."""
        self._before = self._before or (self._cursor.position(), self._epoch)
        if self._empty:  # so would all others be; states at this end lead to it again
            self._epoch = self._before[1] if self._num_epochs is None else self._num_epochs
            self._ended = True
            return
        self._epoch += 1
        self._ended = self._epoch == self._num_epochs
        if not self._ended:
            self._cursor.restore(initial)
            self._empty = True

    def state(self) -> State:
        """See `Stage.state`."""
        return _state(self._cursor.state(), self._epoch)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "epoch"))
        maximum = sys.maxsize if self._num_epochs is None else self._num_epochs
        epoch = saved.index("epoch", maximum)
        initial = self._cursor.first_state()
        self._cursor.restore(saved["parent"])
        empty = False
        with suppressed():  # states of users may refuse to be compared
            empty = bool(saved["parent"] == initial)
        self._reset(epoch, empty=empty)


def _state(parent: State, epoch: int) -> State:
    return {"parent": parent, "epoch": epoch}


def _state_after(after: StateAfter, epoch: int, k: int) -> State:
    return _state(after(k), epoch)


def _state_from(before: tuple[Position, int], after: StateAfter, epoch: int, k: int) -> State:
    if k:
        return _state(after(k), epoch)
    last, last_epoch = before
    return _state(state_at(last), last_epoch)
