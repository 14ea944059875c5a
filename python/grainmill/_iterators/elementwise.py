"""Consecutive functions of one element: maps, random maps, maps with index, filters."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from grainmill._evaluate.fuse import Kind, finisher
from grainmill._evaluate.fuse import Step as FusedStep
from grainmill._evaluate.fuse_blocks import BlockFused, Timing
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._iterators.drops import DropWatch
from grainmill._iterators.node import Length, OneToOne
from grainmill._iterators.notes import note_stage
from grainmill._iterators.open import open_node
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State, StateAfter
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import transforms
from grainmill._plan.node import Share, block_function, function_of, transform_name
from grainmill._plan.random_access import random_map_seed
from grainmill._plan.spec import map_spec
from grainmill._stats.meters import both_clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._evaluate.fuse import Passed
    from grainmill._iterators.stage import Finisher
    from grainmill._plan.node import Node
    from grainmill._plan.options import DatasetOptions
    from grainmill._stats.meters import BlockTimes, StepsMeter


@lazy_dataclass
class Map(OneToOne):
    """A function of every element except `None`, which stays."""

    transform: Any
    function: Callable[..., Any]
    dataset_name: ClassVar[str] = "MapIterDataset"
    is_elementwise: ClassVar[bool] = True
    runs_users_code: ClassVar[bool] = True
    saves: ClassVar[str] = ""

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that maps elements of `parent`."""
        return cls((parent,), transform, function_of(transform, transforms.Map, "map"))

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return map_spec(self.transform, lambda: spec_of(self.parent))

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        nodes: list[Map] = []
        upstream: Node = self
        while upstream.is_setting or isinstance(upstream, Map):
            if isinstance(upstream, Map):
                nodes.append(upstream)
            upstream = upstream.parent
        nodes.reverse()
        steps = [Step.of(each, context.options) for each in nodes]
        recorder = context.recorder
        return ElementwiseStage(open_node(upstream, context), steps, recorder.steps(nodes))


@lazy_dataclass
class MapWithIndex(Map):
    """A function of the element and its number, counted from 0 in this iterator."""

    dataset_name: ClassVar[str] = "MapWithIndexIterDataset"
    saves: ClassVar[str] = "the number of elements passed"
    parent_key: ClassVar[str | None] = "parent"

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that maps (number, element) pairs of `parent`."""
        function = function_of(transform, transforms.MapWithIndex, "map_with_index")
        return cls((parent,), transform, function)


@lazy_dataclass
class Filter(Map):
    """Drops the elements for which a predicate is false."""

    dataset_name: ClassVar[str] = "FilterIterDataset"
    drops_elements: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return spec_of(self.parent)

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that keeps the elements of `parent` for which `transform` is true."""
        return cls((parent,), transform, function_of(transform, transforms.Filter, "filter"))

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        return parents[0].at_most()


@lazy_dataclass
class RandomMap(Map):
    """A function of the element and a generator keyed by (`seed`, number of the element).

    Elements have the numbers `first_number`, `first_number + number_step`, ...: several workers
    that share the elements use the numbers that a single iterator would use.
    """

    seed: int
    first_number: int = 0
    number_step: int = 1
    dataset_name: ClassVar[str] = "RandomMapIterDataset"
    saves: ClassVar[str] = "the number of elements passed"
    parent_key: ClassVar[str | None] = "parent"

    @classmethod
    def of(cls, parent: Node, transform: Any, seed: int | None) -> Self:  # type: ignore[override]
        """A node that maps elements of `parent` with random numbers."""
        function = function_of(transform, transforms.RandomMap, "random_map")
        node = cls((parent,), transform, function, -1)
        return dataclasses.replace(node, seed=random_map_seed(node, seed))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return dataclasses.replace(
            self,
            parents=super().share(share).parents,
            first_number=self.first_number + self.number_step * share.worker,
            number_step=self.number_step * share.count,
        )


class Step(NamedTuple):
    """One of the functions.

    Attributes:
        kind: How it is called.
        function: The user's function.
        node: The node that describes it.
        state_key: The key of its number of input elements in a state, if it counts them.
        generators: The generators of a random map.
        first: The number of its first element, if it counts them.
        stride: The difference between the numbers of consecutive elements.
        watch: Counts the elements that a filter drops.
    """

    kind: Kind
    function: Callable[..., Any]
    node: Map
    state_key: str | None = None
    generators: IndexedGenerators | None = None
    first: int = 0
    stride: int = 1
    watch: DropWatch | None = None

    @classmethod
    def of(cls, node: Map, options: DatasetOptions) -> Step:
        """The step that `node` describes."""
        if isinstance(node, RandomMap):
            generators = IndexedGenerators(node.seed)
            first, stride = node.first_number, node.number_step
            return cls("random", node.function, node, "index_for_rng", generators, first, stride)
        if isinstance(node, MapWithIndex):
            return cls("indexed", node.function, node, "counter")
        if isinstance(node, Filter):
            name = f"FilterDatasetIterator{str(node).removeprefix(node.dataset_name)}"
            return cls("test", node.function, node, watch=DropWatch(name, options))
        return cls("map", node.function, node)


