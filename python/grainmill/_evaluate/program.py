"""A compiled random-access plan: indices are resolved in the engine, functions are fused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from grainmill._evaluate.batches.column_batches import ColumnBatches
from grainmill._evaluate.chain import columns_slice, marked
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.notes import add_element_notes, computing
from grainmill._evaluate.sources.element_sources import (
    FileSource,
    Gathered,
    RangeSource,
    may_be_slow,
)
from grainmill._native import Resolver, keep_large_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.batches.batch_blocks import BatchBlock
    from grainmill._evaluate.chain import Chain, Columns
    from grainmill._evaluate.sources.element_sources import Indices, PendingRequest
    from grainmill._native import Layout, Rows
    from grainmill._plan.node import Node, Tree
    from grainmill._stats.meters import Recorder

# The places of elements in a plan: those in a row, or any.
Positions: TypeAlias = "range | Indices"


class Program:
    """Evaluates one plan at any positions; safe to use from several threads.

    Args:
        node: The last stage of the plan.
        tree: How its stages rearrange the elements of its sources.
        chain: What computes the elements.
        recorder: Takes the times of its functions and blocks.

    Attributes:
        runs_user_code: Whether the plan calls functions or objects of the user.
        mean_byte_len: Mean bytes of the records behind an element, 0 if unknown.
        row_byte_len: Bytes of an element in the last batch, or of its records if these are
            larger; 0 at first.
        num_records: Records per element.
        maps_blocks: Whether functions of whole blocks are called for which longer ones may be
            cheaper.
        can_fill: Whether the engine can read and copy the elements of a batch in its own loop
            (`IncrementalRun.fill`), as far as the plan shows.
        writes_rows: Whether the last function can write its results to the rows of a batch
            (`IncrementalRun.fill`), as far as the plan shows.
        layout: The structure, shapes and dtypes of elements if the last batch was filled that
            way, or was too small for it; otherwise `None`.
        element_s: Recent seconds per element, without waits for storage; 0 before the first.
        may_be_slow: See `ElementSource.may_be_slow`; of all its sources.
        chain: What computes the elements.
        column_batches: What makes batches of columns, where sources have them.
        recorder: Takes the times of its functions and blocks.
        mark: If set, it is called with the position of each element before that is computed.
        batches_small: `BatchBlock.is_small` of the first batch; `None` before it.
    """

    def __init__(self, node: Node, tree: Tree, chain: Chain, recorder: Recorder) -> None:
        keep_large_blocks()  # so that malloc reuses the memory of freed blocks
        self._node = node
        self._resolver = Resolver(tree)
        self.chain = chain
        self.recorder = recorder
        self.runs_user_code: bool = chain.runs_user_code
        sources = [source for _, source in chain.sources()]
        self.may_be_slow = may_be_slow(sources)
        self.num_records: int = max(source.num_records for source in sources)
        self._reads_lists = any(source.reads_lists for source in sources)
        self.maps_blocks = any(loop.may_gain for loop in chain.block_loops)
        self.mean_byte_len: float = max(source.mean_byte_len for source in sources)
        self._numbers = _numbers_column(chain)
        self.column_batches = ColumnBatches(chain)
        pairs = chain.sources(read_in_loop=False)
        self._beyond = [source for _, source in pairs if source.reads_beyond]
        self.row_byte_len = self.mean_byte_len
        fused = chain.fused
        self.can_fill = chain.source is not None and isinstance(chain.source[1], FileSource)
        self.writes_rows = (
            self.can_fill
            and isinstance(fused, BlockFused)
            and fused.fills_rows
            and not chain.step_columns
        )
        self.layout: Layout | None = None
        self.batches_small: bool | None = None
        self.element_s = 0.0
        self.mark: Callable[[int], None] | None = None

    @property
    def reads_lists(self) -> bool:
        """Whether longer blocks are worth trying, as the cost of a call may not depend on them.

        So where a user's `__getitems__` is called with one list for all elements that are requested
        at once, or slow functions of whole blocks.
        """
        loops = self.chain.block_loops
        return self._reads_lists or (bool(loops) and any(loop.lists_help for loop in loops))

    @property
    def maps_one_by_one(self) -> bool:
        """Whether all users' functions are called for one element before the next."""
        own = self.chain
        if own.source is None or not own.fused.steps or self.reads_lists or self.maps_blocks:
            return False
        return own.reads_in_loop or not own.source[1].runs_user_code

    @property
    def waits_for_storage(self) -> bool:
        """Whether the storage of any source is slow, by its recent reads."""
        may_be_slow = self.may_be_slow
        return bool(may_be_slow) and any(source.waits_for_storage for source in may_be_slow)

    def computing(self, first: int, last: int) -> tuple[str, list[str]]:
        """What computes the elements `first` to `last`, and further lines on them, as text."""
        return computing(self._node, first, last)

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""
        if self.mark is not None:
            return self.run_incrementally(start, count).run(start, count)
        columns = self._resolver.resolve_range(start, count)
        chain = self.chain
        _, elements, failure = chain.inputs(columns, None, count)
        # As in `Chain.run`, without a further call for each block, which may be one element.
        if not chain.fused.steps:
            result = Evaluated(elements, failure)
        else:
            result = chain.fused(elements, chain.step_values(columns))
            if failure is not None:
                result = result.before(failure)
        if result.failure is not None:
            self.annotate(result.failure, start + len(result.elements))
        return result

    def run_incrementally(self, start: int, count: int) -> IncrementalRun:
        """The elements of `run`, computed in parts on request."""
        return IncrementalRun(self, self._resolver.resolve_range(start, count), start)

    def run_at(self, positions: Positions) -> Evaluated:
        """The elements at `positions`."""
        result = self.chain.run(self.columns(positions), None, len(positions))[1]
        if result.failure is not None:
            self.annotate(result.failure, int(positions[len(result.elements)]))
        return result

    def columns(self, positions: Positions) -> Columns:
        """The indices that the sources and functions have at `positions`."""
        if isinstance(positions, range):
            return self._resolver.resolve_range(positions.start, len(positions))
        return self._resolver.resolve(positions)

    def annotate(self, failure: BaseException, position: int) -> None:
        """Adds notes to `failure` about the element at `position`."""
        add_element_notes(failure, self._node, self.chain, position)

    @property
    def gives_numbers(self) -> bool:
        """Whether `numbers` returns arrays."""
        return self._numbers is not None

    def numbers(self, start: int, count: int) -> Indices | None:
        """The elements as an array if the plan only rearranges ranges, otherwise `None`."""
        if self._numbers is None:
            return None
        columns = self._resolver.resolve_range(start, count)
        return columns[self._numbers][1] if columns else np.empty(0, np.int64)

    @property
    def has_column_batches(self) -> bool:
        """Whether `batch_of_columns` may return batches."""
        return self.column_batches.exist

    def batch_of_columns(self, start: int, count: int, part_len: int) -> BatchBlock | None:
        """The elements as one batch, if the engine has the columns of some of them as arrays.

        Args:
            start: The first position.
            count: How many elements there are.
            part_len: How many of the others to compute at once.
        """
        if not self.column_batches.exist:
            return None
        if self.mark is not None:
            if self.column_batches.run_user_code:
                return None  # the position of each element is reported
            self.mark(start)
        columns = self._resolver.resolve_range(start, count)
        return self.column_batches.of(columns, None, count, part_len)

    @property
    def reads_beyond(self) -> bool:
        """Whether `PendingElements.start_beyond` may start reads."""
        return bool(self._beyond)

    @property
    def has_room(self) -> bool:
        """Whether there is memory to start further reads on slow storage."""
        return all(source.has_room for source in self._beyond)

    def start_reads(self, start: int, count: int) -> PendingElements:
        """Starts reading the records of the elements at `start, ..., start + count - 1`."""
        return PendingElements(self, range(start, start + count)).start()


