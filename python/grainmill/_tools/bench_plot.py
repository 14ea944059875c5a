"""Draws the throughput of a pipeline over time as an SVG file, with no library."""

from __future__ import annotations

import math
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 56, 44


def svg(title: str, found: dict[str, Any]) -> str:
    """The plot of what `bench` has measured."""
    rates = found["rates"]
    end = max((at for at, _ in rates), default=1.0) or 1.0
    top = _nice(max((rate for _, rate in rates), default=1.0) or 1.0)

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / end

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / top

    cores = "" if found["cores"] is None else f"{found['cores']:.2f} cores, "
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>Throughput of {escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="40" fill="#555">{found["elements_per_s"]:,.1f} elements/s, '
        f"{cores}first element after {found['first_s']:.3f} s</text>",
    ]
    for step in range(5):
        rate = top * step / 4
        parts += [
            f'<line x1="{_LEFT}" y1="{y(rate):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(rate):.1f}" '
            'stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,.6g}</text>',
        ]
    for step in range(6):
        at = end * step / 5
        parts.append(
            f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{at:.3g} s</text>"
        )
    mean = found["elements_per_s"]
    if mean:
        parts.append(
            f'<line x1="{_LEFT}" y1="{y(mean):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(mean):.1f}" '
            'stroke="#b40" stroke-dasharray="6 4"/>'
        )
    points, before = [], 0.0
    for at, rate in rates:  # steps: each rate holds since the time before
        points += [f"{x(before):.1f},{y(rate):.1f}", f"{x(at):.1f},{y(rate):.1f}"]
        before = at
    parts += [
        f'<polyline fill="none" stroke="#077" stroke-width="1.5" points="{" ".join(points)}"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _nice(value: float) -> float:
    """The next number of the form 1, 2, 4 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 4, 8, 10) if power * factor >= value)
