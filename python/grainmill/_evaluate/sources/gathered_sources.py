"""Elements that are made of those of other plans: batches, tuples, selections, splits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._evaluate.batches.batch_blocks import BatchBlock, block_len
from grainmill._evaluate.batches.batched import batched
from grainmill._evaluate.batches.stack import stack
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.program import PendingElements
from grainmill._evaluate.sources.element_sources import (
    Gathered,
    GatheringSource,
    Indices,
    computes,
    merged,
    one_by_one,
)
from grainmill._interrupts import listed, raise_interrupt
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access
from grainmill._plan.notes import note_part

if TYPE_CHECKING:
    from grainmill._evaluate.program import Program


@computes(plan.Batch)
class BatchSource(GatheringSource[Indices]):
    """Batches of consecutive elements of another plan, each within one epoch."""

    def __init__(self, node: plan.Batch, parent: Program) -> None:
        super().__init__([parent])
        self._node = node
        self._parent = parent
        self._parent_len = random_access(node.parent).length
        self.runs_user_code = parent.runs_user_code or node.batch_fn is not None
        self.mean_byte_len *= node.batch_size
        self.num_records *= node.batch_size
        self.reads_lists = False  # each batch is computed for itself
        self.reads_beyond = parent.reads_beyond

    def gathered(self, request: Indices) -> tuple[list[PendingElements], Any]:
        """See `GatheringSource.gathered`."""
        parts = [PendingElements(self._parent, positions) for positions in self._positions(request)]
        return parts, None

    def start_beyond(self, request: Indices) -> Any:
        """See `ElementSource.start_beyond`; for all batches at once, as they may be small."""
        elements = [np.arange(part.start, part.stop) for part in self._positions(request)]
        return PendingElements(self._parent, np.concatenate(elements)).start_beyond()

    def read(self, request: Indices, reads: Gathered | None = None) -> Evaluated:
        """See `ElementSource.read`; without an object for each batch, which may be small."""
        return self.joined(self._positions(request) if reads is None else reads.parts, None)

    def _positions(self, request: Indices) -> list[range]:
        """The positions in the parent of the elements of each batch."""
        return [self._node.positions(batch, self._parent_len) for batch in request.tolist()]

    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """See `GatheringSource.joined`."""
        batches: list[Any] = []
        for part in parts:
            try:
                batches.append(self._batch(part))
            except Exception as failure:
                raise_interrupt(failure)
                return Evaluated(batches, failure)
        return Evaluated(batches, None)

    def _stacked(self, elements: list[Any]) -> Any:
        return stack(elements, batch_fn=self._node.batch_fn)

    def _batch(self, part: range | PendingElements) -> Any:
        stacks = self._node.batch_fn is None
        if not isinstance(part, range):
            rows = part.batches() if stacks else None
            return rows[0].batch if rows is not None else self._stacked(self._checked(part(), 0))
        if not stacks:
            return self._stacked(self._elements(part, 0))
        start, count = part.start, len(part)
        numbers = self._parent.numbers(start, count)
        if numbers is not None:
            return numbers
        block = batched(self._parent, start, count)
        if isinstance(block, BatchBlock):
            return block.batch
        elements = self._checked(block, 0)  # up to the first that did not fit
        rest = self._elements(part[len(elements) :], len(elements))
        return self._stacked(elements + rest)

    def _elements(self, positions: range, num_before: int) -> list[Any]:
        elements: list[Any] = []
        size = block_len(self._parent.mean_byte_len, len(positions))
        run = self._parent.run_incrementally(positions.start, len(positions))
        for at in range(0, len(positions), size):
            part = positions[at : at + size]
            elements += self._checked(run.run(part.start, len(part)), num_before + at)
        return elements

    def _checked(self, result: Evaluated, num_before: int) -> list[Any]:
        """The elements; raises what one raised, after `num_before` others of the batch."""
        if result.failure is not None:
            note_part(result.failure, self._node, num_before + len(result.elements))
            raise result.failure
        return result.elements


_MISSING = object()


@computes(plan.FlatMap)
class FlatMapSource(GatheringSource[Indices]):
    """The elements that a user's function splits those of another plan into."""

    def __init__(self, node: plan.FlatMap, parent: Program) -> None:
        super().__init__([parent])
        self._parent = parent
        self._flat_map = node.transform.flat_map
        self._fan_out = node.transform.max_fan_out

    def gathered(self, request: Indices) -> tuple[list[PendingElements], Any]:
        """See `GatheringSource.gathered`.

        The places are, for each output, whether its input differs from that of the output before,
        and its number among the outputs of its input.
        """
        # Not `divmod`, which has no numbers beyond 64 bits.
        parents, numbers = request // self._fan_out, request % self._fan_out
        is_new = np.ones(len(parents), bool)
        np.not_equal(parents[1:], parents[:-1], out=is_new[1:])
        inputs = PendingElements(self._parent, parents[is_new])
        return [inputs], (is_new.tolist(), numbers.tolist())

    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """See `GatheringSource.joined`; consecutive outputs of one input share a call."""
        (part,) = parts
        read = part()
        inputs = iter(read.elements)
        elements: list[Any] = []
        outputs: Sequence[Any] = ()
        for is_new, number in zip(*places, strict=True):
            if is_new:
                element = next(inputs, _MISSING)
                if element is _MISSING:
                    return Evaluated(elements, read.failure)
                try:
                    outputs = self._split(element)
                except Exception as failure:
                    raise_interrupt(failure)
                    return Evaluated(elements, failure)
            elements.append(outputs[number] if number < len(outputs) else None)
        return Evaluated(elements, None)

    def _split(self, element: Any) -> Sequence[Any]:
        if element is None:
            return ()
        outputs = self._flat_map(element)
        if not isinstance(outputs, Sequence):
            outputs = listed(outputs)
        if len(outputs) > self._fan_out:
            raise ValueError(
                "The user-provided FlatMapTransform has a split that exceeds specified max fan-out "
                f"size. To address this, you can raise the max fan-out size, but for max fan-out "
                f"size >100, performance may suffer. Split: {len(outputs)}, "
                f"max fan-out: {self._fan_out}."
            )
        return outputs


