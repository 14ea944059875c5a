"""Blocks computed as the batch that follows: each element is copied to its row at once."""

from __future__ import annotations

import functools
import time
from collections import deque
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING

from grainmill._evaluate.batches.batch_blocks import BatchBlock, BlockResult, block_len
from grainmill._evaluate.batches.stack import BatchBuilder, shared_arena
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.thread_pool import current_thread_pool
from grainmill._evaluate.work_clock import work_clock_s
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.prefetch.thread_pool import ThreadPool
    from grainmill._evaluate.program import IncrementalRun, Program
    from grainmill._native import Rows


def in_batches(program: Program, start: int, count: int, batch_size: int) -> BlockResult:
    """The `count` elements from `start` on in batches, up to the first that form none.

    Small batches are computed as one block, which spreads the cost per batch, unless the program's
    first batch showed that they cannot be split from it.
    """
    batches: list[BatchBlock] = []
    at, stop = start, start + count
    while at < stop:
        small = program.batches_small  # read once: other threads write it
        next_count = stop - at if small else min(batch_size, stop - at)
        batch = batched(program, at, next_count)
        if not isinstance(batch, BatchBlock):
            return batches, batch
        if small is not False:
            program.batches_small = small = batch.is_small(batch_size)
            if next_count > batch_size and not small:
                continue
        batches.append(batch)
        at += len(batch)
    return batches, None


def batched(program: Program, start: int, count: int) -> BatchBlock | Evaluated:
    """The `count` elements from `start` on, as a batch if possible.

    Where an element fails, is left out, or has another structure, the elements are returned as
    they are, and stacking them raises the error.
    """
    of_columns = _of_columns(program, start, count)
    if of_columns is not None:
        return of_columns
    builder = BatchBuilder(count, shared_arena())
    # The first element may have to show the size. Parts are small, so that copies hit the cache.
    size = _part_len(program, count) if program.row_byte_len or program.reads_lists else 1
    at, stop = start, start + count
    incremental = program.run_incrementally(start, count)
    results: deque[Evaluated] = deque()
    layout = program.layout  # read once: other threads write it
    if layout is not None and _fills_rows(program, count):
        builder.expect(layout)
        filled, rest = _filled(program, incremental, builder, range(at, stop), size)
        results.extend([] if rest is None else [rest])
        at += filled
        if not filled:
            builder.clear()
    while at < stop:
        if not results:
            results.extend(_computed(program, incremental, at, stop, size))
        part = results.popleft()
        elements = part.elements
        if part.failure is not None or any(map(is_, elements, repeat(None))):
            before = _unstacked(program, builder, start, at)
            return functools.reduce(_joined, results, _joined(before, part))
        try:
            builder.push(elements)
        except ValueError as failure:
            raise_interrupt(failure)
            program.layout = None
            before = program.run(start, at - start)
            return functools.reduce(_joined, results, _joined(before, part))
        is_first = at == start
        at += len(elements)
        del part, elements  # the next elements reuse their memory, which is in cache
        if is_first and not results:
            program.row_byte_len = max(1.0, program.mean_byte_len, builder.row_byte_len)
            size = _part_len(program, count)
            filled, rest = (0, None)
            if _fills_rows(program, count):
                filled, rest = _filled(program, incremental, builder, range(at, stop), size)
            results.extend([] if rest is None else [rest])
            at += filled
            fits = filled or (at == stop and program.can_fill)
            program.layout = builder.layout if fits else None
    try:
        batch = builder.finish()
    except ValueError as failure:
        raise_interrupt(failure)
        program.layout = None
        return program.run(start, count)
    return BatchBlock(batch, count, exact=builder.is_exact)


def _of_columns(program: Program, start: int, count: int) -> BatchBlock | None:
    """`Program.batch_of_columns`; times it if it calls functions of the user."""
    batch: BatchBlock | None
    if not program.column_batches.run_user_code:
        batch = program.batch_of_columns(start, count, count)
        return batch
    if _is_worth_sharing(program, count):
        return None
    started_s, work_started_s = time.perf_counter(), work_clock_s()
    part_len = _part_len(program, count) if program.row_byte_len else count
    batch = program.batch_of_columns(start, count, part_len)
    if batch is not None:
        _record_element_s(program, count, work_clock_s() - work_started_s)
        pool = current_thread_pool()
        if pool is not None:
            pool.record(count, time.perf_counter() - started_s)
    return batch


def run_shared(program: Program, start: int, count: int) -> Evaluated:
    """`Program.run`, with the help of idle threads of the caller's pool."""
    result = Evaluated([], None)
    incremental = program.run_incrementally(start, count)
    at, stop = start, start + count
    while at < stop and result.failure is None:
        size = count if program.element_s or program.reads_lists else 1
        result = functools.reduce(_joined, _computed(program, incremental, at, stop, size), result)
        at = start + len(result.elements)
    return result


def _part_len(program: Program, count: int) -> int:
    """How many elements of a batch of `count` to compute at once."""
    if not program.reads_lists:
        return block_len(program.row_byte_len, count)
    if not program.row_byte_len:
        return min(count, tuning.MIN_LIST_LEN)
    return block_len(program.row_byte_len, count, tuning.LIST_BYTES)


