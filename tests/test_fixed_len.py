"""`TokensDataSource` and `NpyDataSource` beside NumPy."""

import io
import itertools
import json
import math
import pickle
import struct
import zipfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from bucket_server import BucketServer
from effort import cases

import grainmill as grain
from grainmill import _native
from grainmill._tools.main import main
from grainmill.sources import NpyDataSource, TokensDataSource

TYPES = ["u1", "i1", "<u2", ">u2", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(source, expected, dtype):
    """Checks elements, singly and many, and batches."""
    expected = list(expected)
    assert (len(source), source.dtype) == (len(expected), dtype)
    ds = grain.MapDataset.source(source)
    keys = list(range(len(expected)))[::-1]
    sent = list(pickle.loads(pickle.dumps(source)))
    for found in (list(source), source.__getitems__(keys)[::-1], list(ds), sent):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            # What NumPy takes out of an array as a scalar has the machine's order of bytes.
            of_one = dtype if one.shape else dtype.newbyteorder("=")
            assert (one.dtype, one.shape) == (of_one, other.shape)
            np.testing.assert_array_equal(one, other)
    for size in (1, 3, 100):
        batches = list(ds.shuffle(seed=1).batch(size))
        order = [int(at) for at in grain.MapDataset.range(len(expected)).shuffle(seed=1)]
        for number, batch in enumerate(batches):
            rows = [expected[at] for at in order[number * size : number * size + size]]
            np.testing.assert_array_equal(batch, np.stack(rows))
            assert batch.dtype == dtype


@st.composite
def token_files(draw):
    """Arrays of one type, and how they are cut."""
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = [rng.integers(0, 120, length).astype(dtype) for length in lengths]
    length = draw(st.integers(1, 40))
    return arrays, dtype, length, draw(st.none() | st.integers(1, 60)), draw(st.integers(0, 30))


@hypothesis.settings(max_examples=cases(40, 2_000))
@hypothesis.given(token_files(), st.booleans())
def test_windows_are_those_of_slices(tmp_path_factory, drawn, is_npy):
    arrays, dtype, length, stride, header_bytes = drawn
    folder = tmp_path_factory.mktemp("tokens")
    expected = []
    for number, array in enumerate(arrays):
        if is_npy:
            np.save(folder / f"{number}.npy", array)
        else:
            data = bytes(header_bytes) + array.tobytes()
            (folder / f"{number}.bin").write_bytes(data)
        begins = range(0, len(array) - length + 1, stride or length)
        expected += [array[begin : begin + length] for begin in begins]
    source = TokensDataSource(
        folder, dtype, length=length, stride=stride, header_bytes=0 if is_npy else header_bytes
    )
    check(source, expected, dtype)


@hypothesis.settings(max_examples=cases(40, 2_000))
@hypothesis.given(
    st.sampled_from([*TYPES, "?", "<c8", "S3", "<U2", "<M8[s]", "V5"]),
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from(["npy", "npz", "both"]),
)
def test_rows_are_those_of_numpy(tmp_path_factory, dtype, lengths, shape, kind):
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(len(lengths))
    expected = []
    for number, length in enumerate(lengths):
        size = (length, *shape)
        raw = rng.integers(48, 50, math.prod(size) * np.dtype(dtype).itemsize, np.uint8)
        array = np.frombuffer(raw.tobytes(), dtype) if dtype != "<U2" else np.full(size, "ab")
        array = array.reshape(size).astype(dtype)
        if kind == "npy" or (kind == "both" and number % 2):
            np.save(folder / f"{number}.npy", array)
        else:
            np.savez(folder / f"{number}.npz", rows=array)
        expected += list(array)
    check(NpyDataSource(folder), expected, np.dtype(dtype))


def test_arrays_of_an_archive_are_chosen_by_name():
    images = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    np.savez("a.npz", images=images, labels=np.arange(5), scale=np.float32(3))
    check(NpyDataSource("a.npz", array="images"), images, np.dtype("u1"))
    check(NpyDataSource("a.npz", array="labels"), np.arange(5), np.dtype("<i8"))
    check(NpyDataSource("a.npz[1:3]", array="labels"), [np.int64(1), np.int64(2)], np.dtype("<i8"))
    for array, problem in (
        (None, "`array` must name one of its arrays: images, labels, scale"),
        ("none", "has no array 'none'; it has images, labels, scale"),
    ):
        with pytest.raises(ValueError, match=problem):
            NpyDataSource("a.npz", array=array)
    with pytest.raises(grain.GrainmillError, match=r"a\.npz: scale\.npy: has no rows of values"):
        NpyDataSource("a.npz", array="scale")


def test_what_cannot_be_read_by_row_is_refused():
    np.savez_compressed("compressed.npz", x=np.arange(9))
    np.save("fortran.npy", np.asfortranarray(np.ones((3, 2))))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save("scalar.npy", np.array(3))
    np.save("empty.npy", np.ones((3, 0)))
    for name, problem in (
        ("compressed.npz", r"x\.npy: is compressed or encrypted.*`np\.savez`"),
        ("fortran.npy", "is in Fortran's order.*`np.ascontiguousarray`"),
        ("objects.npy", "has Python objects"),
        ("scalar.npy", "has no rows of values"),
        ("empty.npy", "has no rows of values"),
    ):
        with pytest.raises(grain.GrainmillError, match=rf"{name}: {problem}"):
            NpyDataSource(name)
    np.save("a.npy", np.ones((3, 2)))
    np.save("b.npy", np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"b\.npy: rows are float32 .*, expected float64 of shape"):
        NpyDataSource(["a.npy", "b.npy"])
    with pytest.raises(ValueError, match=r"b\.npy: tokens are float32, expected uint16"):
        TokensDataSource("b.npy", np.uint16, length=1)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_every_cut_and_flipped_byte_of_a_header_is_an_error_or_harmless(kind):
    array = np.arange(12, dtype="<u2").reshape(6, 2)
    np.save("whole.npy", array)
    np.savez("whole.npz", array)
    data = Path(f"whole.{kind}").read_bytes()
    path = Path(f"damaged.{kind}")
    for cut in range(0, len(data), 1 if kind == "npy" else 7):
        path.write_bytes(data[:cut])
        with pytest.raises(grain.GrainmillError, match=path.name):
            NpyDataSource(path)
    for at, bit in itertools.product(range(len(data)), (1, 64)):
        path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        try:
            source = NpyDataSource(path)
        except (grain.GrainmillError, ValueError) as error:
            assert path.name in str(error)  # noqa: PT017
            continue
        assert sum(len(np.atleast_1d(row).tobytes()) for row in source) <= 24


def test_files_that_do_not_fit_are_refused():
    Path("odd.bin").write_bytes(bytes(1024 + 7))
    with pytest.raises(grain.GrainmillError, match=r"odd\.bin: .*has 7 bytes from byte 1024 on"):
        TokensDataSource("odd.bin", np.uint16, length=2, header_bytes=1024)
    with pytest.raises(grain.GrainmillError, match="its values end at byte 2000"):
        TokensDataSource("odd.bin", np.uint16, length=2, header_bytes=2000)
    np.save("a.npy", np.arange(9))
    source = pickle.dumps(NpyDataSource("a.npy"))
    Path("a.npy").write_bytes(Path("a.npy").read_bytes()[:-8])
    with pytest.raises(grain.GrainmillError, match=r"a\.npy.*values end at byte"):
        pickle.loads(source)[0]


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"length": 0}, ValueError, "`length` must be at least 1, got 0"),
        ({"length": 1, "stride": 0}, ValueError, "`stride` must be at least 1, got 0"),
        ({"length": 1, "header_bytes": -1}, ValueError, "`header_bytes` must not be negative"),
        ({"length": 1, "dtype": "S2"}, TypeError, "must be a type of numbers"),
        ({"length": 1, "dtype": None}, TypeError, r"a\.bin: `dtype` must be given"),
    ],
)
def test_invalid_arguments(arguments, error, problem):
    np.arange(9, dtype=np.uint16).tofile("a.bin")
    with pytest.raises(error, match=problem):
        TokensDataSource("a.bin", **{"dtype": np.uint16, **arguments})


