"""Batches of packed rows, made on the thread that makes the elements."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from grainmill._evaluate import tuning
from grainmill._evaluate.batch_blocks import block_len
from grainmill._evaluate.thread_pool import thread_name
from grainmill._iterators.thread_prefetch import Feed, ThreadPrefetchStage
from grainmill._plan.sequential import ThreadPrefetch
from grainmill._tree import flatten

if TYPE_CHECKING:
    from grainmill._iterators.batch import BatchStage
    from grainmill._iterators.read import ReadStage


class PackInThreadStage(ThreadPrefetchStage):
    """A reader, what packs its elements and what batches the rows, as one stage made ahead.

    What one core makes another one has to fetch, and each hand-over wakes a thread that finds
    nothing of its own in the cache. So only batches change threads, several at once where they
    are small; elements do so where more than one thread makes them.

    Args:
        reader: Where elements come from; its user functions run on threads.
        batches: The last of the stages above it, none of which runs user code.
        batch_size: Rows in a batch.
    """

    def __init__(self, reader: ReadStage, batches: BatchStage, batch_size: int) -> None:
        self._most_at_once = max(1, reader.pull_size // batch_size)
        super().__init__(ThreadPrefetch((), 2 * self._most_at_once), batches)
        self._reader = reader

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return self._most_at_once

    def _new_feed(self) -> Feed:
        at_once = functools.partial(_at_once, self._most_at_once)
        feed = Feed(self._cursor, self._size, thread_name(0), at_once)
        self._reader.run_for(feed.demand)
        return feed


def _at_once(most: int, batch: Any) -> int:
    leaves, _ = flatten(batch)
    return block_len(sum(leaf.nbytes for leaf in leaves), most, tuning.SMALL_BYTES)
