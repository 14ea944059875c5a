"""Plans split into shards whose number does not depend on the number of processes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._iterators.elementwise import Filter, Map
from grainmill._iterators.interleave import Interleave
from grainmill._iterators.read import Read
from grainmill._iterators.settings import Seed, WithOptions
from grainmill._iterators.thread_prefetch import ThreadPrefetch
from grainmill._iterators.user_defined import UserDefined
from grainmill._iterators.workers.shares import WorkersNode
from grainmill._iterators.workers.worker_shards import (
    MultiprocessPrefetch,
    MultithreadPrefetch,
)
from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill._plan.node import MapNode, Node, Share
from grainmill._plan.options import ReadOptions
from grainmill._plan.slicing import share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
DEFAULT_COUNT = 64
"""The number of shards of a plan that neither determines it nor makes batches."""

_MIN_INLINE_SIZE = 4
"""How many elements each of many shards may read together: single ones cost 30 us each, not 10."""


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Rows(Node):
    """Shards in groups: the share of worker `j` of `n` are the shards `numbers[j::n]` in turn."""

    numbers: range
    count: int
    inline_size: int

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        numbers = self.numbers[share.worker :: share.count]
        return _in_turn(self.parent, numbers, self.count, self.inline_size)


def _in_turn(whole: Node, numbers: range, count: int, inline_size: int | None) -> Interleave:
    """The shards `numbers` of `count`; see `share_of`."""
    plans = _Plans(whole, numbers, count, inline_size)
    return Interleave((), plans, len(numbers))


class Shards:
    """A plan as `count` shards, each of which is a plan of its own.

    The datasets of an interleave are shards, and so are the workers of a prefetch, if only stages
    of one parent are downstream of it; these run in each shard. Any other plan is split as
    `mp_prefetch` splits it among workers.

    Attributes:
        count: How many shards there are.
        by_rows: Whether they are rows of the batch, as the plan does not determine them.

    Args:
        node: The plan.
        num_rows: Number of shards if the plan does not determine it: the size of a global batch,
            or 0.
        workers: Worker processes that run the shards, where they are rows.
    """

    def __init__(
        self, node: Node, num_rows: int, workers: MultiprocessingOptions | None = None
    ) -> None:
        self._options = [each for each in node.walk(until=Read) if isinstance(each, WithOptions)]
        chain = list(_chain(node))
        unit = chain[-1]
        self.by_rows = False
        self._unit: WorkersNode | Interleave | None = None
        self._processes: MultiprocessingOptions | None = None
        self._worker_init_fn: Callable[[int, int], None] | None = None
        self._chain = chain
        if isinstance(unit, Interleave):
            self._unit = unit
            self.count = len(unit.datasets)
            self._whole = _over(node, unit, _Parts((), unit.datasets))
        elif isinstance(unit, WorkersNode):
            self._unit = unit
            self.count = unit.num_workers
            self._whole = _over(node, unit, unit.parent)
        else:
            self.by_rows = True
            self._whole = node
            self._processes = workers or self._workers_of_reads()
            counts = [len(each.datasets) for each in node.walk() if isinstance(each, Interleave)]
            self.count = min([num_rows or DEFAULT_COUNT, *counts])
            if any(isinstance(each, MultiprocessPrefetch) for each in node.walk()):
                raise ValueError(
                    "ElasticIterator cannot split `mp_prefetch` upstream of a stage that joins "
                    "several datasets; call it downstream of that stage"
                )

    def plan(self, number: int) -> Node:
        """The plan of one shard."""
        return share_of(self._whole, number, self.count)

    def of_process(self, numbers: range) -> Node:
        """The plan that runs the shards `numbers`, at least one, in turn."""
        unit = self._unit
        if unit is None:
            node = self._rows(numbers)
        elif isinstance(unit, Interleave):
            node = self._datasets(unit, numbers)
        else:
            node = self._workers(unit, numbers)
        for each in reversed(self._options):  # options of a shard do not reach other stages
            node = WithOptions((node,), each.options)
        return node

    def _datasets(self, interleave: Interleave, numbers: range) -> Node:
        # A dataset that is repeated without end never gives up its place to the next.
        repeats = any(getattr(each, "starts_again", False) for each in self._chain)
        node: Node = dataclasses.replace(
            interleave,
            datasets=_Plans(self._whole, numbers, self.count),
            cycle_length=len(numbers) if repeats else interleave.cycle_length,
        )
        # One thread for all, in place of one in each shard.
        sizes = [each.prefetch_buffer_size for each in self._chain if type(each) is ThreadPrefetch]
        return ThreadPrefetch.of(node, max(sizes)) if sizes else node

    def _workers(self, workers: WorkersNode, numbers: range) -> Node:
        parent: Node = _Group((self._whole,), numbers, self.count)
        if len(numbers) == 1:  # the plan of a single worker is not split
            parent = self.plan(numbers[0])
        if isinstance(workers, MultithreadPrefetch):
            return dataclasses.replace(workers, parents=(parent,), num_threads=len(numbers))
        assert isinstance(workers, MultiprocessPrefetch)
        options = dataclasses.replace(workers.options, num_workers=len(numbers))
        return dataclasses.replace(workers, parents=(parent,), options=options)

    def num_groups(self, numbers: range) -> int:
        """How many threads or workers run the shards `numbers` in groups; 0 if there are no groups.

        It divides the number of shards, so that elements come in their order.
        """
        if not self.by_rows:
            return 0
        num_threads, ahead = self._read_ahead()
        limit = num_threads if ahead else 0
        if self._processes is not None:
            limit = max(1, self._processes.num_workers)
        size = len(numbers)
        groups = max((k for k in range(1, min(size, limit) + 1) if not size % k), default=0)
        return groups if groups > 1 or self._processes is not None else 0

    def _rows(self, numbers: range) -> Node:
        groups, whole, count = self.num_groups(numbers), self._whole, self.count
        num_threads, ahead = self._read_ahead()
        if len(numbers) == 1 and not groups:  # it prefetches by its own options
            return _in_turn(whole, numbers, count, None)
        ahead = -(-ahead // 2)  # the other half is read ahead by the shards
        inline_size = max(min(ahead, _MIN_INLINE_SIZE), ahead // len(numbers))
        rows: Node = _in_turn(whole, numbers, count, inline_size)
        if groups > 1:  # a single group is not split
            rows = _Rows((whole,), numbers, count, inline_size)
        if self._processes is not None:
            # Its buffer has batches, and here elements.
            size = self._processes.per_worker_buffer_size * (len(numbers) // groups)
            options = dataclasses.replace(
                self._processes, num_workers=groups, per_worker_buffer_size=size
            )
            return MultiprocessPrefetch.of(
                rows, options, self._worker_init_fn, sequential_slice=False
            )
        if groups:
            return MultithreadPrefetch.of(rows, groups, -(-ahead // groups), sequential_slice=False)
        return ThreadPrefetch.of(rows, ahead) if num_threads else rows

    def _workers_of_reads(self) -> MultiprocessingOptions | None:
        """Workers for all rows together, where the plan has a reader with its own workers."""
        for node in self._whole.walk():
            if isinstance(node, Read) and node.options.num_workers:
                self._worker_init_fn = node.options.worker_init_fn
                return MultiprocessingOptions(num_workers=node.options.num_workers)
        return None

    def _read_ahead(self) -> tuple[int, int]:
        """How many threads, and how large a buffer, the plan's options allow in all."""
        reads = [each.options for each in self._whole.walk() if isinstance(each, Read)]
        reads = reads or [ReadOptions()]
        return max(o.num_threads for o in reads), max(o.prefetch_buffer_size for o in reads)


