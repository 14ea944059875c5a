"""Counters and times of a running pipeline, taken at the loops over blocks.

Nothing here costs anything per element: a call that handles a block is timed as a whole, and of its
elements as many are timed singly as keep the cost of reading clocks below a fixed share. A call
that is too short for that is timed now and then, and counts for those in between.

What is timed is timed with the CPU clock of its thread, too: the time that passed also has waits
for the interpreter lock and for a core, which are nobody's own.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from grainmill._stats import timeline
from grainmill._stats.thread_clock import ThreadTimes, ThreadUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grainmill._plan.node import Node
    from grainmill._stats.opened_iterators import OpenedIterators

clock_s = time.perf_counter

# Reads, bytes, timed reads and their seconds; see `RecordFiles.read_totals`.
Totals: TypeAlias = tuple[int, int, int, float]

# The share of a pipeline's time that may be spent on reading clocks: always, and where the user
# asked for tracking.
_SHARE: Final = 0.0015
_SHARE_TRACKED: Final = 0.01
# A call that takes this many times the usual time does not stand for others; and the share that a
# new call has in the usual time.
_UNUSUAL: Final = 4.0
_NEW_SHARE: Final = 0.25
# The most that the first timing is taken to cost: it may have lost its core, too.
_FIRST_COST_S: Final = 0.0001
# Longer pauses would miss what a pipeline does now.
_MAX_PAUSE: Final = 1 << 16


def both_clocks() -> complex:
    """Seconds by `clock_s`, and as the imaginary part CPU seconds of the calling thread.

    One number, so that differences, sums and shares are those of both.
    """
    return complex(clock_s(), time.thread_time())


@functools.cache
def reading_cost() -> complex:
    """What a reading of both clocks adds to the times of a step, and costs."""
    readings = [both_clocks() for _ in range(60)]
    costs = [later - earlier for earlier, later in itertools.pairwise(readings)]
    return complex(min(cost.real for cost in costs), min(cost.imag for cost in costs))


def reading_cost_s() -> float:
    """Seconds that timing one step of an element costs."""
    return max(100e-9, 1.2 * reading_cost().real)


def _without_reading(time_of_step: complex) -> complex:
    cost = reading_cost()
    return complex(max(0.0, time_of_step.real - cost.real), max(0.0, time_of_step.imag - cost.imag))


class StageMeter:
    """Counts and times of one stage.

    Attributes:
        elements: Elements it returned; estimated where only some calls are timed.
        total_s: Seconds it took, added up over threads, without the stages upstream.
        min_s: The least seconds of a timed element; infinite before the first.
        max_s: The most seconds of a timed element.
        cpu_s: The CPU seconds of that.
        num_steps: Loops over elements that it is a step of, as a function of the user is.
        element_bytes: Bytes of the last element looked at.
        spec: The spec of its elements, a pytree of texts; `None` where it is not recorded.
        passes_lazy: Whether functions upstream run only when its elements are requested.
        is_own: Whether the times of iterators that it calls are left out.
        node: Its node, while that lives.
    """

    __slots__ = (
        "_usual_cpu_s",
        "_usual_s",
        "cpu_s",
        "element_bytes",
        "elements",
        "is_own",
        "max_s",
        "min_s",
        "node",
        "num_steps",
        "passes_lazy",
        "spec",
        "total_s",
    )

    def __init__(self) -> None:
        self.elements = 0.0
        self.total_s = 0.0
        self.min_s = float("inf")
        self.max_s = 0.0
        self.cpu_s = 0.0
        self.num_steps = 0.0
        self.element_bytes = 0.0
        self.spec: Any = None
        self.passes_lazy = self.is_own = False
        self.node: Callable[[], Node | None] = _no_node
        self._usual_s = self._usual_cpu_s = 0.0

    def add(self, elements: float, total_s: float, cpu_s: float, weight: float = 1.0) -> None:
        """Adds a timed call; it counts `weight` times."""
        self.elements += elements * weight
        total = self.extrapolated(complex(total_s, cpu_s), weight, max(1, int(elements)))
        self.total_s += total.real
        self.cpu_s += total.imag
        if elements:
            mean_s = total_s / elements
            self.min_s = min(self.min_s, mean_s)
            self.max_s = max(self.max_s, mean_s)

    def extrapolated(self, of_call: complex, weight: float, parts: int = 1) -> complex:
        """The times of `weight` calls of which one took `of_call`.

        Where it took far longer than usual, as when its thread lost its core, only this one did.
        What is usual is known of one of its `parts`, where calls differ in how many they have.
        """
        of_part = of_call / parts
        self._usual_s, expected_s = _usual(self._usual_s, of_part.real)
        self._usual_cpu_s, expected_cpu_s = _usual(self._usual_cpu_s, of_part.imag)
        return of_call + complex(expected_s, expected_cpu_s) * parts * (weight - 1)

    @property
    def least_wait_s(self) -> float:
        """How long all calls together would have waited, if all were as fast as the fastest."""
        return max(0.0, self.min_s * self.elements - self.cpu_s) if self.max_s else 0.0

    def scale(self, factor: float) -> None:
        """Multiplies the times by `factor`."""
        self.total_s *= factor
        self.cpu_s *= factor

    def snapshot(self) -> tuple[float, ...]:
        """The numbers, as `merge` takes them."""
        return (
            self.elements,
            self.total_s,
            self.min_s,
            self.max_s,
            self.cpu_s,
            self.num_steps,
            self.element_bytes,
            self.passes_lazy,
            self.is_own,
        )

    def merge(self, numbers: Sequence[float]) -> None:
        """Adds the `snapshot` of the same stage elsewhere."""
        elements, total_s, min_s, max_s, cpu_s, num_steps, element_bytes, *flags = numbers
        self.elements += elements
        self.total_s += total_s
        self.min_s = min(self.min_s, min_s)
        self.max_s = max(self.max_s, max_s)
        self.cpu_s += cpu_s
        self.num_steps += num_steps
        self.element_bytes = element_bytes or self.element_bytes
        passes_lazy, is_own = flags
        self.passes_lazy |= bool(passes_lazy)
        self.is_own |= bool(is_own)


def _no_node() -> None:
    """What stands for the node of a meter that has none."""


def _usual(usual_s: float, new_s: float) -> tuple[float, float]:
    """The new usual time after one of `new_s`, and as how much that counts for others."""
    expected_s = min(new_s, _UNUSUAL * usual_s) if usual_s else new_s
    usual_s += _NEW_SHARE * (expected_s - usual_s) if usual_s else expected_s
    return usual_s, expected_s


class Activity:
    """When an iterator was first asked for an element, and when it reached its end; by whom."""

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self._consumer: ThreadUse | None = None
        self._ended_times = ThreadTimes(0.0, 0.0)

    def start(self, now_s: float) -> None:
        """Records that an element was asked for."""
        if self._started_s is None:
            self._started_s = now_s
            self._consumer = ThreadUse()
        self._ended_s = None

    def end(self) -> None:
        """Records that there are no more elements."""
        self._ended_times = self.times
        self._ended_s = clock_s()

    @property
    def times(self) -> ThreadTimes:
        """The times of the thread that asked first, from then to the end, or to now."""
        if self._ended_s is not None:
            return self._ended_times
        return ThreadTimes(0.0, 0.0) if self._consumer is None else self._consumer.read()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first request to the end, or to now."""
        if self._started_s is None:
            return 0.0
        return (self._ended_s or clock_s()) - self._started_s


