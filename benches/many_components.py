"""Threads, open files, memory and first batch of mixtures with many components, beside Grain.

Each component has several ArrayRecord files, a shuffle, and a function; its records are packed
first-fit, and the packed rows of all components mixed (`rows`), or the records of all components
are mixed and packed together (`records`). Batches of rows come from worker processes.

Every figure is measured in a new process. Threads, open files and memory are the largest of several
samples, over the process and all its descendants.

    python benches/many_components.py                      # all cases, a table, no record
    python benches/many_components.py --record             # also writes it to benches/record/
    python benches/many_components.py --peers grainmill --components 100 --workers 4
    python benches/many_components.py --quick              # small: checks that it runs
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
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
FILES = 3
RECORDS_PER_FILE = 400
ROW = 256
BINS = 16
BATCH = 32
FUNCTIONS = ("cheap", "waiting")
FORMS = ("rows", "records")


def write_files(folder, count):
    """The paths of each component's files, with token sequences of 16 to 255 tokens."""
    rng = np.random.default_rng(0)
    components = []
    for number in range(count):
        paths = [str(folder / f"{number:03d}-{part}.array_record") for part in range(FILES)]
        for path in paths:
            with ArrayRecordWriter(path, "group_size:1") as writer:
                for length in rng.integers(16, ROW, RECORDS_PER_FILE):
                    writer.write(rng.integers(1, 30_000, length, np.int32).tobytes())
        components.append(paths)
    return components


# --- the pipeline, the same for both libraries ---------------------------------------------------


def cheap(record):
    return {"tokens": np.frombuffer(record, np.int32)}


def waiting(record):
    time.sleep(0.002)  # as a request to a tokenizer service
    return {"tokens": np.frombuffer(record, np.int32)}


def pipeline(grain, paths, form, function, workers):
    """A dataset of batches, with default options except for the number of workers."""

    def component(number):
        source = grain.sources.ArrayRecordDataSource(paths[number])
        ds = grain.MapDataset.source(source).shuffle(seed=number).repeat()
        return ds.map({"cheap": cheap, "waiting": waiting}[function])

    def packed(ds):
        return grain.experimental.FirstFitPackIterDataset(
            ds.to_iter_dataset(), length_struct={"tokens": ROW}, num_packing_bins=BINS
        )

    components = [component(number) for number in range(len(paths))]
    if form == "rows":
        ds = grain.IterDataset.mix([packed(ds) for ds in components])
    else:
        ds = packed(grain.MapDataset.mix(components))
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
    return ds.batch(BATCH).mp_prefetch(options)


# --- measuring ------------------------------------------------------------------------------------


def resources():
    """Threads, open files, and MB of this process and its descendants: all, and the largest."""
    me = psutil.Process()
    threads, files, pss = [], [], []
    for process in (me, *me.children(recursive=True)):
        try:
            threads.append(process.num_threads())
            files.append(process.num_fds())
            pss.append(process.memory_full_info().pss / 1e6)
        except psutil.Error:  # it has just ended
            continue
    return {
        "threads": sum(threads),
        "threads_of_one": max(threads),
        "files": sum(files),
        "files_of_one": max(files),
        "pss_mb": sum(pss),
    }


def cpu_s():
    """CPU time of this process and its running descendants."""
    me = psutil.Process()
    processes = (me, *me.children(recursive=True))
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def one(peer, paths, form, function, *, workers, seconds):
    """The largest figures while batches are taken for `seconds`."""
    grain = importlib.import_module(peer)
    if peer == "grain":  # its worker processes read flags, which only `absl.app` would parse
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
    before_mb = resources()["pss_mb"]
    began = time.perf_counter()
    iterator = iter(pipeline(grain, paths, form, function, workers))
    assert next(iterator)["tokens"].shape == (BATCH, ROW)
    first_s = time.perf_counter() - began
    largest = resources()
    before_s, began, sampled_s, count = cpu_s(), time.perf_counter(), 0.0, 0
    while (elapsed_s := time.perf_counter() - began) < seconds:
        next(iterator)
        count += 1
        if elapsed_s - sampled_s > seconds / 10:
            sampled_s = elapsed_s
            now = resources()
            largest = {name: max(value, now[name]) for name, value in largest.items()}
    rows_per_s = count * BATCH / (time.perf_counter() - began)
    cpu_us = (cpu_s() - before_s) / (count * BATCH) * 1e6
    iterator.close()
    largest["pss_mb"] -= before_mb
    return {"first_batch_s": first_s, "rows_per_s": rows_per_s, "cpu_us": cpu_us, **largest}


def measured(job):
    """The figures of `one` in a new process; `None` if it failed or took too long."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "--one", json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env=environment
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(done.stderr[-1500:], flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


HEADER = (
    "| library | mixed | function | components | workers | first batch, s | rows a second "
    "| CPU us a row | threads, largest process | open files, largest process | memory, MB |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def line(job, figures):
    start = (
        f"| {job['peer']} | {job['form']} | {job['function']} "
        f"| {len(job['paths'])} | {job['workers']} |"
    )
    if figures is None:
        return f"{start} failed, or over 300 s | | | | | |"
    return (
        f"{start} {figures['first_batch_s']:.2f} | {figures['rows_per_s']:.0f} "
        f"| {figures['cpu_us']:.1f} | {figures['threads']}, {figures['threads_of_one']} "
        f"| {figures['files']}, {figures['files_of_one']} | {figures['pss_mb']:.0f} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--components", type=int, nargs="+", default=[8, 35, 100])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--peers", nargs="+", default=["grainmill", "grain"])
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS)
    parser.add_argument("--most-grain", type=int, default=8, help="components that Grain is given")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--record", action="store_true", help="write to benches/record/")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(**json.loads(options.one))))
        return
    if options.quick:
        options.components, options.workers, options.seconds = [4], 2, 0.3
    peers = [peer for peer in options.peers if importlib.util.find_spec(peer) is not None]
    lines = [HEADER]
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), max(options.components))
        for form in options.forms:
            for function in options.functions:
                for count in options.components:
                    for peer in peers:
                        if peer == "grain" and count > options.most_grain:
                            continue
                        job = {
                            "peer": peer, "paths": paths[:count], "form": form,
                            "function": function, "workers": options.workers,
                            "seconds": options.seconds,
                        }  # fmt: skip
                        lines.append(line(job, measured(job)))
                        print(lines[-1], flush=True)
    if options.record:
        now = datetime.datetime.now(datetime.UTC)
        path = RECORD / f"{now:%Y-%m-%d-%H%M}-many-components.md"
        command = f"`python benches/many_components.py {' '.join(sys.argv[1:])}`"
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
        path.write_text(
            f"# Mixtures of many components, {now:%Y-%m-%d %H:%M} UTC\n\n{command}; {machine}; "
            f"each component has {FILES} files; batches of {BATCH} rows of {ROW} tokens.\n\n"
            + "\n".join(lines)
            + "\n",
            "utf-8",
        )
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
