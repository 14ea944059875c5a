"""What a worker does that makes blocks of a random-access plan."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import in_batches, run_shared
from grainmill._evaluate.fuse import defer_interrupts
from grainmill._evaluate.program import Program
from grainmill._evaluate.stack import take_arrays_from
from grainmill._evaluate.storage import work_clock_s
from grainmill._evaluate.thread_pool import Task as ThreadTask
from grainmill._evaluate.thread_pool import ThreadPool
from grainmill._evaluate.tuner import Tuner
from grainmill._native import set_chunk_budget, set_index_budget, share_index
from grainmill._tree import flatten
from grainmill._workers.messages import is_receivers_container
from grainmill._workers.worker import Job, Outcome, Runner, WorkerContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.fuse import Evaluated
    from grainmill._evaluate.program import PendingElements
    from grainmill._plan.node import Node


class BlockTask(NamedTuple):
    """The elements to make; as batches of `batch_size` where that is not 0.

    It crosses as a plain tuple, which costs less.
    """

    start: int
    num_elements: int
    batch_size: int


# Beside the elements: how many they are; how long they took, waits for storage left out; where they
# are stacked, the rows and exactness of each piece and the bytes of an element; how many tasks the
# worker has under way at the same time.
Extra: TypeAlias = tuple[int, float, list[tuple[int, bool]], float, int]


def set_up_worker(place: WorkerContext, worker_init_fn: Callable[[int, int], None] | None) -> None:
    """What every job begins with, before it makes anything of the user's ready."""
    defer_interrupts()
    take_arrays_from(place.arena)
    with contextlib.suppress(ValueError):  # no room in its address space: it reads for itself
        share_index(place.index_file, tuning.WORKERS_INDEX_BYTES)
    set_chunk_budget(tuning.WORKERS_CHUNK_BYTES // place.num_workers)
    set_index_budget(tuning.WORKERS_OWN_INDEX_BYTES // place.num_workers)
    if worker_init_fn is not None:
        worker_init_fn(place.worker, place.num_workers)


class BlockJob(Job):
    """Runs a random-access plan."""

    index_byte_len = tuning.WORKERS_INDEX_BYTES

    def __init__(
        self,
        node: Node,
        worker_init_fn: Callable[[int, int], None] | None = None,
        num_threads: int = 1,
    ) -> None:
        self._node = node
        self._worker_init_fn = worker_init_fn
        self._num_threads = num_threads

    def open(self, place: WorkerContext) -> Runner:
        """See `Job.open`."""
        set_up_worker(place, self._worker_init_fn)
        program = Program(self._node)
        program.report(place.mark)
        return _Maker(program, max(1, self._num_threads))


class _Maker(Runner):
    """Computes in the worker's main thread, or in others where functions or records are waited for.

    Those do several tasks at the same time, and the main thread only hands them out.
    """

    def __init__(self, program: Program, num_threads: int) -> None:
        self._program = program
        self._threads = ThreadPool(owner_steps_in=True)
        # As far as a worker knows, somebody waits for all that it computes.
        self._tuner = Tuner(self._threads, num_threads)
        self._threads.enter(self._tuner.record)
        self._num_under_way = 0
        self._finished: deque[bool] = deque()  # one for each that is done and still counted
        self._looked_at = 0.0
        self._leaves_stacking = False  # to the main process, which knows more containers

    def run(self, task: tuple[int, int, int]) -> Outcome:
        """See `Runner.run`."""
        try:
            return self._threads.do_here(lambda: self._computed(BlockTask(*task)))
        except BaseException as failure:
            return Outcome([], failure, task[0])

    def start(self, task: tuple[int, int, int], finish: Callable[[Outcome], None]) -> None:
        """See `Runner.start`."""
        far = self._program.waits_for_storage
        self._count_finished()
        if not self._num_under_way:
            if self._threads.active == 1 and not far:
                finish(self.run(task))
                return
            self._looked_at = time.perf_counter()
        self._num_under_way += 1
        start, count, _ = task
        begun = self._program.begin(start, count) if far else None

        def compute() -> None:
            try:
                outcome = self._computed(BlockTask(*task), begun)
            except BaseException as failure:
                outcome = Outcome([], failure, start)
            self._finished.append(True)
            finish(outcome)

        self._threads.submit(ThreadTask(compute))

    def look(self) -> None:
        """See `Runner.look`."""
        self._count_finished()
        now = time.perf_counter()
        self._tuner.record(self._threads.take_computed(), now - self._looked_at)
        self._looked_at = now

    def _count_finished(self) -> None:
        while self._finished:
            self._finished.popleft()
            self._num_under_way -= 1

    def _computed(self, task: BlockTask, begun: PendingElements | None = None) -> Outcome:
        if begun is not None:
            begun.settle()
        began = work_clock_s()
        if begun is not None:
            made = begun()
            self._threads.note(task.num_elements, 0.0)
            return self._outcome(task, made, began)
        if not task.batch_size or self._leaves_stacking:
            made = run_shared(self._program, task.start, task.num_elements)
            return self._outcome(task, made, began)
        pieces, rest = in_batches(self._program, task.start, task.num_elements, task.batch_size)
        if rest is not None and not pieces:
            leaves = flatten(rest.elements)[0]
            self._leaves_stacking = any(is_receivers_container(type(leaf)) for leaf in leaves)
            return self._outcome(task, rest, began)
        count = sum(map(len, pieces))
        rows = [(len(piece), piece.exact) for piece in pieces]
        elapsed_s = work_clock_s() - began
        extra: Extra = (count, elapsed_s, rows, self._program.row_byte_len, self._at_once)
        batches = [piece.batch for piece in pieces]
        return Outcome(batches, None, task.start, extra, task.batch_size)

    def _outcome(self, task: BlockTask, made: Evaluated, began: float) -> Outcome:
        elapsed_s = work_clock_s() - began
        extra: Extra = (len(made.elements), elapsed_s, [], 0.0, self._at_once)
        return Outcome(made.elements, made.failure, task.start, extra)

    @property
    def _at_once(self) -> int:
        """Tasks that are under way at the same time, if there are enough."""
        return tuning.TASKS_WHERE_FAR if self._program.waits_for_storage else self._threads.active
