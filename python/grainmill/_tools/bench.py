"""`grainmill bench`: measures a pipeline and says what holds it back."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import DataLoaderIterator, DatasetIterator
from grainmill._dataset.views.statistics import asked_verdict
from grainmill._tools.bench_plot import html, svg
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    byte_text,
    check_local,
    print_json,
    table,
)
from grainmill._tools.processes import Usage
from grainmill._tools.target import TARGET_HELP, pipeline_of, prints_elsewhere

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

# CPU time of other processes counts in ticks of 10 ms.
_MIN_CPU_S = 0.5
# Rates of shorter times are of too few elements.
_MIN_BIN_S = 0.05
_SAMPLES_S = 0.1
_MAX_POINTS = 100

_EXAMPLES = f"""\
{TARGET_HELP}
examples:
  grainmill bench my_project.data:train_batches
  grainmill bench pipeline.py:ds --seconds 30 --svg throughput.svg
  grainmill bench pipeline.py:with_threads pipeline.py:with_workers --html compared.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="MODULE:ATTRIBUTE",
        help="or FILE.py:ATTRIBUTE; several are compared",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="stop after S (default: 10)"
    )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="stop after N elements")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="elements not measured (default: 1)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a plot of throughput and memory")
    parser.add_argument("--html", metavar="FILE", help="write a page with it and the numbers")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.seconds <= 0:
        raise CommandError(f"--seconds must be positive, got {options.seconds:g}")
    for name, path in (("--svg", options.svg), ("--html", options.html)):
        if path:
            check_local(name, path)
    if options.warmup < 0 or (options.count is not None and options.count < 1):
        raise CommandError("--warmup must be at least 0, and --count at least 1")
    if len(options.targets) > 1:
        all_found = [_measured_alone(target, options) for target in options.targets]
    else:
        (target,) = options.targets
        with prints_elsewhere() if options.json else contextlib.nullcontext():
            elements = pipeline_of(target)
            found = measured(elements, options.seconds, options.count, options.warmup)
        all_found = [{"pipeline": target, **found}]
    rows = [tuple(row) for row in zip(*map(_rows, all_found), strict=True)]
    named = [(texts[0][0], *(text for _, text in texts)) for texts in rows]
    if options.svg:
        Path(options.svg).write_text(svg(all_found), "utf-8")
    if options.html:
        Path(options.html).write_text(html(all_found, named), "utf-8")
    if options.json:
        print_json(all_found[0] if len(all_found) == 1 else {"pipelines": all_found})
        return ExitCode.OK
    _print(all_found, named)
    for path in filter(None, (options.svg, options.html)):
        print(f"  plot: {path}")
    return ExitCode.OK


