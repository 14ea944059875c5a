"""Elements made ahead by a thread.

The thread and the stage share a `_Feed`, which knows nothing of the stage: a stage nobody holds
any more is collected, and its thread ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import byte_len
from grainmill._evaluate.executor import Demand
from grainmill._iterators.cursor import END, Cursor, ResumePoint, stays
from grainmill._iterators.stage import Block, Stage, State, runs
from grainmill._iterators.user_defined import UserDefinedStage
from grainmill._memory import default_budget_bytes
from grainmill._plan import sequential
from grainmill._plan.closing import closed_error
from grainmill._plan.sequential import ThreadPrefetch, checked_prefetch_buffer_size
from grainmill._threads import may_wait, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grainmill._iterators.stage import After

_PATIENCE_S = 0.1
# What a consumer that waits gets is no later than this, if more comes meanwhile.
_URGENT_S = 0.001


@runs(sequential.ThreadPrefetch)
class ThreadPrefetchStage(Stage):
    """Keeps up to `prefetch_buffer_size` elements of its parent ready; 0 means no thread.

    Failures and the end arrive in order. The thread ends with them, and the next `pull` after
    a failure starts another one at the same element.
    """

    def __init__(self, node: ThreadPrefetch, parent: Stage) -> None:
        super().__init__(parent)
        self._cursor = Cursor(parent)
        self._size = node.prefetch_buffer_size
        self._feed: Feed | None = None
        self._cancelled = self._closed = False
        self._begin()
        _stages.add(self)

    def _begin(self) -> None:
        self._ended = False
        self._astray = False  # whether a thread moved the parent that is no longer there
        self._place = self._cursor.place()

    @classmethod
    def around(cls, iterator: Iterator[Any], prefetch_buffer_size: int) -> Self:
        """A stage that prefetches from any object that has `__next__`."""
        prefetch_buffer_size = checked_prefetch_buffer_size(prefetch_buffer_size)
        return cls(ThreadPrefetch((), prefetch_buffer_size), UserDefinedStage(iterator))

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`; as many as are handed over together."""
        return self._size or self._cursor.stage.pull_size

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; waits for one element and gives those that came with it."""
        self._check_open()
        if self._ended:
            return Block([], stays(self._place))
        if not self._size:
            block = self._cursor.block(limit)
            self._place = self._cursor.place()
            return block
        block = self._running().take(limit)
        self._check_open()
        self._place = (block.state_after, len(block.elements))
        self._ended = not block.elements
        return block

    def _running(self) -> Feed:
        feed = self._feed
        if self._astray or (feed is not None and feed.demand.ended):
            self._rewind()
            feed = None
        if feed is None or feed.failed:
            self._cursor.freeze()
            feed = self._new_feed()
            try:
                feed.start()
                self._feed = feed
                self._check_open()  # `cancel` may have come before the feed
            except BaseException:
                feed.stop()
                raise
        feed.begin()
        return feed

    def _new_feed(self) -> Feed:
        return Feed(self._cursor, self._size, self._thread_name())

    def _thread_name(self) -> str:
        return f"grain-thread-prefetch_{next(_numbers)}"

    def lose_thread(self) -> None:
        """Goes on without its thread, which a fork has left behind."""
        if self._feed is not None:
            self._feed, self._astray = None, True

    def _halt(self) -> None:
        """Waits for the thread to leave the parent, and drops what it made."""
        if self._feed is not None:
            self._feed.stop()
            while self._feed.thread.is_alive():
                self._feed.thread.join(_PATIENCE_S)
                self._check_open()
            self._feed = None

    def _rewind(self) -> None:
        """Takes the parent back to the element after the one last handed out."""
        self._halt()
        self._cursor.restore(self.state())
        self._begin()

    def state(self) -> State:
        """See `Stage.state`; starts no thread."""
        after, position = self._place
        return after(position)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._check_open()
        self._halt()
        self._cursor.restore(state)
        self._begin()

    def next_index(self) -> int:
        """See `Stage.next_index`; elements made ahead are made again."""
        if self._feed is not None or self._astray:
            self._rewind()
        return self._cursor.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._check_open()
        self._halt()
        self._cursor.seek(index)
        self._begin()

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        self._check_open()
        if not self._size:
            super().start_prefetch()
        elif not self._ended:
            self._running()

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True
        feed = self._feed
        if feed is not None:
            feed.stop()
        super().cancel()

    def close(self) -> None:
        """See `Stage.close`; a parent that is busy with an element is closed by its thread."""
        if self._closed:
            return
        self._cancelled = self._closed = True
        feed = self._feed
        if feed is not None:
            feed.stop()
            if may_wait() and feed.thread is not threading.current_thread():
                feed.thread.join(_PATIENCE_S)
            if not feed.leave(self._cursor.stage.close):
                self._cursor.stage.cancel()
                return
        self._cursor.stage.close()

    def _check_open(self) -> None:
        if self._cancelled:
            raise closed_error()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.stop()


class _Gate:
    """Where one thread waits for another; unlike a condition, an interrupt leaves it as it was."""

    def __init__(self) -> None:
        self._shut = threading.Lock()

    def wait_for(self, reached: Callable[[], object]) -> None:
        """Waits until `reached()`, asking again whenever the gate was opened."""
        while True:
            self._shut.acquire(blocking=False)
            if reached():
                return
            self._shut.acquire()

    def open(self) -> None:
        """Lets who waits look again."""
        if self._shut.locked():
            with contextlib.suppress(RuntimeError):  # a finalizer in between opened it
                self._shut.release()


class Feed:
    """A bounded queue and the thread that fills it from `cursor`.

    The thread hands over what it has made after some time, but at once the first element, and
    then at most twice as many as before: up to half of `size`, or with `at_once` as many as that
    says, given the last of them. It waits while `size` elements are there or, with `at_once`,
    while more than it handed over last wait. Before all that it calls what `once` holds, and takes
    it out there when it has returned.

    Attributes:
        demand: What the thread can ask of the consumer; ended when the thread is to end.
        failed: Whether a failure, the last thing the thread delivers, was taken.
    """

    def __init__(
        self,
        cursor: Cursor,
        size: int,
        thread_name: str,
        at_once: Callable[[Any], int] | None = None,
        once: list[Callable[[], None]] | None = None,
    ) -> None:
        self.demand = Demand()
        self.failed = False
        self._cursor = cursor
        self._size = self._most = size
        self._budget_bytes = default_budget_bytes()
        self._at_once = at_once
        self._once = [] if once is None else once
        self._step = 1
        self._spare = -1  # no room until the thread may begin
        self._queue: deque[Block | BaseException] = deque()
        self._held = 0  # elements in the queue
        self._taken = 0  # elements of the block taken last, but the one that was asked for
        # Reentrant: garbage collection may call `stop` from inside `put` or `take`.
        self._lock = threading.RLock()
        self._arrived = _Gate()
        self._roomy = _Gate()
        self._thread_name = thread_name
        self._left = False  # whether the thread is through with the cursor
        self._on_leaving: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts the thread, which waits until it may begin."""
        self.thread = start_thread(self._fill, name=self._thread_name, stop=self.stop)

    def begin(self) -> None:
        """Lets the thread begin, now that it is known to who may have to stop it."""
        if self._spare < 0:
            with self._lock:
                self._spare = self._size - 1
                self._roomy.open()

    def _fill(self) -> None:
        try:
            while self._once:
                self._once[-1]()
                self._once.pop()
            while self.make():
                pass
        except BaseException as failure:
            self.put(failure)
        finally:
            with self._lock:
                self._left = True
            if self._on_leaving is not None:
                with contextlib.suppress(Exception):  # nobody is left who could be told
                    self._on_leaving()

    def leave(self, close: Callable[[], None]) -> bool:
        """Whether the thread is through with the cursor; if not, it calls `close` once it is."""
        with self._lock:
            if not self._left:
                self._on_leaving = close
            return self._left

    def take(self, limit: int) -> Block:
        """Waits for something and returns what came together, up to `limit` elements.

        A failure is raised, and one once nobody wants more.
        """
        with self._lock:  # what was taken before is used up
            self._taken = 0
            if self._has_room():
                self._roomy.open()
        if not self._queue:
            self.demand.urgent = True
            self._arrived.wait_for(lambda: self._queue or self.demand.ended)
        with self._lock:
            self.demand.urgent = False
            if self.demand.ended:
                raise closed_error()
            block = self._first(limit)
            count = len(block.elements)
            self._held -= count
            self._taken = max(0, count - 1)
            if self._has_room():
                self._roomy.open()
        return block

    def _has_room(self) -> bool:
        return self._held + self._taken <= self._spare

    def _first(self, limit: int) -> Block:
        head = self._queue[0]
        if isinstance(head, BaseException):
            self._queue.popleft()
            self.failed = True
            try:
                raise head
            finally:
                del head
        elements, after = head.elements, head.state_after
        if len(elements) <= limit:
            self._queue.popleft()
            return head
        self._queue[0] = Block(elements[limit:], _shifted(after, limit))
        return Block(elements[:limit], after)

    def make(self) -> bool:
        """Takes elements once there is room; `False` when there are no more."""
        self._roomy.wait_for(lambda: self._has_room() or self.demand.ended)
        with self._lock:
            if self.demand.ended:
                return False
            wanted = min(self._step, self._size - self._held - self._taken)
        cursor = self._cursor
        began = time.monotonic()
        places = [cursor.place()]
        elements: list[Any] = []
        ended = False
        try:
            while len(elements) < wanted:
                element = cursor.next()
                if element is END:
                    ended = True
                    break
                elements.append(element)
                places.append(cursor.place())
                bound = _URGENT_S if self.demand.urgent else tuning.HAND_OVER_S
                if time.monotonic() - began > bound:
                    break
        finally:
            if elements:
                self.put(Block(elements, functools.partial(_state_at, places)))
        if ended:
            self.put(Block([], stays(cursor.place())))
            return False
        count = len(elements)
        if self._at_once is not None:
            self._step = min(self._at_once(elements[-1]), 2 * count)
            self._spare = count
        else:
            affordable = self._budget_bytes // max(1, byte_len(elements[-1]))
            self._size = max(1, min(self._most, affordable))
            half = max(1, self._size // 2)
            self._step = min(half, 2 * count)
            is_full = self._held + self._taken >= self._size
            self._spare = self._size - (half if is_full else 1)
        return True

    def put(self, made: Block | BaseException) -> None:
        """Adds what the thread made or met."""
        with self._lock:
            if not self.demand.ended:
                self._queue.append(made)
                if isinstance(made, Block):
                    self._held += len(made.elements)
                self._arrived.open()

    def stop(self) -> None:
        """Asks the thread to end and drops what it made."""
        with self._lock:
            self.demand.ended = True
            self._queue.clear()
            self._arrived.open()
            self._roomy.open()


def _state_at(places: list[ResumePoint], k: int) -> State:
    after, position = places[k]
    return after(position)


def _shifted(after: After, count: int) -> After:
    """`after` counted from `count` on; of one that is shifted already, not one more around it."""
    if isinstance(after, functools.partial) and after.func is _state_further_on:
        inner, before = after.args
        return functools.partial(_state_further_on, inner, before + count)
    return functools.partial(_state_further_on, after, count)


def _state_further_on(after: After, count: int, k: int) -> State:
    return after(count + k)


_numbers = itertools.count()
_stages: weakref.WeakSet[ThreadPrefetchStage] = weakref.WeakSet()


def _lose_threads() -> None:
    """In a forked process: the threads are not there, and their locks may be taken for ever."""
    for stage in list(_stages):
        stage.lose_thread()


os.register_at_fork(after_in_child=_lose_threads)
