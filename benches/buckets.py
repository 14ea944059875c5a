"""Reads records of 100 KiB in random order from a bucket on this machine, beside `curl`.

A small server (`rust/object_store/examples/file_server.rs`) answers both: an object of a bucket for
grainmill, whose requests are signed for S3, and the same ranges of the same object for
`curl --parallel` with 32 requests in flight. Runs alternate; the medians are compared.

    python benches/buckets.py               # prints records per second and CPU per record
    python benches/buckets.py --record      # also writes benches/record/DATE-buckets.json
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

ROOT = Path(__file__).parents[1]
RECORD_LEN = 100 << 10
IN_FLIGHT = 32

CLIENT = """
import json, resource, sys, time
import numpy as np
import grainmill as grain
url, num_records, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source = grain.sources.ArrayRecordDataSource(url)
ds = grain.MapDataset.source(source).shuffle(seed=0).repeat()
read = grain.ReadOptions(num_threads=in_flight, prefetch_buffer_size=4 * in_flight)
iterator = iter(ds.to_iter_dataset(read))
for _ in range(200):
    next(iterator)
before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
total = sum(len(next(iterator)) for _ in range(num_records))
wall = time.perf_counter() - started
after = resource.getrusage(resource.RUSAGE_SELF)
assert total == num_records * (100 << 10), total
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([wall, cpu]))
"""


def write_file(path: Path, num_records: int) -> list[tuple[int, int]]:
    """Writes records that cannot be compressed; returns about where each one is."""
    from grainmill.array_record import ArrayRecordWriter  # noqa: PLC0415

    random = np.random.default_rng(0)
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for _ in range(num_records):
            writer.write(random.bytes(RECORD_LEN))
    return [(at, at + RECORD_LEN + 60) for at in range(64, num_records * RECORD_LEN, RECORD_LEN)]


def run_curl(url: str, ranges: list[tuple[int, int]], folder: Path) -> tuple[float, float]:
    """The seconds and CPU seconds in which `curl` reads `ranges`."""
    config = folder / "curl"
    lines = []
    for first, last in ranges:
        lines += [f'url = "{url}"', f'range = "{first}-{last - 1}"', 'output = "/dev/null"', "next"]
    config.write_text("\n".join(["silent", *lines[:-1]]))
    command = ["curl", "--parallel", "--parallel-max", str(IN_FLIGHT), "--config", str(config)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def run_grainmill(address: str, num_reads: int) -> tuple[float, float]:
    """The seconds and CPU seconds in which a new process reads that many records."""
    environment = dict(
        os.environ,
        AWS_ENDPOINT_URL=f"http://{address}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    command = [sys.executable, "-c", CLIENT, "s3://bucket/object", str(num_reads), str(IN_FLIGHT)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    wall, cpu = json.loads(done.stdout)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2000, help="records in the object")
    parser.add_argument("--reads", type=int, default=10_000, help="reads of one run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--server", help="the program that serves; compiled if not given")
    parser.add_argument("--json", action="store_true", help="print all costs, for compare.py")
    parser.add_argument("--record", action="store_true", help="write the result to benches/record")
    options = parser.parse_args()
    server = options.server
    if server is None:
        build = ["cargo", "build", "--release", "-p", "grainmill-object-store"]
        subprocess.run([*build, "--example", "file_server"], check=True, cwd=ROOT)
        target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
        server = f"{target}/release/examples/file_server"
    results: dict[str, list[tuple[float, float]]] = {"curl": [], "grainmill": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = write_file(folder / "object", options.records)
        order = np.random.default_rng(1).integers(0, len(places), options.reads)
        ranges = [places[index] for index in order.tolist()]
        with subprocess.Popen([server, folder / "object"], stdout=subprocess.PIPE, text=True) as at:
            address = at.stdout.readline().strip()
            try:
                for _ in range(options.runs):
                    results["curl"].append(run_curl(f"http://{address}/object", ranges, folder))
                    results["grainmill"].append(run_grainmill(address, options.reads))
            finally:
                at.kill()
    if options.json:
        wall_us = {
            f"{who}/in_flight_32": [wall / options.reads * 1e6 for wall, _ in runs]
            for who, runs in results.items()
        }
        print(json.dumps({"costs": {"bucket.s3": wall_us}, "missing": []}))
        return
    rates = {
        who: statistics.median(options.reads / wall for wall, _ in runs)
        for who, runs in results.items()
    }
    for who, runs in results.items():
        cpu = statistics.median(cpu for _, cpu in runs) / options.reads * 1e6
        each = " ".join(f"{options.reads / wall:.0f}" for wall, _ in runs)
        print(f"{who}: {rates[who]:.0f} records/s, {cpu:.0f} us of CPU each ({each})")
    print(f"grainmill / curl: {rates['grainmill'] / rates['curl']:.0%}")
    if options.record:
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "reads": options.reads,
            "in_flight": IN_FLIGHT,
            "seconds_and_cpu_seconds": results,
        }
        path = ROOT / "benches/record" / f"{record['date'][:10]}-buckets.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
