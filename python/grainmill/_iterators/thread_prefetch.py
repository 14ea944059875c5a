"""Elements made ahead by a thread.

The thread and the stage share a `_Feed`, which knows nothing of the stage: a stage nobody holds
any more is collected, and its thread ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from grainmill._evaluate.ahead import HAND_OVER_S, Demand
from grainmill._iterators.foreign import ForeignStage
from grainmill._iterators.part import After, Place, Start
from grainmill._iterators.stage import Block, Stage, State
from grainmill._plan.sequential import ThreadPrefetch, check_prefetch_buffer_size
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATIENCE_S = 0.1
_CLOSED = "Attempting to use a closed iterator."


class ThreadPrefetchStage(Stage):
    """Keeps up to `prefetch_buffer_size` elements of its parent ready; 0 means no thread.

    Failures and the end arrive in order. The thread ends with them, and the next `pull` after
    a failure starts another one at the same element.
    """

    def __init__(self, node: ThreadPrefetch, parent: Stage) -> None:
        super().__init__(parent)
        self._parent = parent
        self._size = node.prefetch_buffer_size
        self._feed: Feed | None = None
        self._closed = False
        self._begin()
        _stages.add(self)

    def _begin(self) -> None:
        self._ended = False
        self._astray = False  # whether a thread moved the parent that is no longer there
        self._start = Start(self._parent)
        self._place: Place = (self._start, 0)

    @classmethod
    def around(cls, iterator: Iterator[Any], prefetch_buffer_size: int) -> Self:
        """A stage that prefetches from any object that has `__next__`."""
        check_prefetch_buffer_size(prefetch_buffer_size)
        return cls(ThreadPrefetch((), prefetch_buffer_size), ForeignStage(iterator))

    @property
    def burst(self) -> int:
        """See `Stage.burst`; with a thread 1, as elements handed out make room for others."""
        return 1 if self._size else self._parent.burst

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`; waits for one element and gives those that are ready."""
        self._check_open()
        last, position = self._place
        if self._ended:
            return Block([], lambda _: last(position))
        if not self._size:
            return self._inline(limit, interior=interior)
        pieces = self._running().take(limit)
        self._check_open()
        elements = [element for piece in pieces for element in piece.elements]
        final = pieces[-1]
        self._place = (final.after, final.start + len(final.elements))
        self._ended = not elements
        if self._ended:
            return Block([], lambda _: final.after(0))
        places = [(piece.after, piece.start, len(piece.elements)) for piece in pieces]
        return Block(elements, lambda k: _state(places, k) if k else last(position))

    def _inline(self, limit: int, *, interior: bool) -> Block:
        block = self._parent.pull(limit, interior=interior)
        self._start.settle(block.state_after)
        self._place = (block.state_after, len(block.elements))
        return block

    def _running(self) -> Feed:
        feed = self._feed
        if self._astray or (feed is not None and feed.demand.ended):
            self._rewind()
            feed = None
        if feed is None or feed.failed:
            self._start.freeze()
            feed = self._new_feed()
            try:
                feed.start()
                self._feed = feed
            except BaseException:
                feed.stop()
                raise
        feed.begin()
        return feed

    def _new_feed(self) -> Feed:
        name = f"grain-thread-prefetch_{next(_numbers)}"
        return Feed(self._parent, self._size, name)

    def lose_thread(self) -> None:
        """Goes on without its thread, which a fork has left behind."""
        if self._feed is not None:
            self._feed, self._astray = None, True

    def _halt(self) -> None:
        """Waits for the thread to leave the parent, and drops what it made."""
        if self._feed is not None:
            self._feed.stop()
            self._feed.thread.join()
            self._feed = None

    def _rewind(self) -> None:
        """Takes the parent back to the element after the one last handed out."""
        self._halt()
        state = self.state()
        self._parent.restore(state)
        self._begin()

    def state(self) -> State:
        """See `Stage.state`; starts no thread."""
        after, position = self._place
        return after(position)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._check_open()
        self._halt()
        self._start.freeze()
        self._parent.restore(state)
        self._begin()

    def next_index(self) -> int:
        """See `Stage.next_index`; elements made ahead are made again."""
        if self._feed is not None or self._astray:
            self._rewind()
        return self._parent.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        self._check_open()
        self._halt()
        self._start.freeze()
        self._parent.seek(index)
        self._begin()

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        self._check_open()
        if not self._size:
            super().start_prefetch()
        elif not self._ended:
            self._running()

    def close(self) -> None:
        """See `Stage.close`; does not wait for a parent that is busy with an element."""
        if self._closed:
            return
        self._closed = True
        feed = self._feed
        if feed is not None:
            feed.stop()
            if feed.thread is not threading.current_thread():
                feed.thread.join(_PATIENCE_S)
            if feed.thread.is_alive():
                # What it waits for may end when the parent closes; a parent that can not be
                # closed meanwhile is left to the thread, which nobody waits for.
                with contextlib.suppress(Exception):
                    self._parent.close()
                return
        self._parent.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(_CLOSED)

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.stop()


