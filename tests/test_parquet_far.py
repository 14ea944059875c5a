"""Parquet files on slow storage: how many requests are in flight, and how much memory they take."""

import gc
import pickle
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_server import BucketServer, Fault
from effort import cases

import grainmill as grain
from grainmill._evaluate.sources.row_source import RowSource
from grainmill._native import GrainmillError, ReadQueue
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import ParquetIterDataset
from grainmill.sources import ArrayRecordDataSource, ParquetDataSource

LATENCY_S = 0.02
NUM_ROWS = 8000


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**31, (NUM_ROWS, 64), np.int32)
    lists = pa.FixedSizeListArray.from_arrays(tokens.ravel(), 64).cast(pa.list_(pa.int32()))
    return pa.table({"id": pa.array(np.arange(NUM_ROWS)), "tokens": lists})


def encoded(table, folder, **options):
    path = folder / "x.parquet"
    options = {"row_group_size": 2000, "use_dictionary": False, "compression": "none", **options}
    pq.write_table(table, path, **options)
    return path.read_bytes()


@pytest.fixture
def server():
    with BucketServer() as server:
        yield server


PAGES = {"write_page_index": True, "data_page_size": 16 << 10, "write_batch_size": 16}


@pytest.fixture
def small_pages(server, table, tmp_path):
    server.put("/x.parquet", encoded(table, tmp_path, **PAGES))
    return f"{server.url}/x.parquet"


def started_anew(server, keeps=0):
    server.requests.clear()
    server.max_active = 0
    server.latency_s = LATENCY_S
    server.keeps = keeps


def ranges_of(server):
    found = [re.match(r"bytes=(\d+)-(\d+)", each.headers["range"]) for each in server.requests]
    return [(int(each[1]), int(each[2]) + 1) for each in found]


def take(iterable, count):
    iterator = iter(iterable)
    return [next(iterator) for _ in range(count)]


def ids(batches):
    return np.concatenate([batch["id"] for batch in batches]).tolist()


def sequence(ds, batch_size, order):
    """A pipeline that batches downstream or upstream of `to_iter_dataset`."""
    options = grain.ReadOptions(num_threads=4)
    if order == "after":
        return ds.to_iter_dataset(options).batch(batch_size)
    return ds.batch(batch_size).to_iter_dataset(options)


@pytest.mark.parametrize("order", ["after", "before"])
def test_shuffled_rows_have_as_many_requests_in_flight_as_records(server, tmp_path, order):
    # The chunks of the column that is read are as far apart as the records: too far to be joined.
    noise = np.random.default_rng(0).bytes(280_000)
    wide = pa.table({"id": pa.array(np.arange(1600)), "noise": pa.array([noise[:35_000]] * 1600)})
    server.put("/x.parquet", encoded(wide, tmp_path, write_page_index=True, row_group_size=8))
    path = tmp_path / "x.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for _ in range(200):
        writer.write(noise)
    writer.close()
    server.put("/x.array_record", path.read_bytes())
    most = []
    for source in (
        ArrayRecordDataSource(f"{server.url}/x.array_record"),
        ParquetDataSource(f"{server.url}/x.parquet", columns=["id"]),
    ):
        ds = grain.MapDataset.source(source).shuffle(seed=1)
        if isinstance(source, ArrayRecordDataSource):
            ds = ds.map(lambda record: np.frombuffer(record, np.uint8, 16))
        started_anew(server)
        server.keeps = 128  # else those that begin late are answered late, where cores are busy
        take(sequence(ds, 16, order), 12)
        most.append(server.max_active)
    assert most[0] >= 32
    assert most[1] >= 0.75 * most[0]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("order", ["after", "before"])
