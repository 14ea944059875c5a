"""Elements prefetched by a thread.

The thread and the stage share a `PrefetchQueue`, which has no reference to the stage: an
unreferenced stage is garbage collected, and its thread ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._evaluate.batches.batch_blocks import block_len, byte_len
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.blocks import weak_call
from grainmill._evaluate.prefetch.executor import Demand
from grainmill._evaluate.prefetch.thread_pool import NumberedThread
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.cursor import END, Cursor, CursorStage
from grainmill._iterators.base.node import OneToOne, runs
from grainmill._iterators.base.position import Position, end_at, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.metering import PullMeter
from grainmill._iterators.user_defined import UserDefinedStage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._memory import default_budget_bytes
from grainmill._plan.arguments import checked_integer
from grainmill._plan.closing import closed_error
from grainmill._plan.notes import located
from grainmill._stats import timeline
from grainmill._stats.meters import Fill
from grainmill._stats.stalls import CONFIG_LIMITS, Awaited, Stall
from grainmill._threads import at_fork, may_wait, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grainmill._iterators.base.stage import StateAfter
    from grainmill._plan.node import Node, Share
    from grainmill._stats.meters import Recorder
    from grainmill._stats.thread_clock import ThreadUse

_JOIN_TIMEOUT_S = 0.1
# How long a ready element is withheld from a waiting consumer while further ones are computed.
_MAX_WAIT_S = 0.001


@lazy_dataclass
class ThreadPrefetch(OneToOne):
    """Elements prefetched by a thread."""

    prefetch_buffer_size: int
    dataset_name: ClassVar[str] = "ThreadPrefetchIterDataset"
    keeps_spec: ClassVar[bool] = True
    passes_on: ClassVar[bool] = True
    saves: ClassVar[str] = ""
    prefetches: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, prefetch_buffer_size: int) -> Self:
        """A node that keeps up to `prefetch_buffer_size` elements of `parent` prefetched."""
        return cls((parent,), checked_prefetch_buffer_size(prefetch_buffer_size))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return super().share(share) if share.inline_size is None else share.of(self.parent)

    def _arguments(self) -> str:
        return f"(prefetch_buffer_size={self.prefetch_buffer_size})"

    @property
    def has_own_thread(self) -> bool:
        """See `SequentialNode.has_own_thread`."""
        return bool(self.prefetch_buffer_size)

    def place_of_parents(self, place: str) -> str:
        """See `SequentialNode.place_of_parents`."""
        return "on a thread of its own" if self.has_own_thread else place


def checked_prefetch_buffer_size(size: int) -> int:
    """Returns `size` as an `int`.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative.
    """
    size = checked_integer(size, "prefetch_buffer_size")
    if size < 0:
        raise ValueError(f"`prefetch_buffer_size` must be greater than or equal to 0, got {size}.")
    return size


@runs(ThreadPrefetch)
class ThreadPrefetchStage(CursorStage):
    """Prefetches up to `prefetch_buffer_size` elements of its parent; 0 means no thread.

    Failures and the end arrive in order. Either ends the thread, and the next `pull` after
    a failure starts another one at the same element.

    Attributes:
        set_up: Functions that the thread calls before the first element, the last one first; each
            is removed once it has returned.
    """

    def __init__(self, node: ThreadPrefetch, parent: Stage) -> None:
        super().__init__(node, parent)
        self.set_up: list[Callable[[], None]] = []
        self._size = node.prefetch_buffer_size
        self._queue: PrefetchQueue | None = None
        self._cancelled = self._closed = False
        self._reset()
        _stages.add(self)

    def _reset(self) -> None:
        self._ended = False
        self._thread_lost = False  # whether the thread was left behind by a fork
        self._delivered = self._cursor.position()

    @classmethod
    def around(
        cls, iterator: Iterator[Any], prefetch_buffer_size: int, recorder: Recorder | None = None
    ) -> Self:
        """A stage that prefetches from any object that has `__next__`; `recorder` is its own."""
        node = ThreadPrefetch((), checked_prefetch_buffer_size(prefetch_buffer_size))
        stage = UserDefinedStage(iterator)
        if recorder is not None:
            recorder.watch_user(stage)
        return cls(node, stage)

    @property
    def has_own_thread(self) -> bool:  # type: ignore[override]
        """See `Stage.has_own_thread`."""
        return bool(self._size)

    @property
    def num_queued(self) -> tuple[int, int]:
        """How many elements are prefetched, and the limit; on any thread."""
        queue = self._queue
        return (0 if queue is None else queue.num_queued), self._size

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return self._size or self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; waits for one element and returns those that arrive with it."""
        self._check_open()
        if self._ended:
            return end_at(self._delivered)
        if not self._size:
            block = self._cursor.pull_block(limit)
            self._delivered = self._cursor.position()
            return block
        block = self._started_queue().take(limit)
        self._check_open()
        self._delivered = (block.state_after, len(block.elements))
        self._ended = not block.elements
        return block

    def _started_queue(self) -> PrefetchQueue:
        queue = self._queue
        if self._thread_lost or (queue is not None and queue.demand.ended):
            self._rewind()
            queue = None
        if queue is None or queue.failed:
            self._cursor.save_start()
            queue = self._new_queue()
            try:
                queue.start()
                self._queue = queue
                self._check_open()  # `cancel` may have been called before there was a queue
            except BaseException:
                queue.stop()
                raise
        queue.allow_pulling()
        return queue

    def _new_queue(self) -> PrefetchQueue:
        queue = PrefetchQueue(self._cursor, self._size, self._thread_name())
        queue.set_up = self.set_up
        queue.measure(self.node, self.recorder)
        return queue

    def _thread_name(self) -> str:
        return f"grain-thread-prefetch_{next(_numbers)}"

    def forget_thread(self) -> None:
        """Continues without its thread, in a forked process, where it does not exist."""
        if self._queue is not None:
            self._queue, self._thread_lost = None, True

    def _stop_thread(self) -> None:
        """Waits for the thread to end, and drops the prefetched elements."""
        if self._queue is not None:
            self._queue.stop()
            while not self._queue.wait_done(_JOIN_TIMEOUT_S):
                self._check_open()
            self._queue = None

    def _rewind(self) -> None:
        """Moves the parent back to just after the element delivered last."""
        self._stop_thread()
        self._cursor.restore(self.state())
        self._reset()

    def state(self) -> State:
        """See `Stage.state`; starts no thread."""
        return state_at(self._delivered)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._check_open()
        self._stop_thread()
        self._cursor.restore(state)
        self._reset()

    def next_index(self) -> int:
        """See `Stage.next_index`; prefetched elements are computed again."""
        if self._queue is not None or self._thread_lost:
            self._rewind()
        return self._cursor.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._check_open()
        self._stop_thread()
        self._cursor.seek(index)
        self._reset()

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        self._check_open()
        if not self._size:
            super().start_prefetch()
        elif not self._ended:
            self._started_queue()

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True
        queue = self._queue
        if queue is not None:
            queue.stop()
        super().cancel()

    def close(self) -> None:
        """See `Stage.close`; a thread that is still computing an element closes the parent."""
        self._cancelled = True
        queue = self._queue
        if queue is not None:
            queue.stop()  # also if called again, as an interrupt may have ended the first call
        if self._closed:
            return
        self._closed = True
        if queue is not None:
            if may_wait() and queue.thread is not threading.current_thread():
                queue.thread.join(_JOIN_TIMEOUT_S)
            if not queue.call_when_done(self._cursor.stage.close):
                self._cursor.stage.cancel()
                return
        self._cursor.stage.close()

    def _check_open(self) -> None:
        if self._cancelled:
            raise closed_error()

    def __del__(self) -> None:
        queue = getattr(self, "_queue", None)
        if queue is not None:
            queue.stop()


