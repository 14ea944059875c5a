"""The plan that one of several workers runs, so that together they give every element once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._plan.node import MapNode, Node, random_access
from grainmill._plan.random_access import Slice
from grainmill._plan.sharding import ShardOptions, even_split

if TYPE_CHECKING:
    from collections.abc import Callable

AnyNode = TypeVar("AnyNode", bound=Node)


def sliced(node: Node, worker: int, count: int, *, sequential: bool = False) -> Node:
    """The plan that ends in `node`, cut down to what worker `worker` of `count` makes.

    Where a plan with random access is read in order, the worker reads every `count`-th element;
    all stages after that see these alone. Of an interleave it opens every `count`-th dataset.
    What several stages share stays shared; `node` itself, and users' own datasets in it, are
    left as they are.

    Args:
        node: A sequential plan.
        worker: Below `count`.
        count: With 1, the plan is returned as it is.
        sequential: Whether the worker gets a run of consecutive elements of each source instead,
            before anything is shuffled.

    Raises:
        ValueError: A source cannot be sliced.
    """
    if count == 1:
        return node
    return _Slicing(worker, count, sequential=sequential).of(node)


def check_sliceable(node: Node, count: int, *, sequential: bool = False) -> None:
    """Raises `ValueError` unless `count` workers can share the plan that ends in `node`."""
    # The last worker's pieces are the smallest: if they are large enough, so are the others.
    sliced(node, count - 1, count, sequential=sequential)


class _Slicing:
    """One worker's share of a plan; each node is cut once, however many stages it feeds."""

    def __init__(self, worker: int, count: int, *, sequential: bool) -> None:
        self.worker = worker
        self.count = count
        self._sequential = sequential
        self._done: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        """See `Share.of`."""
        part: Node = self._once(node, lambda node: node.share(self))
        return part

    def _once(self, node: AnyNode, cut: Callable[[AnyNode], Node]) -> Any:
        if id(node) not in self._done:
            self._done[id(node)] = cut(node)
        return self._done[id(node)]

    def of_random_access(self, node: Node) -> MapNode:
        """See `Share.of_random_access`."""
        if self._sequential:
            return self.consecutive(random_access(node))
        return _by_itself(Slice.of(node, slice(self.worker, None, self.count)))

    def of_datasets(self, datasets: Any) -> Any:
        """See `Share.of_datasets`."""
        if isinstance(datasets, list | tuple):
            return datasets[self.worker :: self.count]
        return _EveryNth(datasets, range(self.worker, len(datasets), self.count))

    def consecutive(self, node: MapNode) -> MapNode:
        """See `Share.consecutive`."""
        part: MapNode = self._once(node, lambda node: node.consecutive(self))
        return part

    def run_of(self, node: MapNode) -> MapNode:
        """See `Share.run_of`."""
        return _by_itself(Slice.of(node, slice(*self.bounds(node.length))))

    def bounds(self, length: int) -> tuple[int, int]:
        """See `Share.bounds`."""
        return even_split(length, ShardOptions(self.worker, self.count))


def _by_itself(part: Slice) -> Slice:
    """`part`, which no line of the user's added."""
    part.note_added("")
    return part


class _EveryNth:
    """Every n-th of a sequence of datasets, which are opened when they are asked for."""

    def __init__(self, datasets: Any, indices: range) -> None:
        self._datasets = datasets
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._datasets[self._indices[index]]
