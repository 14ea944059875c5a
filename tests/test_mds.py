"""Data sets of Mosaic Streaming, beside what its own reader has, and a slow writer of shards."""

import gzip
import json
import pickle
import shutil
import struct
from decimal import Decimal
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from bucket_server import BucketServer
from effort import cases

import grainmill as grain
from grainmill import GrainmillError, files
from grainmill._sources.mds import decoder_of
from grainmill._tools.main import main
from grainmill.sources import MDSDataSource

# Written by the program beside it.
GOLDEN = Path(__file__).with_name("golden") / "mds"
FIXED = {"int": 8, "uint8": 1, "float32": 4, "float64": 8, "ndarray:int16:2": 4}
ENCODE = {
    "int": lambda value: struct.pack("<q", value),
    "uint8": lambda value: bytes([value]),
    "float32": lambda value: struct.pack("<f", value),
    "float64": lambda value: struct.pack("<d", value),
    "ndarray:int16:2": lambda value: value.tobytes(),
    "str": str.encode,
    "bytes": bytes,
    "json": lambda value: json.dumps(value).encode(),
    "pkl": pickle.dumps,
}
VALUES = {
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "uint8": st.integers(0, 255),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "ndarray:int16:2": st.integers(-9, 9).map(lambda n: np.array([n, 7], np.int16)),
    "str": st.text(max_size=9),
    "bytes": st.binary(max_size=9),
    "json": st.dictionaries(st.text(max_size=2), st.none() | st.integers(), max_size=2),
}
PACK = {
    None: bytes,
    "gz": lambda data: gzip.compress(data, mtime=0),
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shard(columns, samples):
    """The bytes of a shard, as the format is described."""
    config = json.dumps(described(columns), sort_keys=True).encode()
    encoded = []
    for sample in samples:
        parts = [ENCODE[kind](sample[name]) for name, kind in columns.items()]
        kinds = zip(columns.values(), parts, strict=True)
        lens = [len(part) for kind, part in kinds if kind not in FIXED]
        encoded.append(struct.pack(f"<{len(lens)}I", *lens) + b"".join(parts))
    offsets = np.cumsum([0, *map(len, encoded)]) + 4 + 4 * (len(samples) + 1) + len(config)
    header = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes()
    return header + config + b"".join(encoded)


def described(columns):
    return {
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": [FIXED.get(kind) for kind in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
    }


def write(directory, columns, shards, compression=None):
    entries = []
    Path(directory).mkdir(exist_ok=True)
    for number, samples in enumerate(shards):
        name, data = f"shard.{number:05}.mds", shard(columns, samples)
        packed = PACK[compression](data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        entry = {**described(columns), "version": 2, "raw_data": raw, "zip_data": None}
        entry |= {"samples": len(samples), "compression": compression}
        if compression:
            name += f".{compression}"
            entry["zip_data"] = {"basename": name, "bytes": len(packed), "hashes": {}}
        (Path(directory) / name).write_bytes(packed)
        entries.append(entry)
    index = {"version": 2, "shards": entries}
    (Path(directory) / "index.json").write_text(json.dumps(index))


def shown(value):
    """A value as in the golden file."""
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, list):
        return ["list", [shown(each) for each in value]]
    if isinstance(value, bytes) and value.startswith((b"\xff\xd8\xff", b"\x89PNG")):
        return ["JPEG" if value.startswith(b"\xff") else "PNG"]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", json.dumps(value)]
    return [type(value).__name__, str(value)]


def check(source, expected):
    """Checks samples one by one, as lists, through a pipeline, and of a copy."""
    expected = [{name: shown(value) for name, value in each.items()} for each in expected]
    assert len(source) == len(expected)
    keys = list(range(len(source)))[::-1]
    ds = grain.MapDataset.source(source)
    sent = pickle.loads(pickle.dumps(source))
    singly = [source[key] for key in range(len(source))]
    for found in (singly, source.__getitems__(keys)[::-1], list(ds), list(sent)):
        assert [{n: shown(v) for n, v in each.items()} for each in found] == expected


def test_all_encodings_are_read_as_their_own_reader_reads_them():
    expected = json.loads((GOLDEN / "all.json").read_text())
    source = MDSDataSource(GOLDEN / "all", allow_pickle=True)
    found = [{name: shown(value) for name, value in each.items()} for each in source]
    assert found == expected
    assert list(source.column_encodings) == list(found[0])
    decode = grain.transforms.DecodeImage()
    assert decode.map(source[3]["jpeg"]).shape == decode.map(source[3]["png"]).shape == (2, 3, 3)


@pytest.mark.parametrize("compression", ["gz", "zstd"])
def test_compressed_data_sets_of_its_writer_are_read(compression):
    columns = ["bytes", "float32", "int", "json", "ndarray", "str"]
    expected = list(MDSDataSource(GOLDEN / "all", columns=columns))
    shutil.copytree(GOLDEN / compression, "packed")
    check(MDSDataSource("packed"), expected)


def test_other_compressions_are_refused_unless_shards_are_there_decompressed():
    shutil.copytree(GOLDEN / "br", "data")
    with pytest.raises(ValueError, match=r"data/shard.00000.mds.br: shards are compressed by `br`"):
        MDSDataSource("data")
    columns = {"bytes": "bytes", "float32": "float32", "int": "int", "json": "json", "str": "str"}
    samples = list(MDSDataSource(GOLDEN / "all", columns=list(columns)))
    write("data", columns, [samples])
    index = json.loads(Path("data/index.json").read_text())
    index["shards"][0] |= {"compression": "br", "zip_data": {"basename": "shard.00000.mds.br"}}
    Path("data/index.json").write_text(json.dumps(index))
    check(MDSDataSource("data"), samples)


@hypothesis.settings(max_examples=cases(25, 1000))
@hypothesis.given(st.data(), st.sampled_from([None, "gz", "zstd"]))
def test_any_data_set_is_read(data, compression):
    kinds = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    columns = {f"c{number}": kind for number, kind in enumerate(kinds)}
    one = st.fixed_dictionaries({name: VALUES[kind] for name, kind in columns.items()})
    shards = data.draw(st.lists(st.lists(one, max_size=5), min_size=1, max_size=3))
    shutil.rmtree("data", ignore_errors=True)
    write("data", columns, shards, compression)
    typed = {"uint8": np.uint8, "float32": np.float32, "float64": np.float64}
    expected = [
        {name: typed.get(kind, lambda value: value)(each[name]) for name, kind in columns.items()}
        for samples in shards
        for each in samples
    ]
    source = MDSDataSource("data")
    check(source, expected)
    some = data.draw(st.permutations(list(columns)))[: len(columns) // 2 + 1]
    chosen = [{name: each[name] for name in some} for each in expected]
    check(MDSDataSource("data", columns=some), chosen)


def test_pickles_are_loaded_if_that_is_allowed_only():
    write("data", {"x": "pkl", "y": "int"}, [[{"x": [1, "two"], "y": 5}]])
    with pytest.raises(ValueError, match=r"column 'x' has pickles.*`allow_pickle=True`"):
        MDSDataSource("data")
    check(MDSDataSource("data", columns=["y"]), [{"y": 5}])
    assert MDSDataSource("data", allow_pickle=True)[0] == {"x": [1, "two"], "y": 5}


def test_several_directories_and_single_shards_are_read():
    rows = [{"n": n, "s": str(n)} for n in range(9)]
    columns = {"n": "int", "s": "str"}
    write("a", columns, [rows[:2], [], rows[2:5]])
    write("b", columns, [rows[5:]])
    check(MDSDataSource(["a", Path("b")]), rows)
    check(MDSDataSource(["a/", "b/index.json"]), rows)
    check(MDSDataSource("a/shard.00002.mds"), rows[2:5])
    path, number = MDSDataSource(["a", "b"])._record_location(6)
    assert (path.endswith("/b/shard.00000.mds"), number) == (True, 1)
    write("c", {"n": "int"}, [[{"n": 1}]])
    with pytest.raises(ValueError, match=r"c/shard.00000.mds: has the columns n \(int\); expected"):
        MDSDataSource(["a", "c"])
    with pytest.raises(ValueError, match="there is no column 'x'; there are"):
        MDSDataSource("a", columns=["x"])
    with pytest.raises(ValueError, match=r"a/shard.00009.mds: is not in a/index.json"):
        MDSDataSource("a/shard.00009.mds")
    with pytest.raises(FileNotFoundError, match=r"none/index.json"):
        MDSDataSource("none")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_an_iterator_resumes_at_each_sample(compression):
    write("a", {"n": "int"}, [[{"n": n} for n in range(7)], [{"n": 7}]], compression)
    ds = grain.MapDataset.source(MDSDataSource("a")).shuffle(4).to_iter_dataset()
    expected = [each["n"] for each in ds]
    it = iter(ds)
    for at in range(9):
        resumed = iter(pickle.loads(pickle.dumps(ds)))
        resumed.set_state(json.loads(json.dumps(it.get_state())))
        assert [each["n"] for each in resumed] == expected[at:]
        next(it, None)


def test_large_shards_are_decompressed_once_where_samples_are_read_in_order():
    """A shard of zstd is one frame, which is decompressed as a whole."""
    rng = np.random.default_rng(3)
    samples = [{"data": rng.bytes(100_000 + n)} for n in range(3 * 180)]
    shards = [samples[:180], samples[180:360], samples[360:]]
    write("a", {"data": "bytes"}, shards, "zstd")
    ds = grain.MapDataset.source(MDSDataSource("a"))
    assert len(ds) == len(samples)
    with grain.trace("trace.json"):
        assert list(ds.to_iter_dataset()) == samples
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    decoded = [each["args"]["file"] for each in events if each["name"] == "decode"]
    assert sorted(decoded) == [
        str(Path("a").resolve() / f"shard.{n:05}.mds.zstd") for n in range(3)
    ]
    order = list(grain.MapDataset.range(len(ds)).shuffle(1).slice(slice(5)))
    assert list(ds.shuffle(1).slice(slice(5))) == [samples[number] for number in order]


def attempt(path):
    """All samples, or the error, which names the file."""
    try:
        return list(MDSDataSource(path))
    except (GrainmillError, ValueError, FileNotFoundError) as error:
        if f"{path}/" not in str(error):
            raise
        return error


@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_shards_that_are_cut_off_are_errors(compression):
    write("a", {"n": "int", "s": "str"}, [[{"n": n, "s": "text"} for n in range(3)]], compression)
    (path,) = Path("a").glob("shard*")
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert isinstance(attempt("a"), Exception), end


@pytest.mark.parametrize("compression", [None, "gz"])
@hypothesis.settings(max_examples=cases(100, 5000))
@hypothesis.given(st.data())
def test_changed_bytes_are_errors_or_other_values(compression, data):
    columns = {"n": "int", "s": "str", "j": "json", "a": "ndarray:int16:2"}
    sample = {"n": 1, "s": "text", "j": {"x": 1}, "a": np.array([1, 2], np.int16)}
    shutil.rmtree("a", ignore_errors=True)
    write("a", columns, [[sample] * 3], compression)
    path = data.draw(st.sampled_from(sorted(Path("a").iterdir())))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    attempt("a")


def test_what_contradicts_itself_is_an_error():
    write("a", {"n": "int", "s": "str"}, [[{"n": 1, "s": "text"}, {"n": 2, "s": "more"}]])
    data = Path("a/shard.00000.mds").read_bytes()
    for place, replacement, text in (
        (data.index(b"more") - 12, b"\x03", r"sample 1: its columns have 15 bytes, it has 16"),
        (data.index(b"more"), b"\xff", r"sample 1: column 's': .*decode"),
        (8, b"\xff", "offset 2: is at byte"),
        (0, b"\xff", "255 samples need a header of"),
    ):
        changed = data[:place] + replacement + data[place + 1 :]
        Path("a/shard.00000.mds").write_bytes(changed)
        with pytest.raises(GrainmillError, match=f"a/shard.00000.mds: .*{text}"):
            list(MDSDataSource("a"))
    index = json.loads(Path("a/index.json").read_text())
    for change in (
        {"version": 1},
        {"format": "json"},
        {"samples": -1},
        {"column_sizes": [8]},
        {"raw_data": {"basename": "../a/shard.00000.mds"}},
        {"raw_data": {"basename": "/etc/passwd"}},
    ):
        changed = {"version": 2, "shards": [{**index["shards"][0], **change}]}
        Path("a/index.json").write_text(json.dumps(changed))
        with pytest.raises(GrainmillError, match=r"a/index.json: no index of Mosaic Streaming"):
            MDSDataSource("a")
    for text in ("", "[]", "{}", '{"shards": 1}', "[" * 100_000):
        Path("a/index.json").write_text(text)
        with pytest.raises(GrainmillError, match=r"a/index.json: no index of Mosaic Streaming"):
            MDSDataSource("a")
    Path("a/index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(ValueError, match="a: the data set has no shards"):
        MDSDataSource("a")


def test_values_that_are_none_of_their_encoding_are_errors():
    for encoding, data in (
        ("int", b"1234567"),
        ("float64", b"123456789"),
        ("str", b"\xff"),
        ("str_int", b"one"),
        ("ndarray", b""),
        ("ndarray", b"\x01\x04\x02ab"),
        ("ndarray:int16", b"\x04\x03ab"),
        ("ndarray:int16:2", b"ab"),
        ("jpeg_array", b"\xff\xff\xff\xff"),
        ("list[png]", b"\0\0\0\0\x01\0\0\0\x05\0\0\0abcd"),
        ("pil", struct.pack("<3I", 2, 2, 3) + b"RGBabc"),
        ("pil", struct.pack("<3I", 2, 2, 4) + b"none" + bytes(4)),
    ):
        with pytest.raises((ValueError, IndexError)):
            decoder_of(encoding)(data)
    assert decoder_of("str_decimal")(b"1.50") == Decimal("1.50")
    for encoding in ("tensor", "ndarray:complex64", "ndarray:int16:x"):
        with pytest.raises(ValueError, match=r"known|invalid"):
            decoder_of(encoding)


@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_data_sets_in_buckets_are_those_on_disk(compression, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"n": n, "s": str(n) * (n % 9)} for n in range(300)]
    write("a", {"n": "int", "s": "str"}, [rows[:100], rows[100:]], compression)
    with BucketServer(latency_s=0.002) as server:
        for path in Path("a").iterdir():
            server.put(f"/{path}", path.read_bytes())
        source = MDSDataSource(f"{server.url}/a")
        check(source, rows)
        ds = grain.MapDataset.source(source).shuffle(2).to_iter_dataset()
        assert list(ds) == [rows[at] for at in grain.MapDataset.range(300).shuffle(2)]


@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_commands_read_shards(capsys, compression):
    rows = [{"n": n, "s": "ä" * n} for n in range(123)]  # the first byte is `{`
    write("a", {"n": "int", "s": "str"}, [rows], compression)
    (path,) = map(str, Path("a").glob("shard*"))
    assert files.detect_format(path).name == "mds"
    assert files.find_files(["a"]) == [path]
    found = files.describe(path)
    assert (found["records"], found["format"]) == (123, "mds")
    assert found["compression"] == {None: None, "gz": "gzip", "zstd": "zstd"}[compression]
    for given in ("a", path):
        for out in ("out.jsonl", "out.parquet"):
            assert main(["convert", given, out, "--force", "--quiet"]) == 0
        assert list(map(json.loads, Path("out.jsonl").read_text().splitlines())) == rows
        assert main(["verify", given]) == 0
        assert main(["info", given]) == 0
        capsys.readouterr()
        assert main(["cat", given]) == 0
        assert list(map(json.loads, capsys.readouterr().out.splitlines())) == rows
    assert main(["convert", path, "b.mds"]) == 2
    assert "MDS files are not written" in capsys.readouterr().err
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    assert main(["verify", path]) == 4


def test_repr_tells_what_is_read_apart():
    write("a", {"n": "int", "s": "str"}, [[]])
    write("b", {"n": "int", "s": "str"}, [[]])
    given = [("a", None), ("b", None), ("a", ["n"]), ("a", ["s"])]
    assert len({repr(MDSDataSource(path, columns=names)) for path, names in given}) == len(given)


def test_images_are_arrays_as_they_are_in_memory():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    data = struct.pack("<3I", 4, 2, 3) + b"RGB" + pixels.tobytes()
    assert decoder_of("pil")(data).tolist() == pixels.tolist()
