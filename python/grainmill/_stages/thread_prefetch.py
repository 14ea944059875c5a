"""Elements that threads compute ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._dataset.element_types import T, T_co
from grainmill._dataset.iter_dataset import IterDataset, PlannedIterDataset, node_of
from grainmill._iterators.thread_prefetch import ThreadPrefetch
from grainmill._iterators.workers.worker_shards import MultithreadPrefetch
from grainmill._plan.arguments import checked_integer
from grainmill._plan.slicing import check_sliceable

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset


class ThreadPrefetchIterDataset(PlannedIterDataset[T_co]):
    """Prefetches elements on one thread.

    A saved state refers to the element delivered last; prefetched elements are not part of it.

    Args:
        parent: The dataset to read from.
        prefetch_buffer_size: Maximum number of prefetched elements; 0 computes each when it is
            requested.

    Raises:
        ValueError: `prefetch_buffer_size` is negative.
        TypeError: `prefetch_buffer_size` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(4).to_iter_dataset().batch(2)
        >>> ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=1)
        >>> [batch.tolist() for batch in ds]
        [[0, 1], [2, 3]]
    """

    def __init__(self, parent: AnyDataset[T_co], *, prefetch_buffer_size: int) -> None:
        node = ThreadPrefetch.of(node_of(parent), prefetch_buffer_size)
        super().__init__(node, (parent,))


def multithread_prefetch(
    ds: AnyDataset[T],
    num_threads: int,
    buffer_size: int,
    sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
) -> IterDataset[T]:
    """Prefetches elements on threads, which split them as workers of `mp_prefetch` do.

    Each thread runs all stages upstream on its share of the elements, so stages of an `IterDataset`
    (batches, filters, packing, limits) apply to each thread's share, and both the elements and a
    saved state depend on the number of threads. Workers of an `mp_prefetch` that follows divide the
    threads among them; if there are more workers than threads, each has all of these for its share.

    Args:
        ds: The dataset.
        num_threads: Number of threads; with 0, `ds` is returned unchanged.
        buffer_size: Maximum number of elements that each thread prefetches; 0 computes each when it
            is requested.
        sequential_slice: Whether a thread reads a range of consecutive elements of each source
            instead of every `num_threads`-th element.

    Raises:
        ValueError: A number is negative, or a source cannot be split among threads.
        TypeError: A number is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(7).to_iter_dataset().batch(2)
        >>> ds = grain.experimental.multithread_prefetch(ds, num_threads=2, buffer_size=1)
        >>> [batch.tolist() for batch in ds]
        [[0, 2], [1, 3], [4, 6], [5]]
    """
    if not checked_integer(num_threads, "num_threads"):
        return ds  # type: ignore[return-value]  # a `MapDataset` stays one, as in Grain
    node = MultithreadPrefetch.of(
        node_of(ds), num_threads, buffer_size, sequential_slice=sequential_slice
    )
    check_sliceable(node_of(ds), num_threads, sequential=sequential_slice)
    return PlannedIterDataset(node, (ds,))
