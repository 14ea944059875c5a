"""Batches of packed rows, made on the thread that makes the elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._evaluate.ahead import thread_name
from grainmill._iterators.thread_prefetch import Feed, ThreadPrefetchStage
from grainmill._plan.sequential import ThreadPrefetch

if TYPE_CHECKING:
    from grainmill._iterators.batch import BatchStage
    from grainmill._iterators.read import ReadStage


class PackedAheadStage(ThreadPrefetchStage):
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
        self._at_once = max(1, reader.burst // batch_size)
        super().__init__(ThreadPrefetch((), 2 * self._at_once), batches)
        self._reader = reader

    @property
    def burst(self) -> int:
        """See `Stage.burst`."""
        return self._at_once

    def _new_feed(self) -> Feed:
        feed = Feed(self._parent, self._size, at_once=self._at_once, thread_name=thread_name(0))
        self._reader.run_for(feed.demand)
        return feed
