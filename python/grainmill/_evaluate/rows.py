"""Blocks that are made as the batch they become: every element goes into its row at once."""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.stack import SLOT_BYTES, BatchBuilder, shared_arena
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

    def is_small(self, batch_size: int) -> bool:
        """Whether batches of so many rows take less to copy than to make, and come out the same.

        How wide strings are depends on what else is in their batch.
        """
        leaves, _ = flatten(self.batch)
        return self.exact and all(
            leaf.dtype.kind not in "SU" and leaf[:1].nbytes * batch_size < SLOT_BYTES
            for leaf in leaves
        )

    def cut(self, batch_size: int) -> list[StackedRows]:
        """Batches of `batch_size` rows, the last maybe of fewer; with 0, all rows in one."""
        if not 0 < batch_size < self.count:
            return [self]
        leaves, structure = flatten(self.batch)
        cut: list[StackedRows] = []
        for at in range(0, self.count, batch_size):
            stop = min(at + batch_size, self.count)
            rows = structure.unflatten([leaf[at:stop].copy() for leaf in leaves])
            cut.append(StackedRows(rows, stop - at, exact=self.exact))
        return cut


# What can be cut into whole batches, and the elements that come after them where those make none.
Made: TypeAlias = tuple[list[StackedRows], Evaluated | None]


def in_batches(program: Program, start: int, count: int, batch_size: int) -> Made:
    """The `count` elements from `start` on in batches, until something makes none.

    Small batches come in one piece, if the program's first one did not show that they can not be
    cut from it: most of what they cost is paid once then.
    """
    made: list[StackedRows] = []
    at, stop = start, start + count
    while at < stop:
        wanted = stop - at if program.batches_small else min(batch_size, stop - at)
        rows = batched(program, at, wanted)
        if not isinstance(rows, StackedRows):
            return made, rows
        if program.batches_small is not False:
            program.batches_small = rows.is_small(batch_size)
            if wanted > batch_size and not program.batches_small:
                continue
        made.append(rows)
        at += len(rows)
    return made, None


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
    if program.layout is not None:
        builder.expect(program.layout)
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
            program.layout = None
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
            fits = filled or (at == stop and program.can_fill)
            program.layout = builder.layout if fits else None
    try:
        batch = builder.finish()
    except ValueError:
        program.layout = None
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
