"""A progress bar around an iterator, in the terminal or a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T_co = TypeVar("T_co", covariant=True)

__all__ = ["ProgressIterator", "progress"]

_INTERVAL_S = 0.2
_BAR_LEN = 24


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
        self._count = 0
        self._wait_s = 0.0
        self._started_s = self._next_s = time.perf_counter()
        self._width = 0
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        started_s = time.perf_counter()
        try:
            element = next(self._iterator)
        except BaseException:
            self._end()
            raise
        now_s = time.perf_counter()
        self._wait_s += now_s - started_s
        self._count += 1
        if now_s >= self._next_s:
            self._next_s = now_s + _INTERVAL_S
            self._show(now_s)
        return element

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # not initialised
            raise AttributeError(name)
        return getattr(self._iterator, name)

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
            if self._display is None:
                self._file.write("\n")
                self._file.flush()

    def _show(self, now_s: float) -> None:
        text = progress_text(self._count, self._total, now_s - self._started_s, self._wait_s)
        if self._display is not None:
            self._display.update({"text/plain": text}, raw=True)
            return
        self._file.write("\r" + text.ljust(self._width))
        self._file.flush()
        self._width = len(text)


def progress(
    iterable: Iterable[T_co], *, total: int | None = None, file: IO[str] | None = None
) -> ProgressIterator[T_co]:
    """Returns an iterator over `iterable` that shows a progress bar: rate, time left, waiting.

    "Waiting" is the share of time in which the loop waits for elements: near 100 % the pipeline is
    too slow, near 0 % it is fast enough; `DatasetIterator.verdict` says why. The bar is one line of
    text, updated a few times a second; in a notebook, it is displayed by IPython.

    Args:
        iterable: A dataset, an iterator over one (`get_state` and its other methods can be called
            on the result), or anything else to iterate over.
        total: How many elements there are; `len(iterable)` if `None`, where it has a length.
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
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            total = None
    return ProgressIterator(iter(iterable), total, sys.stderr if file is None else file)


def progress_text(count: int, total: int | None, elapsed_s: float, wait_s: float) -> str:
    """The line that a bar shows.

    Args:
        count: Elements so far.
        total: How many there are, if known.
        elapsed_s: Seconds since the start.
        wait_s: How many of those were spent waiting for elements.
    """
    rate = count / elapsed_s if elapsed_s > 0 else 0.0
    waiting = f"{min(1.0, wait_s / elapsed_s) if elapsed_s > 0 else 0.0:.0%} waiting"
    parts = [f"{rate:.1f}/s", _duration(elapsed_s), waiting]
    if total is None:
        return f"{count} [{', '.join(parts)}]"
    done = min(1.0, count / total) if total else 1.0
    if rate and count < total:
        parts.insert(2, f"{_duration((total - count) / rate)} left")
    bar = "#" * int(done * _BAR_LEN)
    return f"{done:4.0%} |{bar:<{_BAR_LEN}}| {count}/{total} [{', '.join(parts)}]"


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
