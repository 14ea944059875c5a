"""`ArrowDataSource` beside `ParquetDataSource` on the same tables, as `pyarrow` writes them."""

import datetime
import decimal
import itertools
import json
import pickle
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from bucket_server import BucketServer
from effort import cases

import grainmill as grain
from grainmill import GrainmillError, files
from grainmill._sources import arrow_index
from grainmill._sources.arrow_values import check_rows
from grainmill._tools.main import main
from grainmill.sources import ArrowDataSource, ParquetDataSource

# What makes a value of each type from a number; None at multiples of 5, if it may be null.
TYPES = {
    "i8": (pa.int8(), lambda n: n % 100),
    "u64": (pa.uint64(), lambda n: n),
    "f2": (pa.float16(), np.float16),
    "f8": (pa.float64(), lambda n: n / 3),
    "bool": (pa.bool_(), lambda n: n % 3 == 0),
    "text": (pa.string(), lambda n: "ä" * (n % 4) + str(n)),
    "long_text": (pa.large_string(), lambda n: str(n) * 3),
    "binary": (pa.binary(), lambda n: bytes([n % 256]) * (n % 7)),
    "fixed": (pa.binary(3), lambda n: b"%03d" % (n % 1000)),
    "view": (pa.string_view(), lambda n: "view" * (n % 9)),
    "views": (pa.list_(pa.string_view()), lambda n: ["a longer value"] * (n % 3)),
    "day": (pa.date32(), lambda n: datetime.date(2020, 1, 1) + datetime.timedelta(n)),
    "at": (pa.timestamp("us", "UTC"), lambda n: n * 1_000_003),
    "took": (pa.duration("ms"), lambda n: n),
    "time": (pa.time64("us"), lambda n: datetime.time(1, 2, n % 60, n)),
    "price": (pa.decimal128(12, 2), lambda n: decimal.Decimal(n) / 4),
    "tokens": (pa.list_(pa.int32()), lambda n: list(range(n % 5))),
    "pair": (pa.list_(pa.float32(), 2), lambda n: [n, n + 1]),
    "words": (pa.list_(pa.string()), lambda n: ["w" * k for k in range(n % 3)]),
    "nested": (pa.list_(pa.list_(pa.int64())), lambda n: [[n] * k for k in range(n % 3)]),
    "struct": (
        pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))]),
        lambda n: {"x": n, "y": [str(n)] * (n % 3)},
    ),
    "map": (pa.map_(pa.string(), pa.int32()), lambda n: [(str(k), n) for k in range(n % 3)]),
    "kind": (pa.dictionary(pa.int8(), pa.string()), lambda n: "abc"[n % 3]),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(num_rows, names=tuple(TYPES), *, nulls=True, start=0):
    rows = range(start, start + num_rows)
    columns = {
        name: pa.array([None if nulls and n % 5 == 0 else make(n) for n in rows], kind)
        for name, (kind, make) in ((name, TYPES[name]) for name in names)
    }
    return pa.table(columns)


def write(path, content, *, batch_len=7, codec=None):
    make = pa.ipc.new_stream if str(path).endswith(".arrows") else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with make(str(path), content.schema, options=options) as writer:
        for batch in content.to_batches(max_chunksize=batch_len):
            writer.write_batch(batch)


