"""CPU time per element of sequential stages, compared with Grain.

Elements are requested with `next`, one by one, with default options. Each figure is the median of
several rounds of a fifth of a second, all in one process for each library and case; process CPU
time includes all threads.

    python benches/stages.py                                # grainmill alone
    python benches/stages.py --libraries grainmill,grain    # compared with Grain, if installed
"""

import argparse
import datetime
import importlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

RECORD = Path(__file__).parents[1] / "benches/record"
ROUNDS = 7
ROUND_S = 0.2


def load(library):
    """The module of `library`, and its module `experimental`."""
    name = "grainmill" if library == "grainmill" else "grain.python"
    return importlib.import_module(name), importlib.import_module(f"{name}.experimental")


def add_one(x):
    return x + 1


def is_even(x):
    return x % 2 == 0


def draw(x, rng):
    return x + rng.integers(10)


def read(g, *bounds):
    return g.MapDataset.range(*(bounds or (10**7,))).to_iter_dataset()


def filtered(g, _):
    return read(g).filter(is_even)


def random_mapped(g, _):
    return read(g).seed(1).random_map(draw)


def twelve_maps(g, _):
    ds = read(g)
    for _ in range(12):
        ds = ds.map(add_one)
    return ds


def zipped(g, x):
    return x.ZipIterDataset([read(g), read(g)])


def flat_mapped(g, x):
    class Copies(x.FlatMapTransform):
        max_fan_out = 4

        def flat_map(self, element):
            return [element] * (1 + element % 4)

    return x.FlatMapIterDataset(read(g), Copies())


def interleaved(g, x):
    parts = [read(g, 1000 * at, 1000 * at + 50) for at in range(200)]
    return x.InterleaveIterDataset(parts, cycle_length=16)


def packed(g, x):
    parts = [
        g.MapDataset.range(10**6)
        .map(lambda i, at=at: {"t": np.full(5 + (i + at) % 20, at, np.int32)})
        .to_iter_dataset()
        for at in range(35)
    ]
    mixed = g.IterDataset.mix(parts, [1 + at % 5 for at in range(35)])
    return x.FirstFitPackIterDataset(mixed, length_struct={"t": 64}, num_packing_bins=64)


def users(g, _):
    class Iterator(g.DatasetIterator):
        def __next__(self):
            return next(self._parent)

        def get_state(self):
            return self._parent.get_state()

        def set_state(self, state):
            self._parent.set_state(state)

    class Dataset(g.IterDataset):
        def __iter__(self):
            return Iterator(self._parent.__iter__())

    return Dataset(read(g)).map(add_one)


def thread_prefetched(g, x):
    return x.ThreadPrefetchIterDataset(read(g).map(add_one), prefetch_buffer_size=64)


CASES = {
    "range -> filter (half kept)": filtered,
    "range -> seed -> random_map": random_mapped,
    "range -> 12 maps": twelve_maps,
    "zip of two": zipped,
    "flat_map (2.5 each)": flat_mapped,
    "interleave of 200, cycle 16": interleaved,
    "first-fit pack of 35 mixed parts, per row": packed,
    "a user's IterDataset under a map": users,
    "ThreadPrefetch over a map": thread_prefetched,
}


def measure(library, case):
    """CPU microseconds per element in each round; an iterator that ends is reopened."""
    ds = CASES[case](*load(library))
    iterator = iter(ds)
    costs = []
    for _ in range(ROUNDS + 1):
        began, taken = time.process_time(), 0
        while time.process_time() - began < ROUND_S:
            count = sum(1 for _ in itertools.islice(iterator, 1000))
            taken += count
            if count < 1000:
                iterator = iter(ds)
        costs.append((time.process_time() - began) / taken * 1e6)
    return costs[1:]  # the first round warms up


def in_a_process(python, library, case):
    command = [python, __file__, "--one", library, case]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def table(pythons):
    lines = [
        f"| CPU us per element | {' | '.join(pythons)} |",
        f"| --- | {'--- | ' * len(pythons)}".rstrip(),
    ]
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        costs = [
            statistics.median(in_a_process(python, label.split()[0], case))
            for label, python in pythons.items()
        ]
        lines.append(f"| {case} | {' | '.join(f'{cost:.3g}' for cost in costs)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", default="grainmill", help="grainmill, grain, or both")
    parser.add_argument("--before", help="an interpreter with an earlier grainmill")
    parser.add_argument("--record", action="store_true", help="write the table to benches/record")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    pythons = {}
    for library in options.libraries.split(","):
        if options.before and library == "grainmill":
            pythons["grainmill before"] = options.before
        pythons[library] = sys.executable
    lines = table(pythons)
    print(lines)
    if options.record:
        now = datetime.datetime.now(datetime.UTC)
        text = (
            f"# Elements taken one by one from sequential stages, {now:%Y-%m-%d %H:%M} UTC\n\n"
            f"`python benches/stages.py --libraries {options.libraries}`; {platform.machine()}, "
            f"{os.cpu_count()} CPUs, Python {platform.python_version()}; default options, CPU time "
            f"of all threads.\n\n{lines}\n"
        )
        (RECORD / f"{now:%Y-%m-%d-%H%M}-stages.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
