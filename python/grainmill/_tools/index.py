"""`grainmill index`: writes what lets files open, and be read by position, without a scan."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from grainmill._index_file import read_entries
from grainmill._tools import formats
from grainmill._tools.console import CommandError, ExitCode, check_local, count_text, print_json
from grainmill._url import absolute, shown

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    formats.add_inputs(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="INDEX",
        help="the index file of ArrayRecord files, for `ArrayRecordDataSource(paths, index=INDEX)`",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    started = time.monotonic()
    if options.output is not None:
        check_local("--output", options.output)
    paths = formats.expanded(options.paths)
    kinds = {formats.detect(path, options.format).name for path in paths}
    if len(kinds) > 1:
        raise CommandError(f"files of one format are indexed at a time, got {', '.join(kinds)}")
    found = formats.FORMATS[kinds.pop()]
    if found.name == "array_record":
        if options.output is None:
            raise CommandError("--output must name the index file for ArrayRecord files")
        counts = [count for count, _, _ in read_entries(options.output, _absolute(paths))]
    elif found.scanned:
        if options.output is not None:
            raise CommandError(f"the index of {found.title} files is kept beside each; no --output")
        counts = [len(found.open([path])) for path in paths]
    else:
        raise CommandError(f"{found.title} files need no index: they have one inside")
    elapsed = time.monotonic() - started
    if options.json:
        files = [{"path": shown(p), "records": n} for p, n in zip(paths, counts, strict=True)]
        print_json({"files": files, "records": sum(counts), "seconds": round(elapsed, 3)})
    else:
        print(f"{count_text(len(paths), 'file')}, {count_text(sum(counts), 'record')}")
    return ExitCode.OK


def _absolute(paths: list[str]) -> list[str]:
    return [absolute(path) for path in paths]
