"""Token files of Megatron-LM, beside a slow reader of them."""

import importlib.util
import itertools
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from bucket_server import BucketServer
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import grainmill as grain
from grainmill import files
from grainmill._tools.main import main
from grainmill.sources import MegatronDataSource

TYPES = dict(enumerate(["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"], start=1))
SEQUENCE = st.integers(0, 100).map(lambda length: list(range(length)))
DOCUMENTS = st.lists(st.lists(SEQUENCE, max_size=3), max_size=20)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def index_of(documents, code, *, kinds=False):
    """The index of documents, which are lists of sequences."""
    size = np.dtype(TYPES[code]).itemsize
    index = bytearray(b"MMIDIDX\0\0" + struct.pack("<QB", 1, code))
    sequences = [sequence for document in documents for sequence in document]
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    pointer = 0
    for sequence in sequences:
        index += struct.pack("<q", pointer)
        pointer += len(sequence) * size
    bound = 0
    for document in [[], *documents]:
        bound += len(document)
        index += struct.pack("<q", bound)
    return index + bytes(len(sequences)) * kinds


def write(name, documents, code=8, *, kinds=False):
    tokens = [token for document in documents for sequence in document for token in sequence]
    Path(f"{name}.bin").write_bytes(np.array(tokens, TYPES[code]).tobytes())
    Path(f"{name}.idx").write_bytes(index_of(documents, code, kinds=kinds))


