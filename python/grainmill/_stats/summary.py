"""The execution summary as a table of text, in the form of Grain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._stats.recorded import StageReport
    from grainmill._stats.report import Report

_COLUMNS: Final = (
    "id",
    "name",
    "inputs",
    "percent wait time",
    "total processing time",
    "min processing time",
    "max processing time",
    "avg processing time",
    "num produced elements",
    "memory usage",
)
_MAX_WIDTH: Final = 30
_MAX_LINES: Final = 5
_NEXT_UNIT: Final = 1000
_KIB: Final = 1024
_NOTE: Final = (
    "NOTE: Before analyzing the `total_processing_time` for a node, please check the `percent wait "
    "time` column: it says which share of the time that the consumer waits is spent in the node. "
    "Times are added up over threads and worker processes."
)
_SOURCE_WARNING: Final = (
    "WARNING: Your source is likely the bottleneck. Please ensure if you have enough spindle quota "
    "or if your data is co-located with the computation. "
)


def summary_text(report: Report) -> str:
    """The message with the table, and a warning where the source is the slowest stage."""
    stages = sorted(report.stages, key=lambda stage: stage.wait_share, reverse=True)
    rows = [_row(stage) for stage in stages]
    text = f"Grain Dataset Execution Summary:\n\n{_NOTE}\n\n{table([_COLUMNS, *rows])}"
    slowest = max(report.stages, key=lambda stage: stage.wait_share, default=None)
    if slowest is not None and "SourceMapDataset" in slowest.name:
        text += f"\n{_SOURCE_WARNING}"
    return text


def _row(stage: StageReport) -> tuple[str, ...]:
    meter = stage.meter
    elements = round(meter.elements)
    is_timed = meter.total_s > 0
    has_extremes = is_timed and meter.max_s > 0
    total_ns = round(meter.total_s * 1e9)
    memory = stage.ahead * meter.element_bytes if stage.is_prefetch else 0.0
    return (
        str(stage.number),
        stage.name,
        str(stage.inputs),
        "N/A" if stage.is_prefetch else f"{stage.wait_share:.2%}",
        duration(total_ns) if is_timed else "N/A",
        duration(round(meter.min_s * 1e9)) if has_extremes else "N/A",
        duration(round(meter.max_s * 1e9)) if has_extremes else "N/A",
        duration(total_ns // elements) if is_timed and elements else "N/A",
        str(elements),
        size(memory),
    )


def duration(nanoseconds: int) -> str:
    """A duration with its unit: `999ns`, `1.00us`, `1.23ms`, `1.50s`."""
    if nanoseconds < _NEXT_UNIT:
        return f"{nanoseconds}ns"
    for unit, factor in (("us", 10**3), ("ms", 10**6)):
        if nanoseconds < factor * _NEXT_UNIT:
            return f"{nanoseconds / factor:.2f}{unit}"
    return f"{nanoseconds / 10**9:.2f}s"


def size(byte_len: float) -> str:
    """A number of bytes with its unit."""
    if byte_len < _KIB:
        return f"{int(byte_len)} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        byte_len /= _KIB
        if byte_len < _KIB:
            return f"{byte_len:.2f} {unit}"
    return f"{byte_len / _KIB:.2f} TiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text; the first is the header. Long cells are wrapped, and cut after five lines."""
    widths = [min(_MAX_WIDTH, max(map(len, column))) for column in zip(*rows, strict=True)]
    rule = "|" + "-" * (sum(width + 3 for width in widths) - 1) + "|"
    lines = [rule]
    for row in rows:
        cells = [_wrapped(cell) for cell in row]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
            lines.append(f"| {' | '.join(padded)} |")
        lines.append(rule)
    return "\n".join(lines)


def _wrapped(cell: str) -> list[str]:
    # A cell of exactly the maximum width gets an empty line, as in Grain.
    stop = len(cell) + 1 if len(cell) >= _MAX_WIDTH else 1
    starts = range(0, max(1, stop), _MAX_WIDTH)
    return [cell[start : start + _MAX_WIDTH] for start in starts][:_MAX_LINES]