class _Piece:
    """Consecutive elements of one block of the parent."""

    __slots__ = ("after", "elements", "start")

    def __init__(self, after: After, start: int, elements: list[Any]) -> None:
        self.after = after
        self.start = start
        self.elements = elements


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
    """A bounded queue and the thread that fills it from `stage`.

    With `at_once`, the thread hands over as many elements as that says after each hand-over, given
    its last element, or those it has made in a moment; the first time one, then at most twice as
    many as before. It makes no more while more than the last ones wait.

    Attributes:
        demand: What the thread can ask of the consumer; ended when the thread is to end.
        failed: Whether a failure, the last thing the thread delivers, was taken.
    """

    def __init__(
        self,
        stage: Stage,
        size: int,
        thread_name: str,
        at_once: Callable[[Any], int] | None = None,
    ) -> None:
        self.demand = Demand()
        self.failed = False
        self._stage = stage
        self._size = size
        self._at_once = at_once
        self._step = 1
        self._spare = -1  # no room until the thread may begin
        self._queue: deque[_Piece | BaseException] = deque()
        self._held = 0
        # Reentrant: garbage collection may call `stop` from inside `put` or `take`.
        self._lock = threading.RLock()
        self._arrived = _Gate()
        self._roomy = _Gate()
        self._thread_name = thread_name

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
            while self.make():
                pass
        except BaseException as failure:
            self.put([failure])

    def take(self, limit: int) -> list[_Piece]:
        """Waits for something and returns what there is, up to `limit` elements.

        The end is a piece without elements; a failure is raised, and one once nobody wants more.
        """
        pieces: list[_Piece] = []
        if not self._queue:
            self.demand.urgent = True
            self._arrived.wait_for(lambda: self._queue or self.demand.ended)
        with self._lock:
            self.demand.urgent = False
            if self.demand.ended:
                raise ValueError(_CLOSED)
            while limit and self._queue:
                head = self._queue[0]
                if isinstance(head, BaseException) or not head.elements:
                    if pieces:
                        break
                    return [self._last()]
                piece = self._first(head, limit)
                pieces.append(piece)
                limit -= len(piece.elements)
            if self._has_room():
                self._roomy.open()
        return pieces

    def _has_room(self) -> bool:
        return self._held <= self._spare

    def _first(self, head: _Piece, limit: int) -> _Piece:
        if len(head.elements) <= limit:
            self._queue.popleft()
            self._held -= len(head.elements)
            return head
        self._queue[0] = _Piece(head.after, head.start + limit, head.elements[limit:])
        self._held -= limit
        return _Piece(head.after, head.start, head.elements[:limit])

    def _last(self) -> _Piece:
        head = self._queue.popleft()
        if isinstance(head, _Piece):
            return head
        self.failed = True
        try:
            raise head
        finally:
            del head

    def make(self) -> bool:
        """Pulls from the parent once there is room; `False` when there is no more to do."""
        self._roomy.wait_for(lambda: self._has_room() or self.demand.ended)
        with self._lock:
            if self.demand.ended:
                return False
            room = self._size - self._held
        until = time.monotonic() + HAND_OVER_S
        made: list[_Piece | BaseException] = []
        count = 0
        try:
            while not made or (count < self._step and time.monotonic() < until):
                wanted = min(self._stage.burst, room - count)
                block = self._stage.pull(wanted, interior=wanted > 1)
                made.append(_Piece(block.state_after, 0, block.elements))
                count += len(block.elements)
                if not block.elements:
                    return False
            if self._at_once is not None:
                self._step = min(self._at_once(block.elements[-1]), 2 * count)
                self._spare = count
            return True
        finally:
            self.put(made)

    def put(self, made: list[_Piece | BaseException]) -> None:
        """Adds what the thread made or met."""
        with self._lock:
            if not self.demand.ended:
                self._queue.extend(made)
                self._held += sum(
                    len(piece.elements) for piece in made if isinstance(piece, _Piece)
                )
                self._arrived.open()

    def stop(self) -> None:
        """Asks the thread to end and drops what it made."""
        with self._lock:
            self.demand.ended = True
            self._queue.clear()
            self._arrived.open()
            self._roomy.open()


def _state(places: list[tuple[After, int, int]], count: int) -> State:
    for after, start, length in places:
        if count <= length:
            return after(start + count)
        count -= length
    raise IndexError("a place after the end of the block")


_numbers = itertools.count()
_stages: weakref.WeakSet[ThreadPrefetchStage] = weakref.WeakSet()


def _lose_threads() -> None:
    """In a forked process: the threads are not there, and their locks may be taken for ever."""
    for stage in list(_stages):
        stage.lose_thread()


os.register_at_fork(after_in_child=_lose_threads)