class CallTimer:
    """Decides which calls are timed, so that it costs at most a share of their time.

    Attributes:
        countdown: Calls left before one is timed, which a caller decrements; timed once negative.
    """

    __slots__ = ("_before", "_call_s", "_cost_s", "_pause", "_share", "countdown")

    def __init__(self, share: float) -> None:
        self.countdown = 0
        self._pause = 0
        self._share = share
        self._cost_s = -1.0
        self._call_s = 0.0
        self._before = 0

    @property
    def num_passed(self) -> int:
        """How much of the pause is over."""
        return self._before - self.countdown

    def start(self) -> int:
        """Starts the next pause; returns for how many calls the one that is timed now counts."""
        weight = self._before + 1
        self._before = self.countdown = self._pause
        return weight

    def skip_pause(self) -> None:
        """Makes the next call be timed instead of this one."""
        self._before = self.countdown = 0

    def affordable(self, call_s: float, element_cost_s: float) -> int:
        """How many elements of a call of `call_s` may be timed."""
        return max(1, int(self._share * call_s / element_cost_s))

    def record(self, call_s: float, cost_s: float) -> None:
        """Chooses the next pause after a call of `call_s`, whose timing cost `cost_s`."""
        if self._cost_s < 0:  # the first compiles a loop
            self._cost_s = 0.0
            return
        if self._cost_s:  # it may have lost its core meanwhile
            cost_s = min(cost_s, _UNUSUAL * self._cost_s)
            self._cost_s += _NEW_SHARE * (cost_s - self._cost_s)
        else:
            self._cost_s = min(cost_s, _FIRST_COST_S)
        self._call_s += _NEW_SHARE * (call_s - self._call_s) if self._call_s else call_s
        wanted = min(_MAX_PAUSE, int(self._cost_s / (self._share * max(self._call_s, 1e-9))))
        self._pause = min(wanted, 2 * self._pause + 1)  # the next calls may cost far more


