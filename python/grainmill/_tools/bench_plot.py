"""Draws what `bench` has measured as an SVG image, and as an HTML page, with no library."""

from __future__ import annotations

import itertools
import math
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WIDTH, _PLOT_HEIGHT, _HEAD = 720, 190, 34
_LEFT, _RIGHT, _BOTTOM, _GAP = 92, 20, 24, 34
_LINE: Final = 18
_MIB: Final = 1 << 20
_COLOURS: Final = ("#077", "#b40", "#639", "#470", "#a05")


class _Axis(NamedTuple):
    """An axis from 0 to its last tick.

    Attributes:
        ticks: The numbers that it shows.
        text: How it shows one.
    """

    ticks: list[float]
    text: Callable[[float], str]

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        return value / self.ticks[-1]


def svg(measured: Sequence[dict[str, Any]]) -> str:
    """The throughput and the memory of pipelines over time."""
    end = max((at for found in measured for at, _ in found["rates"]), default=1.0) or 1.0
    names = ", ".join(found["pipeline"] for found in measured)
    times = _Axis(ticks(end), "{:g} s".format)
    rates = [[(0.0, 0.0), *found["rates"]] for found in measured]
    memory = [[(at, each / _MIB) for at, each in found["memory"]] for found in measured]
    top = _HEAD + _LINE * len(measured)
    height = top + 2 * (_PLOT_HEIGHT + _GAP) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>Throughput of {escape(names)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, found in enumerate(measured):
        cores = "" if found["cores"] is None else f"{found['cores']:.2f} cores, "
        parts.append(
            f'<text x="{_LEFT}" y="{_LINE * (number + 1)}" fill="{_colour(number)}">'
            f"{escape(found['pipeline'])}: {found['elements_per_s']:,.1f} elements/s, {cores}"
            f"first element after {found['first_s']:.3f} s</text>"
        )
    parts += _plot("elements/s", top, times, _Axis(_up_to(rates), "{:,.6g}".format), rates)
    below = top + _PLOT_HEIGHT + _GAP
    parts += _plot(
        "memory", below, times, _Axis(_up_to(memory), "{:,.6g} MiB".format), memory, steps=False
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def html(measured: Sequence[dict[str, Any]], rows: Sequence[tuple[str, ...]]) -> str:
    """A page with the drawing and a table, without reference to anything else."""
    head = "".join(f"<th>{escape(found['pipeline'])}</th>" for found in measured)
    lines = [
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(each)}</td>' for each in values)}</tr>"
        for name, *values in rows
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<title>grainmill bench</title>\n'
        "<style>body{font-family:sans-serif;margin:2em;max-width:60em}svg{max-width:100%}"
        "th{text-align:left}th,td{padding:.2em 1em .2em 0;vertical-align:top}</style>\n"
        f"</head>\n<body>\n<table>\n<tr><th></th>{head}</tr>\n"
        + "\n".join(lines)
        + f"\n</table>\n{svg(measured)}</body>\n</html>\n"
    )


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end` or a little beyond, 4 to 7 of them."""
    power = 10.0 ** math.floor(math.log10(end))
    step = next(
        power * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5) if end / (power * factor) <= 6
    )
    count = math.ceil(round(end / step, 9))
    return [round(number * step, 12) for number in range(count + 1)]


def _up_to(series: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    return ticks(max((value for points in series for _, value in points), default=1.0) or 1.0)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _plot(
    title: str,
    top: int,
    times: _Axis,
    values: _Axis,
    series: Sequence[Sequence[tuple[float, float]]],
    *,
    steps: bool = True,
) -> list[str]:
    """The lines of several series of times and values; `steps`: values since the time before."""

    def x(at: float) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * times.share(at):.1f}"

    def y(value: float) -> str:
        return f"{top + _PLOT_HEIGHT * (1 - values.share(value)):.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 6}" fill="#555">{title}</text>']
    for value in values.ticks:
        parts += [
            f'<path d="M{_LEFT} {y(value)}H{_WIDTH - _RIGHT}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{y(value)}" dy="4" text-anchor="end">'
            f"{values.text(value)}</text>",
        ]
    for at in times.ticks:
        parts.append(
            f'<text x="{x(at)}" y="{top + _PLOT_HEIGHT + 16}" text-anchor="middle">'
            f"{times.text(at)}</text>"
        )
    for number, points in enumerate(series):
        places = [f"{x(at)},{y(value)}" for at, value in points]
        if steps:
            places = [
                place
                for (before, _), (at, value) in itertools.pairwise(points)
                for place in (f"{x(before)},{y(value)}", f"{x(at)},{y(value)}")
            ]
        parts.append(
            f'<polyline fill="none" stroke="{_colour(number)}" stroke-width="1.5" '
            f'points="{" ".join(places)}"/>'
        )
    return parts
