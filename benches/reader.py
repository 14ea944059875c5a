"""Random reads of ArrayRecord files by number of records, compared with array_record's reader.

Every file has one record per chunk, so that its index is as large as possible. Results are checked
before anything is timed; each figure is measured in a new process. Without array_record only
grainmill's are shown.

    python benches/reader.py            # 1,000 to 10,000,000 records: a minute, 1 GB of disk
    python benches/reader.py --quick    # small: checks that it runs
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

from grainmill.array_record import ArrayRecordWriter

RECORD = Path(__file__).parents[1] / "benches/record"
MODULES = {
    "grainmill": "grainmill.array_record",
    "array_record": "array_record.python.array_record_module",
}
COUNTS = (1_000, 100_000, 1_000_000, 10_000_000)


def record(index):
    """The record at `index`: the index in eight bytes, then some constant ones."""
    return index.to_bytes(8, "little") + b"grainmill"


def write(path, count):
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for index in range(count):
            writer.write(record(index))


def memory():
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def reader_of(library, path):
    return importlib.import_module(MODULES[library]).ArrayRecordReader(str(path))


def measure(library, path, count, reads):
    """CPU microseconds to open, for the first and for a random read, and bytes of the index."""
    reader_of(library, path).close()  # imports it, and loads the file's end into the page cache
    before, began = memory(), time.process_time()
    reader = reader_of(library, path)
    assert reader.num_records() == count
    opened_s = time.process_time() - began
    indices = np.random.default_rng(1).integers(0, count, reads).tolist()
    began = time.process_time()
    assert reader.read([indices[0]]) == [record(indices[0])]  # loads what is loaded lazily
    first_s = time.process_time() - began
    index_bytes = memory() - before
    costs = []
    for _ in range(5):
        for index in indices:  # so the timed reads hit the page cache
            assert reader.read([index]) == [record(index)]
        began = time.process_time()
        for index in indices:
            reader.read([index])
        costs.append((time.process_time() - began) / reads * 1e6)
    return {
        "open_us": opened_s * 1e6,
        "first_read_us": first_s * 1e6,
        "read_us": statistics.median(costs),
        "index_bytes_per_record": index_bytes / count,
    }


def in_a_process(library, path, count, reads):
    command = [sys.executable, __file__, "--one", library, path, count, reads]
    return json.loads(subprocess.check_output(list(map(str, command)), text=True))


def table(counts):
    lines = [
        "| records | library | open, us | first read, us | read, us | index, bytes per record |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    installed = [name for name in MODULES if importlib.util.find_spec(name) is not None]
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.array_record"
            print(f"{count:,} records", file=sys.stderr, flush=True)
            write(path, count)
            for library in installed:
                # array_record's cost grows with the file; 20 reads take a second.
                reads = 2000 if library == "grainmill" or count <= 1000 else 20
                costs = in_a_process(library, path, count, reads).values()
                figures = " | ".join(f"{cost:,.3g}" for cost in costs)
                lines.append(f"| {count:,} | {library} | {figures} |")
            path.unlink()
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, no record")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        library, path, count, reads = options.one
        print(json.dumps(measure(library, path, int(count), int(reads))))
        return
    lines = table(COUNTS[:2] if options.quick else COUNTS)
    print(lines)
    if options.quick:
        return
    now = datetime.datetime.now(datetime.UTC)
    text = (
        f"# Random reads by the number of records, {now:%Y-%m-%d %H:%M} UTC\n\n"
        f"`python benches/reader.py`; {platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}; one record per chunk, 17 bytes each, CPU time.\n\n{lines}\n"
    )
    (RECORD / f"{now:%Y-%m-%d-%H%M}-reader.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
