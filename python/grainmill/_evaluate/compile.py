"""Plans made ready to run: index stages as a tree for the engine, functions as chains.

Parts of a mixture or a concatenation that are alike, which means the same kinds of functions over
the same kind of source, become one chain whose columns tell the part of each element. A block then
costs what its own positions cost, however many parts there are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._evaluate import element_sources, grouped_sources
from grainmill._evaluate.chain import Chain, StepColumn
from grainmill._evaluate.fuse import Fused
from grainmill._evaluate.grouped_steps import STEP_KINDS, step_of
from grainmill._evaluate.index_tree import INDEX_STAGES, joined
from grainmill._plan import random_access as plan
from grainmill._plan.node import random_access

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._evaluate.element_sources import ElementSource, Indices
    from grainmill._evaluate.evaluator import Evaluator
    from grainmill._evaluate.fuse import Step
    from grainmill._evaluate.index_tree import Tree
    from grainmill._native import RecordFiles
    from grainmill._plan.node import MapNode, Node

_LIMIT = 2**63


def compiled(
    node: Node, program_of: Callable[[Node], Evaluator], context: Context
) -> tuple[Tree, Chain]:
    """The index tree of the plan that ends in `node`, and the chain that makes its elements.

    Args:
        node: Must have random access.
        program_of: Makes the programs that batches and the like take their elements from.
        context: What all of it is run with.
    """
    compiler = _Compiler(program_of, context)
    (tree,), unfused = compiler.compile([_path_of(random_access(node))])
    return tree, unfused.chain()


class _Path(NamedTuple):
    """The stages with one parent from a node up to the first that is another.

    Attributes:
        stages: From the node on.
        mapped: Those of them that are functions of an element.
        bottom: Where they end.
    """

    stages: Sequence[Any]
    mapped: Sequence[Any]
    bottom: MapNode

    @property
    def shape(self) -> Hashable:
        """Equal for paths that one chain can serve."""
        return tuple(map(type, self.mapped)), _kind(self.bottom)


class _Unfused(NamedTuple):
    """A chain to which functions may still be added."""

    below: Any
    steps: list[Step]
    columns: list[StepColumn]

    def chain(self) -> Chain:
        """The chain with its functions as one loop."""
        below, steps = self.below, self.steps
        if isinstance(below, list):
            below = tuple(piece.chain() for piece in below)
        elif steps:
            reads = below[1].first_step()
            steps = steps if reads is None else [reads, *steps]
        return Chain(below, Fused(steps), tuple(self.columns))


# The stages of a path: whether they are functions of an element.
_STAGES = dict.fromkeys(STEP_KINDS, True) | dict.fromkeys(INDEX_STAGES, False)


def _path_of(node: Any) -> _Path:
    if type(node) not in _STAGES:
        return _Path((), (), node)
    stages: list[Any] = []
    mapped: list[Any] = []
    while (is_mapped := _STAGES.get(type(node))) is not None:
        stages.append(node)
        if is_mapped:
            mapped.append(node)
        (node,) = node.parents
    return _Path(stages, mapped, node)


class _Compiler:
    def __init__(self, program_of: Callable[[Node], Evaluator], context: Context) -> None:
        self._program_of = program_of
        self._context = context
        self._next_number = 0

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def compile(self, paths: Sequence[_Path]) -> tuple[list[Tree], _Unfused]:
        """The tree of each of `paths`, which are alike, and the chain they share."""
        if isinstance(paths[0].bottom, plan.Mix | plan.Concatenate):
            trees, unfused = self._several(paths)
            number = None
        else:
            number, trees, unfused = self._numbered_source(paths)
        # From the source on; each step has one node in each of the paths.
        taps: list[int | None] = []
        for nodes in zip(*(reversed(path.mapped) for path in paths), strict=True):
            step, by_part = step_of(nodes)
            tap: int | None = None
            if isinstance(nodes[0], plan.MapWithIndex | plan.RandomMap):
                tap = self._number()
                unfused.columns.append(StepColumn(tap, "both" if by_part else "index"))
            elif by_part:
                if number is None:  # what alternates below has no column of these paths
                    number = tap = self._number()
                unfused.columns.append(StepColumn(number, "part"))
            unfused.steps.append(step)
            taps.append(tap)
        has_taps = any(tap is not None for tap in taps)
        for part, path in enumerate(paths):
            if has_taps or len(path.stages) > len(path.mapped):
                trees[part] = _over(trees[part], path.stages, taps, part)
        return trees, unfused

    def _several(self, paths: Sequence[_Path]) -> tuple[list[Tree], _Unfused]:
        """Trees and chain of stages that take turns between their parents."""
        bottoms: list[Any] = [path.bottom for path in paths]
        below = [_path_of(parent) for bottom in bottoms for parent in bottom.parents]
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for place, path in enumerate(below):
            alike[path.shape].append(place)
        trees: list[Tree] = [()] * len(below)
        chains = []
        for places in alike.values():
            made, chain = self.compile([below[place] for place in places])
            for place, tree in zip(places, made, strict=True):
                trees[place] = tree
            chains.append(chain)
        joined_trees, start = [], 0
        for bottom in bottoms:
            stop = start + len(bottom.parents)
            joined_trees.append(joined(bottom, trees[start:stop]))
            start = stop
        if len(chains) == 1:  # its functions and those of the stages on top are one loop
            return joined_trees, chains[0]
        return joined_trees, _Unfused(chains, [], [])

    def _numbered_source(self, paths: Sequence[_Path]) -> tuple[int, list[Tree], _Unfused]:
        """The number of the leaf's column, trees and chain of what makes elements."""
        number, nodes = self._number(), [path.bottom for path in paths]
        trees: list[Tree]
        if _kind(nodes[0]) == "numbers":
            trees = [_numbers(node, number, part) for part, node in enumerate(nodes)]  # type: ignore[arg-type]
        else:
            trees = [_source_tree(node, number, part) for part, node in enumerate(nodes)]
        return number, trees, _Unfused((number, self._source_of(nodes)), [], [])

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
            # A class may give itself another length; then there are records it must not reach.
            if all(node.length <= len(of) for node, of in zip(nodes, files, strict=True)):
                return grouped_sources.GroupedFiles(files, self._context.reads)
        make = self._single_source
        return grouped_sources.GroupedOthers(
            [lambda node=node: make(node) for node in nodes],  # type: ignore[misc]
            runs_user_code=any(map(_runs_user_code, nodes)),
        )

    def _single_source(self, node: MapNode) -> ElementSource[Indices]:
        if _kind(node) == "files":
            return element_sources.FileSource(_files_of(node), self._context.reads)  # type: ignore[arg-type]
        return _SOURCES[type(node)](node, self._program_of)


