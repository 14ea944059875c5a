"""The table that maps each type of sequential node to the stage that runs it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from grainmill import _iterators
from grainmill._evaluate.context import Context
from grainmill._iterators.batch import BatchStage
from grainmill._iterators.concat_split import ConcatThenSplitStage
from grainmill._iterators.elementwise import ElementwiseStage, Step
from grainmill._iterators.interleave import InterleaveStage
from grainmill._iterators.mix import MixStage
from grainmill._iterators.pack import FitPackStage
from grainmill._iterators.pack_in_thread import PackInThreadStage
from grainmill._iterators.parts import open_part
from grainmill._iterators.read import ReadStage
from grainmill._iterators.stage import RUNNERS, Stage
from grainmill._iterators.thread_prefetch import ThreadPrefetchStage
from grainmill._iterators.user_defined import UserDefinedStage
from grainmill._iterators.worker_shards import WorkerShardsStage
from grainmill._iterators.zip import ZipStage
from grainmill._plan import sequential as plan
from grainmill._plan.node import MapNode
from grainmill._plan.options import DatasetOptions
from grainmill._stats.meters import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.node import Node


# Import all stages, one file each, so that `runs` registers them; not what starts processes.
for _module in pkgutil.iter_modules(_iterators.__path__):
    if _module.name not in {"pipeline_job", "remote", "table"}:
        importlib.import_module(f"{_iterators.__name__}.{_module.name}")


def open_stage(node: Node, recorder: Recorder | None = None) -> Stage:
    """Opens the plan that ends in `node` at its first element.

    Args:
        node: The plan's last node.
        recorder: Takes the times of its stages; a new one if `None`.
    """
    return _open_plan(node, Context(options_of(node), recorder=recorder or Recorder()))


def _open_plan(node: Node, context: Context) -> Stage:
    """Opens a plan that one thread pulls from; its readers share threads and memory."""
    return _open(node, context.shared_by(_num_readers(node)))


# A `MapDataset` where an `IterDataset` is expected is read, too.
_READS = (MapNode, plan.Read, plan.MultiprocessPrefetch, plan.MultithreadPrefetch)


def _num_readers(node: Node) -> int:
    """How many stages that read random-access plans are open at once, for the plan in `node`."""
    count = 0
    pending = [node]
    while pending:
        upstream = pending.pop()
        if isinstance(upstream, plan.Interleave):
            count += min(upstream.cycle_length, len(upstream.datasets))
        elif isinstance(upstream, _READS):
            count += 1
        else:
            pending += upstream.parents
    return count


def options_of(node: Node) -> DatasetOptions:
    """The options of a whole plan; the one nearest to the consumer overrides the others."""
    options = DatasetOptions()
    for upstream in node.walk(until=plan.Read):
        if isinstance(upstream, plan.WithOptions):
            options = options.merge(upstream.options)
    return options


def _open(node: Node, context: Context) -> Stage:
    stage = _opened(node, context)
    if stage.node is None:
        stage.node, stage.recorder = node, context.recorder
    return stage


def _opened(node: Node, context: Context) -> Stage:
    if isinstance(node, MapNode):  # a `MapDataset` where an `IterDataset` is expected
        node = plan.read(node)
    make = _STAGES.get(type(node))
    if make is not None:
        return make(node, context)
    runner = RUNNERS.get(type(node))
    if runner is None:
        raise TypeError(f"nothing runs {node}")
    return runner(node, _parent(node, context))


def _parent(node: Node, context: Context) -> Stage:
    return _open(node.parent, context)


def _parents(node: Node, context: Context) -> list[Stage]:
    return [_open(parent, context) for parent in node.parents]


def _elementwise(node: plan.Map, context: Context) -> Stage:
    """One stage for all consecutive functions of one element."""
    nodes: list[plan.Map] = []
    upstream: Node = node
    while type(upstream) in _ELEMENTWISE or type(upstream) in _TRANSPARENT:
        if isinstance(upstream, plan.Map):
            nodes.append(upstream)
        upstream = upstream.parent
    nodes.reverse()
    steps = [Step.of(each, context.options) for each in nodes]
    return ElementwiseStage(_open(upstream, context), steps, context.recorder.steps(nodes))


def _batched(node: plan.Batch, context: Context) -> Stage:
    parent = _parent(node, context)
    stage = BatchStage(node, parent)
    is_packed = isinstance(parent, FitPackStage | ConcatThenSplitStage)
    if is_packed and node.batch_fn is None and context.threads is None:
        (reader,) = parent.parents
        if isinstance(reader, ReadStage) and reader.has_threads:
            stage.node, stage.recorder = node, context.recorder
            return PackInThreadStage(reader, stage, node.batch_size)
    return stage


def _interleave(node: plan.Interleave, context: Context) -> Stage:
    datasets = node.datasets
    prefetch = node.iter_buffer_size > 1

    def open_dataset(index: int) -> Stage:
        dataset = datasets[index]
        to_iter_dataset = getattr(dataset, "to_iter_dataset", None)
        if to_iter_dataset is not None:
            dataset = to_iter_dataset()
        make_node = getattr(dataset, "_plan_node", None)
        if make_node is None:
            raise TypeError(
                f"`datasets[{index}]` of {node} must be a dataset, got {dataset!r} of type "
                f"{type(dataset).__name__}"
            )
        output = make_node()
        stage = open_part(node, output, _open_plan, context)
        if prefetch and not isinstance(stage, ReadStage | PackInThreadStage):  # these prefetch
            stage = ThreadPrefetchStage(plan.ThreadPrefetch((), node.iter_buffer_size), stage)
            stage.node, stage.recorder = node, context.recorder
        return stage

    return InterleaveStage(node, open_dataset, len(datasets), start_all=prefetch)


def _workers(node: plan.MultiprocessPrefetch | plan.MultithreadPrefetch, context: Context) -> Stage:
    return WorkerShardsStage(node, _open_plan, context)


_ELEMENTWISE = (plan.Map, plan.MapWithIndex, plan.RandomMap, plan.Filter)

# Nodes that other nodes look up in the plan, and that do nothing when run.
_TRANSPARENT = (plan.Seed, plan.WithOptions)

# What runs those nodes; the others are in `RUNNERS`.
_STAGE_TYPES: dict[type[Node], type[Stage]] = {
    plan.Read: ReadStage,
    plan.UserDefined: UserDefinedStage,
    **dict.fromkeys(_ELEMENTWISE, ElementwiseStage),
    plan.Batch: BatchStage,
    plan.Mix: MixStage,
    plan.Zip: ZipStage,
    plan.Interleave: InterleaveStage,
    plan.MultithreadPrefetch: WorkerShardsStage,
    plan.MultiprocessPrefetch: WorkerShardsStage,
}


def stage_type(node: Node) -> type[Stage] | None:
    """The class of the stage that runs a sequential node; `None` if none does."""
    return None if isinstance(node, _TRANSPARENT) else _STAGE_TYPES.get(type(node), _runner(node))


def _runner(node: Node) -> type[Stage]:
    runner = RUNNERS.get(type(node))
    return runner if isinstance(runner, type) else Stage


# Nodes that need more than one parent or the context; the others are registered by `runs`.
_STAGES: dict[type[Node], Callable[[Any, Context], Stage]] = {
    plan.Read: ReadStage,
    plan.UserDefined: lambda node, _: UserDefinedStage(iter(node.dataset), node),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    plan.Batch: _batched,
    plan.Mix: lambda node, c: MixStage(node, _parents(node, c)),
    plan.Zip: lambda node, c: ZipStage(node, _parents(node, c)),
    plan.Interleave: _interleave,
    plan.MultithreadPrefetch: _workers,
    plan.MultiprocessPrefetch: _workers,
    **dict.fromkeys(_TRANSPARENT, _parent),
}
