"""Blocks of a program's elements in order, computed when asked for or ahead of that."""

from __future__ import annotations

import abc
import functools
import itertools
import os
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import block_len, byte_len, in_batches
from grainmill._evaluate.fuse import Evaluated
from grainmill._evaluate.storage import work_clock_s
from grainmill._evaluate.thread_pool import Task, ThreadPool
from grainmill._evaluate.tuner import Tuner
from grainmill._plan.closing import closed_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.batch_blocks import BatchBlock, Made
    from grainmill._evaluate.program import PendingElements, Program
    from grainmill._plan.options import ReadOptions


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
        self.ready: deque[BatchBlock] = deque()
        self._rest: Evaluated | None = None  # what comes after those
        self._cancelled = False
        self._program = program
        self._length = length
        self._first = 0

    def take(self, limit: int) -> Evaluated | BatchBlock:
        """Returns the elements from `position` on, and moves it past those made.

        There is at least one, unless the first fails or the plan is at its end. A block may hold
        more than `limit` elements where they were made ahead.

        Raises:
            ValueError: `cancel` was called, maybe while this waited.
        """
        self.check_open()
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
        if pace.element_s * self.batch_size > tuning.WHOLE_BATCH_S:
            return False
        return not self._program.waits_for_storage

    def start(self) -> None:  # noqa: B027 - there may be nothing to begin
        """Begins to make elements ahead."""

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True

    def check_open(self) -> None:
        """Raises `ValueError` once `cancel` was called."""
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:  # noqa: B027 - there may be nothing to stop
        """Stops what runs; safe to call again."""