class PendingElements:
    """Elements of a plan; their reads may be started before they are computed.

    Attributes:
        positions: Their positions.
        requests: What they need of the plan's sources, by the numbers of columns, once their reads
            were started; before, `None`.
    """

    requests: dict[int, PendingRequest] | None = None
    _columns: Columns

    def __init__(self, program: Program, positions: Positions) -> None:
        self.positions = positions
        self._program = program

    def start(self) -> Self:
        """See `PendingRequest.start`."""
        self._columns = self._program.columns(self.positions)
        self.requests = self._program.chain.requests(self._columns)
        for request in self.requests.values():
            request.start()
        return self

    @property
    def num_reads(self) -> int:
        """See `PendingRequest`."""
        return sum(request.num_reads for request in (self.requests or {}).values())

    def start_beyond(self) -> Any:
        """See `ElementSource.start_beyond`."""
        requests = self._program.chain.requests(self._program.columns(self.positions))
        return Gathered([*requests.values()]).start_beyond()

    def wait(self) -> None:
        """See `PendingRequest.wait`."""
        for request in (self.requests or {}).values():
            request.wait()

    def batches(self, batch_size: int = 0) -> list[BatchBlock] | None:
        """The elements as batches of `batch_size`, or as one, if some are rows of columns.

        Otherwise calling this object computes the elements.
        """
        columns, count = self._columns, len(self.positions)
        of_columns = self._program.column_batches
        if not of_columns.exist or (self._program.mark is not None and of_columns.run_user_code):
            return None
        size = batch_size or count
        if size < count and not of_columns.are_all_rows:
            return None  # what was read for the other parts cannot be divided
        self.wait()  # afterwards, what was read can be used twice
        batches = []
        for at in range(0, count, size):
            stop = min(at + size, count)
            part = columns if stop - at == count else columns_slice(columns, at, stop)
            batch = of_columns.of(part, self.requests, stop - at, stop - at)
            if batch is None:
                return None
            batches.append(batch)
        return batches

    def __call__(self, output: list[Any] | None = None) -> Evaluated:
        """Computes the elements, once, on any thread.

        Args:
            output: The list to append the elements to, if their reads were started and they are
                computed one by one.
        """
        program, positions = self._program, self.positions
        if self.requests is None:
            return program.run_at(positions)
        columns, count = self._columns, len(positions)
        _, result = program.chain.run(columns, self.requests, count, output=output)
        if result.failure is not None:
            program.annotate(result.failure, int(positions[len(result.elements)]))
        return result


