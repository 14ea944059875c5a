"""Plans split into shards whose number does not depend on the number of processes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._plan.node import MapNode, Node, Share
from grainmill._plan.sequential import (
    Interleave,
    MultiprocessPrefetch,
    MultithreadPrefetch,
    Read,
    Repeat,
    ThreadPrefetch,
    UserDefined,
    WithOptions,
)
from grainmill._plan.slicing import share_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_COUNT = 64
"""The number of shards of a plan that neither determines it nor makes batches."""

Workers = MultithreadPrefetch | MultiprocessPrefetch


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Parts(Node):
    """Stands for the datasets of an interleave: the share of worker `k` of them is dataset `k`."""

    datasets: Any
    dataset_name: ClassVar[str] = "InterleaveIterDataset"

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        node: Node = self.datasets[share.worker]._plan_node()  # noqa: SLF001 - datasets share plans
        return node


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Group(Node):
    """The shards of one process: the share of worker `j` of them is the shard `numbers[j]`."""

    numbers: range
    count: int

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return share_of(self.parent, self.numbers[share.worker], self.count)


class Shards:
    """A plan as `count` shards, each of which is a plan of its own.

    The datasets of an interleave are shards, and so are the workers of a prefetch that is the last
    stage but for stages of single elements. Stages downstream of these run in each shard. Any other
    plan is split as `mp_prefetch` splits it among workers.

    Attributes:
        count: How many shards there are.
        by_rows: Whether they are rows of the batch, as the plan does not determine them.

    Args:
        node: The plan.
        num_rows: Number of shards if the plan does not determine it: the size of a global batch,
            or 0.
    """

    def __init__(self, node: Node, num_rows: int) -> None:
        self._options = [each for each in node.walk(until=Read) if isinstance(each, WithOptions)]
        chain = list(_chain(node))
        unit = chain[-1]
        self.by_rows = False
        self._workers: Workers | None = None
        self._interleave: Interleave | None = None
        # A thread that prefetches in each shard would be one for each dataset.
        self._buffer_size = max(
            (each.prefetch_buffer_size for each in chain if isinstance(each, ThreadPrefetch)),
            default=0,
        )
        self._repeats = any(isinstance(each, Repeat) for each in chain)
        if isinstance(unit, Interleave):
            self._interleave = unit
            self.count = len(unit.datasets)
            self._whole = _over(node, unit, _Parts((), unit.datasets))
        elif isinstance(unit, Workers):
            self._workers = unit
            self.count = unit.num_workers
            self._whole = _over(node, unit, unit.parent)
        else:
            self.by_rows = True
            self._buffer_size = 0
            self._whole = node
            counts = [len(each.datasets) for each in node.walk() if isinstance(each, Interleave)]
            self.count = min([num_rows or DEFAULT_COUNT, *counts])
            if any(isinstance(each, MultiprocessPrefetch) for each in node.walk()):
                raise ValueError(
                    "ElasticIterator cannot split `mp_prefetch` upstream of a stage that joins "
                    "several datasets; call it downstream of that stage"
                )

    def of_process(self, numbers: range) -> Node:
        """The plan that runs the shards `numbers` in turn."""
        if self._workers is not None:
            return self._with_options(self._of_workers(self._workers, numbers))
        plans = _Plans(
            self._whole, numbers, self.count, num_local=len(numbers) if self.by_rows else 1
        )
        interleave = self._interleave
        if interleave is None:
            node: Node = Interleave.of(plans, max(1, len(numbers)), 0, 0, 1)
        else:
            # A dataset that is repeated without end never gives up its place to the next.
            cycle = len(numbers) if self._repeats else interleave.cycle_length
            node = dataclasses.replace(interleave, datasets=plans, cycle_length=max(1, cycle))
        if self._buffer_size:
            node = ThreadPrefetch.of(node, self._buffer_size)
        return self._with_options(node)

    def _of_workers(self, workers: Workers, numbers: range) -> Node:
        parent: Node = _Group((self._whole,), numbers, self.count)
        if len(numbers) == 1:  # the plan of a single worker is not split
            parent = share_of(self._whole, numbers[0], self.count)
        if isinstance(workers, MultithreadPrefetch):
            return dataclasses.replace(workers, parents=(parent,), num_threads=len(numbers))
        options = dataclasses.replace(workers.options, num_workers=len(numbers))
        return dataclasses.replace(workers, parents=(parent,), options=options)

    def _with_options(self, node: Node) -> Node:
        """`node` with the options of the plan, as those of a shard do not reach other stages."""
        for each in reversed(self._options):
            node = WithOptions((node,), each.options)
        return node


class _Plans:
    """The plans of some shards, each made when it is accessed."""

    def __init__(self, whole: Node, numbers: range, count: int, *, num_local: int) -> None:
        self._whole = whole
        self._numbers = numbers
        self._count = count
        self._num_local = num_local

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> _Plan:
        number = self._numbers[index]
        return _Plan(share_of(self._whole, number, self._count, num_local=self._num_local))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The plan of a shard in place of a dataset."""

    node: Node

    def _plan_node(self) -> Node:
        return self.node


def drops_elements(node: Node) -> bool:
    """Whether a random-access plan may drop elements."""
    return any(isinstance(each, MapNode) and each.drops_elements for each in node.walk())


def _chain(node: Node) -> Iterator[Node]:
    """The stages from `node` upstream as long as each has one parent, up to what gives shards."""
    yield node
    while not isinstance(node, Interleave | Workers | MapNode) and len(node.parents) == 1:
        node = node.parent
        yield node


def _over(node: Node, unit: Node, replacement: Node) -> Node:
    """The chain that ends in `node` over `replacement` in place of `unit`, without prefetching."""
    if node is unit:
        return replacement
    parent = _over(node.parent, unit, replacement)
    if isinstance(node, ThreadPrefetch):
        return parent
    if isinstance(node, UserDefined):
        dataset = node.with_parents(node.dataset, (parent,))
        return dataclasses.replace(node, parents=(parent,), dataset=dataset)
    return dataclasses.replace(node, parents=(parent,))