class _Signal:
    """A condition variable for one waiting thread; unlike `Condition`, safe against interrupts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def wait_for(self, predicate: Callable[[], object], timeout_s: float = -1.0) -> bool:
        """Waits until `predicate()` is true; it is evaluated again after each `notify`.

        Returns:
            Whether it is true; otherwise `timeout_s` passed since the last `notify`.
        """
        while True:
            self._lock.acquire(blocking=False)
            if predicate():
                return True
            if not self._lock.acquire(timeout=timeout_s):
                return False

    def notify(self) -> None:
        """Wakes the waiting thread."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError as failure:
                raise_interrupt(failure)  # a finalizer released it in between


class PrefetchQueue:
    """A bounded queue and the thread that fills it from `cursor`.

    The thread adds elements in blocks: first a single one, then up to twice as many as in the block
    before, limited by time and by half of `size`. It waits while `size` elements are queued.

    Args:
        cursor: Where elements are taken from.
        size: The maximum number of queued elements.
        thread_name: The name of the thread.
        preferred_len: Replaces these limits: maps the last element of a block to the maximum length
            of the next one, and the thread waits while more than one block is queued.

    Attributes:
        set_up: See `ThreadPrefetchStage`.
        demand: How urgently the consumer waits; ended to stop the thread.
        failed: Whether the consumer has received a failure, after which the thread ends.
    """

    def __init__(
        self,
        cursor: Cursor,
        size: int,
        thread_name: str,
        preferred_len: Callable[[Any], int] | None = None,
    ) -> None:
        self.demand = Demand()
        self.failed = False
        self._cursor = cursor
        self._size = self._max_size = size
        self._budget_bytes = default_budget_bytes()
        self._preferred_len = preferred_len
        self.set_up: list[Callable[[], None]] = []
        self._meter: PullMeter | None = None  # of the thread's pulls
        self._record_wait: Callable[[float], None] | None = None
        self._node: Node | None = None
        self._recorder: Recorder | None = None
        self._num_taken = 0
        self._idle_s = 0.0  # how long the thread waited for space
        self._idle_since_s: float | None = None
        self._stall = Stall(self, PrefetchQueue._awaited, CONFIG_LIMITS)
        self._check_s = self._stall.check_s
        self._next_len = 1
        self._resume_at = -1  # the thread pulls while at most so many elements are queued
        self._blocks: deque[Block | BaseException] = deque()
        self._num_queued = 0  # elements in the queue
        self._num_unconsumed = 0  # elements of the block taken last, except the first
        # Reentrant: garbage collection may call `stop` from inside `put` or `take`.
        self._lock = threading.RLock()
        self._block_arrived = _Signal()
        self._space_freed = _Signal()
        self._thread_name = thread_name
        self._done = False  # whether the thread no longer uses the cursor
        self._not_done = threading.Lock()  # held until then
        self._not_done.acquire()
        self._on_done: Callable[[], None] | None = None

    def measure(self, node: Node | None, recorder: Recorder | None) -> None:
        """Makes `recorder` take the waits for the thread, as of `node`."""
        stage = self._cursor.stage
        if stage.recorder is not None:
            self._meter = PullMeter(stage, stage.recorder)
        self._node, self._recorder = node, recorder
        if recorder is not None and node is not None:
            self._record_wait = functools.partial(recorder.waited, node)

    def _awaited(self) -> Awaited:
        """What the thread is computing; on any thread."""
        computed = self._cursor.stage.awaited()
        if computed is not None:
            doing, lines = computed.doing, computed.lines
        else:
            doing, lines = "while computing its next element", []
        if self._node is not None and self._node.added_at:
            lines = [*lines, f"for {located(self._node)}"]
        return Awaited(f"thread {self._thread_name}", doing, lines, self.thread.ident)

    @property
    def num_queued(self) -> int:
        """How many elements are queued; on any thread."""
        return self._num_queued

    def _fill_level(self) -> Fill:
        """How far the thread is ahead of the consumer; on any thread."""
        since_s = self._idle_since_s
        now_s = 0.0 if since_s is None else time.perf_counter() - since_s
        return Fill(self._num_taken, self._num_queued, self._idle_s + now_s)

    def start(self) -> None:
        """Starts the thread, which waits for `allow_pulling`."""
        self.thread = start_thread(
            self._fill, name=self._thread_name, stop=self.stop, kind=NumberedThread
        )

    def allow_pulling(self) -> None:
        """Lets the thread pull, now that its owner has a reference to stop it by."""
        if self._resume_at < 0:
            with self._lock:
                self._resume_at = self._size - 1
                self._space_freed.notify()

    def _fill(self) -> None:
        use: ThreadUse | None = None
        try:
            if self._recorder is not None:
                use = self._recorder.add_thread(
                    self._node, weak_call(self, PrefetchQueue._fill_level, None)
                )
            while self.set_up:
                self.set_up[-1]()
                self.set_up.pop()
            while self.pull_block():
                pass
        except BaseException as failure:
            self.put(failure)
        finally:
            with self._lock:
                self._done = True
            self._not_done.release()
            if self._on_done is not None:
                with contextlib.suppress(Exception):  # there is no caller to report to
                    self._on_done()
            if use is not None:
                use.end()

    def wait_done(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s`; returns whether the thread no longer uses the cursor.

        Before Python 3.13, a thread seems to have ended once an interrupt has ended a `join` of it.
        """
        if not self._done:
            self._not_done.acquire(timeout=timeout_s)
        return self._done

    def call_when_done(self, close: Callable[[], None]) -> bool:
        """Whether the thread no longer uses the cursor; otherwise it calls `close` at its end."""
        with self._lock:
            if not self._done:
                self._on_done = close
            return self._done

    def take(self, limit: int) -> Block:
        """Waits for a block and returns up to `limit` elements of it.

        Raises the thread's failure when it is reached, and `ValueError` after `stop`.
        """
        with self._lock:  # the block taken before is consumed
            self._num_unconsumed = 0
            if self._has_space():
                self._space_freed.notify()
        if not self._blocks:
            self.demand.urgent = True
            started_s = time.perf_counter()
            while not self._block_arrived.wait_for(self._has_news, self._check_s):
                self._stall.check(started_s)
            if self._stall.is_long:
                self._stall.end()
            ended_s = time.perf_counter()
            if (taken := timeline.current) is not None:
                taken.add(f"wait for {self._thread_name}", "wait", started_s, ended_s)
            if self._record_wait is not None:
                self._record_wait(ended_s - started_s)
        with self._lock:
            self.demand.urgent = False
            if self.demand.ended:
                raise closed_error()
            block = self._first(limit)
            count = len(block.elements)
            self._num_queued -= count
            self._num_unconsumed = max(0, count - 1)
            self._num_taken += count
            if self._has_space():
                self._space_freed.notify()
        return block

    def _has_news(self) -> bool:
        return bool(self._blocks) or self.demand.ended

    def _has_space(self) -> bool:
        return self._num_queued + self._num_unconsumed <= self._resume_at

    def _first(self, limit: int) -> Block:
        head = self._blocks[0]
        if isinstance(head, BaseException):
            self._blocks.popleft()
            self.failed = True
            try:
                raise head
            finally:
                del head
        elements, state_after = head.elements, head.state_after
        if len(elements) <= limit:
            self._blocks.popleft()
            return head
        self._blocks[0] = Block(elements[limit:], _shifted(state_after, limit))
        return Block(elements[:limit], state_after)

    def pull_block(self) -> bool:
        """Queues the next elements once there is space; `False` at the end or after `stop`."""
        if not self._has_space():
            self._idle_since_s = time.perf_counter()
            self._space_freed.wait_for(lambda: self._has_space() or self.demand.ended)
            ended_s = time.perf_counter()
            if (taken := timeline.current) is not None:
                taken.add("wait for the consumer", "idle", self._idle_since_s, ended_s)
            self._idle_s += ended_s - self._idle_since_s
            self._idle_since_s = None
        with self._lock:
            if self.demand.ended:
                return False
            max_len = min(self._next_len, self._size - self._num_queued - self._num_unconsumed)
        cursor = self._cursor
        started = time.monotonic()
        points = [cursor.position()]
        elements: list[Any] = []
        ended = False
        meter = self._meter
        is_timed = meter is not None and meter.starts()
        try:
            while len(elements) < max_len:
                element = cursor.next()
                if element is END:
                    ended = True
                    break
                elements.append(element)
                points.append(cursor.position())
                max_s = _MAX_WAIT_S if self.demand.urgent else tuning.HAND_OVER_S
                if time.monotonic() - started > max_s:
                    break
        finally:
            if meter is not None:
                meter.finish(len(elements), is_timed=is_timed)
            if elements:
                self.put(Block(elements, functools.partial(_state_at, points)))
        if ended:
            self.put(end_at(cursor.position()))
            return False
        count = len(elements)
        if self._preferred_len is not None:
            self._next_len = min(self._preferred_len(elements[-1]), 2 * count)
            self._resume_at = count
        else:
            self._size = block_len(byte_len(elements[-1]), self._max_size, self._budget_bytes)
            half = max(1, self._size // 2)
            self._next_len = min(half, 2 * count)
            is_full = self._num_queued + self._num_unconsumed >= self._size
            self._resume_at = self._size - (half if is_full else 1)
        return True

    def put(self, item: Block | BaseException) -> None:
        """Adds a block, or the failure that ends the thread."""
        with self._lock:
            if not self.demand.ended:
                self._blocks.append(item)
                if isinstance(item, Block):
                    self._num_queued += len(item.elements)
                self._block_arrived.notify()

    def stop(self) -> None:
        """Tells the thread to end, and drops the queued elements."""
        with self._lock:
            self.demand.ended = True
            self._blocks.clear()
            self._block_arrived.notify()
            self._space_freed.notify()


def _state_at(points: list[Position], k: int) -> State:
    return state_at(points[k])


def _shifted(state_after: StateAfter, count: int) -> StateAfter:
    """`state_after` of a block without its first `count` elements; shifts do not nest."""
    if isinstance(state_after, functools.partial) and state_after.func is _state_shifted:
        inner, before = state_after.args
        return functools.partial(_state_shifted, inner, before + count)
    return functools.partial(_state_shifted, state_after, count)


def _state_shifted(state_after: StateAfter, count: int, k: int) -> State:
    return state_after(count + k)


_numbers = itertools.count()
_stages: weakref.WeakSet[ThreadPrefetchStage] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a forked process, threads do not exist and their locks may stay locked forever."""
    for stage in list(_stages):
        stage.forget_thread()


at_fork(after_in_child=_forget_threads)
