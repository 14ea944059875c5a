"""A compiled random-access plan: indices are resolved in the engine, functions are fused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate import chain
from grainmill._evaluate.batches.column_batches import ColumnBatches
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.context import Context
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.notes import add_element_notes, computing
from grainmill._evaluate.origins import Origins, OriginTree
from grainmill._evaluate.sources import element_sources
from grainmill._native import Resolver, keep_large_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.batches.batch_blocks import BatchBlock
    from grainmill._evaluate.chain import Chain, Columns
    from grainmill._evaluate.sources.element_sources import Indices
    from grainmill._native import Layout, Rows
    from grainmill._plan.node import MapNode, Node
    from grainmill._stats.meters import Recorder


class Program:
    """Evaluates one plan at any positions; safe to use from several threads.

    Args:
        node: The last stage of the plan.
        context: The options and limits it runs with; new ones if `None`.
        programs: Those of this plan until now, by the `id` of their nodes: a node that several
            stages read is compiled once.

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
        recorder: Takes the times of its functions and blocks.
        batches_small: `BatchBlock.is_small` of the first batch; `None` before it.
    """

    def __init__(
        self,
        node: Node,
        context: Context | None = None,
        programs: dict[int, Program] | None = None,
    ) -> None:
        keep_large_blocks()  # so that malloc reuses the memory of freed blocks
        self._node = node
        context = context or Context()
        programs = {} if programs is None else programs

        def program_of(parent: Node) -> Program:
            if id(parent) not in programs:
                programs[id(parent)] = Program(parent, context, programs)
            return programs[id(parent)]

        tree, self._chain = compiled(node, program_of, context)
        self._resolver = Resolver(tree)
        self.runs_user_code: bool = self._chain.runs_user_code
        self._element_sources = sources = [source for _, source in self._chain.sources()]
        self.may_be_slow = element_sources.may_be_slow(sources)
        self.num_records: int = max(source.num_records for source in sources)
        self._reads_lists = any(source.reads_lists for source in sources)
        self.maps_blocks = any(loop.may_gain for loop in self._chain.block_loops)
        self.mean_byte_len: float = max(source.mean_byte_len for source in sources)
        self._numbers = _numbers_column(self._chain)
        self._column_batches = ColumnBatches(self._chain)
        pairs = self._chain.sources(read_in_loop=False)
        self._beyond = [(number, source) for number, source in pairs if source.reads_beyond]
        self.row_byte_len = self.mean_byte_len
        self.can_fill = isinstance(self._chain.inputs[-1], element_sources.FileSource)
        fused = self._chain.fused
        self.writes_rows = (
            self.can_fill
            and isinstance(fused, BlockFused)
            and fused.fills_rows
            and not self._chain.step_columns
        )
        self.layout: Layout | None = None
        self.batches_small: bool | None = None
        self.element_s = 0.0
        self._mark: Callable[[int], None] | None = None
        self.recorder: Recorder = context.recorder

    @property
    def reads_lists(self) -> bool:
        """Whether longer blocks are worth trying, as the cost of a call may not depend on them.

        So where a user's `__getitems__` is called with one list for all elements that are requested
        at once, or slow functions of whole blocks.
        """
        return self._reads_lists or any(loop.lists_help for loop in self._chain.block_loops)

    @property
    def maps_one_by_one(self) -> bool:
        """Whether all users' functions are called for one element before the next."""
        own = self._chain
        if own.source is None or not own.fused.steps or self.reads_lists or self.maps_blocks:
            return False
        return own.reads_in_loop or not own.source[1].runs_user_code

    @property
    def waits_for_storage(self) -> bool:
        """Whether the storage of any source is slow, by its recent reads."""
        may_be_slow = self.may_be_slow
        return bool(may_be_slow) and any(source.waits_for_storage for source in may_be_slow)

    @property
    def is_partly_near(self) -> bool:
        """Whether a part of what it reads is on fast storage."""
        return any(source.is_partly_near for source in self.may_be_slow)

    def report_to(self, mark: Callable[[int], None]) -> None:
        """Makes later runs call `mark` with the position of each element before computing it."""
        self._mark = mark

    def computing(self, first: int, last: int) -> tuple[str, list[str]]:
        """What computes the elements `first` to `last`, and further lines on them, as text."""
        return computing(self._node, first, last)

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""
        if self._mark is not None:
            return self.run_incrementally(start, count).run(start, count)
        columns = self._resolver.resolve_range(start, count)
        whole = self._chain
        _, elements, failure = chain.inputs(whole, columns, None, count)
        # As in `chain.run`, without a further call for each block, which may be one element.
        if not whole.fused.steps:
            result = Evaluated(elements, failure)
        else:
            result = whole.fused(elements, chain.step_values(whole, columns))
            if failure is not None:
                result = result.before(failure)
        if result.failure is not None:
            self.annotate(result.failure, start + len(result.elements))
        return result

    def run_incrementally(self, start: int, count: int) -> IncrementalRun:
        """The elements of `run`, computed in parts on request."""
        columns = self._resolver.resolve_range(start, count)
        return IncrementalRun(self, self._chain, columns, start, self._mark)

    def run_at(self, index: Indices) -> Evaluated:
        """The elements at `index`."""
        result = chain.run(self._chain, self._resolver.resolve(index), None, len(index))[1]
        if result.failure is not None:
            self.annotate(result.failure, int(index[len(result.elements)]))
        return result

    def annotate(self, failure: BaseException, position: int) -> None:
        """Adds notes to `failure` about the element at `position`."""
        add_element_notes(failure, self._node, self._chain, position)

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
        return self._column_batches.exist

    @property
    def computes_column_parts(self) -> bool:
        """Whether functions or objects of the user are called for parts of those batches."""
        return self._column_batches.run_user_code

    def batch_of_columns(self, start: int, count: int, part_len: int) -> BatchBlock | None:
        """The elements as one batch, if the engine has the columns of some of them as arrays.

        Args:
            start: The first position.
            count: How many elements there are.
            part_len: How many of the others to compute at once.
        """
        if not self._column_batches.exist:
            return None
        if self._mark is not None:
            if self._column_batches.run_user_code:
                return None  # the position of each element is reported
            self._mark(start)
        columns = self._resolver.resolve_range(start, count)
        return self._column_batches.of(columns, None, count, part_len)

    @property
    def reads_beyond(self) -> bool:
        """Whether `start_beyond` may start reads."""
        return bool(self._beyond)

    @property
    def has_room(self) -> bool:
        """Whether there is memory to start further reads on slow storage."""
        return all(source.has_room for _, source in self._beyond)

    def start_beyond(self, start: int, count: int) -> Any:
        """Starts reads that help to read these elements later, if there is memory for them.

        Returns:
            What must be held until the reads of the elements are started; `None` if none were.
        """
        columns = self._resolver.resolve_range(start, count)
        started = [
            source.start_beyond(source.request(*columns[number][1:]))
            for number, source in self._beyond
            if number in columns
        ]
        return started if any(reads is not None for reads in started) else None

    def start_reads(self, start: int, count: int) -> PendingElements:
        """Starts reading the records of the elements at `start, ..., start + count - 1`."""
        columns = self._resolver.resolve_range(start, count)
        return PendingElements(self, self._chain, columns, count, start)

    def start_reads_at(self, index: Indices) -> PendingElements:
        """Starts reading the records of the elements at `index`."""
        return PendingElements(self, self._chain, self._resolver.resolve(index), len(index), index)

    @property
    def sources(self) -> tuple[MapNode, ...]:
        """The nodes that `Origins.source` numbers: sources, and stages that combine elements.

        A batch, a `zip` or a selection combines several elements into one, so the origin is that
        stage; the program of its parent knows the origins of its inputs.
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
    """Elements whose records are being read, where storage is slow."""

    __slots__ = ("_chain", "_columns", "_count", "_pending", "_positions", "_program", "_waited")

    def __init__(
        self, program: Program, whole: Chain, columns: Columns, count: int, positions: int | Indices
    ) -> None:
        self._program = program
        self._positions = positions  # the first position, or all of them
        self._chain = whole
        self._columns = columns
        self._count = count
        self._pending = chain.start_reads(whole, columns)
        self._waited: dict[int, Any] = {}

    def wait(self) -> None:
        """Waits for the records; may be called again, also after an interrupt."""
        chain.wait(self._chain, self._pending, self._waited)

    def batches(self, batch_size: int = 0) -> list[BatchBlock] | None:
        """The elements as batches of `batch_size`, or as one, if some are rows of columns.

        Otherwise calling this object computes the elements.
        """
        columns, count = self._columns, self._count
        of_columns = self._program._column_batches  # noqa: SLF001 - this is a part of its program
        if not of_columns.exist or (self._program._mark is not None and of_columns.run_user_code):  # noqa: SLF001
            return None
        size = batch_size or count
        if size < count and not of_columns.are_all_rows:
            return None  # what was read for the other parts cannot be divided
        self.wait()  # afterwards, what was read can be used twice
        batches = []
        for at in range(0, count, size):
            stop = min(at + size, count)
            part, pending = columns, self._waited
            if stop - at < count:
                part = chain.columns_slice(columns, at, stop)
            batch = of_columns.of(part, pending, stop - at, stop - at)
            if batch is None:
                return None
            batches.append(batch)
        return batches

    def __call__(self, output: list[Any] | None = None) -> Evaluated:
        """Computes the elements, once, on any thread.

        Args:
            output: The list to append the elements to, if they are computed one by one.
        """
        columns, pending = self._columns, {**self._pending, **self._waited}
        _, result = chain.run(self._chain, columns, pending, self._count, output=output)
        if result.failure is not None:
            positions, failed = self._positions, len(result.elements)
            position = positions + failed if isinstance(positions, int) else int(positions[failed])
            self._program.annotate(result.failure, position)
        return result


class IncrementalRun:
    """Consecutive elements whose indices are resolved together and which are computed in parts."""

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
        columns = chain.columns_slice(self._columns, at - self._start, at - self._start + count)
        if self._mark is None:
            result = chain.run(self._chain, columns, None, count)[1]
        else:
            self._mark(at)
            # Of a block that is computed together, the first element stands for all.
            in_blocks = isinstance(self._chain.fused, BlockFused)
            marked = None if in_blocks else functools.partial(chain.marked, self._mark, at)
            result = chain.run(self._chain, columns, None, count, marked)[1]
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
        if isinstance(whole.fused, BlockFused) and whole.fused.fills_rows:
            rows = range(first, first + len(index))
            compute = self._row_function(compute, whole.fused, targets, rows, part_len)
        filled, rest = fill(index, part_len, compute, targets, first)
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
            compute: Computes elements from lists of their records.
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
            columns = chain.columns_slice(self._columns, first, first + len(records))
            steps = chain.step_values(self._chain, columns)
            mark = None if isinstance(self._chain.fused, BlockFused) else self._mark
            inputs = records if mark is None else chain.marked(mark, at, records)
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
    return number if isinstance(source, element_sources.RangeSource) else None
