"""Sources over a server that answers late: the reads of later elements are in flight meanwhile."""

import ctypes
import gzip
import io
import itertools
import json
import mmap

import datasets
import effort
import numpy as np
import pyarrow as pa
import pytest
from bucket_server import BucketServer
from record_formats import bagz, json_text, tar, tfrecord

import grainmill as grain
from grainmill import sources
from grainmill._native import ReadQueue
from grainmill._sources import hugging_face, mapped_table
from grainmill.array_record import ArrayRecordWriter

NUM = 400
LATENCY_S = 0.04


@pytest.fixture(scope="module")
def records():
    """Records that are too long to be merged into one request with their neighbours."""
    return [np.random.default_rng(number).bytes(40_000) for number in range(NUM)]


@pytest.fixture(scope="module")
def data(records, tmp_path_factory):
    """Files of each format, by name."""
    path = tmp_path_factory.mktemp("data") / "file"
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    lines = json_text({"number": number, "rest": "x" * 40_000} for number in range(NUM))
    files = {"a.array_record": path.read_bytes(), "a.jsonl": lines}
    files["a.tar"] = tar((f"{number:04}.bin", record) for number, record in enumerate(records))
    for shard in range(4):
        files[f"a-{shard:05}-of-00004.bag"] = bagz(records[shard::4])
    return files


@pytest.fixture
def server(data, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path))
    with BucketServer(latency_s=LATENCY_S) as server:
        for name, content in data.items():
            server.put(f"/{name}", content)
        yield server


def source_of(kind, server, records):
    """A source, and its elements."""
    if kind == "web_dataset":
        samples = [
            {"__key__": f"{number:04}", "bin": record} for number, record in enumerate(records)
        ]
        return sources.WebDatasetDataSource(server.url + "/a.tar"), samples
    if kind == "json_lines":
        lines = [{"number": number, "rest": "x" * 40_000} for number in range(NUM)]
        return sources.JsonLinesDataSource(server.url + "/a.jsonl", parse=True), lines
    if kind == "bagz":
        paths = [f"{server.url}/a-{shard:05}-of-00004.bag" for shard in range(4)]
        return sources.BagzDataSource(paths, layout="interleaved"), records
    return sources.ArrayRecordDataSource(server.url + "/a.array_record"), records


KINDS = ["array_record", "web_dataset", "json_lines", "bagz"]


MANY = 8


class Watch(grain.transforms.Map):
    """Notes how many requests are in flight while elements are computed.

    The server answers no sooner than that many are, or the reader has sent no more for a while:
    how fast a busy machine sends them does not matter.
    """

    def __init__(self, server):
        self.server = server
        server.keeps = 2 * MANY  # some are answered by the time an element is computed
        self.seen = []

    def map(self, element):
        self.seen.append(self.server.num_active)
        return element


class WatchBlocks(Watch):
    """The same, for whole blocks."""

    def map_block(self, elements):
        self.seen += [self.server.num_active] * len(elements)
        return elements


def are_in_flight(watch):
    """Whether many requests were in flight while a good part of the elements was computed."""
    return sum(num_active >= MANY for num_active in watch.seen) >= len(watch.seen) / 4


@pytest.mark.parametrize("transform", [Watch, WatchBlocks])
@pytest.mark.parametrize("kind", KINDS)
def test_later_records_are_in_flight_while_elements_are_computed(kind, transform, server, records):
    source, expected = source_of(kind, server, records)
    watch = transform(server)
    ds = grain.MapDataset.source(source).shuffle(seed=3).map(watch)
    shuffled = list(grain.MapDataset.range(NUM).shuffle(seed=3))
    found = list(ds.to_iter_dataset(grain.ReadOptions(num_threads=1)))
    assert found == [expected[number] for number in shuffled]
    assert are_in_flight(watch)


