"""The plan that one of several workers runs, so that together they give every element once."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._plan import random_access as by_index
from grainmill._plan import sequential as in_order
from grainmill._plan.node import MapNode, Node
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
        ValueError: A source can not be sliced.
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
        self._worker = worker
        self._count = count
        self._sequential = sequential
        self._done: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        """The worker's part of a sequential plan."""
        part: Node = self._once(node, self._sequential_part)
        return part

    def _once(self, node: AnyNode, make: Callable[[AnyNode], Node]) -> Any:
        if id(node) not in self._done:
            self._done[id(node)] = make(node)
        return self._done[id(node)]

    def _sequential_part(self, node: Node) -> Node:
        if isinstance(node, in_order.Read):
            return dataclasses.replace(node, parents=(self._read_part(node.parent),))
        if isinstance(node, in_order.Interleave):
            return dataclasses.replace(node, datasets=self._every_nth(node.datasets))
        if not node.parents:
            source = node.dataset if isinstance(node, in_order.Foreign) else node
            raise ValueError(f"Cannot slice `IterDataset` source. {type(source)}")
        parents = tuple(map(self.of, node.parents))
        if isinstance(node, in_order.Foreign):
            dataset = with_parents(node.dataset, parents)
            return dataclasses.replace(node, parents=parents, dataset=dataset)
        if isinstance(node, in_order.RandomMap):
            return dataclasses.replace(
                node,
                parents=parents,
                first_number=node.first_number + node.number_step * self._worker,
                number_step=node.number_step * self._count,
            )
        return dataclasses.replace(node, parents=parents)

    def _read_part(self, node: Node) -> Node:
        if self._sequential:
            return self._consecutive(node)
        return by_index.Slice.of(node, slice(self._worker, None, self._count))

    def _every_nth(self, datasets: Any) -> Any:
        if isinstance(datasets, list | tuple):
            return datasets[self._worker :: self._count]
        return _EveryNth(datasets, range(self._worker, len(datasets), self._count))

    def _consecutive(self, node: Node) -> MapNode:
        """The plan with random access above `node` over a run of elements of each source."""
        part: MapNode = self._once(by_index.random_access(node), self._consecutive_part)
        return part

    def _consecutive_part(self, node: MapNode) -> MapNode:
        if isinstance(node, by_index.Range):
            numbers = node.numbers[slice(*self._bounds(node))]
            return dataclasses.replace(node, length=len(numbers), numbers=numbers)
        if _picks(node):
            return by_index.Slice.of(node, slice(*self._bounds(node)))
        if not node.parents:
            source = node.dataset if isinstance(node, by_index.Foreign) else node
            raise ValueError(f"Cannot slice `MapDataset` source. {type(source)}")
        return over(node, tuple(map(self._consecutive, node.parents)))

    def _bounds(self, node: MapNode) -> tuple[int, int]:
        return even_split(node.length, ShardOptions(self._worker, self._count))


class _EveryNth:
    """Every n-th of a sequence of datasets, which are opened when they are asked for."""

    def __init__(self, datasets: Any, indices: range) -> None:
        self._datasets = datasets
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._datasets[self._indices[index]]


def _picks(node: MapNode) -> bool:
    """Whether an epoch of `node` is to be cut, rather than what it picks its elements from.

    Indices of the whole mean nothing in a piece. A slice of an endless plan has no pieces.
    """
    if isinstance(node, by_index.Source):
        return node.wraps
    if isinstance(node, by_index.Slice):
        return node.stop < by_index.ENDLESS
    return isinstance(node, by_index.Take | by_index.Select)


def over(node: MapNode, parents: tuple[MapNode, ...]) -> MapNode:
    """The stage `node` on other parents, its length that of theirs."""
    rule = _OVER.get(type(node))
    if rule is not None:
        return rule(node, parents)
    (parent,) = parents
    return dataclasses.replace(node, parents=parents, length=parent.length)


def _batch_over(node: by_index.Batch, parents: tuple[MapNode, ...]) -> MapNode:
    (parent,) = parents
    return by_index.Batch.of(
        parent, node.batch_size, drop_remainder=node.drop_remainder, batch_fn=node.batch_fn
    )


def _repeat_over(node: by_index.Repeat, parents: tuple[MapNode, ...]) -> MapNode:
    (parent,) = parents
    return by_index.Repeat.of(parent, node.num_epochs, reseed_each_epoch=node.reseed_each_epoch)


def _mix_over(node: by_index.Mix, parents: tuple[MapNode, ...]) -> MapNode:
    length = node.length_of(parents, node.proportions)
    return dataclasses.replace(node, parents=parents, length=length)


# Stages whose length is not that of their only parent.
_OVER: dict[type[MapNode], Callable[[Any, tuple[MapNode, ...]], MapNode]] = {
    by_index.Foreign: lambda node, parents: by_index.Foreign.of(
        with_parents(node.dataset, parents), parents
    ),
    by_index.Slice: lambda node, parents: by_index.Slice.of(
        parents[0], slice(node.start, None, node.step)
    ),
    by_index.Repeat: _repeat_over,
    by_index.Batch: _batch_over,
    by_index.FlatMap: lambda node, parents: by_index.FlatMap.of(parents[0], node.transform),
    by_index.Concatenate: lambda _, parents: by_index.Concatenate.of(parents),
    by_index.Zip: lambda _, parents: by_index.Zip.of(parents),
    by_index.Mix: _mix_over,
}


def with_parents(dataset: Any, parents: tuple[Node, ...]) -> Any:
    """A copy of a user's own dataset that takes its elements from the plans `parents`."""
    changed = copy.copy(dataset)
    replaced = {
        id(old): old._over(node)  # noqa: SLF001 - datasets share plans
        for old, node in zip(dataset.parents, parents, strict=True)
    }
    attributes = vars(changed)
    attributes["_parents"] = tuple(replaced[id(old)] for old in dataset.parents)
    # A class may keep its parent under a name of its own too.
    for name, value in attributes.items():
        attributes[name] = replaced.get(id(value), value)
    return changed
