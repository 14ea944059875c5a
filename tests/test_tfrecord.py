"""`TFRecordDataSource`: records, indices, compression and damage, beside a slow twin."""

import glob
import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import record_formats as formats
from effort import cases

import grainmill as grain
from grainmill._native import masked_crc32c

DATA = Path(__file__).parent / "data/tfrecord"
MANIFEST = json.loads((DATA / "manifest.json").read_text("utf-8"))["files"]
RECORDS = [b"record %d " % number * (number % 7) for number in range(200)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))


def written(path, data):
    path.write_bytes(data)
    return str(path)


def index_beside(path):
    path = Path(path)
    return path.with_name(f".{path.name}.grainmill_index")


def digest(records):
    sha = hashlib.sha256()
    for record in records:
        sha.update(struct.pack("<Q", len(record)) + record)
    return sha.hexdigest()


def read(path, **options):
    source = grain.sources.TFRecordDataSource(path, **options)
    return source.__getitems__(range(len(source)))


@pytest.mark.parametrize(
    ("length", "magic"), [(376, b"x\x01"), (40_056, b"x\x9c"), (559_903, b"\x1f\x8b\x08")]
)
def test_a_plain_file_that_begins_like_a_compressed_one_is_plain(tmp_path, length, magic):
    path = written(tmp_path / "a.tfrecord", formats.tfrecord([b"a" * length, b"b"]))
    assert Path(path).read_bytes().startswith(magic)
    assert read(path) == [b"a" * length, b"b"]
    assert list(grain.experimental.TFRecordIterDataset(path)) == [b"a" * length, b"b"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_golden_files_have_the_records_of_the_manifest(entry, tmp_path):
    path = DATA / entry["file"]
    if entry["expect"] == "ok":
        for _ in range(2):  # by a scan, then by its index
            records = read(path, index_dir=tmp_path)
            assert len(records) == entry["num_records"]
            assert digest(records) == entry["records_sha256"]
            assert len(list(tmp_path.iterdir())) == 1
    else:
        with pytest.raises(grain.GrainmillError, match=rf"{path.name}: record \d+ at byte \d+"):
            read(path, index_dir=tmp_path)


def test_crcs_are_those_of_the_slow_twin():
    for data in [b"", b"123456789", bytes(range(256)) * 5]:
        assert masked_crc32c(data) == formats.masked(data)


@hypothesis.settings(max_examples=cases(40, 2_000))
@hypothesis.given(
    st.lists(st.binary(max_size=300), max_size=40),
    st.sampled_from(["none", "gzip", "zlib", "members", "zstd", "frames"]),
    st.data(),
)
def test_records_in_any_order_match_the_slow_twin(tmp_path_factory, records, how, data):
    path = tmp_path_factory.mktemp("any") / "data"
    plain = formats.tfrecord(records)
    assert formats.tfrecords(plain) == (records, True)
    source = grain.sources.TFRecordDataSource(written(path, formats.compressed(plain, how)))
    assert len(source) == len(records)
    if records:
        picks = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=60))
        assert source.__getitems__(picks) == [records[pick] for pick in picks]
        assert [source[pick] for pick in picks] == [records[pick] for pick in picks]


@pytest.mark.parametrize("how", ["none", "gzip", "zlib", "members", "zstd", "frames"])
def test_files_of_many_points_give_shuffled_records(tmp_path, how):
    rng = random.Random(4)
    words = [rng.randbytes(6) for _ in range(400)]
    records = [b" ".join(rng.choices(words, k=rng.randrange(120))) for _ in range(12_000)]
    records[6_000] = bytes(3 << 20)  # longer than the distance of two points
    frames = []
    for record in records:
        head = struct.pack("<Q", len(record))
        frames += [head, struct.pack("<I", masked_crc32c(head)), record]
        frames += [struct.pack("<I", masked_crc32c(record))]
    path = written(tmp_path / "data", formats.compressed(b"".join(frames), how))
    for _ in range(2):
        source = grain.sources.TFRecordDataSource(path)
        shuffled = list(range(len(records)))
        rng.shuffle(shuffled)
        for first in range(0, len(shuffled), 500):
            block = shuffled[first : first + 500]
            assert source.__getitems__(block) == [records[number] for number in block]
        dataset = grain.MapDataset.source(source).shuffle(seed=3)
        assert sorted(dataset) == sorted(records)


def test_pipelines_read_the_engine_files_and_resume_at_every_element(tmp_path):
    path = written(tmp_path / "data", formats.tfrecord(RECORDS[:30]))
    source = grain.sources.TFRecordDataSource([path, path])
    dataset = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset()
    expected = list(dataset)
    iterator = iter(dataset)
    states = [iterator.get_state() for _ in iterator]
    for position, state in enumerate(states):
        resumed = iter(dataset)
        resumed.set_state(state)
        assert list(resumed) == expected[position + 1 :]


