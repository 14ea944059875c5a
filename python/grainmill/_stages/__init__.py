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
    __getattr__ = lazy_names(
        __name__,
        {
            "BestFitPackIterDataset": "grainmill._stages.pack",
            "CacheIterDataset": "grainmill._stages.cache",
            "ConcatThenSplitIterDataset": "grainmill._stages.concat_split",
            "FirstFitPackIterDataset": "grainmill._stages.pack",
            "FlatMapIterDataset": "grainmill._stages.flat_map",
            "FlatMapMapDataset": "grainmill._stages.flat_map",
            "InterleaveIterDataset": "grainmill._stages.interleave",
            "LimitIterDataset": "grainmill._stages.limit",
            "RebatchIterDataset": "grainmill._stages.rebatch",
            "RepeatIterDataset": "grainmill._stages.repeat",
            "TakeWhileIterDataset": "grainmill._stages.take_while",
            "ThreadPrefetchIterDataset": "grainmill._stages.thread_prefetch",
            "WindowShuffleIterDataset": "grainmill._stages.window_shuffle",
            "WindowShuffleMapDataset": "grainmill._stages.window_shuffle",
            "WithOptionsIterDataset": "grainmill._stages.with_options",
            "ZipIterDataset": "grainmill._stages.zip",
            "ZipMapDataset": "grainmill._stages.zip",
            "multithread_prefetch": "grainmill._stages.thread_prefetch",
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