def _over(tree: Tree, stages: Sequence[Any], taps: Sequence[int | None], part: int) -> Tree:
    """The tree of `stages` over `tree`; functions that need a column of theirs have a tap."""
    taps_upwards = iter(taps)
    for node in reversed(stages):
        arrange = INDEX_STAGES.get(type(node))
        if arrange is not None:
            tree = arrange(node, tree)
            continue
        tap = next(taps_upwards)
        if tap is not None:
            tree = ("tap", tap, part, tree)
    return tree


def _kind(node: MapNode) -> str:
    """Equal for nodes that one leaf can serve, or one chain for what they join."""
    if isinstance(node, plan.Range):
        numbers = node.numbers
        fits = (
            -_LIMIT <= numbers.start < _LIMIT
            and -_LIMIT <= numbers.stop < _LIMIT
            and -_LIMIT <= numbers.step < _LIMIT
        )
        return "numbers" if fits else "long numbers"
    if isinstance(node, plan.Source):
        return _source_kind(node.source)
    if isinstance(node, plan.UserDefined):
        return _object_kind(node.dataset)
    if isinstance(node, plan.Mix | plan.Concatenate):
        return "several"
    return type(node).__name__


def _source_kind(source: Any) -> str:
    getitem = getattr(type(source), "__getitem__", None)
    if getitem is not None and getitem is getattr(type(source), "_getitem_of_files", None):
        return "files"
    return _object_kind(source)


def _object_kind(source: Any) -> str:
    """Whether `source` is asked for lists of elements, or for one at a time.

    A class that has another `__getitem__` than the one whose `__getitems__` it inherits means its
    own elements.
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
    files: RecordFiles = node.source._files  # noqa: SLF001 - that is what it has them for
    return files


def _numbers(node: plan.Range, number: int, part: int) -> Tree:
    numbers = node.numbers
    return ("numbers", number, part, numbers.start, numbers.step, node.length)


def _source_tree(node: MapNode, number: int, part: int) -> Tree:
    tree = ("leaf", number, part)
    wraps = isinstance(node, plan.Range) or (isinstance(node, plan.Source) and node.wraps)
    return ("wrap", node.length, tree) if wraps else tree


def _object_leaf(node: plan.Source | plan.UserDefined) -> ElementSource[Indices]:
    if _kind(node) == "blocks":
        return element_sources.BlockObjectSource(_object(node))
    return element_sources.ObjectSource(_object(node))


def _batch(node: plan.Batch, program_of: Callable[[Node], Evaluator]) -> ElementSource[Indices]:
    return element_sources.BatchSource(
        node, program_of(node.parent), random_access(node.parent).length
    )


# Every stage or source that makes elements by other means than a function of one element.
_SOURCES: dict[
    type[MapNode], Callable[[Any, Callable[[Node], Evaluator]], ElementSource[Indices]]
] = {
    plan.Source: lambda node, _: _object_leaf(node),
    plan.Range: lambda node, _: element_sources.BigRangeSource(node.numbers),
    plan.UserDefined: lambda node, _: _object_leaf(node),
    plan.Batch: _batch,
    plan.FlatMap: lambda node, of: element_sources.FlatMapSource(node, of(node.parent)),
    plan.Zip: lambda node, of: element_sources.ZipSource([of(parent) for parent in node.parents]),
    plan.Select: lambda node, of: element_sources.SelectSource(
        node.selection, [of(parent) for parent in node.parents]
    ),
}


def _runs_user_code(node: Node) -> bool:
    """Whether Python code of the user takes part in the plan that ends in `node`."""
    return any(map(_is_user_code, node.walk()))


def _is_user_code(node: Node) -> bool:
    if isinstance(node, plan.Source):
        return _source_kind(node.source) != "files"
    if isinstance(node, plan.Batch):
        return node.batch_fn is not None
    return isinstance(node, plan.Map | plan.FlatMap | plan.Select | plan.UserDefined)
