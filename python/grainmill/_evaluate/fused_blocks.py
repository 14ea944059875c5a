"""Chains in which the user offers functions of whole blocks beside functions of one element.

The steps before, between and after them are fused as elsewhere. The results are those of passing
one element after another through all steps: after a failure, the elements before it are passed on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grainmill._evaluate.batches.batch_blocks import block_len, byte_len
from grainmill._evaluate.evaluated import Evaluated, until_failure
from grainmill._evaluate.fused import Fused
from grainmill._evaluate.loops import INDEXED_KINDS, block_call
from grainmill._evaluate.prefetch import tuning
from grainmill._interrupts import raise_interrupt
from grainmill._plan.node import defines
from grainmill._stats.meters import both_clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from grainmill._evaluate.fused import Step
    from grainmill._native import Rows
    from grainmill._stats.meters import StepTimes


# Writes the results for a list of elements to the columns of a batch, pairs of a key and an array
# or list, from a row on; returns whether they fit. Results that are arrays have one column, whose
# key is `None`. Its class may say by `_takes_records` that the list may be a `Records`.
RowWriter: TypeAlias = "Callable[[Sequence[Any], Sequence[tuple[Any, Any]], int], bool]"


class _Part(NamedTuple):
    """Consecutive steps that are fused, or one with a block function.

    Attributes:
        start: The first step.
        stop: The step after the last.
        block: The block function.
        gains: Whether a longer block may make its elements cheaper.
        columns: Which columns of the chain they take.
    """

    start: int
    stop: int
    block: Callable[..., Any] | None
    gains: bool
    columns: slice


class BlockFused(Fused):
    """`Fused` steps of which at least one has a block function.

    Attributes:
        lists_help: Whether most of the time is spent in slow calls of block functions, so that
            longer blocks are worth trying; their cost may not depend on the number of elements.
        may_gain: Whether there is a block function of which that may be so.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.lists_help = False
        writer = getattr(self.steps[-1].block, "__self__", None)
        self._row_writer: RowWriter | None = None
        if defines(type(writer), "_fill_rows", "map_block"):
            self._row_writer = writer._fill_rows  # type: ignore[union-attr]  # noqa: SLF001 - for this
        self._parts = _parts_of(self.steps, self._kinds)
        self.may_gain = any(part.gains for part in self._parts)
        # Intermediate results may be larger than what goes in and comes out.
        self._max_len = tuning.MAX_REQUESTED

    def __call__(
        self,
        elements: Iterable[Any],
        columns: Sequence[Iterable[int]] = (),
        output: list[Any] | None = None,
    ) -> Evaluated:
        """See `Fused.__call__`."""
        output = [] if output is None else output
        elements, failure = _listed(elements)
        lists = [list(column) for column in columns]
        at = 0
        while at < len(elements):
            stop = at + self._max_len  # read once: each call of `_run` writes it
            result = self._counted(elements[at:stop], [column[at:stop] for column in lists])
            output += result.elements
            if result.failure is not None:
                return Evaluated(output, result.failure)
            at = stop
        return Evaluated(output, failure)

    def _counted(self, elements: list[Any], columns: Sequence[Iterable[int]]) -> Evaluated:
        meter = self.meter
        if meter is not None and meter.timer.countdown <= 0:
            return self._measured(meter, lambda times: self._run(elements, columns, None, times))
        result = self._run(elements, columns)
        if meter is not None:
            meter.pass_over(len(result.elements))
        return result

    @property
    def fills_rows(self) -> bool:
        """Whether the last step can write its results to the rows of a batch."""
        return self._row_writer is not None

    @property
    def takes_records(self) -> bool:
        """Whether `fill_rows` takes a `Records`, of which no `bytes` are made."""
        writer = getattr(self._row_writer, "__self__", None)
        return len(self._parts) == 1 and getattr(writer, "_takes_records", False)

    def fill_rows(self, elements: Sequence[Any], targets: Rows, at: int) -> bool:
        """Writes the results for `elements` to `targets` from row `at` on.

        Returns whether it did: not where an element fails, is left out or does not fit, which
        calling this object shows.
        """
        found, meter, write = targets.columns, self.meter, self._row_writer
        if write is None or found is None or found[0] not in {dict, None}:
            return False
        container, columns = found
        if meter is not None and meter.sees_next:
            return False
        if meter is None or meter.timer.countdown > 0:
            written = self._write(write, elements, columns, at, None)
            if written and meter is not None:
                meter.pass_over(len(elements))
            return written

        def run(times: StepTimes) -> Evaluated:
            if not self._write(write, elements, columns, at, times):
                return Evaluated([], None)
            last = at + len(elements) - 1
            row = {key: column[-1 if type(column) is list else last] for key, column in columns}
            return Evaluated([row[None] if container is None else row] * len(elements), None)

        return bool(self._measured(meter, run).elements)

    def _write(
        self,
        write: RowWriter,
        elements: Any,
        columns: Sequence[tuple[Any, Any]],
        at: int,
        times: StepTimes | None,
    ) -> bool:
        if len(self._parts) > 1:
            result = self._run(elements, (), self._parts[:-1], times)
            if result.failure is not None:
                return False
            elements = result.elements
        if type(elements) is list and any(map(is_, elements, repeat(None))):
            return False
        clock = both_clocks if times is None else times.clock
        started = clock()
        try:
            written = write(elements, columns, at)
        except Exception as failure:
            raise_interrupt(failure)
            return False  # computing one by one finds the element that fails
        if times is not None:
            elapsed = clock() - started
            times.add_block(len(self.steps) - 1, elements, [], elapsed)
        return written

    def _run(
        self,
        elements: list[Any],
        columns: Sequence[Iterable[int]],
        parts: Sequence[_Part] | None = None,
        times: StepTimes | None = None,
    ) -> Evaluated:
        failure: BaseException | None = None
        block_s, total_s, largest = 0.0, 0.0, 1
        clock: Callable[[], complex] = time.perf_counter
        if times is not None:
            clock, times.first = times.clock, 0  # as of block functions, the first ones are timed
        for part in self._parts if parts is None else parts:
            if not elements:
                break
            started = clock()
            own = columns[part.columns]
            if part.block is None:
                result = self._looped(part.start, part.stop, elements, own, [], times=times)
            elif len(elements) == 1:
                result = self._looped(part.start, part.stop, elements, own, [])
            else:
                result = self._block(part, part.block, elements, own)
            elapsed = clock() - started
            if part.block is not None:
                block_s = max(block_s, elapsed.real if part.gains else 0.0)
                if times is not None:
                    times.add_block(part.start, elements, result.elements, elapsed)
            total_s += elapsed.real
            if result.failure is not None:
                failure = result.failure
            elements = result.elements
            if elements:
                largest = max(largest, byte_len(elements[0]))
        self.lists_help = block_s >= tuning.SLOW_BLOCK_FUNCTION_S and block_s >= total_s / 2
        self._max_len = block_len(largest, tuning.MAX_REQUESTED, tuning.LIST_BYTES)
        return Evaluated(elements, failure)

    def timed(self, elements: Iterable[Any], times: StepTimes) -> Evaluated:
        """Applies the steps, which take no columns, with the times going to `times`."""
        elements, failure = _listed(elements)
        result = self._run(elements, (), None, times)
        return result if result.failure is not None else Evaluated(result.elements, failure)

    def _block(
        self,
        part: _Part,
        function: Callable[..., Any],
        elements: list[Any],
        columns: Sequence[Iterable[int]],
    ) -> Evaluated:
        """The results of the block function; if it fails, those of one element after another."""
        lists = [elements, *(list(column) for column in columns)]
        present = [at for at, element in enumerate(elements) if element is not None]
        if not present:
            return Evaluated(elements, None)
        # Copies: what the function does to its lists must not change what is computed again.
        arguments = [[column[at] for at in present] for column in lists]

        def check(answer: Any) -> list[Any]:
            return checked_block(answer, len(present), function)

        refusal: ValueError | None = None
        try:
            results = block_call(part.start)(self._functions, function, arguments, check)
        except _WrongLengthError as error:
            refusal = error.shown()
        except Exception as failure:
            raise_interrupt(failure)
        except BaseException as failure:  # an interrupt
            return until_failure([], failure)
        else:
            if len(present) == len(elements):
                return Evaluated(results, None)
            output: list[Any] = [None] * len(elements)
            for at, result in zip(present, results, strict=True):
                output[at] = result
            return Evaluated(output, None)
        singly = self._looped(part.start, part.stop, elements, lists[1:], [])
        if refusal is None or singly.failure is not None:
            return singly
        return Evaluated([], refusal)


