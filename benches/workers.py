"""Startup time, CPU cost and memory of worker processes, compared with Grain and torch.

Every figure is measured in a new process, with cold caches as for a user. CPU time is that of the
process and all its workers. Libraries that are not installed are skipped.

    python benches/workers.py                    # all cases, three rounds, a record
    python benches/workers.py --cases startup --peers grainmill,grain --rounds 1
    python benches/workers.py --quick            # small, one round: checks that it runs
"""

import argparse
import datetime
import importlib
import importlib.util
import itertools
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
import psutil
import release_only  # noqa: F401

from grainmill.array_record import ArrayRecordWriter

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benches/record"
SIDE = 224  # an image is SIDE x SIDE x 3 bytes
BATCH = 128
STEP_S = 0.05


# --- the work, the same for every library ------------------------------------------------------


def decode(record):
    return np.frombuffer(record, np.uint8).reshape(SIDE, SIDE, 3)


class Make:
    """An array of `byte_len` bytes for every index."""

    def __init__(self, byte_len):
        self.byte_len = byte_len

    def __call__(self, index):
        return np.full(self.byte_len, index & 255, np.uint8)


def tokenize(index):
    """About 50 us of pure Python: 64 hashes of prefixes of words."""
    text = f"the {index} quick brown foxes of no {index * 7919 % 1009} " * 6
    return np.array([hash(w[:k]) & 0xFFFF for w in text.split() for k in (1, 2, 3)][:64], np.int32)


class Files:
    """Records of ArrayRecord files for torch, read by the `array_record` package."""

    def __init__(self, paths, transform):
        self.paths, self.transform, self.source = paths, transform, None

    def __len__(self):
        return len(self._opened())

    def _opened(self):
        if self.source is None:
            module = importlib.import_module("array_record.python.array_record_data_source")
            self.source = module.ArrayRecordDataSource(self.paths)
        return self.source

    def __getitem__(self, index):
        return self.transform(self._opened()[index])

    def __getstate__(self):
        return {**self.__dict__, "source": None}


class Indices:
    def __init__(self, length, transform):
        self.length, self.transform = length, transform

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.transform(index)


def pipeline(peer, workers, transform, paths=None, batch=BATCH):
    """An iterator over batches, built as the library's documentation recommends."""
    if peer == "torch":
        data = importlib.import_module("torch.utils.data")
        source = Files(paths, transform) if paths else Indices(10**7, transform)
        loader = data.DataLoader(
            source, batch, shuffle=bool(paths), num_workers=workers, collate_fn=np.stack,
            drop_last=True,
        )  # fmt: skip
        return itertools.chain.from_iterable(itertools.repeat(loader))
    grain = importlib.import_module(peer)
    if peer == "grain":  # its worker processes read flags, which only `absl.app` would parse
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
    if paths:
        source = grain.sources.ArrayRecordDataSource(paths)
        ds = grain.MapDataset.source(source).shuffle(seed=1).repeat()
    else:
        ds = grain.MapDataset.range(10**7)
    ds = ds.map(transform)
    if peer == "grainmill":
        return iter(ds.to_iter_dataset(grain.ReadOptions(num_workers=workers)).batch(batch))
    # Threads do not speed up these functions, least of all in Grain.
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=0)).batch(batch)
    if workers:
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
        ds = ds.mp_prefetch(options)
    return iter(ds)


# --- one measurement in one process ------------------------------------------------------------


