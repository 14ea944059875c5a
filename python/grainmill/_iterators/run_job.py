"""What a worker does that runs a pipeline of its own."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate.make_job import settle_in
from grainmill._iterators.read import make_nothing_ahead
from grainmill._workers.worker import Job, Outcome, Place, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._iterators.stage import Stage, State
    from grainmill._plan.node import Node

# Elements that are made in a moment come many at once, whatever the buffer's size.
_BLOCK_S = 0.002
BLOCK_LEN = 64


class Standing(NamedTuple):
    """Where to go on, and how many elements were given before that."""

    state: State
    num_given: int


class Task(NamedTuple):
    """The next elements, from `state` on if there is one.

    Attributes:
        state: Where to go on; `None` where the task before ended.
        num_elements: At least one and so many or so are made, more if that takes but a moment.
        at_most: So many are made at most, as far as they come one by one.
    """

    state: Standing | None
    num_elements: int
    at_most: int


class RunJob(Job):
    """Runs a sequential plan of its own in each worker; what it reads is made `ahead` or not."""

    def __init__(
        self,
        plans: list[Node],
        worker_init_fn: Callable[[int, int], None] | None,
        open_plan: Callable[[Node], Stage],
        *,
        ahead: bool,
    ) -> None:
        self._plans = plans
        self._worker_init_fn = worker_init_fn
        self._open_plan = open_plan
        self._ahead = ahead

    @property
    def modules(self) -> Sequence[str]:
        """See `Job.modules`."""
        return (type(self).__module__, self._open_plan.__module__)

    def open(self, place: Place) -> Runner:
        """See `Job.open`."""
        settle_in(place, self._worker_init_fn)
        if not self._ahead:
            make_nothing_ahead()
        return _PartRunner(self._open_plan(self._plans[place.worker]), place.mark)


class _PartRunner(Runner):
    """A stage under way, and how many elements it gave."""

    def __init__(self, stage: Stage, mark: Callable[[int], None]) -> None:
        self._stage = stage
        self._mark = mark
        self._count = 0

    def run(self, task: Task) -> Outcome:
        """See `Runner.run`."""
        first = self._count
        elements: list[Any] = []
        states: list[State] = []
        try:
            if task.state is not None:
                self._stage.restore(task.state.state)
                first = self._count = task.state.num_given
            deadline = time.perf_counter() + _BLOCK_S
            for count in itertools.chain([task.num_elements], itertools.repeat(1)):
                self._mark(self._count)
                block = self._stage.pull(count)
                made = len(block.elements)
                self._count += made
                elements += block.elements
                states += [block.state_after(k) for k in range(1, made + 1)]
                if not made or len(elements) >= task.at_most or time.perf_counter() > deadline:
                    break
        except BaseException as failure:
            return Outcome(elements, failure, first, states)
        return Outcome(elements, None, first, states)
