"""Timelines of pipelines: what each thread and worker does when.

Slices come from the places where statistics are taken: those ask for `current` where they have read
the clocks anyway, or once for a block. So nothing is added where no timeline is taken, and what is
timed now and then only, as it is short, is on the timeline now and then only. The engine keeps its
own, of reads and decoding, until they are asked for.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from grainmill._native import drain_timeline, end_timeline, take_timeline
from grainmill._plan.node import transform_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._plan.node import Node

MAX_EVENTS: Final = 200_000
"""How many events a file has of each process, unless the user says otherwise: some 30 MB."""

LEAST_S: Final = 0.001
"""Slices that are taken every time are left out until they have taken so long together.

Keeping one costs some microseconds.
"""

_COUNTERS_S: Final = 0.05  # the least seconds between two values of a counter

# The thread, the kind, when it began and ended, the first element, how many, and another number.
EVENT: Final = struct.Struct("<qqddqqd")
COUNTER: Final = "counter"  # the category of counters, whose value is the other number
READ: Final = "read"
REQUEST: Final = 0  # the thread of reads that no thread waits for

Kind: TypeAlias = "tuple[str, str] | tuple[str, str, str]"
"""The name and the category. What the engine does has the path of the file, too, and the offset and
the bytes in place of the first element and the number of elements."""


class WorkerEvents(NamedTuple):
    """What a worker sends.

    Attributes:
        pid: Its process.
        number: That of the timeline that they are for.
        threads: The names of its threads that are not known yet.
        kinds: The kinds that are not known yet, with their numbers.
        events: What came since it last sent some, as bytes.
        num_dropped: How many of those it has dropped.
    """

    pid: int
    number: int
    threads: dict[int, str]
    kinds: dict[Kind, int]
    events: list[bytes]
    num_dropped: int


class EventsOfProcess:
    """The events of a process.

    They are bytes, which garbage collection does not go through: that of as many tuples took more
    than all the rest.

    Attributes:
        kinds: The number of each kind.
        numbers: Those that are left for others.
        threads: The names of threads.
        events: The events.
    """

    def __init__(self, max_events: int) -> None:
        self.kinds: dict[Kind, int] = {}
        self.numbers = itertools.count()
        self.threads: dict[int, str] = {}
        self.events: deque[bytes] = deque(maxlen=max_events)

    def number_of(self, kind: Kind) -> int:
        """The number of a kind."""
        number = self.kinds.get(kind)
        if number is None:  # two threads may add kinds at the same time: numbers may be left out
            number = self.kinds.setdefault(kind, next(self.numbers))
        return number


class Timeline:
    """Events of this process and its workers; the last ones of each, where there are too many.

    Args:
        max_events: How many are kept of each.
        number: See below; the next one if `None`.

    Attributes:
        pid: The process that created it.
        max_events: How many are kept of each process.
        number: Tells it from others of this process; in a worker, it is that of the parent's.
        started_s: When it began.
        blocks_s: Seconds of blocks that were left out; who adds theirs to it adds a block once it
            is `LEAST_S`.
        nexts_s: The same of what the consumer got.
    """

    def __init__(self, max_events: int = MAX_EVENTS, number: int | None = None) -> None:
        self.pid = os.getpid()
        self.number = next(_numbers) if number is None else number
        self.max_events = max_events
        self.started_s = time.perf_counter()
        self._own = EventsOfProcess(max_events)
        self._workers: dict[
            int, tuple[int, EventsOfProcess]
        ] = {}  # by process: the worker's number
        self._num_added = itertools.count()
        self._num_dropped = 0  # by workers and by the engine
        self._num_sent = (0, 0)  # threads and kinds whose names were sent
        self._counters_due_s = 0.0
        self.blocks_s = self.nexts_s = 0.0
        self._of_thread = threading.local()
        self._labels: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()

    def add(
        self,
        name: str,
        category: str,
        started_s: float,
        ended_s: float,
        *,
        first: int = -1,
        count: int = -1,
        value: float = 0.0,
    ) -> None:
        """Adds a slice of the calling thread.

        Args:
            name: What it is called.
            category: What kind of slices it belongs to.
            started_s: When it began, by `time.perf_counter`.
            ended_s: When it ended.
            first: The first of the elements that it is about; -1 for none.
            count: How many elements; -1 for none.
            value: Seconds of it in which it waited for storage; what a counter shows.
        """
        own = self._own
        try:
            thread = self._of_thread.id
        except AttributeError:  # asking the system each time would take as long as all the rest
            thread = self._of_thread.id = threading.get_native_id()
            own.threads[thread] = _NAME(threading.current_thread())
        kind = own.number_of((name, category))
        next(self._num_added)
        own.events.append(EVENT.pack(thread, kind, started_s, ended_s, first, count, value))

    def add_block(
        self, start: int, count: int, started_s: float, ended_s: float, storage_s: float
    ) -> None:
        """Adds a slice in which `count` elements were computed, after waits for storage."""
        self.blocks_s = 0.0
        self.add("block", "block", started_s, ended_s, first=start, count=count, value=storage_s)

    def add_next(self, count: int, started_s: float, ended_s: float) -> None:
        """Adds a slice in which the consumer got `count` elements."""
        self.nexts_s = 0.0
        self.add("next", "consumer", started_s, ended_s, count=count)

    def count(self, name: str, at_s: float, value: float) -> None:
        """Adds the value that a counter has from then on."""
        self.add(name, COUNTER, at_s, at_s, value=value)

    def counters_are_due(self, now_s: float) -> bool:
        """Whether it is time for other values of counters, which are asked for then."""
        if now_s < self._counters_due_s:
            return False
        self._counters_due_s = now_s + _COUNTERS_S
        return True

    def add_engines(self) -> None:
        """Adds what the engine has kept since it was last asked."""
        own, (events, num_dropped) = self._own, drain_timeline()
        self._num_dropped += num_dropped
        for activity, thread, name, path, offset, byte_len, started_s, ended_s in events:
            if thread != REQUEST and thread not in own.threads:
                of_python = {_NUMBER(each): _NAME(each) for each in threading.enumerate()}
                own.threads[thread] = name or of_python.get(thread, f"thread {thread}")
            kind = own.number_of((activity, activity, path))
            next(self._num_added)
            own.events.append(EVENT.pack(thread, kind, started_s, ended_s, offset, byte_len, 0.0))

    def drain(self) -> WorkerEvents:
        """Removes the events, for the parent."""
        self.add_engines()
        own, (num_threads, num_kinds) = self._own, self._num_sent
        events = [own.events.popleft() for _ in range(len(own.events))]
        threads, kinds = list(own.threads.items()), list(own.kinds.items())
        self._num_sent = len(threads), len(kinds)
        added, self._num_added = next(self._num_added), itertools.count()
        num_dropped, self._num_dropped = self._num_dropped + added - len(events), 0
        return WorkerEvents(
            self.pid,
            self.number,
            dict(threads[num_threads:]),
            dict(kinds[num_kinds:]),
            events,
            num_dropped,
        )

    def add_worker(self, worker: int, sent: WorkerEvents) -> None:
        """Adds what a worker has sent, unless that is for a timeline before."""
        if sent.number != self.number:
            return
        _, found = self._workers.setdefault(sent.pid, (worker, EventsOfProcess(self.max_events)))
        found.threads |= sent.threads
        found.kinds |= sent.kinds
        self._num_dropped += sent.num_dropped + len(sent.events)
        before = len(found.events)
        found.events += sent.events
        self._num_dropped -= len(found.events) - before

    def num_dropped(self) -> int:
        """How many events were dropped, here, by the engine and by workers."""
        added = next(self._num_added)
        self._num_added = itertools.count(added)
        return self._num_dropped + added - len(self._own.events)

    def processes(self) -> Iterator[tuple[int, str, int, EventsOfProcess]]:
        """For each process its number, its name, its place among them, and its events."""
        yield self.pid, "main", 0, self._own
        for pid, (worker, found) in sorted(self._workers.items()):
            yield pid, f"worker {worker}", worker + 1, found

    def label(self, node: Node | None) -> str:
        """What a stage is called: by its function, if it has one, else by its kind."""
        if node is None:
            return "stage"
        label = self._labels.get(node)
        if label is None:
            transform = getattr(node, "transform", None)
            kind = str(node).partition("(")[0].replace("IterDataset", "DatasetIterator", 1)
            label = kind if transform is None else transform_name(transform)
            self._labels[node] = label
        return label


# Not by the attributes themselves: threads of a pool note that they were asked for them.
_NAME = threading.Thread.name.fget  # type: ignore[attr-defined]
_NUMBER = threading.Thread.native_id.fget  # type: ignore[attr-defined]
_numbers = itertools.count(1)
current: Timeline | None = None
"""What takes the events of this process; `None` most of the time."""


def number_taken() -> int:
    """The number of the current timeline; 0 if there is none."""
    return 0 if current is None else current.number


def follow(number: int) -> None:
    """Takes a timeline in a worker, whose events `drain` returns, as `number_taken` in the parent.

    So that a worker learns of it, that number goes with each task.
    """
    if number != number_taken() or (current is not None and current.pid != os.getpid()):
        take(Timeline(number=number) if number else None)


def take(taken: Timeline | None) -> None:
    """Takes a timeline of this process from now on, or none."""
    global current  # noqa: PLW0603
    current = taken
    if taken is None:
        end_timeline()
    else:
        take_timeline(taken.max_events)
