"""Compiles plans: index stages to a tree for the engine, functions to chains of fused loops.

Datasets of a mixture or a concatenation that are alike, that is, the same kinds of functions over
the same kind of source, share one chain, and a column has the number of each element's dataset. So
a block costs what its own positions cost, however many datasets there are.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate.batches.batch_blocks import byte_len
from grainmill._evaluate.chain import Chain, StepColumn
from grainmill._evaluate.context import Context
from grainmill._evaluate.fused import Fused
from grainmill._evaluate.fused_blocks import BlockFused
from grainmill._evaluate.grouped_steps import step_of
from grainmill._evaluate.program import Program
from grainmill._evaluate.sources import (
    element_sources,
    gathered_sources,  # noqa: F401 - what computes batches and the like
    grouped_sources,
)
from grainmill._evaluate.sources.cache_source import CacheSource
from grainmill._evaluate.sources.converted_source import ConvertedRecords
from grainmill._evaluate.sources.row_source import RowSource
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from grainmill._evaluate.fused import Step
    from grainmill._evaluate.sources.element_sources import ElementSource, Indices
    from grainmill._native import RecordFiles
    from grainmill._plan.node import MapNode, Node, Tree
    from grainmill._stats.meters import Recorder

_INT64_LIMIT = 2**63


def compiled(
    node: Node, context: Context | None = None, programs: dict[int, Program] | None = None
) -> Program:
    """The program of the plan that ends in `node`.

    Args:
        node: The last stage; must have random access.
        context: The options and limits it runs with; new ones if `None`.
        programs: Those of this plan until now, by the `id` of their nodes: a node that several
            stages read is compiled once.
    """
    context = context or Context()
    compiler = _Compiler(context, {} if programs is None else programs)
    (tree,), unfused = compiler.compile([_path_of(random_access(node))])
    return Program(node, tree, unfused.chain(context.recorder), context.recorder)


class _Path(NamedTuple):
    """A run of index stages and functions, and the first node upstream that is neither.

    Attributes:
        stages: The stages, the last one first.
        mapped: Those of them that are functions of an element.
        upstream: The node upstream of them.
    """

    stages: Sequence[Any]
    mapped: Sequence[Any]
    upstream: MapNode

    @property
    def chain_key(self) -> Hashable:
        """Equal for paths that can share a chain."""
        return tuple(map(type, self.mapped)), _kind(self.upstream)


class _Unfused(NamedTuple):
    """A chain to which functions can still be added.

    Attributes:
        inputs: The source with the number of its column, or the chains upstream.
        source: The node of the source, or of the join; the first of several.
        steps: The functions.
        nodes: The node of each function; several where each dataset has its own.
        columns: Those of functions that take more than the element.
    """

    inputs: Any
    source: Node
    steps: list[Step]
    nodes: list[Sequence[Node]]
    columns: list[StepColumn]

    def chain(self, recorder: Recorder) -> Chain:
        """The chain with its functions fused into one loop."""
        source, upstream, steps, nodes = None, [], self.steps, self.nodes
        if isinstance(self.inputs, list):
            upstream = [unfused.chain(recorder) for unfused in self.inputs]
        else:
            source = self.inputs
            reads = source[1].first_step() if steps else None
            if reads is not None:
                steps, nodes = [reads, *steps], [[self.source], *nodes]
        maps_blocks = any(step.block is not None for step in steps)
        fused = BlockFused(steps) if maps_blocks else Fused(steps)
        if steps:
            fused.meter = recorder.loop(nodes, byte_len)
            if nodes[0][0] is not self.source:
                fused.meter.source = recorder.stage(self.source)
        return Chain(source, upstream, fused, tuple(self.columns))


def _path_of(node: Any) -> _Path:
    stages: list[Any] = []
    mapped: list[Any] = []
    while node.rearranges or node.step_kind is not None:
        stages.append(node)
        if not node.rearranges:
            mapped.append(node)
        (node,) = node.parents
    return _Path(stages, mapped, node)


class _Compiler:
    def __init__(self, context: Context, programs: dict[int, Program]) -> None:
        self._context = context
        self._programs = programs
        self._numbers = itertools.count()

    def _program_of(self, parent: Node) -> Program:
        """The program of the parent of a stage such as a batch."""
        if id(parent) not in self._programs:
            self._programs[id(parent)] = compiled(parent, self._context, self._programs)
        return self._programs[id(parent)]

    def compile(self, paths: Sequence[_Path]) -> tuple[list[Tree], _Unfused]:
        """The tree of each of `paths`, which have one `chain_key`, and the chain they share."""
        if paths[0].upstream.joins:
            trees, unfused = self._compile_joins(paths)
            number = None
        else:
            number, trees, unfused = self._compile_sources(paths)
        # In the order of calls. Each step has one node in each path.
        taps: list[int | None] = []
        for nodes in zip(*(reversed(path.mapped) for path in paths), strict=True):
            step, by_dataset = step_of(nodes)
            tap: int | None = None
            if nodes[0].step_kind in {"indexed", "random"}:
                tap = next(self._numbers)
                unfused.columns.append(StepColumn(tap, "both" if by_dataset else "index"))
            elif by_dataset:
                if number is None:  # no column upstream tells the datasets of these paths apart
                    number = tap = next(self._numbers)
                unfused.columns.append(StepColumn(number, "dataset"))
            unfused.steps.append(step)
            unfused.nodes.append(nodes if by_dataset else nodes[:1])
            taps.append(tap)
        has_taps = any(tap is not None for tap in taps)
        for dataset, path in enumerate(paths):
            if has_taps or len(path.stages) > len(path.mapped):
                trees[dataset] = _tree_over(trees[dataset], path.stages, taps, dataset)
        return trees, unfused

    def _compile_joins(self, paths: Sequence[_Path]) -> tuple[list[Tree], _Unfused]:
        """Compiles paths that end in a mixture or concatenation."""
        joins: list[Any] = [path.upstream for path in paths]
        # A node that several of them read is compiled once, and a tree says that it is shared.
        parents = [parent for join in joins for parent in join.parents]
        unique = {id(parent): parent for parent in parents}
        place = {key: number for number, key in enumerate(unique)}
        inputs = [_path_of(parent) for parent in unique.values()]
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, path in enumerate(inputs):
            groups[path.chain_key].append(number)
        trees: list[Tree] = [()] * len(inputs)
        chains = []
        for numbers in groups.values():
            group_trees, chain = self.compile([inputs[number] for number in numbers])
            for number, tree in zip(numbers, group_trees, strict=True):
                trees[number] = tree
            chains.append(chain)
        num_uses = Counter(map(id, parents))
        for key, number in place.items():
            if num_uses[key] > 1:
                trees[number] = ("shared", trees[number])
        joined_trees = [
            join.tree(*[trees[place[id(parent)]] for parent in join.parents]) for join in joins
        ]
        if len(chains) == 1:  # functions downstream of the join are fused into the same loop
            return joined_trees, chains[0]
        return joined_trees, _Unfused(chains, joins[0], [], [], [])

    def _compile_sources(self, paths: Sequence[_Path]) -> tuple[int, list[Tree], _Unfused]:
        """Compiles paths that end in a source; returns its column's number, too."""
        number, nodes = next(self._numbers), [path.upstream for path in paths]
        trees: list[Tree]
        if _kind(nodes[0]) == "numbers":
            trees = [_numbers(node, number, dataset) for dataset, node in enumerate(nodes)]  # type: ignore[arg-type]
        else:
            trees = [_source_tree(node, number, dataset) for dataset, node in enumerate(nodes)]
        source = self._source_of(nodes)
        if isinstance(source, element_sources.FileSource | ConvertedRecords | RowSource):
            self._context.recorder.watch_files(source, source.files.read_totals)
        return number, trees, _Unfused((number, source), nodes[0], [], [], [])

    def _source_of(self, nodes: Sequence[Any]) -> ElementSource[Any]:
        kind = _kind(nodes[0])
        if kind == "numbers":
            return element_sources.RangeSource()
        if len(nodes) == 1:
            return self._single_source(nodes[0])
        if kind == "objects":
            return grouped_sources.GroupedObjects([_object(node) for node in nodes])
        if kind == "files":
            files = [_files_of(node) for node in nodes]
            # A subclass may claim a larger length, which would reach records of another dataset.
            if all(node.length <= len(of) for node, of in zip(nodes, files, strict=True)):
                return grouped_sources.GroupedFiles(files, self._context.reads)
        make = self._single_source
        grouped = (
            grouped_sources.GroupedRows if kind == "rows" else grouped_sources.GroupedLazySources
        )
        return grouped(
            [lambda node=node: make(node) for node in nodes],  # type: ignore[misc]
            runs_user_code=any(_runs_user_code(node) for node in nodes),
        )

    def _single_source(self, node: MapNode) -> ElementSource[Any]:
        if _kind(node) in {"files", "reordered files", "converted files"}:
            return self._records(node.source)  # type: ignore[attr-defined]
        if _kind(node) == "rows":
            files = node.source._files  # type: ignore[attr-defined] # noqa: SLF001 - as `_files_of`
            return RowSource(files, self._context.reads)
        if isinstance(node, plan.Cache):
            return CacheSource(node, self._program_of(node.parent), self._context.reads)
        if isinstance(node, plan.Range):
            return element_sources.BigRangeSource(node.numbers)
        if isinstance(node, plan.Source | plan.UserDefined):
            return _object_source(node)
        if node.computed_by is None:
            raise NotImplementedError(f"nothing has `computes({type(node).__name__})`")
        parents = [self._program_of(parent) for parent in node.parents]
        source: ElementSource[Any] = node.computed_by(node, *parents)
        return source

    def _records(self, source: Any) -> element_sources.FileSource | ConvertedRecords:
        """The elements of a source of files; see `RecordFilesSource`."""
        numbers_of = getattr(source, "_numbers_of", None)
        records = element_sources.FileSource(source._files, self._context.reads, numbers_of)  # noqa: SLF001 - as `_files_of`
        return records if _yields_records(source) else ConvertedRecords(source, records)