def cpu_s():
    """CPU time of this process and its running descendants."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:2])
    for child in me.children(recursive=True):
        total += sum(child.cpu_times()[:2])
    return total


def pss_mb():
    me = psutil.Process()
    return sum(p.memory_full_info().pss for p in (me, *me.children(recursive=True))) / 1e6


def finish(iterator):
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def startup(peer, workers, paths, **_):
    importlib.import_module("jax")  # as a training script does
    before, began = cpu_s(), time.perf_counter()
    iterator = pipeline(peer, workers, decode, paths)
    assert next(iterator).shape == (BATCH, SIDE, SIDE, 3)
    first_s = time.perf_counter() - began
    result = {"first_batch_s": first_s, "cpu_s": cpu_s() - before}
    finish(iterator)
    return result


def hand_over(peer, workers, byte_len, seconds, **_):
    rows = 64
    iterator = pipeline(peer, workers, Make(byte_len // rows), batch=rows)
    for _ in range(10):
        assert next(iterator).nbytes == byte_len
    before, began, count = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(iterator)
        count += 1
    result = {"parent_us_per_batch": (time.process_time() - before) / count * 1e6}
    finish(iterator)
    return result


def rate(iterator, seconds):
    for _ in range(4):
        next(iterator)
    before, began, count = cpu_s(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        count += len(next(iterator))
    elapsed_s = time.perf_counter() - began
    result = {"cpu_us_per_element": (cpu_s() - before) / count * 1e6, "per_s": count / elapsed_s}
    finish(iterator)
    return result


def images(peer, workers, paths, seconds, **_):
    return rate(pipeline(peer, workers, decode, paths), seconds)


def text(peer, workers, seconds, **_):
    return rate(pipeline(peer, workers, tokenize, batch=256), seconds)


def memory(peer, workers, paths, num_batches, **_):
    iterator = pipeline(peer, workers, decode, paths)
    max_mb = 0.0
    for number in range(num_batches):
        next(iterator)
        if number % 10 == 9:
            max_mb = max(max_mb, pss_mb())
    finish(iterator)
    return {"pss_mb": max_mb}


def overlap(peer, workers, paths, num_steps, **_):
    iterator = pipeline(peer, workers, decode, paths)
    for _ in range(3):
        next(iterator)
    waited_s, began = 0.0, time.perf_counter()
    for _ in range(num_steps):
        before = time.perf_counter()
        next(iterator)
        waited_s += time.perf_counter() - before
        time.sleep(STEP_S)
    result = {"idle_percent": 100 * waited_s / (time.perf_counter() - began)}
    finish(iterator)
    return result


# --- all of them -------------------------------------------------------------------------------

CASES = {
    "startup": (startup, (1, 2, 4, 16), {}),
    "hand_over_16MiB": (hand_over, (1, 2), {"byte_len": 1 << 24}),
    "hand_over_4KiB": (hand_over, (1, 2), {"byte_len": 1 << 12}),
    "images": (images, (0, 2), {}),
    "text": (text, (0, 2), {}),
    "memory": (memory, (0, 4), {}),
    "overlap": (overlap, (0, 1, 2), {}),
}
# With more workers, Grain and torch would take too long.
MAX_WORKERS = {"grain": 4, "torch": 4}


def measured(case, peer, workers, settings):
    job = {"case": case, "peer": peer, "workers": workers, **settings}
    command = [sys.executable, __file__, "--one", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{case} {peer} {workers}: failed\n{done.stderr[-1500:]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def one(job):
    function, _, settings = CASES[job.pop("case")]
    print(json.dumps(function(**{**job, **settings})))


def write_images(folder, count):
    rng = np.random.default_rng(0)
    paths = []
    for part in range(4):
        paths.append(str(folder / f"images-{part}.array_record"))
        with ArrayRecordWriter(paths[-1], "group_size:1,uncompressed") as writer:
            for _ in range(count // 4):
                writer.write(rng.integers(0, 255, SIDE * SIDE * 3, np.uint8).tobytes())
    return paths


def table(results):
    lines = ["| case | library | workers | figures, medians |", "|---|---|---|---|"]
    for (case, peer, workers), rounds in results.items():
        medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        figures = ", ".join(f"{name} {value:.4g}" for name, value in medians.items())
        lines.append(f"| {case} | {peer} | {workers} | {figures} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default="grainmill,grain,torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small, one round, no record")
    options = parser.parse_args()
    if options.one:
        one(json.loads(options.one))
        return
    peers = [p for p in options.peers.split(",") if importlib.util.find_spec(p) is not None]
    settings = {"seconds": 3, "num_batches": 100, "num_steps": 60}
    num_images, rounds = 4000, options.rounds
    if options.quick:
        settings, num_images, rounds = {"seconds": 0.3, "num_batches": 10, "num_steps": 5}, 400, 1
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        settings["paths"] = write_images(Path(folder), num_images)
        for number in range(rounds):
            for case in options.cases.split(","):
                for workers in CASES[case][1]:
                    for peer in peers:
                        if workers > MAX_WORKERS.get(peer, workers):
                            continue
                        figures = measured(case, peer, workers, settings)
                        if figures is not None:
                            results.setdefault((case, peer, workers), []).append(figures)
                            print(
                                f"round {number + 1}: {case} {peer} {workers}: {figures}",
                                flush=True,
                            )
    print(table(results))
    if not options.quick:
        now = datetime.datetime.now(datetime.UTC)
        name = RECORD / f"{now:%Y-%m-%d-%H%M}-workers.md"
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
        versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
        command = f"`python {' '.join(sys.argv)}`"
        name.write_text(
            f"# Worker processes, {now:%Y-%m-%d %H:%M} UTC\n\n{command}; {machine}; {versions}; "
            f"{rounds} rounds.\n\n{table(results)}\n",
            "utf-8",
        )
        print(f"written to {name}")


if __name__ == "__main__":
    main()
