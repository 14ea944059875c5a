"""Cost of an element by the size of a plan: in datasets, files, chunks, pipelines and features.

CPU time per element by size, over three decades and more, and the time to build the dataset and
until its first element. An element has to pay for its own stages and features; apart from these,
no cost should grow faster than a logarithm. Figures are the minimum of several rounds.

    python benches/scaling.py                          # all cases, a table, no record
    python benches/scaling.py --record                 # also writes the table to benches/record/
    python benches/scaling.py --cases "mix of ranges" --most 1000
    python benches/scaling.py --quick                  # small, one round: checks that it runs
"""

import argparse
import datetime
import gc
import itertools
import math
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import many_chunks
import numpy as np
import release_only  # noqa: F401

from grainmill import MapDataset
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benches/record"
RECORDS_PER_FILE = 20

PARTS = (10, 100, 1000, 10_000, 100_000)
FILES = (1, 10, 100, 1000, 10_000)
LINKS = (100, 1000, 10_000, 100_000)
CHUNKS = (100_000, 1_000_000, 10_000_000, 100_000_000)
PIPELINES = (1, 2, 4, 8)


def add(number):
    return lambda x: x + number


def increment(x):
    return x + 1


def num_bytes(record):
    return len(record)


# --- the plans ----------------------------------------------------------------------------------


