"""Timelines as files, in the trace event format of Chrome, which Perfetto shows."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from grainmill import _atomic_file
from grainmill._plan.arguments import checked_integer
from grainmill._stats import timeline

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence


class trace:  # noqa: N801 - called like a function
    """Writes a timeline of all pipelines that run in a `with` block, for Perfetto or Chrome.

    Open the file at <https://ui.perfetto.dev> or `chrome://tracing`. It shows, for each thread of
    this process and of its workers, the blocks of elements and the functions computed there, each
    read with its file, offset and bytes, what the engine decompresses and decodes, the stages in
    between, and where the consumer waited. What takes microseconds is shown now and then, such that
    tracing costs up to 5 % of CPU time, and up to 8 % where other programs have the cores; without
    one, it costs nothing. Pipelines may have been opened before.

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

    def __init__(
        self, path: str | os.PathLike[str], *, max_events: int = timeline.MAX_EVENTS
    ) -> None:
        self._path = pathlib.Path(path)
        self._max_events = checked_integer(max_events, "max_events", minimum=1)
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"{self._path.parent}: no such directory, for a trace")

    def __enter__(self) -> Self:
        if timeline.current is not None:
            raise RuntimeError("a trace is being taken already; end it first")
        timeline.take(timeline.Timeline(self._max_events))
        return self

    def __exit__(self, *_: object) -> None:
        taken = timeline.current
        timeline.take(None)
        if taken is not None:
            taken.add_engines()
            _atomic_file.write(self._path, text_of(taken).encode())


def text_of(taken: timeline.Timeline) -> str:
    """The file of a timeline that has ended."""
    written = [
        event for process in taken.processes() for event in _written(taken.started_s, *process)
    ]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in written)
    other = json.dumps({"dropped_events": taken.num_dropped()})
    head = f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n'
    return f"{head}{lines}\n]}}\n"


def _written(
    origin_s: float, pid: int, name: str, place: int, found: timeline.EventsOfProcess
) -> Iterator[Mapping[str, Any]]:
    """The events of a process, after what names it and its threads, and its place."""
    arguments: dict[str, Any]
    metadata: list[tuple[int, str, dict[str, Any]]] = [
        (0, "process_name", {"name": name}),
        (0, "process_sort_index", {"sort_index": place}),
        *((tid, "thread_name", {"name": of}) for tid, of in list(found.threads.items())),
    ]
    for tid, kind, arguments in metadata:
        yield {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
    events = list(found.events)
    kinds = {number: kind for kind, number in list(found.kinds.items())}
    reads: list[tuple[int, int]] = []
    for number, packed in enumerate(events):
        tid, kind, started_s, ended_s, first, count, value = timeline.EVENT.unpack(packed)
        called, category, *path = kinds[kind]
        # Rounded alike, times of one thread keep their order.
        started, ended = _ns(started_s - origin_s), _ns(ended_s - origin_s)
        event = {"name": called, "cat": category, "pid": pid, "tid": tid, "ts": started / 1000}
        if category == timeline.COUNTER:
            yield {**event, "ph": "C", "args": {called: value}}
            continue
        if path:
            arguments = {"file": path[0], "offset": first} if path[0] else {}
            arguments["bytes"] = count
            if category == timeline.READ:
                reads.append((started, ended))
        else:
            known = {"first": (first, first >= 0), "elements": (count, count >= 0)}
            known["storage_ms"] = round(value * 1000, 3), value > 0
            arguments = {key: number for key, (number, is_known) in known.items() if is_known}
        if arguments:
            event["args"] = arguments
        if path and tid == timeline.REQUEST:  # they overlap
            event["id"] = f"{pid}.{number}"
            yield {**event, "ph": "b"}
            yield {**event, "ph": "e", "ts": ended / 1000}
        else:
            yield {**event, "ph": "X", "dur": (ended - started) / 1000}
    yield from _reads_in_flight(pid, reads)


def _reads_in_flight(pid: int, reads: Sequence[tuple[int, int]]) -> Iterator[Mapping[str, Any]]:
    """The values of a counter of reads, given when each began and ended."""
    changes = Counter(began for began, _ in reads)
    changes.subtract(ended for _, ended in reads)
    number, name = 0, "reads in flight"
    for at in sorted(changes):
        if changes[at]:
            number += changes[at]
            common = {"name": name, "cat": timeline.COUNTER, "pid": pid, "tid": 0, "ph": "C"}
            yield {**common, "ts": at / 1000, "args": {name: number}}


def _ns(time_s: float) -> int:
    return max(0, round(time_s * 1e9))