def read(name):
    """The documents of a file, by pointers alone."""
    index, tokens = Path(f"{name}.idx").read_bytes(), Path(f"{name}.bin").read_bytes()
    version, code, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    assert (index[:9], version) == (b"MMIDIDX\0\0", 1)
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    bounds = struct.unpack_from(f"<{num_bounds}q", index, 34 + 12 * num_sequences)
    sequences = [
        np.frombuffer(tokens, TYPES[code], length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [joined(sequences[a:b]) for a, b in itertools.pairwise(bounds)]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def check(source, expected, code):
    dtype = np.dtype(TYPES[code])
    assert (len(source), source.dtype) == (len(expected), dtype)
    keys = list(range(len(expected)))[::-1]
    for found in (
        list(source),
        source.__getitems__(keys)[::-1],
        list(grain.MapDataset.source(source)),
        list(pickle.loads(pickle.dumps(source))),
    ):
        assert all(each.dtype == dtype for each in found)
        assert [each.tolist() for each in found] == expected


@settings(max_examples=cases(60, long=2000))
@given(
    parts=st.lists(DOCUMENTS, min_size=1, max_size=3),
    code=st.sampled_from(list(TYPES)),
    kinds=st.booleans(),
)
def test_documents_are_those_of_a_slow_reader(parts, code, kinds):
    names = [f"part-{number}" for number in range(len(parts))]
    expected = []
    for name, documents in zip(names, parts, strict=True):
        write(name, documents, code, kinds=kinds)
        expected += read(name)
    assert expected == [joined(document) for documents in parts for document in documents]
    check(MegatronDataSource(names), expected, code)
    check(MegatronDataSource([f"{name}.bin" for name in names]), expected, code)


def test_a_long_index_is_read_when_it_is_needed():
    rng = np.random.default_rng(0)
    # More than are read at once, of sequences and of documents.
    lengths = rng.integers(0, 3, (80_000, 2))
    write("long", [[[1] * a, [2] * b] for a, b in lengths.tolist()])
    source = MegatronDataSource("long")
    assert len(source) == 80_000
    keys = rng.integers(0, 80_000, 1000).tolist()
    expected = read("long")
    assert [each.tolist() for each in source.__getitems__(keys)] == [expected[at] for at in keys]
    index = bytearray(Path("long.idx").read_bytes())
    index[34 + 4 * 120_000] ^= 4
    Path("long.idx").write_bytes(index)
    source = MegatronDataSource("long")
    with pytest.raises(grain.GrainmillError, match=r"long.idx: sequence 120001: begins at byte"):
        source[0]


def test_files_without_documents():
    write("none", [])
    write("one", [[[7]]])
    check(MegatronDataSource(["none", "one", "none"]), [[7]], 8)
    assert len(MegatronDataSource("none")) == 0
    Path("zero.bin").touch()
    Path("zero.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 0))
    assert len(MegatronDataSource("zero")) == 0


def test_paths_and_ranges():
    Path("shards").mkdir()
    for shard in range(3):
        write(f"shards/text-{shard:05}-of-00003", [[[shard, number]] for number in range(4)])
    every = [[shard, number] for shard in range(3) for number in range(4)]
    for paths in ("shards", "shards/*.bin", "shards/text@3", "shards/text@3.bin"):
        check(MegatronDataSource(paths), every, 8)
    name = "shards/text-00001-of-00003"
    source = MegatronDataSource([f"{name}[1:3]", Path(name)])
    check(source, [*every[5:7], *every[4:8]], 8)
    assert source._record_location(1) == (str(Path(f"{name}.bin").absolute()), 2)
    assert source.paths == [f"{name}.bin"] * 2
    assert len({repr(MegatronDataSource(paths)) for paths in (name, f"{name}[1:3]")}) == 2


def test_every_changed_byte_of_an_index_is_an_error_or_keeps_the_documents():
    write("a", [[[1, 2], [3]], [], [[4, 5, 6]], [[7]]])
    index, expected, here = Path("a.idx").read_bytes(), read("a"), Path.cwd()
    problems = []
    for at in range(len(index)):
        for bit in range(8):
            changed = bytearray(index)
            changed[at] ^= 1 << bit
            Path("a.idx").write_bytes(changed)
            try:
                source = MegatronDataSource("a")
                found = [each.tolist() for each in source]
            except grain.GrainmillError as error:
                problems.append(str(error))
                continue
            # Nothing tells types of one length apart, nor whether a document ends before an
            # empty sequence or a whole one.
            if at == 17:
                assert source.dtype.itemsize == 2
            else:
                assert at >= 34 + 12 * 4, (at, bit)
                assert joined(found) == joined(expected)
    assert len(problems) > 7 * len(index)
    places = (f"{here}/a.idx: ", f"{here}/a.bin: ")
    assert all(problem.startswith(places) for problem in problems)


@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_files_cut_anywhere_or_prolonged_are_errors(ending):
    write("a", [[[1, 2], [3]], [], [[4, 5, 6]]])
    path = Path(f"a.{ending}")
    data = path.read_bytes()
    for cut in [*(data[:length] for length in range(len(data))), data + b"x", data + bytes(8)]:
        path.write_bytes(cut)
        with pytest.raises(grain.GrainmillError, match=f"a.{ending}: (header at byte 0|.*bytes)"):
            MegatronDataSource("a")


def test_what_is_wrong_with_an_index_is_said():
    write("a", [[[1]]])
    index = Path("a.idx").read_bytes()
    for changed, problem in {
        b"TNTIDX\0\0" + index[8:]: "header at byte 0: an index of fairseq .* `--dataset-impl mmap`",
        b"x" * 60: "does not begin with `MMIDIDX`",
        index[:9] + b"\2" + index[10:]: "header at byte 0: version 2, expected 1",
        index[:17] + b"\x09" + index[18:]: "header at byte 0: tokens have the unknown type 9",
        index[:34] + struct.pack("<i", -1) + index[38:]: "sequence 0: has -1 tokens",
        index[:34]
        + struct.pack("<i", 9)
        + index[38:]: "a.bin: sequence 0: ends at byte 18 by `a.idx`",
        index[:38] + struct.pack("<q", 2) + index[46:]: "sequence 0: begins at byte 2",
        index[:46] + struct.pack("<2q", 0, 2): "bound 1 of documents: is 2, expected 0 to 1",
        index[:46] + struct.pack("<2q", 0, 0): "documents have 0 of 1 sequences",
        index[:18] + struct.pack("<2Q", 1 << 60, 1 << 60): f"{1 << 60} sequences and",
    }.items():
        Path("a.idx").write_bytes(changed)
        with pytest.raises(grain.GrainmillError, match=problem):
            MegatronDataSource("a")
    write("a", [[[1], [2]], [], [[3]]])
    index = Path("a.idx").read_bytes()
    Path("a.idx").write_bytes(index[:-16] + struct.pack("<2q", 1, 3))
    with pytest.raises(grain.GrainmillError, match="bound 2 of documents: is 1, expected 2 to 3"):
        MegatronDataSource("a")
    Path("a.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.idx"):
        MegatronDataSource("a")
    with pytest.raises(FileNotFoundError, match=r"none\.idx"):
        MegatronDataSource("none")
    write("a", [[[1]]])
    write("b", [[[1]]], code=4)
    with pytest.raises(grain.GrainmillError, match=r"b\.idx: .* tokens are int32, expected uint16"):
        MegatronDataSource(["a", "b"])


def test_what_is_no_regular_file_is_not_waited_for():
    write("a", [[[1]]])
    for name in ("a.idx", "a.bin"):
        content = Path(name).read_bytes()
        Path(name).unlink()
        os.mkfifo(name)
        with pytest.raises(grain.GrainmillError, match=rf"{name}: whole file: not a regular file"):
            MegatronDataSource("a")
        Path(name).unlink()
        Path(name).write_bytes(content)
    assert len(MegatronDataSource("a")) == 1


def test_a_signed_url_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="stands for one file") as caught:
        MegatronDataSource("https://host.invalid/a.bin?token=planted")
    assert "planted" not in str(caught.value)


def test_pipelines_resume_at_every_document_and_workers_change_nothing():
    write("a", [[list(range(n))] for n in range(40)])

    def batches():
        ds = grain.MapDataset.source(MegatronDataSource("a")).shuffle(3)
        ds = ds.map(lambda tokens: {"tokens": tokens.astype(np.int32)}).to_iter_dataset()
        return grain.experimental.ConcatThenSplitIterDataset(ds, length_struct={"tokens": 16})

    def plain(elements):
        return [each["tokens"].tolist() for each in elements]

    expected = plain(batches())
    iterator = iter(batches())
    for number in range(len(expected)):
        other = iter(batches())
        other.set_state(json.loads(json.dumps(iterator.get_state())))
        assert plain(other) == expected[number:]
        next(iterator)
    options = grain.MultiprocessingOptions(num_workers=2)
    source = grain.MapDataset.source(MegatronDataSource("a"))
    found = list(source.to_iter_dataset().mp_prefetch(options))
    assert [each.tolist() for each in found] == read("a")


def test_a_bucket_that_answers_late_gives_the_same_documents():
    write("a", [[list(range(n % 7))] for n in range(500)], code=4)
    with BucketServer(latency_s=0.002) as server:
        for name in ("a.bin", "a.idx"):
            server.put(f"/{name}", Path(name).read_bytes())
        source = MegatronDataSource(f"{server.url}/a.bin")
        ds = grain.MapDataset.source(source).shuffle(1)
        found = [each.tolist() for each in ds.to_iter_dataset()]
    expected = read("a")
    order = list(grain.MapDataset.range(500).shuffle(1))
    assert found == [expected[at] for at in order]


def test_commands_know_the_format(capsys):
    write("a", [[[123, 1]], [], [[3]]])  # its first byte is `{`
    assert files.detect_format("a.bin").name == "megatron"
    found = files.describe("a.bin")
    assert (found["records"], found["record_bytes"], found["sizes"]["max"]) == (3, 6, 4)
    assert main(["info", "a.bin"]) == main(["cat", "a.bin"]) == main(["verify", "a.bin"]) == 0
    assert "[123, 1]\n[]\n[3]\n" in capsys.readouterr().out
    assert main(["convert", "a.bin", "a.jsonl", "--quiet"]) == 0
    assert Path("a.jsonl").read_text() == "[123,1]\n[]\n[3]\n"
    to_parquet = [["a.parquet"]] if importlib.util.find_spec("pyarrow") else []
    for arguments in (*to_parquet, ["a.tfrecord", "--content", "example"]):
        assert main(["convert", "a.bin", *arguments]) == 2
        assert "have lists of numbers" in capsys.readouterr().err
    assert main(["convert", "a.jsonl", "b.bin"]) == 2
    assert "Megatron-LM files are not written" in capsys.readouterr().err
    Path("a.bin").write_bytes(b"1234567")
    assert main(["verify", "a.bin"]) == 4
    assert "ends at byte 6 by `a.idx`" in capsys.readouterr().out