class ElementwiseStage(Stage):
    """Applies all functions to each of its parent's elements when it is requested.

    Maps pass `None` on as it is.
    """

    is_elementwise = True

    def __init__(self, parent: Stage, steps: Sequence[Step], meter: StepsMeter) -> None:
        super().__init__(parent)
        self._parent = parent
        self._meter = meter
        self._times: BlockTimes | None = None  # of the last block, if it is timed
        self._nodes = [step.node for step in steps]
        self._parent_state_after: StateAfter | None = None  # of the parent's last block
        self._upstream_finisher: Finisher | None = None  # of that block, if it is lazy
        self._functions = [step.function for step in steps]
        self._generators = [step.generators for step in steps]
        self._firsts = [step.first for step in steps]
        self._strides = [step.stride for step in steps]
        self._watches = [step.watch for step in steps]
        self._filters = [i for i, step in enumerate(steps) if step.watch is not None]
        self._counting = [(i, step.state_key) for i, step in enumerate(steps) if step.state_key]
        self._tracks_positions = bool(self._filters or self._counting)
        self._kinds = kinds = tuple(step.kind for step in steps)
        self._over_ready = finisher(kinds, over_lazy=False)
        self._over_lazy = finisher(kinds, over_lazy=True)
        self._only_maps = self._bind(self._over_ready, [0] * len(steps), [[]] * len(steps), None)
        # Functions of whole blocks are called where nothing depends on the number of an element.
        self._blocks = None if self._tracks_positions else _block_loop(steps)
        self._num_inputs = [0] * len(steps)  # inputs of each step before the last block
        self._last_len = 0
        self._last_dropped: Sequence[list[int] | None] = [None] * len(steps)
        self._all_dropped: list[int] | None = None  # by all filters up to the last

    def _bind(
        self,
        make: Callable[..., Any],
        num_inputs: list[int],
        dropped: Sequence[list[int] | None],
        upstream: Block | None,
    ) -> Any:
        times = self._times
        if times is not None:
            is_lazy = upstream is not None and upstream.finish is not None
            make = finisher(self._kinds, over_lazy=is_lazy, timed=True)
        numbers = [
            first + count * stride
            for first, count, stride in zip(self._firsts, num_inputs, self._strides, strict=True)
        ]
        return make(
            self._functions,
            self._generators,
            numbers,
            self._strides,
            self._watches,
            dropped,
            [] if upstream is None or upstream.dropped is None else upstream.dropped,
            upstream.finish if upstream is not None else None,
            *(() if times is None else (both_clocks, times.of_steps, times.see)),
        )

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return self._parent.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        for i in reversed(self._filters):
            watch = self._watches[i]
            if watch is not None and watch.excess is not None:
                watch.raise_excess()
        self._parent_state_after = None  # else a user's iterator would have to save its state
        block = self._parent.pull(limit)
        self._parent_state_after = block.state_after
        if self._meter.counts:
            self._count_last(len(block.elements))
        if self._times is not None:
            self._meter.finish()
        self._times = self._meter.starts(len(block.elements))
        if not self._tracks_positions:
            if block.finish is None and self._times is None:
                block.finish, block.finish_many = self._only_maps
                if self._blocks is not None:
                    block.finish_many = functools.partial(_finish_blocks, self._blocks, None)
            else:
                self._upstream_finisher = block.finisher
                is_ready = block.finish is None
                block.finish, block.finish_many = self._bind(
                    self._over_lazy, self._num_inputs, self._last_dropped, block
                )
                if self._blocks is not None and is_ready:
                    block.finish_many = functools.partial(_finish_blocks, self._blocks, self._times)
            block.columns = None  # they hold what the functions have not been applied to
            block.finisher = self
            return block
        self._upstream_finisher = block.finisher
        self._num_inputs = num_inputs = self._num_inputs_after(self._last_len)
        self._last_len = len(block.elements)
        # The elements dropped before each step: by upstream stages, or also by filters before it.
        dropped, before = [], block.dropped
        skipped_before: list[list[int] | None] = []
        for i in range(len(num_inputs)):
            skipped_before.append(before)
            if i in self._filters:
                before = []
            dropped.append(before)
        self._last_dropped = skipped_before
        self._all_dropped = before
        over = self._over_ready if block.finish is None else self._over_lazy
        one, many = self._bind(over, num_inputs, dropped, block)
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
        finished = _num_inputs_after(0, self._all_dropped, self._last_len)
        following = [*inputs[1:], finished]
        is_test = [kind == "test" for kind in self._kinds]
        outputs = [f if test else i for i, f, test in zip(inputs, following, is_test, strict=True)]
        self._meter.count(outputs)

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
            _num_inputs_after(num_inputs, dropped, count)
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
        for i in self._filters:
            watch = self._watches[i]
            if watch is not None:
                watch.excess = None

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        num_inputs = [0] * len(self._num_inputs)
        for i, key in reversed(self._counting):
            saved = Saved(self._nodes[i], state, ("parent", key))
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
        return super().next_index() if self._filters else self._parent.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        if self._filters:
            super().seek(index)
        self._parent.seek(index)
        self._reset([index] * len(self._num_inputs))


def _block_loop(steps: Sequence[Step]) -> BlockFused | None:
    """The loop that calls functions of whole blocks, if users offer any."""
    fused = [
        FusedStep("map", step.function, block=block_function(step.node.transform)) for step in steps
    ]
    return BlockFused(fused) if any(step.block is not None for step in fused) else None


def _finish_blocks(
    loop: BlockFused,
    times: BlockTimes | None,
    elements: Sequence[Any],
    at: int,  # noqa: ARG001 - maps do not depend on the element's number
    append: Callable[[Any], None],
) -> None:
    """`Block.finish_many`."""
    if times is None:
        result = loop(elements)
    else:
        timing = Timing(times.of_steps, len(elements), times.see)
        result = loop.timed(elements, timing)
    for element in result.elements:
        append(element)
    if result.failure is not None:
        raise result.failure


def _state_after(
    after: StateAfter, counting: list[tuple[str, int, list[int] | None]], count: int
) -> State:
    state = after(count)
    for key, before, dropped in counting:
        state = {"parent": state, key: _num_inputs_after(before, dropped, count)}
    return state


def _num_inputs_after(before: int, dropped: list[int] | None, count: int) -> int:
    return before + count - (bisect_left(dropped, count) if dropped else 0)
