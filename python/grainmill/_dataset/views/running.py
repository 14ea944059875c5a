"""What a running iterator shows of itself: a line, and a table with bars, for people."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

from grainmill._dataset.views.stage_facts import place_of, runs_in
from grainmill._dataset.views.statistics import report_on
from grainmill._dataset.views.titles import title
from grainmill._interrupts import suppressed
from grainmill._stats.summary import size
from grainmill._stats.verdict import verdict_on

_BAR_PX = 120
HEADS = ("stage", "time", "waiting", "elements", "bytes", "runs in")


class Row(NamedTuple):
    """A stage in a table.

    Attributes:
        name: The stage, with its parameters.
        time_s: Its own seconds, of all threads and workers.
        time_share: That as a share of the time of all stages.
        wait_share: Its share of the time in which the consumer waits.
        elements: How many elements it returned.
        byte_len: Their bytes; `None` if that is unknown.
        where: What computes them.
    """

    name: str
    time_s: float
    time_share: float
    wait_share: float
    elements: int
    byte_len: float | None
    where: str

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """What is shown beside the name."""
        byte_len = "" if self.byte_len is None else size(round(self.byte_len))
        times = f"{self.time_s:.2f} s"
        return times, f"{self.wait_share:.0%}", f"{self.elements:,}", byte_len, self.where


class Table(NamedTuple):
    """What is known of a running pipeline.

    Attributes:
        line: What it did so far.
        verdict: What holds it back.
        rows: Its stages, from the source to the end.
    """

    line: str
    verdict: str
    rows: list[Row]


def line_of(iterator: Any, name: str) -> str:
    """Where an iterator over a plan is, and how fast it was, as one line after its `name`."""
    count, elapsed_s = iterator._num_delivered, iterator._activity.elapsed_s  # noqa: SLF001
    facts = [f"{count:,} element{'' if count == 1 else 's'}"]
    facts += [f"{count / elapsed_s:,.1f}/s"] if count and elapsed_s else []
    with suppressed():  # a user's iterator may have no state
        state = iterator._delivered_state()  # noqa: SLF001
        if isinstance(state, dict) and set(state) == {"next_index"}:
            facts.append(f"next index {state['next_index']:,}")
    return f"<{' '.join(name.split())}: {', '.join(facts)}>"


def table_of(iterator: Any, name: str) -> Table | None:
    """The stages of a running iterator; `None` if it has no plan."""
    if iterator._node is None:  # noqa: SLF001
        return None
    report, places = report_on(iterator), place_of(iterator._node)  # noqa: SLF001
    all_s = sum(stage.cost_s for stage in report.stages)
    rows = []
    for stage in reversed(report.stages):
        meter, node = stage.meter, stage.node
        where = [runs_in(node), places.get(id(node), "")]
        rows.append(
            Row(
                title(node),
                stage.cost_s,
                stage.cost_s / all_s if all_s else 0.0,
                stage.wait_share,
                round(meter.elements),
                meter.element_bytes * meter.elements if meter.element_bytes else None,
                ", ".join(filter(None, where)),
            )
        )
    return Table(line_of(iterator, name), verdict_on(report, has_consumer=True).text, rows)


def html_of(table: Table) -> str:
    """The table with a bar for the time of each stage."""
    heads = "".join(f"<th style='text-align:left'>{head}</th>" for head in HEADS)
    rows = []
    for row in table.rows:
        bar = (
            f"<div style='width:{_BAR_PX}px;border:1px solid #8886'><div style='height:10px;"
            f"width:{row.time_share:.1%};background:#0a8'></div></div>"
        )
        times, *others = [html.escape(text) for text in row.texts]
        cells = [html.escape(row.name), f"{bar}{times}", *others]
        rows.append("".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells))
    return (
        f"<div><div><b>{html.escape(table.verdict)}</b></div>"
        f"<div style='opacity:.75'>{html.escape(table.line)}</div>"
        f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table></div>"
    )
