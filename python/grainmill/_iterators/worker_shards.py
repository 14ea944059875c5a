"""Round robin over workers, each of which prefetches the elements of its shard of the plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from grainmill._evaluate.executor import init_worker
from grainmill._iterators.interleave import InterleaveStage
from grainmill._iterators.parts import open_part
from grainmill._iterators.thread_prefetch import PrefetchQueue, ThreadPrefetchStage
from grainmill._plan.sequential import Interleave, MultiprocessPrefetch, ThreadPrefetch
from grainmill._plan.slicing import sliced
from grainmill._workers.limits import workers_are_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.context import Context
    from grainmill._iterators.pipeline_job import OpenPlan
    from grainmill._iterators.remote import RemoteWorkers
    from grainmill._iterators.stage import Stage
    from grainmill._plan.node import Node
    from grainmill._plan.sequential import MultithreadPrefetch

    WorkersNode: TypeAlias = MultiprocessPrefetch | MultithreadPrefetch


class WorkerShardsStage(InterleaveStage):
    """Round robin over workers, all of which start with the first element."""

    def __init__(self, node: WorkersNode, open_plan: OpenPlan, context: Context) -> None:
        self._workers: RemoteWorkers | None = None
        if isinstance(node, MultiprocessPrefetch) and workers_are_processes():
            from grainmill._iterators.remote import RemoteWorkers  # noqa: PLC0415

            self._workers = RemoteWorkers(node, open_plan, context)
        count = node.num_workers
        interleave = Interleave(
            (),
            range(count),
            cycle_length=count,
            num_make_iter_threads=0,
            make_iter_buffer_size=0,
            iter_buffer_size=node.buffer_size,
        )
        workers = self._workers

        def open_worker(worker: int) -> Stage:
            if workers is not None:
                return workers.shard(worker)
            return open_shard(
                node, worker, lambda shard: open_part(node, shard, open_plan, context)
            )

        super().__init__(interleave, open_worker, count, start_all=True, name=node)

    @classmethod
    def saved_of(cls, node: Node) -> str:
        """See `Stage.saved_of`."""
        what = "worker" if isinstance(node, MultiprocessPrefetch) else "thread"
        return f"whose turn it is, and the state of each {what}"

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
    shard = sliced(node.parent, worker, node.num_workers, sequential=node.sequential_slice)
    prefetch = ThreadPrefetch((), node.buffer_size)
    opened = open_plan(shard)
    if isinstance(node, MultiprocessPrefetch) and node.worker_init_fn is not None:
        init = functools.partial(init_worker, node.worker_init_fn, worker, node.num_workers)
        stage: ThreadPrefetchStage = _InitializedStage(prefetch, opened, init)
    else:
        stage = ThreadPrefetchStage(prefetch, opened)
    stage.node, stage.recorder = node, opened.recorder
    return stage


class _InitializedStage(ThreadPrefetchStage):
    """Calls `init` on its thread before the first element, again until a call has returned."""

    def __init__(self, node: ThreadPrefetch, parent: Stage, init: Callable[[], None]) -> None:
        super().__init__(node, parent)
        self._set_up: list[Callable[[], None]] = [init]

    def _new_queue(self) -> PrefetchQueue:
        queue = super()._new_queue()
        queue.set_up = self._set_up
        return queue
