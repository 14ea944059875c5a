"""A random-access plan read from its first element to its last."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate.ahead import Blocks, EngineBlocks, InlineBlocks, ThreadBlocks
from grainmill._evaluate.processes import ProcessBlocks
from grainmill._evaluate.program import Program
from grainmill._evaluate.rows import StackedRows
from grainmill._iterators.drops import DropWatch
from grainmill._iterators.stage import Block, Stage, State
from grainmill._plan.random_access import random_access
from grainmill._workers.pool import threads_take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from grainmill._evaluate.ahead import Demand
    from grainmill._plan import sequential as plan
    from grainmill._plan.options import DatasetOptions


class WholeBatches(NamedTuple):
    """Consecutive batches that were made in one piece.

    Attributes:
        batches: At least one.
        batch_size: Elements in each: those wanted, or those left at the end, in one alone.
        before: The index that the parent stood at before them.
        after: The index after their last element.
    """

    batches: list[Any]
    batch_size: int
    before: int
    after: int


class ReadStage(Stage):
    """Elements `0, 1, ...` of the plan above; those that are `None` are left out."""

    def __init__(self, node: plan.Read, options: DatasetOptions) -> None:
        super().__init__()
        self._length = random_access(node.parent).length
        self._allow_nones = node.allow_nones
        self._program = Program(node.parent)
        self._numbers_only = self._program.gives_numbers
        self._blocks = _blocks(self._program, self._length, node)
        self._burst = max(1, node.options.prefetch_buffer_size // 2)
        name = f"PrefetchDatasetIterator{str(node).removeprefix(node.dataset_name)}"
        self._drops = DropWatch(name, options)
        self._made: list[Any] | StackedRows = []
        self._at = 0
        self._num_skipped = 0  # left out since the last element that was pulled
        self._failure: BaseException | None = None

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return self._burst

    def _standing(self) -> int:
        """Where the next element is looked for, however far that was done already."""
        return self._position() - self._num_skipped

    def _position(self) -> int:
        return self._blocks.position - len(self._made) + self._at

    def expect_batches(self, batch_size: int) -> None:
        """Has elements made as batches where that is possible; `pull_batches` gives them."""
        self._blocks.batch_size = batch_size

    @property
    def has_threads(self) -> bool:
        """Whether user functions run on threads."""
        return isinstance(self._blocks, ThreadBlocks)

    def run_for(self, demand: Demand) -> None:
        """Has the thread that pulls run user functions itself, as the first of their threads."""
        if isinstance(self._blocks, ThreadBlocks):
            self._blocks.demand = demand

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        before = self._standing()
        while True:
            if self._at >= len(self._made):
                self._refill(limit)
            if isinstance(self._made, StackedRows):
                self._unstack()
                continue
            if not self._made:
                self._num_skipped = 0
                return Block([], _at(self._position()))
            start = self._position()
            part = self._made[self._at : self._at + limit] if self._at else self._made[:limit]
            self._at += len(part)
            if self._at == len(self._made):  # what is handed on is not held on to
                self._made, self._at = [], 0
            block = self._kept(part, start, before)
            if block.elements:
                return block

    def _refill(self, limit: int) -> None:
        if self._failure is not None:
            raised, self._failure = self._failure, None
            raise raised
        self._made, self._at = [], 0
        made = self._blocks.take(limit)
        if isinstance(made, StackedRows):
            self._made = made
            return
        self._made, failure = made
        if failure is not None and not self._made:
            raise failure
        self._failure = failure

    def _kept(self, part: list[Any], start: int, before: int) -> Block:
        if self._allow_nones or not self._program.runs_user_code:
            return Block(part, _at(start))
        kept = [element for element in part if element is not None]
        if len(kept) == len(part):
            self._drops.kept_only(len(part))
            self._num_skipped = 0
            return Block(part, lambda k: {"next_index": start + k if k else before})
        self._blocks.batch_size = 0  # batches no longer begin at multiples
        verdicts = [element is not None for element in part]
        excess = self._drops.first_excess(verdicts)
        if excess is not None:
            seen, failure = excess
            self._failure = failure
            self._cut(len(part) - seen)
            part, verdicts = part[:seen], verdicts[:seen]
            kept = [element for element in part if element is not None]
            if not kept:
                self._failure = None
                self._num_skipped = 0
                raise failure
        after = [start + place + 1 for place, keep in enumerate(verdicts) if keep]
        self._num_skipped = self._position() - (after[-1] if after else before)
        return Block(kept, lambda k: {"next_index": after[k - 1] if k else before})

    def _cut(self, count: int) -> None:
        """Un-makes the last `count` elements taken and all beyond, behind a failure."""
        position = self._position() - count
        self._made, self._at = [], 0
        self._blocks.rewind(position)

    @property
    def num_ready_batches(self) -> int:
        """How many batches `pull_batches` has at hand, as far as is known."""
        return len(self._blocks.ready)

    def pull_batches(self, batch_size: int, limit: int) -> WholeBatches | None:
        """The next elements, up to `limit * batch_size`, as batches if that is how they come."""
        blocks = self._blocks
        before = blocks.position - len(self._made) + self._at - self._num_skipped
        if self._numbers_only:
            numbers = self._pull_numbers(batch_size)
            if numbers is not None:
                return WholeBatches([numbers], len(numbers), before, blocks.position)
        batches: list[Any] = []
        count = 0
        while not batches or (blocks.ready and len(batches) < limit):
            if self._at >= len(self._made):
                self._refill(batch_size)
            made = self._made
            if self._at or not isinstance(made, StackedRows):
                break
            is_last = made.count < batch_size and blocks.position == self._length
            if made.count != batch_size and (batches or not is_last):
                break
            batches.append(made.batch)
            count = made.count
            self._made, self._at, self._num_skipped = [], 0, 0
        if not batches:
            return None
        self._drops.kept_only(count * len(batches))
        return WholeBatches(batches, count, before, blocks.position - len(self._made))

    def _unstack(self) -> None:
        """Takes a batch apart that is not one here, and has no more of them made."""
        self._blocks.batch_size = 0
        rows, self._made = self._made, []
        if isinstance(rows, StackedRows):
            start = self._blocks.position - len(rows)
            self._blocks.rewind(self._blocks.position if rows.exact else start)
            self._made = rows.elements() if rows.exact else []

    def _pull_numbers(self, count: int) -> np.ndarray[Any, Any] | None:
        """The next `count` elements, or those left, as an array."""
        if self._at < len(self._made):
            return None
        at = self._blocks.position
        numbers = self._program.numbers(at, min(count, self._length - at))
        if numbers is not None:
            self._made, self._at, self._num_skipped = [], 0, 0
            self._blocks.restart(at + len(numbers))
        return numbers

    def state(self) -> State:
        """See `Stage.state`."""
        return {"next_index": self._standing()}

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self.seek(state["next_index"])

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._standing()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        if not 0 <= index <= self._length:
            raise IndexError(
                f"Checkpoint `next_index` {index} is out of range for dataset of length "
                f"{self._length}."
            )
        self._made, self._at, self._failure = [], 0, None
        self._num_skipped = 0
        self._blocks.restart(index)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        self._blocks.start()

    def close(self) -> None:
        """See `Stage.close`."""
        self._made, self._at = [], 0
        self._blocks.close()


def _at(start: int) -> Callable[[int], State]:
    return lambda k: {"next_index": start + k}


_ahead_allowed = [True]


def make_nothing_ahead() -> None:
    """Has every plan that is opened in this process from now on make what is asked for alone.

    What a later element does to the process then can not cost an earlier one.
    """
    _ahead_allowed[0] = False


def _blocks(program: Program, length: int, node: plan.Read) -> Blocks:
    options = node.options
    if not _ahead_allowed[0]:
        return InlineBlocks(program, length, 0)
    if options.num_workers and program.runs_user_code:
        if threads_take_turns():
            return ProcessBlocks(program, length, node)
        options = dataclasses.replace(options, num_threads=options.num_workers)
    if not options.num_threads or not options.prefetch_buffer_size:
        return InlineBlocks(program, length, options.prefetch_buffer_size)
    if program.runs_user_code:
        return ThreadBlocks(program, length, options)
    if program.mean_byte_len:
        return EngineBlocks(program, length, options.prefetch_buffer_size)
    return InlineBlocks(program, length, options.prefetch_buffer_size)
