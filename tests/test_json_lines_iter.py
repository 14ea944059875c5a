"""`JsonLinesIterDataset` beside a slow twin: lines, states and errors of every compression."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import random
import subprocess
import sys
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest
import record_formats as formats
from bucket_server import BucketServer
from effort import cases

import grainmill as grain
from grainmill.experimental import InterleaveIterDataset, assert_equal_output_after_checkpoint
from grainmill.sources import JsonLinesDataSource, JsonLinesIterDataset

WHOLE = ["none", "gzip", "zlib", "zstd", "xz", "bzip2"]
PARTS = ["members", "padded", "frames", "xz streams", "bzip2 streams"]
NAMES = {"gzip": ".gz", "members": ".gz", "padded": ".gz", "zstd": ".zst", "frames": ".zst"}
NAMES |= {"xz": ".xz", "xz streams": ".xz", "bzip2": ".bz2", "bzip2 streams": ".bz2"}
LINE = st.text(max_size=40).map(lambda text: text.encode().replace(b"\n", b" "))


def written(directory, data, how, name="lines"):
    path = directory / f"{name}.jsonl{NAMES.get(how, '')}"
    path.write_bytes(formats.compressed(data, how))
    return path


def lines_of(count, seed=0):
    """Lines that hardly compress, so that streams are far apart in files, too."""
    draw = random.Random(seed)
    return [json.dumps({"n": n, "x": draw.random()}).encode() for n in range(count)]


@hypothesis.settings(max_examples=cases(80, 3_000))
@hypothesis.given(st.lists(LINE, max_size=30), st.sampled_from(WHOLE + PARTS), st.data())
def test_lines_and_states_match_the_slow_twin(tmp_path_factory, lines, how, data):
    text = b"\n".join(lines)
    hypothesis.assume(not formats.is_binary(text) and not formats.begins_as_other(text))
    path = written(tmp_path_factory.mktemp("lines"), text, how)
    expected = formats.json_lines(text)
    iterator = iter(JsonLinesIterDataset(path))
    states = [json.loads(json.dumps(iterator.get_state()))]
    for line in expected:
        assert next(iterator) == line
        states.append(json.loads(json.dumps(iterator.get_state())))
    assert next(iterator, None) is None
    at = data.draw(st.integers(0, len(expected)))
    for used in (iterator, iter(JsonLinesIterDataset(path))):
        used.set_state(states[at])
        assert used.get_state() == states[at]
        assert list(used) == expected[at:]


@pytest.mark.parametrize("how", ["gzip", "zstd", "xz", "bzip2"])
def test_continuing_reads_no_more_than_from_the_last_stream_before(tmp_path, how):
    lines = lines_of(20_000)
    parts = [b"\n".join(lines[at : at + 2_500]) + b"\n" for at in range(0, 20_000, 2_500)]
    packed = [formats.compressed(part, how) for part in parts]
    begins = [sum(map(len, packed[:k])) for k in range(len(packed))]
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"".join(packed))
    iterator = iter(JsonLinesIterDataset(path))
    states = [json.loads(json.dumps(iterator.get_state()))]
    for line in lines:
        assert next(iterator) == line
        states.append(json.loads(json.dumps(iterator.get_state())))
    for number in (*range(1, 20_000, 2_999), 7_500):  # and where a stream begins
        state, part = states[number], number // 2_500
        expected = [begins[part], sum(map(len, parts[:part]))]
        assert state.get("decompress_from", [0, 0]) == expected
        # What is between the head of the file and the stream is not read at all.
        gap = bytes(begins[part] - begins[4]) if part > 4 else b""
        rest = packed[4:] if part <= 4 else packed[part:]
        path.write_bytes(b"".join(packed[:4]) + gap + b"".join(rest))
        resumed = iter(JsonLinesIterDataset(path))
        resumed.set_state(state)
        assert list(resumed) == lines[number:]


@pytest.mark.parametrize("how", WHOLE + PARTS)
def test_lines_before_damage_are_delivered(tmp_path, how):
    lines = lines_of(30)
    data = formats.compressed(b"\n".join(lines) + b"\n", how)
    path = written(tmp_path, b"", how)
    for cut in range(2, len(data), cases(4, 3)):
        path.write_bytes(data[:cut])
        found, is_cut = [], False
        try:
            found += iter(JsonLinesIterDataset(path))
        except grain.GrainmillError as error:
            assert str(path) in str(error)  # noqa: PT017
            is_cut = True
        # Between members the last line may be cut, too, and nothing shows that.
        whole = found if is_cut else found[:-1]
        assert whole == lines[: len(whole)]
    if how == "none":
        return
    for at in range(0, len(data), cases(2, 1)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
        try:
            found = list(JsonLinesIterDataset(path))
        except grain.GrainmillError:
            continue
        # Frames of zstd have no checksum here; others end where a part seems to be padding.
        assert how in {"zstd", "frames"} or set(found) <= set(lines)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with BucketServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def test_many_files_of_a_bucket_are_interleaved_and_resumed(bucket):
    expected = {}
    for number, how in enumerate((WHOLE + PARTS) * 2):
        lines = lines_of(5 + number, number)
        name = f"{number:02}.jsonl{NAMES.get(how, '')}"
        bucket.put(f"/bucket/{name}", formats.compressed(b"\n".join(lines), how))
        expected[f"s3://bucket/{name}"] = lines
    paths = grain.sources.expand_paths("s3://bucket/*.jsonl*")
    assert paths == list(expected)
    files = grain.MapDataset.source(paths).map(JsonLinesIterDataset)
    ds = InterleaveIterDataset(files, cycle_length=5)
    every = list(itertools.chain.from_iterable(expected.values()))
    assert sorted(ds) == sorted(every)
    assert list(JsonLinesIterDataset("s3://bucket/")) == every
    assert_equal_output_after_checkpoint(ds.map(json.loads).batch(7))


def test_files_are_read_one_after_another(tmp_path):
    kinds = WHOLE + PARTS
    lines = lines_of(3 * len(kinds))
    for number, how in enumerate(kinds):
        part = b"\n".join(lines[3 * number : 3 * number + 3])
        written(tmp_path, part, how, f"{number:02}")
    ds = JsonLinesIterDataset(tmp_path)
    assert list(ds) == lines
    assert_equal_output_after_checkpoint(ds.map(json.loads))
    iterator = iter(ds)
    for number, line in enumerate(lines):
        state = json.loads(json.dumps(iterator.get_state()))
        assert state["file_index"] == max(0, (number - 1) // 3)
        resumed = iter(ds)
        resumed.set_state(state)
        assert list(resumed) == lines[number:]
        assert next(iterator) == line
    with pytest.raises(ValueError, match="restore needs the same file"):
        iterator.set_state({"reader_offset": 0})
    single = iter(JsonLinesIterDataset(tmp_path / "00.jsonl"))
    with pytest.raises(ValueError, match="several files"):
        single.set_state(state)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"reader_offset": -1}, "must not be negative, got -1"),
        ({"reader_offset": 5, "decompress_from": [3, 6]}, r"must be before 5, got \[3, 6\]"),
        ({"reader_offset": 5, "decompress_from": [-3, 0]}, "must be before 5"),
    ],
)
def test_states_of_nothing_are_refused(tmp_path, state, problem):
    iterator = iter(JsonLinesIterDataset(written(tmp_path, b"[1]\n[2]\n", "xz")))
    assert next(iterator) == b"[1]"
    with pytest.raises(ValueError, match=problem):
        iterator.set_state(state)
    assert next(iterator) == b"[2]"


def test_a_state_of_another_file_is_an_error_or_the_end(tmp_path):
    path = written(tmp_path, b"[1]\n" * 100, "xz")
    for state in ({"reader_offset": 8, "decompress_from": [7, 4]}, {"reader_offset": 1 << 40}):
        iterator = iter(JsonLinesIterDataset(path))
        iterator.set_state(state)
        with pytest.raises((grain.GrainmillError, StopIteration), match=r"compressed data|^$"):
            next(iterator)


def test_random_access_to_what_has_none_says_what_to_do(tmp_path):
    for how in ("xz", "bzip2"):
        path = written(tmp_path, b"[1]\n", how)
        with pytest.raises(grain.GrainmillError, match=f"by {how}, which has no random access"):
            JsonLinesDataSource(path)
        assert list(JsonLinesDataSource(path, compression="none")) or how
    with pytest.raises(ValueError, match='got "xz"'):
        JsonLinesDataSource(path, compression="xz")
    path = written(tmp_path, b"x" * (129 << 20), "zstd")
    with pytest.raises(grain.GrainmillError, match="`JsonLinesIterDataset`"):
        JsonLinesDataSource(path)
    assert list(JsonLinesIterDataset(path)) == [b"x" * (129 << 20)]


def test_a_dictionary_that_takes_too_much_memory_is_refused(tmp_path):
    path = written(tmp_path, b"[1]\n" * 9, "xz")
    data = bytearray(path.read_bytes())
    assert data[12:17] == b"\x02\0\x21\x01\x16"  # a block of LZMA2, whose dictionary has 8 MiB
    for code in (28, 32):  # 64 and 256 MiB
        data[16] = code
        data[20:24] = zlib.crc32(data[12:20]).to_bytes(4, "little")
        path.write_bytes(data)
        if code == 28:
            assert list(JsonLinesIterDataset(path)) == [b"[1]"] * 9
            continue
        with pytest.raises(grain.GrainmillError, match="dictionary of xz needs more than 256 MiB"):
            list(JsonLinesIterDataset(path))


@pytest.mark.parametrize("how", ["zstd", "xz", "bzip2"])
def test_a_small_file_that_decompresses_to_a_long_line_is_refused(tmp_path, how):
    path = written(tmp_path, b"x" * (5 << 20), how)
    assert path.stat().st_size < 100_000
    code = "import sys, grainmill; next(iter(grainmill.sources.JsonLinesIterDataset(sys.argv[1])))"
    for limit, is_refused in ((1 << 20, True), (8 << 20, False)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env=dict(os.environ, GRAINMILL_MAX_RECORD_BYTES=str(limit)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == is_refused, done.stderr
        assert ("GRAINMILL_MAX_RECORD_BYTES" in done.stderr) == is_refused


def test_what_other_programs_write_is_read(tmp_path):
    lines = lines_of(100)
    for name, open_file in (("a.gz", gzip.open), ("a.xz", lzma.open), ("a.bz2", bz2.open)):
        with open_file(tmp_path / name, "wb") as file:
            file.write(b"\n".join(lines))
        assert list(JsonLinesIterDataset(tmp_path / name)) == lines
    (tmp_path / "empty").write_bytes(bz2.compress(b""))
    assert list(JsonLinesIterDataset(tmp_path / "empty")) == []
    (tmp_path / "text").write_bytes(b"BZh9 is a level\n")  # of a stream, but none follows
    assert list(JsonLinesIterDataset(tmp_path / "text")) == [b"BZh9 is a level"]


def test_derived_class_and_text():
    ds = JsonLinesIterDataset(["a.jsonl", "b.jsonl.xz"])
    assert repr(ds) == "JsonLinesIterDataset(paths=['a.jsonl', 'b.jsonl.xz'])"
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        iter(ds)
