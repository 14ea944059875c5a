"""Stages that are classes around a dataset rather than methods of it: each is one file."""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from grainmill._stages.cache import CacheIterDataset
    from grainmill._stages.concat_split import ConcatThenSplitIterDataset
    from grainmill._stages.flat_map import FlatMapIterDataset, FlatMapMapDataset
    from grainmill._stages.interleave import InterleaveIterDataset
    from grainmill._stages.limit import LimitIterDataset
    from grainmill._stages.pack import BestFitPackIterDataset, FirstFitPackIterDataset
    from grainmill._stages.rebatch import RebatchIterDataset
    from grainmill._stages.repeat import RepeatIterDataset
    from grainmill._stages.take_while import TakeWhileIterDataset
    from grainmill._stages.thread_prefetch import ThreadPrefetchIterDataset, multithread_prefetch
    from grainmill._stages.window_shuffle import WindowShuffleIterDataset, WindowShuffleMapDataset
    from grainmill._stages.with_options import WithOptionsIterDataset
    from grainmill._stages.zip import ZipIterDataset, ZipMapDataset
else:
    # Imported when they are used: a program needs few of them.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._stages.cache": ["CacheIterDataset"],
            "grainmill._stages.concat_split": ["ConcatThenSplitIterDataset"],
            "grainmill._stages.flat_map": ["FlatMapIterDataset", "FlatMapMapDataset"],
            "grainmill._stages.interleave": ["InterleaveIterDataset"],
            "grainmill._stages.limit": ["LimitIterDataset"],
            "grainmill._stages.pack": ["BestFitPackIterDataset", "FirstFitPackIterDataset"],
            "grainmill._stages.rebatch": ["RebatchIterDataset"],
            "grainmill._stages.repeat": ["RepeatIterDataset"],
            "grainmill._stages.take_while": ["TakeWhileIterDataset"],
            "grainmill._stages.thread_prefetch": [
                "ThreadPrefetchIterDataset",
                "multithread_prefetch",
            ],
            "grainmill._stages.window_shuffle": [
                "WindowShuffleIterDataset",
                "WindowShuffleMapDataset",
            ],
            "grainmill._stages.with_options": ["WithOptionsIterDataset"],
            "grainmill._stages.zip": ["ZipIterDataset", "ZipMapDataset"],
        },
    )

__all__ = [
    "BestFitPackIterDataset",
    "CacheIterDataset",
    "ConcatThenSplitIterDataset",
    "FirstFitPackIterDataset",
    "FlatMapIterDataset",
    "FlatMapMapDataset",
    "InterleaveIterDataset",
    "LimitIterDataset",
    "RebatchIterDataset",
    "RepeatIterDataset",
    "TakeWhileIterDataset",
    "ThreadPrefetchIterDataset",
    "WindowShuffleIterDataset",
    "WindowShuffleMapDataset",
    "WithOptionsIterDataset",
    "ZipIterDataset",
    "ZipMapDataset",
    "multithread_prefetch",
]