def plain(value):
    """Something that is equal where values and their types are."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, [plain(each) for each in value.tolist()]
    return type(value), value.tobytes() if isinstance(value, np.generic) else value


def as_parquet(content, columns=None):
    """The rows as they are read of a Parquet file."""
    others = {"kind": pa.string(), "view": pa.string(), "views": pa.list_(pa.string())}
    dense = {
        name: content[name].cast(others[name]) if name in others else content[name]
        for name in content.column_names
    }
    pq.write_table(pa.table(dense), "expected.parquet")
    return list(ParquetDataSource("expected.parquet", columns=columns))


def check(source, expected):
    """Checks rows one by one, as lists, through a pipeline, and of a copy."""
    expected = plain(list(expected))
    assert len(source) == len(expected[1])
    keys = list(range(len(source)))[::-1]
    assert plain([source[key] for key in range(len(source))]) == expected
    assert plain(source.__getitems__(keys)[::-1]) == expected
    assert plain(list(grain.MapDataset.source(source))) == expected
    assert plain(list(pickle.loads(pickle.dumps(source)))) == expected


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("extension", ["arrow", "arrows"])
def test_values_are_those_of_parquet_files(extension, codec):
    content = table(23)
    write(f"a.{extension}", content, codec=codec)
    check(ArrowDataSource(f"a.{extension}"), as_parquet(content))


@hypothesis.settings(max_examples=cases(25, 1000))
@hypothesis.given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(1, 9),
            st.sampled_from([None, "lz4", "zstd"]),
            st.sampled_from(["arrow", "arrows"]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.sampled_from(list(TYPES)), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 2000),
    st.data(),
)
def test_any_files_have_the_rows_of_parquet_files(given, names, nulls, cache_bytes, data):
    parts, paths, start = [], [], 0
    for number, (num_rows, batch_len, codec, extension) in enumerate(given):
        parts.append(table(num_rows, names, nulls=nulls, start=start))
        paths.append(f"{number}.{extension}")
        write(paths[-1], parts[-1], batch_len=batch_len, codec=codec)
        start += num_rows
    columns = data.draw(st.permutations(names).map(lambda found: found[: len(names) // 2 + 1]))
    expected = as_parquet(pa.concat_tables(parts), columns)
    source = ArrowDataSource(paths, columns=columns, cache_bytes=cache_bytes)
    check(source, expected)
    if start:
        keys = data.draw(st.lists(st.integers(0, start - 1), max_size=30))
        assert plain(source.__getitems__(keys)) == plain([expected[key] for key in keys])
    places = [source._record_location(key) for key in range(start)]
    assert places == [
        (str(Path(path).absolute()), row)
        for path, part in zip(paths, parts, strict=True)
        for row in range(len(part))
    ]


def test_feather_files_are_read_and_old_ones_named():
    content = table(11, ["text", "tokens", "f8"])
    for codec in ("uncompressed", "lz4", "zstd"):
        pa.feather.write_feather(content, "a.feather", compression=codec, chunksize=4)
        check(ArrowDataSource("a.feather"), as_parquet(content))
    assert ArrowDataSource("a.feather").batch_lens == [4, 4, 3]
    Path("old.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    with pytest.raises(GrainmillError, match=r"old.feather: a Feather file of version 1"):
        ArrowDataSource("old.feather")


def test_fields_of_structures_are_selected_as_of_parquet_files():
    content = table(9, ["struct", "i8"])
    write("a.arrow", content)
    for columns in (["i8", "struct.x"], ["struct.y"], ["struct.y", "struct.x"], ["struct"]):
        expected = as_parquet(content, columns)
        check(ArrowDataSource("a.arrow", columns=columns), expected)
    for name in ("none", "struct.none", "i8.none", "struct.x.none"):
        with pytest.raises(ValueError, match=f"there is no column '{name}'; there are"):
            ArrowDataSource("a.arrow", columns=[name])
    with pytest.raises(ValueError, match="must be a sequence of names"):
        ArrowDataSource("a.arrow", columns="i8")


def test_tables_of_the_package_datasets_are_read_without_it():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"ids": [[1, 2], [3], []], "text": ["a b", "c", "ä"]})
    rows.save_to_disk("saved")
    source = ArrowDataSource("saved")
    assert [path.rpartition("/")[2] for path in source.paths] == ["data-00000-of-00001.arrow"]
    check(source, as_parquet(rows.data.table))


def test_extensions_are_read_as_what_they_are_stored_as():
    shaped = pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int32(), 4))
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 2])
    write("a.arrow", pa.table({"x": pa.ExtensionArray.from_storage(kind, shaped)}))
    check(ArrowDataSource("a.arrow"), as_parquet(pa.table({"x": shaped})))


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_batches_are_filled_by_columns(codec, monkeypatch):
    content = table(23, ["i8", "f2", "f8", "bool", "pair"], nulls=False)
    content = content.append_column("seven", pa.array([list(range(7))] * 23))
    write("a.arrow", content, codec=codec)
    write("b.arrow", content, batch_len=100)
    source = ArrowDataSource(["a.arrow", "b.arrow"])
    expected = as_parquet(pa.concat_tables([content, content]))
    read = []
    monkeypatch.setattr(type(source._files), "read", lambda *given: read.append(given))
    ds = grain.MapDataset.source(source).shuffle(3)
    order = list(grain.MapDataset.range(46).shuffle(3))
    for first, batch in zip(range(0, 46, 5), ds.batch(5).to_iter_dataset(), strict=True):
        rows = [expected[key] for key in order[first : first + 5]]
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        assert plain(batch) == plain(stacked)
    assert read == []  # no row was made


def test_columns_of_other_lengths_are_batched_by_rows():
    write("a.arrow", table(8, ["tokens", "text"], nulls=False))
    ds = grain.MapDataset.source(ArrowDataSource("a.arrow"))
    lens = ds.map(lambda row: {"n": np.int64(len(row["tokens"]))}).batch(8)[0]["n"]
    assert lens.tolist() == [n % 5 for n in range(8)]


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_an_iterator_resumes_at_each_row(codec):
    write("a.arrow", table(19, ["text", "tokens"]), codec=codec)
    ds = grain.MapDataset.source(ArrowDataSource("a.arrow")).shuffle(5).to_iter_dataset()
    expected = plain(list(ds))[1]
    it = iter(ds)
    for at in range(20):
        resumed = iter(pickle.loads(pickle.dumps(ds)))
        resumed.set_state(json.loads(json.dumps(it.get_state())))
        assert plain(list(resumed))[1] == expected[at:]
        next(it, None)


def test_workers_read_the_same_rows():
    write("a.arrow", table(40, ["text", "tokens", "kind"]), codec="lz4")
    ds = grain.MapDataset.source(ArrowDataSource("a.arrow")).shuffle(1)
    alone = plain(list(ds.to_iter_dataset()))
    shared = ds.to_iter_dataset(grain.ReadOptions(num_workers=2))
    assert plain(list(shared)) == alone


def test_what_cannot_be_read_is_an_error():
    write("a.arrow", table(3, ["i8"]))
    write("b.arrow", table(3, ["f8"]))
    with pytest.raises(ValueError, match=r"b.arrow: has the columns f8: double, expected i8: int8"):
        ArrowDataSource(["a.arrow", "b.arrow"])
    union = pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])])
    write("u.arrow", pa.table({"u": union, "i": [1, 2]}))
    with pytest.raises(NotImplementedError, match=r"u.arrow: column `u`: columns of type .*union"):
        ArrowDataSource("u.arrow")
    check(ArrowDataSource("u.arrow", columns=["i"]), [{"i": np.int64(1)}, {"i": np.int64(2)}])
    with pytest.raises(FileNotFoundError, match=r"none.arrow"):
        ArrowDataSource("none.arrow")
    source = ArrowDataSource("a.arrow")
    with pytest.raises(IndexError, match="row 3 is out of range for 3 rows"):
        source[3]
    assert source.__getitems__([]) == []
    sent = pickle.dumps(source)
    write("a.arrow", table(30, ["i8"]))
    with pytest.raises(GrainmillError, match=r"a.arrow: the file has changed: it had"):
        pickle.loads(sent)[0]
    time = pa.array([1, 1001], pa.time64("ns"))
    write("t.arrow", pa.table({"time": time}))
    with pytest.raises(GrainmillError, match=r"t.arrow: row 1, column `time`.*nanoseconds"):
        ArrowDataSource("t.arrow").__getitems__([1])


def attempt(path):
    """The rows, or an error of one of the classes that damage may raise, which names the file."""
    try:
        source = ArrowDataSource(path)
        return source, plain([source[key] for key in range(len(source))])[1]
    except (GrainmillError, NotImplementedError, ValueError) as error:
        if str(path) not in str(error):
            raise
        return None, str(error)


@pytest.mark.parametrize("extension", ["arrow", "arrows"])
def test_files_that_are_cut_off_are_errors_or_fewer_rows(extension):
    write(f"a.{extension}", content := table(9, ["text", "i8"]), batch_len=4)
    expected = plain(as_parquet(content))[1]
    data = Path(f"a.{extension}").read_bytes()
    for end in range(len(data)):
        Path(f"cut.{extension}").write_bytes(data[:end])
        source, found = attempt(f"cut.{extension}")
        # A stream may end after any message; a file has its index at the end.
        assert source is None or (extension == "arrows" and found == expected[: len(found)])


@pytest.mark.parametrize(
    ("extension", "codec"), list(itertools.product(["arrow", "arrows"], [None, "lz4"]))
)
@hypothesis.settings(max_examples=cases(60, 5000))
@hypothesis.given(st.data())
def test_changed_bytes_are_errors_or_other_values(extension, codec, data):
    names = ["text", "tokens", "words", "struct", "map", "kind", "nested", "view", "bool"]
    write(f"a.{extension}", table(9, names), batch_len=4, codec=codec)
    raw = bytearray(Path(f"a.{extension}").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    Path(f"b.{extension}").write_bytes(raw)
    attempt(f"b.{extension}")


OFFSETS = pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32())).buffers()[1]


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda at: pa.Array.from_buffers(
            pa.list_(pa.int32()), 3, [None, at], children=[pa.array(range(6), pa.int32())]
        ),
        lambda at: pa.Array.from_buffers(pa.string(), 3, [None, at, pa.py_buffer(b"abcdef")]),
        lambda at: pa.StructArray.from_arrays(
            [pa.Array.from_buffers(pa.binary(), 3, [None, at, pa.py_buffer(b"abcdef")])], ["x"]
        ),
        lambda at: pa.ListArray.from_arrays(
            [0, 1, 2, 3], pa.Array.from_buffers(pa.string(), 3, [None, at, pa.py_buffer(b"abcdef")])
        ),
    ],
)
def test_rows_that_reach_beyond_their_values_are_found(make, row):
    intact = np.frombuffer(OFFSETS, np.int32, 4)
    check_rows(make(pa.py_buffer(intact)), np.arange(3))
    for offset in (-1, 7, 1 << 30):
        offsets = intact.copy()
        offsets[row] = offset
        array = make(pa.py_buffer(offsets))
        with pytest.raises(ValueError, match="a value reaches from"):
            check_rows(array, np.array([row]))


@hypothesis.given(
    st.sampled_from(["a.arrow", "a.arrows"]), st.integers(8, 4000), st.integers(10, 8000)
)
@hypothesis.settings(max_examples=cases(30, 500))
def test_rows_are_the_same_however_little_is_read_at_once(name, head, tail):
    if not Path(name).exists():
        write(name, table(60), batch_len=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_index, "_HEAD_LEN", head)
        patch.setattr(arrow_index, "_TAIL_LEN", tail)
        little = ArrowDataSource(name)
    assert pickle.dumps(little._files._files) == pickle.dumps(ArrowDataSource(name)._files._files)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with BucketServer(latency_s=0.002) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("extension", ["arrow", "arrows"])
def test_files_in_buckets_are_those_on_disk(bucket, extension, codec):
    content = table(30, ["text", "tokens", "kind", "f8"])
    write(f"a.{extension}", content, batch_len=6, codec=codec)
    bucket.put(f"/bucket/a.{extension}", Path(f"a.{extension}").read_bytes())
    local = ArrowDataSource(f"a.{extension}")
    for url in (f"s3://bucket/a.{extension}", f"{bucket.url}/bucket/a.{extension}"):
        far = ArrowDataSource(url)
        check(far, local)
        twice = ArrowDataSource([url, url])
        assert plain(twice.__getitems__([45, 3])) == plain(local.__getitems__([15, 3]))
        rows, expected = (
            list(grain.MapDataset.source(each).shuffle(7).to_iter_dataset())
            for each in (far, local)
        )
        assert plain(rows) == plain(expected)


def test_a_row_in_a_bucket_costs_its_batch(bucket):
    content = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, 400_000)})
    write("a.arrow", content, batch_len=4000)
    bucket.put("/bucket/a.arrow", Path("a.arrow").read_bytes())
    source = ArrowDataSource("s3://bucket/a.arrow")
    # The end of the file three times; 100 headers of batches.
    assert bucket.num_bytes_asked < 450_000
    before = bucket.num_bytes_asked
    assert source[123_456]["x"] == content["x"][123_456].as_py()
    assert 32_000 <= bucket.num_bytes_asked - before < 200_000


def test_commands_read_arrow_files(capsys):
    content = table(6, ["i8", "text"], nulls=False)
    write("a.arrow", content)
    write("b.arrows", content)
    pa.feather.write_feather(content, "c.feather", compression="zstd")
    for path in ("a.arrow", "b.arrows", "c.feather"):
        found = files.describe(path)
        assert (found["format"], found["records"]) == ("arrow", 6)
        assert found["columns"] == {"i8": "int8", "text": "string"}
        assert found["compression"] == ("zstd" if path == "c.feather" else None)
        Path("unnamed").write_bytes(Path(path).read_bytes())
        assert files.detect_format("unnamed").name == "arrow"
        assert main(["verify", path]) == 0
        for out in ("out.jsonl", "out.parquet"):
            assert main(["convert", path, out, "--force", "--quiet"]) == 0
        capsys.readouterr()
        assert main(["cat", path]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert list(map(json.loads, lines)) == content.to_pylist()
        assert plain(list(ParquetDataSource("out.parquet"))) == plain(as_parquet(content))
        assert (
            list(map(json.loads, Path("out.jsonl").read_text().splitlines())) == content.to_pylist()
        )
    assert main(["convert", "a.arrow", "d.arrow"]) == 2
    assert "Arrow files are not written" in capsys.readouterr().err
    Path("bad.arrow").write_bytes(Path("a.arrow").read_bytes()[:-20])
    assert main(["verify", "bad.arrow"]) == 4
    Path("old.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    assert main(["info", "old.feather"]) == 2
    assert "a Feather file of version 1" in capsys.readouterr().err


def test_repr_tells_what_is_read_apart():
    write("a.arrow", table(3, ["i8", "text"]))
    write("b.arrow", table(3, ["i8", "text"]))
    given = [("a.arrow", None), ("b.arrow", None), ("a.arrow", ["i8"]), ("a.arrow", ["text"])]
    texts = {repr(ArrowDataSource(path, columns=columns)) for path, columns in given}
    assert len(texts) == len(given)
