"""What a row of a Parquet file costs, by the order in which rows are read.

    python benches/parquet.py [--rows 200000] [--runs 5]

Rows of 1 KiB (256 tokens of 32 bits), in row groups of 10,000, read as batches of 256 on the
calling thread. Prints the median of CPU time per row, of all threads, after a first pass.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import release_only  # noqa: F401

import grainmill as grain
from grainmill.sources import ParquetDataSource

BATCH_SIZE = 256
ROW_GROUP = 10_000
WINDOW = 100_000
# The lines that `compare.py` shows: its case, and who is measured.
COMPARED = {
    "in order, pyarrow": ("parquet.locality", "pyarrow/in_order"),
    "close order, window of 100,000": ("parquet.locality", "grainmill/window"),
    "global shuffle, all decoded rows fit into the cache": (
        "parquet.shuffled",
        "grainmill/shuffled",
    ),
}


def write(folder: Path, num_rows: int) -> dict[str, Path]:
    """Files of random tokens, with pages of several sizes, and of `bytes`."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32_000, (num_rows, 256), np.int32)
    lists = pa.FixedSizeListArray.from_arrays(tokens.ravel(), 256)
    table = pa.table({"tokens": lists.cast(pa.list_(pa.int32()))})
    blobs = pa.table({"blob": pa.array([row.tobytes() for row in tokens])})
    options = {"row_group_size": ROW_GROUP, "use_dictionary": False}
    small = {"write_page_index": True, "data_page_size": 8 << 10, "write_batch_size": 8}
    written = {
        "default": (table, {}),
        "pages of 8 KiB, index": (table, small),
        "bytes": (blobs, {"write_page_index": True}),
    }
    paths = {}
    for number, (name, (rows, more)) in enumerate(written.items()):
        paths[name] = folder / f"{number}.parquet"
        pq.write_table(rows, paths[name], **options, **more)
    return paths


def batches(source: ParquetDataSource, *, shuffled: bool) -> Callable[[int], Iterator[object]]:
    """A function that reads a number of rows in batches."""
    ds = grain.MapDataset.source(source)
    if shuffled:
        ds = ds.shuffle(seed=1)
    options = grain.ReadOptions(num_threads=0)
    iterator = iter(ds.repeat().batch(BATCH_SIZE).to_iter_dataset(options))

    def read(num_rows: int) -> Iterator[object]:
        for _ in range(num_rows // BATCH_SIZE):
            yield next(iterator)

    return read


def elements(source: ParquetDataSource) -> Callable[[int], Iterator[object]]:
    """A function that reads a number of shuffled rows, one by one."""
    ds = grain.MapDataset.source(source).shuffle(seed=1).repeat()
    iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    return lambda num_rows: (next(iterator) for _ in range(num_rows))


def with_pyarrow(path: Path) -> Callable[[int], Iterator[object]]:
    """The same with `pyarrow`, row group by row group in order, as NumPy batches."""

    def read(num_rows: int) -> Iterator[object]:
        file = pq.ParquetFile(path)
        left = num_rows
        while left > 0:
            for group in range(file.num_row_groups):
                values = file.read_row_group(group, use_threads=False)["tokens"].combine_chunks()
                rows = values.flatten().to_numpy().reshape(-1, 256)
                for start in range(0, min(len(rows), left), BATCH_SIZE):
                    yield rows[start : start + BATCH_SIZE].copy()
                left -= len(rows)
                if left <= 0:
                    return

    return read


def cpu_us(read: Callable[[int], Iterator[object]], num_rows: int) -> float:
    """CPU time per row."""
    before = time.process_time()
    for _ in read(num_rows):
        pass
    after = time.process_time()
    return 1e6 * (after - before) / num_rows


def main() -> None:
    """Measures all cases, alternating between them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print some cases, for compare.py")
    options = parser.parse_args()
    num_rows = options.rows
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), num_rows)
        plain, paged = paths["default"], paths["pages of 8 KiB, index"]
        all_rows = 4 << 30
        close = {"shuffle_seed": 1, "shuffle_window": WINDOW}
        cases = {
            "in order": (batches(ParquetDataSource(plain), shuffled=False), num_rows),
            "in order, pyarrow": (with_pyarrow(plain), num_rows),
            "close order, window of 100,000": (
                batches(ParquetDataSource(plain, **close), shuffled=False),
                num_rows,
            ),
            "close order, window of 10,000": (
                batches(
                    ParquetDataSource(plain, shuffle_seed=1, shuffle_window=10_000),
                    shuffled=False,
                ),
                num_rows,
            ),
            "global shuffle, all decoded rows fit into the cache": (
                batches(ParquetDataSource(plain, cache_bytes=all_rows), shuffled=True),
                num_rows,
            ),
            "the same, elements": (
                elements(ParquetDataSource(plain, cache_bytes=all_rows)),
                num_rows // 4,
            ),
            "the same, elements of bytes": (
                elements(ParquetDataSource(paths["bytes"], cache_bytes=all_rows)),
                num_rows // 4,
            ),
            "global shuffle, cache of 1 MiB, pages of 8 KiB": (
                batches(ParquetDataSource(paged, cache_bytes=1 << 20), shuffled=True),
                min(num_rows, 4096),
            ),
            "global shuffle, cache of 1 MiB, pages of 1 MiB": (
                batches(ParquetDataSource(paths["bytes"], cache_bytes=1 << 20), shuffled=True),
                min(num_rows, 512),
            ),
        }
        if options.json:
            cases = {name: case for name, case in cases.items() if name in COMPARED}
        times: dict[str, list[float]] = {name: [] for name in cases}
        for read, count in cases.values():
            cpu_us(read, count)
        for _ in range(options.runs):
            for name, (read, count) in cases.items():
                times[name].append(cpu_us(read, count))
        if options.json:
            costs: dict[str, dict[str, list[float]]] = {}
            for name, found in times.items():
                case, who = COMPARED[name]
                costs.setdefault(case, {})[who] = found
            print(json.dumps({"costs": costs, "missing": []}))
            return
        for name, found in times.items():
            print(f"{statistics.median(found):10.2f} us  {name}")


if __name__ == "__main__":
    main()
