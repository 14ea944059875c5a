"""`grainmill verify`: finds damage, all of it, and compares files with a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill import GrainmillError, _atomic_file, _native
from grainmill._tools import formats, reading
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    Progress,
    byte_text,
    check_at_least,
    check_local,
    count_text,
    print_json,
)
from grainmill._tools.outputs import identity
from grainmill._url import identified, is_url, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_MANIFEST = "grainmill manifest of files"
# Rows of tables are checked in blocks of about so many bytes.
_BLOCK_BYTES = 4 << 20
_MAX_ROWS = 1 << 16
_CACHE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    formats.add_inputs(parser)
    parser.add_argument(
        "--manifest",
        metavar="MANIFEST",
        help="compare number of records, length and SHA-256 of each file with this file; it is "
        "written if it does not exist",
    )
    parser.add_argument(
        "--update", action="store_true", help="write the manifest anew, if no file is damaged"
    )
    parser.add_argument(
        "--max-problems", type=int, default=100, metavar="N", help="per file (default: 100)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    check_at_least("--max-problems", options.max_problems, 1)
    if options.update and not options.manifest:
        raise CommandError("--update needs --manifest")
    if options.manifest:
        check_local("--manifest", options.manifest)
    paths = formats.expanded(options.paths)
    manifest = Path(options.manifest) if options.manifest else None
    expected = None
    if manifest is not None and manifest.exists() and not options.update:
        expected = _read_manifest(manifest)
    # The lengths of objects would have to be asked for: then each file counts the same.
    is_far = any(map(is_url, paths))
    lens = [1 if is_far else (identity(path) or [0])[0] for path in paths]
    progress = Progress("verify", sum(lens))
    found = []
    for number, path in enumerate(paths):
        progress.note(f"{number} of {len(paths)} files")
        part = _FileProgress(progress, lens[number])
        report = check_file(path, options.format, options.max_problems, part.tell)
        if manifest is not None:
            report["sha256"] = _sha256(path)
            if expected is not None:
                report["problems"] += _differences(report, expected.get(_key(path, manifest)))
        found.append(report)
        part.tell(1.0, report["records"])
    progress.close()
    missing = _missing(expected, paths, manifest)
    num_problems = sum(len(report["problems"]) for report in found) + len(missing)
    wrote = manifest is not None and expected is None and not num_problems
    if wrote and manifest is not None:
        _write_manifest(manifest, found)
    if options.json:
        print_json({"ok": not num_problems, "files": found, "missing": missing})
    else:
        _show(found, missing, options)
        if wrote:
            print(f"{manifest}: written, {count_text(len(found), 'file')}")
        elif manifest is not None and expected is None:
            print(f"{manifest}: not written, as there is damage")
    return ExitCode.DAMAGED if num_problems else ExitCode.OK


class _FileProgress:
    """Adds the progress of one file, which counts as `total`, to that of all."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress = progress
        self._total = total
        self._share = 0.0
        self._num_records = 0

    def tell(self, share: float, num_records: int) -> None:
        self._progress.add((share - self._share) * self._total, num_records - self._num_records)
        self._share, self._num_records = share, num_records


def _tell_nobody(_share: float, _num_records: int) -> None:
    pass


def check_file(
    path: str,
    given: str | None,
    max_problems: int,
    tell: Callable[[float, int], None] = _tell_nobody,
) -> dict[str, Any]:
    """What is wrong with one file: every place, up to `max_problems`.

    `tell` is called now and then with the share of the file and the number of records read so far.
    """
    found = formats.detect(path, given)
    byte_len = len(_native.FileBytes(path))
    report: dict[str, Any] = {"path": shown(path), "format": found.name, "bytes": byte_len}
    # Lines are read a second time, as JSON.
    share = 0.5 if found.name == "jsonl" else 1.0

    def tell_bytes(num_bytes: int, num_records: int) -> None:
        tell(share * min(num_bytes / max(byte_len, 1), 1.0), num_records)

    if found.name == "array_record":
        native = _native.verify_array_record(path, max_problems, tell_bytes)
        indexed = native["indexed_records"]
        report |= {
            "records": native["num_records"],
            "chunks": native["num_chunks"],
            "record_bytes": native["record_bytes"],
            "indexed_records": indexed,
        }
        problems = [
            {"offset": offset, "chunk": chunk, "problem": problem}
            for offset, chunk, problem in native["problems"]
        ]
        return report | {"problems": problems}
    if found.in_order:
        stream = _native.RecordStream(path, found.name)
        damages = stream.verify(max_problems, tell_bytes)
        problems = [
            {"offset": offset, "record": record, "problem": problem}
            for record, offset, problem in damages
        ]
        # The place from which on nothing can be read is none of the records that were read.
        total = stream.num_records
        report["records"] = total - sum(1 for record, _, _ in damages if record < total)
        if found.name == "jsonl" and not problems:
            problems = _bad_json(path, found, max_problems, total, tell)
        return report | {"problems": problems}
    return report | _read_all(path, found, max_problems, tell)


def _bad_json(
    path: str,
    found: formats.Format,
    max_problems: int,
    total: int,
    tell: Callable[[float, int], None],
) -> list[dict[str, Any]]:
    problems: list[dict[str, Any]] = []
    for number, line in enumerate(reading.records(path, found)):
        if number % 1000 == 0:
            tell(0.5 + 0.5 * number / max(total, 1), total)
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append({"record": number, "problem": f"not JSON: {error}"})
            if len(problems) >= max_problems:
                break
    return problems


