"""Chains: the fused user functions of a plan over their element sources, run block by block.

So are operators called that stream processors run as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.sources.element_sources import PendingRequest, RangeSource, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grainmill._evaluate.fused import Fused
    from grainmill._evaluate.sources.element_sources import DatasetNumbers, ElementSource, Indices

# What one source or tap receives of a block: the ascending positions (`None`: all of them), the
# index at each, and the number of its dataset if several datasets share the column.
Column: TypeAlias = "tuple[Indices | None, Indices, DatasetNumbers | None]"
Columns: TypeAlias = "dict[int, Column]"


class StepColumn(NamedTuple):
    """The additional argument of a step, for each element.

    Attributes:
        number: The column with the values.
        what: The index in that column, the dataset's number, or pairs (dataset, index).
    """

    number: int
    what: Literal["index", "dataset", "both"]

    def of(self, columns: Columns) -> Iterable[Any]:
        """The values, one per element."""
        _, index, datasets = columns[self.number]
        if datasets is None or self.what == "index":
            return index.tolist()
        return datasets.tolist() if self.what == "dataset" else _pairs(index, datasets)


class Chain:
    """User functions over one element source, or over chains that alternate.

    Attributes:
        source: The source with the number of its column, if there is only one.
        upstream: The chains that alternate, otherwise.
        fused: The functions, in the order of their calls.
        step_columns: The columns of those functions that take more than the element.
        reads_in_loop: Whether the first function reads the element.
        takes_indices: Whether its functions take indices: that, or elements of ranges.
        runs_user_code: Whether functions or objects of the user are called.
        block_loops: Its loops, and those upstream, that call functions of whole blocks.
    """

    def __init__(
        self,
        source: tuple[int, ElementSource[Any]] | None,
        upstream: Sequence[Chain],
        fused: Fused,
        step_columns: tuple[StepColumn, ...],
    ) -> None:
        self.source = source
        self.upstream = upstream
        self.fused = fused
        self.step_columns = step_columns
        self.reads_in_loop = bool(fused.steps) and fused.steps[0].kind == "read"
        self.takes_indices = self.reads_in_loop or (
            source is not None and isinstance(source[1], RangeSource)
        )
        self.runs_user_code: bool = (
            bool(fused.steps)
            or any(chain.runs_user_code for chain in upstream)
            or (source is not None and source[1].runs_user_code)
        )
        self.block_loops: list[BlockFused] = [
            *(loop for chain in upstream for loop in chain.block_loops),
            *([fused] if isinstance(fused, BlockFused) else []),
        ]

    def sources(self, *, read_in_loop: bool = True) -> list[tuple[int, ElementSource[Any]]]:
        """All sources; `read_in_loop` includes those that the loop of functions reads."""
        if self.source is not None:
            return [self.source] if read_in_loop or not self.reads_in_loop else []
        return [
            source for chain in self.upstream for source in chain.sources(read_in_loop=read_in_loop)
        ]

    def requests(self, columns: Columns) -> dict[int, PendingRequest]:
        """What a block requests of its sources, by the numbers of their columns."""
        return {
            number: PendingRequest(source, source.request(*columns[number][1:]))
            for number, source in self.sources(read_in_loop=False)
            if number in columns
        }

    def run(
        self,
        columns: Columns,
        pending: dict[int, PendingRequest] | None,
        count: int,
        wrap_inputs: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
        *,
        output: list[Any] | None = None,
    ) -> tuple[Indices | None, Evaluated]:
        """Computes the elements of one block, or of those of its positions that this chain has.

        Args:
            columns: The block's columns; sources without positions in the block have none.
            pending: Its `requests`, if reads were started.
            count: Positions in the block.
            wrap_inputs: Applied to the inputs of the chain's own functions; `None` for nothing.
            output: The list to append the elements to, where the chain's own functions compute
                them.

        Returns:
            The positions in the block (`None` for all), and the elements at them.
        """
        positions, elements, failure = self.inputs(columns, pending, count)
        if not self.fused.steps or (positions is not None and not len(positions)):
            return positions, Evaluated(elements, failure)
        taken = elements if wrap_inputs is None else wrap_inputs(elements)
        return positions, self.fused(taken, self.step_values(columns), output).before(failure)

    def inputs(
        self, columns: Columns, pending: dict[int, PendingRequest] | None, count: int
    ) -> tuple[Indices | None, list[Any], BaseException | None]:
        """What the chain's own functions take of a block; see `run`.

        Returns:
            The positions in the block, the elements at them, and the failure after these, if any.
        """
        if self.source is None:
            results = [chain.run(columns, pending, count) for chain in self.upstream]
            positions, read = _merged(results, count)
            return positions, *read
        number, source = self.source
        column = columns.get(number)
        if column is None:
            return np.empty(0, np.int64), [], None
        positions, index, datasets = column
        if self.takes_indices:
            if datasets is None or not self.reads_in_loop:
                return positions, index.tolist(), None
            return positions, list(_pairs(index, datasets)), None
        if pending is not None:
            return positions, *pending[number]()
        return positions, *source.read(source.request(index, datasets))

    def step_values(self, columns: Columns) -> Sequence[Any]:
        """The additional arguments of the chain's own functions."""
        steps = self.step_columns
        return [column.of(columns) for column in steps] if steps else ()


def _pairs(index: Indices, datasets: DatasetNumbers) -> Iterable[tuple[int, int]]:
    return zip(datasets.tolist(), index.tolist(), strict=True)


def _merged(
    results: Sequence[tuple[Indices | None, Evaluated]], count: int
) -> tuple[Indices | None, Evaluated]:
    for positions, result in results:
        if positions is None or len(positions) == count:
            return None, result
    parts = [(own, result) for own, result in results if own is not None and len(own)]
    all_positions = np.sort(np.concatenate([own for own, _ in results if own is not None]))
    places = [np.searchsorted(all_positions, own).tolist() for own, _ in parts]
    return all_positions, merged(places, [result for _, result in parts], len(all_positions))


def columns_slice(columns: Columns, start: int, stop: int) -> Columns:
    """The columns of the positions from `start` to `stop` of a block."""
    part: Columns = {}
    for number, (positions, index, datasets) in columns.items():
        if positions is None:
            first, last = start, stop
        else:
            first, last = (int(at) for at in np.searchsorted(positions, (start, stop)))
            if first == last:
                continue
        part[number] = (
            None if positions is None else positions[first:last] - start,
            index[first:last],
            None if datasets is None else datasets[first:last],
        )
    return part


def marked(mark: Callable[[int], None], start: int, elements: Iterable[Any]) -> Iterator[Any]:
    """Yields `elements` and calls `mark` with the position of each before it is computed."""
    for position, element in enumerate(elements, start):
        mark(position)
        yield element
