"""A progress bar around an iterator, in the terminal or a notebook."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Generic, Self, TypeVar

from grainmill._dataset.iterator import get_next_index
from grainmill._dataset.views.stage_facts import length_of
from grainmill._interrupts import raise_interrupt
from grainmill._plan.random_access import PRACTICALLY_ENDLESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T_co = TypeVar("T_co", covariant=True)

__all__ = ["ProgressIterator", "progress"]

_INTERVAL_S = 0.2
# In a file or a pipe, where every update is a line of its own.
_LINE_INTERVAL_S = 10.0
_BAR_LEN = 24
_MIN_BAR_LEN = 5
# Up to which share of waiting the bar has a colour: green, yellow, red.
_COLOURS = ((0.1, 32), (0.5, 33), (math.inf, 31))
# What gives an iterator another position.
_MOVES = {"set_state", "_set_next_index"}


class ProgressIterator(Iterator[T_co], Generic[T_co]):
    """An iterator that shows its progress; see `progress`.

    Every other attribute is that of the iterator it is around: `get_state`, `set_state`, `stats`,
    `close` and the like.

    Args:
        iterator: Where elements come from.
        total: How many there are, if known.
        file: Where the bar is written in a terminal.
    """

    def __init__(self, iterator: Iterator[T_co], total: int | None, file: IO[str]) -> None:
        self._iterator = iterator
        self._total = total
        self._file = file
        self._display = _notebook_display()
        self._columns = None if self._display is not None else _columns_of(file)
        in_lines = self._display is None and self._columns is None
        self._interval_s = _LINE_INTERVAL_S if in_lines else _INTERVAL_S
        self._width = 0
        self._first = 0
        self._restart()
        if in_lines:
            self._next_s += self._interval_s

    def _restart(self) -> None:
        self._count = 0
        self._wait_s = 0.0
        self._started_s = self._next_s = time.perf_counter()
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        started_s, count = time.perf_counter(), self._count
        try:
            element = self._iterator.__next__()  # our iterators: no signal handler runs after it
        except BaseException:
            self._end()
            raise
        try:
            self._took(started_s)
        except BaseException:  # an interrupt, or nobody reads the output
            if hasattr(self._iterator, "_take_back"):
                self._iterator._take_back()  # noqa: SLF001 - of our own
                self._count = count
            raise
        return element

    def _took(self, started_s: float) -> None:
        now_s = time.perf_counter()
        self._wait_s += now_s - started_s
        self._count += 1
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._show(now_s)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # not initialised
            raise AttributeError(name)
        found = getattr(self._iterator, name)
        return self._moving(found) if name in _MOVES else found

    def _moving(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """`move`, after which elements are counted from the new position, where that is known."""

        def moved(*args: Any, **named: Any) -> Any:
            result = move(*args, **named)
            try:
                self._first = get_next_index(self._iterator)  # type: ignore[arg-type]
            except (AttributeError, NotImplementedError) as failure:
                raise_interrupt(failure)
                self._first, self._total = 0, None
            self._restart()
            return result

        return moved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _end(self) -> None:
        """Shows the final state, and ends the line."""
        if not self._ended:
            self._ended = True
            self._show(time.perf_counter())
            if self._columns is not None:
                self._file.write("\n")
                self._file.flush()

    def _show(self, now_s: float) -> None:
        elapsed_s = now_s - self._started_s
        if self._columns is not None:
            self._columns = _columns_of(self._file) or self._columns  # it may have been resized
        text = progress_text(
            self._count, self._total, elapsed_s, self._wait_s, self._columns, first=self._first
        )
        if self._display is not None:
            self._display.update({"text/plain": text}, raw=True)
        elif self._columns is None:
            self._file.write(text + "\n")
            self._file.flush()
        else:
            spaces = " " * (min(self._width, self._columns - 1) - len(text))
            share = self._wait_s / elapsed_s if elapsed_s > 0 else 0.0
            line = coloured(text, share) if shows_colours() else text
            self._file.write(f"\r{line}{spaces}")
            self._file.flush()
            self._width = len(text)


def progress(
    iterable: Iterable[T_co], *, total: int | None = None, file: IO[str] | None = None
) -> ProgressIterator[T_co]:
    """Returns an iterator over `iterable` that shows a progress bar: rate, time left, waiting.

    "Waiting" is the share of time in which the loop waits for elements: near 100 % the pipeline is
    too slow, near 0 % it is fast enough; `DatasetIterator.verdict` says why. The bar is one line of
    text as wide as the terminal, updated a few times a second; in a notebook, it is displayed by
    IPython, and in a file or a pipe a line is written every ten seconds and at the end. In a
    terminal that has colours, unless the environment variable `NO_COLOR` is set, the bar is green
    where the loop waits little, else yellow or red. After
    `set_state` it goes on from the new position; if that has no index, without a total.

    Args:
        iterable: A dataset, an iterator over one (`get_state` and its other methods can be called
            on the result), or anything else to iterate over.
        total: How many elements there are; `len(iterable)` if `None`, where it has a length and is
            not endless.
        file: Where to write the bar outside notebooks; standard error if `None`.

    Raises:
        TypeError: `iterable` cannot be iterated over.

    Example:
        >>> import io
        >>> bar = io.StringIO()
        >>> sum(grain.progress(grain.MapDataset.range(5), file=bar))
        10
        >>> "5/5" in bar.getvalue()
        True
    """
    total = total_of(iterable) if total is None else total
    return ProgressIterator(iter(iterable), total, sys.stderr if file is None else file)


def total_of(iterable: Iterable[Any]) -> int | None:
    """How many elements there are; `None` if that is unknown, or they are endless."""
    total: int | None = None
    try:
        make_node = getattr(type(iterable), "_plan_node", None)
        if make_node is not None and not hasattr(iterable, "__len__"):  # an `IterDataset`
            total = length_of(make_node(iterable))
        else:
            total = len(iterable)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as failure:
        raise_interrupt(failure)
    return None if total is None or total >= PRACTICALLY_ENDLESS else total


def progress_text(
    count: int,
    total: int | None,
    elapsed_s: float,
    wait_s: float,
    columns: int | None = None,
    *,
    first: int = 0,
) -> str:
    """The line that a bar shows.

    Args:
        count: Elements so far.
        total: How many there are, if known.
        elapsed_s: Seconds since the start.
        wait_s: How many of those were spent waiting for elements.
        columns: The width of the terminal, which the text does not reach; `None` for any.
        first: How many elements came before the start.
    """
    rate = count / elapsed_s if elapsed_s > 0 else 0.0
    waiting = f"{min(1.0, wait_s / elapsed_s) if elapsed_s > 0 else 0.0:.0%} waiting"
    parts = [f"{rate:.1f}/s", _duration(elapsed_s), waiting]
    at = first + count
    if total is None:
        return _fitting([f"{at} [{', '.join(parts)}]", f"{at} [{parts[0]}]", str(at)], columns)
    done = min(1.0, at / total) if total else 1.0
    if rate and at < total:
        parts.insert(2, f"{_duration((total - at) / rate)} left")
    percent, of_total = f"{done:4.0%}", f"{at}/{total}"
    text = f"{percent} || {of_total} [{', '.join(parts)}]"
    bar_len = _BAR_LEN if columns is None else min(_BAR_LEN, columns - 1 - len(text))
    if bar_len >= _MIN_BAR_LEN:
        bar = "#" * int(done * bar_len)
        return text.replace("||", f"|{bar:<{bar_len}}|", 1)
    choices = [f"{percent} {of_total} [{', '.join(parts[:n])}]" for n in range(len(parts), 0, -1)]
    return _fitting([*choices, f"{percent} {of_total}", percent.strip()], columns)


def shows_colours() -> bool:
    """Whether a terminal is to be written to in colours; see <https://no-color.org>."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def coloured(text: str, wait_share: float) -> str:
    """The line with its bar, if it has one, in a colour for the share of waiting."""
    colour = next(code for most, code in _COLOURS if wait_share <= most)
    before, _, rest = text.partition("|#")
    count = len(rest) - len(rest.lstrip("#"))
    return f"{before}|\x1b[{colour}m#{rest[:count]}\x1b[0m{rest[count:]}" if rest else text


def _fitting(texts: list[str], columns: int | None) -> str:
    """The first text that is shorter than the terminal is wide."""
    fitting = (text for text in texts if columns is None or len(text) < columns)
    return next(fitting, texts[-1][: max(0, (columns or 1) - 1)])


def _columns_of(file: IO[str]) -> int | None:
    """The width of the terminal that `file` is; `None` if it is something else."""
    try:
        # Some terminals do not say how wide they are.
        return (os.get_terminal_size(file.fileno()).columns or 80) if file.isatty() else None
    except (AttributeError, OSError, ValueError) as failure:
        raise_interrupt(failure)
        return None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _notebook_display() -> Any:
    """A display that can be updated, in a notebook; otherwise `None`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    display: Any = sys.modules["IPython.display"].display
    return display({"text/plain": ""}, raw=True, display_id=True)
