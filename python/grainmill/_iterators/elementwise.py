"""Functions of one element: map, random map, map with index, filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._evaluate.fuse import Fused, Step
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._iterators.drops import DropWatch
from grainmill._iterators.stage import Block, Cursor, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._plan import sequential as plan
    from grainmill._plan.options import DatasetOptions


class MapStage(Stage):
    """Applies functions, one after another, to every element; `None` stays `None`."""

    def __init__(self, parent: Stage, steps: Sequence[Step]) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._fused = Fused(steps)

    def _columns(self, count: int) -> list[range]:
        return []

    def _count(self, count: int) -> None:
        """Takes note that `count` more elements went by."""

    def _stateful(self) -> Callable[[int, State], State]:
        """Wraps the parent's state after `k` more elements into that of this stage."""
        return lambda _, parent: parent

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        elements = self._cursor.peek(limit)[:limit]
        mark, stateful = self._cursor.mark(), self._stateful()
        made = self._fused(elements, self._columns(len(elements)))
        self._cursor.advance(len(made.elements))
        self._count(len(made.elements))
        if made.failure is not None and not made.elements:
            raise made.failure
        return Block(made.elements, lambda k: stateful(k, mark(k)))

    def state(self) -> State:
        """See `Stage.state`."""
        return self._stateful()(0, self._cursor.state())

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._cursor.restore(state)

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        self._cursor.settle()
        return self._cursor.stage.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._cursor.drop()
        self._cursor.stage.seek(index)


class _CountingStage(MapStage):
    """A map that knows how many elements went by."""

    _state_key: str

    def __init__(self, parent: Stage, step: Step) -> None:
        super().__init__(parent, [step])
        self._passed = 0

    def _columns(self, count: int) -> list[range]:
        return [range(self._passed, self._passed + count)]

    def _count(self, count: int) -> None:
        self._passed += count

    def _stateful(self) -> Callable[[int, State], State]:
        passed, key = self._passed, self._state_key
        return lambda k, parent: {"parent": parent, key: passed + k}

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._cursor.restore(state["parent"])
        self._passed = state[self._state_key]

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        super().seek(index)
        self._passed = index


class MapWithIndexStage(_CountingStage):
    """Applies a function to every element and its number."""

    _state_key = "counter"

    def __init__(self, node: plan.MapWithIndex, parent: Stage) -> None:
        super().__init__(parent, Step("indexed", node.function))


class RandomMapStage(_CountingStage):
    """Applies a function to every element and a generator keyed by the element's number."""

    _state_key = "index_for_rng"

    def __init__(self, node: plan.RandomMap, parent: Stage) -> None:
        generators = IndexedGenerators(node.seed)
        super().__init__(parent, Step("random", node.function, generators=generators))
        self._first, self._step = node.first_number, node.number_step

    def _columns(self, count: int) -> list[range]:
        (passed,) = super()._columns(count)
        first, step = self._first, self._step
        return [range(first + passed.start * step, first + passed.stop * step, step)]


def _picked(mark: Callable[[int], State], after: list[int]) -> Callable[[int], State]:
    return lambda k: mark(after[k - 1] if k else 0)


class FilterStage(Stage):
    """Leaves out elements a predicate turns down."""

    def __init__(self, node: plan.Filter, parent: Stage, options: DatasetOptions) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._verdicts = Fused([Step("test", node.function)])
        name = f"FilterDatasetIterator{str(node).removeprefix(node.dataset_name)}"
        self._drops = DropWatch(name, options)
        self._failure: BaseException | None = None

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            elements = self._cursor.peek(limit)[:limit]
            mark = self._cursor.mark()
            if not elements:
                return Block([], mark)
            kept, after = self._keep(elements)
            if kept:
                return Block(kept, _picked(mark, after))

    def _keep(self, elements: list[Any]) -> tuple[list[Any], list[int]]:
        """Those of `elements` that pass, and for each how many stand up to and including it."""
        verdicts, failure = self._verdicts(elements, [])
        excess = self._drops.first_excess(verdicts)
        if excess is not None:
            seen, failure = excess
            verdicts = verdicts[:seen]
        self._cursor.advance(len(verdicts))
        self._failure = failure
        after = [place + 1 for place, keep in enumerate(verdicts) if keep]
        return [elements[place - 1] for place in after], after

    def state(self) -> State:
        """See `Stage.state`."""
        return self._cursor.state()

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._failure = None
        self._cursor.restore(state)
