"""How each sequential node runs: the one table from plan to stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._evaluate.fuse import Step
from grainmill._iterators import elementwise
from grainmill._iterators.batch import BatchStage
from grainmill._iterators.cache import CacheStage
from grainmill._iterators.concat_split import ConcatThenSplitStage
from grainmill._iterators.flat_map import FlatMapStage
from grainmill._iterators.foreign import ForeignStage
from grainmill._iterators.interleave import InterleaveStage
from grainmill._iterators.limit import LimitStage
from grainmill._iterators.mix import MixStage
from grainmill._iterators.pack import FitPackStage
from grainmill._iterators.packed_ahead import PackedAheadStage
from grainmill._iterators.read import ReadStage
from grainmill._iterators.rebatch import RebatchStage
from grainmill._iterators.repeat import RepeatStage
from grainmill._iterators.thread_prefetch import ThreadPrefetchStage
from grainmill._iterators.window_shuffle import WindowShuffleStage
from grainmill._iterators.worker_parts import WorkerPartsStage
from grainmill._iterators.zip import ZipStage
from grainmill._plan import sequential as plan
from grainmill._plan.options import DatasetOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import Stage
    from grainmill._plan.node import Node


def open_stage(node: Node) -> Stage:
    """Makes the plan that ends in `node` ready to run, from its first element."""
    return _open(node, _options(node))


def _options(node: Node) -> DatasetOptions:
    """The options of a whole plan; of two that set the same, the one further down wins."""
    options = DatasetOptions()
    for above in node.walk():
        if isinstance(above, plan.WithOptions):
            options = options.merge(above.options)
    return options


def _open(node: Node, options: DatasetOptions) -> Stage:
    try:
        make = _STAGES[type(node)]
    except KeyError:
        raise TypeError(f"{node} is no IterDataset; `to_iter_dataset()` makes it one") from None
    return make(node, options)


def _parent(node: Node, options: DatasetOptions) -> Stage:
    return _open(node.parent, options)


def _parents(node: Node, options: DatasetOptions) -> list[Stage]:
    return [_open(parent, options) for parent in node.parents]


def _maps(node: plan.Map, options: DatasetOptions) -> Stage:
    """Maps that follow each other are one stage: they keep no state of their own."""
    functions = [node.function]
    above = node.parent
    while type(above) is plan.Map:
        functions.append(above.function)
        above = above.parent
    steps = [Step("map", function) for function in reversed(functions)]
    return elementwise.MapStage(_open(above, options), steps)


def _batched(node: plan.Batch, options: DatasetOptions) -> Stage:
    parent = _parent(node, options)
    stage = BatchStage(node, parent)
    if isinstance(parent, FitPackStage | ConcatThenSplitStage) and node.batch_fn is None:
        (reader,) = parent.parents
        if isinstance(reader, ReadStage) and reader.has_threads:
            return PackedAheadStage(reader, stage, node.batch_size)
    return stage


def _interleave(node: plan.Interleave, options: DatasetOptions) -> Stage:
    datasets = node.datasets
    ahead = node.iter_buffer_size > 1

    def open_part(index: int) -> Stage:
        part = datasets[index]
        to_iter_dataset = getattr(part, "to_iter_dataset", None)
        if to_iter_dataset is not None:
            part = to_iter_dataset()
        stage = _open(part._plan_node(), options)  # noqa: SLF001 - datasets share plans
        if ahead and not isinstance(stage, ReadStage | PackedAheadStage):  # which read ahead anyway
            return ThreadPrefetchStage(plan.ThreadPrefetch((), node.iter_buffer_size), stage)
        return stage

    return InterleaveStage(node, open_part, len(datasets), at_once=ahead)


def _workers(
    node: plan.MultiprocessPrefetch | plan.MultithreadPrefetch, options: DatasetOptions
) -> Stage:
    return WorkerPartsStage(node, lambda part: _open(part, options))


_STAGES: dict[type[Node], Callable[[Any, DatasetOptions], Stage]] = {
    plan.Read: ReadStage,
    plan.Foreign: lambda node, _: ForeignStage(iter(node.dataset)),
    plan.Map: _maps,
    plan.MapWithIndex: lambda node, o: elementwise.MapWithIndexStage(node, _parent(node, o)),
    plan.RandomMap: lambda node, o: elementwise.RandomMapStage(node, _parent(node, o)),
    plan.Filter: lambda node, o: elementwise.FilterStage(node, _parent(node, o), o),
    plan.Batch: _batched,
    plan.Rebatch: lambda node, o: RebatchStage(node, _parent(node, o)),
    plan.Mix: lambda node, o: MixStage(node, _parents(node, o)),
    plan.Zip: lambda node, o: ZipStage(node, _parents(node, o)),
    plan.Interleave: _interleave,
    plan.Repeat: lambda node, o: RepeatStage(node, _parent(node, o)),
    plan.Cache: lambda node, o: CacheStage(node, _parent(node, o)),
    plan.Limit: lambda node, o: LimitStage(node, _parent(node, o)),
    plan.FlatMap: lambda node, o: FlatMapStage(node, _parent(node, o)),
    plan.WindowShuffle: lambda node, o: WindowShuffleStage(node, _parent(node, o)),
    plan.FitPack: lambda node, o: FitPackStage(node, _parent(node, o)),
    plan.ConcatThenSplit: lambda node, o: ConcatThenSplitStage(node, _parent(node, o)),
    plan.ThreadPrefetch: lambda node, o: ThreadPrefetchStage(node, _parent(node, o)),
    plan.MultithreadPrefetch: _workers,
    plan.MultiprocessPrefetch: _workers,
    plan.Seed: _parent,
    plan.WithOptions: _parent,
}
