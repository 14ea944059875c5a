"""Blocks that are made as the batch they become: every element goes into its row at once."""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.stack import BatchBuilder, shared_arena
from grainmill._evaluate.tree import flatten

if TYPE_CHECKING:
    from grainmill._evaluate.program import Parts, Program


# What a block of records may hold and still be in a core's cache when its rows are copied.
BLOCK_BYTES = 480 << 10


def block_len(mean_byte_len: float, at_most: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Elements in a block of about `block_bytes`, 1 to `at_most`."""
    if mean_byte_len <= 0:
        return max(1, at_most)
    return max(1, min(at_most, int(block_bytes / mean_byte_len)))


class StackedRows:
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


def batched(program: Program, start: int, count: int) -> StackedRows | Evaluated:
    """The `count` elements from `start` on, as a batch if they make one.

    They do not where one fails or is left out, or where they are unlike; then what can be
    had of them comes as it is, for the one who stacks to find out.
    """
    builder = BatchBuilder(count, shared_arena())
    # How large elements are may show only in the first. Rows are copied while in cache.
    size = block_len(program.row_byte_len, count) if program.row_byte_len else 1
    at, stop = start, start + count
    parts = program.in_parts(start, count)
    rest: Evaluated | None = None
    if program.row is not None:
        builder.expect(*program.row)
        filled, rest = _filled(parts, builder, at, stop, size)
        at += filled
        if not filled:
            builder.clear()
    while at < stop:
        made, failure = rest or parts.run(at, min(size, stop - at))
        if failure is not None or any(map(is_, made, repeat(None))):
            before = _unstacked(program, builder, start, at)
            return _joined(before, Evaluated(made, failure))
        try:
            builder.push(made)
        except ValueError:
            return _joined(program.run(start, at - start), Evaluated(made, failure))
        is_first = at == start
        at += len(made)
        rest = None
        del made  # its memory is free for the next elements, still in cache
        if is_first:
            program.row_byte_len = max(1.0, program.mean_byte_len, builder.row_byte_len)
            size = block_len(program.row_byte_len, count)
            filled, rest = _filled(parts, builder, at, stop, size)
            at += filled
            program.row = builder.row if filled else None
    try:
        batch = builder.finish()
    except ValueError:
        return program.run(start, count)
    return StackedRows(batch, count, exact=builder.is_exact)


def _filled(
    parts: Parts, builder: BatchBuilder, at: int, stop: int, size: int
) -> tuple[int, Evaluated | None]:
    """`Parts.fill` from the element at `at` on, into what `builder` has for them, if anything."""
    targets = builder.targets
    if targets is None:
        return 0, None
    filled, rest = parts.fill(targets, at, stop, size)
    builder.add_filled(filled)
    return filled, rest


def _unstacked(program: Program, builder: BatchBuilder, start: int, stop: int) -> Evaluated:
    """The elements that are in `builder`, made anew where they can not be had from there."""
    if start == stop:
        return Evaluated([], None)
    try:
        rows = StackedRows(builder.finish(), stop - start, exact=builder.is_exact)
    except ValueError:
        return program.run(start, stop - start)
    return Evaluated(rows.elements(), None) if rows.exact else program.run(start, stop - start)


def _joined(first: Evaluated, then: Evaluated) -> Evaluated:
    if first.failure is not None:
        return first
    return Evaluated(first.elements + then.elements, then.failure)
