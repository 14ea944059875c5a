"""Takes the times of sequential stages, at the pulls between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._evaluate.batch_blocks import byte_len
from grainmill._iterators.read import ReadStage
from grainmill._stats.meters import CallTimer, StageMeter, clock_cost_s, clock_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import Block, Stage
    from grainmill._stats.meters import Recorder

# What timing one pull of one stage costs, in readings of the clock.
_PULL_READINGS = 12
# Where all pulls are timed, stages that were opened meanwhile are included after so many seconds.
_REFRESH_S = 0.1


class PullMeter:
    """Times the pulls of `stage` and of the stages upstream that the same thread pulls from.

    In a timed pull, `pull` of each of these stages is replaced by one that takes the time. Pulls
    that are not timed cost nothing.

    Args:
        stage: The last stage.
        recorder: Takes the times.
        on_start: Called with the time at each timed pull.

    Attributes:
        timer: Decides which pulls are timed.
    """

    def __init__(
        self, stage: Stage, recorder: Recorder, on_start: Callable[[float], None] | None = None
    ) -> None:
        self._stage = stage
        self._on_start = on_start
        self._recorder = recorder
        self.timer = CallTimer(recorder.share)
        self._timed: list[Stage] = []
        self._weight = 1
        self._stack: list[float] = []
        self._started_s = self._start_cost_s = 0.0
        self._refreshed_s = 0.0

    @property
    def _is_permanent(self) -> bool:
        """Whether all pulls are timed."""
        return self._recorder.tracks or self._recorder.spec_of is not None

    def pull(self) -> Block:
        """A timed pull of as many elements as `stage` prefers."""
        self._start()
        try:
            return self._stage.pull(self._stage.pull_size)
        finally:
            self.finish()

    def starts(self) -> bool:
        """Whether the next pull is timed; if so, `finish` must be called after it."""
        timer = self.timer
        timer.countdown -= 1
        if timer.countdown >= 0 and not self._is_permanent:
            return False
        self._start()
        return True

    def _start(self) -> None:
        self._weight = 1 if self._is_permanent else self.timer.start()
        started_s = clock_s()
        if started_s - self._refreshed_s > _REFRESH_S or not self._timed:
            self.stop()
            self._refreshed_s = started_s
            self._replace(self._stage)
        if self._on_start is not None:
            self._on_start(started_s)
        self._started_s = clock_s()
        self._start_cost_s = self._started_s - started_s

    def finish(self) -> None:
        """Ends a timed pull."""
        if self._is_permanent:
            return
        finished_s = clock_s()
        elapsed_s = finished_s - self._started_s
        cost_s = self._start_cost_s + clock_cost_s() * _PULL_READINGS * len(self._timed)
        self.stop()
        self.timer.record(elapsed_s, cost_s + clock_s() - finished_s)

    def stop(self) -> None:
        """Makes pulls cost nothing again."""
        for stage in self._timed:
            for name in ("pull", "pull_batches"):
                stage.__dict__.pop(name, None)
        self._timed.clear()

    def _replace(self, stage: Stage) -> None:
        """Makes the pulls of `stage` and of those upstream take the time."""
        if stage.node is None:
            pass
        elif isinstance(stage, ReadStage):  # which counts its elements and times itself
            self._replace_one(stage, ("pull_batches",), None)
            self._replace_one(stage, ("pull",), None, self._recorder.stage(stage.node))
        else:
            meter = None if stage.is_elementwise else self._recorder.stage(stage.node)
            self._replace_one(stage, ("pull",), meter)
        if not stage.has_own_thread:
            for parent in stage.parents:
                self._replace(parent)

    def _replace_one(
        self,
        stage: Stage,
        names: tuple[str, ...],
        meter: StageMeter | None,
        of_spec: StageMeter | None = None,
    ) -> None:
        for name in names:
            pull = getattr(stage, name)
            stage.__dict__[name] = self._timed_pull(pull, meter, of_spec or meter)
        self._timed.append(stage)

    def _timed_pull(
        self, pull: Callable[..., Any], meter: StageMeter | None, of_spec: StageMeter | None
    ) -> Callable[..., Any]:
        stack, spec_of = self._stack, self._recorder.spec_of

        def timed_pull(*limits: int) -> Any:
            num_elements = 0
            stack.append(0.0)
            started_s = clock_s()
            try:
                pulled = pull(*limits)
                if of_spec is not None:
                    num_elements = len(pulled.elements)
            finally:
                elapsed_s = clock_s() - started_s
                own_s = elapsed_s - stack.pop()
                if stack:
                    stack[-1] += elapsed_s
                if meter is not None:
                    meter.add(num_elements, own_s, self._weight)
            if of_spec is not None and num_elements:
                if pulled.finish is not None:
                    of_spec.passes_lazy = True
                    return pulled
                if of_spec.spec is None and spec_of is not None:
                    of_spec.spec = spec_of(pulled.elements[0])
                if not of_spec.element_bytes or self._recorder.tracks:
                    of_spec.element_bytes = byte_len(pulled.elements[-1])
            return pulled

        return timed_pull