def _tree_over(tree: Tree, stages: Sequence[Any], taps: Sequence[int | None], dataset: int) -> Tree:
    """The tree of `stages` over `tree`, with a tap for each function that needs its own indices."""
    remaining_taps = iter(taps)
    for node in reversed(stages):
        if node.rearranges:
            tree = node.tree(tree)
            continue
        tap = next(remaining_taps)
        if tap is not None:
            tree = ("tap", tap, dataset, tree)
    return tree


def _kind(node: MapNode) -> str:
    """Equal for nodes that can share a source, or whose parents can share chains."""
    if isinstance(node, plan.Range):
        numbers = node.numbers
        fits = (
            -_INT64_LIMIT <= numbers.start < _INT64_LIMIT
            and -_INT64_LIMIT <= numbers.stop < _INT64_LIMIT
            and -_INT64_LIMIT <= numbers.step < _INT64_LIMIT
        )
        return "numbers" if fits else "long numbers"
    if isinstance(node, plan.Source):
        return _source_kind(node.source)
    if isinstance(node, plan.UserDefined):
        return _object_kind(node.dataset)
    if node.joins:
        return "several"
    return type(node).__name__


def _source_kind(source: Any) -> str:
    getitem = getattr(type(source), "__getitem__", None)
    is_of_files = getitem is not None and getitem is getattr(
        type(source), "_getitem_of_files", None
    )
    if is_of_files and _yields_records(source):
        return "files" if getattr(source, "_numbers_of", None) is None else "reordered files"
    if is_of_files and _inherits_getitems(source):
        return "converted files"
    if getitem is not None and getitem is getattr(type(source), "_getitem_of_rows", None):
        return "rows"
    return _object_kind(source)


