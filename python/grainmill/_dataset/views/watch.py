"""The table of a running iterator, shown while it runs."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import IO, TYPE_CHECKING, Any, TypeVar

from grainmill._dataset.views.progress import ProgressIterator, progress_text, total_of
from grainmill._dataset.views.running import HEADS, Table, html_of
from grainmill._dataset.views.running_reprs import ShownRunning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T_co = TypeVar("T_co", covariant=True)

_BAR_LEN = 12
_REFRESH_S = 0.5


class WatchIterator(ProgressIterator[T_co]):
    """An iterator whose table of stages is shown while it runs; see `watch`."""

    def __init__(self, iterator: Iterator[T_co], total: int | None, file: IO[str]) -> None:
        super().__init__(iterator, total, file)
        self._live = None if self._columns is None else _rich_live(file)
        if self._columns is not None or self._display is not None:
            self._interval_s = _REFRESH_S

    def _show(self, now_s: float) -> None:
        iterator = self._iterator
        table = iterator._running_table() if isinstance(iterator, ShownRunning) else None  # noqa: SLF001
        if table is None:  # nothing is known of its stages
            super()._show(now_s)
            return
        if self._display is not None:
            self._display.update({"text/html": html_of(table)}, raw=True)
            return
        if self._live is not None:
            self._live.update(_rich_table(table), refresh=True)
            return
        text = progress_text(
            self._count, self._total, now_s - self._started_s, self._wait_s, first=self._first
        )
        self._file.write(f"{text} {table.verdict}\n")
        self._file.flush()

    def _end(self) -> None:
        """Shows the final state."""
        if not self._ended:
            self._ended = True
            self._show(time.perf_counter())
            if self._live is not None:
                self._live.stop()


def watch(
    iterable: Iterable[T_co], *, total: int | None = None, file: IO[str] | None = None
) -> WatchIterator[T_co]:
    """Returns an iterator over `iterable` that shows the table of its stages while it runs.

    It has for each stage its time, its share of the loop's waiting, its elements and bytes, and
    where it runs, with the verdict on top; a notebook shows the same for an iterator itself. In a
    notebook it is displayed by IPython, and in a terminal by the package `rich` if that is
    installed, twice a second. Otherwise there is a line with the verdict, in a file or a pipe
    every ten seconds and at the end.

    Args:
        iterable: As in `progress`.
        total: As in `progress`.
        file: Where to write outside notebooks; standard error if `None`.

    Raises:
        TypeError: `iterable` cannot be iterated over.

    Example:
        >>> import io
        >>> shown = io.StringIO()
        >>> sum(grain.watch(grain.MapDataset.range(5).to_iter_dataset(), file=shown))
        10
        >>> "5/5" in shown.getvalue()
        True
    """
    total = total_of(iterable) if total is None else total
    return WatchIterator(iter(iterable), total, sys.stderr if file is None else file)


def _rich_live(file: IO[str]) -> Any:
    """What shows tables in a terminal; `None` without the package `rich`."""
    if importlib.util.find_spec("rich") is None:
        return None
    console = importlib.import_module("rich.console").Console(file=file)
    live = importlib.import_module("rich.live").Live(console=console, auto_refresh=False)
    live.start()
    return live


def _rich_table(table: Table) -> Any:
    text = importlib.import_module("rich.text").Text
    shown = importlib.import_module("rich.table").Table(
        *HEADS, title=text(table.verdict), caption=text(table.line)
    )
    for row in table.rows:
        times, *others = row.texts
        bar = "#" * round(row.time_share * _BAR_LEN)
        shown.add_row(*(text(cell) for cell in (row.name, f"{bar:<{_BAR_LEN}} {times}", *others)))
    return shown
