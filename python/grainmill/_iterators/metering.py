"""Takes the times of sequential stages, at the pulls between them."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.batches.batch_blocks import byte_len
from grainmill._iterators.read import ReadStage
from grainmill._iterators.user_defined import UserDefinedStage
from grainmill._stats import timeline
from grainmill._stats.meters import CallTimer, StageMeter, both_clocks, clock_s, reading_cost_s
from grainmill._stats.users_iterators import TimedCall, TimedIterators, called_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._iterators.base.stage import Block, Stage
    from grainmill._stats.meters import Recorder

# What timing one pull of one stage costs, in steps of an element.
_PULL_STEPS = 3
# So many pulls in a row show how long the consumer is away; then those after a timed one do.
_ENOUGH_AWAY = 16
# Where all pulls are timed, stages that were opened meanwhile are included after so many seconds.
_REFRESH_S = 0.1


class PullMeter:
    """Times the pulls of `stage` and of the stages upstream that the same thread pulls from.

    In a timed pull, `pull` of each of these stages is replaced by one that takes the time, and so
    is `__next__` of the iterators that a user's one calls. Pulls that are not timed cost nothing.

    Args:
        stage: The last stage.
        recorder: Takes the times.
        on_start: Called with the time at each timed pull.

    Attributes:
        timer: Decides which pulls are timed; its pauses are elements, as pulls may get longer.
    """

    def __init__(
        self, stage: Stage, recorder: Recorder, on_start: Callable[[float], None] | None = None
    ) -> None:
        self._stage = stage
        self._on_start = on_start
        self._recorder = recorder
        self.timer = CallTimer(recorder.share)
        self._of_all = StageMeter()
        self._away: deque[tuple[float, int]] = deque(maxlen=2 * _ENOUGH_AWAY)
        self._timed: list[Stage] = []
        self._calls: list[TimedCall] = []
        self._iterators = TimedIterators(self._calls, self._add_call)
        self._pulls: list[tuple[StageMeter, int, float, float]] = []  # of the current timed pull
        self._added: dict[StageMeter, tuple[float, complex]] = {}  # what each got from all of them
        self._num_pulled = 0  # elements of the current timed pull
        self._num_timed = 0  # elements of timed pulls, and of those that these stand for
        self._num_untimed = 0  # elements of pulls before the current pause that none stands for
        self._started_s = self._start_cost_s = 0.0
        self._finished_s = 0.0  # when the timed pull before ended, if there was one
        self._refreshed_s = 0.0
        self._left_at: tuple[float, int, int] | None = None
        recorder.watch(self)

    @property
    def _is_permanent(self) -> bool:
        """Whether all pulls are timed."""
        return self._recorder.tracks or self._recorder.spec_of is not None

    def pull(self) -> Block:
        """A timed pull of as many elements as `stage` prefers.

        The next pull comes here, too, which shows how long the consumer was away between them.
        """
        if self._left_at is not None:
            left_s, count, countdown = self._left_at
            self._left_at = None
            if count:
                self._away.append(((clock_s() - left_s) / count, count))
            self.timer.countdown = countdown
            if countdown > 0 and not self._is_permanent:
                block = self._stage.pull(self._stage.pull_size)
                self.timer.countdown -= len(block.elements)
                if len(self._away) < _ENOUGH_AWAY:
                    self._leave(block)
                return block
        self._start()
        num_elements = 0
        try:
            block = self._stage.pull(self._stage.pull_size)
            num_elements = len(block.elements)
        finally:
            self.finish(num_elements)
        self._leave(block)
        return block

    def _leave(self, block: Block) -> None:
        self._left_at = clock_s(), len(block.elements), self.timer.countdown
        self.timer.countdown = 0

    def away_s(self, num_left: int) -> float:
        """How long the consumer is away for an element, functions that its request runs included.

        That is the time that three in four exceed, as some have waits for the interpreter lock;
        infinite if it is unknown.

        Args:
            num_left: How many elements of the last pull it has not taken.
        """
        away, left_at = list(self._away), self._left_at
        if left_at is not None and left_at[1] > num_left:
            count = left_at[1] - num_left
            away.append(((clock_s() - left_at[0]) / count, count))
        left = sum(count for _, count in away) / 4
        if left < _ENOUGH_AWAY / 8:
            return math.inf
        for seconds, count in sorted(away):
            left -= count
            if left <= 0:
                return seconds
        return math.inf

    def starts(self) -> bool:
        """Whether the next pull is timed; `finish` must be called after it."""
        if self.timer.countdown > 0 and not self._is_permanent:
            return False
        self._start()
        return True

    def _start(self) -> None:
        self._num_untimed += self.timer.num_passed
        self.timer.start()
        started_s = clock_s()
        if started_s - self._refreshed_s > _REFRESH_S or not self._timed:
            self.stop()
            self._refreshed_s = started_s
            self._replace(self._stage)
        if self._on_start is not None:
            self._on_start(started_s)
        self._started_s = clock_s()
        self._start_cost_s = self._started_s - started_s

    def finish(self, num_elements: int, *, is_timed: bool = True) -> None:
        """Ends a pull, which returned `num_elements`."""
        if not is_timed:
            self.timer.countdown -= num_elements
            return
        # Elements may come from the block that was pulled before, and others remain in this one.
        num_pulled, self._num_pulled = self._num_pulled, 0
        self._num_untimed += num_elements - num_pulled
        if not num_pulled:
            self._pulls.clear()
            self.stop()
            self.timer.skip_pause()
            return
        untimed = max(0, self._num_untimed)
        self._num_untimed -= untimed
        self._num_timed += num_pulled + untimed
        weight = 1 + untimed / num_pulled
        for meter, count, total_s, cpu_s in self._pulls:
            before = meter.elements, complex(meter.total_s, meter.cpu_s)
            meter.add(count, total_s, cpu_s, weight)
            elements, times = self._added.get(meter, (0.0, 0j))
            elements += meter.elements - before[0]
            times += complex(meter.total_s, meter.cpu_s) - before[1]
            self._added[meter] = elements, times
        self._pulls.clear()
        if self._is_permanent:
            return
        # The consumer's time is the pipeline's, too. That of this pull alone says little: it may
        # have waited for a task of a worker, whose other elements come without a wait.
        finished_s = clock_s()
        since_s = self._finished_s or self._started_s
        element_s = (finished_s - since_s) / (num_pulled + untimed)
        num_timed = len(self._timed) + self._iterators.take_calls()
        cost_s = self._start_cost_s + reading_cost_s() * _PULL_STEPS * num_timed
        self.stop()
        self._finished_s = clock_s()
        self.timer.record(element_s, cost_s + self._finished_s - finished_s)

    def update(self) -> None:
        """Adds the times of the pulls since the last timed one, by the elements before."""
        untimed = self._num_untimed + self.timer.num_passed
        if untimed <= 0 or not self._num_timed or self._left_at is not None:
            return
        self._num_untimed -= untimed
        factor = untimed / self._num_timed
        self._num_timed += untimed
        for meter, (elements, times) in list(self._added.items()):
            meter.elements += factor * elements
            meter.total_s += factor * times.real
            meter.cpu_s += factor * times.imag
            self._added[meter] = (1 + factor) * elements, (1 + factor) * times

    @property
    def cpu_s(self) -> float:
        """The CPU seconds of the pulls of `stage`, those of the stages upstream included."""
        self.update()
        return self._of_all.cpu_s

    def stop(self) -> None:
        """Makes pulls cost nothing again."""
        for stage in self._timed:
            for name in ("pull", "pull_batches"):
                stage.__dict__.pop(name, None)
        self._timed.clear()
        self._iterators.stop()

    def _replace(self, stage: Stage) -> None:
        """Makes the pulls of `stage` and of those upstream take the time."""
        if stage.node is None:
            pass
        elif isinstance(stage, ReadStage):  # which counts its elements and times itself
            self._replace_one(stage, ("pull_batches",), None, None, waits=False)
            self._replace_one(stage, ("pull",), None, self._recorder.stage(stage.node), waits=False)
        else:
            meter = None if stage.is_elementwise else self._recorder.stage(stage.node)
            # Its thread counts its elements, unless it is a node of its own.
            counted = [parent.node for parent in stage.parents if stage.has_own_thread]
            self._replace_one(
                stage,
                ("pull",),
                None if stage.node in counted else meter,
                meter,
                waits=stage.has_own_thread,
            )
        if isinstance(stage, UserDefinedStage) and stage.node is not None:
            for node, iterator in called_by(stage):
                self._iterators.start(
                    iterator, None if node is None else self._recorder.stage(node)
                )
        if not stage.has_own_thread:
            for parent in stage.parents:
                self._replace(parent)

    def _add_call(self, meter: StageMeter, elements: list[Any], times: complex) -> None:
        """Adds a call of a user's iterator, which returned `elements`."""
        self._pulls.append((meter, len(elements), times.real, times.imag))
        if elements:
            self._look_at(elements, meter)

    def _is_unknown(self, meter: StageMeter) -> bool:
        """Whether nothing is known yet of what the elements of a stage are like."""
        return not meter.element_bytes or (
            meter.spec is None and self._recorder.spec_of is not None
        )

    def _look_at(self, elements: Sequence[Any], meter: StageMeter) -> None:
        """Records what elements are like."""
        spec_of = self._recorder.spec_of
        if meter.spec is None and spec_of is not None:
            meter.spec = spec_of(elements[0])
        if not meter.element_bytes or self._recorder.tracks:
            meter.element_bytes = byte_len(elements[-1])

    def _replace_one(
        self,
        stage: Stage,
        names: tuple[str, ...],
        meter: StageMeter | None,
        of_spec: StageMeter | None,
        *,
        waits: bool,
    ) -> None:
        for name in names:
            is_last = stage is self._stage and name == "pull"
            timed = self._timed_pull(stage, name, meter, of_spec, waits=waits, is_last=is_last)
            stage.__dict__[name] = timed
        self._timed.append(stage)

    def _timed_pull(
        self,
        stage: Stage,
        name: str,
        meter: StageMeter | None,
        of_spec: StageMeter | None,
        *,
        waits: bool,
        is_last: bool,
    ) -> Callable[..., Any]:
        """The method `name` with its times going to `meter`; only CPU time, if it `waits`."""
        pull = getattr(stage, name)
        calls = self._calls

        def timed_pull(*limits: int) -> Any:
            num_elements = num_pulled = 0
            call = TimedCall(of_spec)
            calls.append(call)
            started = both_clocks()
            try:
                pulled = pull(*limits)
                if is_last:
                    num_pulled = len(pulled.elements)
                    self._num_pulled += num_pulled
                if of_spec is not None:
                    num_elements = len(pulled.elements)
            finally:
                ended = both_clocks()
                elapsed = ended - started
                calls.pop()
                if not stage.is_elementwise and (taken := timeline.current) is not None:
                    taken.add(taken.label(stage.node), "stage", started.real, ended.real)
                own = elapsed - call.nested
                if calls:
                    calls[-1].nested += elapsed
                if meter is not None:
                    own_s = own.imag if waits else own.real
                    self._pulls.append((meter, num_elements, own_s, own.imag))
                if is_last:
                    self._pulls.append((self._of_all, num_pulled, elapsed.real, elapsed.imag))
            if of_spec is not None and num_elements:
                if pulled.finish is None:
                    self._look_at(pulled.elements, of_spec)
                elif pulled.columns is None:
                    of_spec.passes_lazy = True
                elif self._is_unknown(of_spec):  # it makes a row, and calls nothing
                    self._look_at(pulled.finished(0, 1).elements, of_spec)
            return pulled

        return timed_pull
