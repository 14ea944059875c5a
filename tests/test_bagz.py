"""`BagzDataSource`: the golden files, shards, limits, and damage."""

import hashlib
import json
import os
import pickle
import random
import struct
from pathlib import Path

import pytest
import record_formats as formats

import grainmill as grain

DATA = Path(__file__).parent / "data/bagz"
MANIFEST = json.loads((DATA / "manifest.json").read_text("utf-8"))
GOOD = [entry for entry in MANIFEST["files"] if entry["expect"] == "ok"]
OPTIONS = {
    "none_by_option.bagz": {"compression": "none"},
    "zstd19_by_option.bag": {"compression": "zstd"},
    "dictionary.bagz": {"compression": "zstd", "dictionary": b"alpha beta gamma " * 20},
    "separate.bagz": {"limits": "separate"},
}


def digest(records):
    sha = hashlib.sha256()
    for record in records:
        sha.update(struct.pack("<Q", len(record)) + record)
    return sha.hexdigest()


@pytest.mark.parametrize("entry", GOOD, ids=lambda entry: entry["file"])
def test_golden_files_have_the_records_of_the_manifest(entry):
    name = entry["file"]
    source = grain.sources.BagzDataSource(str(DATA / name), **OPTIONS.get(name, {}))
    assert len(source) == entry["num_records"]
    records = list(source)
    assert digest(records) == entry["records_sha256"]
    assert source.__getitems__(range(len(source))[::-1]) == records[::-1]
    for number, sha in entry["sample_sha256"].items():
        assert hashlib.sha256(source[int(number)]).hexdigest() == sha
    assert list(grain.MapDataset.source(pickle.loads(pickle.dumps(source)))) == records


@pytest.mark.parametrize("spec", MANIFEST["shard_specs"], ids=lambda spec: spec["spec"])
def test_shards_are_concatenated_or_interleaved(spec):
    name = spec["spec"]
    for path in (name, name.replace("3", "*").replace("4", "*")):
        source = grain.sources.BagzDataSource(str(DATA / path), layout=spec["layout"])
        assert len(source) == spec["num_records"]
        assert digest(list(source)) == spec["records_sha256"]
        assert digest(list(grain.MapDataset.source(source))) == spec["records_sha256"]
        assert source.__getitems__([5, 1]) == [source[5], source[1]]


@pytest.mark.parametrize("join", ["mix", "concatenate"])
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("is_unlike", [False, True])
def test_mixtures_of_interleaved_shards_have_the_records_in_order(tmp_path, join, count, is_unlike):
    parts, expected = [], []
    for number in range(count):
        records = [f"{number} {k}".encode() for k in range(31)]
        paths = []
        for shard in range(3):
            paths.append(str(tmp_path / f"{number}-{shard}.bag"))
            Path(paths[-1]).write_bytes(formats.bagz(records[shard::3]))
        ds = grain.MapDataset.source(grain.sources.BagzDataSource(paths, layout="interleaved"))
        if is_unlike and number % 2:
            text = formats.json_text({"number": number, "k": k} for k in range(31))
            lines = tmp_path / f"{number}.jsonl"
            lines.write_bytes(text)
            ds = grain.MapDataset.source(grain.sources.JsonLinesDataSource(lines, parse=True))
            records = [{"number": number, "k": k} for k in range(31)]
        parts.append(ds)
        expected.append(records)
    ds = getattr(grain.MapDataset, join)(parts)
    order = getattr(grain.MapDataset, join)([grain.MapDataset.source(part) for part in expected])
    assert list(ds) == [ds[k] for k in range(len(ds))] == list(order)
    for arranged in (lambda ds: ds, lambda ds: ds.shuffle(seed=1), lambda ds: ds[5::2].repeat(2)):
        threads = grain.ReadOptions(num_threads=2)
        assert list(arranged(ds).to_iter_dataset(threads)) == list(arranged(order))


def test_lists_of_shards_follow_each_other():
    both = f"{DATA}/plain.bag,{DATA}/shards@4.bagz"
    assert len(grain.sources.BagzDataSource(both)) == 317
    assert len(grain.sources.BagzDataSource([f"{DATA}/plain.bag", f"{DATA}/shards@4.bagz"])) == 317


