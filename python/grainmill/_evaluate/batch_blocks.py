"""Blocks that are made as the batch they become: every element goes into its row at once."""

from __future__ import annotations

import functools
import time
from collections import deque
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate import tuning
from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.stack import SLOT_BYTES, BatchBuilder, shared_arena
from grainmill._evaluate.storage import work_clock_s
from grainmill._evaluate.thread_pool import current_thread_pool
from grainmill._tree import branch, flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.evaluator import Evaluator, IncrementalEvaluator


# What a Python number takes.
_OBJECT_BYTES = 32
_NUMBERS = frozenset({int, float, bool, type(None)})
# Of a long list, so many tell for all.
_CHILDREN_LOOKED_AT = 32


def block_len(mean_byte_len: float, at_most: int, block_bytes: int = tuning.BLOCK_BYTES) -> int:
    """Elements in a block of about `block_bytes`, 1 to `at_most`."""
    if mean_byte_len <= 0:
        return max(1, at_most)
    return max(1, min(at_most, int(block_bytes / mean_byte_len)))


def byte_len(element: Any, depth: int = 4) -> int:
    """About how many bytes the leaves of `element` have, down to so many containers deep."""
    if type(element) is np.ndarray:
        return element.nbytes
    if type(element) in _NUMBERS:
        return _OBJECT_BYTES
    if isinstance(element, (bytes, str)):
        return len(element)
    parts = branch(element) if depth else None
    if parts is None:
        nbytes = getattr(element, "nbytes", _OBJECT_BYTES)
        return nbytes if isinstance(nbytes, int) else _OBJECT_BYTES
    looked_at = parts.children[:_CHILDREN_LOOKED_AT]
    seen = sum(byte_len(child, depth - 1) for child in looked_at)
    return seen * len(parts.children) // max(1, len(looked_at))


class BatchBlock:
    """Consecutive elements as one batch.

    Attributes:
        batch: The elements, stacked.
        count: How many there are.
        exact: Whether `elements` stack again to the same values and dtypes, however grouped.
    """

    __slots__ = ("batch", "count", "exact")

    def __init__(self, batch: Any, count: int, *, exact: bool) -> None:
        self.batch = batch
        self.count = count
        self.exact = exact

    def __len__(self) -> int:
        return self.count

    def elements(self) -> list[Any]:
        """The elements one by one, as views of the batch."""
        leaves, structure = flatten(self.batch)
        return [structure.unflatten([leaf[row] for leaf in leaves]) for row in range(len(self))]

    def is_small(self, batch_size: int) -> bool:
        """Whether batches of so many rows take less to copy than to make, and come out the same.

        How wide strings are depends on what else is in their batch.
        """
        leaves, _ = flatten(self.batch)
        return self.exact and all(
            leaf.dtype.kind not in "SU" and leaf[:1].nbytes * batch_size < SLOT_BYTES
            for leaf in leaves
        )

    def cut(self, batch_size: int) -> list[BatchBlock]:
        """Batches of `batch_size` rows, the last maybe of fewer; with 0, all rows in one."""
        if not 0 < batch_size < self.count:
            return [self]
        leaves, structure = flatten(self.batch)
        cut: list[BatchBlock] = []
        for at in range(0, self.count, batch_size):
            stop = min(at + batch_size, self.count)
            rows = structure.unflatten([leaf[at:stop].copy() for leaf in leaves])
            cut.append(BatchBlock(rows, stop - at, exact=self.exact))
        return cut


# What can be cut into whole batches, and the elements that come after them where those make none.
Made: TypeAlias = tuple[list[BatchBlock], Evaluated | None]


def in_batches(program: Evaluator, start: int, count: int, batch_size: int) -> Made:
    """The `count` elements from `start` on in batches, until something makes none.

    Small batches come in one piece, if the program's first one did not show that they cannot be
    cut from it: most of what they cost is paid once then.
    """
    made: list[BatchBlock] = []
    at, stop = start, start + count
    while at < stop:
        small = program.batches_small  # read once: other threads set it too
        wanted = stop - at if small else min(batch_size, stop - at)
        rows = batched(program, at, wanted)
        if not isinstance(rows, BatchBlock):
            return made, rows
        if small is not False:
            program.batches_small = small = rows.is_small(batch_size)
            if wanted > batch_size and not small:
                continue
        made.append(rows)
        at += len(rows)
    return made, None


