"""`grainmill trace`: writes a timeline of a pipeline, for Perfetto or Chrome."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grainmill
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    byte_text,
    check_local,
    count_text,
    print_json,
)
from grainmill._tools.target import TARGET_HELP, pipeline_of, prints_elsewhere

if TYPE_CHECKING:
    import argparse

_EXAMPLES = f"""\
{TARGET_HELP}
examples:
  grainmill trace my_project.data:train_batches -o trace.json
  grainmill trace pipeline.py:ds --count 100 --max-events 20000

Open the file at https://ui.perfetto.dev, which reads it in the browser, or at chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("target", metavar="MODULE:ATTRIBUTE", help="or FILE.py:ATTRIBUTE")
    parser.add_argument(
        "-o", "--output", default="trace.json", metavar="FILE", help="default: trace.json"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="stop after S (default: 5)"
    )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="stop after N elements")
    parser.add_argument(
        "--max-events",
        type=int,
        metavar="N",
        help="keep the last N events (default: 200,000)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    check_local("--output", options.output)
    if options.seconds <= 0:
        raise CommandError(f"--seconds must be positive, got {options.seconds:g}")
    if options.count is not None and options.count < 1:
        raise CommandError(f"--count must be at least 1, got {options.count}")
    output, count = Path(options.output), 0
    with prints_elsewhere():
        elements = pipeline_of(options.target)
        limit_events = {} if options.max_events is None else {"max_events": options.max_events}
        with grainmill.trace(output, **limit_events):
            deadline_s = time.perf_counter() + options.seconds
            iterator = iter(elements)
            for _ in itertools.islice(iterator, options.count):
                count += 1
                if time.perf_counter() >= deadline_s:
                    break
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
    written = json.loads(output.read_text("utf-8"))
    found = {
        "pipeline": options.target,
        "output": options.output,
        "elements": count,
        "events": len(written["traceEvents"]),
        **written["otherData"],
    }
    if options.json:
        print_json(found)
        return ExitCode.OK
    dropped = f", {found['dropped_events']:,} dropped" if found["dropped_events"] else ""
    size = byte_text(output.stat().st_size)
    events = count_text(found["events"], "event")
    print(f"{options.output}: {count_text(count, 'element')}, {events}{dropped}, {size}")
    print("open it at https://ui.perfetto.dev or chrome://tracing")
    return ExitCode.OK
