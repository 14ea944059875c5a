"""Packing and batching on the thread that computes the elements, where these are quick."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.batches.batch_blocks import block_len
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.thread_pool import thread_name
from grainmill._iterators.thread_prefetch import PrefetchQueue, ThreadPrefetch, ThreadPrefetchStage
from grainmill._tree import flatten

if TYPE_CHECKING:
    from grainmill._iterators.base.stage import Stage
    from grainmill._iterators.read import ReadStage


class PackInThreadStage(ThreadPrefetchStage):
    """A read, pack and batch stage as one prefetching stage.

    Data that changes cores has to be fetched into another cache, and each transfer wakes a thread
    with a cold cache. So only batches change threads, several together where they are small;
    elements do so where they cost more than that, as each thread gets its share of them.

    Args:
        reader: The stage that elements come from; its user functions run on threads.
        batches: The last stage of the chain; none after `reader` runs user code.
        batch_size: Rows in a batch.
    """

    def __init__(self, reader: ReadStage, batches: Stage, batch_size: int) -> None:
        self._max_len = max(1, reader.pull_size // batch_size)
        super().__init__(ThreadPrefetch((), 2 * self._max_len), batches)
        self._reader = reader

    @property
    def pull_size(self) -> int:  # type: ignore[override]
        """See `Stage.pull_size`."""
        return self._max_len

    def _new_queue(self) -> PrefetchQueue:
        preferred_len = functools.partial(_preferred_len, self._max_len)
        queue = PrefetchQueue(self._cursor, self._size, thread_name(0), preferred_len)
        queue.measure(self.node, self.recorder)
        self._reader.set_demand(queue.demand)
        return queue


def _preferred_len(max_len: int, batch: Any) -> int:
    leaves, _ = flatten(batch)
    return block_len(sum(leaf.nbytes for leaf in leaves), max_len, tuning.SMALL_BYTES)