class _WrongLengthError(Exception):
    """A block function returned something else than a list with a result for each element."""

    def shown(self) -> ValueError:
        """The error that the user gets; its traceback shows which function it was."""
        (text,) = self.args
        return ValueError(text).with_traceback(self.__traceback__)


def checked_block(answer: Any, count: int, function: Callable[..., Any]) -> list[Any]:
    """The answer of a block function as a list with one result for each of `count` elements."""
    if isinstance(answer, Mapping | str | bytes) or not hasattr(answer, "__getitem__"):
        found = f"a {type(answer).__name__}"
    elif len(answer) != count:
        found = f"{len(answer)} elements"
    else:
        return answer if type(answer) is list else [answer[at] for at in range(count)]
    name = getattr(function, "__qualname__", None) or type(function).__name__
    raise _WrongLengthError(
        f"`{name}` must return a list with one element for each of the {count} it is given, got "
        f"{found}; correct it, or remove it so that elements are mapped one by one"
    )


def _listed(elements: Iterable[Any]) -> tuple[list[Any], BaseException | None]:
    """`elements` as a list that may be kept, and what ended it."""
    listed: list[Any] = []
    try:
        listed.extend(elements)
    except BaseException as failure:
        result = until_failure(listed, failure)
        return result.elements, result.failure
    return listed, None


def _parts_of(steps: Sequence[Step], kinds: Any) -> tuple[_Part, ...]:
    bounds = {0, len(steps)}
    for at, step in enumerate(steps):
        if step.block is not None:
            bounds |= {at, at + 1}
    ordered = sorted(bounds)
    parts, num_columns = [], 0
    for start, stop in pairwise(ordered):
        taking = sum(kind in INDEXED_KINDS for kind in kinds[start:stop])
        columns = slice(num_columns, num_columns + taking)
        block = steps[start].block
        parts.append(_Part(start, stop, block, _gains(block), columns))
        num_columns += taking
    return tuple(parts)


def _gains(block: Callable[..., Any] | None) -> bool:
    """Whether longer blocks may be cheaper by element, as far as the function's object says."""
    return block is not None and not costs_by_element(block)


def costs_by_element(block: Callable[..., Any]) -> bool:
    """Whether a block function is known to cost what its elements do."""
    return bool(getattr(getattr(block, "__self__", block), "_costs_by_element", False))
