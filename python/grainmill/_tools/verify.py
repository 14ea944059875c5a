"""`grainmill verify`: prints the damage of files, and compares them with a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import files
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    Progress,
    add_inputs,
    byte_text,
    check_local,
    count_text,
    print_json,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_inputs(parser)
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
    if options.update and not options.manifest:
        raise CommandError("--update needs --manifest")
    if options.manifest:
        check_local("--manifest", options.manifest)
    paths = files.find_files(options.paths)
    manifest = Path(options.manifest) if options.manifest else None
    expected = None
    if manifest is not None and manifest.exists() and not options.update:
        expected = _read(manifest)
    found = _reports(paths, options)
    if expected is not None:
        for report in found:
            report["problems"] += expected.differences(report)
    missing = expected.missing(paths) if expected is not None else []
    num_problems = sum(len(report["problems"]) for report in found) + len(missing)
    wrote = manifest is not None and expected is None and not num_problems
    if wrote and manifest is not None:
        files.Manifest.write(manifest, found)
    if options.json:
        print_json({"ok": not num_problems, "files": found, "missing": missing})
    else:
        _show(found, missing, options)
        if wrote:
            print(f"{manifest}: written, {count_text(len(found), 'file')}")
        elif manifest is not None and expected is None:
            print(f"{manifest}: not written, as there is damage")
    return ExitCode.DAMAGED if num_problems else ExitCode.OK


def _read(manifest: Path) -> files.Manifest:
    try:
        return files.Manifest(manifest)
    except ValueError as error:
        raise CommandError(f"{error}; name another, or pass --update") from error


def _reports(paths: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `verify` finds in each file."""
    # The lengths of objects would have to be asked for: then each file counts the same.
    is_far = any(files.is_url(path) for path in paths)
    lens = [1 if is_far else _byte_len(path) for path in paths]
    progress = Progress("verify", sum(lens))
    found = []
    done = records = 0
    for number, (path, byte_len) in enumerate(zip(paths, lens, strict=True)):
        note = f"{number} of {len(paths)} files"
        report = files.verify(
            path,
            format=options.format,
            max_problems=options.max_problems,
            with_sha256=options.manifest is not None,
            progress=_of_file(progress, done, byte_len, records, note),
        )
        found.append(report)
        done += byte_len
        records += report["records"]
        progress.tell(done, records, note)
    progress.close()
    return found


def _of_file(
    progress: Progress, done: int, byte_len: int, records: int, note: str
) -> Callable[[float, int], None]:
    """Shows how much of one file is read, after so much of others."""
    return lambda share, count: progress.tell(done + share * byte_len, records + count, note)


def _byte_len(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # which `verify` says
        return 0


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
