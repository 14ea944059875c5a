"""Records of a far server in mixtures with near ones, and beside pipelines over a slower server.

    python benches/far_mixtures.py                  # a table of all cases
    python benches/far_mixtures.py --cases beside --slow-ms 2000

A small server (`rust/object_store/examples/file_server.rs`) answers each request for one file
after a while, the slow one after longer. Each case runs in fresh processes, one after the other;
the table has the median of the far records a second, after a second, and beside it what part this
is of what 128 requests in flight allow.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

ROOT = Path(__file__).parents[1]
BATCH = 64
# Shares of the parts, and how many pipelines over the slow server run beside.
CASES = {
    "far alone": ({"far": 1}, 0),
    "half far, half near": ({"far": 0.5, "near": 0.5}, 0),
    "one far in five": ({"far": 0.2, "near": 0.8}, 0),
    "one far in twenty": ({"far": 0.05, "near": 0.95}, 0),
    "half far, half slow": ({"far": 0.5, "slow": 0.5}, 0),
    "far beside 1 pipeline of slow": ({"far": 1}, 1),
    "far beside 2 pipelines of slow": ({"far": 1}, 2),
    "far beside 4 pipelines of slow": ({"far": 1}, 4),
}


def pipeline(paths, shares):
    def part(name):
        source = grain.sources.ArrayRecordDataSource(paths[name])
        ds = grain.MapDataset.source(source).shuffle(seed=1).repeat()
        return ds.map(lambda _: name == "far")

    return grain.MapDataset.mix([part(name) for name in shares], [*shares.values()]).batch(BATCH)


def far_per_s(case, paths, seconds):
    """The far records that arrive in a second."""
    shares, num_beside = CASES[case]
    for _ in range(num_beside):
        beside = pipeline(paths, {"slow": 1}).to_iter_dataset()
        threading.Thread(target=lambda ds: [*ds], args=[beside], daemon=True).start()
    time.sleep(1 if num_beside else 0)
    batches = iter(pipeline(paths, shares).to_iter_dataset())
    began = time.perf_counter()
    while time.perf_counter() < began + 1:
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        count += int(np.sum(next(batches)))
    return count / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only those whose name contains this text")
    parser.add_argument("--far-ms", type=int, default=20)
    parser.add_argument("--slow-ms", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(far_per_s(*json.loads(options.child)), flush=True)
        os._exit(0)  # the pipelines beside do not end
    build = ["cargo", "build", "--release", "-p", "grainmill-object-store", "--example"]
    subprocess.run([*build, "file_server"], check=True, cwd=ROOT)
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    servers = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.array_record"
        with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
            for record in itertools.repeat(bytes(1024), 30_000):
                writer.write(record)
        paths = {"near": str(path)}
        try:
            for name, latency_ms in (("far", options.far_ms), ("slow", options.slow_ms)):
                command = [f"{target}/release/examples/file_server", path, str(latency_ms)]
                servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                address = servers[-1].stdout.readline().strip()
                paths[name] = f"http://{address}/{name}.array_record"
            print("| case | far records/s | of the most | load |")
            print("| --- | --- | --- | --- |")
            for case in CASES:
                if options.cases in case:
                    child = json.dumps([case, paths, options.seconds])
                    command = [sys.executable, __file__, "--child", child]
                    runs = [subprocess.check_output(command) for _ in range(options.runs)]
                    rate = statistics.median(map(float, runs))
                    share = rate * options.far_ms / 128_000
                    print(
                        f"| {case} | {rate:.0f} | {share:.2f} | {os.getloadavg()[0]:.1f} |",
                        flush=True,
                    )
        finally:
            for server in servers:
                server.kill()


if __name__ == "__main__":
    main()
