"""CPU per record of each record format, and the speed of the scan that TFRecord needs once.

    python benches/record_formats.py [--megabytes 400] [--rounds 5]

Records of 1 KiB are read in a shuffled order in blocks of 1,024, from the page cache. A round
measures each format once, in turn; the table has the medians.
"""

import argparse
import gzip
import json
import random
import resource
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

import grainmill as grain
from grainmill._native import masked_crc32c
from grainmill.array_record import ArrayRecordWriter

RECORD_LEN = 1024
BLOCK_LEN = 1024


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def frame(record):
    length = struct.pack("<Q", len(record))
    crcs = [struct.pack("<I", masked_crc32c(data)) for data in (length, record)]
    return length + crcs[0] + record + crcs[1]


def write(folder, count):
    """Writes the same records in each format; returns a function that opens each."""
    rng = random.Random(1)
    records = [rng.randbytes(RECORD_LEN // 2).hex().encode() for _ in range(2048)]
    records = [records[number % len(records)] for number in range(count)]
    with ArrayRecordWriter(str(folder / "array_record"), "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    (folder / "tfrecord").write_bytes(b"".join(map(frame, records)))
    (folder / "tfrecord.gz").write_bytes(
        gzip.compress(b"".join(map(frame, records[: count // 16])), 1)
    )
    (folder / "lines").write_bytes(b"".join(record + b"\n" for record in records))
    ends = np.cumsum([len(record) for record in records], dtype="<u8").tobytes()
    (folder / "bag").write_bytes(b"".join(records) + ends)
    sources = grain.sources
    opened = {
        "ArrayRecord": lambda: sources.ArrayRecordDataSource(str(folder / "array_record")),
        "TFRecord": lambda: sources.TFRecordDataSource(folder / "tfrecord"),
        "JSON lines": lambda: sources.JsonLinesDataSource(folder / "lines"),
        "Bagz": lambda: sources.BagzDataSource(folder / "bag"),
    }
    return records, opened


def read_us(source, records, seed):
    """The CPU time per record."""
    order = np.random.default_rng(seed).permutation(len(source))
    assert source.__getitems__(order[:5]) == [records[number] for number in order[:5]]
    files = source._files
    before = cpu_s()
    for first in range(0, len(order), BLOCK_LEN):
        files.read(order[first : first + BLOCK_LEN])
    return (cpu_s() - before) / len(order) * 1e6


def scan_gb_s(folder, name, count):
    """The speed of a scan: bytes of the file by wall time, and by CPU time."""
    path = folder / name
    (folder / f".{name}.grainmill_index").unlink(missing_ok=True)
    wall, cpu = time.perf_counter(), cpu_s()
    source = grain.sources.TFRecordDataSource(path)
    wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
    assert len(source) == count
    return path.stat().st_size / wall / 1e9, path.stat().st_size / cpu / 1e9


def scan_costs(folder, count, rounds):
    """Microseconds of wall time per 1,000 bytes of a scan, as `compare.py` takes them."""
    rng = random.Random(1)
    frames = [frame(rng.randbytes(RECORD_LEN)) for _ in range(256)]
    (folder / "tfrecord").write_bytes(b"".join(frames[number % 256] for number in range(count)))
    scan_gb_s(folder, "tfrecord", count)  # the file is in the page cache, the code is loaded
    costs = [1 / scan_gb_s(folder, "tfrecord", count)[0] for _ in range(rounds)]
    return {"costs": {"scan.tfrecord": {"grainmill/scan": costs}}, "missing": []}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the scan, for compare.py")
    options = parser.parse_args()
    count = options.megabytes * 1_000_000 // RECORD_LEN
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.json:
            print(json.dumps(scan_costs(folder, count, options.rounds)))
            return
        records, opened = write(folder, count)
        (folder / "large").write_bytes(frame(bytes(1_000_000)) * options.megabytes)
        reads = {kind: [] for kind in opened}
        scans = {"tfrecord": [], "large": [], "tfrecord.gz": []}
        counts = {"tfrecord": count, "large": options.megabytes, "tfrecord.gz": count // 16}
        for number in range(options.rounds):
            for kind, open_source in opened.items():
                reads[kind].append(read_us(open_source(), records, number))
            for file, speeds in scans.items():
                speeds.append(scan_gb_s(folder, file, counts[file]))
    print(f"CPU per record of {RECORD_LEN} bytes, shuffled, us")
    for kind, costs in reads.items():
        print(f"  {kind:12} {statistics.median(costs):6.2f}")
    print("scan, GB/s of the file by wall time and by CPU time")
    names = {"tfrecord": "1 KiB", "large": "1 MB", "tfrecord.gz": "1 KiB, gzip"}
    for file, speeds in scans.items():
        wall, cpu = map(statistics.median, zip(*speeds, strict=True))
        print(f"  {names[file]:12} {wall:6.2f} {cpu:6.2f}")


if __name__ == "__main__":
    main()
