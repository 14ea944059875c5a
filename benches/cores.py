"""Elements per second and CPU per element by the number of cores a pipeline may use.

Each case runs in a process of its own with the affinity of 1, 2, 4, ... cores, at default options;
figures are medians of several rounds of a second.

    python benches/cores.py                          # all cases, as many cores as there are
    python benches/cores.py --cases images,packed --rounds 5
    python benches/cores.py --quick                  # small, one round: checks that it runs
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import images
import numpy as np
import parsing
import release_only  # noqa: F401

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import FirstFitPackIterDataset
from grainmill.sources import ArrayRecordDataSource
from grainmill.transforms import DecodeImage, ParseExample, ParseJson

ROUND_S = 1.0
WARM_UP_S = 0.5


def write(path, records, options="group_size:1,uncompressed"):
    with ArrayRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)


def prepare(folder, num_records):
    """The files of all cases in `folder`."""
    photos = [images.jpeg(images.photo(seed, 375, 500)) for seed in range(32)]
    write(folder / "images", [photos[i % 32] for i in range(num_records // 10)])
    examples = parsing.examples()
    examples = [examples[i % len(examples)] for i in range(num_records)]
    write(folder / "examples", examples)
    write(folder / "compressed", examples, "group_size:256,zstd")
    texts = parsing.texts()
    write(folder / "json", [texts[i % len(texts)] for i in range(num_records)])


def shuffled(path):
    return grain.MapDataset.source(ArrayRecordDataSource(str(path))).seed(1).shuffle().repeat()


def in_order(path):
    return grain.MapDataset.source(ArrayRecordDataSource(str(path))).repeat()


def tokens_of(index):
    return {"tokens": TOKENS[: 1 + index * 7919 % 1000]}


TOKENS = np.arange(1000, dtype=np.int32)
PARSE, PARSE_JSON = ParseExample(parsing.FEATURES), ParseJson(parsing.FIELDS)

# By name: the pipeline, and how many elements of the case are in one of its elements.
CASES = {
    "JPEG of 375x500, decoded, batches of 64": (
        lambda folder: shuffled(folder / "images").map(DecodeImage()).batch(64),
        64,
    ),
    "Example of 512 tokens, shuffled, batches of 256": (
        lambda folder: shuffled(folder / "examples").map(PARSE).batch(256),
        256,
    ),
    "Example of 512 tokens, zstd, in order, batches of 256": (
        lambda folder: in_order(folder / "compressed").map(PARSE).batch(256),
        256,
    ),
    "JSON, 3 of 10 fields, shuffled, batches of 256": (
        lambda folder: shuffled(folder / "json").map(PARSE_JSON).batch(256),
        256,
    ),
    "batches of 12 KB from a function, of 128": (
        lambda _: (
            grain.MapDataset.range(10**9)
            .map(lambda i: np.full(12_288, i & 255, np.uint8))
            .batch(128)
        ),
        128,
    ),
    "tokens packed into rows of 2048, batches of 64": (
        lambda _: grain.MapDataset.range(10**9).map(tokens_of).to_iter_dataset(),
        64,
    ),
}


def measure(name, folder, rounds, round_s):
    """Elements per second and CPU microseconds of an element: medians."""
    pipeline, per_element = CASES[name]
    dataset = pipeline(folder)
    if "packed" in name:
        dataset = FirstFitPackIterDataset(
            dataset, length_struct={"tokens": 2048}, num_packing_bins=64
        ).batch(per_element)
    elif isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset()
    iterator = iter(dataset)
    rates, costs = [], []
    for number in range(rounds + 1):
        length_s = round_s if number else WARM_UP_S
        started_s, started_cpu_s, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - started_s < length_s:
            next(iterator)
            count += per_element
        if number:
            rates.append(count / (time.perf_counter() - started_s))
            costs.append((time.process_time() - started_cpu_s) / count * 1e6)
    return statistics.median(rates), statistics.median(costs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="parts of names, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    round_s = 0.05 if options.quick else ROUND_S
    if options.child:
        name, folder = options.child
        print(json.dumps(measure(name, Path(folder), options.rounds, round_s)))
        return
    all_cores = sorted(os.sched_getaffinity(0))
    numbers = [2**i for i in range(len(all_cores).bit_length())]
    print(
        f"| case | {' | '.join(f'{n} cores' for n in numbers)} |\n|{' --- |' * (len(numbers) + 1)}"
    )
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), 200 if options.quick else 20_000)
        for name in CASES:
            if not any(part in name for part in options.cases.split(",")):
                continue
            cells = []
            for number in numbers:
                program = [sys.executable, __file__, "--child", name, folder]
                program += ["--rounds", "1" if options.quick else str(options.rounds)]
                program += ["--quick"] * options.quick
                done = subprocess.run(
                    program,
                    check=True,
                    stdout=subprocess.PIPE,
                    preexec_fn=lambda number=number: os.sched_setaffinity(0, all_cores[:number]),
                )
                rate, cost = json.loads(done.stdout)
                cells.append(f"{rate:,.0f}/s, {cost:.2f} us")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