def test_columns_without_an_index_are_fetched_once_by_many_readers(
    server, table, tmp_path, order, seed
):
    """Many blocks need the pages of a row group, of which one reader finds out where these are."""
    content = encoded(table, tmp_path, data_page_size=64 << 10)
    server.put("/x.parquet", content)
    ds = grain.MapDataset.source(ParquetDataSource(f"{server.url}/x.parquet"))
    if seed is not None:
        ds = ds.shuffle(seed=seed)
    started_anew(server)
    server.latency_s = 0.3  # else blocks begin after the pages were found, where cores are busy
    found = ids(list(sequence(ds, 50, order)))
    assert sorted(found) == list(range(NUM_ROWS))
    num_bytes = sum(stop - start for start, stop in ranges_of(server))
    assert num_bytes <= 1.1 * len(content)


@pytest.mark.parametrize("order", ["after", "before"])
def test_rows_of_far_files_are_those_of_near_ones(server, small_pages, tmp_path, order):
    (tmp_path / "near.parquet").write_bytes(server.objects["/x.parquet"].data)
    near = grain.MapDataset.source(ParquetDataSource(tmp_path / "near.parquet")).shuffle(seed=3)
    started_anew(server, keeps=9)
    far = grain.MapDataset.source(ParquetDataSource(small_pages)).shuffle(seed=3)
    for ours, theirs in zip(
        take(sequence(far, 50, order), 30), take(sequence(near, 50, order), 30), strict=True
    ):
        for name in ("id", "tokens"):
            np.testing.assert_array_equal(ours[name], theirs[name])
            assert ours[name].dtype == theirs[name].dtype
    assert server.max_active > 8


@pytest.mark.parametrize("close", [{}, {"shuffle_seed": 1, "shuffle_window": 1000}])
@pytest.mark.parametrize("has_index", [True, False])
def test_rows_in_order_have_the_next_pages_in_flight(server, tmp_path, close, has_index):
    # 1,500 rows of 16 KiB in pages of 1 MiB: a block has a page or two.
    rows = [np.random.default_rng(k).bytes(16 << 10) for k in range(1500)]
    table = pa.table({"id": pa.array(np.arange(1500)), "blob": pa.array(rows)})
    options = {"row_group_size": 500, "write_batch_size": 8, "write_page_index": has_index}
    server.put("/x.parquet", encoded(table, tmp_path, **options))
    source = ParquetDataSource(f"{server.url}/x.parquet", **close)
    started_anew(server, keeps=8)
    options = grain.ReadOptions(prefetch_buffer_size=32)
    rows_read = take(grain.MapDataset.source(source).to_iter_dataset(options), 1500)
    # Without an index each of the six chunks is read once, all at the same time.
    assert server.max_active >= (8 if has_index else 6)
    found = [int(row["id"]) for row in rows_read]
    assert sorted(found) == list(range(1500))
    assert (found == sorted(found)) == (not close)
    assert all(row["blob"] == rows[row["id"]] for row in rows_read[::100])
    # Each page is requested about once.
    requested = sum(stop - start for start, stop in ranges_of(server))
    assert requested < 1.3 * len(server.objects["/x.parquet"].data)


def test_reads_in_flight_are_limited_by_the_options(server, small_pages):
    source = ParquetDataSource(small_pages, columns=["tokens"])
    ds = grain.MapDataset.source(source).shuffle(seed=1)
    started_anew(server, keeps=2)
    take(ds.to_iter_dataset(grain.ReadOptions(max_reads_in_flight=3)).batch(16), 4)
    assert 1 < server.max_active <= 3


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    """160 rows of 1 MiB, each with a page of its own, and the file of them."""
    rows = [np.random.default_rng(k).bytes(1 << 20) for k in range(160)]
    table = pa.table({"blob": pa.array(rows)})
    folder = tmp_path_factory.mktemp("blobs")
    return rows, encoded(table, folder, **{**PAGES, "write_batch_size": 1})


