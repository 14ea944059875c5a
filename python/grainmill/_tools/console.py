"""What commands share: exit codes, errors, numbers for people, and a progress line."""

from __future__ import annotations

import enum
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from grainmill import files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SYSTEM = 3
    DAMAGED = 4
    EXISTS = 5
    INTERRUPTED = 130


EXIT_CODES = {
    ExitCode.OK: "done, and nothing is wrong",
    ExitCode.FAILED: "the command itself failed: a defect, or an error of your own code",
    ExitCode.USAGE: "an argument is wrong",
    ExitCode.SYSTEM: "a file cannot be opened, read or written: missing, no permission, disk full",
    ExitCode.DAMAGED: "a file is damaged, or differs from its manifest",
    ExitCode.EXISTS: "an output exists already (`--force` replaces it)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


class CommandError(Exception):
    """An error that is shown as one line.

    Args:
        message: What is wrong, and what the user can do.
        code: The exit code.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that reads files: which, and their format."""
    parser.add_argument(
        "paths", nargs="+", metavar="FILE", help="files, globs, name@N, directories"
    )
    formats = tuple(files.FORMATS)
    parser.add_argument("--from", dest="format", choices=formats, help="the files' format")


def check_local(option: str, path: str) -> None:
    """Refuses a URL where only a local file can be written."""
    if files.is_url(path):
        raise CommandError(f"{option} must be a local file, got {path}")


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON, with characters as they are unless UTF-8 has not all.

    Those are halves of surrogate pairs, as in names of files that are not UTF-8.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def byte_text(byte_len: float) -> str:
    """A number of bytes for people, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if byte_len < 1024 or unit == "TiB":
            return f"{byte_len:,.0f} B" if unit == "B" else f"{byte_len:,.1f} {unit}"
        byte_len /= 1024
    raise AssertionError("unreachable")


def count_text(count: int, noun: str) -> str:
    """A count with its noun, such as `1 record` and `2 records`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Lines of names and values, the values aligned."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


class Progress:
    """A line on the terminal, rewritten a few times a second; nothing where stderr is a file.

    Args:
        what: What is done.
        total: All the work, in any unit; 0 if that is unknown.
        shown: Whether the line is shown, in any case.
    """

    _PERIOD_S = 0.2

    def __init__(self, what: str, total: float = 0.0, *, shown: bool | None = None) -> None:
        self._what = what
        self._total = total
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._done = 0.0
        self._records = 0
        self._started = time.monotonic()
        self._last = 0.0
        self._note = ""

    def tell(self, done: float, records: int, note: str, *, total: float | None = None) -> None:
        """Says how much is done, in the unit of the total, and what is said about the parts."""
        self._done, self._records, self._note = done, records, note
        self._total = self._total if total is None else total
        now = time.monotonic()
        if self._shown and now - self._last >= self._PERIOD_S:
            self._last = now
            sys.stderr.write("\r" + self.text(now) + "\x1b[K")
            sys.stderr.flush()

    def text(self, now: float) -> str:
        """The line at a time of the monotonic clock."""
        elapsed = max(now - self._started, 1e-9)
        parts = [self._what]
        if self._total:
            share = min(self._done / self._total, 1.0)
            filled = round(20 * share)
            parts.append(f"[{'#' * filled}{'.' * (20 - filled)}] {share:4.0%}")
        if self._note:
            parts.append(self._note)
        parts.append(f"{self._records:,} records, {self._records / elapsed:,.0f}/s")
        left = self._total - self._done
        if self._done and left > 0:
            seconds = round(left / (self._done / elapsed))
            parts.append(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Removes the line."""
        if self._shown and self._last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
