"""What is known of a stage from its plan: its length, where it runs, what a state holds of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.compile import runs_in_engine
from grainmill._iterators.table import stage_type
from grainmill._plan import sequential
from grainmill._plan.node import MapNode, Node, defines
from grainmill._plan.node import random_access as random_access_node
from grainmill._plan.random_access import PRACTICALLY_ENDLESS

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLER = "on the caller's thread"
_RUST = "Rust"
_PYTHON = "Python"


def runs_in(node: Node) -> str:
    """What computes the elements of `node`."""
    if isinstance(node, MapNode):
        return _RUST if runs_in_engine(node) else _PYTHON
    if isinstance(node, sequential.Batch) and node.batch_fn is not None:
        return _PYTHON
    if isinstance(node, sequential.UserDefined):
        return _RUST if defines(type(node.dataset), "_is_native", "__iter__") else _PYTHON
    stage = stage_type(node)
    return _RUST if stage is None or stage.is_native else _PYTHON


def state_of(node: Node) -> str:
    """What a state holds of `node`; empty if nothing."""
    stage = None if isinstance(node, MapNode) else stage_type(node)
    return "" if stage is None else stage.saved_of(node)


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
        if self.count >= PRACTICALLY_ENDLESS:
            return "endlessly many"
        return f"{self.count:,}" if self.exact else f"at most {self.count:,}"

    def by(self, change: Callable[[int], int], *, exact: bool = True) -> _Length:
        """The length after a stage that changes the number by `change`."""
        if self.count is None:
            return self
        changed = self.count if self.count >= PRACTICALLY_ENDLESS else change(self.count)
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
    rule = _LENGTHS.get(type(node))
    if rule is not None:
        return rule(node, parents)
    return parents[0] if type(node) in _ONE_TO_ONE else _UNKNOWN


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
    exact = parents[0].exact or parents[0].count >= PRACTICALLY_ENDLESS
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
    if not all(type(step) in _ONE_TO_ONE or step is node for step in upstream):
        return _UNKNOWN
    return parents[0]


# As many elements as the parent; of those listed nowhere the number is unknown.
_ONE_TO_ONE = (
    sequential.Read,
    sequential.Map,
    sequential.MapWithIndex,
    sequential.RandomMap,
    sequential.WindowShuffle,
    sequential.Cache,
    sequential.StoredCache,
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