def _is_worth_sharing(program: Program, count: int) -> bool:
    """Whether `count` elements take so long that other threads of the pool may help."""
    element_s = program.element_s
    if element_s * count <= tuning.SHARED_FROM_S:
        return False
    pool = current_thread_pool()
    if pool is None or program.waits_for_storage:
        return False
    if pool.active == 1:
        longest_s = tuning.SLOW_BATCH_S
    elif pool.is_short_of_tasks:
        longest_s = tuning.SHARED_FROM_S
    else:
        longest_s = tuning.SHARED_ANYWAY_FROM_S
    return element_s * count > longest_s


def _fills_rows(program: Program, count: int) -> bool:
    """Whether to try to write the elements of a batch of `count` to their rows at once."""
    # Functions that write rows themselves can do so in several threads.
    return program.writes_rows or not _is_worth_sharing(program, count)


def _computed(
    program: Program, incremental: IncrementalRun, at: int, stop: int, size: int
) -> list[Evaluated]:
    """Computes `size` elements from `at` on, or all of them if idle threads can help."""
    pool = current_thread_pool()
    compute = functools.partial(_timed, program, incremental.run)
    if program.waits_for_storage:  # read all records of the batch concurrently
        size = stop - at
    if pool is None:
        return [compute(at, min(size, stop - at))]
    started_s = time.perf_counter()
    parts = _parts(program, pool, range(at, stop), size)
    calls = [functools.partial(compute, part.start, len(part)) for part in parts]
    results = pool.share(calls) if len(calls) > 1 else [calls[0]()]
    pool.record(sum(len(part.elements) for part in results), time.perf_counter() - started_s)
    return results


def _parts(program: Program, pool: ThreadPool, positions: range, size: int) -> list[range]:
    """The parts of `positions`, of up to `size`, to compute now, each by another thread."""
    count = len(positions)
    is_shared = _is_worth_sharing(program, count)
    if is_shared and not program.reads_lists:
        size = max(1, min(size, int(tuning.SHARED_SLICE_S / program.element_s)))
    if not is_shared or pool.active == 1:
        return [positions[:size]]
    size = min(size, -(-count // pool.active))
    return [positions[k : k + size] for k in range(0, count, size)]


def _timed(
    program: Program, compute: Callable[[int, int], Evaluated], at: int, count: int
) -> Evaluated:
    """`compute(at, count)`; records how long the elements took."""
    started_s = work_clock_s()
    result = compute(at, count)
    _record_element_s(program, count, work_clock_s() - started_s)
    return result


def _record_element_s(program: Program, count: int, elapsed_s: float) -> None:
    """Records the seconds per element; a slow one decays slowly, as more like it are expected."""
    program.element_s = max(elapsed_s / count, program.element_s / 2)


def _filled(
    program: Program,
    incremental: IncrementalRun,
    builder: BatchBuilder,
    positions: range,
    size: int,
) -> tuple[int, Evaluated | None]:
    """`IncrementalRun.fill` for `positions`, into the targets of `builder`, if it has any."""
    targets = builder.targets
    if targets is None:
        return 0, None
    if program.writes_rows and _is_worth_sharing(program, len(positions)):
        filled, rest = _filled_by_threads(program, incremental, targets, positions)
        builder.add_filled(filled)
        return filled, rest
    started_s = work_clock_s()
    filled, rest = incremental.fill(targets, positions.start, positions.stop, size)
    if filled:
        _record_element_s(program, filled, work_clock_s() - started_s)
    builder.add_filled(filled)
    return filled, rest


def _filled_by_threads(
    program: Program, incremental: IncrementalRun, targets: Rows, positions: range
) -> tuple[int, Evaluated | None]:
    """As `_filled`, with the help of idle threads, each of which writes rows of its own."""
    pool = current_thread_pool()
    if pool is None:
        return 0, None
    filled = 0

    def fill(part: range) -> tuple[int, Evaluated | None, Rows]:
        own = targets.with_own_values()
        started_s = work_clock_s()
        size = _part_len(program, len(part))
        num, rest = incremental.fill(own, part.start, part.stop, size)
        if num:
            _record_element_s(program, num, work_clock_s() - started_s)
        return num, rest, own

    while filled < len(positions):
        started_s = time.perf_counter()
        left = positions[filled:]
        parts = _parts(program, pool, left, len(left))
        calls = [functools.partial(fill, part) for part in parts]
        results = pool.share(calls) if len(calls) > 1 else [calls[0]()]
        pool.record(sum(num for num, _, _ in results), time.perf_counter() - started_s)
        for part, (num, rest, own) in zip(parts, results, strict=True):
            targets.add_values(own)
            filled += num
            if num < len(part):
                return filled, rest
    return filled, None


def _unstacked(program: Program, builder: BatchBuilder, start: int, stop: int) -> Evaluated:
    """The elements that are in `builder`, computed again if they cannot be restored from it."""
    if start == stop:
        return Evaluated([], None)
    try:
        rows = BatchBlock(builder.finish(), stop - start, exact=builder.is_exact)
    except ValueError as failure:
        raise_interrupt(failure)
        return program.run(start, stop - start)
    return Evaluated(rows.elements(), None) if rows.exact else program.run(start, stop - start)


def _joined(first: Evaluated, then: Evaluated) -> Evaluated:
    if first.failure is not None:
        return first
    return Evaluated(first.elements + then.elements, then.failure)
