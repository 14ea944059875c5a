"""Steps, each a user's function of one element; and those of a chain fused into one loop."""

from __future__ import annotations

import dataclasses
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from grainmill._evaluate.evaluated import Evaluated, until_failure
from grainmill._evaluate.loops import INDEXED_KINDS, loop_of
from grainmill._evaluate.rng import IndexedGenerators
from grainmill._plan.node import block_function
from grainmill._stats.meters import both_clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from grainmill._plan.node import StepKind
    from grainmill._stats.meters import LoopMeter, StepTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A user function in a chain.

    Attributes:
        kind: How it is called.
        function: The function.
        generators: The generators of a random map.
        block: The same function of a list of elements, where the user offers one; it also takes the
            list of indices if `function` takes an index.
    """

    kind: StepKind
    function: Callable[..., Any]
    generators: IndexedGenerators | None = None
    block: Callable[..., Any] | None = None

    @classmethod
    def of(cls, node: Any) -> Self:
        """The step that `node` describes, a node with a `step_kind`."""
        kind: StepKind = node.step_kind
        generators = IndexedGenerators(node.seed) if kind == "random" else None
        block = block_function(node.transform) if kind == "map" else None
        return cls(kind, node.function, generators, block)


class Fused:
    """The steps of a chain fused into one callable.

    Attributes:
        steps: The steps.
        meter: Takes the times of the steps; `None` for none.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.meter: LoopMeter | None = None
        self._kinds = tuple(step.kind for step in steps)
        self._loop = loop_of(self._kinds) if steps else None
        self._functions = [step.function for step in steps]
        self._generators = [step.generators for step in steps]

    def __call__(
        self,
        elements: Iterable[Any],
        columns: Sequence[Sequence[int]] = (),
        output: list[Any] | None = None,
    ) -> Evaluated:
        """Applies the steps to each of `elements`.

        Args:
            elements: The inputs; indices if the first step reads.
            columns: One index per element for each step that takes one, in order.
            output: The list to append to; other threads may read it meanwhile.
        """
        loop = self._loop
        if loop is None:
            return Evaluated(list(elements), None)
        meter = self.meter
        output = [] if output is None else output
        if meter is not None and meter.timer.countdown <= 0:
            return self._measured(
                meter, lambda times: self._looped(0, None, elements, columns, output, times=times)
            )
        try:  # as in `_looped`, without another call for each block, which may be one element
            loop(elements, output.append, self._functions, self._generators, columns)
        except BaseException as failure:
            result = until_failure(output, failure)
        else:
            result = Evaluated(output, None)
        if meter is not None:
            meter.pass_over(len(output))
        return result

    def _looped(
        self,
        start: int,
        stop: int | None,
        elements: Iterable[Any],
        columns: Sequence[Iterable[int]],
        output: list[Any],
        *,
        times: StepTimes | None = None,
    ) -> Evaluated:
        """The results of the steps from `start` to `stop`, which are appended to `output`.

        Args:
            start: The first step.
            stop: The step after the last; `None` for all.
            elements: Their inputs.
            columns: One index per element for each of these steps that takes one.
            output: The list to append to.
            times: What takes the times of some elements; `None` for nothing.
        """
        loop, given = loop_of(self._kinds, start, stop), (self._functions, self._generators)
        try:
            if times is not None:
                timed_loop = loop_of(self._kinds, start, stop, timed=True)
                elements, columns = iter(elements), [iter(column) for column in columns]
                if times.first:
                    loop(islice(elements, times.first), output.append, *given, columns)
                first = islice(elements, times.count)
                timing = times.clock, times.of_steps, times.see
                own = range(len(self._kinds))[start:stop]
                numbered = [step for step in own if self._kinds[step] in INDEXED_KINDS]
                noted = times.noting(numbered, columns)
                timed_loop(first, output.append, *given, noted, *timing)
            loop(elements, output.append, *given, columns)
        except BaseException as failure:
            return until_failure(output, failure)
        return Evaluated(output, None)

    def _measured(self, meter: LoopMeter, run: Callable[[StepTimes], Evaluated]) -> Evaluated:
        """What `run` returns, with the time of the call and of the steps of some elements."""
        prepared_s = time.perf_counter()
        times = meter.start()
        started = both_clocks()
        result = run(times)
        meter.record(times, result.elements, both_clocks() - started, prepared_s)
        return result

    def runs(self, functions: Any) -> bool:
        """Whether a loop with `functions` is the one of these steps."""
        return self._functions is functions
