"""Random files of every format, read by random lists of indices, against what was written.

Records have 0 bytes to 3 MiB and are compressible or not, so chunks are empty, lie inside of
others, and are longer than what is read at once.
"""

import functools
import gzip
import itertools
import random
import zlib

import numpy as np
import pytest
from bucket_server import BucketServer
from effort import SEED, cases
from record_formats import bagz, tar, tfrecord

import grainmill as grain
from grainmill import _native, sources
from grainmill.array_record import ArrayRecordWriter

KIB, MIB = 1 << 10, 1 << 20
# The most bytes of a record, and how many there are at most.
SIZES = [(3, 3000), (100, 3000), (4 * KIB, 2000), (60 * KIB, 200), (MIB, 24), (3 * MIB, 8)]
ARRAY_RECORD = ["uncompressed", "zstd", "brotli:1", "snappy", "zstd,transpose"]
# Without the bytes that no text has.
AS_TEXT = bytes(ord("x") if byte < 7 or 14 <= byte < 27 else byte for byte in range(256))
COMPRESSIONS = ["none", "gzip", "zlib", "members"]


def random_records(rng, share):
    """Records of one or two sizes: all bytes but those of a line's end are in them."""
    made = []
    for max_len, max_count in rng.sample(SIZES, k=rng.choice([1, 1, 2])):
        for _ in range(rng.randint(1, max_count // share)):
            length = rng.choice([0, max_len, rng.randrange(max_len), rng.randrange(max_len)])
            if rng.random() < 0.5:
                record = rng.randbytes(length).replace(b"\n", b"n").replace(b"\r", b"r")
            else:
                record = (b"%d " % rng.randrange(10)) * (length // 2) + b"x" * (length % 2)
            made.append(record)
    rng.shuffle(made)
    return made


def compress(data, how, rng):
    level = rng.choice([1, 6])
    if how == "gzip":
        return gzip.compress(data, level, mtime=0)
    if how == "zlib":
        return zlib.compress(data, level)
    if how == "members":
        cuts = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(5)), len(data)]
        parts = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
        return b"".join(gzip.compress(part, level, mtime=0) for part in parts)
    return data


def fast_tfrecord(records, path):
    path.unlink(missing_ok=True)
    output = _native.RecordOutput(str(path), "tfrecord", "")
    output.copy_list(records)
    output.close()
    return path.read_bytes()


def random_file(kind, rng, folder, share=1):
    """The bytes of a file, its name, a function that opens it, and its elements."""
    records = random_records(rng, share)
    if kind == "array_record":
        path = folder / "x.array_record"
        options = f"group_size:{rng.choice([1, 1, 2, 7, 100])},{rng.choice(ARRAY_RECORD)}"
        with ArrayRecordWriter(str(path), options) as writer:
            for record in records:
                writer.write(record)
        return path.read_bytes(), "x.array_record", sources.ArrayRecordDataSource, records
    if kind == "bagz":
        if rng.random() < 0.4:
            return bagz(records), "x.bag", sources.BagzDataSource, records
        (folder / "x.bagz").unlink(missing_ok=True)
        output = _native.RecordOutput(str(folder / "x.bagz"), "bagz")
        output.copy_list(records)
        output.close()
        return (folder / "x.bagz").read_bytes(), "x.bagz", sources.BagzDataSource, records
    how = rng.choice(COMPRESSIONS)
    name = "x" if how in ("none", "zlib") else "x.gz"
    if kind == "tfrecord":
        data = compress(fast_tfrecord(records, folder / "plain"), how, rng)
        return data, name, sources.TFRecordDataSource, records
    if kind == "json_lines":
        records = [line for r in records if (line := r.translate(AS_TEXT)).strip(b" \t\r")]
        ends = [rng.choice([b"\n", b"\r\n", b"\n\n"]) for _ in records]
        lines = b"".join(line + end for line, end in zip(records, ends, strict=True))
        return compress(lines, how, rng), name, sources.JsonLinesDataSource, records
    names = [f"{number:05}" for number in range(len(records))]
    archive = tar((f"{key}.bin", record) for key, record in zip(names, records, strict=True))
    samples = [{"__key__": k, "bin": r} for k, r in zip(names, records, strict=True)]
    # Zlib is not recognised by its first bytes, which may be those of a tar file.
    source_class = functools.partial(
        sources.WebDatasetDataSource, compression="zlib" if how == "zlib" else "auto"
    )
    return compress(archive, how, rng), name, source_class, samples


def index_lists(length, rng):
    """Lists of indices: in order, alone, in steps, with duplicates, in no order."""
    yield list(range(length))
    for _ in range(4):
        begin = rng.randrange(length)
        yield list(range(begin, min(length, begin + rng.choice([2, 5, 30, 400]))))
        yield [rng.randrange(length) for _ in range(rng.choice([1, 2, 10, 100]))]
        near = rng.randrange(length)
        yield [min(length - 1, near + rng.randrange(4)) for _ in range(6)]
    yield list(range(0, length, rng.randint(1, 9)))
    shuffled = list(range(length))
    rng.shuffle(shuffled)
    yield shuffled


def check(source, elements, rng):
    assert len(source) == len(elements)
    for indices in index_lists(len(elements), rng):
        found = source.__getitems__(indices)
        wrong = [
            index for index, each in zip(indices, found, strict=True) if each != elements[index]
        ]
        assert not wrong, f"{len(wrong)} of {len(indices)} elements are others: {wrong[:9]}"
    seed = rng.randrange(100)
    ds = grain.MapDataset.source(source).shuffle(seed)
    order = [ds[index] for index in range(len(ds))]
    assert [x for b in ds.batch(7, batch_fn=list).to_iter_dataset() for x in b] == order
    order = list(grain.MapDataset.range(len(elements)).shuffle(seed))
    assert list(ds.to_iter_dataset()) == [elements[index] for index in order]


KINDS = ["array_record", "bagz", "tfrecord", "json_lines", "web_dataset"]


@pytest.mark.parametrize("kind", KINDS)
def test_random_lists_of_indices_give_the_records_that_were_written(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))
    for seed in range(SEED, SEED + cases(3, 300)):
        rng = random.Random(f"{kind} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        data, name, source_class, elements = random_file(kind, rng, folder)
        if not elements:
            continue
        (folder / name).write_bytes(data)
        print(kind, seed, name, len(data), len(elements))  # shown where the test fails
        check(source_class(str(folder / name)), elements, rng)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_of_a_bucket_that_answers_late(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))
    with BucketServer(latency_s=0.004) as server:
        for seed in range(SEED, SEED + cases(2, 60)):
            rng = random.Random(f"far {kind} {seed}")
            data, name, source_class, elements = random_file(kind, rng, tmp_path, share=4)
            if not elements:
                continue
            server.put(f"/{seed}/{name}", data)
            print(kind, seed, name, len(data), len(elements))
            check(source_class(f"{server.url}/{seed}/{name}"), elements, rng)


def test_the_fast_writer_of_these_tests_writes_what_the_slow_one_does(tmp_path):
    records = [b"", b"one", np.random.default_rng(0).bytes(1000)]
    assert fast_tfrecord(records, tmp_path / "x") == tfrecord(records)
