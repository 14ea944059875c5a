"""A pipeline drawn as an SVG image, and as an HTML page that needs no other file.

A plan is drawn as a tree: a stage that several others read is drawn once, and named where it is
read again. Each branch gets a rectangle of its own, above the stage that reads it, so that boxes
do not overlap and arrows do not cross, whatever the plan. A program for graphs in general, such as
Graphviz, would add nothing to that but other pictures where it is installed.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import os
import pathlib
import pprint
import re
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill import _atomic_file
from grainmill._dataset.views.titles import kind_of, name_and_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grainmill._stats.recorded import StageReport

_GAP: Final = 36  # between a box and those that it reads
_GAP_BESIDE: Final = 20
_LINE: Final = 16
CHAR: Final = 7.4  # a character of the widest fonts that "monospace" stands for, at 12 px
PADDING: Final = 10
MAX_CHARS: Final = 56
_MAX_SPEC_LINES: Final = 12
_MAX_ALIKE: Final = 4  # branches of a stage with the same stages
_numbers = itertools.count()


@dataclasses.dataclass
class Box:
    """A box of a drawing.

    Attributes:
        lines: The class of each line, and its text.
        is_stage: Whether it is a stage; otherwise it stands for others.
        inputs: The boxes above, whose elements it reads.
        place: The rectangle that it and all above have to themselves: its left, its bottom, its
            width.
    """

    lines: list[tuple[str, str]]
    is_stage: bool = True
    inputs: list[Box] = dataclasses.field(default_factory=list)
    place: tuple[int, int, int] = (0, 0, 0)

    @property
    def width(self) -> int:
        """Its width, an even number, so that the middles of boxes meet."""
        return 2 * round(max(len(text) for _, text in self.lines) * CHAR / 2) + 2 * PADDING

    @property
    def height(self) -> int:
        """Its height."""
        return len(self.lines) * _LINE + 2 * PADDING

    @property
    def x(self) -> int:
        """Its left side."""
        left, _, width = self.place
        return left + (width - self.width) // 2

    @property
    def y(self) -> int:
        """Its upper side."""
        return self.place[1] - self.height

    @property
    def middle(self) -> int:
        """The middle between its left and its right side."""
        return self.x + self.width // 2


class Layout(NamedTuple):
    """Where everything is.

    Attributes:
        boxes: The boxes, the output first.
        arrows: The corners of each arrow, from its beginning.
        width: The width of the drawing.
        height: Its height.
    """

    boxes: list[Box]
    arrows: list[list[tuple[int, int]]]
    width: int
    height: int


def layout(stages: Sequence[StageReport], specs: Mapping[int, Any]) -> Layout:
    """The pipeline with its sources on top, and the output at the bottom."""
    boxes = _boxes(stages, specs)
    widths: dict[int, int] = {}
    heights: dict[int, int] = {}
    for box in reversed(boxes):  # those above it come before it
        widths[id(box)] = max(box.width, _beside(box, widths))
        heights[id(box)] = box.height + max(
            (heights[id(each)] + _GAP for each in box.inputs), default=0
        )
    width, height = widths[id(boxes[0])] + 2 * PADDING, heights[id(boxes[0])] + 2 * PADDING
    boxes[0].place = PADDING, height - PADDING, widths[id(boxes[0])]
    arrows = []
    for box in boxes:
        left = box.middle - _beside(box, widths) // 2
        for above in box.inputs:
            above.place = left, box.y - _GAP, widths[id(above)]
            left += widths[id(above)] + _GAP_BESIDE
            turn = box.y - _GAP // 2
            corners = [(above.middle, box.y - _GAP), (above.middle, turn), (box.middle, turn)]
            arrows.append([*corners, (box.middle, box.y)])
    return Layout(boxes, arrows, width, height)


def _beside(box: Box, widths: Mapping[int, int]) -> int:
    """The width of the branches above a box, beside each other."""
    all_gaps = max(0, len(box.inputs) - 1) * _GAP_BESIDE
    return sum(widths[id(each)] for each in box.inputs) + all_gaps


def _boxes(stages: Sequence[StageReport], specs: Mapping[int, Any]) -> list[Box]:
    """The boxes, the output first, and each before those that it reads."""
    boxes: list[Box] = []
    drawn: dict[int, Box] = {}
    pending: list[tuple[int | str, list[Box]]] = [(0, [])]  # with the boxes beside
    while pending:
        found, beside = pending.pop()
        if isinstance(found, str):
            box = Box([("note", found)], is_stage=False)
        elif found in drawn:
            mark = ("note", f"stage {found}")
            drawn[found].lines += [] if mark in drawn[found].lines else [mark]
            name = drawn[found].lines[0][1]
            box = Box([("note", f"{name}, stage {found}, again")], is_stage=False)
        else:
            box = drawn[found] = Box(_lines(stages[found], specs.get(found)))
            pending += [(each, box.inputs) for each in reversed(_inputs(stages, found))]
        boxes.append(box)
        beside.append(box)
    return boxes


def _inputs(stages: Sequence[StageReport], number: int) -> list[int | str]:
    """The stages that one reads; of many with the same stages behind them, the first and a note."""
    inputs = stages[number].inputs
    kinds = [kind_of(stages[each].node) for each in inputs]
    counts, seen = Counter(kinds), Counter[Any]()
    shown: list[int | str] = []
    for each, kind in zip(inputs, kinds, strict=True):
        left = counts[kind] - seen[kind]
        seen[kind] += 1
        if seen[kind] < _MAX_ALIKE or counts[kind] == _MAX_ALIKE:
            shown.append(each)
        elif seen[kind] == _MAX_ALIKE:
            shown.append(f"and {left:,} more with the same stages")
    return shown


def _lines(stage: StageReport, spec: Any) -> list[tuple[str, str]]:
    name, arguments = name_and_arguments(stage.node)
    lines = [("name", name)]
    lines += [("argument", line) for each in arguments for line in wrapped(each)]
    if spec is not None:
        of_spec = pprint.pformat(spec, width=MAX_CHARS).replace("'", "").splitlines()
        of_spec = [line for each in of_spec for line in wrapped(each)]
        shown = of_spec[:_MAX_SPEC_LINES] + ["..."] * (len(of_spec) > _MAX_SPEC_LINES)
        lines += [("spec", line) for line in shown]
    return lines


def wrapped(text: str) -> list[str]:
    """The lines of a text; no word is broken, however long it is."""
    return textwrap.wrap(
        text,
        MAX_CHARS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def svg_text(stages: Sequence[StageReport], specs: Mapping[int, Any]) -> str:
    """The pipeline as SVG."""
    boxes, arrows, width, height = layout(stages, specs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        "<title>Pipeline</title>",
        "<style>rect{fill:#f6f8fa;stroke:#57606a}text{font:12px monospace;fill:#24292f;"
        "white-space:pre}.name{font-weight:bold}.spec{fill:#0a6e5a}.note{font-style:italic}"
        ".other{stroke-dasharray:4}path{stroke:#57606a;fill:none}"
        "@media(prefers-color-scheme:dark){rect{fill:#161b22;stroke:#8b949e}"
        "text{fill:#e6edf3}.spec{fill:#4ec9b0}path{stroke:#8b949e}}</style>",
    ]
    for arrow in arrows:
        corners = " L".join(f"{x} {y}" for x, y in arrow)
        parts.append(f'<path d="M{corners} m-5 -8 l5 8 l5 -8"/>')
    for box in boxes:
        kind = "" if box.is_stage else ' class="other"'
        parts.append(
            f'<rect{kind} x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" '
            'rx="6"/>'
        )
        for number, (kind, line) in enumerate(box.lines, 1):
            parts.append(
                f'<text class="{kind}" x="{box.x + PADDING}" y="{box.y + number * _LINE + 4}">'
                f"{html.escape(line)}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])


def html_text(title: str, svg: str) -> str:
    """A page with the drawing, without reference to anything else."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n"
        "<style>body{font-family:sans-serif;margin:2em;color-scheme:light dark}</style>\n"
        f"</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{svg}</body>\n</html>\n"
    )


def write_drawing(
    directory: str, stages: Sequence[StageReport], specs: Mapping[int, Any]
) -> list[pathlib.Path]:
    """Writes the drawing to `directory`, which is created; returns the paths of both files.

    Raises:
        OSError: They cannot be written.
    """
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    kind = re.sub(r"\W.*", "", stages[0].name)
    name = f"{kind}-{os.getpid()}-{next(_numbers)}"
    svg = svg_text(stages, specs)
    paths = []
    for suffix, text in (("svg", svg), ("html", html_text(f"Pipeline {name}", svg))):
        path = folder / f"{name}.{suffix}"
        _atomic_file.write(path, text.encode())
        paths.append(path)
    return paths
