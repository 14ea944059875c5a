"""A mixture as language models are trained on, with each part in another format and in a bucket."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import grain as real
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_server import BucketServer
from oracle_example import bytes_list, example
from sequential_mixture import LENGTH, PARSE, continued, sequential_pipeline, taken, tokens

import grainmill as grain
from grainmill._native import masked_crc32c
from grainmill.array_record import ArrayRecordWriter

MIXTURE = "{0}/tfrecord/*.tfrecord:0.2;{0}/array_record/*.array_record:0.5;{0}/parquet/:0.3"
SOURCES = {
    "tfrecord": grain.sources.TFRecordDataSource,
    "array_record": grain.sources.ArrayRecordDataSource,
    "parquet": grain.sources.ParquetDataSource,
}


def text(kind, number):
    words = np.random.default_rng([len(kind), number]).integers(3, 30)
    return f"{kind} {number} " + "word " * words


def frame(record):
    head = struct.pack("<Q", len(record))
    crcs = [struct.pack("<I", masked_crc32c(part)) for part in (head, record)]
    return head + crcs[0] + record + crcs[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of each format with 60 texts each."""
    root = tmp_path_factory.mktemp("corpus")
    for kind in SOURCES:
        (root / kind).mkdir()
        for file in range(2):
            path = root / kind / f"part-{file}.{kind}"
            texts = [text(kind, number) for number in range(60 * file, 60 * file + 60)]
            messages = [example(text=bytes_list([item.encode()])) for item in texts]
            if kind == "tfrecord":
                path.write_bytes(b"".join(map(frame, messages)))
            elif kind == "parquet":
                pq.write_table(pa.table({"text": texts}), path, row_group_size=25)
            else:
                with ArrayRecordWriter(str(path), "group_size:1") as writer:
                    for message in messages:
                        writer.write(message)
    return root


@pytest.fixture
def bucket(files, tmp_path, monkeypatch):
    """The URL of a bucket with the files."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))
    with BucketServer(latency_s=0.002) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for path in files.rglob("part-*"):
            server.put(f"/bucket/corpus/{path.relative_to(files)}", path.read_bytes())
        yield "s3://bucket/corpus"


def part(root):
    def make(path):
        kind = path.removeprefix(f"{root}/").partition("/")[0]
        ds = grain.MapDataset.source(SOURCES[kind](path)).seed(7).shuffle().repeat()
        if kind != "parquet":
            feature = grain.transforms.Feature(bytes)
            ds = ds.map(grain.transforms.ParseExample({"text": feature}))
        return ds.map(tokens)

    return make


def pipeline(root, num_workers=0):
    ds = grain.experimental.mix_from_text(MIXTURE.format(root), part(root))
    ds = ds[1::2].to_iter_dataset(grain.ReadOptions(num_workers=num_workers))
    lengths = {"inputs": LENGTH, "targets": LENGTH}
    ds = grain.experimental.FirstFitPackIterDataset(
        ds, length_struct=lengths, num_packing_bins=8, shuffle_bins=True, seed=1
    )
    return ds.batch(4)


def test_batches_of_a_bucket_are_those_of_local_files_and_continue(files, bucket):
    expected = taken(iter(pipeline(str(files))), 20)
    iterator = iter(pipeline(bucket))
    assert taken(iterator, 9) == expected[:9]
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    for num_workers in (0, 2):
        restored = iter(pipeline(bucket, num_workers))
        restored.set_state(state)
        assert taken(restored, 11) == expected[9:]
        restored.close()


def test_parts_come_in_the_proportions_of_the_text(bucket):
    ds = grain.experimental.mix_from_text(
        MIXTURE.format(bucket),
        lambda path: grain.MapDataset.source([path.split("/")[4]]).repeat(),
    )
    found = [ds[i] for i in range(1000)]
    counts = {kind: found.count(kind) for kind in SOURCES}
    assert counts == {"tfrecord": 200, "array_record": 500, "parquet": 300}


# --- sequential datasets of lists of files --------------------------------------------------------

DRAWN = 16


def test_sequential_mixture_of_a_bucket_is_that_of_local_files_and_continues(files, bucket):
    expected = taken(iter(sequential_pipeline(real, str(files))), DRAWN)
    iterator = iter(sequential_pipeline(grain, bucket))
    states = []
    for batch in expected:
        states.append(json.dumps(iterator.get_state()))
        assert taken(iterator, 1) == [batch]
    iterator.close()
    for number in (0, 5, 11):
        assert continued(bucket, json.loads(states[number]), 3) == expected[number:][:3]
    program = (
        "import json, sys, sequential_mixture\n"
        "root, state, count = sys.argv[1:]\n"
        "print(json.dumps(sequential_mixture.continued(root, json.loads(state), int(count))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, bucket, states[9], str(DRAWN - 9)],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected[9:]
    # Each worker reads some of the files.
    with iter(sequential_pipeline(grain, str(files), num_workers=2)) as workers:
        local = taken(workers, 8)
    with iter(sequential_pipeline(grain, bucket, num_workers=2)) as workers:
        assert taken(workers, 5) == local[:5]
        state = json.loads(json.dumps(workers.get_state()))
    with iter(sequential_pipeline(grain, bucket, num_workers=2)) as workers:
        workers.set_state(state)
        assert taken(workers, 3) == local[5:]


def test_sequential_datasets_take_patterns_and_directories_of_a_bucket(files, bucket):
    experimental = grain.experimental
    for name in ("*.parquet", ""):
        rows = list(experimental.ParquetIterDataset(f"{bucket}/parquet/{name}"))
        assert rows == list(experimental.ParquetIterDataset(f"{files}/parquet/{name}"))
        assert len(rows) == 120
    for name in ("*.tfrecord", ""):
        records = list(experimental.TFRecordIterDataset(f"{bucket}/tfrecord/{name}"))
        texts = [PARSE.map(record)["text"].decode() for record in records]
        assert texts == [text("tfrecord", number) for number in range(120)]
