"""Blocks of a program's elements in order, made when asked for or ahead of that.

Three ways to make them, one face: in the caller (`InlineBlocks`), in the caller with the engine
reading the next block meanwhile (`EngineBlocks`), and on Python threads (`ThreadBlocks`).
"""

from __future__ import annotations

import abc
import functools
import os
import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.rows import BLOCK_BYTES, block_len, in_batches
from grainmill._evaluate.thread_count import ThreadCount
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.program import Program
    from grainmill._evaluate.rows import Made, StackedRows
    from grainmill._plan.options import ReadOptions

_INLINE_BLOCK_S = 0.002
# Who wakes up meets a cold cache and takes the interpreter lock from who works: blocks of 5 ms cost
# a tokenizer a fifth more than blocks of 20 ms, which cost as much as none that change threads.
HAND_OVER_S = 0.02
_MOST_DEMANDED = 1024
# A block that changes threads leaves its core's cache anyway: fewer, larger ones cost less.
_HANDED_OVER_BYTES = 4 * BLOCK_BYTES
_WHOLE_BATCH_S = 0.05
# Batches that are as small as this together are one task, though more elements are ahead then.
SMALL_BYTES = 4 << 20
SMALL_TIMES = 8


class Blocks(abc.ABC):
    """The elements of `program` from a position on, a block at a time.

    Attributes:
        position: Where the next block begins.
        batch_size: Elements that make a batch further on, counted from the last `restart`; 0 if
            none do, or no longer. Blocks are then batches where that is possible.
        ready: Batches that the next calls of `take` give without waiting.
    """

    def __init__(self, program: Program, length: int) -> None:
        self.position = 0
        self.batch_size = 0
        self.ready: deque[StackedRows] = deque()
        self._rest: Evaluated | None = None  # what comes after those
        self._program = program
        self._length = length
        self._first = 0

    def take(self, limit: int) -> Evaluated | StackedRows:
        """Returns the elements from `position` on, and moves it past those made.

        There is at least one, unless the first fails or the plan is at its end. A block may hold
        more than `limit` elements where they were made ahead.
        """
        if not self.ready and self._rest is None:
            before = self.position
            try:
                self._make(limit)
            except BaseException:  # Ctrl-C comes anywhere
                self.rewind(before)
                raise
        if self.ready:
            rows = self.ready.popleft()
            self.position += rows.count
            return rows
        rest, self._rest = self._rest or Evaluated([], None), None
        self.position += len(rest.elements)
        return rest

    @abc.abstractmethod
    def _make(self, limit: int) -> None:
        """Makes the elements from `position` on, up to the plan's end, and keeps them."""

    def _keep(self, made: Made) -> int:
        """Has the next calls of `take` give `made`; returns how many elements there are."""
        pieces, self._rest = made
        for piece in pieces:
            self.ready += piece.cut(self.batch_size)
        return sum(map(len, pieces)) + (0 if self._rest is None else len(self._rest.elements))

    def restart(self, position: int) -> None:
        """Makes `position` the next, where a batch begins; what was made ahead is dropped."""
        self.rewind(position)
        self._first = position

    def rewind(self, position: int) -> None:
        """Makes `position` the next, in mid-batch or not; what was made ahead is dropped."""
        self.position = position
        self.ready.clear()
        self._rest = None

    def _until_batch(self, position: int) -> int:
        """Elements from `position` to where a batch begins."""
        return (self._first - position) % self.batch_size if self.batch_size else 0

    def _makes_whole_batches(self, pace: Pace) -> bool:
        """Whether a block may be a whole batch: not where other threads might help with it."""
        if not self.batch_size or pace.element_s is None:
            return False
        if pace.element_s * self.batch_size > _WHOLE_BATCH_S:
            return False
        return not self._program.waits_for_storage

    def start(self) -> None:  # noqa: B027 - there may be nothing to begin
        """Begins to make elements ahead."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to stop
        """Stops what runs; safe to call again."""


class Pace:
    """How many elements to make at once, so that a block takes about `block_s` seconds.

    Attributes:
        most: The most that may be made at once.
        count: How many to make at once now.
        element_s: What one element took in the last block; `None` before the first.
    """

    def __init__(self, most: int, block_s: float, first: int) -> None:
        self.most = max(1, most)
        self.count = min(self.most, first)
        self.element_s: float | None = None
        self._block_s = block_s

    def record(self, count: int, elapsed_s: float) -> None:
        """Takes note that `count` elements took `elapsed_s`."""
        self.element_s = elapsed_s / count
        if elapsed_s > self._block_s:
            self.count = max(1, min(self.count, count) // 2)
        elif elapsed_s < self._block_s / 2 and count >= self.count:
            self.count = min(self.most, self.count * 2)


class InlineBlocks(Blocks):
    """Makes elements in the caller, `at_most` at once beyond those asked for."""

    def __init__(self, program: Program, length: int, at_most: int) -> None:
        super().__init__(program, length)
        self._ahead = at_most > 0
        most = block_len(program.mean_byte_len, at_most or _MOST_DEMANDED)
        self._pace = Pace(most, _INLINE_BLOCK_S, 1 if program.runs_user_code else most)

    def _make(self, limit: int) -> None:
        wanted = self._pace.count if self._ahead else min(limit, self._pace.count)
        whole = self._makes_whole_batches(self._pace)
        missing = self._until_batch(self.position) if whole else 0
        if missing:
            wanted, whole = min(wanted, missing), False
        elif whole:
            several = self._ahead and self._program.batches_small
            wanted = self.batch_size * (max(1, wanted // self.batch_size) if several else 1)
        count = min(wanted, self._length - self.position)
        if count <= 0:
            return
        began = time.perf_counter()
        if whole:
            made: Made = in_batches(self._program, self.position, count, self.batch_size)
        else:
            made = [], self._program.run(self.position, count)
        self._pace.record(count, time.perf_counter() - began)
        self._keep(made)


class EngineBlocks(Blocks):
    """Makes elements in the caller while the engine's threads read those of the next block."""

    def __init__(self, program: Program, length: int, at_most: int) -> None:
        super().__init__(program, length)
        self._count = block_len(program.mean_byte_len, max(1, at_most // 2))
        self._pending: tuple[int, Callable[[], Evaluated]] | None = None

    def _make(self, limit: int) -> None:
        self.start()
        if self._pending is None:
            return
        count, finish = self._pending
        self._pending = self._begin(self.position + count)
        made = finish()
        if made.failure is not None:
            self._pending = None
        self._keep(([], made))

    def _begin(self, position: int) -> tuple[int, Callable[[], Evaluated]] | None:
        count = min(self._count, self._length - position)
        return (count, self._program.begin(position, count)) if count > 0 else None

    def rewind(self, position: int) -> None:
        """See `Blocks.rewind`."""
        super().rewind(position)
        self._pending = None

    def start(self) -> None:
        """See `Blocks.start`."""
        if self._pending is None:
            self._pending = self._begin(self.position)

    def close(self) -> None:
        """See `Blocks.close`."""
        self._pending = None


class _Task:
    """One block on its way through a thread."""

    __slots__ = ("count", "cpu_s", "done", "elapsed_s", "made", "make", "thread")

    def __init__(self, count: int, make: Callable[[], Made], thread: int) -> None:
        self.count = count
        self.make: Callable[[], Made] | None = make
        self.made: Made = [], None
        self.thread = thread
        self.elapsed_s = self.cpu_s = 0.0
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Makes the block, unless nobody wants it any more."""
        make = self.make
        if make is not None:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                self.made = make()
            except BaseException as failure:
                self.made = [], Evaluated([], failure)
            self.elapsed_s = time.perf_counter() - began
            self.cpu_s = time.thread_time() - cpu_began
        self.done.release()


class Demand:
    """What a thread that makes elements has to know of those who want them.

    Attributes:
        ended: Whether nobody wants any more.
        urgent: Whether somebody waits.
    """

    __slots__ = ("ended", "urgent")

    def __init__(self) -> None:
        self.ended = self.urgent = False


class ThreadBlocks(Blocks):
    """Makes elements on threads named `grain-prefetch_<n>`, in order and a bounded way ahead.

    The consumer hands out the blocks and takes them back; threads never share a block. How many
    of the allowed threads get work is found out while running (`ThreadCount`). Where a batch
    follows that is made in a moment, it is one block: its rows are copied by the core that has
    just made them.

    Attributes:
        demand: Given where the consumer is the first of the threads: it makes its blocks when it
            takes them, until the demand has ended.
    """

    def __init__(self, program: Program, length: int, options: ReadOptions) -> None:
        super().__init__(program, length)
        self.demand: Demand | None = None
        self._at_most = options.prefetch_buffer_size
        mean = program.mean_byte_len
        most = block_len(mean, max(1, self._at_most // 2), _HANDED_OVER_BYTES)
        self._byte_most = block_len(mean, _MOST_DEMANDED, _HANDED_OVER_BYTES)
        self._pace = Pace(most, HAND_OVER_S, 1)
        self._thread_count = ThreadCount(options.num_threads)
        self._pid = os.getpid()
        self._reset()

    def _reset(self) -> None:
        self._tasks: deque[_Task] = deque()
        self._handed_out = self.position
        self._turn = 0
        self._crew = _Crew()
        weakref.finalize(self, self._crew.dismiss).atexit = False

    def _make(self, limit: int) -> None:
        demand = self.demand
        if demand is not None and demand.ended:
            raise RuntimeError("nobody waits for these elements any more")
        if self._pid != os.getpid():  # a fork leaves the threads behind
            self._pid = os.getpid()
            self._reset()
        self._hand_out(limit)
        if not self._tasks:
            return
        task = self._tasks[0]
        waited_s = 0.0
        if demand is not None and task.thread == 0:
            task.run()
            waited_s = task.elapsed_s if demand.urgent else 0.0
        elif not task.done.acquire(blocking=False):
            began = time.perf_counter()
            task.done.acquire()
            waited_s = time.perf_counter() - began
        self._tasks.popleft()
        self._pace.record(task.count, task.elapsed_s)
        self._thread_count.record(task.count, waited_s, task.cpu_s)
        num_made = self._keep(task.made)
        rest = self._rest
        if rest is not None and (rest.failure is not None or num_made < task.count):
            self._drop_tasks(self.position + num_made)

    def _hand_out(self, limit: int) -> None:
        active = self._thread_count.active
        whole = self._makes_whole_batches(self._pace)
        if whole:
            block = self.batch_size * self._batches_at_once()
            bound = 2 * block
        else:
            demanded = min(limit, self._byte_most) if limit > self._pace.most else 0
            block = max(self._pace.count, demanded if self._pace.count == self._pace.most else 0)
            bound = max(self._at_most, 2 * demanded)
            block = min(block, max(1, bound // (active + 1)))  # or some threads would get none
        while len(self._tasks) <= active:
            start = self._handed_out
            missing = self._until_batch(start)
            count = min(block, missing or block, self._length - start)
            if count <= 0 or (self._tasks and start + count - self.position > bound):
                return
            if whole and not missing:
                make = functools.partial(in_batches, self._program, start, count, self.batch_size)
            else:
                make = functools.partial(_elements, self._program.begin(start, count))
            task = _Task(count, make, self._turn % active)
            if task.thread or self.demand is None:
                self._crew.give(task)
            self._tasks.append(task)
            self._handed_out += count
            self._turn += 1

    def _batches_at_once(self) -> int:
        """Batches in a task: several where they are small and made in a moment."""
        row_byte_len, element_s = self._program.row_byte_len, self._pace.element_s
        if not row_byte_len or not element_s:
            return 1
        most = block_len(row_byte_len, SMALL_TIMES * self._at_most, SMALL_BYTES)
        return max(1, min(most, int(HAND_OVER_S / element_s)) // self.batch_size)

    def rewind(self, position: int) -> None:
        """See `Blocks.rewind`."""
        super().rewind(position)
        self._drop_tasks(position)

    def _drop_tasks(self, position: int) -> None:
        """Has the elements from `position` on made anew."""
        for task in self._tasks:
            task.make = None
        self._tasks.clear()
        self._handed_out = position

    def start(self) -> None:
        """See `Blocks.start`."""
        self._hand_out(1)

    def close(self) -> None:
        """See `Blocks.close`."""
        self.rewind(self.position)
        self._crew.dismiss()


def _elements(make: Callable[[], Evaluated]) -> Made:
    return [], make()


def thread_name(number: int) -> str:
    """What threads that run user functions are called; programs rely on that."""
    return f"grain-prefetch_{number}"


class _Crew:
    """Threads, each with a queue of its own; they know nothing of who gives them work."""

    def __init__(self) -> None:
        self._queues: dict[int, SimpleQueue[_Task | None]] = {}

    def give(self, task: _Task) -> None:
        """Queues `task` for its thread, starting it if need be."""
        queue = self._queues.get(task.thread)
        if queue is None:
            queue = SimpleQueue()
            work, stop = functools.partial(_work, queue), functools.partial(queue.put, None)
            start_thread(work, name=thread_name(task.thread), stop=stop)
            self._queues[task.thread] = queue
        queue.put(task)

    def dismiss(self) -> None:
        """Lets the threads end once they are through with the block in hand."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.put(None)


def _work(queue: SimpleQueue[_Task | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task
