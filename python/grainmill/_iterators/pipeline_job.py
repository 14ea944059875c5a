"""What a worker does that runs a pipeline of its own."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grainmill._evaluate import tuning
from grainmill._evaluate.block_job import set_up_worker
from grainmill._iterators.cursor import END, Cursor
from grainmill._workers.worker import Job, Outcome, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._iterators.cursor import ResumePoint
    from grainmill._iterators.stage import Stage, State
    from grainmill._plan.node import Node
    from grainmill._workers.worker import WorkerContext

# Elements that are made in a moment come many at once, whatever the buffer's size.
_BLOCK_S = 0.002
BLOCK_LEN = 64


class StartPoint(NamedTuple):
    """Where to go on, and how many elements were given before that.

    Those are counted from the start if `from_start`, else from a state that was restored.
    """

    state: State
    num_delivered: int
    from_start: bool


class PipelineTask(NamedTuple):
    """The next elements, from `state` on if there is one.

    Attributes:
        state: Where to go on; `None` where the task before ended.
        num_elements: At least one and so many or so are made, more if that takes but a moment.
        at_most: So many are made at most, as far as they come one by one.
    """

    state: StartPoint | None
    num_elements: int
    at_most: int


class ToldPlaces:
    """The places after elements of a worker, told by it: a `state_after` that counts from 1.

    States are made of them when asked for. Of 100 datasets that take turns, a state is some
    hundred dicts, and one element changes one of them; 64 places share all the rest.
    """

    __slots__ = ("_places", "_text")

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._places: list[ResumePoint] | None = None

    def __call__(self, count: int) -> State:
        if self._places is None:
            self._places = pickle.loads(self._text)
        after, position = self._places[count - 1]
        return after(position)


def told_places(places: list[ResumePoint]) -> bytes:
    """What `ToldPlaces` takes."""
    return pickle.dumps(places, pickle.HIGHEST_PROTOCOL)


# Makes a plan ready to run; a function that workers can import.
OpenPlan: TypeAlias = "Callable[[Node, Context], Stage]"


class PipelineJob(Job):
    """Runs a sequential plan of its own in each worker."""

    index_byte_len = tuning.WORKERS_INDEX_BYTES

    def __init__(
        self,
        plans: list[Node],
        worker_init_fn: Callable[[int, int], None] | None,
        open_plan: OpenPlan,
        context: Context,
    ) -> None:
        self._plans = plans
        self._worker_init_fn = worker_init_fn
        self._open_plan = open_plan
        self._context = context

    @property
    def modules(self) -> Sequence[str]:
        """See `Job.modules`."""
        return (type(self).__module__, self._open_plan.__module__)

    def open(self, place: WorkerContext) -> Runner:
        """See `Job.open`."""
        set_up_worker(place, self._worker_init_fn)
        stage = self._open_plan(self._plans[place.worker], self._context)
        return _PartRunner(stage, place)


class _PartRunner(Runner):
    """A stage under way, and how many elements it gave.

    Messages number elements as the consumer counts them, who takes one of each worker in turn, as
    long as all workers have some.
    """

    def __init__(self, stage: Stage, place: WorkerContext) -> None:
        self._cursor = Cursor(stage)
        self._place = place
        self._count = 0

    def _number(self, count: int) -> int:
        return count * self._place.num_workers + self._place.worker

    def _start(self, standing: StartPoint) -> None:
        self._cursor.restore(standing.state)
        self._count = standing.num_delivered
        if not standing.from_start:
            with contextlib.suppress(Exception):  # where elements have no index
                self._count = self._cursor.next_index()

    def run(self, task: PipelineTask) -> Outcome:
        """See `Runner.run`."""
        first = self._count
        elements: list[Any] = []
        places: list[ResumePoint] = []
        try:
            if task.state is not None:
                self._start(task.state)
                first = self._count
            deadline = time.perf_counter() + _BLOCK_S
            while True:
                self._place.mark(self._number(self._count))
                element = self._cursor.next()
                if element is END:
                    break
                self._count += 1
                elements.append(element)
                places.append(self._cursor.place())
                if len(elements) < task.num_elements:
                    continue
                if len(elements) >= task.at_most or time.perf_counter() > deadline:
                    break
            told = told_places(places)
        except BaseException as failure:
            return self._outcome(elements, failure, first, told_places(places))
        self._cursor.forget()  # arrays that nobody else has are sent without a copy
        return self._outcome(elements, None, first, told)

    def _outcome(
        self, elements: list[Any], failure: BaseException | None, first: int, states: bytes
    ) -> Outcome:
        stride = self._place.num_workers
        return Outcome(elements, failure, self._number(first), states, stride=stride)