def test_llm_c_header_and_build_nanogpt_shards():
    tokens = np.arange(1000, dtype=np.uint16)
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    Path("c.bin").write_bytes(header + tokens.tobytes())
    source = TokensDataSource("c.bin", np.uint16, length=65, stride=64, header_bytes=1024)
    check(source, [tokens[at : at + 65] for at in range(0, 936, 64)], np.dtype("<u2"))
    np.save("g.npy", tokens)
    check(TokensDataSource("g.npy", length=100), tokens.reshape(10, 100), np.dtype("<u2"))


def test_batches_are_filled_by_the_engine(monkeypatch):
    np.save("a.npy", np.arange(6000, dtype=np.float32).reshape(1000, 6))
    source = NpyDataSource("a.npy")
    ds = grain.MapDataset.source(source).shuffle(seed=3).batch(100).to_iter_dataset()
    expected = [batch.copy() for batch in ds]
    made = []
    monkeypatch.setattr(NpyDataSource, "_elements", lambda *given: made.append(given))
    found = list(ds)
    # The first elements show that there is a batch at all.
    assert len(made) <= 1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.flags.aligned
    for one in expected:  # nothing else is written there
        one[:] = -1
    np.testing.assert_array_equal(found[0], next(iter(ds)))


def test_mixtures_and_threads_have_the_same_batches():
    rng = np.random.default_rng(0)
    for name in "ab":
        np.save(f"{name}.npy", rng.integers(0, 9, (60, 4)).astype(np.uint16))
    parts = [grain.MapDataset.source(NpyDataSource(f"{name}.npy")) for name in "ab"]
    ds = grain.MapDataset.mix(parts, [0.5, 0.5]).shuffle(seed=2)
    expected = np.stack(list(ds))
    np.testing.assert_array_equal(np.concatenate(list(ds.batch(7))), expected)
    found = list(ds.batch(7).to_iter_dataset(grain.ReadOptions(num_threads=3)))
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with BucketServer(latency_s=0.002) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.mark.parametrize(("extension", "save"), [("npy", np.save), ("npz", np.savez)])
def test_opening_reads_headers_only(bucket, extension, save):
    file = io.BytesIO()
    save(file, np.zeros((1_000_000, 2)))
    bucket.put(f"/bucket/a.{extension}", file.getvalue())
    assert len(NpyDataSource(f"s3://bucket/a.{extension}")) == 1_000_000
    assert bucket.num_bytes_asked < 600_000


