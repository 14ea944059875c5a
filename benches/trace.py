"""What a timeline costs: CPU time of pipelines while one is taken, over that without one.

Rounds with and without alternate in one process, over iterators that stay open.

    python benches/trace.py                        # all cases
    python benches/trace.py --cases single,records --rounds 31
    python benches/trace.py --quick                # checks that it runs
"""

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

import grainmill as grain
from grainmill import MapDataset, ReadOptions
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

CALLER = ReadOptions(num_threads=0, prefetch_buffer_size=0)
ROUND_S = 0.3


def of_us(us):
    """A function that takes so many microseconds."""

    def spin(x):
        end_s = time.perf_counter() + us * 1e-6
        while time.perf_counter() < end_s:
            pass
        return x

    return spin


def endless():
    return MapDataset.range(10_000).repeat()


def packed(batch_size):
    documents = endless().map(lambda n: {"x": np.arange(100 + n % 300)}).to_iter_dataset(CALLER)
    rows = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"x": 1024}, num_packing_bins=8
    )
    return rows.batch(batch_size) if batch_size else rows


def records(folder, options, read_options):
    """Records in random order, of a file in groups that are decompressed for each."""
    path = folder / options.partition(",")[0].replace(":", "_")
    if not path.exists():
        rng = np.random.default_rng(0)
        with ArrayRecordWriter(str(path), options) as writer:
            for _ in range(20_000):
                writer.write(rng.bytes(250).hex().encode())
    source = ArrayRecordDataSource(str(path))
    return MapDataset.source(source).seed(0).shuffle().repeat().to_iter_dataset(read_options)


CASES = {
    "batches": lambda _: endless().map(of_us(0.3)).batch(64).to_iter_dataset(CALLER),
    "lazy": lambda _: endless().to_iter_dataset(CALLER).map(of_us(2)).batch(8),
    "packed": lambda _: packed(0),
    "packed_batches": lambda _: packed(4),
    "single": lambda _: endless().map(of_us(8)).to_iter_dataset(CALLER),
    "threads": lambda _: endless().map(of_us(20)).batch(16).to_iter_dataset(),
    "records": lambda folder: records(folder, "group_size:1,uncompressed", CALLER),
    "chunks": lambda folder: records(folder, "group_size:64,zstd", CALLER),
    "chunks_by_threads": lambda folder: records(folder, "group_size:64,zstd", ReadOptions()),
}


def cpu_of(iterator, count):
    """CPU seconds of all threads for so many elements."""
    started_s = time.process_time()
    for _ in itertools.islice(iterator, count):
        pass
    return time.process_time() - started_s


def measure(name, folder, rounds, round_s):
    """CPU microseconds of an element without a timeline; ratios of rounds with one to those."""
    iterator = iter(CASES[name](folder))
    count = 64
    while cpu_of(iterator, count) < round_s:
        count *= 2
    plain, ratios = [], []
    for number in range(rounds):
        found = {}
        for is_traced in (False, True) if number % 2 else (True, False):
            trace = grain.trace(folder / "trace.json") if is_traced else contextlib.nullcontext()
            with trace:
                found[is_traced] = cpu_of(iterator, count)
        plain.append(found[False] / count * 1e6)
        ratios.append(found[True] / found[False])
    iterator.close()
    return statistics.median(plain), statistics.quantiles(ratios, n=4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, round_s = (3, 0.01) if options.quick else (options.rounds, ROUND_S)
    print(f"{'case':<18} {'CPU us':>8}   with a timeline, quartiles")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases.split(","):
            plain_us, (low, median, high) = measure(name, Path(folder), rounds, round_s)
            print(f"{name:<18} {plain_us:8.2f}   {low:.3f} {median:.3f} {high:.3f}", flush=True)


if __name__ == "__main__":
    main()
