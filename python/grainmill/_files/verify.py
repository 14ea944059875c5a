"""`verify`: finds damage, all of it."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grainmill import _native
from grainmill._files import formats, reading
from grainmill._files.messages import check_at_least
from grainmill._native import GrainmillError
from grainmill._url import shown

if TYPE_CHECKING:
    from collections.abc import Callable

# Rows of tables are checked in blocks of about so many bytes.
_BLOCK_BYTES = 4 << 20
_MAX_ROWS = 1 << 16
_CACHE_BYTES = 64 << 20


def _tell_nobody(_share: float, _num_records: int) -> None:
    pass


def verify(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - of the file
    max_problems: int = 100,
    with_sha256: bool = False,
    progress: Callable[[float, int], object] | None = None,
) -> dict[str, Any]:
    r"""Reads all of one file, and returns what is wrong with it: every place, not the first only.

    Of an ArrayRecord file that is each byte: headers and checksums of blocks and chunks, records,
    and the index against what was found. TFRecord files have checksums for each record, lines must
    be JSON, and records of other formats are read one by one.

    Args:
        path: The file, or its URL.
        format: Its format, one of `FORMATS`; by default what `detect_format` says.
        max_problems: How many places are reported at most, at least 1.
        with_sha256: Whether the SHA-256 of the file is computed, for a `Manifest`.
        progress: Called now and then with the share of the file, from 0 to 1, and the number of
            records read so far; what it raises ends the call.

    Returns:
        A dict with `path`, `format`, `bytes`, the number of intact `records`, `problems`, and
        `sha256` if it was asked for; of an ArrayRecord file also `chunks`, `record_bytes` and the
        number of `indexed_records`. Each of the `problems` is a dict with a text, `problem`, and of
        its place what is known: `chunk`, `record`, and `offset` in bytes.

    Raises:
        ValueError: `max_problems` is less than 1, or the format is unknown.
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"')
        >>> report = files.verify("words.jsonl")
        >>> report["records"], report["problems"]
        (2, [{'record': 1, 'problem': "not JSON: Expecting ',' delimiter: ..."}])
    """
    check_at_least("max_problems", max_problems, 1)
    path = os.fspath(path)
    found = formats.detect_format(path, format)
    byte_len = len(_native.FileBytes(path))
    check = _Check(path, found, byte_len, max_problems, progress or _tell_nobody)
    if found.name == "array_record":
        checked = check.chunks()
    elif found.in_order:
        checked = check.stream()
    else:
        checked = check.records()
    report = {"path": shown(path), "format": found.name, "bytes": byte_len, **checked}
    if with_sha256:
        report["sha256"] = _sha256(path)
    return report


class _Check(NamedTuple):
    """A file, and how it is checked."""

    path: str
    found: formats.Format
    byte_len: int
    max_problems: int
    tell: Callable[[float, int], object]

    def chunks(self) -> dict[str, Any]:
        """Checks an ArrayRecord file."""
        tell = self._by_bytes(1.0)
        found = _native.verify_array_record(self.path, self.max_problems, tell)
        return {
            "records": found["num_records"],
            "chunks": found["num_chunks"],
            "record_bytes": found["record_bytes"],
            "indexed_records": found["indexed_records"],
            "problems": [
                {"offset": offset, "chunk": chunk, "problem": problem}
                for offset, chunk, problem in found["problems"]
            ],
        }

    def stream(self) -> dict[str, Any]:
        """Checks a file that is read from start to end."""
        is_json = self.found.name == "jsonl"
        stream = _native.RecordStream(self.path, self.found.name)
        # Lines are read a second time, as JSON.
        damages = stream.verify(self.max_problems, self._by_bytes(0.5 if is_json else 1.0))
        problems: list[dict[str, Any]] = [
            {"offset": offset, "record": record, "problem": problem}
            for record, offset, problem in damages
        ]
        # The place from which on nothing can be read is none of the records that were read.
        total = stream.num_records
        intact = total - sum(1 for record, _, _ in damages if record < total)
        if is_json and not problems:
            problems = self._bad_json(total)
        return {"records": intact, "problems": problems}

    def _by_bytes(self, share: float) -> Callable[[int, int], object]:
        """Tells the share of the work that so many bytes are; all of them are `share`."""
        return lambda num_bytes, num_records: self.tell(
            share * min(num_bytes / max(self.byte_len, 1), 1.0), num_records
        )

    def _bad_json(self, total: int) -> list[dict[str, Any]]:
        problems: list[dict[str, Any]] = []
        for number, line in enumerate(reading.records(self.path, self.found)):
            if number % 1000 == 0:
                self.tell(0.5 + 0.5 * number / max(total, 1), total)
            try:
                json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.append({"record": number, "problem": f"not JSON: {error}"})
                if len(problems) >= self.max_problems:
                    break
        return problems

    def records(self) -> dict[str, Any]:
        """Reads each record of a file whose format has no checks of its own."""
        problems: list[dict[str, Any]] = []
        try:
            if self.found.name == "parquet":
                return self._table()
            source = self.found.open([self.path])
        except (GrainmillError, ValueError) as error:
            return {"records": 0, "problems": [{"problem": _in_file(self.path, error)}]}
        total, step, intact = len(source), reading.block_len(source), 0
        for first in range(0, total, step):
            self.tell(first / total, intact)
            pending = [range(first, min(first + step, total))]
            while pending and len(problems) < self.max_problems:
                block = pending.pop()
                try:
                    source.__getitems__(block)
                except (GrainmillError, ValueError) as error:
                    if len(block) == 1:
                        text = _in_file(self.path, error)
                        problems.append({"record": block[0], "problem": text})
                    else:  # one of them, or several: the others are checked all the same
                        half = len(block) // 2
                        pending += [block[half:], block[:half]]
                else:
                    intact += len(block)
            if len(problems) >= self.max_problems:
                break
        return {"records": intact, "problems": problems}

    def _table(self) -> dict[str, Any]:
        """Reads the columns of a Parquet file, which stay in the engine.

        Rows that are decoded together cannot be read together, either: they are one problem.
        """
        problems: dict[str, int] = {}
        # Microseconds hold any time.
        table = _native.ParquetFiles([(self.path, None)], None, _CACHE_BYTES, int96_unit="us")
        total, intact, first = len(table), 0, 0
        step = max(1, min(_MAX_ROWS, int(_BLOCK_BYTES / max(table.mean_byte_len, 1.0))))
        # Up to which record each column cannot be read.
        bad_until = [0] * len(table.column_types())
        while first < total and len(problems) < self.max_problems:
            self.tell(first / total, intact)
            ends = [end for end in bad_until if end > first]
            if ends and len(ends) == len(bad_until):
                first = min(ends)
                continue
            columns = [at for at, end in enumerate(bad_until) if end <= first]
            bad = np.zeros(min(step, *(end - first for end in [total, *ends])), np.bool_)
            for column, record, length, problem in table.check(first, len(bad), columns):
                problems.setdefault(_in_file(self.path, problem), record)
                bad[record - first : record - first + length] = True
                bad_until[column] = max(bad_until[column], record + length)
            intact += 0 if ends else len(bad) - int(bad.sum())
            first += len(bad)
        listed = sorted((record, problem) for problem, record in problems.items())
        rows = [{"record": record, "problem": problem} for record, problem in listed]
        return {"records": intact, "problems": rows[: self.max_problems]}


def _in_file(path: str, problem: object) -> str:
    """A problem without the name of the file."""
    return str(problem).removeprefix(f"{shown(path)}: ")


def _sha256(path: str) -> str:
    file, digest = _native.FileBytes(path), hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
