"""Names of `grain._src.python.dataset.transformations.prefetch`."""

from grainmill.experimental import (
    ThreadPrefetchDatasetIterator,
    ThreadPrefetchIterDataset,
    multithread_prefetch,
)

__all__ = ["ThreadPrefetchDatasetIterator", "ThreadPrefetchIterDataset", "multithread_prefetch"]
