"""The workers of a pool read the index of a file once and share it."""

import os
from pathlib import Path

import pytest
from under_test import IS_GRAIN
from worker_harness import ENTRANCES, opened

if IS_GRAIN:
    pytest.skip("how grainmill reads", allow_module_level=True)

from grainmill import MapDataset, _native
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

NUM_RECORDS = 400_000
IO = Path("/proc/self/io")

pytestmark = pytest.mark.skipif(
    not IO.exists(), reason="the bytes that a process has read are unknown"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "long.array_record"
    with ArrayRecordWriter(str(path), "group_size:1") as writer:
        for number in range(NUM_RECORDS):
            writer.write(number.to_bytes(4, "little") * (1 + number % 7))
    return str(path)


def bytes_read():
    return int(IO.read_text().split("rchar:")[1].split()[0])


BYTES_AT_INIT = [0]


def record_bytes(*_):
    BYTES_AT_INIT.append(bytes_read())


def number_and_usage(record):
    number = int.from_bytes(record[:4], "little")
    assert record == number.to_bytes(4, "little") * (1 + number % 7)
    usage = bytes_read() - BYTES_AT_INIT[-1], _native.index_bytes(), _native.shared_index_bytes()
    return number, os.getpid(), usage


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_index_is_read_by_one_worker_and_seen_by_all(path, entrance, num_workers):
    footer_len = bytes_read()
    assert len(ArrayRecordDataSource([path])) == NUM_RECORDS
    footer_len = bytes_read() - footer_len
    assert footer_len > NUM_RECORDS
    ds = MapDataset.source(ArrayRecordDataSource([path])).shuffle(seed=1)[:1500]
    numbers, usages = [], {}
    ds = ds.map(number_and_usage)
    for number, worker, usage in opened(ds, entrance, num_workers, worker_init_fn=record_bytes):
        numbers.append(number)
        usages[worker] = usage
    assert numbers == [number for number, _, _ in ds]
    assert len(usages) == 1 if num_workers == 1 else len(usages) > 1
    most_read, *others = sorted((read for read, _, _ in usages.values()), reverse=True)
    assert most_read > footer_len
    # Every worker reads the last two blocks of the file and some records.
    assert all(read < footer_len / 2 for read in others)
    for _, own, shared in usages.values():
        assert own < 1000
        assert 4 * NUM_RECORDS < shared < 4 * NUM_RECORDS + 1000
