"""The plan that one of several workers runs, such that every element is computed by one of them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._plan.node import MapNode, Node, random_access
from grainmill._plan.random_access import Slice
from grainmill._plan.sharding import ShardOptions, even_split

if TYPE_CHECKING:
    from collections.abc import Callable

AnyNode = TypeVar("AnyNode", bound=Node)


def sliced(node: Node, worker: int, count: int, *, sequential: bool = False) -> Node:
    """The plan that ends in `node`, restricted to the share of worker `worker` of `count`.

    Where a random-access plan is read in order, the worker reads every `count`-th element, and all
    stages downstream see only these. Of an interleave it opens every `count`-th dataset. Nodes
    shared by several stages stay shared; `node` and users' own datasets in it are not changed.

    Args:
        node: A sequential plan.
        worker: Below `count`.
        count: Number of workers; with 1, the plan is returned unchanged.
        sequential: Whether the worker reads a range of consecutive elements of each source instead,
            split upstream of any shuffle.

    Raises:
        ValueError: A source cannot be sliced.
    """
    if count == 1:
        return node
    return _Slicing(worker, count, sequential=sequential).of(node)


def check_sliceable(node: Node, count: int, *, sequential: bool = False) -> None:
    """Raises `ValueError` unless `count` workers can share the plan that ends in `node`."""
    # The last worker's share is the smallest: if it is not empty, none is.
    sliced(node, count - 1, count, sequential=sequential)


def share_of(node: Node, worker: int, count: int, *, inline_size: int | None = None) -> Node:
    """The share of worker `worker` of `count`; as `sliced`, also where `count` is 1.

    Args:
        node: A sequential plan.
        worker: Below `count`.
        count: Number of workers.
        inline_size: If given, stages run in the calling thread, and at most so many elements are
            read together.
    """
    return _Slicing(worker, count, sequential=False, inline_size=inline_size).of(node)


class _Slicing:
    """One worker's share of a plan; each node is replaced once, however many stages use it."""

    def __init__(
        self, worker: int, count: int, *, sequential: bool, inline_size: int | None = None
    ) -> None:
        self.worker = worker
        self.count = count
        self._sequential = sequential
        self.inline_size = inline_size
        self._replaced: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        """See `Share.of`."""
        shared: Node = self._once(node, lambda node: node.share(self))
        return shared

    def _once(self, node: AnyNode, replace: Callable[[AnyNode], Node]) -> Any:
        if id(node) not in self._replaced:
            self._replaced[id(node)] = replace(node)
        return self._replaced[id(node)]

    def of_random_access(self, node: Node) -> MapNode:
        """See `Share.of_random_access`."""
        if self._sequential:
            return self.consecutive(random_access(node))
        return _added_by_package(Slice.of(node, slice(self.worker, None, self.count)))

    def of_datasets(self, datasets: Any) -> Any:
        """See `Share.of_datasets`."""
        return sliced_datasets(datasets, slice(self.worker, None, self.count))

    def of_users_dataset(self, dataset: Any) -> Any:
        """See `Share.of_users_dataset`."""
        copied = copy.deepcopy(dataset)
        copied.set_slice(slice(self.worker, None, self.count), self._sequential)
        return copied

    def consecutive(self, node: MapNode) -> MapNode:
        """See `Share.consecutive`."""
        shared: MapNode = self._once(node, lambda node: node.consecutive(self))
        return shared

    def range_of(self, node: MapNode) -> MapNode:
        """See `Share.range_of`."""
        return _added_by_package(Slice.of(node, slice(*self.bounds(node.length))))

    def bounds(self, length: int) -> tuple[int, int]:
        """See `Share.bounds`."""
        return even_split(length, ShardOptions(self.worker, self.count))


def _added_by_package(node: Slice) -> Slice:
    """Returns `node`, which messages must not attribute to a line of the user's code."""
    node.set_added_at("")
    return node


def sliced_datasets(datasets: Any, sl: slice) -> Any:
    """The slice `sl` of a sequence of datasets, none of which is computed before it is accessed."""
    if isinstance(datasets, list | tuple):
        return datasets[sl]
    return _Selected(datasets, range(len(datasets))[sl])


def consecutive_share(node: MapNode, sl: slice) -> MapNode:
    """The share of `node` that `sl`, which is `slice(worker, None, count)`, stands for.

    It is a range of consecutive elements.

    Raises:
        ValueError: There is no such worker.
    """
    options = ShardOptions(sl.start, sl.step)
    return _Slicing(options.shard_index, options.shard_count, sequential=True).consecutive(node)


class _Selected:
    """Some of a sequence of datasets, each opened when it is accessed."""

    def __init__(self, datasets: Any, indices: range) -> None:
        self._datasets = datasets
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._datasets[self._indices[index]]
