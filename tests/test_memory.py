"""What a running pipeline keeps in memory, beside the process itself."""

import json
import subprocess
import sys

import numpy as np

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
