"""Pipelines shown as text and HTML: their stages from source to end, and what is known of each."""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill import _native
from grainmill._dataset.iterator import iterator_over
from grainmill._dataset.views.stage_facts import joined_length, place_of, runs_in, state_of
from grainmill._dataset.views.titles import kind_of, name_of, several, spec_text, title
from grainmill._dataset.with_read_options import with_read_options
from grainmill._iterators.read import read
from grainmill._plan.node import MapNode, Node
from grainmill._plan.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Longer chains are shown without their middle, and of more parts than that only the first is.
_MAX_STAGES = 24
_MAX_PARTS = 1000
_MAX_KINDS = 8
_MAX_DEPTH = 8


class Stage(NamedTuple):
    """A line of an outline.

    Attributes:
        depth: How deep it is indented: in parts of a stage that joins several pipelines.
        text: What is shown.
        node: The stage, or `None` if the line stands for something else.
    """

    depth: int
    text: str
    node: Node | None


def outline(node: Node) -> list[Stage]:
    """The stages of the plan that ends in `node`, from its source on."""
    return list(_Outline().chain(node, 0))


def shown(node: Node, kind: str) -> str:
    """The stages as text, a line each; `kind` names the dataset."""
    stages = outline(node)
    if len(stages) == 1:
        return f"{kind}: {stages[0].text}"
    lines = [f"{'  ' * (stage.depth + 1)}{stage.text}" for stage in stages]
    return "\n".join([f"{kind}, from its source to its end:", *lines])


def drawn(node: Node, kind: str) -> str:
    """The stages as HTML, a box each."""
    return _page(kind, [(stage, ()) for stage in outline(node)])