class DatasetTimes:
    """The times of a step that calls a function of each element's own dataset.

    Args:
        nodes: The node of each dataset.

    Attributes:
        nodes: Return these, while they live.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = [weakref.ref(node) for node in nodes]
        self._sums: dict[int, tuple[complex, int]] = {}

    def are_of(self, nodes: Sequence[Node]) -> bool:
        """Whether these are the nodes of the datasets."""
        return [node() for node in self.nodes] == list(nodes)

    def add(self, datasets: Sequence[int], times: Sequence[complex], weight: complex) -> None:
        """Adds the times of elements, given the number of the dataset of each.

        The parts of `weight` are how many times as long all elements took that these stand for.
        """
        for dataset, elapsed in zip(datasets, times, strict=False):  # the last one may have failed
            weighted = complex(elapsed.real * weight.real, elapsed.imag * weight.imag)
            total, count = self._sums.get(dataset, (0j, 0))
            self._sums[dataset] = total + weighted, count + 1

    def divided(self, meter: StageMeter) -> list[tuple[Node, StageMeter]]:
        """What `meter` has of all, by node, in proportion to the elements that were timed."""
        sums = list(self._sums.items())
        num_timed = sum(count for _, (_, count) in sums)
        timed = sum((total for _, (total, _) in sums), 0j)
        parts = []
        for dataset, (total, count) in sums:
            node, share, part = self.nodes[dataset](), count / num_timed, StageMeter()
            part.merge(meter.snapshot())
            part.spec = meter.spec
            part.elements *= share
            part.total_s *= total.real / timed.real if timed.real else share
            part.cpu_s *= total.imag / timed.imag if timed.imag else share
            parts += [] if node is None else [(node, part)]
        return parts


class StepTimes:
    """The times of the steps of a call, or of a block whose elements are computed one by one.

    Attributes:
        of_steps: A list for each step, which takes the times of elements: differences of
            `both_clocks`.
        datasets: For each step, a list that takes the number of the dataset of each element, or
            `None` for a function that all share.
        first: The number of the first element that is timed singly.
        count: How many are from there on.
        see: Called with the number of each step, -1 for the input, and its output; `None` for
            nothing.
        clock: What these times are read from.
    """

    __slots__ = ("clock", "count", "datasets", "first", "of_steps", "see")

    def __init__(
        self,
        by_dataset: Sequence[bool],
        first: int,
        count: int,
        see: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.of_steps: list[list[complex]] = [[] for _ in by_dataset]
        self.datasets: list[list[int] | None] = [[] if each else None for each in by_dataset]
        self.first = first
        self.count = count
        self.see = see
        self.clock: Callable[[], complex] = both_clocks

    def traced(self, nodes: Sequence[Sequence[Callable[[], Node | None]]]) -> None:
        """Puts the steps on the timeline, if one is taken.

        Args:
            nodes: Return the node of each step; for a step of `datasets`, that of each dataset.
        """
        taken = timeline.current
        if taken is not None:
            clock = self.clock = _KeptClock()
            self.of_steps = [
                _TracedTimes(taken, clock, of_step, datasets)
                for of_step, datasets in zip(nodes, self.datasets, strict=True)
            ]

    def noting(self, steps: Iterable[int], columns: Iterable[Iterable[Any]]) -> list[Iterator[Any]]:
        """The `columns` of these steps, whose datasets are noted when an element is computed."""
        pairs = [
            (self.datasets[step], iter(column)) for step, column in zip(steps, columns, strict=True)
        ]
        return [column if seen is None else _noting(column, seen) for seen, column in pairs]

    def add_block(
        self, step: int, inputs: Sequence[Any], results: Sequence[Any], elapsed: complex
    ) -> None:
        """Adds a call of a function of a block, whose elements are taken to cost the same."""
        times = self.of_steps[step]
        times.extend([elapsed / len(inputs)] * min(self.count, len(inputs)))
        if isinstance(times, _TracedTimes):
            times.add_slice(len(inputs))
        if self.see is not None:
            if not step:
                self.see(-1, inputs[0])
            if results:
                self.see(step, results[0])


class _KeptClock:
    """`both_clocks`, whose last two readings are kept: when a step began and ended."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before = self.last = 0j

    def __call__(self) -> complex:
        self.before, self.last = self.last, both_clocks()
        return self.last


class _TracedTimes(list[complex]):
    """Times of a step, each of which is also put on a timeline.

    Args:
        taken: The timeline.
        clock: What read the time that is appended.
        nodes: Return the node of the step; that of each dataset, if `datasets` is not `None`.
        datasets: The numbers of the datasets of the elements so far.
    """

    def __init__(
        self,
        taken: timeline.Timeline,
        clock: _KeptClock,
        nodes: Sequence[Callable[[], Node | None]],
        datasets: Sequence[int] | None,
    ) -> None:
        super().__init__()
        self._taken, self._clock = taken, clock
        self._nodes, self._datasets = nodes, datasets

    def append(self, elapsed: complex) -> None:
        """Adds the time between the last two readings of the clock."""
        super().append(elapsed)
        self.add_slice()

    def add_slice(self, count: int = -1) -> None:
        """Adds that time to the timeline only."""
        clock, node = self._clock, self._nodes[self._datasets[-1] if self._datasets else 0]()
        label = self._taken.label(node)
        self._taken.add(label, "function", clock.before.real, clock.last.real, count=count)


def _noting(column: Iterator[Any], seen: list[int]) -> Iterator[Any]:
    """Yields what is in `column`, and adds its datasets, or those of pairs, to `seen`."""
    for given in column:
        seen.append(given[0] if type(given) is tuple else given)
        yield given