def _measured_alone(target: str, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one of several pipelines, in a process of its own.

    So none finds modules, caches or memory of one before.
    """
    command = [sys.executable, "-m", "grainmill", "bench", target, "--json"]
    command += ["--seconds", str(options.seconds), "--warmup", str(options.warmup)]
    command += [] if options.count is None else ["--count", str(options.count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        known = done.returncode in ExitCode.__members__.values()
        code = ExitCode(done.returncode) if known else ExitCode.FAILED
        raise CommandError(f"{target} could not be measured, see above", code)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _print(all_found: list[dict[str, Any]], rows: list[tuple[str, ...]]) -> None:
    """Prints the rows, a column for each pipeline, and then the verdicts."""
    if len(all_found) == 1:
        print(all_found[0]["pipeline"])
        print(table((name, text) for name, text in rows))
    else:
        rows = [("", *(found["pipeline"] for found in all_found)), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print("  ".join(["", *cells]).rstrip())
    for found in all_found:
        if found["verdict"]:
            of = "" if len(all_found) == 1 else f"{found['pipeline']}: "
            print(f"  {of}{found['verdict']}")


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said about a pipeline, by name."""
    rate, each = found["elements_per_s"], found["bytes_per_element"]
    waits = [f"{name} {_duration(seconds)}" for name, seconds in found["next_s"].items()]
    return [
        ("first element", f"{found['first_s']:.3f} s"),
        ("throughput", f"{rate:,.1f} elements/s" if rate else "unknown, too few elements"),
        ("next", ", ".join(waits) or "unknown, too few elements"),
        ("element", f"{byte_text(each)}, {byte_text(each * rate)}/s" if each else "no arrays"),
        ("measured", f"{found['elements']:,} elements in {found['seconds']:.2f} s"),
        ("CPU", _cpu(found["cpu_s"], found["cores"])),
        ("memory", f"{byte_text(found['peak_bytes'])} at most, {_processes(found['processes'])}"),
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _cpu(seconds: float, cores: float | None) -> str:
    if cores is None:
        return f"about {seconds:.2f} s; too short to say how many cores"
    return f"{seconds:.2f} s, {cores:.2f} cores"


def _processes(count: int) -> str:
    return "of one process" if count == 1 else f"of {count} processes"


def measured(elements: Any, seconds: float, max_count: int | None, warmup: int) -> dict[str, Any]:
    """Iterates, and measures what is delivered after the first elements."""
    usage = Usage()
    began = time.perf_counter()
    iterator: Iterator[Any] = iter(elements)
    first = next(iterator, None)
    first_s = time.perf_counter() - began
    if first is None:
        raise CommandError("the pipeline has no elements", ExitCode.FAILED)
    for _ in range(warmup - 1):
        next(iterator, None)
    ends, waits, memory = array("d"), array("d"), [(0.0, usage.memory_bytes)]
    before = usage.cpu_s()
    start = asked = time.perf_counter()
    deadline = start + seconds
    limit = max_count if max_count is not None else sys.maxsize
    next_sample = start + _SAMPLES_S
    for _ in itertools.islice(iterator, limit):
        now = time.perf_counter()
        ends.append(now - start)
        waits.append(now - asked)
        if now >= next_sample:  # what is asked of the system takes longer than an element
            usage.sample()
            memory.append((round(now - start, 4), usage.memory_bytes))
            next_sample = now + _SAMPLES_S
        if now >= deadline:
            break
        asked = time.perf_counter()
    elapsed = ends[-1] if ends else 0.0
    usage.sample()
    memory.append((round(elapsed, 4), usage.memory_bytes))
    cpu = usage.cpu_s() - before
    text = _verdict(iterator)
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
    count = len(ends)
    return {
        "first_s": round(first_s, 4),
        "elements": count,
        "seconds": round(elapsed, 4),
        "elements_per_s": round(count / elapsed, 3) if elapsed else 0.0,
        "bytes_per_element": _byte_len(first),
        "cpu_s": round(cpu, 4),
        "cores": round(cpu / elapsed, 3) if elapsed >= _MIN_CPU_S else None,
        "peak_bytes": usage.peak_bytes,
        "processes": usage.max_processes,
        "pid": os.getpid(),
        "verdict": text,
        "next_s": percentiles(waits),
        "rates": rates(ends),
        "memory": memory[:: math.ceil(len(memory) / _MAX_POINTS)],
    }


def _verdict(iterator: Any) -> str | None:
    """What holds the pipeline back; here is no consumer that could."""
    if not isinstance(iterator, DatasetIterator | DataLoaderIterator):
        return None
    try:
        return asked_verdict(iterator, has_consumer=False)
    except NotImplementedError:
        return None


def percentiles(waits: Sequence[float]) -> dict[str, float]:
    """How long `next` took: half of all times, 99 of 100, and all were at most that."""
    ordered = sorted(waits)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 9)
        for name, share in places.items()
        if ordered
    }


def rates(ends: Sequence[float]) -> list[tuple[float, float]]:
    """Up to 100 pairs of a time and the elements per second since the one before.

    They are at least 50 ms apart, and at the end of an element, so that none is cut.
    """
    found: list[tuple[float, float]] = []
    if not ends:
        return found
    width = max(_MIN_BIN_S, ends[-1] / _MAX_POINTS)
    at, before_s = 0, 0.0
    while at < len(ends):
        after = bisect.bisect_left(ends, before_s + width, at) + 1
        if after >= len(ends) or ends[-1] - ends[after - 1] < width:
            after = len(ends)  # what is left is too short for another
        end_s = ends[after - 1]
        found.append((round(end_s, 4), round((after - at) / max(end_s - before_s, 1e-9), 2)))
        at, before_s = after, end_s
    return found


def _byte_len(element: Any) -> int:
    """The bytes of the arrays in an element."""
    if isinstance(element, dict):
        return sum(map(_byte_len, element.values()))
    if isinstance(element, list | tuple):
        return sum(map(_byte_len, element))
    if isinstance(element, bytes | str):
        return len(element)
    return int(getattr(element, "nbytes", 0))
