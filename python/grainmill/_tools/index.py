"""`grainmill index`: writes what lets files open, and be read by position, without a scan."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from grainmill import files
from grainmill._tools.console import ExitCode, add_inputs, check_local, count_text, print_json

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_inputs(parser)
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
    paths = files.find_files(options.paths)
    counts = files.write_index(paths, format=options.format, output=options.output)
    elapsed = time.monotonic() - started
    if options.json:
        found = [
            {"path": files.redacted(path), "records": count}
            for path, count in zip(paths, counts, strict=True)
        ]
        print_json({"files": found, "records": sum(counts), "seconds": round(elapsed, 3)})
    else:
        print(f"{count_text(len(paths), 'file')}, {count_text(sum(counts), 'record')}")
    return ExitCode.OK