def _yields_records(source: Any) -> bool:
    """Whether the elements of a source of files are its records."""
    return getattr(source, "_yields_records", True)


def _inherits_getitems(source: Any) -> bool:
    """Whether `__getitems__` of a source of files is that of the class with `__getitem__`."""
    kind = next(kind for kind in type(source).__mro__ if "__getitem__" in kind.__dict__)
    return getattr(type(source), "__getitems__", None) is kind.__dict__.get("__getitems__")


def _object_kind(source: Any) -> str:
    """`blocks` if `source` has its own `__getitems__`, otherwise `objects`.

    A class that overrides `__getitem__` but inherits `__getitems__` is called for single elements,
    since the inherited method would not return the class's own.
    """
    for kind in type(source).__mro__:
        if "__getitems__" in kind.__dict__:
            return "blocks" if callable(kind.__dict__["__getitems__"]) else "objects"
        if "__getitem__" in kind.__dict__:
            return "objects"
    return "objects"


def _object(node: plan.Source | plan.UserDefined) -> Any:
    return node.source if isinstance(node, plan.Source) else node.dataset


def _files_of(node: plan.Source) -> RecordFiles:
    files: RecordFiles = node.source._files  # noqa: SLF001 - sources of files keep them for this
    return files


def _numbers(node: plan.Range, number: int, dataset: int) -> Tree:
    numbers = node.numbers
    return ("numbers", number, dataset, numbers.start, numbers.step, node.length)


def _source_tree(node: MapNode, number: int, dataset: int) -> Tree:
    tree: Tree = ("leaf", number, dataset)
    if isinstance(node, plan.Source) and node.wraps and _kind(node) == "rows":
        order: Tree = node.source._index_tree(tree)  # noqa: SLF001 - the source's own order
        return order
    wraps = isinstance(node, plan.Range) or (isinstance(node, plan.Source) and node.wraps)
    return ("wrap", node.length, tree) if wraps else tree


def _object_source(node: plan.Source | plan.UserDefined) -> ElementSource[Indices]:
    if _kind(node) == "blocks":
        given = _object(node)
        if hasattr(type(given), "_start_reads"):
            return element_sources.PrefetchedObjectSource(given)
        return element_sources.BlockObjectSource(given)
    return element_sources.ObjectSource(_object(node))


def _runs_user_code(node: Node) -> bool:
    """Whether the plan that ends in `node` calls functions or objects of the user."""
    return any(_is_user_code(upstream) for upstream in node.walk())


def runs_in_engine(node: MapNode) -> bool:
    """Whether the engine computes the elements of `node`, without Python for each."""
    if isinstance(node, plan.Source):
        return _source_kind(node.source) in _ENGINE_SOURCES
    if isinstance(node, plan.Batch):
        return not node.runs_users_code
    return node.rearranges or node.joins or isinstance(node, plan.Range)


_ENGINE_SOURCES = {"files", "reordered files", "rows"}


def _is_user_code(node: Node) -> bool:
    if isinstance(node, plan.Source):
        return _source_kind(node.source) not in _ENGINE_SOURCES
    return node.runs_users_code