class Cases:
    """Plans by name and size; files are written when they are first needed."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._paths = []

    def _sources(self, count):
        while len(self._paths) < count:
            path = self._folder / f"{len(self._paths):06d}.array_record"
            with ArrayRecordWriter(str(path), "group_size:1") as writer:
                for record in range(RECORDS_PER_FILE):
                    writer.write(record.to_bytes(4, "little") * 25)
            self._paths.append(str(path))
        return self._paths[:count]

    def _links(self, count):
        """As many paths of the first ten files, since ten are read as fast as all of them."""
        paths = self._sources(10)
        folder = self._folder / f"links-{count}"
        if not folder.exists():
            folder.mkdir()
            for number in range(count):
                os.link(paths[number % 10], folder / f"{number:06d}.array_record")
        return [str(folder / f"{number:06d}.array_record") for number in range(count)]

    def linked(self, count):
        return MapDataset.source(ArrayRecordDataSource(self._links(count))).shuffle(seed=1)

    def chunks(self, count):
        path = self._folder / f"{count}-chunks.array_record"
        if not path.exists():
            many_chunks.write(path, count)
        return MapDataset.source(ArrayRecordDataSource(str(path))).shuffle(seed=1)

    def pipelines(self, count):
        sources = [ArrayRecordDataSource(path) for path in self._sources(count)]
        return Together([MapDataset.source(source).shuffle(seed=1) for source in sources])

    def ranges(self, count):
        return [MapDataset.range(n, n + 200) for n in range(count)]

    def mapped(self, count):
        return [ds.map(add(n)) for n, ds in enumerate(self.ranges(count))]

    def shuffled(self, count):
        return [ds.shuffle(seed=n).map(add(n)) for n, ds in enumerate(self.ranges(count))]

    def files(self, count):
        return [MapDataset.source(ArrayRecordDataSource(path)) for path in self._sources(count)]

    def weights(self, count):
        return [1 + (7 * n % 10) / 10 for n in range(count)]

    def all(self):
        """For each case: its name, unit and sizes, and a function from a size to a dataset."""
        joins = {"mix": MapDataset.mix, "concatenate": MapDataset.concatenate}
        kinds = {
            "ranges": self.ranges,
            "mapped ranges": self.mapped,
            "shuffled mapped ranges": self.shuffled,
        }
        for (join, joined), (kind, parts) in itertools.product(joins.items(), kinds.items()):
            yield f"{join} of {kind}", "parts", PARTS, lambda n, j=joined, p=parts: j(p(n))
        yield (
            "mix of ranges by weights",
            "parts",
            PARTS,
            lambda n: MapDataset.mix(self.ranges(n), self.weights(n)),
        )
        yield (
            "shuffled concatenation of ranges",
            "parts",
            PARTS,
            lambda n: MapDataset.concatenate(self.ranges(n)).shuffle(seed=1),
        )
        # Many machines limit the open files of a process to about 10,000.
        for join, joined in joins.items():
            yield f"{join} of files", "parts", FILES, lambda n, j=joined: j(self.files(n))
        yield (
            "one source, shuffled",
            "files",
            FILES,
            lambda n: MapDataset.source(ArrayRecordDataSource(self._sources(n))).shuffle(seed=1),
        )
        yield "one source of links, shuffled", "files", LINKS, self.linked
        yield "one file, shuffled", "chunks", CHUNKS, self.chunks
        yield "pipelines in turns", "pipelines", PIPELINES, self.pipelines
        yield "maps after each other", "stages", (1, 10, 100), staged
        yield "slices after each other", "stages", (1, 10, 100), sliced
        yield "features of an element, batches of 32", "features", (1, 10, 100, 1000), featured
        yield "shuffled epochs", "records", (2, 10, 100, 1000, 10_000), shuffled_epochs


class Together:
    """Pipelines of one process, of which one gives an element after the other."""

    def __init__(self, datasets):
        self._datasets = datasets

    def repeat(self):
        return Together([ds.repeat() for ds in self._datasets])

    def __iter__(self):
        iterators = [iter(ds.to_iter_dataset()) for ds in self._datasets]
        return itertools.chain.from_iterable(zip(*iterators, strict=True))


def staged(count):
    ds = MapDataset.range(1_000_000)
    for _ in range(count):
        ds = ds.map(increment)
    return ds


def sliced(count):
    ds = MapDataset.range(1_000_000)
    for _ in range(count):
        ds = ds[1:]
    return ds


def featured(count):
    names = [f"feature_{n}" for n in range(count)]
    row = np.arange(4)
    return MapDataset.range(1_000_000).map(lambda _: dict.fromkeys(names, row)).batch(32)


def shuffled_epochs(count):
    return MapDataset.range(count).shuffle(seed=1)


# --- measuring ----------------------------------------------------------------------------------


def measured(make, *, seconds, rounds):
    """Milliseconds to build and to the first element, and microseconds per element after it."""
    make()  # writes the files
    began = time.process_time()
    ds = make().repeat()
    built_s = time.process_time() - began
    best, first_s = math.inf, math.inf
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        iterator = iter(ds)
        next(iterator)
        first_s = min(first_s, time.process_time() - began)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in itertools.islice(iterator, 100):
                pass
        count, end = 0, time.perf_counter() + seconds
        cpu_began = time.process_time()
        while time.perf_counter() < end:
            for _ in itertools.islice(iterator, 100):
                count += 1
        best = min(best, (time.process_time() - cpu_began) / count)
    return built_s * 1e3, first_s * 1e3, best * 1e6


def three_digits(value):
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def table(rows):
    lines = [
        "| case | size | build, ms | first element, ms | element, us | relative to the smallest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    smallest = {}
    for case, unit, size, built, first, element in rows:
        smallest.setdefault(case, element)
        figures = [*map(three_digits, (built, first, element, element / smallest[case]))]
        lines.append(f"| {case} | {size:,} {unit} | {' | '.join(figures)} |")
    return "\n".join(lines)


def commit():
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", help="only cases whose name contains this text")
    parser.add_argument("--most", type=int, default=100_000, help="the largest size")
    parser.add_argument("--seconds", type=float, default=0.5, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write to benches/record/")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.most, options.seconds, options.rounds = 100, 0.02, 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, unit, sizes, make in Cases(folder).all():
            if options.cases and options.cases not in name:
                continue
            for size in sizes:
                if size <= options.most:
                    figures = measured(
                        lambda make=make, size=size: make(size),
                        seconds=options.seconds,
                        rounds=options.rounds,
                    )
                    rows.append((name, unit, size, *figures))
                    print(table(rows).split("\n")[-1], flush=True)
    if options.record:
        now = datetime.datetime.now(datetime.UTC)
        head = (
            f"CPU microseconds per element, {now:%Y-%m-%d %H:%M}, {platform.machine()}, "
            f"{os.cpu_count()} CPUs, minimum of {options.rounds} rounds, commit {commit()}.\n\n"
            "`python benches/scaling.py --record`\n\n"
        )
        RECORD.mkdir(exist_ok=True)
        path = RECORD / f"{now:%Y-%m-%d-%H%M}-scaling.md"
        path.write_text(head + table(rows) + "\n", "utf-8")
        print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
