"""User functions over what leaves give, for the columns of one block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from grainmill._evaluate import element_sources
from grainmill._evaluate.fuse import Evaluated, Fused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grainmill._evaluate.element_sources import ElementSource, Indices, PartNumbers

# What reaches one leaf or tap: the places in the block, ascending (`None` for all of them), the
# index at each, and the part it is in where several parts share the column.
Column: TypeAlias = "tuple[Indices | None, Indices, PartNumbers | None]"
Columns: TypeAlias = "dict[int, Column]"


class StepColumn(NamedTuple):
    """What a step is called with for each element.

    Attributes:
        number: The column it stands in.
        what: The index there, the part there, or pairs of (part, index).
    """

    number: int
    what: Literal["index", "part", "both"]

    def of(self, columns: Columns) -> Iterable[Any]:
        """The values, one per element."""
        _, index, parts = columns[self.number]
        if parts is None or self.what == "index":
            return index.tolist()
        return parts.tolist() if self.what == "part" else _places(index, parts)


class Chain:
    """User functions over what one leaf, or several chains in turn, give.

    Attributes:
        below: A leaf with the number of its column, or the chains that alternate.
        fused: The functions, nearest to the source first.
        step_columns: What those functions are called with that need more than the element.
        leaf: The leaf with the number of its column, if there is just one.
        reads_in_loop: Whether the first function reads the element.
        runs_user_code: Whether user functions or objects take part.
    """

    def __init__(
        self,
        below: tuple[int, ElementSource[Any]] | tuple[Chain, ...],
        fused: Fused,
        step_columns: tuple[StepColumn, ...],
    ) -> None:
        chains: Any = below
        self.below = below
        self.fused = fused
        self.step_columns = step_columns
        self.leaf: tuple[int, ElementSource[Any]] | None = (
            chains if isinstance(chains[0], int) else None
        )
        self.reads_in_loop = bool(fused.steps) and fused.steps[0].kind == "read"
        self.runs_user_code = bool(fused.steps) or (
            any(chain.runs_user_code for chain in chains)
            if self.leaf is None
            else bool(self.leaf[1].runs_user_code)
        )

    def leaves(self, *, read_in_loop: bool = True) -> list[tuple[int, ElementSource[Any]]]:
        """All leaves, with or without those that the loop of functions reads."""
        if self.leaf is not None:
            return [self.leaf] if read_in_loop or not self.reads_in_loop else []
        chains: Any = self.below
        return [leaf for chain in chains for leaf in chain.leaves(read_in_loop=read_in_loop)]


def begin(chain: Chain, columns: Columns) -> dict[int, Any]:
    """What the leaves begin to read, by the numbers of their columns."""
    return {
        number: leaf.start(leaf.at(*columns[number][1:]))
        for number, leaf in chain.leaves(read_in_loop=False)
        if number in columns
    }


def settle(chain: Chain, begun: dict[int, Any]) -> None:
    """Waits for what leaves have begun to read."""
    for number, leaf in chain.leaves(read_in_loop=False):
        if number in begun:
            begun[number] = leaf.settle(begun[number])


def _places(index: Indices, parts: PartNumbers) -> Iterable[tuple[int, int]]:
    return zip(parts.tolist(), index.tolist(), strict=True)


def run(
    chain: Chain,
    columns: Columns,
    begun: dict[int, Any] | None,
    count: int,
    watched: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    *,
    made_so_far: list[Any] | None = None,
) -> tuple[Indices | None, Evaluated]:
    """The places in the block that `chain` fills (`None` for all) and what it has for them.

    Args:
        chain: Makes the elements.
        columns: Of the block; chains that nothing comes to have none.
        begun: What leaves have begun to read, by the numbers of their columns.
        count: Positions in the block.
        watched: Goes between what is read and the functions of `chain` itself.
        made_so_far: Gets the elements one by one, where these functions make them.
    """
    if chain.leaf is not None:
        number, leaf = chain.leaf
        column = columns.get(number)
        if column is None:
            return np.empty(0, np.int64), Evaluated([], None)
        rows, index, parts = column
        if chain.reads_in_loop:
            places = index.tolist() if parts is None else _places(index, parts)
            steps = step_values(chain, columns)
            return rows, chain.fused(watched(places), steps, made_so_far)
        made = leaf.read(leaf.at(index, parts)) if begun is None else leaf.finish(begun[number])
    else:
        chains: Any = chain.below
        rows, made = _merged([run(child, columns, begun, count) for child in chains], count)
    if not chain.fused.steps or (rows is not None and not len(rows)):
        return rows, made
    mapped = chain.fused(watched(made.elements), step_values(chain, columns), made_so_far)
    return rows, Evaluated(mapped.elements, mapped.failure or made.failure)


def step_values(chain: Chain, columns: Columns) -> Sequence[Any]:
    """What the functions of `chain` itself are called with besides elements."""
    return [column.of(columns) for column in chain.step_columns]


def _merged(
    pieces: Sequence[tuple[Indices | None, Evaluated]], count: int
) -> tuple[Indices | None, Evaluated]:
    for rows, piece in pieces:
        if rows is None or len(rows) == count:
            return None, piece
    all_rows = [rows for rows, _ in pieces if rows is not None]
    whole = np.sort(np.concatenate(all_rows))
    within = [
        (np.searchsorted(whole, rows), piece)
        for rows, piece in pieces
        if rows is not None and len(rows)
    ]
    return whole, element_sources.merged(within, len(whole))


def part_of(columns: Columns, begin: int, end: int) -> Columns:
    """The columns of the positions from `begin` up to `end` of a block."""
    part: Columns = {}
    for number, (rows, index, parts) in columns.items():
        if rows is None:
            first, last = begin, end
        else:
            first, last = (int(at) for at in np.searchsorted(rows, (begin, end)))
            if first == last:
                continue
        part[number] = (
            None if rows is None else rows[first:last] - begin,
            index[first:last],
            None if parts is None else parts[first:last],
        )
    return part


def marked(mark: Callable[[int], None], start: int, elements: Iterable[Any]) -> Iterator[Any]:
    """The elements that go into a loop of user functions, each told of before it is begun."""
    for position, element in enumerate(elements, start):
        mark(position)
        yield element