class IncrementalRun:
    """Consecutive elements whose indices are resolved together and which are computed in parts."""

    def __init__(self, program: Program, columns: Columns, start: int) -> None:
        self._program = program
        self._chain = program.chain
        self._columns = columns
        self._start = start
        self._mark = program.mark

    def run(self, at: int, count: int) -> Evaluated:
        """The elements at `at, ..., at + count - 1`."""
        columns = columns_slice(self._columns, at - self._start, at - self._start + count)
        if self._mark is None:
            result = self._chain.run(columns, None, count)[1]
        else:
            self._mark(at)
            # Of a block that is computed together, the first element stands for all.
            in_blocks = isinstance(self._chain.fused, BlockFused)
            wrap = None if in_blocks else functools.partial(marked, self._mark, at)
            result = self._chain.run(columns, None, count, wrap)[1]
        if result.failure is not None:
            self._program.annotate(result.failure, at + len(result.elements))
        return result

    def fill(
        self, targets: Rows, at: int, stop: int, part_len: int
    ) -> tuple[int, Evaluated | None]:
        """Writes the elements from `at` to `stop` to their rows of `targets`.

        Computes `part_len` elements at a time, and stops early at elements that do not fit;
        `run` shows why.

        Returns:
            How many elements were written, and further elements that are already computed.
        """
        whole, first = self._chain, at - self._start
        if whole.source is None:
            return 0, None
        number, source = whole.source
        fill = source.fill_function()
        if fill is None:
            return 0, None
        compute: Callable[[list[Any]], Evaluated | None] = whole.fused.__call__
        if self._mark is not None or whole.step_columns:
            compute = self._compute_function(at, stop)
        _, index, datasets = self._columns[number]
        index = source.request(index, datasets)[first : stop - self._start]
        as_they_are = False
        if isinstance(whole.fused, BlockFused) and whole.fused.fills_rows:
            rows = range(first, first + len(index))
            compute = self._row_function(compute, whole.fused, targets, rows, part_len)
            as_they_are = whole.fused.takes_records
        filled, rest = fill(index, part_len, compute, targets, first, as_they_are)
        if rest is not None and rest.failure is not None:
            self._program.annotate(rest.failure, at + filled + len(rest.elements))
        return filled, rest

    def _row_function(
        self,
        compute: Callable[[list[Any]], Evaluated | None],
        fused: BlockFused,
        targets: Rows,
        rows: range,
        part_len: int,
    ) -> Callable[[list[Any]], Evaluated | None]:
        """`compute`, or `None` where the last step has written its results to `targets`.

        Args:
            compute: Computes elements from their records.
            fused: The steps; the last can write rows.
            targets: Where elements go.
            rows: Their rows.
            part_len: How many are computed at once.
        """
        row, stop = rows.start, rows.stop
        fits = not self._chain.step_columns and self._mark is None

        def write(records: list[Any]) -> Evaluated | None:
            nonlocal row, fits
            # Fewer if one could not be read.
            if fits and len(records) == min(part_len, stop - row):
                fits = fused.fill_rows(records, targets, row)
                if fits:
                    row += len(records)
                    return None
            row += len(records)
            return compute(records)

        return write

    def _compute_function(self, at: int, stop: int) -> Callable[[list[Any]], Evaluated]:
        """A function that computes the elements from `at` on from lists of their records."""

        def compute(records: list[Any]) -> Evaluated:
            nonlocal at
            first = at - self._start
            columns = columns_slice(self._columns, first, first + len(records))
            steps = self._chain.step_values(columns)
            mark = None if isinstance(self._chain.fused, BlockFused) else self._mark
            inputs = records if mark is None else marked(mark, at, records)
            result = self._chain.fused(inputs, steps)
            at += len(records)
            if self._mark is not None and at < stop:
                self._mark(at)  # its record is read next
            return result

        return compute


def _numbers_column(whole: Chain) -> int | None:
    """The column whose indices are the elements, if these are numbers of ranges."""
    if whole.source is None or whole.fused.steps:
        return None
    number, source = whole.source
    return number if isinstance(source, RangeSource) else None