@computes(plan.Zip)
class ZipSource(GatheringSource[Indices]):
    """Tuples of the elements that several plans have at the same index."""

    def __init__(self, _: plan.Zip, *parents: Program) -> None:
        super().__init__(parents)
        self.runs_user_code = any(parent.runs_user_code for parent in parents)
        self.mean_byte_len = sum(parent.mean_byte_len for parent in parents)
        self.num_records = sum(parent.num_records for parent in parents)

    def gathered(self, request: Indices) -> tuple[list[PendingElements], Any]:
        """See `GatheringSource.gathered`."""
        return [PendingElements(parent, request) for parent in self._upstream], None

    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """See `GatheringSource.joined`."""
        results = [part() for part in parts]
        tuples = list(zip(*(result.elements for result in results), strict=False))
        failures = [r.failure for r in results if r.failure and len(r.elements) == len(tuples)]
        return Evaluated(tuples, failures[0] if failures else None)


@computes(plan.Select)
class SelectSource(GatheringSource[Indices]):
    """Elements of several plans, selected by a user's `DatasetSelectionMap`."""

    def __init__(self, node: plan.Select, *parents: Program) -> None:
        super().__init__(parents)
        self._selection = node.selection

    def gathered(self, request: Indices) -> tuple[list[PendingElements], Any]:
        """See `GatheringSource.gathered`.

        The places are what the selection picked, up to a failure, and the positions of each part.
        """
        picked = one_by_one(self._selection.__getitem__, request.tolist())
        by_parent: dict[int, list[int]] = {}
        for position, (number, _) in enumerate(picked.elements):
            by_parent.setdefault(number, []).append(position)
        parts = []
        for number, positions in by_parent.items():
            chosen = (picked.elements[position][1] for position in positions)
            keys = np.array([operator.index(index) for index in chosen], np.int64)
            parts.append(PendingElements(self._upstream[number], keys))
        return parts, (picked, list(by_parent.values()))

    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """See `GatheringSource.joined`."""
        picked, positions = places
        results = [part() for part in parts]
        return merged(positions, results, len(picked.elements), picked.failure)
