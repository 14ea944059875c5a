"""Chains: the fused user functions of a plan over their element sources, run block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.sources import element_sources

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
        inputs: A source with the number of its column, or the chains.
        fused: The functions, in the order of their calls.
        step_columns: The columns of those functions that take more than the element.
        source: The source with the number of its column, if there is only one.
        reads_in_loop: Whether the first function reads the element.
        takes_indices: Whether its functions take indices: that, or elements of ranges.
        runs_user_code: Whether functions or objects of the user are called.
        block_loops: Its loops, and those upstream, that call functions of whole blocks.
    """

    def __init__(
        self,
        inputs: tuple[int, ElementSource[Any]] | tuple[Chain, ...],
        fused: Fused,
        step_columns: tuple[StepColumn, ...],
    ) -> None:
        chains: Any = inputs
        self.inputs = inputs
        self.fused = fused
        self.step_columns = step_columns
        self.source: tuple[int, ElementSource[Any]] | None = (
            chains if isinstance(chains[0], int) else None
        )
        self.reads_in_loop = bool(fused.steps) and fused.steps[0].kind == "read"
        self.takes_indices = self.reads_in_loop or (
            self.source is not None and isinstance(self.source[1], element_sources.RangeSource)
        )
        self.runs_user_code = bool(fused.steps) or (
            any(chain.runs_user_code for chain in chains)
            if self.source is None
            else bool(self.source[1].runs_user_code)
        )
        upstream = () if self.source is not None else chains
        self.block_loops: list[BlockFused] = [
            *(loop for chain in upstream for loop in chain.block_loops),
            *([fused] if isinstance(fused, BlockFused) else []),
        ]

    def sources(self, *, read_in_loop: bool = True) -> list[tuple[int, ElementSource[Any]]]:
        """All sources; `read_in_loop` includes those that the loop of functions reads."""
        if self.source is not None:
            return [self.source] if read_in_loop or not self.reads_in_loop else []
        chains: Any = self.inputs
        return [source for chain in chains for source in chain.sources(read_in_loop=read_in_loop)]


def start_reads(chain: Chain, columns: Columns) -> dict[int, Any]:
    """Starts the reads of all sources; returns those pending by the numbers of their columns."""
    return {
        number: source.start(source.request(*columns[number][1:]))
        for number, source in chain.sources(read_in_loop=False)
        if number in columns
    }


def wait(chain: Chain, pending: dict[int, Any], waited: dict[int, Any]) -> None:
    """Waits for the reads that `start_reads` started; adds what `finish` takes to `waited`."""
    for number, source in chain.sources(read_in_loop=False):
        if number in pending and number not in waited:
            waited[number] = source.wait(pending[number])


def _pairs(index: Indices, datasets: DatasetNumbers) -> Iterable[tuple[int, int]]:
    return zip(datasets.tolist(), index.tolist(), strict=True)


def run(
    chain: Chain,
    columns: Columns,
    pending: dict[int, Any] | None,
    count: int,
    wrap_inputs: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    *,
    output: list[Any] | None = None,
) -> tuple[Indices | None, Evaluated]:
    """Computes the elements of one block, or of those of its positions that `chain` has.

    Args:
        chain: The chain that computes them.
        columns: The block's columns; sources without positions in the block have none.
        pending: The reads started by `start_reads`, if any.
        count: Positions in the block.
        wrap_inputs: Applied to the inputs of `chain`'s own functions; `None` for nothing.
        output: The list to append the elements to, where `chain`'s own functions compute them.

    Returns:
        The positions in the block (`None` for all), and the elements at them.
    """
    positions, elements, failure = inputs(chain, columns, pending, count)
    if not chain.fused.steps or (positions is not None and not len(positions)):
        return positions, Evaluated(elements, failure)
    taken = elements if wrap_inputs is None else wrap_inputs(elements)
    return positions, chain.fused(taken, step_values(chain, columns), output).before(failure)


def inputs(
    chain: Chain, columns: Columns, pending: dict[int, Any] | None, count: int
) -> tuple[Indices | None, list[Any], BaseException | None]:
    """What `chain`'s own functions take of a block; see `run`.

    Returns:
        The positions in the block, the elements at them, and the failure after these, if any.
    """
    if chain.source is None:
        chains: Any = chain.inputs
        positions, read = _merged([run(child, columns, pending, count) for child in chains], count)
        return positions, *read
    number, source = chain.source
    column = columns.get(number)
    if column is None:
        return np.empty(0, np.int64), [], None
    positions, index, datasets = column
    if chain.takes_indices:
        if datasets is None or not chain.reads_in_loop:
            return positions, index.tolist(), None
        return positions, list(_pairs(index, datasets)), None
    if pending is not None:
        return positions, *source.finish(pending[number])
    return positions, *source.read(source.request(index, datasets))


def step_values(chain: Chain, columns: Columns) -> Sequence[Any]:
    """The additional arguments of `chain`'s own functions."""
    steps = chain.step_columns
    return [column.of(columns) for column in steps] if steps else ()


def _merged(
    results: Sequence[tuple[Indices | None, Evaluated]], count: int
) -> tuple[Indices | None, Evaluated]:
    for positions, result in results:
        if positions is None or len(positions) == count:
            return None, result
    own_positions = [positions for positions, _ in results if positions is not None]
    all_positions = np.sort(np.concatenate(own_positions))
    relative = [
        (np.searchsorted(all_positions, positions), result)
        for positions, result in results
        if positions is not None and len(positions)
    ]
    return all_positions, element_sources.merged(relative, len(all_positions))


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
