"""`grainmill bench`: measures a pipeline and says what holds it back."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import DataLoaderIterator, DatasetIterator
from grainmill._dataset.views.statistics import asked_verdict
from grainmill._tools.bench_plot import svg
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
    from collections.abc import Iterator

# CPU time of other processes counts in ticks of 10 ms.
_MIN_CPU_S = 0.5

_EXAMPLES = f"""\
{TARGET_HELP}
examples:
  grainmill bench my_project.data:train_batches
  grainmill bench pipeline.py:ds --seconds 30 --svg throughput.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("target", metavar="MODULE:ATTRIBUTE", help="or FILE.py:ATTRIBUTE")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="stop after S (default: 10)"
    )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="stop after N elements")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="elements not measured (default: 1)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a plot of the throughput")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.seconds <= 0:
        raise CommandError(f"--seconds must be positive, got {options.seconds:g}")
    if options.svg:
        check_local("--svg", options.svg)
    if options.warmup < 0 or (options.count is not None and options.count < 1):
        raise CommandError("--warmup must be at least 0, and --count at least 1")
    with prints_elsewhere() if options.json else contextlib.nullcontext():
        elements = pipeline_of(options.target)
        found = measured(elements, options.seconds, options.count, options.warmup)
    found = {"pipeline": options.target, **found}
    if options.svg:
        Path(options.svg).write_text(svg(options.target, found), "utf-8")
    if options.json:
        print_json(found)
        return ExitCode.OK
    rate = found["elements_per_s"]
    print(options.target)
    rows = [
        ("first element", f"{found['first_s']:.3f} s"),
        ("throughput", f"{rate:,.1f} elements/s" if rate else "unknown, too few elements"),
        ("measured", f"{found['elements']:,} elements in {found['seconds']:.2f} s"),
        ("CPU", _cpu(found["cpu_s"], found["cores"])),
        ("memory", f"{byte_text(found['peak_bytes'])} at most, {_processes(found['processes'])}"),
    ]
    if found["bytes_per_element"]:
        each = byte_text(found["bytes_per_element"])
        rows.insert(2, ("element", f"{each}, {byte_text(found['bytes_per_element'] * rate)}/s"))
    print(table(rows))
    if found["verdict"]:
        print(f"  {found['verdict']}")
    if options.svg:
        print(f"  plot: {options.svg}")
    return ExitCode.OK


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
    times = [0.0]
    before = usage.cpu_s()
    start = time.perf_counter()
    deadline = start + seconds
    limit = max_count if max_count is not None else sys.maxsize
    next_sample = start + 0.1
    for _ in itertools.islice(iterator, limit):
        now = time.perf_counter()
        times.append(now - start)
        if now >= next_sample:  # what is asked of the system takes longer than an element
            usage.sample()
            next_sample = now + 0.1
        if now >= deadline:
            break
    elapsed = times[-1]
    usage.sample()
    cpu = usage.cpu_s() - before
    text = _verdict(iterator)
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
    count = len(times) - 1
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
        "rates": _rates(times),
    }


def _verdict(iterator: Any) -> str | None:
    """What holds the pipeline back; here is no consumer that could."""
    if not isinstance(iterator, DatasetIterator | DataLoaderIterator):
        return None
    try:
        return asked_verdict(iterator, has_consumer=False)
    except NotImplementedError:
        return None


def _rates(times: list[float]) -> list[tuple[float, float]]:
    """Up to 100 pairs of a time and the elements per second since the one before."""
    count = len(times) - 1
    steps = min(100, count)
    marks = [count * at // steps for at in range(steps + 1)] if steps else []
    return [
        (round(times[b], 4), round((b - a) / max(times[b] - times[a], 1e-9), 2))
        for a, b in itertools.pairwise(marks)
    ]


def _byte_len(element: Any) -> int:
    """The bytes of the arrays in an element."""
    if isinstance(element, dict):
        return sum(map(_byte_len, element.values()))
    if isinstance(element, list | tuple):
        return sum(map(_byte_len, element))
    if isinstance(element, bytes | str):
        return len(element)
    return int(getattr(element, "nbytes", 0))