def test_workers_and_other_processes_read_a_pickled_source(tmp_path):
    path = written(tmp_path / "data", formats.tfrecord(RECORDS))
    source = grain.sources.TFRecordDataSource(path)
    pickled = pickle.dumps(source)
    assert len(pickled) < 1500
    index_beside(path).unlink()
    code = (
        "import pickle, sys; source = pickle.loads(sys.stdin.buffer.read());"
        "print(len(source), source[7], repr(source))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickled, capture_output=True, check=True
    )
    assert run.stdout.decode().strip() == f"200 {RECORDS[7]!r} {source!r}"


def test_repr_tells_sources_apart_and_not_the_process(tmp_path):
    for name in ("ab", "a", "b"):
        written(tmp_path / name, formats.tfrecord(RECORDS[:3]))

    def text(*names, **options):
        paths = [str(tmp_path / name) for name in names]
        return repr(grain.sources.TFRecordDataSource(paths, **options))

    texts = [text("ab"), text("a", "b"), text("b", "a"), text("a", compression="none")]
    assert len(set(texts)) == 4
    assert text("ab") == texts[0]


# --- the index --------------------------------------------------------------------------------


def test_index_is_used_until_the_file_changes(tmp_path):
    path = tmp_path / "data"
    written(path, formats.tfrecord(RECORDS))
    assert read(path) == RECORDS
    index = index_beside(path)
    first = index.stat().st_mtime_ns, index.read_bytes()
    assert read(path) == RECORDS
    assert (index.stat().st_mtime_ns, index.read_bytes()) == first
    # No pattern for data files finds it.
    assert glob.glob(f"{tmp_path}/*") == [str(path)]  # noqa: PTH207 - shells skip hidden files

    written(path, formats.tfrecord(RECORDS[::-1]))  # as long as before
    assert read(path) == RECORDS[::-1]
    assert index.read_bytes() != first[1]

    # The same length and time, another content.
    before = path.stat()
    written(path, formats.tfrecord(RECORDS))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(path) == RECORDS


def test_damaged_index_is_written_again(tmp_path):
    path = tmp_path / "data"
    written(path, formats.tfrecord(RECORDS))
    read(path)
    index = index_beside(path)
    good = index.read_bytes()
    rng = random.Random(5)
    for _ in range(100):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(bad), good[: rng.randrange(len(good))]):
            index.write_bytes(damaged)
            assert read(path) == RECORDS
            assert index.read_bytes() == good
    assert not list(tmp_path.glob(".*.part"))


def test_index_of_one_format_is_not_used_for_another(tmp_path):
    path = tmp_path / "data"
    written(path, formats.tfrecord(RECORDS))
    assert len(read(path)) == len(RECORDS)
    lines = grain.sources.JsonLinesDataSource(path, compression="none")
    assert list(lines) == formats.json_lines(path.read_bytes())
    assert read(path) == RECORDS


def test_index_goes_to_the_cache_where_none_can_be_written_beside(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    path = directory / "data"
    written(path, formats.tfrecord(RECORDS))
    # A directory of that name keeps even a privileged user from writing the file.
    index_beside(path).mkdir()
    assert read(path) == RECORDS
    (index,) = (tmp_path / "cache/grainmill/index").iterdir()
    before = index.stat().st_mtime_ns
    assert read(path) == RECORDS
    assert index.stat().st_mtime_ns == before
    assert sorted(directory.iterdir()) == sorted([path, index_beside(path)])


def test_records_are_read_where_no_index_can_be_written_at_all(tmp_path, monkeypatch):
    path = tmp_path / "data"
    written(path, formats.tfrecord(RECORDS))
    index_beside(path).mkdir()
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(path))  # a file is no directory
    assert read(path) == RECORDS


# --- damage -----------------------------------------------------------------------------------


def outcome(path):
    try:
        source = grain.sources.TFRecordDataSource(path, compression="none")
    except grain.GrainmillError:
        return None
    found = []
    for number in range(len(source)):
        try:
            found.append(source[number])
        except grain.GrainmillError as error:
            assert f"{path}: record {number} at byte " in str(error)  # noqa: PT017
            found.append(None)
    return found


def test_a_file_cut_at_any_byte_is_an_error_except_between_records(tmp_path):
    records = [b"", b"one", b"x" * 40]
    data = formats.tfrecord(records)
    whole = {0: 0, 16: 1, 35: 2, len(data): 3}
    for cut in range(len(data) + 1):
        found = outcome(written(tmp_path / "data", data[:cut]))
        assert found == (records[: whole[cut]] if cut in whole else None), cut