class _Plans:
    """The plans of some shards, each made when it is accessed."""

    def __init__(
        self, whole: Node, numbers: range, count: int, inline_size: int | None = None
    ) -> None:
        self._whole = whole
        self._numbers = numbers
        self._count = count
        self._inline_size = inline_size

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> _Plan:
        number = self._numbers[index]
        return _Plan(share_of(self._whole, number, self._count, inline_size=self._inline_size))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The plan of a shard in place of a dataset."""

    node: Node

    def _plan_node(self) -> Node:
        return self.node


def sliced_by_user(node: Node) -> UserDefined | None:
    """The user's own dataset with `set_slice` that a plan ends with, but for some stages.

    These are stages that have no state of their own, so that the states of its shards are complete.
    """
    while type(node) in {Map, Filter, Seed, WithOptions}:
        node = node.parent
    if isinstance(node, UserDefined) and hasattr(node.dataset, "set_slice"):
        return node
    return None


def with_dataset(node: Node, unit: UserDefined, dataset: Any) -> Node:
    """The plan that ends in `node` with `dataset` in place of that of `unit`."""
    return _over(node, unit, dataclasses.replace(unit, parents=(), dataset=dataset))


def drops_elements(node: Node) -> bool:
    """Whether a random-access plan may drop elements."""
    return any(isinstance(each, MapNode) and each.drops_elements for each in node.walk())


def _chain(node: Node) -> Iterator[Node]:
    """The stages from `node` upstream as long as each has one parent, up to what gives shards."""
    yield node
    while not isinstance(node, Interleave | WorkersNode | MapNode) and len(node.parents) == 1:
        node = node.parent
        yield node


def _over(node: Node, unit: Node, replacement: Node) -> Node:
    """The chain that ends in `node` over `replacement` in place of `unit`, without prefetching."""
    if node is unit:
        return replacement
    parent = _over(node.parent, unit, replacement)
    if isinstance(node, ThreadPrefetch):
        return parent
    return node.over((parent,))