@pytest.mark.parametrize("kind", KINDS)
def test_data_loader_has_later_records_in_flight(kind, server, records):
    source, expected = source_of(kind, server, records)
    watch = Watch(server)
    options = grain.ReadOptions(num_threads=1)
    loader = grain.load(
        source, num_epochs=1, shuffle=True, seed=1, transformations=[watch], read_options=options
    )
    same = grain.load(range(NUM), num_epochs=1, shuffle=True, seed=1)
    assert list(loader) == [expected[number] for number in same]
    assert are_in_flight(watch)


@pytest.mark.parametrize("stage", ["flat_map", "select", "mix", "batch"])
def test_stages_that_combine_elements_have_reads_in_flight(stage, server, records):
    source, expected = source_of("web_dataset", server, records)
    watch = Watch(server)
    ds = grain.MapDataset.source(source)
    if stage == "flat_map":
        ds = grain.experimental.FlatMapMapDataset(ds, Twice())
        expected = [sample for sample in expected for _ in range(2)]
    elif stage == "select":
        ds = grain.MapDataset.select_from_datasets([ds[:200], ds[200:]], Alternating())
        expected = [sample for k in range(200) for sample in (expected[k], expected[200 + k])]
    elif stage == "mix":
        ds = grain.MapDataset.mix([ds[:200], ds[200:]])
        expected = [sample for k in range(200) for sample in (expected[k], expected[200 + k])]
    else:
        ds = ds.map(lambda sample: np.frombuffer(sample["bin"], np.uint8)).batch(4)
        expected = [
            np.stack([np.frombuffer(sample["bin"], np.uint8) for sample in expected[k : k + 4]])
            for k in range(0, NUM, 4)
        ]
    found = list(ds.map(watch).to_iter_dataset(grain.ReadOptions(num_threads=1)))
    assert len(found) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert are_in_flight(watch)


@pytest.mark.parametrize("kind", ["web_dataset", "json_lines", "bagz"])
def test_mixtures_of_one_kind_of_source_have_its_elements_in_order(kind, server, records):
    source, expected = source_of(kind, server, records)
    again, _ = source_of(kind, server, records)
    parts = [grain.MapDataset.source(each) for each in (source, again)]
    for join in (grain.MapDataset.mix, grain.MapDataset.concatenate):
        order = join([grain.MapDataset.source(expected)] * 2).shuffle(seed=1)[:200]
        found = join(parts).shuffle(seed=1)[:200].to_iter_dataset(grain.ReadOptions(num_threads=1))
        assert list(found) == list(order)


