"""How much memory a running pipeline adds to the process."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from grainmill._native import MixSchedule
from grainmill.array_record import ArrayRecordWriter

RECORD_LEN, NUM_RECORDS, BATCH_SIZE, PREFETCH = 100_000, 400, 64, 100
ARENA_BATCHES = 3
SLACK = 64 << 20

PROGRAM = """
import json, sys
import numpy as np
import grainmill as grain

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

def decode(record):
    return np.frombuffer(record, np.uint8)

path, threads, prefetch, batch_size = sys.argv[1], *map(int, sys.argv[2:])
source = grain.sources.ArrayRecordDataSource(path)
bare = peak()
ds = grain.MapDataset.source(source).shuffle(seed=1).repeat().map(decode)
ds = ds.to_iter_dataset(grain.ReadOptions(threads, prefetch)).batch(batch_size)
for _, batch in zip(range(60), ds):
    pass
print(json.dumps(peak() - bare))
"""


def write_records(path):
    rng = np.random.default_rng(0)
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for _ in range(NUM_RECORDS):
            writer.write(rng.bytes(RECORD_LEN))


def test_pipeline_stays_within_its_buffers(tmp_path):
    path = tmp_path / "records.array_record"
    write_records(path)
    bound = PREFETCH * RECORD_LEN + ARENA_BATCHES * BATCH_SIZE * RECORD_LEN + SLACK
    for threads in (0, 16):
        command = [sys.executable, "-c", PROGRAM, path, threads, PREFETCH, BATCH_SIZE]
        grown = json.loads(subprocess.check_output(list(map(str, command))))
        assert grown <= bound, f"{threads} threads: {grown / 1e6:.0f} of {bound / 1e6:.0f} MB"


BEYOND_MEMORY = """
import json, resource, threading, time
import numpy as np
import grainmill as grain

def ragged(i):
    return {"x": np.arange(5), "y": np.arange(i % 3)}

def packed(cls=grain.experimental.FirstFitPackIterDataset, cells=8, **options):
    ds = grain.MapDataset.range(10).map(ragged).to_iter_dataset()
    return cls(ds, length_struct={"x": cells, "y": 8}, **options)

numbers = grain.MapDataset.range(10).repeat()
rows = numbers.map(lambda i: np.full(50_000, i))
best_fit = grain.experimental.BestFitPackIterDataset
split = grain.experimental.ConcatThenSplitIterDataset
INLINE = grain.ReadOptions(num_threads=0)
rebatch = grain.experimental.RebatchIterDataset
large = {
    "numbers in a batch": numbers.to_iter_dataset().batch(2**40),
    "numbers in a batch, first": numbers.batch(2**40).to_iter_dataset(),
    "rows in a batch": rows.to_iter_dataset().batch(2**40),
    "rows in a batch, first": rows.batch(2**40).to_iter_dataset(),
    # It fills the memory: CPython gives up where several threads find none left.
    "rows in a batch, again": rebatch(rows.batch(2).to_iter_dataset(INLINE), 2**40),
    "cells, first-fit": packed(cells=2**28, num_packing_bins=30),
    "cells, more than addresses": packed(cells=2**62, num_packing_bins=30),
    "cells, best-fit": packed(best_fit, cells=2**40, num_packing_bins=30),
    "cells, split": packed(split, cells=2**40),
    "bins": packed(num_packing_bins=2**40),
    "bins, more than addresses": packed(best_fit, num_packing_bins=2**62),
}
with open("/proc/self/statm") as statm:
    limit = int(statm.read().split()[0]) * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
raised = {}
for name, ds in large.items():
    iterator = None
    try:
        iterator = iter(ds)
        next(iterator)
    except Exception as failure:
        raised[name] = type(failure).__name__
    else:
        raised[name] = None
    if iterator is not None:
        iterator.close()
    until = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.001)  # their stacks and what they compute would leave less for the next one
print(json.dumps(raised))
"""


def test_amounts_beyond_memory_are_errors():
    # Threads of failed pipelines may still run; each malloc arena would reserve 64 MB of addresses.
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    raised = json.loads(subprocess.check_output([sys.executable, "-c", BEYOND_MEMORY], env=env))
    assert len(raised) == 11
    assert set(raised.values()) == {"MemoryError"}, raised


def test_choices_beyond_memory_are_errors():
    with pytest.raises(MemoryError, match="choices"):
        MixSchedule([1, 2]).choose(0, 2**61)