def test_every_flipped_bit_is_noticed(tmp_path):
    records = [b"some text %d" % number for number in range(25)]
    data = formats.tfrecord(records)
    rng = random.Random(6)
    for _ in range(cases(2000, 60_000)):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        found = outcome(written(tmp_path / "data", bytes(bad)))
        if found is not None:
            assert len(found) == len(records)
            wrong = [a for a, b in zip(found, records, strict=True) if a != b]
            assert wrong == [None]


@pytest.mark.parametrize("how", ["gzip", "zlib", "members", "zstd", "frames"])
def test_compressed_files_that_are_cut_or_changed_are_errors(tmp_path, how):
    records = [b"some text %d" % number for number in range(60)]
    data = formats.compressed(formats.tfrecord(records), how)
    rng = random.Random(7)
    for cut in range(1, len(data)):
        try:
            found = read(written(tmp_path / "data", data[:cut]))
        except grain.GrainmillError:
            continue
        assert how in {"members", "frames"}
        assert found == records[: len(found)], "cut between members, and between records"
    for _ in range(cases(400, 12_000)):
        bad = bytearray(data)
        at = rng.randrange(len(bad))
        bad[at] ^= 1 << rng.randrange(8)
        try:
            found = read(written(tmp_path / "data", bytes(bad)))
        except grain.GrainmillError:
            continue
        assert found == records, "of a header, most bytes say nothing about the data"


def test_a_length_beyond_the_file_takes_no_memory(tmp_path):
    length = struct.pack("<Q", 1 << 60)
    data = length + struct.pack("<I", formats.masked(length)) + b"x" * 100
    for how in ("none", "gzip"):
        with pytest.raises(grain.GrainmillError, match=r"record 0 at byte 0.*cut short"):
            read(written(tmp_path / how, formats.compressed(data, how)))


def test_a_decompression_bomb_is_scanned_in_little_memory(tmp_path):
    size = 300 << 20
    length = struct.pack("<Q", size)
    squeeze = zlib.compressobj(1)
    head = length + struct.pack("<I", formats.masked(length))
    parts = [squeeze.compress(head)]
    parts += [squeeze.compress(bytes(1 << 20)) for _ in range(300)]
    parts += [squeeze.compress(b"none"), squeeze.flush()]
    path = written(tmp_path / "bomb", b"".join(parts))
    code = (
        "import resource, sys, grainmill as grain;"
        "open_source = grain.sources.TFRecordDataSource;"
        "pages = int(open('/proc/self/statm').read().split()[0]);"
        "limit = pages * resource.getpagesize() + (200 << 20);"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit));"
        "source = open_source(sys.argv[1]);"
        "print(len(source))\n"
        "try: source[0]\n"
        "except (grain.GrainmillError, MemoryError) as error: print(error)"
    )
    environment = {**os.environ, "GRAINMILL_MAX_RECORD_BYTES": str(100 << 20)}
    run = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    first, second = run.stdout.splitlines()
    assert first == "1"
    assert "GRAINMILL_MAX_RECORD_BYTES" in second


def test_what_is_no_file_of_records_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")
    with pytest.raises(OSError, match="directory"):
        read(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(grain.GrainmillError, match=r"fifo: .*not a regular file"):
        read(tmp_path / "fifo")
    other = Path(__file__).parent / "data/array_record/count_10_default.array_record"
    candidates = [other, *sorted(other.parent.glob("*.array_record"))]
    path = next(path for path in candidates if path.exists())
    with pytest.raises(grain.GrainmillError, match="record 0 at byte 0"):
        read(path, index_dir=tmp_path)
    with pytest.raises(ValueError, match="`compression` must be"):
        read(tmp_path / "missing", compression="bzip2")
    with pytest.raises(ValueError, match="Paths sequence can not be of 0 length"):
        read([])


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = written(tmp_path / "data", formats.tfrecord(RECORDS))
    source = grain.sources.TFRecordDataSource(path)
    assert source[3] == RECORDS[3]
    written(tmp_path / "data", formats.tfrecord(RECORDS[:-1]))
    with pytest.raises(grain.GrainmillError, match="cut short, overwritten or replaced"):
        source[3]


def test_keys_outside_are_index_errors(tmp_path):
    source = grain.sources.TFRecordDataSource(
        written(tmp_path / "data", formats.tfrecord(RECORDS[:3]))
    )
    for key in (-1, 3):
        with pytest.raises(IndexError, match="3"):
            source[key]
    with pytest.raises(IndexError):
        source.__getitems__([0, 3])
    assert source.__getitems__([]) == []
