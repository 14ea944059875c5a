"""What a worker does that makes blocks of a random-access plan."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from grainmill._evaluate.fuse import defer_interrupts
from grainmill._evaluate.program import Program
from grainmill._evaluate.rows import in_batches
from grainmill._evaluate.stack import take_arrays_from
from grainmill._evaluate.tree import flatten
from grainmill._workers.messages import is_receivers_container
from grainmill._workers.worker import Job, Outcome, Place, Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.fuse import Evaluated
    from grainmill._plan.node import Node


class Task(NamedTuple):
    """The elements to make; as batches of `batch_size` where that is not 0.

    It crosses as a plain tuple, which costs less.
    """

    start: int
    num_elements: int
    batch_size: int


# Beside the elements: how many they are, how long they took, and, where they are stacked, the rows
# and exactness of each piece and the bytes of an element.
Extra: TypeAlias = tuple[int, float, list[tuple[int, bool]], float]


def settle_in(place: Place, worker_init_fn: Callable[[int, int], None] | None) -> None:
    """What every job begins with, before it makes anything of the user's ready."""
    defer_interrupts()
    take_arrays_from(place.arena)
    if worker_init_fn is not None:
        worker_init_fn(place.worker, place.num_workers)


class MakeJob(Job):
    """Runs a random-access plan."""

    def __init__(
        self, node: Node, worker_init_fn: Callable[[int, int], None] | None = None
    ) -> None:
        self._node = node
        self._worker_init_fn = worker_init_fn

    def open(self, place: Place) -> Runner:
        """See `Job.open`."""
        settle_in(place, self._worker_init_fn)
        program = Program(self._node)
        program.report(place.mark)
        return _Maker(program)


class _Maker(Runner):
    def __init__(self, program: Program) -> None:
        self._program = program
        self._leaves_stacking = False  # to the main process, which knows more containers

    def run(self, task: tuple[int, int, int]) -> Outcome:
        """See `Runner.run`."""
        try:
            return self._run(Task(*task))
        except BaseException as failure:
            return Outcome([], failure, task[0])

    def _run(self, task: Task) -> Outcome:
        began = time.perf_counter()
        if not task.batch_size or self._leaves_stacking:
            made = self._program.run(task.start, task.num_elements)
            return self._outcome(task, made, began)
        pieces, rest = in_batches(self._program, task.start, task.num_elements, task.batch_size)
        if rest is not None and not pieces:
            leaves = flatten(rest.elements)[0]
            self._leaves_stacking = any(is_receivers_container(type(leaf)) for leaf in leaves)
            return self._outcome(task, rest, began)
        count = sum(map(len, pieces))
        rows = [(len(piece), piece.exact) for piece in pieces]
        elapsed_s = time.perf_counter() - began
        extra: Extra = (count, elapsed_s, rows, self._program.row_byte_len)
        batches = [piece.batch for piece in pieces]
        return Outcome(batches, None, task.start, extra, task.batch_size)

    def _outcome(self, task: Task, made: Evaluated, began: float) -> Outcome:
        extra: Extra = (len(made.elements), time.perf_counter() - began, [], 0.0)
        return Outcome(made.elements, made.failure, task.start, extra)
