"""Batches of a chain some of whose sources have columns: without an object for each value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grainmill._evaluate import chain
from grainmill._evaluate.batches.batch_blocks import BatchBlock
from grainmill._evaluate.batches.stack import BatchBuilder, shared_arena
from grainmill._evaluate.sources.converted_source import ConvertedRecords
from grainmill._evaluate.sources.grouped_sources import GroupedRows
from grainmill._evaluate.sources.row_source import RowSource
from grainmill._interrupts import raise_interrupt
from grainmill._native import allocate_rows
from grainmill._tree import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._evaluate.chain import Chain, Columns
    from grainmill._evaluate.sources.element_sources import Indices


class _Part(NamedTuple):
    """Some rows of a batch.

    Attributes:
        positions: Their positions in the batch, ascending; `None` for all.
        batch: The rows, stacked.
    """

    positions: Indices | None
    batch: Any


class ColumnBatches:
    """Batches of the elements of one chain, where rows of files reach its end unchanged.

    In a mixture, the rows of each source are a part of the batch; the elements of sources without
    columns, or behind a function, are computed and stacked as further parts.

    Attributes:
        exist: Whether there are sources with columns, as far as is known by now.
        run_user_code: Whether functions or objects of the user are called for a part.
        are_all_rows: Whether there are no other parts.
    """

    def __init__(self, whole: Chain) -> None:
        self._chains = _chains_of(whole)
        self.exist = any(_has_rows(chain) for chain in self._chains)
        self.are_all_rows = all(_has_rows(chain) for chain in self._chains)
        self.run_user_code = any(part.runs_user_code for part in self._chains)

    def of(
        self, columns: Columns, pending: dict[int, Any] | None, count: int, part_len: int
    ) -> BatchBlock | None:
        """The elements of a block as one batch; `None` if they do not form one.

        Args:
            columns: The block's columns.
            pending: The block's `Chain.requests`, if reads were started.
            count: Positions in the block.
            part_len: How many elements to compute at once.
        """
        if not self.exist or not count:
            return None
        parts: list[_Part] = []
        exact = True
        # Rows first: if they form no batch, no user function has been called in vain.
        for part in sorted(self._chains, key=_has_rows, reverse=True):
            if _has_rows(part):
                found = _rows(part, columns)
                if found is None:
                    return None
                parts += found
                continue
            builder = BatchBuilder(count, shared_arena())
            step = count if pending is not None else part_len
            try:
                positions = _push_computed(part, columns, pending, builder, range(0, count, step))
                if positions is None:
                    return None
                if len(builder):
                    parts.append(_Part(positions, builder.finish()))
                    exact = exact and builder.is_exact
            except ValueError as failure:
                raise_interrupt(failure)
                self.exist = False
                return None
        batch = _scattered(parts, count)
        if batch is None:
            # Computing the elements of all batches twice would cost more than this saves.
            self.exist = False
            return None
        return BatchBlock(batch, count, exact=exact)


def _chains_of(whole: Chain) -> list[Chain]:
    """The chains whose elements are those of `whole`, unchanged."""
    if whole.source is not None or whole.fused.steps:
        return [whole]
    return [part for upstream in whole.upstream for part in _chains_of(upstream)]


def _has_rows(part: Chain) -> bool:
    if part.source is None or part.fused.steps:
        return False
    source = part.source[1]
    if isinstance(source, ConvertedRecords):
        return source.has_batches
    return isinstance(source, RowSource | GroupedRows)


def _rows(part: Chain, columns: Columns) -> list[_Part] | None:
    number, source = part.source or (0, None)
    column = columns.get(number)
    if column is None or source is None:
        return []
    positions, index, datasets = column
    request = source.request(index, datasets)
    if isinstance(source, GroupedRows):
        found = source.batches(request)
        if found is None:
            return None
        return [_Part(own if positions is None else positions[own], batch) for own, batch in found]
    batch = source.batch(request)  # type: ignore[attr-defined] # one with batches
    return None if batch is None else [_Part(positions, batch)]


def _push_computed(
    part: Chain,
    columns: Columns,
    pending: dict[int, Any] | None,
    builder: BatchBuilder,
    starts: range,
) -> Indices | None:
    """Computes the elements of `part` and adds them to `builder`.

    Returns:
        Their positions in the block; `None` if one fails or is left out.

    Raises:
        ValueError: They cannot be stacked.
    """
    all_positions: list[Indices] = []
    for start in starts:
        stop = min(start + starts.step, starts.stop)
        of_part = columns
        if (start, stop) != (0, starts.stop):
            of_part = chain.columns_slice(columns, start, stop)
        positions, result = part.run(of_part, pending, stop - start)
        if result.failure is not None or any(element is None for element in result.elements):
            return None
        builder.push(result.elements)
        of_all = np.arange(stop - start) if positions is None else positions
        all_positions.append(start + of_all)
    return np.concatenate(all_positions)


def _scattered(parts: Sequence[_Part], count: int) -> Any:
    """The batch that consists of `parts`; `None` if they differ in structure, shape or dtype."""
    if len(parts) == 1:
        positions, batch = parts[0]
        return batch if positions is None or len(positions) == count else None
    columns: list[list[Any]] = []
    structures = []
    for _, batch in parts:
        leaves, structure = flatten(batch)
        columns.append(leaves)
        structures.append(structure)
    if not parts or any(structure != structures[0] for structure in structures):
        return None
    rows = []
    for of_leaf in zip(*columns, strict=True):
        if len({_layout(leaf) for leaf in of_leaf}) != 1 or _layout(of_leaf[0]) is None:
            return None
        out = allocate_rows(shared_arena(), (count, *of_leaf[0].shape[1:]), of_leaf[0].dtype)
        for (positions, _), leaf in zip(parts, of_leaf, strict=True):
            out[positions] = leaf
        rows.append(out)
    return structures[0].unflatten(rows)


def _layout(leaf: Any) -> tuple[Any, ...] | None:
    """Shape and dtype of a row; `None` if `leaf` is no array of values."""
    if type(leaf) is not np.ndarray or leaf.dtype.hasobject:
        return None
    return leaf.shape[1:], leaf.dtype