class Description:
    """What is known of a pipeline without running it, as text; in a notebook, as a drawing.

    `str` returns the text. One comes from the method `describe` of a dataset or a `DataLoader`.

    Example:
        >>> print(grain.MapDataset.range(10).batch(4).describe())
        MapDataset
        1. RangeMapDataset(start=0, stop=10, step=1)
             10 elements, random access; computed in Rust, on the caller's thread
             elements: int64[]
        2. BatchMapDataset(batch_size=4, drop_remainder=False)
             3 elements, random access; computed in Rust, on the caller's thread
             elements: int64[?]
        State of an iterator: the next index.
        Engine: ...
    """

    def __init__(self, kind: str, stages: list[tuple[Stage, tuple[str, ...]]], state: str) -> None:
        self._kind = kind
        self._stages = stages
        self._state = state

    def __str__(self) -> str:
        lines = [self._kind]
        number = 0
        for stage, facts in self._stages:
            indent = "  " * stage.depth
            number += stage.node is not None
            title = f"{number}. {stage.text}" if stage.node is not None else f"   {stage.text}"
            lines += [f"{indent}{title}", *(f"{indent}     {fact}" for fact in facts)]
        return "\n".join([*lines, self._state, _engine()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _page(self._kind, self._stages, f"{self._state} {_engine()}")


def described(node: Node, kind: str, *, read_elements: bool) -> Description:
    """What is known of the plan that ends in `node`; see `Shown.describe`."""
    made = _Outline()
    stages = list(made.chain(node, 0))
    lengths, places = joined_length(node), place_of(node)
    specs = _Specs(read_elements=read_elements)
    specs.infer(node)
    for interleave, datasets in made.datasets_of.items():
        for dataset in datasets:
            lengths |= joined_length(dataset)
            places = {**place_of(dataset, places.get(interleave, "")), **places}
            specs.infer(dataset)
    described_stages: list[tuple[Stage, tuple[str, ...]]] = []
    states: list[str] = []
    number = 0
    for stage in stages:
        facts: tuple[str, ...] = ()
        if stage.node is not None:
            number += 1
            key = id(stage.node)
            access = "random access" if isinstance(stage.node, MapNode) else "sequential"
            where = ", ".join(filter(None, (runs_in(stage.node), places[key])))
            facts = (
                f"{lengths[key]} elements, {access}; computed in {where}",
                f"elements: {spec_text(specs.of(stage.node))}",
            )
            if state_of(stage.node):
                states.append(f"{state_of(stage.node)} (stage {number})")
        described_stages.append((stage, facts))
    if isinstance(node, MapNode):
        return Description(kind, described_stages, "State of an iterator: the next index.")
    seen = {id(stage.node) for stage in stages}
    hidden = sum(id(step) not in seen and bool(state_of(step)) for step in node.walk())
    if hidden:
        states.append(f"the positions of {several(hidden, 'stage')} not shown")
    return Description(kind, described_stages, f"State: {'; '.join(states) or 'nothing'}.")


def _engine() -> str:
    """How the engine was compiled, for who is about to measure it."""
    facts = [f"profile `{_native.profile}`"]
    if _native.profile != "release":
        facts.append("slower than that of a wheel")
    if missing := sorted({"buckets", "images", "parquet"} - set(_native.features)):
        facts.append(f"without {', '.join(missing)}")
    return f"Engine: {', '.join(facts)}."


_UNKNOWN = LookupError("not known before one is computed")


class _Specs:
    """The element spec of each node of a plan, or the exception that says why it is unknown."""

    def __init__(self, *, read_elements: bool) -> None:
        self._read_elements = read_elements
        self._known: dict[int, Any] = {}

    def infer(self, node: Node) -> None:
        """Infers the specs of all nodes of a plan."""
        for step in node.walk_up():
            if id(step) not in self._known:
                self._known[id(step)] = self._inferred(step)

    def _inferred(self, node: Node) -> Any:
        def of_parent(parent: Any) -> Any:
            spec = self._known.get(id(parent), _UNKNOWN)
            if isinstance(spec, BaseException):
                raise spec
            return spec

        try:
            return node.spec(of_parent)
        except Exception:  # of an object of the user, too
            return _UNKNOWN

    def of(self, node: Node) -> Any:
        """The spec of `node`; an element of it if its elements may be read."""
        known = self._known.get(id(node))
        if not self._read_elements or not isinstance(known, BaseException):
            return known
        if node.keeps_spec and len(node.parents) == 1:
            return self.of(node.parents[0])
        try:
            self._known[id(node)] = _first_element(node)
        except Exception as failure:  # a user's function may raise anything
            return ValueError(f"none, as {type(failure).__name__} was raised: {failure}")
        return self._known[id(node)]


def _first_element(node: Node) -> Any:
    options = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    if isinstance(node, MapNode):
        node = read(node, options)
    with iterator_over(with_read_options(node, options, in_caller=True)) as iterator:
        for element in iterator:
            return element
    raise LookupError("there are no elements")


class _Outline:
    """Lists stages.

    Attributes:
        datasets_of: For each interleave, by its `id`, the plans of its datasets that are listed.
    """

    def __init__(self) -> None:
        self.datasets_of: dict[int, list[Node]] = {}

    def chain(self, node: Node, depth: int) -> Iterator[Stage]:
        """The stages of a plan; before a stage that joins several plans, these."""
        chain = [node]
        while len(chain[-1].parents) == 1:
            chain.append(chain[-1].parents[0])
        first = chain[-1]
        if depth >= _MAX_DEPTH:
            yield Stage(depth, f"... {several(len(chain), 'stage')} ...", None)
            return
        if first.parents:
            yield from self._parts(first.parents, depth)
        elif first.opens is not None:
            yield from self._datasets(first, depth)
        chain.reverse()
        end = len(chain) if len(chain) <= _MAX_STAGES else _MAX_STAGES // 2
        for step in chain[:end]:
            yield Stage(depth, title(step), step)
        if end < len(chain):
            left_out = chain[end:-end]
            counts = _counted(left_out)
            yield Stage(depth, f"... {several(len(left_out), 'more stage')}: {counts} ...", None)
            for step in chain[-end:]:
                yield Stage(depth, title(step), step)

    def _parts(self, parents: Sequence[Node], depth: int) -> Iterator[Stage]:
        """The parts of a stage that joins them, one of each kind."""
        groups: dict[Any, list[int]] = {}
        for number, parent in enumerate(parents[:_MAX_PARTS]):
            groups.setdefault(kind_of(parent), []).append(number)
        for numbers in list(groups.values())[:_MAX_KINDS]:
            others = len(numbers) - 1
            alike = f", and {others} more with the same stages" if others else ""
            yield Stage(depth + 1, f"part {numbers[0]}{alike}:", None)
            yield from self.chain(parents[numbers[0]], depth + 2)
        left_out = len(groups) - _MAX_KINDS
        if left_out > 0:
            text = f"... parts with {several(left_out, 'other list')} of stages ..."
            yield Stage(depth + 1, text, None)
        if len(parents) > _MAX_PARTS:
            yield Stage(depth + 1, f"... {len(parents) - _MAX_PARTS:,} more parts ...", None)

    def _datasets(self, node: Node, depth: int) -> Iterator[Stage]:
        """The datasets of an interleave; those that a `MapDataset` makes are not opened."""
        make_node = getattr(node.opens, "_plan_node", None)
        if make_node is not None:
            self.datasets_of[id(node)] = [make_node()]
            yield Stage(depth + 1, "each dataset is an element of:", None)
            yield from self.chain(self.datasets_of[id(node)][0], depth + 2)
        elif isinstance(node.opens, list | tuple):
            makers = [getattr(ds, "_plan_node", None) for ds in node.opens[:_MAX_PARTS]]
            plans = [make() for make in makers if make is not None]
            self.datasets_of[id(node)] = plans
            yield from self._parts(plans, depth)


def _counted(nodes: list[Node]) -> str:
    kinds = Counter(name_of(node) for node in nodes).most_common(_MAX_KINDS)
    return ", ".join(f"{count} {name}" for name, count in kinds)


_BOX = (
    "border:1px solid #8886;border-radius:6px;padding:4px 10px;margin:2px 0;display:inline-block;"
    "font-family:monospace;font-size:12px;text-align:left"
)


def _page(kind: str, stages: list[tuple[Stage, tuple[str, ...]]], state: str = "") -> str:
    """Boxes from the source on, with arrows between stages that follow each other."""
    rows = [f"<div style='font-weight:600;margin-bottom:4px'>{html.escape(kind)}</div>"]
    before: Stage | None = None
    for stage, facts in stages:
        margin = f"margin-left:{28 * stage.depth}px"
        if before is not None and before.node is not None and stage.node is not None:
            rows.append(f"<div style='{margin};padding-left:14px;opacity:.6'>&#8595;</div>")
        lines = [html.escape(line) for line in (stage.text, *facts)]
        first = f"<b>{lines[0]}</b>" if facts else lines[0]
        rest = "".join(f"<div style='opacity:.75'>{line}</div>" for line in lines[1:])
        box = _BOX if stage.node is not None else "font-size:12px;opacity:.75"
        rows.append(f"<div style='{margin}'><div style='{box}'>{first}{rest}</div></div>")
        before = stage
    if state:
        rows.append(f"<div style='font-size:12px;margin-top:4px'>{html.escape(state)}</div>")
    return f"<div>{''.join(rows)}</div>"
