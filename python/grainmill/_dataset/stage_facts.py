"""What is known of a stage from its plan: its length, where it runs, what a state holds of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from grainmill._plan import random_access, sequential
from grainmill._plan.node import MapNode, Node
from grainmill._plan.node import random_access as random_access_node

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLER = "on the caller's thread"
_RUST = "Rust"
_PYTHON = "Python"

# Stages that call a user's function or object for every element; the others are the engine's.
_USER_CODE = (
    random_access.UserDefined,
    random_access.Map,
    random_access.FlatMap,
    random_access.Select,
    sequential.UserDefined,
    sequential.Map,
    sequential.FlatMap,
)
# Stages that hand on what they get; their bookkeeping is Python's.
_HANDS_ON = (
    sequential.Repeat,
    sequential.Cache,
    sequential.Limit,
    sequential.Zip,
    sequential.Interleave,
    sequential.WindowShuffle,
    sequential.ThreadPrefetch,
    sequential.MultiprocessPrefetch,
    sequential.MultithreadPrefetch,
    random_access.Zip,
)

# What the state of an iterator holds of each stage, besides that of the stages before it.
_STATES: dict[type[Node], str] = {
    sequential.Read: "the next index",
    sequential.UserDefined: "what `get_state` returns",
    sequential.RandomMap: "the number of elements passed",
    sequential.MapWithIndex: "the number of elements passed",
    sequential.Mix: "the number of turns",
    sequential.Interleave: "whose turn it is, and the state of each open dataset",
    sequential.MultiprocessPrefetch: "whose turn it is, and the state of each worker",
    sequential.MultithreadPrefetch: "whose turn it is, and the state of each thread",
    sequential.Repeat: "the epoch",
    sequential.Cache: "the position in the cache",
    sequential.Limit: "the number of elements passed",
    sequential.FlatMap: "the position in the element that is split",
    sequential.WindowShuffle: "the window and the position in it",
    sequential.Rebatch: "the position in a batch",
    sequential.FitPack: "the row of a batch of bins, which is packed again",
    sequential.ConcatThenSplit: "the sequence that is split, and the rows since",
}


def runs_in(node: Node) -> str:
    """What computes the elements of `node`."""
    if isinstance(node, random_access.Source):
        reads = hasattr(type(node.source), "_getitem_of_files")
        return _RUST if reads and not node.wraps else _PYTHON
    if isinstance(node, random_access.Batch | sequential.Batch):
        return _RUST if node.batch_fn is None else _PYTHON
    return _PYTHON if isinstance(node, (*_USER_CODE, *_HANDS_ON)) else _RUST


def state_of(node: Node) -> str:
    """What a state holds of `node`; empty if nothing."""
    return _STATES.get(type(node), "")


def place_of(node: Node, place: str = _CALLER) -> dict[int, str]:
    """Where each node of a plan that runs at `place` runs, by its `id`."""
    places = {id(node): place}
    pending = [node]
    while pending:
        reader = pending.pop()
        place = _before(reader, places[id(reader)])
        for parent in reader.parents:
            if id(parent) not in places:
                places[id(parent)] = place
                pending.append(parent)
    return places


def _before(node: Node, place: str) -> str:
    """Where the parents of `node` run."""
    if isinstance(node, sequential.MultiprocessPrefetch):
        return f"in each of {_counted(node.num_workers, 'worker process', 'worker processes')}"
    if isinstance(node, sequential.MultithreadPrefetch):
        return f"on each of {_counted(node.num_threads, 'thread', 'threads')}"
    if isinstance(node, sequential.ThreadPrefetch) and node.prefetch_buffer_size:
        return "on a thread of its own"
    if isinstance(node, sequential.Read):
        return _before_reader(node, place)
    return place


def _before_reader(node: sequential.Read, place: str) -> str:
    options = node.options
    inside = "" if place == _CALLER else f" {place}"
    if all(runs_in(upstream) == _RUST for upstream in node.parent.walk()):
        return place  # threads run Python's functions only
    if options.num_workers:
        return f"in {_counted(options.num_workers, 'worker process', 'worker processes')}{inside}"
    if options.num_threads and options.prefetch_buffer_size:
        return f"on up to {_counted(options.num_threads, 'thread', 'threads')}{inside}"
    return place


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


# --- lengths ------------------------------------------------------------------------------------


class _Length:
    """A number of elements, exact or at most.

    Attributes:
        count: The number; `None` if unknown.
        exact: Whether there are as many, not fewer.
    """

    __slots__ = ("count", "exact")

    def __init__(self, count: int | None, *, exact: bool = True) -> None:
        self.count = count
        self.exact = exact

    def __str__(self) -> str:
        if self.count is None:
            return "an unknown number of"
        if self.count >= sys.maxsize:
            return "endlessly many"
        return f"{self.count:,}" if self.exact else f"at most {self.count:,}"

    def by(self, change: Callable[[int], int], *, exact: bool = True) -> _Length:
        """The length after a stage that changes the number by `change`."""
        if self.count is None:
            return self
        changed = self.count if self.count >= sys.maxsize else change(self.count)
        return _Length(changed, exact=self.exact and exact)


_UNKNOWN = _Length(None)


def joined_length(node: Node) -> dict[int, str]:
    """The number of elements of each node of a plan, by its `id`."""
    lengths: dict[int, _Length] = {}
    pending = [(node, False)]
    while pending:
        step, parents_known = pending.pop()
        if id(step) in lengths:
            continue
        if parents_known or isinstance(step, MapNode):
            lengths[id(step)] = _length(step, [lengths.get(id(p), _UNKNOWN) for p in step.parents])
        if not parents_known:
            pending.append((step, True))
            pending += [(parent, False) for parent in step.parents]
    return {key: str(length) for key, length in lengths.items()}


def _length(node: Node, parents: list[_Length]) -> _Length:
    if isinstance(node, MapNode):
        try:
            return _Length(node.length)
        except Exception:  # a user's dataset or source may have none
            return _UNKNOWN
    if isinstance(node, sequential.Read):
        try:
            drops = any(upstream.drops_elements for upstream in node.walk())
            length = random_access_node(node.parent).length
            return _Length(length, exact=node.allow_nones or not drops)
        except Exception:
            return _UNKNOWN
    first = parents[0] if parents else _UNKNOWN
    rule = _LENGTHS.get(type(node))
    if rule is not None:
        return rule(node, parents)
    return first if node.keeps_spec or isinstance(node, sequential.Map) else _UNKNOWN


def _batches(node: Any, parents: list[_Length]) -> _Length:
    size = node.batch_size
    return parents[0].by(lambda n: n // size if node.drop_remainder else -(-n // size))


def _repeated(node: Any, parents: list[_Length]) -> _Length:
    if node.num_epochs is None:
        return _Length(sys.maxsize)
    return parents[0].by(lambda n: n * node.num_epochs)


def _limited(node: Any, parents: list[_Length]) -> _Length:
    if parents[0].count is None:
        return _Length(node.count, exact=False)
    exact = parents[0].exact or parents[0].count >= sys.maxsize
    return _Length(min(parents[0].count, node.count), exact=exact)


def _zipped(_: Any, parents: list[_Length]) -> _Length:
    if any(parent.count is None for parent in parents):
        return _UNKNOWN
    return min(parents, key=lambda parent: parent.count or 0)


def _of_workers(node: Any, parents: list[_Length]) -> _Length:
    """Each worker's share goes through the stages by itself, so most change the number."""
    if node.num_workers == 1:
        return parents[0]
    upstream = list(node.parent.walk(until=sequential.Read))
    if not all(isinstance(step, _ONE_TO_ONE) or step is node for step in upstream):
        return _UNKNOWN
    return parents[0]


_ONE_TO_ONE = (
    sequential.Read,
    sequential.Map,
    sequential.WindowShuffle,
    sequential.Cache,
    sequential.ThreadPrefetch,
    sequential.Seed,
    sequential.WithOptions,
)

_LENGTHS: dict[type[Node], Callable[[Any, list[_Length]], _Length]] = {
    sequential.Filter: lambda _, parents: parents[0].by(lambda n: n, exact=False),
    sequential.TakeWhile: lambda _, parents: parents[0].by(lambda n: n, exact=False),
    sequential.Batch: _batches,
    sequential.Repeat: _repeated,
    sequential.Limit: _limited,
    sequential.Zip: _zipped,
    sequential.Mix: lambda *_: _UNKNOWN,
    sequential.MultiprocessPrefetch: _of_workers,
    sequential.MultithreadPrefetch: _of_workers,
}