def test_headers_of_many_files_in_a_bucket_are_read_concurrently(bucket):
    """One after the other, they would take two requests' time for each."""
    urls = []
    for number in range(40):
        file = io.BytesIO()
        np.save(file, np.arange(number + 1, dtype=np.int32))
        bucket.put(f"/bucket/{number}.npy", file.getvalue())
        urls.append(f"s3://bucket/{number}.npy")
    bucket.keeps, bucket.max_active = 20, 0
    source = NpyDataSource(urls)
    assert bucket.max_active >= 20
    bucket.keeps = 0
    tokens = TokensDataSource(urls, length=1)
    rows = np.concatenate([np.arange(number + 1, dtype=np.int32) for number in range(40)])
    np.testing.assert_array_equal(source.__getitems__(range(len(rows))), rows)
    assert (len(source), len(tokens)) == (len(rows), len(rows))
    bucket.put("/bucket/7.npy", b"\x93NUMPY")
    with pytest.raises(grain.GrainmillError, match=r"s3://bucket/7\.npy: header at byte 0"):
        NpyDataSource(urls)
    with pytest.raises(FileNotFoundError, match=r"bucket/none\.npy"):
        NpyDataSource([*urls, "s3://bucket/none.npy"])
    np.save(file := io.BytesIO(), np.zeros(0, np.int32))
    bucket.put("/bucket/7.npy", file.getvalue())
    assert len(NpyDataSource(urls)) == len(source) - 8


def test_files_in_buckets_are_those_on_disk(bucket):
    tokens = np.random.default_rng(1).integers(0, 50_000, 6_000).astype(np.uint16)
    for name, save in (("a.npy", np.save), ("a.npz", np.savez)):
        file = io.BytesIO()
        save(file, tokens.reshape(-1, 50))
        bucket.put(f"/bucket/{name}", file.getvalue())
        check(NpyDataSource(f"s3://bucket/{name}"), tokens.reshape(-1, 50), tokens.dtype)
        check(NpyDataSource(f"{bucket.url}/bucket/{name}"), tokens.reshape(-1, 50), tokens.dtype)
    bucket.put("/bucket/t.bin", tokens.tobytes())
    source = TokensDataSource("s3://bucket/t.bin", np.uint16, length=101, stride=100)
    check(source, [tokens[at : at + 101] for at in range(0, 5_801, 100)], tokens.dtype)


def test_commands_read_arrays(capsys):
    array = np.arange(12, dtype=np.uint16).reshape(6, 2)
    np.save("a.npy", array)
    np.savez("b.npz", array)
    for path in ("a.npy", "b.npz"):
        for command in (["info"], ["verify"], ["cat"], ["convert"]):
            out = ["out.jsonl", "--force"] if command == ["convert"] else []
            assert main([*command, path, *out, "--json"]) == 0, capsys.readouterr().err
            printed = capsys.readouterr().out
            if command == ["cat"]:
                records = [json.loads(line)["record"] for line in printed.splitlines()]
                assert records == array.tolist()
            elif command == ["info"]:
                found = json.loads(printed)
                assert (found["records"], found["files"][0]["format"]) == (6, "npy")
        assert list(map(json.loads, Path("out.jsonl").read_text().splitlines())) == array.tolist()
    assert main(["convert", "a.npy", "a.parquet"]) != 0
    assert "NumPy files have lists of numbers" in capsys.readouterr().err


def test_repr_tells_what_is_read_apart():
    np.save("a.npy", np.arange(12, dtype=np.uint16))
    with zipfile.ZipFile("b.npz", "w") as archive:
        archive.write("a.npy")
    sources = [TokensDataSource("a.npy", length=n, stride=m) for n in (2, 3) for m in (1, 2)]
    sources += [NpyDataSource("a.npy"), NpyDataSource("b.npz")]
    assert len({repr(source) for source in sources}) == len(sources)
    assert isinstance(sources[0]._files, _native.RecordFiles)