class Pace:
    """How many elements to make at once, so that a block takes about `block_s` seconds.

    Attributes:
        most: The most that may be made at once.
        count: How many to make at once now.
        element_s: What one element took in the last block; `None` before the first.
        is_growing: Whether later blocks will probably be larger.
    """

    def __init__(self, most: int, block_s: float, *, by_lists: bool = False) -> None:
        self.most = max(1, most)
        self.count = 1
        self.is_growing = True
        self.element_s: float | None = None
        self._block_s = block_s
        self._by_lists = by_lists  # users' objects are asked for `count` elements at once
        self._before: tuple[int, float] | None = None  # another length and `element_s` with it
        self._num_held = 0  # blocks for which the length stays as it is

    def record(self, count: int, elapsed_s: float) -> None:
        """Takes note that `count` elements took `elapsed_s`."""
        self.element_s = elapsed_s / count
        is_long = elapsed_s >= self._block_s / 2
        if self._by_lists and is_long:
            if count == self.count:
                self.count = min(self.most, self._list_len(count, self.element_s))
        elif elapsed_s > self._block_s:
            self.count = max(1, min(self.count, count) // 2)
        elif not is_long and count >= self.count:
            self.count = min(self.most, self.count * 2)
            self._before, self._num_held = None, 0
        grows_anyway = self._by_lists and self.count < tuning.LEAST_LISTED
        self.is_growing = (not is_long or grows_anyway) and self.count < self.most

    def _list_len(self, count: int, element_s: float) -> int:
        """How many elements to ask for after a list of `count`, which took long.

        A call may cost the same for any list, or every element as much again. So a longer list
        has to make its elements cheaper, and a shorter one must not make them dearer.
        """
        least, share = tuning.LEAST_LISTED, tuning.CHEAPER_SHARE
        if self._num_held:
            self._num_held -= 1
            return count
        before, self._before = self._before, (count, element_s)
        if count < least:
            return 2 * count
        if before is None or before[0] == count:
            return 2 * count if count == least else max(least, count // 2)
        if before[0] < count:
            return 2 * count if element_s < share * before[1] else max(least, count // 2)
        if before[1] < share * element_s:
            self._before, self._num_held = None, tuning.LISTS_HELD
            return before[0]
        if count == least:
            self._before, self._num_held = None, tuning.LISTS_HELD
        return max(least, count // 2)


class Demand:
    """What a thread that makes elements has to know of those who want them.

    Attributes:
        ended: Whether nobody wants any more.
        urgent: Whether somebody waits.
    """

    __slots__ = ("ended", "urgent")

    def __init__(self) -> None:
        self.ended = self.urgent = False


class _Block:
    """A run of positions on its way to the consumer.

    Attributes:
        start: Its first position.
        count: How many positions.
        task: Computes it.
        so_far: The elements that are there already, where they come one by one.
        taken: How many of those the consumer has.
    """

    __slots__ = ("count", "so_far", "start", "taken", "task")

    def __init__(self, start: int, count: int, task: Task, so_far: list[Any]) -> None:
        self.start = start
        self.count = count
        self.task = task
        self.so_far = so_far
        self.taken = 0

    @property
    def is_done(self) -> bool:
        """Whether it is computed, or nobody wants it."""
        return not self.task.done.locked()

    def result(self) -> Made:
        """What came of it, and was not taken yet."""
        failure = self.task.failure
        if failure is not None:
            return [], Evaluated([], failure)
        pieces, rest = self.task.result
        if self.taken:
            rest = Evaluated(rest.elements[self.taken :], rest.failure)
        return pieces, rest

    def take_so_far(self) -> Made:
        """The elements that are there already, and were not taken yet."""
        elements = self.so_far[self.taken :]
        self.taken += len(elements)
        return [], Evaluated(elements, None)


class Budget(NamedTuple):
    """Bytes that elements ahead may take.

    Attributes:
        total: All of them.
        whole_batches: Batches that take little time, beyond two of them.
    """

    total: int
    whole_batches: int


class Executor(Blocks):
    """Computes elements ahead, in order, within bounds of elements and of bytes.

    Without threads, elements are computed in the caller when they are asked for. With threads,
    named `grain-prefetch_<n>`, they are computed as far ahead as the options say; how many of the
    allowed threads get work is found out while running (`Tuner`). Where a batch follows that takes
    little time, it is one block: its rows are copied by the core that has just computed them.
    Where records have to be waited for, the reads of all elements ahead are under way at once,
    however few threads there are and however small blocks.

    Attributes:
        demand: Given where the consumer is the first of the threads: it computes blocks when it
            takes them, until the demand has ended.
    """

    def __init__(self, program: Program, length: int, options: ReadOptions, budget: Budget) -> None:
        super().__init__(program, length)
        self.demand: Demand | None = None
        self._at_most = at_most = options.prefetch_buffer_size
        # Threads that stand in for worker processes do so however little is made ahead.
        threaded = (at_most or options.num_workers) and program.runs_user_code
        self._num_threads = options.num_threads if threaded else 0
        self._init = options.worker_init_fn if options.num_workers else None
        self._budget = budget
        self._element_bytes = mean = program.mean_byte_len
        if self._num_threads:
            most = block_len(mean, max(1, at_most // 2), tuning.HAND_OVER_BYTES)
            self._byte_most = block_len(mean, tuning.MOST_DEMANDED, tuning.HAND_OVER_BYTES)
            self._pace = Pace(most, tuning.HAND_OVER_S, by_lists=program.reads_lists)
        else:
            most = block_len(mean, at_most or tuning.MOST_DEMANDED)
            self._pace = Pace(most, tuning.CALLER_BLOCK_S, by_lists=program.reads_lists)
        self._reset()

    @property
    def has_threads(self) -> bool:
        """Whether user functions run on threads."""
        return bool(self._num_threads)

    def _reset(self) -> None:
        self._blocks: deque[_Block] = deque()
        self._handed_out = self.position
        self._pid = os.getpid()
        self._threads: ThreadPool | None = None
        self._inits: list[Task] | None = None  # what threads do first, until that is known done
        if self._num_threads:
            self._threads = threads = ThreadPool(owner_is_first=self.demand is not None)
            self._tuner = Tuner(threads, self._num_threads)
            weakref.finalize(self, threads.dismiss).atexit = False

    def run_for(self, demand: Demand) -> None:
        """Has the thread that takes blocks compute them itself, as the first of the threads."""
        self.demand = demand
        self._reset()

    def _make(self, limit: int) -> None:
        demand = self.demand
        if demand is not None and demand.ended:
            raise closed_error()
        if self._threads is None:
            if not self._blocks and not self._program.waits_for_storage:
                self._compute(limit)
                return
        elif self._pid != os.getpid():  # a fork leaves the threads behind
            self._reset()
        self._await_inits()
        if not self._blocks:
            self._handed_out = self.position
        self._hand_out(limit)
        if not self._blocks:
            return
        block = self._blocks[0]
        if self._threads is None:
            block.task.prepare()
            block.task.run()
            if block.task.failure is not None:
                raise block.task.failure
        else:
            starved_s = self._await(self._threads, block, limit)
            if starved_s is None:
                self._keep(block.take_so_far())
                return
            self._tuner.record(block.count, starved_s)
        made = block.result()
        self._pace.record(block.count, block.task.elapsed_s)
        self._blocks.popleft()
        self._weigh(made)
        num_made = self._keep(made)
        rest = self._rest
        if rest is not None and (rest.failure is not None or num_made + block.taken < block.count):
            self._drop_blocks(self.position + num_made)
        elif block.taken and not num_made:  # all of it had been taken, which is not the end
            self._rest = None
            self._make(limit)

    def _begin_inits(self) -> None:
        """Starts the threads that stand in for workers, each with what the user has it call."""
        if self._threads is not None and self._init is not None and self._inits is None:
            call = functools.partial(init_worker, self._init, num_workers=self._num_threads)
            self._inits = self._threads.start_all(self._num_threads, call)

    def _await_inits(self) -> None:
        """Raises what one of those calls raised; whoever goes on after that gets new threads."""
        threads = self._threads
        if threads is None or self._init is None or self._inits == []:
            return
        failures = []
        try:
            self._begin_inits()
            for number, task in enumerate(self._inits or ()):
                if not number and self.demand is not None:
                    task.run()
                task.done.acquire()
                failures += [task.failure] if task.failure is not None else []
        except BaseException:  # Ctrl-C comes anywhere
            threads.dismiss()
            self._reset()
            raise
        self._inits = []
        if failures:
            threads.dismiss()
            self._reset()
            raise failures[0]

    def _compute(self, limit: int) -> None:
        """Computes the next block in the caller, with nothing ahead."""
        block, _, whole = self._sizes_for_caller(limit)
        start = self.position
        missing = self._until_batch(start)
        count = min(block, missing or block, self._length - start)
        if count <= 0:
            return
        if self._program.reads_lists and not whole:
            count = block_len(self._element_bytes, count, self._budget.total // 2)
        began = work_clock_s()
        if whole and not missing:
            made: Made = in_batches(self._program, start, count, self.batch_size)
        else:
            made = [], self._program.run(start, count)
        self._pace.record(count, work_clock_s() - began)
        if self._program.reads_lists:
            self._weigh(made)
        self._keep(made)

    def _await(self, threads: ThreadPool, block: _Block, limit: int) -> float | None:
        """Waits for `block`, or until elements of it have been there for a while.

        Returns:
            For how long the consumer was kept from going on; `None` if `block` is not done.
        """
        done = block.task.done
        if self.demand is not None:
            began = time.perf_counter()
            threads.help_until(block.task)
            if done.acquire(blocking=False):
                return time.perf_counter() - began if self.demand.urgent else 0.0
        if done.acquire(blocking=False):
            return 0.0
        began = time.perf_counter()
        while not done.acquire(timeout=tuning.LOOK_S):
            now = time.perf_counter()
            self.check_open()
            if self.demand is not None and self.demand.ended:
                raise closed_error()
            self._tuner.record(0, now - began)
            began = now
            if len(block.so_far) > block.taken:
                return None
            self._hand_out(limit)
        return time.perf_counter() - began

    def _weigh(self, made: Made) -> None:
        """Takes note of how many bytes elements have."""
        pieces, rest = made
        if pieces:
            self._element_bytes = byte_len(pieces[0].batch) / max(1, len(pieces[0]))
        elif rest is not None and rest.elements:
            self._element_bytes = max(self._program.mean_byte_len, byte_len(rest.elements[-1]))

    def _hand_out(self, limit: int) -> None:
        if self._threads is None:
            block, bound, whole = self._sizes_for_caller(limit)
        else:
            block, bound, whole = self._sizes_for_threads(limit)
        if self._element_bytes:
            affordable = max(1, int(self._budget.total / self._element_bytes))
            bound = min(bound, affordable)
            if not whole:
                block = min(block, max(1, affordable // 2))
        far = self._program.waits_for_storage
        ahead = self._threads is not None or (self._at_most and far)
        # What is begun further ahead than that would only keep the next records waiting.
        num_records = self._program.num_records
        records = sum(block.count for block in self._unfinished()) * num_records if far else 0
        most = tuning.MOST_AT_ONCE
        by_lists = self._program.reads_lists
        if self._pace.is_growing and (self._num_active == 1 or by_lists) and not far:
            # A buffer full of the small blocks that come first would cost more than later ones.
            most = max(0, self._num_active + 1 - len(self._unfinished()))
        for number in itertools.count():
            enough = records >= tuning.MOST_READS_AT_ONCE if far else number >= most
            if self._blocks and (enough or not ahead):
                return
            if number and self._blocks[0].is_done and not self._blocks[-1].is_done:
                return  # to begin reads takes a while; something is under way
            start = self._handed_out
            missing = self._until_batch(start)
            count = min(block, missing or block, self._length - start)
            if count <= 0 or (self._blocks and start + count - self.position > bound):
                return
            self._begin(start, count, as_batches=whole and not missing)
            records += count * num_records

    def _unfinished(self) -> list[_Block]:
        """The blocks that are not computed yet."""
        return [block for block in self._blocks if not block.is_done]

    def _begin(self, start: int, count: int, *, as_batches: bool) -> None:
        if as_batches:
            batches = functools.partial(in_batches, self._program, start, count, self.batch_size)
            block = _Block(start, count, Task(batches), [])
        else:
            begun = self._program.begin(start, count)
            so_far: list[Any] = []
            task = Task(functools.partial(_elements, begun, so_far), begun.settle)
            block = _Block(start, count, task, so_far)
        if self._threads is not None:
            self._threads.submit(block.task)
        self._blocks.append(block)
        self._handed_out += count

    def _sizes_for_caller(self, limit: int) -> tuple[int, int, bool]:
        """Elements in a block, the most elements ahead, and whether blocks are whole batches."""
        count = self._pace.count if self._at_most else min(limit, self._pace.count)
        whole = self._makes_whole_batches(self._pace)
        if whole:
            several = self._at_most and self._program.batches_small
            count = self.batch_size * (max(1, count // self.batch_size) if several else 1)
        return count, self._at_most, whole

    def _sizes_for_threads(self, limit: int) -> tuple[int, int, bool]:
        """See `_sizes_for_caller`."""
        if self._makes_whole_batches(self._pace):
            block = self.batch_size * self._batches_at_once()
            row_byte_len = max(1.0, self._program.row_byte_len)
            bound = min(self._at_most, int(self._budget.whole_batches / row_byte_len))
            return block, max(bound, 2 * block), True
        count, most = self._pace.count, self._pace.most
        demanded = min(limit, self._byte_most) if limit > most else 0
        block = max(count, demanded if count == most else 0)
        bound = max(self._at_most, 2 * demanded)
        # Every thread is to have one.
        return min(block, max(1, bound // (self._num_active + 1))), bound, False

    @property
    def _num_active(self) -> int:
        return 1 if self._threads is None else self._threads.active

    def _batches_at_once(self) -> int:
        """Batches in a task: several where they are small and take little time."""
        row_byte_len, element_s = self._program.row_byte_len, self._pace.element_s
        if not row_byte_len or not element_s:
            return 1
        most = block_len(row_byte_len, tuning.SMALL_TIMES * self._at_most, tuning.SMALL_BYTES)
        return max(1, min(most, int(tuning.HAND_OVER_S / element_s)) // self.batch_size)

    def rewind(self, position: int) -> None:
        """See `Blocks.rewind`."""
        super().rewind(position)
        self._drop_blocks(position)

    def _drop_blocks(self, position: int) -> None:
        """Has the elements from `position` on computed anew."""
        if self._blocks:
            for block in self._blocks:
                block.task.call = None
            self._blocks.clear()
        if self._threads is not None:
            self._threads.drop()
        self._handed_out = position

    def start(self) -> None:
        """See `Blocks.start`."""
        if self._threads is not None or self._program.waits_for_storage:
            self._begin_inits()
            self._hand_out(1)

    def cancel(self) -> None:
        """See `Blocks.cancel`."""
        super().cancel()
        threads = self._threads
        if threads is not None:
            threads.dismiss()

    def close(self) -> None:
        """See `Blocks.close`."""
        self.rewind(self.position)
        if self._threads is not None:
            self._threads.dismiss()


def init_worker(init: Callable[[int, int], None], worker: int, num_workers: int) -> None:
    """Calls what a thread that stands in for a worker process is to call first.

    Raises:
        BaseException: What `init` raised, with a note that names the worker.
    """
    try:
        init(worker, num_workers)
    except BaseException as failure:
        failure.add_note(f"in worker {worker} of {num_workers}, a thread, by its `worker_init_fn`")
        raise


def _elements(begun: PendingElements, so_far: list[Any]) -> Made:
    return [], begun(so_far)
