"""A random-access plan read from its first element to its last."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._evaluate.batches.batch_blocks import BatchBlock
from grainmill._evaluate.compile import compiled, runs_in_engine
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.executor import Budget, Executor
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState, integer
from grainmill._iterators.base.filter_thresholds import DropWatch
from grainmill._iterators.base.lazy_block import PULL_SIZE
from grainmill._iterators.base.node import CALLER, UNKNOWN, Length, Origin, SequentialNode, counted
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import wrong_type
from grainmill._plan.node import MapNode, Node, Share, random_access
from grainmill._plan.options import ReadOptions
from grainmill._plan.random_access import Range
from grainmill._workers.limits import Limits, workers_are_processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from grainmill._evaluate.context import Context
    from grainmill._evaluate.evaluated import Evaluated
    from grainmill._evaluate.prefetch.blocks import Blocks
    from grainmill._evaluate.prefetch.executor import Demand
    from grainmill._evaluate.program import Program
    from grainmill._iterators.base.stage import StateAfter
    from grainmill._stats.stalls import Awaited


@lazy_dataclass
class Read(SequentialNode):
    """The elements of a random-access plan in order."""

    options: ReadOptions
    allow_nones: bool
    dataset_name: ClassVar[str] = "PrefetchIterDataset"
    keeps_positions: ClassVar[bool] = True
    prefetches: ClassVar[bool] = True
    reads: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True
    saves: ClassVar[str] = "the next index"
    is_native: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = True

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        options = self.options
        if share.inline_size is not None:
            options = dataclasses.replace(
                options, num_threads=0, prefetch_buffer_size=share.inline_size, num_workers=0
            )
        parents = (share.of_random_access(self.parent),)
        return dataclasses.replace(self, parents=parents, options=options)

    def _arguments(self) -> str:
        return f"(read_options={self.options}, allow_nones={self.allow_nones})"

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        return ReadStage(self, context)

    @property
    def num_readers(self) -> int:
        """See `SequentialNode.num_readers`."""
        return 1

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`."""
        try:
            drops = any(upstream.drops_elements for upstream in self.walk())
            length = random_access(self.parent).length
            return Length(length, exact=self.allow_nones or not drops)
        except Exception as failure:  # a user's dataset or source may have none
            raise_interrupt(failure)
            return UNKNOWN

    def place_of_parents(self, place: str) -> str:
        """See `SequentialNode.place_of_parents`."""
        options = self.options
        inside = "" if place == CALLER else f" {place}"
        if all(runs_in_engine(node) for node in self.parent.walk() if isinstance(node, MapNode)):
            return place  # threads run Python's functions only
        if options.num_workers:
            return (
                f"in {counted(options.num_workers, 'worker process', 'worker processes')}{inside}"
            )
        if options.num_threads and options.prefetch_buffer_size:
            return f"on up to {counted(options.num_threads, 'thread', 'threads')}{inside}"
        return place

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        return [Origin(random_access(self.parent), state["next_index"], None)]

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        index = after["next_index"] - 1
        return [Origin(random_access(self.parent), index, index)]


def read(parent: Node, options: ReadOptions | None = None, *, allow_nones: bool = False) -> Read:
    """The node that reads the random-access plan `parent` in order.

    Without `options`, it prefetches, except for a plain range: integers are too cheap.
    """
    if options is None:
        options = (
            ReadOptions(prefetch_buffer_size=0) if isinstance(parent, Range) else ReadOptions()
        )
    if not isinstance(options, ReadOptions):
        raise wrong_type("`read_options` must be a `ReadOptions`", options)
    # Who changes the options later does not change the plan.
    return Read((random_access(parent),), copy.copy(options), allow_nones)


