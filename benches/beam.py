"""CPU time of converting TFRecord files to ArrayRecord by Apache Beam, in one process.

    python benches/beam.py --records 100000 --rounds 3

Each way runs in a process of its own, in turns, on the DirectRunner in memory; the time of the same
pipeline over one record is subtracted, and the median of the rounds is shown.
"""

import argparse
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = ("convert", "reshard", "collection", "array_record")
COMPRESSIONS = ("zstd:3", "uncompressed")


def write_inputs(folder: Path, num_records: int) -> None:
    """Two TFRecord files with records of 1 KiB, words of a text that compresses to about half."""
    import google_crc32c  # noqa: PLC0415

    def masked(data: bytes) -> int:
        crc = google_crc32c.value(data)
        return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF

    rng = random.Random(0)
    words = [rng.randbytes(rng.randrange(2, 10)).hex().encode() for _ in range(5000)]
    for part in range(2):
        with (folder / f"in-{part}.tfrecord").open("wb") as file:
            for _ in range(-(-num_records // 2)):
                record = b" ".join(rng.choices(words, k=100))[:1024]
                length = struct.pack("<Q", len(record))
                file.write(length + struct.pack("<I", masked(length)))
                file.write(record + struct.pack("<I", masked(record)))


def run(way: str, options: str, folder: Path, output: Path) -> float:
    """Converts the files; returns the CPU time in seconds."""
    import apache_beam as beam  # noqa: PLC0415
    from apache_beam.io import ReadFromTFRecord  # noqa: PLC0415

    import grainmill.beam as gb  # noqa: PLC0415

    if way == "array_record":
        from array_record.beam.arrayrecordio import WriteToArrayRecord as Theirs  # noqa: PLC0415

    pattern, prefix = str(folder / "in-*"), str(output / "out")
    before = resource.getrusage(resource.RUSAGE_SELF)
    with beam.Pipeline("DirectRunner") as pipeline:
        if way in {"convert", "reshard"}:
            count = 4 if way == "reshard" else None
            _ = pipeline | gb.ConvertTFRecordToArrayRecord(pattern, prefix, count, options=options)
        elif way == "collection":
            records = pipeline | gb.ReadFromTFRecordIndexed(pattern)
            _ = records | gb.WriteToArrayRecord(prefix, options=options)
        else:
            _ = pipeline | ReadFromTFRecord(pattern) | Theirs(prefix)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(way: str, options: str, folder: Path) -> float:
    """The time of a run in a fresh process."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as output:
        command = [sys.executable, __file__, "--run", way, options, str(folder), output]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=4)
    arguments = parser.parse_args()
    if arguments.run:
        way, options, folder, output = arguments.run
        print(run(way, options, Path(folder), Path(output)))
        return
    with tempfile.TemporaryDirectory() as name:
        one, many = Path(name, "one"), Path(name, "many")
        for folder, count in ((one, 2), (many, arguments.records)):
            folder.mkdir()
            write_inputs(folder, count)
        costs: dict[tuple[str, str], list[float]] = {}
        cases = [(way, options) for way in WAYS for options in COMPRESSIONS]
        cases.remove(("array_record", "uncompressed"))  # its sink has no options
        for _ in range(arguments.rounds):
            for case in cases:
                net = measured(*case, many) - measured(*case, one)
                costs.setdefault(case, []).append(net / arguments.records * 1e6)
                print(*case, f"{costs[case][-1]:.2f}", file=sys.stderr)
    print(f"us of CPU per record, {arguments.records} records, {os.cpu_count()} cores")
    for (way, options), values in costs.items():
        print(f"| {way} | {options} | {statistics.median(values):.2f} |")


if __name__ == "__main__":
    main()
