"""Round robin over workers, each of which prefetches the elements of its shard of the plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._evaluate.prefetch.executor import init_worker
from grainmill._iterators.base.node import counted
from grainmill._iterators.interleave import Interleave, InterleaveStage
from grainmill._iterators.open import open_part
from grainmill._iterators.thread_prefetch import ThreadPrefetch, ThreadPrefetchStage
from grainmill._iterators.workers.shares import WorkersNode
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import checked_callable, checked_integer
from grainmill._plan.options import WORKER_INIT
from grainmill._plan.slicing import sliced
from grainmill._workers.limits import workers_are_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.context import Context
    from grainmill._iterators.base.stage import Stage
    from grainmill._iterators.workers.remote import RemoteWorkers
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.node import Node, Share


@lazy_dataclass
class MultiprocessPrefetch(WorkersNode):
    """Elements prefetched by worker processes, each with its share of the plan upstream."""

    options: MultiprocessingOptions
    worker_init_fn: Callable[[int, int], None] | None
    sequential_slice: bool
    dataset_name: ClassVar[str] = "MultiprocessPrefetchIterDataset"
    saves: ClassVar[str] = "whose turn it is, and the state of each worker"

    @classmethod
    def of(
        cls,
        parent: Node,
        options: MultiprocessingOptions,
        worker_init_fn: Callable[[int, int], None] | None,
        *,
        sequential_slice: bool,
    ) -> Self:
        """A node that runs `parent` in `options.num_workers` worker processes, at least 1."""
        num_workers = checked_integer(options.num_workers, "num_workers", minimum=1)
        buffer_size = checked_integer(options.per_worker_buffer_size, "per_worker_buffer_size")
        if buffer_size < 1:
            raise ValueError(f"`buffer_size` must be greater than 0, got {buffer_size}.")
        checked_callable(worker_init_fn, "worker_init_fn", WORKER_INIT)
        options = dataclasses.replace(
            options, num_workers=num_workers, per_worker_buffer_size=buffer_size
        )
        for node in parent.walk():
            if isinstance(node, cls):
                raise ValueError(
                    "`mp_prefetch` cannot follow `mp_prefetch`: worker processes cannot start "
                    "workers. Call it once, at the end."
                )
        return cls((parent,), options, worker_init_fn, sequential_slice)

    @property
    def num_workers(self) -> int:
        """Number of workers that share the elements."""
        return self.options.num_workers

    @property
    def buffer_size(self) -> int:
        """Maximum number of elements that each worker prefetches."""
        return self.options.per_worker_buffer_size

    def _arguments(self) -> str:
        return f"(multiprocessing_options={self.options})"

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        return WorkerShardsStage(self, context)

    def place_of_parents(self, place: str) -> str:
        """See `SequentialNode.place_of_parents`."""
        return f"in each of {counted(self.num_workers, 'worker process', 'worker processes')}"

    def described(self, max_listed: int) -> dict[str, Any]:
        """See `Node.described`."""
        return {"num_workers": self.num_workers}


@lazy_dataclass
class MultithreadPrefetch(WorkersNode):
    """Elements prefetched by threads, each with its share of the plan upstream.

    Attributes:
        shares: The numbers of the threads that run; all if `None`. Workers of `mp_prefetch` divide
            them as they do the datasets of an interleave.
    """

    num_threads: int
    buffer_size: int
    sequential_slice: bool
    shares: range | None = None
    dataset_name: ClassVar[str] = "MultithreadPrefetchIterDataset"
    saves: ClassVar[str] = "whose turn it is, and the state of each thread"

    @classmethod
    def of(
        cls, parent: Node, num_threads: int, buffer_size: int, *, sequential_slice: bool
    ) -> Self:
        """A node that runs `parent` on `num_threads` threads, at least 1."""
        num_threads = checked_integer(num_threads, "num_threads", minimum=1)
        buffer_size = checked_integer(buffer_size, "buffer_size", minimum=0)
        return cls((parent,), num_threads, buffer_size, sequential_slice)

    @property
    def _threads(self) -> range:
        return range(self.num_threads) if self.shares is None else self.shares

    @property
    def num_workers(self) -> int:
        """Number of workers that share the elements."""
        return len(self._threads)

    def shard(self, number: int) -> Node:
        """See `WorkersNode.shard`."""
        thread = self._threads[number]
        return sliced(self.parent, thread, self.num_threads, sequential=self.sequential_slice)

    def share(self, share: Share) -> Node:
        """See `Node.share`; more workers than threads divide the elements among them instead."""
        if share.count > len(self._threads):
            return super().share(share)
        return dataclasses.replace(self, shares=self._threads[share.worker :: share.count])

    def _arguments(self) -> str:
        return f"(num_threads={self.num_threads}, buffer_size={self.buffer_size})"

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        return WorkerShardsStage(self, context)

    def place_of_parents(self, place: str) -> str:
        """See `SequentialNode.place_of_parents`."""
        return f"on each of {counted(self.num_workers, 'thread', 'threads')}"


class WorkerShardsStage(InterleaveStage):
    """Round robin over workers, all of which start with the first element."""

    def __init__(self, node: WorkersNode, context: Context) -> None:
        self._workers: RemoteWorkers | None = None
        if isinstance(node, MultiprocessPrefetch) and workers_are_processes():
            from grainmill._iterators.workers.remote import open_shards  # noqa: PLC0415

            self._workers, open_worker = open_shards(node, context)
        else:

            def open_worker(worker: int) -> Stage:
                return open_shard(node, worker, lambda shard: open_part(node, shard, context))

        count = node.num_workers
        interleave = Interleave(
            (),
            range(count),
            cycle_length=count,
            num_make_iter_threads=0,
            make_iter_buffer_size=0,
            iter_buffer_size=node.buffer_size,
        )
        super().__init__(interleave, open_worker, count, start_all=True, name=node)

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        super().cancel()
        if self._workers is not None:
            self._workers.cancel()

    def close(self) -> None:
        """See `Stage.close`."""
        super().close()
        if self._workers is not None:
            self._workers.close()


def open_shard(node: WorkersNode, worker: int, open_plan: Callable[[Node], Stage]) -> Stage:
    """The shard of one worker, prefetched by a thread; its state is that of the worker's plan.

    Args:
        node: Says how many workers there are and what they run.
        worker: The worker's number, from 0.
        open_plan: Opens a plan at its first element.
    """
    prefetch = ThreadPrefetch((), node.buffer_size)
    opened = open_plan(node.shard(worker))
    stage = ThreadPrefetchStage(prefetch, opened)
    if isinstance(node, MultiprocessPrefetch) and node.worker_init_fn is not None:
        init = functools.partial(init_worker, node.worker_init_fn, worker, node.num_workers)
        stage.set_up.append(init)
    stage.node, stage.recorder = node, opened.recorder
    return stage