class LoopMeter:
    """Times the steps of a loop over elements; any thread may use it.

    Args:
        stages: The meter of each step.
        share: The share of time that this may cost.
        byte_len: Estimates the bytes of an element.
        spec_of: Describes the output of each step once; `None` where no specs are recorded.

    Attributes:
        timer: Decides which calls of the loop are timed: those that find that nothing of its pause
            is left. Others `pass_over` their elements, as calls get longer while it runs.
        first: The number of the first element of the next call that is timed singly.
        count: How many elements from there on.
        source: The meter of the stage that the inputs of the first step come from, if it has none.
        of_datasets: For each step, what takes times by dataset; `None` for a function of all.
        sees_next: Whether the next timed call is to call `see`.
        counts: Whether the elements of all calls are counted, not only of the timed ones.
    """

    __slots__ = (
        "__weakref__",
        "_byte_len",
        "_num_untimed",
        "_spec_of",
        "_stages",
        "count",
        "counts",
        "first",
        "of_datasets",
        "sees_next",
        "source",
        "timer",
    )

    def __init__(
        self,
        stages: Sequence[StageMeter],
        share: float,
        byte_len: Callable[[Any], int],
        spec_of: Callable[[Any], Any] | None,
        *,
        counts: bool,
    ) -> None:
        self._stages = stages
        self._byte_len = byte_len
        self.counts = counts
        self.source: StageMeter | None = None
        self.of_datasets: list[DatasetTimes | None] = [None] * len(stages)
        self.timer = CallTimer(share)
        self.first = 0
        self.count = 1
        self._num_untimed = 0  # elements of calls before the current pause that none stands for
        self._spec_of = spec_of
        self.sees_next = spec_of is not None

    def start(self) -> StepTimes:
        """Starts to time a call; returns what takes the times of its elements, for `record`."""
        self._num_untimed += self.timer.num_passed
        self.timer.start()
        by_dataset = [each is not None for each in self.of_datasets]
        times = StepTimes(by_dataset, self.first, self.count)
        if self.sees_next:
            self.sees_next = False
            times = StepTimes(by_dataset, 0, 1, self.see)
        times.traced(
            [
                [stage.node] if datasets is None else datasets.nodes
                for stage, datasets in zip(self._stages, self.of_datasets, strict=True)
            ]
        )
        return times

    def pass_over(self, count: int) -> None:
        """Records that a call that is not timed returned `count` elements."""
        self.timer.countdown -= count
        if self.counts:
            self._count_elements(count)

    def update(self) -> None:
        """Adds the times of the calls since the last timed one, by the elements before."""
        untimed = self._num_untimed + self.timer.num_passed
        before = self._stages[0].elements - (untimed if self.counts else 0)
        if untimed <= 0 or before <= 0:
            return
        self._num_untimed -= untimed
        factor = 1 + untimed / before
        for stage in self._stages:
            stage.scale(factor)
            stage.elements *= 1 if self.counts else factor

    def see(self, step: int, element: Any) -> None:
        """Records the spec of the output of a step; step -1 is the input of the first."""
        stage = self.source if step < 0 else self._stages[step]
        if stage is not None and self._spec_of is not None and element is not None:
            stage.spec = self._spec_of(element)

    def _count_elements(self, count: int) -> None:
        for stage in self._stages:
            stage.elements += count

    def record(
        self,
        times: StepTimes,
        results: Sequence[Any],
        of_call: complex,
        started_s: float,
    ) -> None:
        """Records a timed call, which stands for the elements of those since the last one.

        Args:
            times: What took the times of its elements; these and `of_call` are differences of
                `both_clocks`.
            results: All elements of the call.
            of_call: The times of the call.
            started_s: When preparing it began; what took longer than the call is its cost.
        """
        of_steps = times.of_steps
        num_elements, num_timed, call_s = len(results), len(of_steps[0]), of_call.real
        element_cost_s = reading_cost_s() * len(of_steps)
        cost = reading_cost() * (num_timed * len(of_steps) + 1)
        own = complex(max(0.0, call_s - cost.real), max(0.0, of_call.imag - cost.imag))
        weight = 1.0
        if num_elements:  # calls get longer as the pipeline goes on
            weight += self._num_untimed / num_elements
            self._num_untimed = 0
        total = self._stages[0].extrapolated(own, weight, max(1, num_elements))
        steps = [[_without_reading(each) for each in of_step] for of_step in of_steps]
        sums = [sum(of_step, 0j) for of_step in steps]
        timed = sum(sums, 0j)
        element_bytes = self._byte_len(results[-1]) if results else 0
        if self.counts:
            self._count_elements(num_elements)
        for stage, of_step, of_sum in zip(self._stages, steps, sums, strict=True):
            stage.elements += 0 if self.counts else num_elements * weight
            equal = 1 / len(sums)
            stage.total_s += total.real * (of_sum.real / timed.real if timed.real else equal)
            stage.cpu_s += total.imag * (of_sum.imag / timed.imag if timed.imag else equal)
            stage.num_steps = stage.num_steps or 1
            for of_element in of_step:
                stage.min_s = min(stage.min_s, of_element.real)
                stage.max_s = max(stage.max_s, of_element.real)
        scale = complex(
            total.real / timed.real if timed.real else 1.0,
            total.imag / timed.imag if timed.imag else 1.0,
        )
        for of_datasets, datasets, of_step in zip(
            self.of_datasets, times.datasets, steps, strict=True
        ):
            if of_datasets is not None and datasets is not None:
                of_datasets.add(datasets, of_step, scale)
        self._stages[-1].element_bytes = element_bytes or self._stages[-1].element_bytes
        if num_elements:
            self.count = self.timer.affordable(call_s, element_cost_s)
            # Another place in each call: the first element of a block finds cold caches.
            step = max(1, num_elements // 3)
            self.first = (self.first + step) % max(1, num_elements - self.count + 1)
        cost_s = clock_s() - started_s - call_s + element_cost_s * num_timed
        self.timer.record(call_s / max(1, num_elements), cost_s)


class Updated(Protocol):
    """A meter that adds to those of stages what it left out since it last timed something."""

    def update(self) -> None:
        """Adds it."""


class _BlockTimes(StepTimes):
    """The times of all elements of a block.

    Attributes:
        weight: How many blocks it counts for.
        num_added: How many times of each step are added to its meter.
    """

    __slots__ = ("num_added", "weight")

    def __init__(self, num_steps: int, count: int, weight: float) -> None:
        super().__init__([False] * num_steps, 0, count)
        self.weight = weight
        self.num_added = [0] * num_steps


class StepsMeter:
    """Times the steps of lazy blocks: in some blocks, those of all elements.

    Args:
        stages: The meter of each step.
        share: The share of time that this may cost.
        spec_of: Describes the output of each step once; `None` where no specs are recorded.
        counts: Whether `count` is called for all blocks.

    Attributes:
        timer: Decides which blocks are timed; its pauses are elements, as blocks may get longer.
        counts: See there.
    """

    def __init__(
        self,
        stages: Sequence[StageMeter],
        share: float,
        spec_of: Callable[[Any], Any] | None,
        *,
        counts: bool,
    ) -> None:
        self._stages = stages
        self._spec_of = spec_of
        self.counts = counts
        self.timer = CallTimer(share)
        self._block: _BlockTimes | None = None
        self._num_untimed = 0  # elements since the last block that was timed

    def starts(self, count: int) -> StepTimes | None:
        """Starts to time a block of `count` elements, unless it is one of those left out."""
        timer = self.timer
        timer.countdown -= count
        if timer.countdown >= 0:
            self._num_untimed += count
            return None
        weight = 1 + self._num_untimed / max(1, count)
        self._num_untimed = 0
        timer.start()
        block = self._block = _BlockTimes(len(self._stages), count, weight)
        if self._spec_of is not None and any(stage.spec is None for stage in self._stages):
            block.see = self._see
        block.traced([[stage.node] for stage in self._stages])
        return block

    def _see(self, step: int, element: Any) -> None:
        if step < 0 or element is None or self._spec_of is None:
            return
        if self._stages[step].spec is None:
            self._stages[step].spec = self._spec_of(element)

    def count(self, outputs: Iterable[int]) -> None:
        """Adds the number of elements that each step returned."""
        for stage, num_elements in zip(self._stages, outputs, strict=True):
            stage.elements += num_elements

    def finish(self) -> None:
        """Ends what `start` started."""
        block = self._block
        if block is None:
            return
        started_s = time.thread_time()
        self.update()
        self._block = None
        count = sum(map(len, block.of_steps))
        if count:
            block_s = sum(sum(times, 0j) for times in block.of_steps).real
            # Starting costs about as much as finishing.
            cost_s = 2 * (time.thread_time() - started_s) + reading_cost_s() * count
            self.timer.record(block_s / count, cost_s)

    def _add_untimed(self) -> None:
        """Counts the blocks since the last one that was timed, by the elements before."""
        before = self._stages[0].elements
        if self.counts or not self._num_untimed or not before:
            return
        factor = 1 + self._num_untimed / before
        self._num_untimed = 0
        for stage in self._stages:
            stage.scale(factor)
            stage.elements *= factor

    def update(self) -> None:
        """Adds the times that the current block has so far, and those of blocks left out."""
        self._add_untimed()
        block = self._block
        if block is None:
            return
        for i, (stage, all_times) in enumerate(zip(self._stages, block.of_steps, strict=True)):
            times = all_times[block.num_added[i] :]
            block.num_added[i] += len(times)
            if not times:
                continue
            own = [_without_reading(each) for each in times]
            stage.min_s = min(stage.min_s, *(each.real for each in own))
            stage.max_s = max(stage.max_s, *(each.real for each in own))
            if not self.counts:
                stage.elements += len(times) * block.weight
            total = sum(own, 0j) * block.weight
            stage.total_s += total.real
            stage.cpu_s += total.imag
            stage.num_steps = stage.num_steps or 1


class ReadMeter:
    """Counts and times of the place where blocks of a random-access plan are computed and taken.

    Attributes:
        node: The node that takes the blocks.
        elements: Elements taken by the consumer.
        work_s: Seconds spent computing blocks, added up over threads, without waits for storage.
        storage_s: Seconds in which they waited for storage.
        caller_s: The part of both that the consuming thread spent.
        starved_s: Seconds in which the consuming thread waited for threads or workers.
        ahead: Returns how many elements are prefetched, and the limit.
        cpu_s: The CPU seconds of `work_s`.
        transfer_cpu_s: CPU seconds that the consuming thread spent on what workers sent.
        threads: Returns what the threads did, without the consuming one.
    """

    def __init__(self) -> None:
        self.node: Node | None = None
        self.elements = 0
        self.work_s = 0.0
        self.storage_s = 0.0
        self.caller_s = 0.0
        self.starved_s = 0.0
        self.cpu_s = 0.0
        self.transfer_cpu_s = 0.0
        self.ahead: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.threads: Callable[[], PoolUse] = lambda: NO_POOL

    def snapshot(self) -> tuple[float, ...]:
        """The numbers, as `merge` takes them."""
        return (
            self.elements,
            self.work_s,
            self.storage_s,
            self.caller_s,
            self.starved_s,
            self.cpu_s,
            self.transfer_cpu_s,
            self.ahead()[0],
        )

    def merge(self, numbers: Sequence[float]) -> None:
        """Adds the `snapshot` of the same place in another process."""
        elements, work_s, storage_s, caller_s, starved_s, cpu_s, transfer_cpu_s, ahead = numbers
        self.elements += int(elements)
        self.work_s += work_s
        self.storage_s += storage_s
        self.caller_s += caller_s
        self.starved_s += starved_s
        self.cpu_s += cpu_s
        self.transfer_cpu_s += transfer_cpu_s
        num_ahead = self.ahead()[0] + int(ahead)
        self.ahead = lambda: (num_ahead, 0)

    @property
    def fill(self) -> Fill:
        """How far it is ahead of the consumer."""
        return Fill(self.elements, self.ahead()[0], 0.0)

    def starved(self, elapsed_s: float) -> None:
        """Records for how long the consuming thread waited for workers."""
        self.starved_s += elapsed_s

    def computed(self, work_s: float, storage_s: float, cpu_s: float) -> None:
        """Records a block that the consuming thread computed."""
        self.work_s += work_s
        self.cpu_s += cpu_s
        self.storage_s += storage_s
        self.caller_s += work_s + storage_s


class Fill(NamedTuple):
    """How far a thread is ahead of its consumer.

    Attributes:
        taken: Elements that the consumer took.
        ahead: Elements that are ready for it.
        idle_s: Seconds in which it waited for the consumer to take some.
    """

    taken: int
    ahead: int
    idle_s: float

    @property
    def taken_share(self) -> float:
        """The share of what was computed that the consumer took."""
        return self.taken / max(1, self.taken + self.ahead)


class PoolUse(NamedTuple):
    """What the threads of a pool did so far.

    Attributes:
        active: How many get work.
        allowed: How many may.
        cpu_s: Their CPU seconds.
        ready_s: Those, and seconds in which they waited for a core.
        busy_s: Seconds in which they had work.
    """

    active: int
    allowed: int
    cpu_s: float
    ready_s: float
    busy_s: float


NO_POOL: Final = PoolUse(0, 0, 0.0, 0.0, math.inf)
"""For readers without threads."""


class ThreadTotals(NamedTuple):
    """What a thread did so far that pulls from stages, or several of them.

    Attributes:
        fill: How far it is ahead of its consumer.
        elapsed_s: Seconds since its start.
        cpu_s: Its CPU seconds.
        ready_s: Those, and seconds in which it waited for a core.
    """

    fill: Fill
    elapsed_s: float
    cpu_s: float
    ready_s: float

    @property
    def busy_s(self) -> float:
        """Seconds in which it did not wait for its consumer."""
        return max(0.0, self.elapsed_s - self.fill.idle_s)

    def plus(self, other: ThreadTotals | None) -> ThreadTotals:
        """The sums of both."""
        if other is None:
            return self
        fill = Fill(
            self.fill.taken + other.fill.taken,
            self.fill.ahead + other.fill.ahead,
            self.fill.idle_s + other.fill.idle_s,
        )
        return ThreadTotals(
            fill,
            self.elapsed_s + other.elapsed_s,
            self.cpu_s + other.cpu_s,
            self.ready_s + other.ready_s,
        )


class WorkerReport(NamedTuple):
    """What a worker process last reported about a plan; all numbers since it opened that.

    Attributes:
        busy_s: Seconds in which it ran tasks of the plan.
        alive_s: Seconds since then, without those in which it ran tasks of other plans.
        elements: Elements it has computed.
        stages: The `StageMeter.snapshot` of each of its stages, by the stage's number.
        reads: `work_s` and `storage_s` of its blocks, and the reads of its files; see `ReadMeter`.
        blocks: The `ReadMeter.snapshot` of each stage that reads, by the stage's number.
        specs: The spec of the elements of its stages as text, by the stage's number, where seen.
        cpu_s: CPU seconds of its threads.
        ready_s: Those, and seconds in which they waited for a core.
        waits: The seconds in which threads waited for those of a stage, by its number.
        threads: What the threads did that pull for a stage, by its number.
        reported: The `StageMeter.snapshot` of what users' iterators report, by the stage's number.
        parts: The number of the first stage of the datasets that a stage opens, by that one's.
    """

    busy_s: float
    alive_s: float
    elements: int
    stages: dict[int, tuple[float, ...]]
    reads: tuple[float, ...]
    blocks: dict[int, tuple[float, ...]]
    specs: dict[int, str]
    cpu_s: float
    ready_s: float
    waits: dict[int, float]
    threads: dict[int, ThreadTotals]
    reported: dict[int, tuple[float, ...]]
    parts: dict[int, int]

    @property
    def running_s(self) -> float:
        """Seconds in which it ran any task; several may run at a time."""
        return min(self.busy_s, self.alive_s)


class ThreadRecord(NamedTuple):
    """A thread that pulls from stages.

    Attributes:
        node: The node whose consumer waits for it.
        use: Its times.
        fill: Returns how far it is ahead; `None` if it has ended before the first call.
    """

    node: Node | None
    use: ThreadUse
    fill: Callable[[], Fill | None]

    def totals(self) -> ThreadTotals | None:
        """What it did so far; `None` if it has ended before its first element."""
        fill = self.fill()
        return None if fill is None else ThreadTotals(fill, self.use.elapsed_s, *self.use.read())


class OpensIterator(Protocol):
    """A stage that runs a user's iterator."""

    node: Node | None
    opened: OpenedIterators

    @property
    def iterator(self) -> Any:
        """The iterator."""


class Recorder:
    """All that one pipeline records in one process.

    Args:
        tracks: Whether the user asked for tracking: every pull of every stage is timed.
        spec_of: Describes an element, where specs of elements are recorded.

    Attributes:
        tracks: See there.
        spec_of: See there.
        share: The share of time that timing single calls and elements may cost.
        reads: The places where blocks are computed.
    """

    def __init__(
        self, *, tracks: bool = False, spec_of: Callable[[Any], Any] | None = None
    ) -> None:
        self.tracks = tracks
        self.spec_of = spec_of
        self.share = _SHARE_TRACKED if tracks else _SHARE
        self.reads: list[ReadMeter] = []
        self._stages: weakref.WeakKeyDictionary[Node, StageMeter] = weakref.WeakKeyDictionary()
        # By the first node of those that share a step.
        self._of_datasets: weakref.WeakKeyDictionary[Node, DatasetTimes] = (
            weakref.WeakKeyDictionary()
        )
        self._steps: weakref.WeakSet[Updated] = weakref.WeakSet()
        self._waits: weakref.WeakKeyDictionary[Node, float] = weakref.WeakKeyDictionary()
        self._starts: weakref.WeakKeyDictionary[Node, tuple[float, ThreadTimes]] = (
            weakref.WeakKeyDictionary()
        )
        self._reports: dict[tuple[int, int], WorkerReport] = {}
        self._parts: weakref.WeakKeyDictionary[Node, PartsRecorder] = weakref.WeakKeyDictionary()
        self._threads: list[ThreadRecord] = []
        self._users: weakref.WeakSet[OpensIterator] = weakref.WeakSet()
        self._files: dict[int, tuple[Callable[[], Totals], Totals]] = {}
        self._closed_files: Totals = (0, 0, 0, 0.0)

    def __reduce__(self) -> Any:
        """Another process records the same about its own plan."""
        return _new_recorder, (self.tracks, self.spec_of)

    def stage(self, node: Node) -> StageMeter:
        """The meter of a node; the same each time."""
        meter = self._stages.get(node)
        if meter is None:
            meter = self._stages[node] = StageMeter()
            meter.node = weakref.ref(node)
        return meter

    def known(self, node: Node | None) -> Node | None:
        """The node that stands for `node` in reports."""
        return node

    def stages(self) -> list[tuple[Node, StageMeter]]:
        """The nodes with their meters."""
        for steps in list(self._steps):
            steps.update()
        found = []
        for node, meter in list(self._stages.items()):
            of_datasets = self._of_datasets.get(node)
            found += (of_datasets and of_datasets.divided(meter)) or [(node, meter)]
        return found

    def watch(self, meter: Updated) -> None:
        """Makes `stages` update `meter` first."""
        self._steps.add(meter)

    def loop(self, steps: Sequence[Sequence[Node]], byte_len: Callable[[Any], int]) -> LoopMeter:
        """The meter of a loop.

        Args:
            steps: The node of each step; several where each dataset has a function of its own.
            byte_len: Estimates the bytes of an element.
        """
        stages = [self.stage(nodes[0]) for nodes in steps]
        meter = LoopMeter(stages, self.share, byte_len, self.spec_of, counts=self.tracks)
        meter.of_datasets = [self._datasets(nodes) for nodes in steps]
        self._steps.add(meter)
        return meter

    def _datasets(self, nodes: Sequence[Node]) -> DatasetTimes | None:
        """What takes the times of a step by the datasets of `nodes`, unless that is one."""
        if len(nodes) == 1:
            return None
        nodes = [self.known(node) or node for node in nodes]
        times = self._of_datasets.get(nodes[0])
        if times is None or not times.are_of(nodes):
            times = self._of_datasets[nodes[0]] = DatasetTimes(nodes)
        return times

    def steps(self, nodes: Sequence[Node]) -> StepsMeter:
        """The meter of consecutive functions of elements that are computed one by one."""
        stages = [self.stage(node) for node in nodes]
        meter = StepsMeter(stages, self.share, self.spec_of, counts=self.tracks)
        self._steps.add(meter)
        return meter

    def read(self) -> ReadMeter:
        """A new meter for the blocks of a plan."""
        meter = ReadMeter()
        self.reads.append(meter)
        return meter

    def parts(self, node: Node) -> PartsRecorder:
        """The recorder of the datasets that `node` opens while it runs."""
        recorder = self._parts.get(node)
        if recorder is None:
            recorder = self._parts[node] = PartsRecorder(tracks=self.tracks, spec_of=self.spec_of)
        return recorder

    def all_parts(self) -> list[tuple[Node, PartsRecorder]]:
        """The nodes that open datasets while they run, with the recorders of those."""
        return list(self._parts.items())

    def watch_files(self, owner: Any, totals: Callable[[], Totals]) -> None:
        """Makes `files` include the reads that `totals` returns from now on, while `owner` lives.

        Args:
            owner: Whoever reads the files.
            totals: Must not refer to `owner`.
        """
        self._files[id(owner)] = (totals, totals())
        weakref.finalize(owner, self._close_files, id(owner)).atexit = False

    def _close_files(self, key: int) -> None:
        totals, before = self._files.pop(key)
        self._closed_files = _sum(self._closed_files, totals(), before)

    def files(self) -> Totals:
        """Reads of files so far: how many, their bytes, how many were timed, and their seconds."""
        reads = self._closed_files
        for totals, before in list(self._files.values()):
            reads = _sum(reads, totals(), before)
        for _, parts in self.all_parts():
            reads = _sum(reads, parts.files())
        return reads

    def all_reads(self) -> Iterator[ReadMeter]:
        """All places where blocks are computed."""
        yield from self.reads
        for _, parts in self.all_parts():
            yield from parts.all_reads()

    def all_files(self) -> tuple[float, ...]:
        """`files` of this process and of all workers."""
        totals = list(self.files())
        for report in list(self._reports.values()):
            totals = [total + more for total, more in zip(totals, report.reads[2:], strict=True)]
        return tuple(totals)

    def add_thread(self, node: Node | None, fill: Callable[[], Fill | None]) -> ThreadUse:
        """Records the times of the calling thread; it must call `end` of the result at its end.

        Args:
            node: The node whose consumer waits for the thread.
            fill: Returns how far the thread is ahead.
        """
        ended = [each for each in self._threads if each.use.has_ended and each.node is node]
        self._threads = [each for each in self._threads if each not in ended[:-1]]
        record = ThreadRecord(node, ThreadUse(), fill)
        self._threads.append(record)
        return record.use

    def threads(self) -> list[ThreadRecord]:
        """The threads that pull from stages, besides the consumer's."""
        return list(self._threads)

    def waited(self, node: Node, elapsed_s: float) -> None:
        """Records that a thread waited for the thread or the workers of `node`."""
        self._waits[node] = self._waits.get(node, 0.0) + elapsed_s

    def waits(self) -> list[tuple[Node, float]]:
        """For how long threads waited for those of each node."""
        return list(self._waits.items())

    def watch_user(self, stage: OpensIterator) -> None:
        """Makes `users` include a stage that runs a user's iterator, while it lives."""
        self._users.add(stage)

    def users(self) -> list[OpensIterator]:
        """The stages that run users' iterators."""
        return list(self._users)

    def started(self, node: Node, elapsed_s: float, times: ThreadTimes) -> None:
        """Records that so much of the waits passed while workers were started.

        Args:
            node: The node with the workers.
            elapsed_s: How long the calling thread waited.
            times: Its times during that.
        """
        before_s, before = self.start(node)
        self._starts[node] = before_s + elapsed_s, before.plus(times)

    def start(self, node: Node) -> tuple[float, ThreadTimes]:
        """For how long a thread waited for workers that were being started; see `started`."""
        return self._starts.get(node, (0.0, ThreadTimes(0.0, 0.0)))

    def report(self, node: Node, worker: int, report: WorkerReport) -> None:
        """Records the last report of a worker of `node`."""
        self._reports[id(node), worker] = report

    def reports_of(self, node: Node) -> dict[int, WorkerReport]:
        """The last report of each worker of `node`."""
        return {
            worker: report
            for (of, worker), report in sorted(self._reports.items())
            if of == id(node)
        }


def _new_recorder(
    tracks: bool,  # noqa: FBT001 - pickled arguments have no names
    spec_of: Callable[[Any], Any] | None,
) -> Recorder:
    return Recorder(tracks=tracks, spec_of=spec_of)


class PartsRecorder(Recorder):
    """Records datasets of the same kind, opened one after the other, stage by stage as one.

    Nodes of the first dataset stand for those of the others.

    Attributes:
        first: The last node of the first dataset.
    """

    def __init__(self, *, tracks: bool, spec_of: Callable[[Any], Any] | None) -> None:
        super().__init__(tracks=tracks, spec_of=spec_of)
        self.first: Node | None = None
        self._nodes: dict[int, Node] = {}
        self._numbers: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()

    def opened(self, output: Node, stages: Sequence[tuple[int, Node]]) -> None:
        """Records that the plan that ends in `output` is about to run; `stages` are numbered."""
        if self.first is None:
            self.first = output
            self._nodes = dict(stages)
        for number, node in stages:
            self._numbers[node] = number

    def known(self, node: Node | None) -> Node | None:
        """See `Recorder.known`."""
        number = None if node is None else self._numbers.get(node)
        return node if number is None else self._nodes.get(number, node)

    def stage(self, node: Node) -> StageMeter:
        """See `Recorder.stage`."""
        return super().stage(self.known(node) or node)

    def parts(self, node: Node) -> PartsRecorder:
        """See `Recorder.parts`."""
        return super().parts(self.known(node) or node)

    def waited(self, node: Node, elapsed_s: float) -> None:
        """See `Recorder.waited`."""
        super().waited(self.known(node) or node, elapsed_s)

    def started(self, node: Node, elapsed_s: float, times: ThreadTimes) -> None:
        """See `Recorder.started`."""
        super().started(self.known(node) or node, elapsed_s, times)

    def report(self, node: Node, worker: int, report: WorkerReport) -> None:
        """See `Recorder.report`."""
        super().report(self.known(node) or node, worker, report)

    def read(self) -> ReadMeter:
        """See `Recorder.read`; one for all."""
        return self.reads[0] if self.reads else super().read()


def _sum(totals: Totals, more: Totals, less: Totals = (0, 0, 0, 0.0)) -> Totals:
    reads, read_bytes, timed, timed_s = (
        total + added - left for total, added, left in zip(totals, more, less, strict=True)
    )
    return int(reads), int(read_bytes), int(timed), timed_s
