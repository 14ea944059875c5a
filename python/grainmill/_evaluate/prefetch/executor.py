"""Blocks of a program's elements, computed on request or prefetched by threads."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate.batches.batch_blocks import block_len, byte_len
from grainmill._evaluate.batches.batched import in_batches
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.ahead import Planned
from grainmill._evaluate.prefetch.blocks import Blocks, weak_call
from grainmill._evaluate.prefetch.pace import Pace
from grainmill._evaluate.prefetch.reads_beyond import ReadsBeyond
from grainmill._evaluate.prefetch.shared_threads import PoolShare
from grainmill._evaluate.prefetch.thread_pool import Task, ThreadPool
from grainmill._evaluate.prefetch.tuner import Tuner
from grainmill._native import waited_s
from grainmill._plan.closing import closed_error
from grainmill._stats import timeline
from grainmill._stats.meters import NO_POOL
from grainmill._stats.stalls import Awaited, Stall, thread_name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grainmill._evaluate.batches.batch_blocks import BlockResult
    from grainmill._evaluate.prefetch.shared_threads import SharedThreads
    from grainmill._evaluate.program import PendingElements, Program
    from grainmill._plan.options import ReadOptions
    from grainmill._stats.meters import PoolUse


class Demand:
    """What the thread that pulls elements knows about the consumer.

    Attributes:
        ended: Whether the consumer is closed.
        urgent: Whether the consumer waits.
    """

    __slots__ = ("ended", "urgent")

    def __init__(self) -> None:
        self.ended = self.urgent = False


class _Block:
    """A block of positions that is being computed or waits for the consumer; see `Started`.

    Attributes:
        start: Its first position.
        count: Its number of positions.
        num_reads: How many reads of slow storage were started for it.
        task: Computes it.
        output: The elements so far, where they are computed one by one.
        num_taken: How many of those were delivered.
    """

    __slots__ = ("count", "num_reads", "num_taken", "output", "start", "task")

    def __init__(
        self, start: int, count: int, task: Task, output: list[Any], num_reads: int = 0
    ) -> None:
        self.start = start
        self.count = count
        self.num_reads = num_reads
        self.task = task
        self.output = output
        self.num_taken = 0

    @property
    def is_done(self) -> bool:
        """Whether it is computed or cancelled."""
        return not self.task.done.locked()

    def result(self) -> BlockResult:
        """Its result, without the elements already delivered; once."""
        result, failure = self.task.outcome()
        if failure is not None:
            return [], Evaluated([], failure)
        batches, rest = result
        if self.num_taken:
            rest = Evaluated(rest.elements[self.num_taken :], rest.failure)
        return batches, rest

    def take_partial(self) -> BlockResult:
        """The elements computed so far and not yet delivered."""
        elements = self.output[self.num_taken :]
        self.num_taken += len(elements)
        return [], Evaluated(elements, None)


class Budget(NamedTuple):
    """Limits on the bytes of prefetched elements.

    Attributes:
        total: For all of them.
        whole_batches: For batches that are computed quickly, except the first two.
    """

    total: int
    whole_batches: int


class Executor(Blocks):
    """Prefetches elements, in order, within limits on their number and bytes.

    Without threads, elements are computed in the caller on request. With threads, named
    `grain-prefetch_<n>`, they are prefetched as far as the options say; a `Tuner` decides how many
    of the allowed threads get work. Batches that are computed quickly are one block each: the core
    that computes an element copies it to its row. On slow storage, the reads of all prefetched
    elements are in flight together, whatever the number of threads and the size of blocks.

    Args:
        program: What computes the elements.
        length: Their number.
        options: Limits on threads and prefetched elements.
        budget: Limits on the bytes of prefetched elements.
        shared: Threads that it shares with other readers of the pipeline, without
            `worker_init_fn`; its own if `None`.

    Attributes:
        demand: If the consumer is a thread of the package: ends when no more are needed.
    """

    def __init__(
        self,
        program: Program,
        length: int,
        options: ReadOptions,
        budget: Budget,
        shared: SharedThreads | None = None,
    ) -> None:
        super().__init__(program, length, options.prefetch_buffer_size)
        self.demand: Demand | None = None
        self._computes_here = False  # whether the thread in `take` does, in place of one of a pool
        self._shared = shared
        buffer_size = options.prefetch_buffer_size
        # Threads that replace worker processes run even without a prefetch buffer.
        threaded = (buffer_size or options.num_workers) and program.runs_user_code
        self._num_threads = options.num_threads if threaded else 0
        self._num_records = max(1, program.num_records)  # of an element; a cached one reads none
        self._init = options.worker_init_fn if options.num_workers else None
        self._budget = budget
        self._beyond = ReadsBeyond(program)
        self._num_submitted = 0  # tasks ahead that threads compute or have computed
        self._stall = Stall(self, Executor._awaited_block, options)
        self._element_bytes = mean = program.mean_byte_len
        self._reads_per_element = float(program.num_records)  # of the last block that started some
        self.meter.threads = weak_call(self, Executor._thread_use, NO_POOL)
        if self._num_threads:
            self._max_request = block_len(mean, tuning.MAX_REQUESTED, tuning.HAND_OVER_BYTES)
        block_s = tuning.HAND_OVER_S if self._num_threads else tuning.CALLER_BLOCK_S
        self._pace = Pace(self._max_block_len, block_s, by_lists=program.reads_lists)
        if self._num_threads > 1:
            in_round = self._num_threads * self._num_records
            self._pace.equal_share = max(1, tuning.SHARED_LEN // in_round)
        self._reset()

    @property
    def _max_block_len(self) -> int:
        """The maximum number of elements in a block, unless more are requested at once."""
        mean = self._program.mean_byte_len
        if self._num_threads:
            return block_len(mean, max(1, self.buffer_size // 2), tuning.HAND_OVER_BYTES)
        return block_len(mean, self.buffer_size or tuning.MAX_REQUESTED)

    @property
    def has_threads(self) -> bool:
        """Whether user functions run on threads."""
        return bool(self._num_threads)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._pool: ThreadPool | PoolShare | None = None
        self._drop_ahead(self.position)
        self._inits: list[Task] | None = None  # the first calls of threads; empty once all are done
        if self._num_threads:
            if self._shared is None:
                pool = ThreadPool(self._num_threads)
                self._pool, self._tuner = pool, Tuner(pool, self._num_threads)
            else:
                self._pool = self._shared.join(self._num_threads)
                self._tuner = self._pool.tuner
            self._pace.turns = self._pool.turns
            weakref.finalize(self, self._pool.shutdown).atexit = False

    def _computing(self) -> Callable[[int], None]:
        """See `Blocks`."""
        demand = self.demand
        if demand is not None and demand.ended:
            raise closed_error()
        if self._pool is None and not self._ahead.tasks and not self._program.waits_for_storage:
            return self._compute_in_caller
        return self._compute_next

    def _compute_next(self, limit: int) -> None:
        if self._pool is not None and self._pid != os.getpid():  # threads do not survive a fork
            self._reset()
        self._await_inits()
        self._start_next(limit)
        if not self._ahead.tasks:
            return
        block = self._ahead.tasks[0]
        if self._pool is None:
            block.task.prepare()
            block.task.run()
            self.meter.computed(block.task.elapsed_s, block.task.waited_s, block.task.cpu_s)
            if block.task.failure is not None:
                raise block.task.failure
        else:
            starved_s = self._await(self._pool, block, limit)
            if starved_s is None:
                self._enqueue(block.take_partial())
                return
            self._tuner.record(block.count, starved_s)
            self.meter.work_s += block.task.elapsed_s
            self.meter.cpu_s += block.task.cpu_s
            self.meter.storage_s += block.task.waited_s
        result = block.result()
        self._record_pace(block.count, block.task.elapsed_s)
        self._ahead.tasks.popleft()
        self._num_submitted -= 1
        self._record_element_size(result)
        self._submit_affordable()
        num_left = block.count - block.num_taken
        if self._enqueue_block(result, num_left) and not num_left:
            self._rest = None  # all was delivered before: not the plan's end
            self._computing()(limit)

    def _start_next(self, limit: int) -> None:
        """Starts computing the next blocks, or computes elements on this thread, without a block.

        It does that in place of the one thread at work where it packs the elements, unless threads
        take turns: an element from another core's cache costs it 2 us more.
        """
        pool = self._pool
        packs = self.demand is not None and isinstance(pool, ThreadPool) and pool.active == 1
        is_free = packs and self._init is None and not self._pace.turns.are_taken
        may = is_free and self._pace.element_s is not None
        self._computes_here = may and not self._program.waits_for_storage
        if not self._ahead.tasks:
            if self._computes_here and isinstance(pool, ThreadPool):
                pool.run_here(lambda: self._compute_in_caller(limit))
                return
            self._ahead.until = self.position
        self._submit_affordable()
        if not self._computes_here:
            self._dispatch(limit)

    def _start_inits(self) -> None:
        """Starts the threads that replace workers, each with a call of `worker_init_fn`."""
        if self._init is not None and self._inits is None and isinstance(self._pool, ThreadPool):
            call = functools.partial(init_worker, self._init, num_workers=self._num_threads)
            self._inits = self._pool.start_all(self._num_threads, call)

    def _await_inits(self) -> None:
        """Waits for those calls; raises the first failure, after which new threads start."""
        pool = self._pool
        if pool is None or self._init is None or self._inits == []:
            return
        failures = []
        try:
            self._start_inits()
            for task in self._inits or ():
                task.done.acquire()
                _, failure = task.outcome()
                failures += [] if failure is None else [failure]
        except BaseException:  # an interrupt can occur anywhere
            pool.shutdown()
            self._reset()
            raise
        self._inits = []
        if failures:
            pool.shutdown()
            self._reset()
            raise failures[0]

    def _compute_in_caller(self, limit: int) -> None:
        """Computes the next block in the caller, without prefetching."""
        # A reader without a buffer is asked for one element, whatever its pace is.
        is_single = limit == 1 and not (self.buffer_size or self.batch_size)
        size, _, whole = (1, 1, False) if is_single else self._sizes_for_caller(limit)
        start = self.position
        count = self._block_len(start, size)
        if count <= 0:
            return
        if self._program.reads_lists and not whole:
            count = block_len(self._element_bytes, count, self._budget.total // 2)
        # Reading the CPU clock costs as much as a trivial element.
        is_short = (self._pace.element_s or 0.0) * count < tuning.SHORT_BLOCK_S
        cpu_started_s = 0.0 if is_short else time.thread_time()
        started_s, waited_before_s = time.perf_counter(), waited_s()
        if whole and not self._len_to_batch_start(start):
            result: BlockResult = in_batches(self._program, start, count, self.batch_size)
        else:
            result = [], self._program.run(start, count)
        storage_s, ended_s = waited_s() - waited_before_s, time.perf_counter()
        work_s = ended_s - started_s - storage_s
        if (taken := timeline.current) is not None:
            taken.blocks_s += ended_s - started_s
            if taken.blocks_s >= timeline.LEAST_S:
                taken.add_block(start, count, started_s, ended_s, storage_s)
        short_s = min(work_s, tuning.SHORT_BLOCK_S)  # beyond that, it lost its core or the lock
        cpu_s = short_s if is_short else time.thread_time() - cpu_started_s
        if is_single:
            self._pace.element_s = work_s
        else:
            self._record_pace(count, work_s)
        self.meter.computed(work_s, storage_s, cpu_s)
        if self.demand is not None and self._pool is not None:
            self._tuner.record(count, work_s if self.demand.urgent else 0.0)
        if self._program.reads_lists:
            self._record_element_size(result)
        self._enqueue(result)

    def _await(self, pool: ThreadPool | PoolShare, block: _Block, limit: int) -> float | None:
        """Waits for `block`, or for a while for some of its elements.

        Returns:
            For how long the consumer had no elements; `None` if `block` is not done.
        """
        done = block.task.done
        if done.acquire(blocking=False):
            return 0.0
        if isinstance(pool, PoolShare):
            pool.set_urgent()
        waiting_since_s = started_s = time.perf_counter()
        try:
            while not done.acquire(timeout=tuning.POLL_S):
                now = time.perf_counter()
                self.check_open()
                if self.demand is not None and self.demand.ended:
                    raise closed_error()
                self._tuner.record(0, now - started_s)
                self.meter.starved_s += now - started_s
                started_s = now
                if len(block.output) > block.num_taken:
                    return None
                self._dispatch(limit)
                self._stall.check(waiting_since_s)
        finally:
            self._stall.end()
            if (taken := timeline.current) is not None:
                waited_until_s = time.perf_counter()
                taken.add("wait for threads", "wait", waiting_since_s, waited_until_s)
        starved_s = time.perf_counter() - started_s
        self.meter.starved_s += starved_s
        return starved_s

    def awaited(self) -> Awaited | None:
        """See `Blocks.awaited`."""
        return self._awaited_block() if self._is_computing and self._ahead.tasks else None

    def _awaited_block(self) -> Awaited:
        block = self._ahead.tasks[0]
        last = block.start + block.count - 1
        first = min(last, block.start + len(block.output))
        if block.output or (self._program.maps_one_by_one and not self.batch_size):
            last = first
        doing, lines = self._program.computing(first, last)
        return Awaited(thread_name_of(block.task.thread), doing, lines, block.task.thread)

    def _record_pace(self, count: int, elapsed_s: float) -> None:
        self._pace.by_lists = self._program.reads_lists
        self._pace.max_count = self._max_block_len
        self._pace.record(count, elapsed_s)

    def _record_element_size(self, result: BlockResult) -> None:
        """Records the bytes of an element."""
        batches, rest = result
        if batches:
            self._element_bytes = byte_len(batches[0].batch) / max(1, len(batches[0]))
        elif rest is not None and rest.elements:
            self._element_bytes = max(self._program.mean_byte_len, byte_len(rest.elements[-1]))

    def _submit_affordable(self) -> None:
        """Makes threads compute the next blocks whose elements fit the budget, at least the first.

        On slow storage more are read than may be in memory once they are computed. Until the size
        of an element is known, a thread gets one block.
        """
        if self._num_submitted == len(self._ahead.tasks):
            return
        size, is_first = self._element_bytes, self._pace.element_s is None
        affordable = self._budget.total / size if size else math.inf
        while self._num_submitted < len(self._ahead.tasks):
            block = self._ahead.tasks[self._num_submitted]
            is_beyond = block.start + block.count - self.position > affordable
            if self._num_submitted and (
                is_beyond or (is_first and self._num_submitted > self._num_active)
            ):
                return
            if self._pool is not None:
                self._pool.submit(block.task)
            self._num_submitted += 1

    def _dispatch(self, limit: int) -> None:
        self._beyond.cpu_left_s = tuning.BEYOND_CPU_S
        self._ahead.start_all(self._planned(limit), self.position)

    def _planned(self, limit: int) -> Iterator[Planned]:
        """The next blocks, by their pace or as many as storage answers at the same time."""
        if self._pool is None:
            size, bound, whole = self._sizes_for_caller(limit)
        else:
            size, bound, whole = self._sizes_for_threads(limit)
        if self._element_bytes:
            affordable = max(1, int(self._budget.total / self._element_bytes))
            bound = min(bound, affordable)
            if not whole:
                size = min(size, max(1, affordable // 2))
        is_slow = self._program.waits_for_storage
        prefetches = self._pool is not None or (self.buffer_size and is_slow)
        # Reads started beyond this limit would only delay those needed next.
        max_reads, max_blocks = tuning.MAX_READS_STARTED, tuning.MAX_BLOCKS_IN_FLIGHT
        num_reads = sum(block.num_reads for block in self._unfinished()) if is_slow else 0
        by_lists = self._program.reads_lists
        if self._pace.element_s is None and not is_slow:
            # Until the first element is there, nothing is known of their size.
            max_blocks = max(0, self._num_active + 1 - len(self._ahead.tasks))
        elif self._pace.is_growing and (self._num_active == 1 or by_lists) and not is_slow:
            # A buffer full of the first, small blocks would cost more than larger ones do later.
            max_blocks = max(0, self._num_active + 1 - len(self._unfinished()))
        for number in itertools.count():
            if not self._ahead.may_add(1, bound, self.position):
                return  # before the length of a block is looked for that would not start
            is_enough = num_reads >= max_reads if is_slow else number >= max_blocks
            if self._ahead.tasks and (is_enough or not prefetches):
                return
            if self._ahead.tasks and is_slow and not self._program.has_room:
                return
            if number and self._ahead.tasks[0].is_done and not self._ahead.tasks[-1].is_done:
                return  # starting reads takes a while, and others are in flight
            start = self._ahead.until
            together = self._read_together(size, whole=whole) if is_slow else size
            count = self._block_len(start, together)
            as_batches = whole and not self._len_to_batch_start(start)
            begin = functools.partial(self._start_block, start, count, as_batches=as_batches)
            yield Planned(count, bound, begin)
            num_reads += self._ahead.tasks[-1].num_reads

    def _read_together(self, size: int, *, whole: bool) -> int:
        """How many of `size` elements one block reads where storage is slow."""
        if not self._reads_per_element:
            return size
        most = int(tuning.MAX_READS_STARTED / 2 / self._reads_per_element)
        return min(
            size, max(1, most // self.batch_size) * self.batch_size if whole else max(1, most)
        )

    def _thread_use(self) -> PoolUse:
        """See `ReadMeter.threads`; on any thread."""
        if self._pool is None:
            return NO_POOL
        use = self._pool.use()
        return use._replace(busy_s=math.inf) if self._computes_here else use

    def _unfinished(self) -> list[_Block]:
        """The blocks that are not computed yet."""
        return [block for block in self._ahead.tasks if not block.is_done]

    def _start_block(self, start: int, count: int, *, as_batches: bool) -> None:
        if as_batches and not self._program.waits_for_storage:
            batches = functools.partial(in_batches, self._program, start, count, self.batch_size)
            task = Task(batches, None, count * self._num_records, (start, count))
            block = _Block(start, count, task, [])
        else:
            pending = self._program.start_reads(start, count)
            output: list[Any] = []
            batch_size = self.batch_size if as_batches else 0
            elements = functools.partial(_elements, pending, output, batch_size)
            task = Task(elements, pending.wait, count * self._num_records, (start, count))
            block = _Block(start, count, task, output, pending.num_reads)
            self._reads_per_element = block.num_reads / count
        self._ahead.add(block)
        self._submit_affordable()
        if self.buffer_size and self._program.reads_beyond:
            self._beyond.advance(self._ahead.until, self._length)

    def _sizes_for_caller(self, limit: int) -> tuple[int, int, bool]:
        """Elements in a block, the maximum to prefetch, and whether blocks are whole batches."""
        count = self._pace.count if self.buffer_size else min(limit, self._pace.count)
        whole = self._computes_whole_batches(self._pace)
        if whole:
            several = self.buffer_size and self._program.batches_small
            count = self.batch_size * (max(1, count // self.batch_size) if several else 1)
            if self.buffer_size and self._program.waits_for_storage:
                return count, max(self.buffer_size, 2 * count), whole
        return count, self.buffer_size, whole

    def _sizes_for_threads(self, limit: int) -> tuple[int, int, bool]:
        """See `_sizes_for_caller`."""
        if self._computes_whole_batches(self._pace):
            size = self.batch_size * self._batches_per_task()
            row_byte_len = max(1.0, self._program.row_byte_len)
            bound = min(self.buffer_size, int(self._budget.whole_batches / row_byte_len))
            return size, max(bound, 2 * size), True
        count, max_count = self._pace.count, self._pace.max_count
        requested = min(limit, self._max_request) if limit > max_count else 0
        size = max(count, requested if count == max_count else 0)
        bound = max(self.buffer_size, 2 * requested)
        # One block for every thread.
        return self._pace.even(min(size, bound // (self._num_active + 1))), bound, False

    @property
    def _num_active(self) -> int:
        return 1 if self._pool is None else self._pool.active

    def _batches_per_task(self) -> int:
        """Batches in a task: several if they are small and fast."""
        row_byte_len, element_s = self._program.row_byte_len, self._pace.element_s
        if not row_byte_len or not element_s:
            return 1
        max_count = block_len(
            row_byte_len, tuning.SMALL_TIMES * self.buffer_size, tuning.SMALL_BYTES
        )
        max_count = min(max_count, int(tuning.HAND_OVER_S / element_s), self._pace.turn_len)
        return max(1, max_count // self.batch_size)

    def _drop_ahead(self, position: int) -> None:
        """See `Blocks`."""
        for block in self._ahead.tasks:
            block.task.call = None
        super()._drop_ahead(position)
        self._num_submitted = 0  # an interrupt may come between the two
        if self._pool is not None:
            self._pool.drop()
        self._beyond.clear()

    def start(self) -> None:
        """See `Blocks.start`."""
        if self._pool is not None or self._program.waits_for_storage:
            self._start_inits()
            self._dispatch(1)

    def cancel(self) -> None:
        """See `Blocks.cancel`."""
        super().cancel()
        pool = self._pool
        if pool is not None:
            pool.shutdown()

    def close(self) -> None:
        """See `Blocks.close`."""
        self.rewind(self.position)
        if self._pool is not None:
            self._pool.shutdown()


def init_worker(init: Callable[[int, int], None], worker: int, num_workers: int) -> None:
    """Calls `worker_init_fn` on a thread that replaces a worker process.

    Raises:
        BaseException: What `init` raised, with a note that names the worker.
    """
    try:
        init(worker, num_workers)
    except BaseException as failure:
        failure.add_note(f"in worker {worker} of {num_workers}, a thread, by its `worker_init_fn`")
        raise


def _elements(pending: PendingElements, output: list[Any], batch_size: int) -> BlockResult:
    """The elements, as batches of `batch_size` where that is not 0 and rows of columns allow it."""
    batches = pending.batches(batch_size) if batch_size else None
    return ([], pending(output)) if batches is None else (batches, None)
