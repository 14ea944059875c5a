"""A pipeline drawn as an SVG image, and as an HTML page that needs no other file."""

from __future__ import annotations

import html
import itertools
import os
import pathlib
import pprint
import re
import textwrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill import _atomic_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grainmill._stats.recorded import StageReport

_BOX_WIDTH: Final = 420
_GAP: Final = 36
_LINE: Final = 16
_PADDING: Final = 10
_MAX_CHARS: Final = 56
_MAX_SPEC_LINES: Final = 12
_numbers = itertools.count()


class _Box(NamedTuple):
    x: int
    y: int
    height: int
    lines: list[tuple[str, str]]  # the class of each line, and its text

    @property
    def middle(self) -> int:
        return self.x + _BOX_WIDTH // 2


def svg_text(stages: Sequence[StageReport], specs: Mapping[int, Any]) -> str:
    """The pipeline as SVG: sources on top, the output at the bottom."""
    rows = _rows(stages)
    boxes: dict[int, _Box] = {}
    y = _PADDING
    for row in rows:
        contents = [_lines(stages[number], specs.get(number)) for number in row]
        height = max(len(lines) for lines in contents) * _LINE + 2 * _PADDING
        for place, (number, lines) in enumerate(zip(row, contents, strict=True)):
            own_height = len(lines) * _LINE + 2 * _PADDING
            boxes[number] = _Box(_PADDING + place * (_BOX_WIDTH + _GAP), y, own_height, lines)
        y += height + _GAP
    width = 2 * _PADDING + max(map(len, rows)) * (_BOX_WIDTH + _GAP) - _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y - _GAP + _PADDING}" '
        f'viewBox="0 0 {width} {y - _GAP + _PADDING}" role="img">',
        "<title>Pipeline</title>",
        "<style>rect{fill:#f6f8fa;stroke:#57606a}text{font:12px monospace;fill:#24292f}"
        ".name{font-weight:bold}path{stroke:#57606a;fill:none}"
        "@media(prefers-color-scheme:dark){rect{fill:#161b22;stroke:#8b949e}"
        "text{fill:#e6edf3}path{stroke:#8b949e}}</style>",
    ]
    for stage in stages:
        to = boxes[stage.number]
        for number in stage.inputs:
            begin = boxes[number]
            bottom = begin.y + begin.height
            parts.append(
                f'<path d="M{begin.middle} {bottom} L{to.middle} {to.y} m-5 -8 l5 8 l5 -8"/>'
            )
    for box in boxes.values():
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{_BOX_WIDTH}" height="{box.height}" rx="6"/>'
        )
        for number, (kind, line) in enumerate(box.lines, 1):
            parts.append(
                f'<text class="{kind}" x="{box.x + _PADDING}" y="{box.y + number * _LINE + 4}">'
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


def _rows(stages: Sequence[StageReport]) -> list[list[int]]:
    """The numbers of the stages by their distance from the output, the farthest first."""
    rows: dict[int, list[int]] = {}

    def place(number: int, distance: int) -> None:
        rows.setdefault(distance, []).append(number)
        for parent in stages[number].inputs:
            place(parent, distance + 1)

    place(0, 0)
    return [rows[distance] for distance in sorted(rows, reverse=True)]


def _wrapped(text: str) -> list[str]:
    """The lines of a text; words are broken only where one is longer than a line."""
    return textwrap.wrap(text, _MAX_CHARS, break_on_hyphens=False)


def _lines(stage: StageReport, spec: Any) -> list[tuple[str, str]]:
    lines = [("name", part) for part in _wrapped(stage.name)]
    if spec is not None:
        of_spec = pprint.pformat(spec, width=_MAX_CHARS).splitlines()
        shown = of_spec[:_MAX_SPEC_LINES] + ["..."] * (len(of_spec) > _MAX_SPEC_LINES)
        lines += [("spec", line[:_MAX_CHARS]) for line in shown]
    return lines
