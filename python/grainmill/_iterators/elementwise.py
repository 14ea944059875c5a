"""Consecutive functions of one element: maps, random maps, maps with index, filters."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._evaluate.fused import Step
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.loops import lazy_functions
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.filter_thresholds import DropWatch
from grainmill._iterators.base.node import Length, OneToOne
from grainmill._iterators.base.stage import Block, Stage, State, StateAfter, num_after
from grainmill._iterators.notes import note_stage
from grainmill._iterators.open import open_node
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import transforms
from grainmill._plan.applying import Applying, Filtering, RandomApplying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._evaluate.loops import Passed
    from grainmill._iterators.base.stage import Finisher
    from grainmill._plan.node import Node, Share, StepKind
    from grainmill._plan.options import DatasetOptions
    from grainmill._stats.meters import StepTimes


@lazy_dataclass
class Map(Applying, OneToOne):
    """A function of every element except `None`, which stays.

    Attributes:
        step_kind: How it is called.
        counter_key: The key of the number of its input elements in a state, if it counts them.
    """

    dataset_name: ClassVar[str] = "MapIterDataset"
    step_kind: ClassVar[StepKind] = "map"
    counter_key: ClassVar[str | None] = None
    is_elementwise: ClassVar[bool] = True
    saves: ClassVar[str] = ""

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        nodes: list[Map] = []
        upstream: Node = self
        while upstream.is_setting or isinstance(upstream, Map):
            if isinstance(upstream, Map):
                nodes.append(upstream)
            upstream = upstream.parent
        nodes.reverse()
        return ElementwiseStage(open_node(upstream, context), nodes, context)


@lazy_dataclass
class MapWithIndex(Map):
    """A function of the element and its number, counted from 0 in this iterator."""

    dataset_name: ClassVar[str] = "MapWithIndexIterDataset"
    transform_kind: ClassVar[type] = transforms.MapWithIndex
    step_kind: ClassVar[StepKind] = "indexed"
    counter_key: ClassVar[str | None] = "counter"
    saves: ClassVar[str] = "the number of elements passed"
    parent_key: ClassVar[str | None] = "parent"


@lazy_dataclass
class Filter(Filtering, Map):
    """Drops the elements for which a predicate is false."""

    dataset_name: ClassVar[str] = "FilterIterDataset"
    step_kind: ClassVar[StepKind] = "filter"
    drops_elements: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        return parents[0].at_most()


@lazy_dataclass
class RandomMap(RandomApplying, Map):
    """A function of the element and a generator keyed by (`seed`, number of the element).

    Elements have the numbers `first_number`, `first_number + number_step`, ...: several workers
    that share the elements use the numbers that a single iterator would use.
    """

    first_number: int = 0
    number_step: int = 1
    dataset_name: ClassVar[str] = "RandomMapIterDataset"
    step_kind: ClassVar[StepKind] = "random"
    counter_key: ClassVar[str | None] = "index_for_rng"
    saves: ClassVar[str] = "the number of elements passed"
    parent_key: ClassVar[str | None] = "parent"

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return dataclasses.replace(
            self,
            parents=super().share(share).parents,
            first_number=self.first_number + self.number_step * share.worker,
            number_step=self.number_step * share.count,
        )


class ElementwiseStage(Stage):
    """Applies all functions to each of its parent's elements when it is requested.

    Maps pass `None` on as it is.
    """

    is_elementwise = True

    def __init__(self, parent: Stage, nodes: Sequence[Map], context: Context) -> None:
        super().__init__(parent)
        self._parent = parent
        self._meter = context.recorder.steps(nodes)
        self._times: StepTimes | None = None  # of the last block, if it is timed
        self._nodes = nodes
        self._parent_state_after: StateAfter | None = None  # of the parent's last block
        self._upstream_finisher: Finisher | None = None  # of that block, if it is lazy
        steps = [Step.of(node) for node in nodes]
        self._kinds = tuple(step.kind for step in steps)
        self._functions = [step.function for step in steps]
        self._generators = [step.generators for step in steps]
        self._numbering = [_numbering(node) for node in nodes]
        self._watches = [_watch(node, context.options) for node in nodes]
        self._drop_watches = [watch for watch in self._watches if watch is not None]
        self._counting = [(i, node.counter_key) for i, node in enumerate(nodes) if node.counter_key]
        self._tracks_positions = bool(self._drop_watches or self._counting)
        self._only_maps = self._bound([0] * len(steps), [[]] * len(steps), None)
        # Functions of whole blocks are called where nothing depends on the number of an element.
        has_blocks = any(step.block is not None for step in steps)
        self._blocks = BlockFused(steps) if has_blocks and not self._tracks_positions else None
        self._num_inputs = [0] * len(steps)  # inputs of each step before the last block
        self._last_len = 0
        self._last_dropped: Sequence[list[int] | None] = [None] * len(steps)
        self._all_dropped: list[int] | None = None  # by all filters up to the last

    def _bound(
        self,
        num_inputs: Sequence[int],
        dropped: Sequence[list[int] | None],
        upstream: Block | None,
    ) -> Any:
        """`Block.finish` and `Block.finish_many` of the block after `upstream`.

        Args:
            num_inputs: The inputs of each step before it.
            dropped: The places of the elements dropped up to each step, in order.
            upstream: The parent's block; `None` for any whose elements are ready.
        """
        times = self._times
        below = None if upstream is None else upstream.finish
        make = lazy_functions(self._kinds, over_lazy=below is not None, timed=times is not None)
        return make(
            self._functions,
            self._generators,
            [
                first + count * stride
                for count, (first, stride) in zip(num_inputs, self._numbering, strict=True)
            ],
            [stride for _, stride in self._numbering],
            self._watches,
            dropped,
            [] if upstream is None or upstream.dropped is None else upstream.dropped,
            below,
            *(() if times is None else (times.clock, times.of_steps, times.see)),
        )

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return self._parent.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        for watch in reversed(self._drop_watches):
            watch.raise_excess()
        self._parent_state_after = None  # else a user's iterator would have to save its state
        block = self._parent.pull(limit)
        self._parent_state_after = block.state_after
        self._upstream_finisher = block.finisher
        if self._meter.counts:
            self._count_last(len(block.elements))
        if self._times is not None:
            self._meter.finish()
        self._times = self._meter.starts(len(block.elements))
        if self._tracks_positions:
            return self._tracked(block)
        is_ready = block.finish is None
        if is_ready and self._times is None:
            block.finish, block.finish_many = self._only_maps
        else:
            block.finish, block.finish_many = self._bound(
                self._num_inputs, self._last_dropped, block
            )
        if self._blocks is not None and is_ready:
            block.finish_many = functools.partial(_finish_blocks, self._blocks, self._times)
        block.columns = None  # they hold what the functions have not been applied to
        block.finisher = self
        return block

    def _tracked(self, block: Block) -> Block:
        """`block`, the parent's next one, with the steps, some of which drop or count elements."""
        self._num_inputs = num_inputs = self._num_inputs_after(self._last_len)
        self._last_len = len(block.elements)
        # The elements dropped before each step: by upstream stages, or also by filters before it.
        dropped, before = [], block.dropped
        skipped_before: list[list[int] | None] = []
        for watch in self._watches:
            skipped_before.append(before)
            if watch is not None:
                before = []
            dropped.append(before)
        self._last_dropped = skipped_before
        self._all_dropped = before
        one, many = self._bound(num_inputs, dropped, block)
        state_after = self._states(block.state_after, num_inputs, skipped_before)
        lazy = Block(block.elements, state_after, one, before, many)
        lazy.finisher = self
        return lazy

    def _count_last(self, next_len: int) -> None:
        """Counts the elements of the last block, all of which are finished."""
        if not self._tracks_positions:
            self._meter.count([self._last_len] * len(self._kinds))
            self._last_len = next_len
            return
        after = self._num_inputs_after(self._last_len)
        inputs = [then - before for then, before in zip(after, self._num_inputs, strict=True)]
        finished = num_after(0, self._all_dropped, self._last_len)
        following = [*inputs[1:], finished]
        self._meter.count(
            count if watch is None else kept
            for count, kept, watch in zip(inputs, following, self._watches, strict=True)
        )

    def note(self, failure: BaseException, at: int, passed: Sequence[Passed]) -> None:
        """See `Finisher.note`."""
        if not passed:
            return
        state_after = self._parent_state_after
        if passed[0].step is None:
            if self._upstream_finisher is not None:
                self._upstream_finisher.note(failure, at, passed[1:])
        elif state_after is not None:
            node, upstream = self._nodes[passed[0].step], self._nodes[0].parent
            note_stage(failure, node, (state_after, at), (state_after, at + 1), upstream)

    def _num_inputs_after(self, count: int) -> list[int]:
        """The number of inputs of each step after `count` raw elements of the last block."""
        return [
            num_after(num_inputs, dropped, count)
            for num_inputs, dropped in zip(self._num_inputs, self._last_dropped, strict=True)
        ]

    def _states(
        self, after: StateAfter, num_inputs: list[int], dropped: Sequence[list[int] | None]
    ) -> StateAfter:
        if not self._counting:
            return after
        counting = [(key, num_inputs[i], dropped[i]) for i, key in self._counting]
        return functools.partial(_state_after, after, counting)

    def state(self) -> State:
        """See `Stage.state`."""
        num_inputs = self._num_inputs_after(self._last_len)
        nothing: list[list[int] | None] = [None] * len(num_inputs)
        return self._states(lambda _: self._parent.state(), num_inputs, nothing)(0)

    def _reset(self, num_inputs: list[int]) -> None:
        self._num_inputs = num_inputs
        self._last_len = 0
        for watch in self._drop_watches:
            watch.excess = None

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        num_inputs = [0] * len(self._num_inputs)
        for i, key in reversed(self._counting):
            saved = CheckedState(self._nodes[i], state, ("parent", key))
            num_inputs[i] = saved.index(key)
            state = saved["parent"]
        self._parent.restore(state)
        self._reset(num_inputs)

    @property
    def iterator_name(self) -> str:
        """See `Stage.iterator_name`; filters are why the stage has no index."""
        return "FilterDatasetIterator"

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return super().next_index() if self._drop_watches else self._parent.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        if self._drop_watches:
            super().seek(index)
        self._parent.seek(index)
        self._reset([index] * len(self._num_inputs))


def _numbering(node: Map) -> tuple[int, int]:
    """The number of the first element, and the difference between those of consecutive ones."""
    return (node.first_number, node.number_step) if isinstance(node, RandomMap) else (0, 1)


def _watch(node: Map, options: DatasetOptions) -> DropWatch | None:
    """What counts the elements that `node` drops, if it is a filter."""
    if not isinstance(node, Filter):
        return None
    name = f"FilterDatasetIterator{str(node).removeprefix(node.dataset_name)}"
    return DropWatch(name, options)


def _finish_blocks(
    loop: BlockFused,
    times: StepTimes | None,
    elements: Sequence[Any],
    at: int,  # noqa: ARG001 - maps do not depend on the element's number
    append: Callable[[Any], None],
) -> None:
    """`Block.finish_many`."""
    result = loop(elements) if times is None else loop.timed(elements, times)
    for element in result.elements:
        append(element)
    if result.failure is not None:
        raise result.failure


def _state_after(
    after: StateAfter, counting: list[tuple[str, int, list[int] | None]], count: int
) -> State:
    state = after(count)
    for key, before, dropped in counting:
        state = {"parent": state, key: num_after(before, dropped, count)}
    return state