def _read_all(
    path: str, found: formats.Format, max_problems: int, tell: Callable[[float, int], None]
) -> dict[str, Any]:
    """Reads each record of a file whose format has no checks of its own."""
    problems: list[dict[str, Any]] = []
    try:
        if found.name == "parquet":
            return _check_table(path, max_problems, tell)
        source = found.open([path])
    except (GrainmillError, ValueError) as error:
        return {"records": 0, "problems": [{"problem": _in_file(path, error)}]}
    total, step, intact = len(source), reading.block_len(source), 0
    for first in range(0, total, step):
        tell(first / total, intact)
        pending = [range(first, min(first + step, total))]
        while pending and len(problems) < max_problems:
            block = pending.pop()
            try:
                source.__getitems__(block)
            except (GrainmillError, ValueError) as error:
                if len(block) == 1:
                    problems.append({"record": block[0], "problem": _in_file(path, error)})
                else:  # one of them, or several: the others are checked all the same
                    half = len(block) // 2
                    pending += [block[half:], block[:half]]
            else:
                intact += len(block)
        if len(problems) >= max_problems:
            break
    return {"records": intact, "problems": problems}


def _in_file(path: str, problem: object) -> str:
    """A problem without the name of the file."""
    return str(problem).removeprefix(f"{shown(path)}: ")


def _check_table(
    path: str, max_problems: int, tell: Callable[[float, int], None]
) -> dict[str, Any]:
    """Reads the columns of a Parquet file, which stay in the engine.

    Rows that are decoded together cannot be read together, either: they are one problem.
    """
    problems: dict[str, int] = {}
    # Microseconds hold any time.
    table = _native.ParquetFiles([(path, None)], None, _CACHE_BYTES, int96_unit="us")
    total, intact, first = len(table), 0, 0
    step = max(1, min(_MAX_ROWS, int(_BLOCK_BYTES / max(table.mean_byte_len, 1.0))))
    # Up to which record each column cannot be read.
    bad_until = [0] * len(table.column_types())
    while first < total and len(problems) < max_problems:
        tell(first / total, intact)
        ends = [end for end in bad_until if end > first]
        if ends and len(ends) == len(bad_until):
            first = min(ends)
            continue
        columns = [at for at, end in enumerate(bad_until) if end <= first]
        bad = np.zeros(min(step, *(end - first for end in [total, *ends])), np.bool_)
        for column, record, length, problem in table.check(first, len(bad), columns):
            problems.setdefault(_in_file(path, problem), record)
            bad[record - first : record - first + length] = True
            bad_until[column] = max(bad_until[column], record + length)
        intact += 0 if ends else len(bad) - int(bad.sum())
        first += len(bad)
    listed = sorted((record, problem) for problem, record in problems.items())
    rows = [{"record": record, "problem": problem} for record, problem in listed]
    return {"records": intact, "problems": rows[:max_problems]}


def _show(found: list[dict[str, Any]], missing: list[str], options: argparse.Namespace) -> None:
    for report in found:
        problems = report["problems"]
        size = f"{count_text(report['records'], 'record')}, {byte_text(report['bytes'])}"
        if not problems:
            print(f"{report['path']}: ok, {size}")
            continue
        more = "at least " if len(problems) >= options.max_problems else ""
        print(f"{report['path']}: {more}{count_text(len(problems), 'problem')}; intact: {size}")
        for problem in problems:
            place = [
                f"{name} {problem[key]}"
                for key, name in (("chunk", "chunk"), ("record", "record"), ("offset", "at byte"))
                if problem.get(key) is not None
            ]
            prefix = " ".join(place)
            print(f"  {prefix}: {problem['problem']}" if prefix else f"  {problem['problem']}")
    for path in missing:
        print(f"{path}: in the manifest, but not given or missing")


# --- the manifest -------------------------------------------------------------------------------


def _key(path: str, manifest: Path) -> str:
    """A path as the manifest names it: relative to its directory, so that both can be moved."""
    return (
        identified(path)
        if is_url(path)
        else Path(os.path.relpath(path, manifest.parent)).as_posix()
    )


def _read_manifest(manifest: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(manifest.read_text("utf-8"))
        is_manifest = content["format"] == _MANIFEST and content["version"] == 1
        entries = {str(entry["path"]): entry for entry in content["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        is_manifest, entries = False, {}
    if not is_manifest:
        raise CommandError(
            f"{manifest}: not a manifest of `grainmill verify`; name another, or pass --update"
        )
    return entries


def _write_manifest(manifest: Path, found: list[dict[str, Any]]) -> None:
    files = [
        {
            "path": _key(report["path"], manifest),
            "bytes": report["bytes"],
            "records": report["records"],
            "sha256": report["sha256"],
        }
        for report in found
    ]
    content = {"format": _MANIFEST, "version": 1, "files": files}
    _atomic_file.write(manifest, json.dumps(content, indent=1).encode() + b"\n")


def _differences(report: dict[str, Any], entry: dict[str, Any] | None) -> list[dict[str, Any]]:
    if entry is None:
        return [{"problem": "not in the manifest"}]
    return [
        {"problem": f"the manifest states {name} {entry.get(name)}, found {report[name]}"}
        for name in ("bytes", "records", "sha256")
        if entry.get(name) != report[name]
    ]


def _missing(
    expected: dict[str, dict[str, Any]] | None, paths: list[str], manifest: Path | None
) -> list[str]:
    """Files of the manifest, of the directories of the given ones, that were not given."""
    if expected is None or manifest is None:
        return []
    given = {_key(path, manifest) for path in paths}
    return sorted(
        path
        for path in expected
        if path not in given and not is_url(path) and not (manifest.parent / path).exists()
    )


def _sha256(path: str) -> str:
    file, digest = _native.FileBytes(path), hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