def test_shards_that_do_not_fit_are_errors(tmp_path):
    with pytest.raises(ValueError, match="Interleaved error - shard sizes must be within 1"):
        grain.sources.BagzDataSource(str(DATA / "shards@4.bagz"), layout="interleaved")
    with pytest.raises(FileNotFoundError):
        grain.sources.BagzDataSource(str(DATA / "shards@5.bagz"))
    with pytest.raises(FileNotFoundError):
        grain.sources.BagzDataSource(str(tmp_path / "none@*.bagz"))
    with pytest.raises(ValueError, match=r"at least 1, got .*none@0\.bagz"):
        grain.sources.BagzDataSource(str(tmp_path / "none@0.bagz"))
    for options in ({"limits": "no"}, {"layout": "no"}, {"compression": "no"}):
        with pytest.raises(ValueError, match="must be"):
            grain.sources.BagzDataSource(str(DATA / "plain.bag"), **options)
    with pytest.raises(ValueError, match="`dictionary` needs"):
        grain.sources.BagzDataSource(str(DATA / "plain.bag"), dictionary=b"x")


@pytest.mark.parametrize(
    "name",
    ["bad_short", "bad_cut_1", "bad_cut_8", "bad_limit_too_large", "bad_limit_alignment"],
)
def test_damaged_limits_are_errors_when_a_file_is_opened(name):
    with pytest.raises(grain.GrainmillError, match=f"{name}.bag: limits: "):
        grain.sources.BagzDataSource(str(DATA / f"{name}.bag"))


def test_falling_limits_name_the_record():
    with pytest.raises(grain.GrainmillError, match=r"decrease.bag: record 1 at .*its limit"):
        grain.sources.BagzDataSource(str(DATA / "bad_limits_decrease.bag"))


def test_damaged_frames_are_errors_however_records_are_read():
    source = grain.sources.BagzDataSource(str(DATA / "bad_zstd.bagz"))
    reads = [lambda: source[0], lambda: source[1], lambda: source.__getitems__([0, 1])]
    reads += [lambda: list(source), lambda: list(grain.MapDataset.source(source))]
    for read in reads:
        with pytest.raises(grain.GrainmillError, match=r"bad_zstd.bagz: record \d at byte \d+: "):
            read()


def test_uncompressed_data_read_as_compressed_are_errors():
    source = grain.sources.BagzDataSource(str(DATA / "plain.bag"), compression="zstd")
    with pytest.raises(grain.GrainmillError, match="does not begin with a zstd frame"):
        source.__getitems__(range(len(source)))


def test_random_records_with_empty_ones_match_the_slow_twin(tmp_path):
    rng = random.Random(1)
    for _ in range(40):
        records = [rng.randbytes(rng.choice([0, 0, 1, 9, 5000])) for _ in range(rng.randrange(60))]
        path = tmp_path / "data.bag"
        path.write_bytes(formats.bagz(records))
        source = grain.sources.BagzDataSource(str(path))
        order = [rng.randrange(len(records)) for _ in records]
        assert source.__getitems__(order) == [records[number] for number in order]


def test_flipped_bits_and_cuts_never_give_something_else_than_bytes_or_errors(tmp_path):
    good = (DATA / "zstd.bagz").read_bytes()
    records = list(grain.sources.BagzDataSource(str(DATA / "zstd.bagz")))
    rng = random.Random(2)
    path = tmp_path / "data.bagz"
    num_noticed = 0
    for _ in range(1000):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(bad), good[: rng.randrange(1, len(good))]):
            path.write_bytes(damaged)
            try:
                source = grain.sources.BagzDataSource(str(path))
                assert len(source.__getitems__(range(len(source)))) == len(records)
            except grain.GrainmillError as error:
                assert str(path) in str(error)  # noqa: PT017
                num_noticed += 1
    assert num_noticed > 1000


def test_a_frame_that_states_too_much_takes_no_memory(tmp_path):
    # The magic, a descriptor for a content size of eight bytes, and that size.
    frame = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00"
    path = tmp_path / "bomb.bagz"
    path.write_bytes(formats.bagz([frame]))
    with pytest.raises(grain.GrainmillError, match="record 0 at byte 0"):
        grain.sources.BagzDataSource(str(path))[0]


def test_missing_limits_are_an_error(tmp_path):
    path = tmp_path / "alone.bag"
    path.write_bytes(b"some records")
    with pytest.raises(FileNotFoundError, match=r"limits\.alone\.bag"):
        grain.sources.BagzDataSource(str(path), limits="separate")
    (tmp_path / "limits.alone.bag").write_bytes(struct.pack("<2Q", 4, 12) + b"x")
    with pytest.raises(grain.GrainmillError, match="limits"):
        grain.sources.BagzDataSource(str(path), limits="separate")
    (tmp_path / "limits.alone.bag").write_bytes(struct.pack("<2Q", 4, 12))
    source = grain.sources.BagzDataSource(str(path), limits="separate")
    assert list(source) == [b"some", b" records"]
    os.truncate(path, 5)
    with pytest.raises(grain.GrainmillError):
        list(source)