def test_what_is_read_ahead_stays_within_the_limit(server, blobs):
    # Without a cache 64 MiB are read ahead, of 160 MiB that the buffer has room for.
    server.put("/x.parquet", blobs[1])
    source = ParquetDataSource(f"{server.url}/x.parquet", cache_bytes=0)
    started_anew(server)
    iterator = iter(grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset())
    next(iterator)
    deadline, before, requested = time.monotonic() + 60, -1, 0
    while time.monotonic() < deadline and (requested <= 16 << 20 or before != requested):
        before = requested
        time.sleep(0.2)
        requested = sum(stop - start for start, stop in ranges_of(server))
    assert 16 << 20 < requested < 100 << 20


PEAK = """
import re, sys, time
import grainmill as grain

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

source = grain.sources.ParquetDataSource(sys.argv[1], cache_bytes=0)
before = peak()
iterator = iter(grain.MapDataset.source(source).to_iter_dataset())
rows = [next(iterator) for _ in range(3)]
time.sleep(1)  # what is read ahead
assert [int(row["id"]) for row in rows] == [0, 1, 2], rows
assert sum(len(row["name"]) for row in iterator) == 40_000 * (25_000 - 3)
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("write_statistics", [True, False])
def test_memory_is_limited_where_a_dictionary_repeats_long_values(
    server, tmp_path, write_statistics
):
    # 25,000 rows of 40,000 bytes, a gigabyte, are few bytes in the file.
    rng = np.random.default_rng(0)
    values = pa.array([rng.bytes(20_000).hex() for _ in range(20)])
    numbers = pa.array(rng.integers(0, 20, 25_000, np.int32))
    names = pa.DictionaryArray.from_arrays(numbers, values)
    table = pa.table({"id": pa.array(np.arange(25_000)), "name": names})
    path = tmp_path / "x.parquet"
    options = {"row_group_size": 2_500, "write_page_index": True, "store_schema": False}
    pq.write_table(table, path, write_statistics=write_statistics, **options)
    server.put("/x.parquet", path.read_bytes())
    server.latency_s = LATENCY_S
    command = [sys.executable, "-c", PEAK, f"{server.url}/x.parquet"]
    peak = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert peak < 400


def outcome(files, indices):
    """The rows, or the error without the folder of its file."""
    try:
        return files.read(indices)
    except GrainmillError as error:
        return re.sub(r"\S*/(?=\d\.parquet)", "", str(error))


def test_rows_for_which_nothing_is_decoded_ahead_are_fetched_together(server, blobs):
    rows, data = blobs
    server.put("/x.parquet", data)
    files = ParquetDataSource(f"{server.url}/x.parquet", cache_bytes=0)._files
    server.latency_s = LATENCY_S
    files.read_one(0)
    ahead = files.start(np.arange(70))
    ahead.wait()
    assert not files.has_room  # for more than 64 MiB
    started_anew(server, keeps=6)
    assert files.read(np.arange(70, 80)) == [{"blob": row} for row in rows[70:80]]
    assert server.max_active >= 6


@pytest.mark.parametrize("seed", range(cases(2, 40)))
def test_what_is_not_decoded_ahead_fails_as_where_files_are_near(server, tmp_path, seed):
    # Decoded, 36 units count as 144 MiB, of which 64 are decoded ahead; in fact, texts are shared.
    rng = np.random.default_rng(seed)
    urls, paths = [], []
    for number in range(3):
        texts = pa.array([rng.bytes(20_000).hex() for _ in range(9)])
        columns = {name: texts.take(pa.array(rng.integers(0, 9, 600))) for name in "ab"}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=100, write_page_checksum=True)
        urls.append(f"{server.url}/{path.name}")
        paths.append(path)

    def read(indices):
        for path in paths:
            server.put(f"/{path.name}", path.read_bytes())
        far, near = (ParquetDataSource(files, cache_bytes=0)._files for files in (urls, paths))
        server.latency_s = LATENCY_S
        found = outcome(far, indices)
        assert found == outcome(near, indices)
        return found

    indices = rng.permutation(1800)[:300]
    assert isinstance(read(indices), list)
    for path in paths:
        data = bytearray(path.read_bytes())
        column = pq.ParquetFile(path).metadata.row_group(int(rng.integers(6))).column(0)
        data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
        path.write_bytes(data)
    assert isinstance(read(indices), str)


def test_rows_read_beyond_take_half_of_the_memory_or_none(server, blobs):
    rows, data = blobs
    server.put("/x.parquet", data)
    files = ParquetDataSource(f"{server.url}/x.parquet", cache_bytes=0)._files
    files.read_one(0)
    started_anew(server)
    # Half of 64 MiB has no room for the pages of all.
    all_rows = files.start_beyond(np.arange(60))
    all_rows.wait()
    assert not server.requests
    some = files.start_beyond(np.arange(1, 29))
    some.wait()
    assert len(server.requests) >= 8
    more = files.start_beyond(np.arange(29, 40))
    more.wait()
    assert files.has_room
    count = len(server.requests)
    assert files.read(np.arange(1, 29)) == [{"blob": row} for row in rows[1:29]]
    assert len(server.requests) == count
    del all_rows, some, more
    assert files.has_room_beyond


def test_scattered_rows_are_not_read_beyond_where_pages_must_be_found_for_them(
    server, table, tmp_path
):
    server.put("/0.parquet", encoded(table, tmp_path, row_group_size=100, write_page_index=False))
    server.put("/1.parquet", encoded(table, tmp_path, row_group_size=100, write_page_index=False))
    files = ParquetDataSource(f"{server.url}/0.parquet")._files
    files.read_one(0)
    started_anew(server)
    scattered = np.arange(1, NUM_ROWS, 101)
    files.start_beyond(scattered).wait()
    assert not server.requests
    # What is needed next is read in any case, and rows in order are read beyond it.
    in_order = files.start_beyond(np.arange(1000, 2000))
    in_order.wait()
    assert len(server.requests) >= 10
    server.requests.clear()
    needed = files.start(scattered)
    needed.wait()
    count = len(server.requests)
    assert count >= 70
    assert [int(row["id"]) for row in files.read(scattered)] == scattered.tolist()
    assert len(server.requests) == count
    # Where the pages are known, only they are read.
    known = files.start_beyond(scattered + 1)
    known.wait()
    del in_order, needed, known


def test_scattered_rows_are_not_read_beyond_where_files_must_be_opened_for_them(
    server, table, tmp_path
):
    data = encoded(table[:64], tmp_path, **PAGES)
    for number in range(60):
        server.put(f"/{number:02}.parquet", data)
    paths = [f"{server.url}/{number:02}.parquet" for number in range(60)]
    files = pickle.loads(pickle.dumps(ParquetDataSource(paths)))._files
    started_anew(server)
    files.start_beyond(np.arange(0, 60 * 64, 64)).wait()
    # The columns are those of the first file.
    assert {request.path for request in server.requests} <= {"/00.parquet"}
    some = files.start_beyond(np.arange(64, 300))
    some.wait()
    assert len({request.path for request in server.requests}) >= 4


def test_reads_of_threads_are_limited_together(server, blobs):
    rows, data = blobs
    server.put("/x.parquet", data)
    files = ParquetDataSource(f"{server.url}/x.parquet", cache_bytes=0)._files
    files.read_one(0)
    started_anew(server, keeps=2)
    source = RowSource(files, ReadQueue(3))
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(source.read, np.arange(80).reshape(8, 10)))
    assert [row["blob"] for part in parts for row in part.elements] == rows[:80]
    assert 1 < server.max_active <= 3


def test_reads_are_limited_where_there_is_no_memory_to_read_ahead(server, blobs):
    rows, data = blobs
    server.put("/x.parquet", data)
    files = ParquetDataSource(f"{server.url}/x.parquet", cache_bytes=0)._files
    files.read_one(0)
    started_anew(server, keeps=2)
    result = RowSource(files, ReadQueue(3)).read(np.arange(80))  # more than 64 MiB
    assert result.elements == [{"blob": row} for row in rows[:80]]
    assert 1 < server.max_active <= 3


def test_pages_that_could_not_be_read_ahead_are_read_once_afterwards(server, small_pages):
    files = ParquetDataSource(small_pages, cache_bytes=0)._files
    files.read_one(0)
    taken = server.objects.pop("/x.parquet")
    ahead = files.start(np.arange(20))
    ahead.wait()
    server.objects["/x.parquet"] = taken
    started_anew(server)
    assert [int(row["id"]) for row in files.read(np.arange(20))] == list(range(20))
    assert server.requests
    server.requests.clear()
    assert [int(row["id"]) for row in files.read(np.arange(20))] == list(range(20))
    assert not server.requests
    del ahead


def test_files_are_not_opened_for_rows_that_nobody_waits_for(server, table, tmp_path):
    data = encoded(table[:64], tmp_path, **PAGES)
    for number in range(60):
        server.put(f"/{number:02}.parquet", data)
    paths = [f"{server.url}/{number:02}.parquet" for number in range(60)]
    files = pickle.loads(pickle.dumps(ParquetDataSource(paths)))._files
    started_anew(server)
    ahead = files.start(np.arange(60 * 64), ReadQueue(2))
    del ahead
    time.sleep(0.5)  # time for 50 requests
    assert len({request.path for request in server.requests}) <= 4


def test_files_and_pages_are_found_together(server, table, tmp_path):
    # 60 files of 4 row groups: one after another these are hundreds of requests.
    data = encoded(table[:64], tmp_path, **{**PAGES, "row_group_size": 16})
    for number in range(60):
        server.put(f"/{number:02}.parquet", data)
    paths = [f"{server.url}/{number:02}.parquet" for number in range(60)]
    # In another process, files whose number of rows is known are opened when they are read.
    source = pickle.loads(pickle.dumps(ParquetDataSource(paths)))
    started_anew(server, keeps=20)
    rows = source.__getitems__(range(0, 60 * 64, 7))
    assert [int(row["id"]) for row in rows] == [k % 64 for k in range(0, 60 * 64, 7)]
    assert server.max_active >= 20


@pytest.mark.parametrize("batch_size", [0, 10])
def test_rows_before_a_far_source_that_cannot_be_opened_are_read(
    server, table, tmp_path, batch_size
):
    parts = []
    for number in range(20):
        data = encoded(table[100 * number : 100 * (number + 1)], tmp_path, **PAGES)
        server.put(f"/{number}.parquet", data)
        source = ParquetDataSource(f"{server.url}/{number}.parquet")
        parts.append(grain.MapDataset.source(pickle.loads(pickle.dumps(source))))
    del server.objects["/19.parquet"]
    started_anew(server)
    ds = grain.MapDataset.concatenate(parts).to_iter_dataset()
    rows = iter(ds.batch(batch_size) if batch_size else ds)
    count = 1900 // (batch_size or 1)
    found = [np.atleast_1d(next(rows)["id"]) for _ in range(count)]
    assert np.concatenate(found).tolist() == list(range(1900))
    with pytest.raises(FileNotFoundError, match=r"19\.parquet"):
        next(rows)


def test_failure_to_read_ahead_is_left_to_those_who_read(server, small_pages, monkeypatch):
    def fail(*_):
        raise RuntimeError("not now")

    source = ParquetDataSource(small_pages)
    started_anew(server)
    monkeypatch.setattr(RowSource, "start_beyond", fail)
    ds = grain.MapDataset.source(source).to_iter_dataset()
    assert [int(row["id"]) for row in take(ds, 500)] == list(range(500))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_rows_of_many_batches_are_read_beyond_in_one_call(
    batch_size, server, small_pages, monkeypatch
):
    calls, start = [], RowSource.start_beyond

    def noted(self, request):
        calls.append(request.tolist())
        return start(self, request)

    monkeypatch.setattr(RowSource, "start_beyond", noted)
    order = np.array(take(grain.MapDataset.range(NUM_ROWS).shuffle(seed=1).repeat(), 40 * NUM_ROWS))
    source = ParquetDataSource(small_pages)
    started_anew(server)
    ds = grain.MapDataset.source(source).shuffle(seed=1).repeat().batch(batch_size)
    assert ids(take(ds.to_iter_dataset(), 5)) == order[: 5 * batch_size].tolist()
    for rows in calls:
        begins = np.flatnonzero(order == rows[0]).tolist()
        begins = [at for at in begins if order[at:][: len(rows)].tolist() == rows]
        assert begins
        assert begins[0] % batch_size == 0
    assert len(calls[0]) >= 500  # by their bytes


def test_pipeline_that_is_dropped_leaves_nothing_behind(server, small_pages):
    source = ParquetDataSource(small_pages)
    started_anew(server)
    for _ in range(3):
        ds = grain.MapDataset.source(source).shuffle(seed=1)
        take(ds.to_iter_dataset().batch(8), 1)
        gc.collect()
    rows = source.__getitems__([5, 7000, 5])
    assert [int(row["id"]) for row in rows] == [5, 7000, 5]


def test_states_resume_in_the_middle_of_what_was_read_ahead(server, small_pages):
    ds = grain.MapDataset.source(ParquetDataSource(small_pages)).shuffle(seed=1)
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=4)).batch(20)
    started_anew(server)
    iterator = iter(ds)
    first = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    rest = [next(iterator) for _ in range(5)]
    iterator.set_state(state)
    assert ids([next(iterator) for _ in range(5)]) == ids(rest)
    restored = iter(ds)
    restored.set_state(state)
    assert ids([next(restored) for _ in range(5)]) == ids(rest)
    assert len(set(ids(first + rest))) == 200


def test_failure_of_a_page_names_the_file_and_keeps_the_rows_before(server, table, tmp_path):
    data = bytearray(encoded(table, tmp_path, **{**PAGES, "write_page_checksum": True}))
    # A token of row 5000, which is in one page only.
    tokens = np.array(table["tokens"][5000].as_py(), np.int32).tobytes()
    data[data.index(tokens)] ^= 1
    server.put("/x.parquet", bytes(data))
    source = ParquetDataSource(f"{server.url}/x.parquet")
    started_anew(server)
    ds = grain.MapDataset.source(source)[4000:].to_iter_dataset()
    found = []

    def read():
        found.extend(int(row["id"]) for row in ds)  # up to the row that fails

    with pytest.raises(GrainmillError, match=r"x\.parquet: row group 2, column `tokens\b"):
        read()
    assert not found or found == list(range(4000, 4000 + len(found)))
    iterator = iter(ds)
    assert [int(next(iterator)["id"]) for _ in range(800)] == list(range(4000, 4800))


@pytest.mark.parametrize("damaged", [[5, 20, 35], [39, 2, 3], [17, 18]])
def test_the_first_of_several_damaged_files_is_named(server, table, tmp_path, damaged):
    small = encoded(table.slice(0, 20), tmp_path)
    for number in range(40):
        # Its footer has another length.
        data = small[:-8] + b"\xff" + small[-7:] if number in damaged else small
        server.put(f"/{number:02}.parquet", data)
    urls = [f"{server.url}/{number:02}.parquet" for number in range(40)]
    started_anew(server)
    server.latency_s = 0.004
    for _ in range(cases(6, 60)):
        with pytest.raises(GrainmillError, match=rf"/{min(damaged):02}\.parquet"):
            ParquetDataSource(urls)


def test_of_several_damaged_pages_that_of_the_first_row_is_named(server, tmp_path):
    """Whatever the order of files and columns in storage, and of the answers."""
    values = np.arange(6000, dtype=np.int64)
    table = pa.table({"a": values + 10**12, "b": values + 10**15})
    options = {**PAGES, "write_page_checksum": True, "row_group_size": 1000}
    for number in range(3):
        part = table.slice(2000 * number, 2000)
        server.put(f"/{number}.parquet", encoded(part, tmp_path, **options))
    rng = np.random.default_rng(0)
    for attempt in range(cases(12, 200)):
        rows = rng.permutation(6000)[:40].tolist()
        bad = sorted(rng.choice(40, size=3, replace=False).tolist())
        for number in range(3):
            data = bytearray(encoded(table.slice(2000 * number, 2000), tmp_path, **options))
            for at in bad:
                if rows[at] // 2000 == number:
                    column = ["a", "b"][int(rng.integers(2))]
                    value = np.int64(table[column][rows[at]].as_py()).tobytes()
                    data[data.index(value)] ^= 1
            server.put(f"/{attempt}-{number}.parquet", bytes(data))
        urls = [f"{server.url}/{attempt}-{number}.parquet" for number in range(3)]
        source = ParquetDataSource(urls)
        started_anew(server)
        server.latency_s = 0.002
        with pytest.raises(GrainmillError) as caught:
            source.__getitems__(rows)
        # A page has a row group: the first requested row that is on a damaged one counts.
        found = re.search(r"/\d+-(\d)\.parquet: row group (\d)", str(caught.value))
        place = 2000 * int(found[1]) + 1000 * int(found[2])
        groups = {rows[at] // 1000 * 1000 for at in bad}
        assert place == next(row // 1000 * 1000 for row in rows if row // 1000 * 1000 in groups)


def test_requests_that_fail_for_a_while_are_repeated(server, small_pages):
    source = ParquetDataSource(small_pages)
    started_anew(server)
    server.faults.extend([Fault(status=503), None, Fault(cut_at=100)] * 10)
    ds = grain.MapDataset.source(source).shuffle(seed=1).batch(20).to_iter_dataset()
    assert len(set(ids(take(ds, 5)))) == 100


def test_worker_processes_read_far_files(server, small_pages):
    source = ParquetDataSource(small_pages)
    ds = grain.MapDataset.source(source).shuffle(seed=1).batch(20)
    started_anew(server)
    near = ids(take(ds.to_iter_dataset(), 10))
    workers = ds.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    assert ids(take(workers, 10)) == near
    by_index = ds.to_iter_dataset(grain.ReadOptions(num_workers=2))
    assert ids(take(by_index, 10)) == near


# --- the sequential dataset -----------------------------------------------------------------------


def test_sequential_dataset_reads_ahead_of_itself(server, table, tmp_path):
    options = {"row_group_size": 100, "write_page_index": True}
    server.put("/x.parquet", encoded(table, tmp_path, **options))
    (tmp_path / "near.parquet").write_bytes(server.objects["/x.parquet"].data)
    started_anew(server, keeps=4)
    far = iter(ParquetIterDataset(f"{server.url}/x.parquet"))
    near = iter(ParquetIterDataset(str(tmp_path / "near.parquet")))
    for number, row in enumerate(near):
        found = next(far)
        assert found["id"] == row["id"]
        np.testing.assert_array_equal(found["tokens"], row["tokens"])
        if number % 97 == 0:
            assert far.get_state() == near.get_state()
    with pytest.raises(StopIteration):
        next(far)
    assert server.max_active >= 4


def test_sequential_datasets_of_far_files_are_interleaved(server, table, tmp_path):
    paths = []
    for number in range(4):
        part = table[number * 500 : (number + 1) * 500]
        server.put(f"/{number}.parquet", encoded(part, tmp_path, **{**PAGES, "row_group_size": 90}))
        paths.append(f"{server.url}/{number}.parquet")
    started_anew(server)
    ds = ParquetIterDataset(paths).batch(100)
    batches = list(ds)
    assert sorted(ids(batches)) == list(range(2000))
    iterator = iter(ds)
    take(iterator, 5)
    restored = iter(ds)
    restored.set_state(iterator.get_state())
    assert ids([next(restored) for _ in range(3)]) == ids(batches[5:8])