class ReadStage(Stage):
    """Reads elements `0, 1, ...` of a random-access plan; skips `None` unless they are allowed."""

    def __init__(self, node: Read, context: Context) -> None:
        super().__init__()
        self._node = node
        self._length = random_access(node.parent).length
        self._allow_nones = node.allow_nones
        context = context.of_reader(node.options.max_reads_in_flight)
        self._program = compiled(node.parent, context)
        self._numbers_only = self._program.gives_numbers
        self._blocks = _blocks(self._program, self._length, node, context)
        self._blocks.meter.node = node
        # Elements that need neither user code nor I/O always come in blocks.
        self._is_plain = not (self._program.runs_user_code or self._program.mean_byte_len)
        name = f"PrefetchDatasetIterator{str(node).removeprefix(node.dataset_name)}"
        self._drops = DropWatch(name, context.options)
        self._computed: list[Any] | BatchBlock = []
        self._offset = 0
        self._num_skipped = 0  # elements skipped since the last one that was pulled
        self._failure: BaseException | None = None

    def _resume_index(self) -> int:
        """The index after the last element pulled; elements skipped since then do not count."""
        return self._blocks.position - len(self._computed) + self._offset - self._num_skipped

    def _position(self) -> int:
        """The index of the next element to look at."""
        return self._blocks.position - len(self._computed) + self._offset

    def expect_batches(self, batch_size: int) -> None:
        """Computes elements as batches where possible; `pull_batches` returns these."""
        self._blocks.batch_size = batch_size

    def awaited(self) -> Awaited | None:
        """See `Stage.awaited`."""
        return self._blocks.awaited()

    @property
    def has_threads(self) -> bool:
        """Whether user functions run on threads."""
        return isinstance(self._blocks, Executor) and self._blocks.has_threads

    def set_demand(self, demand: Demand) -> None:
        """Makes `pull` raise an error once `demand` has ended."""
        if isinstance(self._blocks, Executor):
            self._blocks.demand = demand

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`; as much as a buffer that may change meanwhile allows."""
        return PULL_SIZE if self._is_plain else max(1, self._blocks.buffer_size // 2)

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        before = self._resume_index()
        while True:
            if self._offset >= len(self._computed):
                if self._failure is not None:
                    self._raise_failure()
                self._hold(self._blocks.take(limit))
            computed, offset = self._computed, self._offset
            if isinstance(computed, BatchBlock):
                self._unstack()
                continue
            if not computed:
                self._num_skipped = 0
                return Block([], _states_from(self._position()))
            start = self._blocks.position - len(computed) + offset
            if offset or len(computed) > limit:
                elements = computed[offset : offset + limit]
                offset += len(elements)
            else:
                elements, offset = computed[:], len(computed)
            if offset == len(computed):  # keep no reference to delivered elements
                self._computed, self._offset = [], 0
            else:
                self._offset = offset
            block = self._without_nones(elements, start, before)
            if block.elements:
                return block

    def _raise_failure(self) -> None:
        """Raises what follows the elements computed before, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _hold(self, taken: Evaluated | BatchBlock) -> None:
        """Makes `taken` the next elements, after all those computed before were delivered."""
        if isinstance(taken, BatchBlock):
            self._computed, self._offset = taken, 0
            return
        self._failure = taken.failure
        self._computed, self._offset = taken.elements, 0
        if not taken.elements:
            self._raise_failure()

    def _without_nones(self, elements: list[Any], start: int, before: int) -> Block:
        if self._allow_nones or not self._program.runs_user_code:
            return Block(elements, _states_from(start))
        kept = [element for element in elements if element is not None]
        if len(kept) == len(elements):
            self._drops.record_kept(len(elements))
            self._num_skipped = 0
            return Block(elements, functools.partial(_state_by_step, start, 1, before))
        self._blocks.batch_size = 0  # batches no longer start at multiples of their size
        verdicts = [element is not None for element in elements]
        excess = self._drops.first_excess(verdicts)
        if excess is not None:
            seen, failure = excess
            self._failure = failure
            self._discard_last(len(elements) - seen)
            elements, verdicts = elements[:seen], verdicts[:seen]
            kept = [element for element in elements if element is not None]
            if not kept:
                self._failure = None
                self._num_skipped = 0
                raise failure
        next_indices = [start + i + 1 for i, keep in enumerate(verdicts) if keep]
        self._num_skipped = self._position() - (next_indices[-1] if next_indices else before)
        return Block(kept, functools.partial(_state_by_list, next_indices, before))

    def _discard_last(self, count: int) -> None:
        """Discards the last `count` elements, which follow a failure, and all prefetched ones."""
        position = self._position() - count
        self._computed, self._offset = [], 0
        self._blocks.rewind(position)

    @property
    def num_ready_batches(self) -> int:
        """How many batches `pull_batches` can return without waiting, as far as is known."""
        return len(self._blocks.ready)

    def pull_batches(self, batch_size: int, limit: int) -> tuple[Block, int] | None:
        """The next elements as up to `limit` batches; `None` if they were not computed as such.

        Returns:
            At least one batch, and how many elements are in each: `batch_size`, or fewer in a
            single last one.
        """
        blocks = self._blocks
        before = blocks.position - len(self._computed) + self._offset - self._num_skipped
        if self._numbers_only:
            numbers = self._pull_numbers(batch_size)
            if numbers is not None:
                return self._batches([numbers], len(numbers), before)
        if self._offset >= len(self._computed):
            if self._failure is not None:
                self._raise_failure()
            self._hold(blocks.take(batch_size))
        taken = self._computed
        if self._offset or not isinstance(taken, BatchBlock):
            return None
        count = taken.count
        is_whole = count == batch_size
        if not is_whole and (count > batch_size or blocks.position != self._length):
            return None
        self._computed, self._offset, self._num_skipped = [], 0, 0
        batches = [taken.batch]
        if is_whole:
            batches += blocks.take_ready(batch_size, limit - 1)
        self._drops.record_kept(count * len(batches))
        return self._batches(batches, count, before)

    def _batches(self, batches: list[Any], count: int, before: int) -> tuple[Block, int]:
        """A block of `batches` of `count` elements each; `before` was the next index before it."""
        first = self._blocks.position - len(self._computed) - count * len(batches)
        return Block(batches, functools.partial(_state_by_step, first, count, before)), count

    def _unstack(self) -> None:
        """Splits a batch whose elements are pulled one by one, and stops computing batches."""
        self._blocks.batch_size = 0
        rows, self._computed = self._computed, []
        if isinstance(rows, BatchBlock):
            start = self._blocks.position - len(rows)
            self._blocks.rewind(self._blocks.position if rows.exact else start)
            self._computed = rows.elements() if rows.exact else []

    def _pull_numbers(self, count: int) -> np.ndarray[Any, Any] | None:
        """The next `count` elements, or those left, as an array."""
        if self._offset < len(self._computed):
            return None
        self._blocks.check_open()
        at = self._blocks.position
        numbers = self._program.numbers(at, min(count, self._length - at))
        if numbers is not None:
            self._computed, self._offset, self._num_skipped = [], 0, 0
            self._blocks.restart(at + len(numbers))
        return numbers

    def state(self) -> State:
        """See `Stage.state`."""
        return {"next_index": self._resume_index()}

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("next_index",))
        index = integer(saved["next_index"])
        if index is None:
            expected = f"must be an integer from 0 to {self._length}"
            raise saved.refusal("`next_index`", expected, saved["next_index"])
        self.seek(index)

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._resume_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        if not 0 <= index <= self._length:
            raise IndexError(
                f"Checkpoint `next_index` {index} is out of range for dataset of length "
                f"{self._length}."
            )
        self._computed, self._offset, self._failure = [], 0, None
        self._num_skipped = 0
        self._blocks.restart(index)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        self._blocks.start()

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._blocks.cancel()

    def close(self) -> None:
        """See `Stage.close`."""
        self._computed, self._offset = [], 0
        self._blocks.close()


def _states_from(start: int) -> StateAfter:
    return functools.partial(_state_by_step, start, 1, start)


def _state_by_step(first: int, step: int, before: int, k: int) -> State:
    return {"next_index": first + k * step if k else before}


def _state_by_list(next_indices: list[int], before: int, k: int) -> State:
    return {"next_index": next_indices[k - 1] if k else before}


def _blocks(program: Program, length: int, node: Read, context: Context) -> Blocks:
    options = node.options
    if not context.prefetches:
        options = dataclasses.replace(options, num_workers=0, prefetch_buffer_size=0)
    elif options.num_workers and program.runs_user_code:
        if workers_are_processes():
            from grainmill._evaluate.prefetch.processes import ProcessBlocks  # noqa: PLC0415

            return ProcessBlocks(program, length, node, node.options, context.workers)
        options = dataclasses.replace(options, num_threads=options.num_workers)
    num_sharing = context.num_readers * max(1, context.num_workers)
    budget_bytes = Limits.of(options).budget_bytes // num_sharing
    # Batches of a worker are also queued in the main process.
    batches_bytes = 0 if context.num_workers else tuning.WHOLE_BATCHES_BYTES // context.num_readers
    # Threads that replace worker processes belong to one reader, with its `worker_init_fn`.
    threads = None if options.num_workers else context.threads
    return Executor(program, length, options, Budget(budget_bytes, batches_bytes), threads)
