"""Timelines of pipelines, in the trace event format of Chrome, which Perfetto shows.

Slices come from the places where statistics are taken: those ask for `current` where they have read
the clocks anyway, or once for a block. So nothing is added where no timeline is taken, and what is
timed now and then only, as it is short, is on the timeline now and then only.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import struct
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from grainmill import _atomic_file
from grainmill._plan.arguments import checked_integer
from grainmill._plan.node import transform_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from grainmill._plan.node import Node

MAX_EVENTS: Final = 200_000
"""How many events a file has of each process, unless the user says otherwise: some 30 MB."""

# Slices that are taken every time are left out until they have taken so long together: keeping one
# costs a microsecond or two.
_LEAST_S: Final = 0.0002
_COUNTERS_S: Final = 0.05  # the least seconds between two values of a counter
_TO_NS: Final = 1e9

# The thread, the kind, when it began and ended, the first element, how many, and another number.
_EVENT: Final = struct.Struct("<qqddqqd")
_COUNTER: Final = "counter"  # the category of counters, whose value is the other number


class WorkerEvents(NamedTuple):
    """What a worker sends.

    Attributes:
        pid: Its process.
        number: That of the timeline that they are for.
        threads: The names of its threads that are not known yet.
        kinds: The names and categories of kinds that are not known yet.
        events: What came since it last sent some, as bytes.
        num_dropped: How many of those it has dropped.
    """

    pid: int
    number: int
    threads: dict[int, str]
    kinds: list[tuple[str, str]]
    events: list[bytes]
    num_dropped: int


class _OfProcess:
    """The events of a process.

    They are bytes, which garbage collection does not go through: that of as many tuples took more
    than all the rest.

    Attributes:
        kinds: The number of each name with its category.
        threads: The names of threads.
        events: The events.
    """

    def __init__(self, max_events: int) -> None:
        self.kinds: dict[tuple[str, str], int] = {}
        self.threads: dict[int, str] = {}
        self.events: deque[bytes] = deque(maxlen=max_events)


class Timeline:
    """Events of this process and its workers; the last ones of each, where there are too many.

    Args:
        max_events: How many are kept of each.
        number: See below; the next one if `None`.

    Attributes:
        pid: The process that created it.
        number: Tells it from others of this process; in a worker, it is that of the parent's.
    """

    def __init__(self, max_events: int = MAX_EVENTS, number: int | None = None) -> None:
        self.pid = os.getpid()
        self.number = next(_numbers) if number is None else number
        self._max_events = max_events
        self._started_s = time.perf_counter()
        self._own = _OfProcess(max_events)
        self._workers: dict[int, tuple[int, _OfProcess]] = {}  # by process: the worker's number
        self._num_added = itertools.count()
        self._num_dropped = 0  # by workers
        self._num_sent = (0, 0)  # threads and kinds whose names were sent
        self._counters_due_s = 0.0
        self._short_blocks_s = self._short_nexts_s = 0.0  # of slices that were left out
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
        own, thread = self._own, threading.get_native_id()
        if thread not in own.threads:
            # Not by its attribute `name`: threads of a pool note that they were asked for it.
            named = threading.Thread.name.fget  # type: ignore[attr-defined]
            own.threads[thread] = named(threading.current_thread())
        kind = own.kinds.setdefault((name, category), len(own.kinds))
        next(self._num_added)
        own.events.append(_EVENT.pack(thread, kind, started_s, ended_s, first, count, value))

    def add_block(
        self, start: int, count: int, started_s: float, ended_s: float, storage_s: float
    ) -> None:
        """Adds a slice in which `count` elements were computed, after waits for storage."""
        self._short_blocks_s += ended_s - started_s
        if self._short_blocks_s >= _LEAST_S:
            self._short_blocks_s = 0.0
            self.add(
                "block", "block", started_s, ended_s, first=start, count=count, value=storage_s
            )

    def add_next(self, count: int, started_s: float, ended_s: float) -> None:
        """Adds a slice in which the consumer got `count` elements."""
        self._short_nexts_s += ended_s - started_s
        if self._short_nexts_s >= _LEAST_S:
            self._short_nexts_s = 0.0
            self.add("next", "consumer", started_s, ended_s, count=count)

    def count(self, name: str, at_s: float, value: float) -> None:
        """Adds the value that a counter has from then on."""
        self.add(name, _COUNTER, at_s, at_s, value=value)

    def counters_are_due(self, now_s: float) -> bool:
        """Whether it is time for other values of counters, which are asked for then."""
        if now_s < self._counters_due_s:
            return False
        self._counters_due_s = now_s + _COUNTERS_S
        return True

    def drain(self) -> WorkerEvents:
        """Removes the events, for the parent."""
        own, (num_threads, num_kinds) = self._own, self._num_sent
        events = [own.events.popleft() for _ in range(len(own.events))]
        threads, kinds = list(own.threads.items()), list(own.kinds)
        self._num_sent = len(threads), len(kinds)
        added, self._num_added = next(self._num_added), itertools.count()
        return WorkerEvents(
            self.pid,
            self.number,
            dict(threads[num_threads:]),
            kinds[num_kinds:],
            events,
            added - len(events),
        )

    def add_worker(self, worker: int, sent: WorkerEvents) -> None:
        """Adds what a worker has sent, unless that is for a timeline before."""
        if sent.number != self.number:
            return
        _, found = self._workers.setdefault(sent.pid, (worker, _OfProcess(self._max_events)))
        found.threads |= sent.threads
        for kind in sent.kinds:
            found.kinds[kind] = len(found.kinds)
        self._num_dropped += sent.num_dropped + len(sent.events)
        before = len(found.events)
        found.events += sent.events
        self._num_dropped -= len(found.events) - before

    def text(self) -> str:
        """The file."""
        own = len(self._own.events)
        dropped = self._num_dropped + next(self._num_added) - own
        written = list(self._written(self.pid, "main", 0, self._own))
        for pid, (worker, found) in sorted(self._workers.items()):
            written += self._written(pid, f"worker {worker}", worker + 1, found)
        lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in written)
        other = json.dumps({"dropped_events": dropped})
        head = f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n'
        return f"{head}{lines}\n]}}\n"

    def _written(
        self, pid: int, name: str, place: int, found: _OfProcess
    ) -> Iterator[Mapping[str, Any]]:
        """The events of a process, after what names it and its threads, and its place."""
        metadata = [
            (0, "process_name", {"name": name}),
            (0, "process_sort_index", {"sort_index": place}),
            *((tid, "thread_name", {"name": of}) for tid, of in list(found.threads.items())),
        ]
        for tid, kind, arguments in metadata:
            yield {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
        events, kinds = list(found.events), list(found.kinds)
        for packed in events:
            tid, kind, started_s, ended_s, first, count, value = _EVENT.unpack(packed)
            called, category = kinds[kind]
            started = self._ns(started_s)
            event = {"name": called, "cat": category, "pid": pid, "tid": tid, "ts": started / 1000}
            if category == _COUNTER:
                yield {**event, "ph": "C", "args": {called: value}}
                continue
            # Rounded alike, times of one thread keep their order.
            event |= {"ph": "X", "dur": (self._ns(ended_s) - started) / 1000}
            known = {"first": (first, first >= 0), "elements": (count, count >= 0)}
            known["storage_ms"] = round(value * 1000, 3), value > 0
            arguments = {key: number for key, (number, is_known) in known.items() if is_known}
            yield {**event, "args": arguments} if arguments else event

    def _ns(self, time_s: float) -> int:
        return max(0, round((time_s - self._started_s) * _TO_NS))

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
    global current  # noqa: PLW0603
    if number != number_taken() or (current is not None and current.pid != os.getpid()):
        current = Timeline(number=number) if number else None


class trace:  # noqa: N801 - called like a function
    """Writes a timeline of all pipelines that run in a `with` block, for Perfetto or Chrome.

    Open the file at <https://ui.perfetto.dev> or `chrome://tracing`. It shows, for each thread of
    this process and of its workers, the blocks of elements and the functions computed there, reads
    of slow storage, the stages in between, and where the consumer waited. What takes
    microseconds is shown now and then, such that tracing costs a few percent at most; without one,
    it costs nothing. Pipelines may have been opened before.

    The file is written at the end of the block, also after an exception. If there are more than
    `max_events` events of a process, it has the last ones, and `otherData` the number of those that
    were dropped.

    Args:
        path: The file, usually `*.json`.
        max_events: How many events it has at most of each process.

    Raises:
        FileNotFoundError: There is no such directory.
        RuntimeError: A trace is being taken already, when the block begins.
        ValueError: `max_events` is less than 1.

    Example:
        >>> import json, pathlib, tempfile
        >>> ds = grain.MapDataset.range(100).map(lambda x: x + 1).batch(10).to_iter_dataset()
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
        >>> with grain.trace(path):
        ...     num_batches = len(list(ds))
        >>> events = json.loads(path.read_text())["traceEvents"]
        >>> num_batches, any(event["name"] == "next" for event in events)
        (10, True)
    """

    def __init__(self, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS) -> None:
        self._path = pathlib.Path(path)
        self._max_events = checked_integer(max_events, "max_events", minimum=1)
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"{self._path.parent}: no such directory, for a trace")

    def __enter__(self) -> Self:
        global current  # noqa: PLW0603
        if current is not None:
            raise RuntimeError("a trace is being taken already; end it first")
        current = Timeline(self._max_events)
        return self

    def __exit__(self, *_: object) -> None:
        global current
        taken, current = current, None
        if taken is not None:
            _atomic_file.write(self._path, taken.text().encode())
