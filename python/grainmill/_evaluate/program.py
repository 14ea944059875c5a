"""A random-access plan made ready to run: indices resolved in the engine, functions fused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate import chain, element_sources
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.context import Context
from grainmill._evaluate.notes import note_element
from grainmill._evaluate.origins import Origins, OriginTree
from grainmill._native import Resolver, keep_large_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.chain import Chain, Columns
    from grainmill._evaluate.element_sources import Indices
    from grainmill._evaluate.fuse import Evaluated
    from grainmill._evaluate.stack import Layout, Targets
    from grainmill._plan.node import MapNode, Node


class Program:
    """Evaluates one plan at any positions; safe to use from several threads.

    Args:
        node: The end of the plan.
        context: What it is run with; its own if `None`.

    Attributes:
        runs_user_code: Whether user functions or objects take part.
        mean_byte_len: Bytes of an element at its source on average, 0 where unknown.
        row_byte_len: Bytes of an element, or of its source if these are more, as last seen in a
            batch; 0 at first.
        num_records: Records that go into an element.
        reads_lists: Whether a user's object is asked for as many elements at once as this is.
        can_fill: Whether `IncrementalRun.fill` does something, as far as the plan tells.
        layout: The structure, shapes and dtypes of elements if `IncrementalRun.fill` took part in
            the last batch, or could not since that was one part; else `None`.
        element_s: Seconds that an element took lately, waits for storage left out; 0 before the
            first.
        batches_small: Whether batches are `BatchBlock.is_small`; `None` before the first.
    """

    def __init__(self, node: Node, context: Context | None = None) -> None:
        keep_large_blocks()  # what one block frees, the next takes again
        self._node = node
        context = context or Context()
        tree, self._chain = compiled(node, lambda parent: Program(parent, context), context)
        self._resolver = Resolver(tree)
        self.runs_user_code: bool = self._chain.runs_user_code
        self._leaves = below = [leaf for _, leaf in self._chain.leaves()]
        self.num_records = max(leaf.num_records for leaf in below)
        self.reads_lists: bool = any(leaf.reads_lists for leaf in below)
        self.mean_byte_len: float = max(leaf.mean_byte_len for leaf in below)
        self._numbers = _numbers_column(self._chain)
        self.row_byte_len = self.mean_byte_len
        self.can_fill = isinstance(self._chain.below[-1], element_sources.FileSource)
        self.layout: Layout | None = None
        self.batches_small: bool | None = None
        self.element_s = 0.0
        self._mark: Callable[[int], None] | None = None

    @property
    def waits_for_storage(self) -> bool:
        """Whether records lately had to be waited for."""
        return any(leaf.waits for leaf in self._leaves)

    def report(self, mark: Callable[[int], None]) -> None:
        """Has `mark` called with the position of each element that user functions begin to make."""
        self._mark = mark

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""
        if self._mark is not None:
            return self.run_incrementally(start, count).run(start, count)
        columns = self._resolver.resolve_range(start, count)
        _, made = chain.run(self._chain, columns, None, count)
        if made.failure is not None:
            self.note(made.failure, start + len(made.elements))
        return made

    def run_incrementally(self, start: int, count: int) -> IncrementalRun:
        """The elements of `run`, of which each part is made when asked for."""
        columns = self._resolver.resolve_range(start, count)
        return IncrementalRun(self, self._chain, columns, start, self._mark)

    def run_at(self, index: Indices) -> Evaluated:
        """The elements at `index`."""
        made = chain.run(self._chain, self._resolver.resolve(index), None, len(index))[1]
        if made.failure is not None:
            self.note(made.failure, int(index[len(made.elements)]))
        return made

    def note(self, failure: BaseException, position: int) -> None:
        """Notes on `failure` that it is of the element at `position`."""
        note_element(failure, self._node, self._chain, position)

    @property
    def gives_numbers(self) -> bool:
        """Whether `numbers` has the elements as an array."""
        return self._numbers is not None

    def numbers(self, start: int, count: int) -> Indices | None:
        """The elements as an array, where the plan only arranges the numbers of ranges."""
        if self._numbers is None:
            return None
        columns = self._resolver.resolve_range(start, count)
        return columns[self._numbers][1] if columns else np.empty(0, np.int64)

    def begin(self, start: int, count: int) -> PendingElements:
        """Begins to read what the elements at `start, ..., start + count - 1` are made of."""
        columns = self._resolver.resolve_range(start, count)
        return PendingElements(self, self._chain, columns, count, start)

    def begin_at(self, index: Indices) -> PendingElements:
        """Begins to read what the elements at `index` are made of."""
        return PendingElements(self, self._chain, self._resolver.resolve(index), len(index), index)

    @property
    def sources(self) -> tuple[MapNode, ...]:
        """What `Origins.source` counts: the sources of the plan and the stages that stand for some.

        From a batch, a `zip` or a selection, several elements go into one; the stage itself is
        what `origins` knows then, and the program of its parent knows more.
        """
        return self._origin_tree.sources

    def origins(self, start: int, count: int) -> Origins:
        """Where the elements at `start, ..., start + count - 1` come from; nothing is read."""
        return self._origin_tree.origins(start, count)

    def origins_at(self, index: Indices) -> Origins:
        """Where the elements at `index` come from; nothing is read."""
        return self._origin_tree.origins_at(index)

    @functools.cached_property
    def _origin_tree(self) -> OriginTree:
        return OriginTree(self._node)


class PendingElements:
    """Elements whose records are being read where those have to be waited for."""

    __slots__ = ("_begun", "_chain", "_columns", "_count", "_program", "_where")

    def __init__(
        self, program: Program, whole: Chain, columns: Columns, count: int, where: int | Indices
    ) -> None:
        self._program = program
        self._where = where  # the first position, or all of them
        self._chain = whole
        self._columns = columns
        self._count = count
        self._begun = chain.begin(whole, columns)

    def settle(self) -> None:
        """Waits for the records."""
        chain.settle(self._chain, self._begun)

    def __call__(self, made_so_far: list[Any] | None = None) -> Evaluated:
        """The elements, once, on any thread; also in `made_so_far`, if they come one by one."""
        columns, begun = self._columns, self._begun
        _, made = chain.run(self._chain, columns, begun, self._count, made_so_far=made_so_far)
        if made.failure is not None:
            where, place = self._where, len(made.elements)
            position = where + place if isinstance(where, int) else int(where[place])
            self._program.note(made.failure, position)
        return made


class IncrementalRun:
    """Consecutive elements, made part by part; where they are is known for all of them."""

    def __init__(
        self,
        program: Program,
        whole: Chain,
        columns: Columns,
        start: int,
        mark: Callable[[int], None] | None,
    ) -> None:
        self._program = program
        self._chain = whole
        self._columns = columns
        self._start = start
        self._mark = mark

    def run(self, at: int, count: int) -> Evaluated:
        """The elements at `at, ..., at + count - 1`."""
        columns = chain.part_of(self._columns, at - self._start, at - self._start + count)
        if self._mark is None:
            made = chain.run(self._chain, columns, None, count)[1]
        else:
            self._mark(at)
            marked = functools.partial(chain.marked, self._mark, at)
            made = chain.run(self._chain, columns, None, count, marked)[1]
        if made.failure is not None:
            self._program.note(made.failure, at + len(made.elements))
        return made

    def fill(
        self, targets: Targets, at: int, stop: int, part_len: int
    ) -> tuple[int, Evaluated | None]:
        """Puts elements from `at` up to `stop` into `targets`, at their places from the start on.

        So many are made at once as are in a part. This ends early where that is not possible:
        `run` can tell why.

        Returns:
            How many were put there, and elements after them that have been made already.
        """
        whole, first = self._chain, at - self._start
        if whole.leaf is None:
            return 0, None
        number, leaf = whole.leaf
        fill = leaf.filler()
        if fill is None:
            return 0, None
        make: Callable[[list[Any]], Evaluated] = whole.fused.__call__
        if self._mark is not None or whole.step_columns:
            make = self._maker(at, stop)
        _, index, parts = self._columns[number]
        index = leaf.at(index, parts)[first : stop - self._start]
        filled, rest = fill(index, part_len, make, *targets, first)
        if rest is not None and rest.failure is not None:
            self._program.note(rest.failure, at + filled + len(rest.elements))
        return filled, rest

    def _maker(self, at: int, stop: int) -> Callable[[list[Any]], Evaluated]:
        """What makes the elements from `at` up to `stop` of one list of records after the other."""

        def make(records: list[Any]) -> Evaluated:
            nonlocal at
            first, end = at - self._start, at - self._start + len(records)
            columns = chain.part_of(self._columns, first, end)
            steps = chain.step_values(self._chain, columns)
            watched = records if self._mark is None else chain.marked(self._mark, at, records)
            made = self._chain.fused(watched, steps)
            at += len(records)
            if self._mark is not None and at < stop:
                self._mark(at)  # its record is read next
            return made

        return make


def _numbers_column(whole: Chain) -> int | None:
    """The column that has the elements themselves, if they are numbers of ranges."""
    if whole.leaf is None or whole.fused.steps:
        return None
    number, leaf = whole.leaf
    return number if isinstance(leaf, element_sources.RangeSource) else None