class Twice(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


class Alternating(grain.transforms.DatasetSelectionMap):
    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return index % 2, index // 2


@pytest.mark.parametrize("reader", ["pipeline", "loader"])
@pytest.mark.parametrize("kind", ["web_dataset", "json_lines", "bagz"])
def test_every_state_is_resumed_while_reads_are_in_flight(kind, reader, server, records):
    source, expected = source_of(kind, server, records)

    def made():
        if reader == "loader":
            return iter(grain.load(source, num_epochs=1, shuffle=True, seed=1))
        return iter(grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset())

    if reader == "loader":
        order = list(grain.load(range(NUM), num_epochs=1, shuffle=True, seed=1))
    else:
        order = list(grain.MapDataset.range(NUM).shuffle(seed=1))
    iterator, states = made(), []
    for at in range(NUM):
        states.append(iterator.get_state())
        assert next(iterator) == expected[order[at]]
    again = made()
    # Each abandons hundreds of requests, which the server answers nonetheless.
    for at in [*range(effort.cases(3, 40)), *range(40, NUM, effort.cases(71, 23)), NUM - 1]:
        again.set_state(states[at])
        for number in order[at : at + 2]:
            assert next(again) == expected[number]


# --- opening ------------------------------------------------------------------------------------

NUM_FILES = 100


# For an object that was opened before. One opens it, and one reads the first bytes; the limits of
# Bagz come along. Of Arrow, one more reads the header of the batch, or the mark of the end, and one
# opens it for reading.
REQUESTS = {
    "tfrecord": 2,
    "tfrecord.gz": 2,
    "jsonl": 2,
    "tar": 2,
    "bag": 1,
    "arrow": 4,
    "arrows": 4,
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_many_files_are_opened_at_once_and_again_without_a_scan(kind, server, records):
    # More than what comes with the opening of an object.
    few = [record[:20_000] for record in records[:10]]
    written = {
        "tfrecord": lambda: tfrecord(few),
        "tfrecord.gz": lambda: gzip.compress(tfrecord(few), mtime=0),
        "jsonl": lambda: json_text(record.hex() for record in few),
        "tar": lambda: tar((f"{number}.bin", record) for number, record in enumerate(few)),
        "bag": lambda: bagz(few),
        "arrow": lambda: arrow(few, pa.ipc.new_file),
        "arrows": lambda: arrow(few, pa.ipc.new_stream),
    }
    content = written[kind]()
    assert len(content) > 128 << 10
    urls = []
    for number in range(NUM_FILES):
        server.put(f"/many/{number:03}.{kind}", content)
        urls.append(f"{server.url}/many/{number:03}.{kind}")
    classes = {
        "tfrecord": sources.TFRecordDataSource,
        "tfrecord.gz": sources.TFRecordDataSource,
        "jsonl": sources.JsonLinesDataSource,
        "tar": sources.WebDatasetDataSource,
        "bag": sources.BagzDataSource,
        "arrow": sources.ArrowDataSource,
        "arrows": sources.ArrowDataSource,
    }
    server.latency_s, server.keeps = 0, 64
    server.max_active = 0
    assert len(classes[kind](urls)) == NUM_FILES * len(few)
    assert server.max_active >= 64
    server.requests.clear()
    server.max_active = 0
    again = classes[kind](urls)
    assert len(again) == NUM_FILES * len(few)
    assert server.max_active >= 64
    assert len(server.requests) <= NUM_FILES * REQUESTS[kind]


def arrow(records, writer):
    content = io.BytesIO()
    table = pa.table({"record": records})
    with writer(content, table.schema) as opened:
        opened.write_table(table)
    return content.getvalue()


def test_directories_of_tensorflow_datasets_may_be_urls(server, records, data):
    info = {
        "name": "text",
        "fileFormat": "array_record",
        "splits": [{"name": "train", "shardLengths": [str(NUM)] * 3}],
    }
    for shard in range(3):
        name = f"/tfds/1.0.0/text-train.array_record-{shard:05}-of-00003"
        server.put(name, data["a.array_record"])
    server.put("/tfds/1.0.0/dataset_info.json", json.dumps(info).encode())
    server.put("/tfds/1.0.0/features.json", b'{"type": "text"}')
    server.requests.clear()
    source = sources.ArrayRecordDataSource.from_tfds_dir(server.url + "/tfds/1.0.0", "train[50%:]")
    assert len(server.requests) <= 2
    assert len(source) == 3 * NUM // 2
    assert source.features == {"type": "text"}
    assert source[0] == records[NUM // 2]
    watch = Watch(server)
    shuffled = grain.MapDataset.source(source).shuffle(seed=0).map(watch)
    found = list(shuffled.to_iter_dataset(grain.ReadOptions(num_threads=1)))
    assert sorted(found) == sorted([*records[NUM // 2 :], *records])
    assert are_in_flight(watch)
    with pytest.raises(FileNotFoundError, match=r"there is no dataset_info\.json in 'http"):
        sources.ArrayRecordDataSource.from_tfds_dir(server.url + "/tfds")


# --- caches on slow storage ---------------------------------------------------------------------


class SlowFiles:
    """Files whose storage is said to be slow, and which count the reads in flight."""

    def __init__(self, files):
        self._files = files
        self.is_slow = True
        self.in_flight = []
        self.seen = []

    def __len__(self):
        return len(self._files)

    def __getattr__(self, name):
        return getattr(self._files, name)

    def start(self, index, queue=None):
        assert queue is None or isinstance(queue, ReadQueue)
        reads, in_flight = self._files.start(index, queue), self.in_flight
        in_flight.append(len(index))
        seen = self.seen

        class Pending:
            def finish(self):
                seen.append(sum(in_flight))
                in_flight.pop(0)
                return reads.finish()

        return Pending()


def test_stored_elements_are_read_ahead_where_the_cache_is_slow(tmp_path):
    ds = grain.MapDataset.range(1000).map(lambda x: {"x": np.full(10, x)}).cache(tmp_path)
    assert len(list(ds)) == 1000
    again = ds.shuffle(seed=1)
    store = again._node.parents[0].store
    assert store.is_complete
    assert not store.is_slow
    store._files = files = SlowFiles(store._files)
    order = list(grain.MapDataset.range(1000).shuffle(seed=1))
    for _ in range(10):  # on a busy machine, blocks may stay small for a while
        iterator, states = iter(again.to_iter_dataset()), []
        for expected in order:
            states.append(iterator.get_state())
            np.testing.assert_array_equal(next(iterator)["x"], np.full(10, expected))
        if max(files.seen) >= 64:
            break
    assert max(files.seen) >= 64
    for at in range(0, 1000, 37):
        iterator.set_state(states[at])
        np.testing.assert_array_equal(next(iterator)["x"], np.full(10, order[at]))


def test_elements_missing_in_a_slow_cache_are_computed(tmp_path):
    computed = []

    def compute(x):
        computed.append(x)
        return np.full(4, x)

    ds = grain.MapDataset.range(300).map(compute).cache(tmp_path)
    for index in range(0, 300, 3):
        ds[index]
    store = ds._node.store
    store.flush()
    assert 0 < len(computed) <= 100
    store._files = SlowFiles(store._files)
    found = list(ds.to_iter_dataset())
    assert [element.tolist() for element in found] == [[x] * 4 for x in range(300)]
    assert sorted(computed) == list(range(300))


def test_sequences_are_read_ahead_where_the_cache_is_slow(tmp_path):
    def made():
        ds = grain.MapDataset.range(1000).to_iter_dataset().map(lambda x: np.full(10, x))
        return ds.cache(tmp_path)

    expected = [element.tolist() for element in made()]
    ds = made()
    opened = ds._node.store.opened()
    opened._files = files = SlowFiles(opened._files)
    iterator, found, states = iter(ds), [], []
    for _ in range(1000):
        states.append(iterator.get_state())
        found.append(next(iterator).tolist())
    assert found == expected
    assert next(iterator, None) is None
    assert max(files.seen) >= 192
    for at in [*range(0, 1000, 61), 998, 999]:
        iterator.set_state(states[at])
        assert [element.tolist() for element in iterator][:70] == expected[at : at + 70]


# --- memory-mapped tables -----------------------------------------------------------------------


@pytest.fixture
def advised(monkeypatch):
    """The ranges of memory that the system was asked to read."""
    ranges = []
    monkeypatch.setattr(
        mapped_table, "_madvise", lambda: lambda begin, length, _: ranges.append((begin, length))
    )
    return ranges


def pages_of(begin, end):
    return set(range(begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)))


def columns_of(rows):
    """Columns of several types, with `rows` rows."""
    random = np.random.default_rng(rows)
    lists = [random.integers(0, 9, random.integers(0, 3000)).tolist() for _ in range(rows)]
    data = [random.bytes(int(random.integers(0, 9000))) for _ in range(rows)]
    return {
        "number": pa.array(range(rows), pa.int32()),
        "data": pa.array(data, pa.binary()),
        "text": pa.array([each.hex() for each in data], pa.large_string()),
        "tokens": pa.array(lists, pa.list_(pa.int64())),
        "fixed": pa.array(random.random((rows, 700)).tolist(), pa.list_(pa.float32(), 700)),
        "struct": pa.array([{"a": row, "b": "x" * row} for row in range(rows)]),
    }


def pages_of_row(chunk, row):
    """The pages of the values of a row, one value after another."""
    if pa.types.is_struct(chunk.type):
        fields = (chunk.field(number) for number in range(chunk.type.num_fields))
        return set().union(*(pages_of_row(field, row) for field in fields))
    value = chunk[row]
    if hasattr(value, "as_buffer"):
        dtype = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
        _, offsets, data = chunk.slice(row, 1).buffers()
        begin, end = np.frombuffer(offsets, dtype)[chunk.offset + row :][:2].tolist()
        address = data.address + begin
        assert ctypes.string_at(address, end - begin) == value.as_buffer().to_pybytes()
        return pages_of(address, data.address + end) if end > begin else set()
    values = value.values if hasattr(value, "values") else chunk.slice(row, 1)
    if not len(values):
        return set()
    width = values.type.bit_width // 8
    begin = values.buffers()[1].address + values.offset * width
    return pages_of(begin, begin + len(values) * width)


def test_the_pages_of_all_values_are_requested(advised):
    batches = [pa.table(columns_of(rows)) for rows in (40, 1, 25)]
    whole = pa.concat_tables([*batches, batches[0].slice(7, 20)])
    table = mapped_table.MappedTable(whole)
    rows = np.random.default_rng(0).permutation(len(whole))[:30]
    table.request(rows)
    table.request_values(rows)
    requested = set().union(*(pages_of(begin, begin + length) for begin, length in advised))
    starts = np.cumsum([0, 40, 1, 25])
    for row in rows.tolist():
        place = int(np.searchsorted(starts, row, side="right")) - 1
        for column in whole.columns:
            assert pages_of_row(column.chunk(place), row - int(starts[place])) <= requested
    assert all(begin % mmap.PAGESIZE == 0 and length <= 128 << 10 for begin, length in advised)
    assert len(requested) < whole.nbytes / mmap.PAGESIZE  # not all of it


def test_values_of_fixed_length_are_requested_without_those_that_follow(advised):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(50 * 2048, np.float32)), 2048)
    table = mapped_table.MappedTable(pa.table({"fixed": lists}))
    rows = np.arange(3, 50, 6)
    table.request(rows)
    requested = set().union(*(pages_of(begin, begin + length) for begin, length in advised))
    assert requested == set().union(*(pages_of_row(lists, row) for row in rows.tolist()))


@pytest.mark.parametrize("is_selected", [False, True])
def test_rows_are_requested_ahead_while_reading_them_waits(is_selected, advised, monkeypatch):
    rows = datasets.Dataset.from_dict({"x": list(range(500)), "y": [b"y" * k for k in range(500)]})
    if is_selected:
        rows = rows.select(range(499, -1, -1))
    expected = rows[:]
    source = sources.HuggingFaceDataSource(rows)
    monkeypatch.setattr(hugging_face, "num_faults", lambda: 0)  # whatever else needs memory
    assert not source._waits_for_storage
    list(grain.MapDataset.source(source).to_iter_dataset())
    assert not advised
    faults = itertools.count()
    monkeypatch.setattr(hugging_face, "num_faults", lambda: next(faults))
    iterator = iter(grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset())
    states, found = [], []
    for _ in range(500):
        states.append(iterator.get_state())
        found.append(next(iterator))
    assert source._waits_for_storage
    assert advised
    order = list(grain.MapDataset.range(500).shuffle(seed=1))
    assert [row["x"] for row in found] == [expected["x"][at] for at in order]
    assert [row["y"] for row in found] == [expected["y"][at] for at in order]
    for at in range(0, 500, 41):
        iterator.set_state(states[at])
        assert next(iterator)["x"] == found[at]["x"]


def test_storage_is_slow_until_many_rows_needed_no_wait():
    table = mapped_table.MappedTable(pa.table({"x": [1]}))
    assert not table.is_slow
    table.record(3)
    for _ in range(255):
        table.record(0)
    assert table.is_slow
    table.record(0)
    assert not table.is_slow
