"""A random-access plan made ready to run: indices resolved in the engine, functions fused."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate import leaves
from grainmill._evaluate.fuse import Evaluated, Fused, Step
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._native import Resolver
from grainmill._plan import random_access as plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grainmill._evaluate.leaves import Indices, Leaf
    from grainmill._evaluate.stack import Layout, Targets
    from grainmill._plan.node import MapNode, Node

Columns: TypeAlias = "dict[int, tuple[Indices | None, Indices]]"
Tree: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """User functions over what one leaf, or several chains in turn, give.

    Attributes:
        below: A leaf with the number of its index column, or the chains that alternate.
        fused: The functions, nearest to the source first.
        index_columns: The numbers of the index columns the functions need.
    """

    below: tuple[int, Leaf] | tuple[Chain, ...]
    fused: Fused
    index_columns: tuple[int, ...]


class Program:
    """Evaluates one plan at any positions; safe to use from several threads.

    Attributes:
        runs_user_code: Whether user functions or objects take part.
        mean_byte_len: Bytes of an element at its source on average, 0 where unknown.
        row_byte_len: Bytes of an element, or of its source if these are more, as last seen in a
            batch; 0 at first.
        can_fill: Whether `Parts.fill` does something, as far as the plan tells.
        layout: What elements are made of if `Parts.fill` took part in the last batch, or could
            not as that was one part; else `None`.
        batches_small: Whether batches are `StackedRows.is_small`; `None` before the first.
    """

    def __init__(self, node: Node) -> None:
        self._tree, self._chain = _Compiler().compile(plan.random_access(node))
        self._resolver = Resolver(self._tree)
        self.runs_user_code = _any_user_code(self._chain)
        below = [leaf for _, leaf in _leaves(self._chain)]
        self._files = [leaf for leaf in below if isinstance(leaf, leaves.FilesLeaf)]
        self.mean_byte_len = max(leaf.mean_byte_len for leaf in below)
        self._started_early = _leaves(self._chain, read_in_loop=False)
        self._numbers = _only_numbers(self._chain)
        self.row_byte_len = self.mean_byte_len
        bottom = self._chain.below[-1]
        self.can_fill = isinstance(bottom, leaves.FilesLeaf)
        self.layout: Layout | None = None
        self.batches_small: bool | None = None
        self._mark: Callable[[int], None] | None = None

    @property
    def waits_for_storage(self) -> bool:
        """Whether records lately had to be waited for."""
        return any(leaf.waits for leaf in self._files)

    def report(self, mark: Callable[[int], None]) -> None:
        """Has `mark` called with the position of each element that user functions begin to make."""
        self._mark = mark

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""
        return self.in_parts(start, count).run(start, count)

    def in_parts(self, start: int, count: int) -> Parts:
        """The elements of `run`, of which each part is made when asked for."""
        return Parts(self._chain, self._resolver.resolve_range(start, count), start, self._mark)

    def run_at(self, index: Indices) -> Evaluated:
        """The elements at `index`."""
        return self._evaluate(self._resolver.resolve(index), len(index), None)

    @property
    def gives_numbers(self) -> bool:
        """Whether `numbers` has the elements as an array."""
        return self._numbers is not None

    def numbers(self, start: int, count: int) -> Indices | None:
        """The elements as an array, where the plan only arranges the numbers of a range."""
        if self._numbers is None:
            return None
        ((_, index),) = self._resolver.resolve_range(start, count).values()
        return self._numbers.column(index)

    def begin(self, start: int, count: int) -> Callable[[], Evaluated]:
        """Starts reading; the function returned makes the elements, once, on any thread."""
        columns = self._resolver.resolve_range(start, count)
        started = {
            number: leaf.start(columns[number][1])
            for number, leaf in self._started_early
            if number in columns
        }
        return lambda: self._evaluate(columns, count, started)

    def _evaluate(self, columns: Columns, count: int, started: dict[int, Any] | None) -> Evaluated:
        return _run(self._chain, columns, started, count)[1]


class Parts:
    """Consecutive elements, made part by part; where they are is known for all of them."""

    def __init__(
        self, chain: Chain, columns: Columns, start: int, mark: Callable[[int], None] | None
    ) -> None:
        self._chain = chain
        self._columns = columns
        self._start = start
        self._mark = mark

    def run(self, at: int, count: int) -> Evaluated:
        """The elements at `at, ..., at + count - 1`."""
        columns = _part(self._columns, at - self._start, at - self._start + count)
        if self._mark is None:
            return _run(self._chain, columns, None, count)[1]
        self._mark(at)
        marked = functools.partial(_marked, self._mark, at)
        return _run(self._chain, columns, None, count, marked)[1]

    def fill(
        self, targets: Targets, at: int, stop: int, part_len: int
    ) -> tuple[int, Evaluated | None]:
        """Puts elements from `at` up to `stop` into `targets`, at their places from the start on.

        So many are made at once as are in a part. This ends early where that is not possible:
        `run` can tell why.

        Returns:
            How many were put there, and elements after them that have been made already.
        """
        chain, first = self._chain, at - self._start
        if not isinstance(chain.below[0], int):
            return 0, None
        number, leaf = chain.below
        fill = leaf.filler()
        if fill is None:
            return 0, None
        make: Callable[[list[Any]], Evaluated] = chain.fused.__call__
        if self._mark is not None or chain.index_columns:
            make = self._maker(at, stop)
        index = self._columns[number][1][first : stop - self._start]
        return fill(index, part_len, make, *targets, first)

    def _maker(self, at: int, stop: int) -> Callable[[list[Any]], Evaluated]:
        """What makes the elements from `at` up to `stop` of one list of records after the other."""

        def make(records: list[Any]) -> Evaluated:
            nonlocal at
            first, end = at - self._start, at - self._start + len(records)
            steps = [self._columns[i][1][first:end].tolist() for i in self._chain.index_columns]
            watched = records if self._mark is None else _marked(self._mark, at, records)
            made = self._chain.fused(watched, steps)
            at += len(records)
            if self._mark is not None and at < stop:
                self._mark(at)  # its record is read next
            return made

        return make


def _part(columns: Columns, begin: int, end: int) -> Columns:
    """The columns of the positions from `begin` up to `end` of a block."""
    part: Columns = {}
    for number, (rows, index) in columns.items():
        if rows is None:
            part[number] = (None, index[begin:end])
        else:
            first, last = np.searchsorted(rows, (begin, end))
            if first < last:
                part[number] = (rows[first:last] - begin, index[first:last])
    return part


def _marked(mark: Callable[[int], None], start: int, elements: Iterable[Any]) -> Iterator[Any]:
    """The elements that go into a loop of user functions, each told of before it is begun."""
    for position, element in enumerate(elements, start):
        mark(position)
        yield element


def _run(
    chain: Chain,
    columns: Columns,
    started: dict[int, Any] | None,
    count: int,
    watched: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> tuple[Indices | None, Evaluated]:
    """The places in the block that `chain` fills (`None` for all) and what it has for them."""
    steps = [columns[number][1].tolist() for number in chain.index_columns if number in columns]
    if isinstance(chain.below[0], int):
        number, leaf = chain.below
        if number not in columns:
            return np.empty(0, np.int64), Evaluated([], None)
        rows, index = columns[number]
        if _reads_in_loop(chain):
            return rows, chain.fused(watched(index.tolist()), steps)
        made = leaf.read(index) if started is None else leaf.finish(started[number])
    else:
        rows, made = _merge([_run(child, columns, started, count) for child in chain.below], count)
    if not chain.fused.steps:
        return rows, made
    mapped = chain.fused(watched(made.elements), steps)
    return rows, Evaluated(mapped.elements, mapped.failure or made.failure)


def _merge(
    parts: Sequence[tuple[Indices | None, Evaluated]], count: int
) -> tuple[Indices | None, Evaluated]:
    for rows, part in parts:
        if rows is None or len(rows) == count:
            return None, part
    all_rows = [rows for rows, _ in parts if rows is not None]
    whole = np.sort(np.concatenate(all_rows))
    within = [
        (np.searchsorted(whole, rows), part)
        for rows, part in parts
        if rows is not None and len(rows)
    ]
    return whole, leaves.merged(within, len(whole))


def _reads_in_loop(chain: Chain) -> bool:
    return bool(chain.fused.steps) and chain.fused.steps[0].kind == "read"


def _leaves(chain: Chain, *, read_in_loop: bool = True) -> list[tuple[int, Leaf]]:
    """The leaves of `chain`, with or without those that its fused loop reads."""
    if isinstance(chain.below[0], int):
        return [chain.below] if read_in_loop or not _reads_in_loop(chain) else []
    return [leaf for child in chain.below for leaf in _leaves(child, read_in_loop=read_in_loop)]


def _only_numbers(chain: Chain) -> leaves.NumbersLeaf | None:
    below = chain.below[-1]
    if isinstance(below, leaves.NumbersLeaf) and not chain.fused.steps:
        return below
    return None


def _any_user_code(chain: Chain) -> bool:
    if chain.fused.steps:
        return True
    if isinstance(chain.below[0], int):
        return bool(chain.below[1].runs_user_code)
    return any(_any_user_code(child) for child in chain.below)


class _Compiler:
    """Turns a plan into an index tree for the engine and a chain of functions."""

    def __init__(self) -> None:
        self._next_number = 0

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def compile(self, node: MapNode) -> tuple[Tree, Chain]:
        """The index tree of `node`, and the chain that makes its elements."""
        stages: list[Callable[[Tree], Tree]] = []
        steps: list[Step] = []
        while True:
            if isinstance(node, plan.Map):
                column = None
                if isinstance(node, plan.MapWithIndex | plan.RandomMap):
                    column = self._number()
                    stages.append(_tap(column))
                steps.append(_step(node, column))
            elif type(node) in _INDEX_STAGES:
                arrange = _INDEX_STAGES[type(node)](node)
                if arrange is not None:
                    stages.append(arrange)
            else:
                break
            node = plan.random_access(node.parent)
        tree, chain = self._bottom(node, steps)
        for stage in reversed(stages):
            tree = stage(tree)
        return tree, chain

    def _bottom(self, node: MapNode, steps: list[Step]) -> tuple[Tree, Chain]:
        steps.reverse()
        if isinstance(node, plan.Mix | plan.Concatenate):
            compiled = [self.compile(plan.random_access(parent)) for parent in node.parents]
            trees = tuple(tree for tree, _ in compiled)
            tree: Tree
            if isinstance(node, plan.Mix):
                tree = ("mix", node.proportions, trees)
            else:
                lengths = tuple(plan.random_access(parent).length for parent in node.parents)
                tree = ("concatenate", lengths, trees)
            below: Any = tuple(chain for _, chain in compiled)
        else:
            leaf, arrange = _leaf(node)
            number = self._number()
            tree = arrange(("leaf", number))
            below = (number, leaf)
            reads = leaf.first_step()
            if reads is not None and steps:
                steps = [reads, *steps]
        columns = tuple(step.column for step in steps if step.column is not None)
        return tree, Chain(below, Fused(steps), columns)


def _tap(column: int) -> Callable[[Tree], Tree]:
    return lambda below: ("tap", column, below)


def _step(node: plan.Map, column: int | None) -> Step:
    if isinstance(node, plan.RandomMap):
        return Step("random", node.function, column, IndexedGenerators(node.seed))
    if isinstance(node, plan.MapWithIndex):
        return Step("indexed", node.function, column)
    return Step("filter" if isinstance(node, plan.Filter) else "map", node.function)


def _parent_len(node: MapNode) -> int:
    return plan.random_access(node.parent).length


def _shuffle(node: plan.Shuffle) -> Callable[[Tree], Tree]:
    return lambda below: ("shuffle", node.length, node.seed, below)


def _window_shuffle(node: plan.WindowShuffle) -> Callable[[Tree], Tree]:
    return lambda below: ("window_shuffle", node.length, node.window_size, node.seed, below)


def _slice(node: plan.Slice) -> Callable[[Tree], Tree]:
    return lambda below: ("slice", node.start, node.step, node.length, _parent_len(node), below)


def _take(node: plan.Take) -> Callable[[Tree], Tree]:
    indices = np.array([int(i) for i in node.indices], np.int64)
    return lambda below: ("take", indices, _parent_len(node), below)


def _repeat(node: plan.Repeat) -> Callable[[Tree], Tree] | None:
    if node.reseed_each_epoch:
        return None
    return lambda below: ("wrap", _parent_len(node), below)


# Every stage that only rearranges indices: what it is to the engine, `None` where it is nothing.
_INDEX_STAGES: dict[type[MapNode], Callable[[Any], Callable[[Tree], Tree] | None]] = {
    plan.Shuffle: _shuffle,
    plan.WindowShuffle: _window_shuffle,
    plan.Slice: _slice,
    plan.Take: _take,
    plan.Repeat: _repeat,
    plan.Seed: lambda _: None,
}


def _source(node: plan.Source) -> Leaf:
    source = node.source
    getitem = getattr(type(source), "__getitem__", None)
    if getitem is not None and getitem is getattr(type(source), "_getitem_of_files", None):
        return leaves.FilesLeaf(source._files)  # noqa: SLF001 - that is what it has them for
    if callable(getattr(type(source), "__getitems__", None)):
        return leaves.BlockObjectLeaf(source)
    return leaves.ObjectLeaf(source)


def _programs(node: MapNode) -> list[Program]:
    return [Program(parent) for parent in node.parents]


# Every stage or source that makes elements by other means than a function of one element.
_LEAVES: dict[type[MapNode], Callable[[Any], Leaf]] = {
    plan.Source: _source,
    plan.Range: lambda node: leaves.NumbersLeaf(node.numbers),
    plan.Foreign: lambda node: leaves.ObjectLeaf(node.dataset),
    plan.Batch: lambda node: leaves.BatchLeaf(node, Program(node.parent), _parent_len(node)),
    plan.FlatMap: lambda node: leaves.FlatMapLeaf(node, Program(node.parent)),
    plan.Zip: lambda node: leaves.ZipLeaf(_programs(node)),
    plan.Select: lambda node: leaves.SelectLeaf(node.selection, _programs(node)),
}


def _leaf(node: MapNode) -> tuple[Leaf, Callable[[Tree], Tree]]:
    leaf = _LEAVES[type(node)](node)
    if isinstance(node, plan.Range) or (isinstance(node, plan.Source) and node.wraps):
        return leaf, lambda below: ("wrap", node.length, below)
    return leaf, lambda below: below