def batched(program: Evaluator, start: int, count: int) -> BatchBlock | Evaluated:
    """The `count` elements from `start` on, as a batch if they make one.

    They do not where one fails or is left out, or where they are unlike; then what can be
    had of them comes as it is, for the one who stacks to find out.
    """
    builder = BatchBuilder(count, shared_arena())
    # How large elements are may show only in the first. Rows are copied while in cache.
    size = _part_len(program, count) if program.row_byte_len or program.reads_lists else 1
    at, stop = start, start + count
    parts = program.run_incrementally(start, count)
    made: deque[Evaluated] = deque()
    layout = program.layout  # read once: other threads set it too
    if layout is not None and not _is_slow(program, count):
        builder.expect(layout)
        filled, rest = _filled(program, parts, builder, range(at, stop), size)
        made.extend([] if rest is None else [rest])
        at += filled
        if not filled:
            builder.clear()
    while at < stop:
        if not made:
            made.extend(_computed(program, parts, at, stop, size))
        part = made.popleft()
        elements = part.elements
        if part.failure is not None or any(map(is_, elements, repeat(None))):
            before = _unstacked(program, builder, start, at)
            return functools.reduce(_joined, made, _joined(before, part))
        try:
            builder.push(elements)
        except ValueError:
            program.layout = None
            before = program.run(start, at - start)
            return functools.reduce(_joined, made, _joined(before, part))
        is_first = at == start
        at += len(elements)
        del part, elements  # their memory is free for the next elements, still in cache
        if is_first and not made:
            program.row_byte_len = max(1.0, program.mean_byte_len, builder.row_byte_len)
            size = _part_len(program, count)
            filled, rest = (0, None)
            if not _is_slow(program, count):
                filled, rest = _filled(program, parts, builder, range(at, stop), size)
            made.extend([] if rest is None else [rest])
            at += filled
            fits = filled or (at == stop and program.can_fill)
            program.layout = builder.layout if fits else None
    try:
        batch = builder.finish()
    except ValueError:
        program.layout = None
        return program.run(start, count)
    return BatchBlock(batch, count, exact=builder.is_exact)


def run_shared(program: Evaluator, start: int, count: int) -> Evaluated:
    """`Program.run`, with idle threads of the threads that the caller works for."""
    made = Evaluated([], None)
    parts = program.run_incrementally(start, count)
    at, stop = start, start + count
    while at < stop and made.failure is None:
        size = count if program.element_s or program.reads_lists else 1
        made = functools.reduce(_joined, _computed(program, parts, at, stop, size), made)
        at = start + len(made.elements)
    return made


def _part_len(program: Evaluator, count: int) -> int:
    """How many elements of a batch of `count` are made at once."""
    if not program.reads_lists:
        return block_len(program.row_byte_len, count)
    if not program.row_byte_len:
        return min(count, tuning.LEAST_LISTED)
    return block_len(program.row_byte_len, count, tuning.LIST_BYTES)


def _is_slow(program: Evaluator, count: int) -> bool:
    """Whether threads of the threads may have to help with `count` elements."""
    element_s = program.element_s
    if element_s * count <= tuning.SHARED_FROM_S:
        return False
    threads = current_thread_pool()
    if threads is None or program.waits_for_storage:
        return False
    if threads.active == 1:
        longest_s = tuning.SLOW_BATCH_S
    elif threads.is_short_of_tasks:
        longest_s = tuning.SHARED_FROM_S
    else:
        longest_s = tuning.SHARED_ANYWAY_FROM_S
    return element_s * count > longest_s


def _computed(
    program: Evaluator, parts: IncrementalEvaluator, at: int, stop: int, size: int
) -> list[Evaluated]:
    """The elements from `at` on: `size` of them, or all where idle threads can help with them."""
    threads = current_thread_pool()
    run = functools.partial(_timed, program, parts.run)
    if program.waits_for_storage:  # all records of the batch are waited for at the same time
        size = stop - at
    if threads is None:
        return [run(at, min(size, stop - at))]
    began = time.perf_counter()
    if _is_slow(program, stop - at) and not program.reads_lists:
        size = max(1, min(size, int(tuning.SHARED_PART_S / program.element_s)))
    if threads.active > 1 and _is_slow(program, stop - at):
        size = min(size, -(-(stop - at) // threads.active))
        calls = [functools.partial(run, k, min(size, stop - k)) for k in range(at, stop, size)]
        made = threads.share(calls)
    else:
        made = [run(at, min(size, stop - at))]
    threads.note(sum(len(part.elements) for part in made), time.perf_counter() - began)
    return made


def _timed(
    program: Evaluator, compute: Callable[[int, int], Evaluated], at: int, count: int
) -> Evaluated:
    """What `compute` makes of `count` elements; how long they took is noted."""
    began = work_clock_s()
    made = compute(at, count)
    _note(program, count, work_clock_s() - began)
    return made


def _note(program: Evaluator, count: int, elapsed_s: float) -> None:
    """A slow element counts for a while: others like it will come."""
    program.element_s = max(elapsed_s / count, program.element_s / 2)


def _filled(
    program: Evaluator,
    parts: IncrementalEvaluator,
    builder: BatchBuilder,
    positions: range,
    size: int,
) -> tuple[int, Evaluated | None]:
    """`IncrementalRun.fill` for `positions` in order, into the targets of `builder`, if any."""
    targets = builder.targets
    if targets is None:
        return 0, None
    began = work_clock_s()
    filled, rest = parts.fill(targets, positions.start, positions.stop, size)
    if filled:
        _note(program, filled, work_clock_s() - began)
    builder.add_filled(filled)
    return filled, rest


def _unstacked(program: Evaluator, builder: BatchBuilder, start: int, stop: int) -> Evaluated:
    """The elements that are in `builder`, made anew where they cannot be had from there."""
    if start == stop:
        return Evaluated([], None)
    try:
        rows = BatchBlock(builder.finish(), stop - start, exact=builder.is_exact)
    except ValueError:
        return program.run(start, stop - start)
    return Evaluated(rows.elements(), None) if rows.exact else program.run(start, stop - start)


def _joined(first: Evaluated, then: Evaluated) -> Evaluated:
    if first.failure is not None:
        return first
    return Evaluated(first.elements + then.elements, then.failure)
