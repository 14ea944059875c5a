"""`grainmill convert`: what is written, what is refused, and what an interruption leaves."""

import contextlib
import functools
import gc
import gzip
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import effort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interrupts import Interrupt

import grainmill as grain
from grainmill import _native
from grainmill._files import formats, outputs, tf_example
from grainmill._tools import convert
from grainmill._tools.console import ExitCode, Progress
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter


@functools.cache
def _crc_table():
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
        table.append(crc)
    return table


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _crc_table()[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord(records):
    """The bytes of a TFRecord file, without the package."""
    out = bytearray()
    for record in records:
        length = struct.pack("<Q", len(record))
        out += length + struct.pack("<I", masked_crc(length))
        out += record + struct.pack("<I", masked_crc(record))
    return bytes(out)


def write_tfrecord(path, records):
    Path(path).write_bytes(tfrecord(records))


def read_array_record(path):
    with ArrayRecordReader(str(path)) as reader:
        return reader.read_all()


def bagz(path):
    """The records of an uncompressed Bagz file, without the package."""
    data = Path(path).read_bytes()
    (split,) = struct.unpack("<Q", data[-8:])
    ends = struct.unpack(f"<{(len(data) - split) // 8}Q", data[split:])
    return [data[a:b] for a, b in zip((0, *ends), ends, strict=False)]


def names_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def texts(count):
    return [f"record {number} ".encode() * (number % 7) + b"." for number in range(count)]


@pytest.fixture
def inputs(tmp_path):
    """Three TFRecord files of 100, 0 and 57 records."""
    records = texts(157)
    for number, part in enumerate([records[:100], [], records[100:]]):
        write_tfrecord(tmp_path / f"in.tfrecord-{number:05}-of-00003", part)
    return records


def test_each_input_becomes_an_output(tmp_path, inputs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "in.tfrecord@3", "out/"]) == ExitCode.OK
    names = names_in("out")
    assert names == [f"in.array_record-{number:05}-of-00003" for number in range(3)]
    found = [read_array_record(f"out/{name}") for name in names]
    assert found == [inputs[:100], [], inputs[100:]]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_one_name_gets_the_records_of_all_inputs(tmp_path, inputs, monkeypatch, threads):
    monkeypatch.chdir(tmp_path)
    used = []
    native = _native.RecordOutput

    class Output:
        def __init__(self, *arguments):
            self._output = native(*arguments)

        def copy_stream(self, stream, max_records, threads):
            used.append(threads)
            return self._output.copy_stream(stream, max_records, threads)

        def __getattr__(self, name):
            return getattr(self._output, name)

    monkeypatch.setattr(_native, "RecordOutput", Output)
    command = ["convert", "in.tfrecord@3", "all.array_record", "--threads", threads]
    assert main(command) == ExitCode.OK
    assert set(used) == {int(threads)}
    assert read_array_record("all.array_record") == inputs
    assert len([name for name in names_in(".") if name.startswith("all")]) == 1


def test_inputs_of_several_formats_become_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"n": number}).encode() for number in range(100)]
    write_tfrecord("a.tfrecord", records[:20])
    Path("b.jsonl").write_bytes(b"\n".join(records[20:50]))
    for name, part in (("c.array_record", records[50:60]), ("d.array_record", records[60:90])):
        with ArrayRecordWriter(name) as writer:
            for record in part:
                writer.write(record)
    write_tfrecord("e.tfrecord", records[90:])
    everything = ["a.tfrecord", "b.jsonl", "c.array_record", "d.array_record", "e.tfrecord"]
    assert main(["convert", *everything, "all.jsonl"]) == ExitCode.OK
    assert Path("all.jsonl").read_bytes().splitlines() == records
    assert main(["convert", *everything, "all.tfrecord", "--shards", "7"]) == ExitCode.OK
    assert list(grain.sources.TFRecordDataSource("all.tfrecord@7")) == records
    assert main(["convert", *everything, "rows.parquet"]) == ExitCode.OK
    source = grain.sources.ParquetDataSource("rows.parquet")
    assert [int(row["n"]) for row in source] == list(range(100))
    assert main(["convert", "rows.parquet", "b.jsonl", "again.jsonl"]) == ExitCode.OK
    assert [json.loads(line)["n"] for line in Path("again.jsonl").read_text().splitlines()] == [
        *range(100),
        *range(20, 50),
    ]
    before = names_in(".")
    capsys.readouterr()
    for arguments, message in (
        ([*everything, "s.jsonl", "--shuffle"], "cannot be shuffled together"),
        (["rows.parquet", "b.jsonl", "s.parquet"], "cannot be rows of one Parquet file"),
    ):
        assert main(["convert", *arguments]) == ExitCode.USAGE
        assert message in capsys.readouterr().err
    assert names_in(".") == before


# --- compressed names ---------------------------------------------------------------------------


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("x.jsonl.gz", ["x.jsonl.gz"]),
        ("x.ndjson.gzip", ["x.ndjson.gzip"]),
        ("x.tfrecord.gz", ["x.tfrecord.gz"]),
        ("X.TFRECORD.GZ", ["X.TFRECORD.GZ"]),
        ("x.jsonl.gz@2", ["x.jsonl.gz-00000-of-00002", "x.jsonl.gz-00001-of-00002"]),
        ("x@2.jsonl.gz", ["x-00000-of-00002.jsonl.gz", "x-00001-of-00002.jsonl.gz"]),
        ("x.tfrecord.gz@2", ["x.tfrecord.gz-00000-of-00002", "x.tfrecord.gz-00001-of-00002"]),
        ("x@2.tfrecord.gz", ["x-00000-of-00002.tfrecord.gz", "x-00001-of-00002.tfrecord.gz"]),
    ],
)
@pytest.mark.parametrize("options", ["", "gzip", "gzip:1"])
@pytest.mark.usefixtures("in_tmp_path")
def test_names_that_end_with_gz_are_compressed(capsys, output, names, options):
    lines = [json.dumps({"n": number}) for number in range(30)]
    Path("a.jsonl").write_text("\n".join(lines))
    command = ["convert", "a.jsonl", output, "--verify", "--options", options]
    assert main(command) == ExitCode.OK
    assert names_in(".") == sorted(["a.jsonl", *names])
    assert all(gzip.decompress(Path(name).read_bytes()) for name in names)
    capsys.readouterr()
    assert main(["cat", output]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == lines
    is_lines = "json" in output
    make = grain.sources.JsonLinesDataSource if is_lines else grain.sources.TFRecordDataSource
    for paths in (output, names):
        assert [record.decode() for record in make(paths)] == lines
    if len(names) > 1:
        Path("folder").mkdir()
        for name in names:
            Path(name).rename(f"folder/{name}")
        assert [record.decode() for record in make("folder")] == lines


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x.jsonl.zst", "end the name with .gz, or leave out .zst"),
        ("x.jsonl.bz2", "leave out .bz2"),
        ("x@2.jsonl.xz", "leave out .xz"),
        ("x.tfrecord.zlib-00000-of-00001", "leave out .zlib"),
        ("x.array_record.gz", "compressed inside"),
    ],
)
def test_other_compressed_names_are_refused(tmp_path, monkeypatch, capsys, output, message):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{}\n")
    for options in ("", "gzip"):
        assert main(["convert", "a.jsonl", output, "--options", options]) == ExitCode.USAGE
        assert message in capsys.readouterr().err
    assert names_in(".") == ["a.jsonl"]


def test_gzip_in_a_plain_name_is_read_by_its_content(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"n": 1}\n')
    for name, source in (
        ("b.jsonl", grain.sources.JsonLinesDataSource),
        ("b.tfrecord", grain.sources.TFRecordDataSource),
    ):
        assert main(["convert", "a.jsonl", name, "--options", "gzip", "--verify"]) == ExitCode.OK
        assert Path(name).read_bytes()[:2] == b"\x1f\x8b"
        assert list(source(name)) == [b'{"n": 1}']
        capsys.readouterr()
        assert main(["head", name]) == ExitCode.OK
        assert capsys.readouterr().out == '{"n": 1}\n'


def test_empty_compressed_shards_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"n": 1}\n')
    assert main(["convert", "a.jsonl", "b.jsonl.gz@3", "--verify"]) == ExitCode.OK
    assert list(grain.sources.JsonLinesDataSource("b.jsonl.gz@3")) == [b'{"n": 1}']
    assert main(["head", "b.jsonl.gz@3"]) == ExitCode.OK


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["same", "json"])
@pytest.mark.parametrize("name", ["in.tfrecord", "in.tfrecord.gz", "in.jsonl.gz", "in.parquet"])
@pytest.mark.parametrize("shards", [[], ["--shards", "3"]])
def test_progress_reaches_the_end(tmp_path, monkeypatch, name, content, shards):
    monkeypatch.chdir(tmp_path)
    random = [{"n": number, "text": os.urandom(300).hex()} for number in range(2000)]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, random)))
    kind = ["--content", "example"] if name.startswith("in.tfrecord") and content == "json" else []
    assert main(["convert", "in.jsonl", name, *kind]) == ExitCode.OK
    made = []

    class Recorded(Progress):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(convert, "Progress", Recorded)
    is_rows = name.endswith(("parquet", "jsonl.gz"))
    content = "same" if is_rows else content
    assert main(["convert", name, "out.array_record", "--content", content, *shards]) == ExitCode.OK
    (progress,) = made
    assert progress._total == Path(name).stat().st_size
    assert 0.9 * progress._total <= progress._done <= progress._total + 1


# --- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_shards_have_equal_shares_in_order(tmp_path, inputs, shards, threads):
    output = tmp_path / "out" / "all.array_record"
    command = ["convert", str(tmp_path / "in.tfrecord@3"), str(output)]
    assert main([*command, "--shards", str(shards), "--threads", threads]) == 0
    paths = [Path(f"{output}-{number:05}-of-{shards:05}") for number in range(shards)]
    assert sorted(output.parent.iterdir()) == paths
    found = [read_array_record(path) for path in paths]
    assert [record for part in found for record in part] == inputs
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_shuffle_has_the_order_of_the_engine(tmp_path, inputs):
    first, second = tmp_path / "all.array_record", tmp_path / "shuffled.array_record"
    command = ["convert", str(tmp_path / "in.tfrecord@3"), str(first), "--shards", "1"]
    assert main(command) == 0
    source = grain.sources.ArrayRecordDataSource(f"{first}-00000-of-00001")
    expected = list(grain.MapDataset.source(source).shuffle(seed=5))
    command = ["convert", f"{first}-00000-of-00001", str(second), "--shuffle", "--seed", "5"]
    assert main([*command, "--shards", "4", "--options", "group_size:10"]) == 0
    paths = [f"{second}-{number:05}-of-00004" for number in range(4)]
    assert [record for path in paths for record in read_array_record(path)] == expected
    assert sorted(expected) == sorted(inputs)
    assert expected != inputs


def test_one_file_without_shards_is_shuffled_too(tmp_path):
    with ArrayRecordWriter(str(tmp_path / "in.array_record")) as writer:
        for record in texts(30):
            writer.write(record)
    command = ["convert", str(tmp_path / "in.array_record"), str(tmp_path / "out.tfrecord")]
    assert main([*command, "--shuffle"]) == 0
    order = list(grain.MapDataset.range(30).shuffle(seed=0))
    expected = tfrecord([texts(30)[at] for at in order])
    assert (tmp_path / "out.tfrecord").read_bytes() == expected


def test_formats_in_all_directions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"n": number, "text": "x" * number}).encode() for number in range(300)]
    write_tfrecord("a.tfrecord", records)
    chain = ["b.jsonl", "c.tfrecord", "d.array_record", "e.tfrecord", "f.jsonl", "g.array_record"]
    before = "a.tfrecord"
    for name in chain:
        assert main(["convert", before, name, "--verify"]) == 0
        before = name
    assert Path("b.jsonl").read_bytes() == b"".join(record + b"\n" for record in records)
    assert Path("f.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert Path("e.tfrecord").read_bytes() == Path("a.tfrecord").read_bytes() == tfrecord(records)
    assert read_array_record("g.array_record") == records
    assert main(["convert", "d.array_record", "h.bag", "--options", "uncompressed"]) == 0
    assert bagz("h.bag") == records


def test_options_are_those_of_the_writer(tmp_path, inputs):
    output = tmp_path / "out.array_record"
    command = ["convert", str(tmp_path / "in.tfrecord-00000-of-00003"), str(output)]
    assert main([*command, "--options", "group_size:9,brotli:2"]) == 0
    with ArrayRecordWriter(str(tmp_path / "expected"), "group_size:9,brotli:2") as writer:
        for record in inputs[:100]:
            writer.write(record)
    assert output.read_bytes() == (tmp_path / "expected").read_bytes()
    wrong = [*command, "--force", "--options", "group_sise:9"]
    assert main(wrong) == ExitCode.USAGE
    assert len(read_array_record(output)) == 100


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.lists(st.text(max_size=5), min_size=1),
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1),
        ),
    )
)
def test_examples_are_decoded_as_they_were_encoded(features):
    assert tf_example.example_as_json(tf_example.encode(features)) == features


def test_json_becomes_examples_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"label": [number], "name": [f"n{number}"], "w": [0.5, 2.0]} for number in range(50)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert main(["convert", "a.jsonl", "b.tfrecord", "--content", "example"]) == 0
    assert main(["convert", "b.tfrecord", "c.jsonl", "--content", "json"]) == 0
    assert [json.loads(line) for line in Path("c.jsonl").read_text("utf-8").splitlines()] == rows
    assert main(["convert", "a.jsonl", "d.jsonl", "--content", "json"]) == ExitCode.DAMAGED
    assert not Path("d.jsonl").exists()


def test_the_record_that_cannot_be_converted_is_named_where_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ['{"a": 1}'] * 5000
    Path("a.jsonl").write_text("\n".join(lines), "utf-8")
    Path("b.jsonl").write_text("\n".join([*lines[:4500], "no JSON", "{}"]), "utf-8")
    for more in ([], ["--shuffle"]):
        command = ["convert", "--quiet", "a.jsonl", "b.jsonl", "c.tfrecord", *more]
        assert main([*command, "--content", "example"]) == ExitCode.DAMAGED
        assert "b.jsonl: record 4500: " in capsys.readouterr().err


# --- refusals -----------------------------------------------------------------------------------


def test_existing_outputs_are_kept_without_force(tmp_path, inputs, capsys):
    output = tmp_path / "out.array_record"
    output.write_bytes(b"mine")
    command = ["convert", str(tmp_path / "in.tfrecord-00000-of-00003"), str(output)]
    assert main(command) == ExitCode.EXISTS
    assert "--force" in capsys.readouterr().err
    assert output.read_bytes() == b"mine"
    assert main([*command, "--force"]) == 0
    assert read_array_record(output) == inputs[:100]
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_an_output_that_is_replaced_stays_until_the_new_one_is_complete(tmp_path):
    output = tmp_path / "out.array_record"
    output.write_bytes(b"mine")
    (tmp_path / "in.tfrecord").write_bytes(tfrecord(texts(50))[:-1])
    command = ["convert", str(tmp_path / "in.tfrecord"), str(output), "--force"]
    assert main(command) == ExitCode.DAMAGED
    assert output.read_bytes() == b"mine"
    assert names_in(tmp_path) == ["in.tfrecord", "out.array_record"]


@pytest.mark.parametrize(
    "case",
    [
        (["missing.tfrecord", "out.array_record"], ExitCode.SYSTEM, "no such file"),
        (["in.tfrecord", "out.xyz"], ExitCode.USAGE, "--to"),
        (["in.tfrecord", "out.tar"], ExitCode.USAGE, "not written"),
        (["in.tfrecord", "in.tfrecord", "--force"], ExitCode.USAGE, "is an input"),
        (["in.tfrecord", "o.array_record", "--shards", "0"], ExitCode.USAGE, "at least 1"),
        (["in.tfrecord", ".", "--shards", "2"], ExitCode.USAGE, "give the name"),
        (["*.nothing", "out.array_record"], ExitCode.SYSTEM, "no file matches"),
        (["folder/", "out.array_record"], ExitCode.SYSTEM, "the directory has no files"),
        (["pipe", "out.array_record"], ExitCode.SYSTEM, "not a regular file"),
        (["zeros", "o.array_record"], ExitCode.USAGE, "format is not known"),
        (["zeros", "o.array_record", "--from", "tfrecord"], ExitCode.DAMAGED, "record 0 at byte 0"),
        (
            ["in.tfrecord", "o.tfrecord", "--from", "array_record"],
            ExitCode.DAMAGED,
            "TFRecord file",
        ),
        (["lines", "o.jsonl", "--from", "tfrecord"], ExitCode.DAMAGED, "record 0"),
        (["in.tfrecord", "http://host/o.tfrecord"], ExitCode.USAGE, "cannot be written"),
        (["two.tfrecord", "o.jsonl"], ExitCode.USAGE, "record 1 contains a line end"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys, case):
    arguments, code, message = case
    monkeypatch.chdir(tmp_path)
    write_tfrecord("in.tfrecord", texts(5))
    write_tfrecord("two.tfrecord", [b"a", b"b\nc"])
    Path("zeros").write_bytes(bytes(1000))
    Path("lines").write_bytes(b"word\n" * 1000)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    before = names_in(".")
    assert main(["convert", *arguments]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert "Traceback" not in error
    assert names_in(".") == before


def test_damaged_input_is_named_at_every_truncation(tmp_path, capsys):
    whole = tfrecord([b"", b"abc", b"x" * 40])
    source, output = tmp_path / "in.tfrecord", tmp_path / "out.array_record"
    ends = {0, 16, 35, len(whole)}
    command = ["convert", str(source), str(output), "--from", "tfrecord"]
    for length in range(len(whole) + 1):
        source.write_bytes(whole[:length])
        code = main(command)
        assert code == (ExitCode.OK if length in ends else ExitCode.DAMAGED), length
        assert output.exists() == (length in ends)
        output.unlink(missing_ok=True)
        if length not in ends:
            assert f"{source}: record " in capsys.readouterr().err


def test_flipped_bits_are_never_copied(tmp_path):
    whole = bytearray(tfrecord(texts(20)))
    source, output = tmp_path / "in.tfrecord", tmp_path / "out.array_record"
    for seed in range(100):
        at = seed * 7919 % (8 * len(whole))
        whole[at // 8] ^= 1 << at % 8
        source.write_bytes(whole)
        assert main(["convert", str(source), str(output), "--from", "tfrecord"]) == ExitCode.DAMAGED
        assert not output.exists()
        whole[at // 8] ^= 1 << at % 8


# --- interruptions ------------------------------------------------------------------------------


def start(arguments, **options):
    command = [sys.executable, "-m", "grainmill", "convert", *map(str, arguments)]
    # A shell that runs the tests in the background has them, and what they start, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def many(tmp_path):
    """Inputs whose conversion takes long enough to be interrupted: brotli at its slowest."""
    for number in range(4):
        records = [os.urandom(40).hex().encode() * 5 for _ in range(100)]
        write_tfrecord(tmp_path / f"in-{number}.tfrecord", records)
    (tmp_path / "out").mkdir()
    options = ["--options", "brotli:11", "--threads", "1"]
    return [*sorted(tmp_path.glob("in-*")), tmp_path / "out", *options]


def interrupted(arguments, how):
    """Runs a conversion until one file is finished, and sends it a signal."""
    directory = arguments[0].parent / "out"
    while True:
        process = start(arguments)
        deadline = time.monotonic() + 60
        while not list(directory.glob("[!.]*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
        if process.returncode != ExitCode.OK:
            return process.returncode, error, directory
        # It had finished before this process had its turn: the same again, with more to do.
        for path in directory.iterdir():
            path.unlink()
        for path in arguments[:4]:
            path.write_bytes(path.read_bytes() * 4)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("resharded", [False, True])
def test_interrupted_conversions_continue(many, how, resharded):
    arguments = many
    if resharded:
        arguments = [*many[:4], many[4] / "all.array_record", *many[5:], "--shards", "5"]
    code, error, directory = interrupted(arguments, how)
    assert code == (-signal.SIGKILL if how == signal.SIGKILL else ExitCode.INTERRUPTED)
    assert "Traceback" not in error
    finished = {path: path.stat().st_mtime_ns for path in directory.glob("[!.]*")}
    total = 5 if resharded else 4
    assert 1 <= len(finished) < total
    for path in finished:  # what has its final name is complete
        assert read_array_record(path)
    process = start([*arguments, "--json"])
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert json.loads(out)["kept"] == len(finished)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    name = "all.array_record-{:05}-of-00005" if resharded else "in-{}.array_record"
    assert names_in(directory) == [name.format(number) for number in range(total)]
    found = [record for path in sorted(directory.iterdir()) for record in read_array_record(path)]
    expected = []
    for path in many[:4]:
        stream = _native.RecordStream(str(path), "tfrecord")
        while block := stream.read(1000):
            expected += block
    assert found == expected


def test_files_of_another_conversion_are_not_kept(many):
    code, _, directory = interrupted(many, signal.SIGKILL)
    assert code == -signal.SIGKILL
    other = [*many[:5], "--options", "snappy"]
    assert main(["convert", *map(str, other)]) == ExitCode.EXISTS
    assert main(["convert", *map(str, other), "--force"]) == 0
    found = formats.FORMATS["array_record"].open(sorted(map(str, directory.iterdir())))
    assert len(found) == sum(len(grain.sources.TFRecordDataSource(path)) for path in many[:4])


def test_a_file_with_two_names_is_not_written_to(tmp_path):
    """As a conversion leaves it that is killed when it has given a complete file its name."""
    output, temporary = tmp_path / "out.array_record", tmp_path / ".out.array_record.part"
    output.write_bytes(b"mine")
    command = ["convert", str(tmp_path / "in.tfrecord"), str(output), "--force"]
    whole = tfrecord(texts(50))
    for content, code in ((whole[:-1], ExitCode.DAMAGED), (whole, ExitCode.OK)):
        (tmp_path / "in.tfrecord").write_bytes(content)
        os.link(output, temporary)
        assert main(command) == code
        assert names_in(tmp_path) == ["in.tfrecord", "out.array_record"]
        if code == ExitCode.DAMAGED:
            assert output.read_bytes() == b"mine"
    assert read_array_record(output) == texts(50)


def test_temporary_names_cannot_be_foreseen_and_links_are_not_followed(
    tmp_path, capsys, monkeypatch
):
    """In a directory that others may write to, they could have another file overwritten."""
    source, mine = tmp_path / "in.tfrecord", tmp_path / "mine"
    source.write_bytes(tfrecord(texts(50)))
    mine.write_bytes(b"mine")
    for name in (".out.array_record.part", ".out.array_record.converting"):
        for make in (lambda link: link.symlink_to(mine), os.mkfifo):
            make(tmp_path / name)
            assert main(["convert", str(source), str(tmp_path / "out.array_record")]) != ExitCode.OK
            assert "found a link or a device; remove it" in capsys.readouterr().err
            assert mine.read_bytes() == b"mine"
            (tmp_path / name).unlink()
    assert names_in(tmp_path) == ["in.tfrecord", "mine"]
    parts, create = set(), outputs.Kind.create
    monkeypatch.setattr(
        outputs.Kind, "create", lambda *args: (parts.add(args[1]), create(*args))[1]
    )
    for _ in range(2):
        for name in ("o.parquet", "o.bagz"):
            assert main(["convert", str(source), str(tmp_path / name), "--force"]) == 0
    assert len(parts) == 4
    assert all(re.search(r"/\.o\.\w+\.[0-9a-f]{16}\.part(\.bagz)?$", part) for part in parts)
    other = tmp_path / "there"
    other.write_bytes(b"mine")
    for kind in ("array_record", "tfrecord", "jsonl", "bagz"):
        with pytest.raises(FileExistsError):
            _native.RecordOutput(str(other), kind, "")
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize("number", range(6))
def test_an_interrupt_while_files_are_removed_leaves_nothing(tmp_path, monkeypatch, number):
    (tmp_path / "in.jsonl").write_bytes(b"1\n2\n")
    out = tmp_path / "out"
    out.mkdir()
    unlink, calls = Path.unlink, itertools.count()

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    def remove(path, **options):
        if next(calls) == number:
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patches:
        patches.setattr(outputs.Kind, "create", interrupted)
        patches.setattr(Path, "unlink", remove)
        command = ["convert", str(tmp_path / "in.jsonl"), str(out / "out.parquet")]
        assert main(command) == ExitCode.INTERRUPTED
    assert names_in(out) == []


@pytest.mark.parametrize("num_interrupts", [1, 2])
@pytest.mark.parametrize("to", ["array_record", "parquet", "jsonl"])
def test_ctrl_c_leaves_nothing(tmp_path, to, num_interrupts):
    """The thread that writes was not waited for: `Thread.join` takes it for ended."""
    lines = b"".join(b'{"number": %d, "text": "%s"}\n' % (n, b"x" * 90) for n in range(20_000))
    (tmp_path / "in.jsonl").write_bytes(lines * 20)
    out = tmp_path / "out"
    out.mkdir()
    process = start([tmp_path / "in.jsonl", out / f"out.{to}", "--threads", "1"])
    deadline = time.monotonic() + 60
    while not list(out.glob(".out.*.*.part")) and time.monotonic() < deadline:  # the data's file
        time.sleep(0.005)
    for _ in range(num_interrupts):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, error = process.communicate(timeout=60)
    assert process.returncode in {ExitCode.INTERRUPTED, -signal.SIGINT}, error
    assert names_in(out) == []


def test_two_conversions_do_not_write_the_same_files(tmp_path, many, capsys):
    process = start(many)
    try:
        journal = tmp_path / "out/.out.converting"
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert main(["convert", *map(str, many)]) == ExitCode.EXISTS
        assert "another conversion" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    write_tfrecord(tmp_path / "in.tfrecord", [os.urandom(1000) for _ in range(1000)])
    (tmp_path / "out.tfrecord").write_bytes(b"mine")
    # A limit on the length of files fails like a full disk does, once for a signal.
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from grainmill._tools.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "convert", "in.tfrecord", "out.tfrecord2"]
    done = subprocess.run(
        [*command, "--to", "tfrecord"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.SYSTEM
    assert "out.tfrecord2" in done.stderr
    assert done.stderr.count("\n") == 1
    assert names_in(tmp_path) == ["in.tfrecord", "out.tfrecord"]


def test_memory_does_not_grow_with_the_file(tmp_path):
    record = os.urandom(1 << 16)
    write_tfrecord(tmp_path / "in.tfrecord", [record] * 64)
    block = (tmp_path / "in.tfrecord").read_bytes()
    with (tmp_path / "in.tfrecord").open("wb") as file:
        for _ in range(32):  # 128 MiB
            file.write(block)
    code = (
        "import resource, sys; from grainmill._tools.main import main;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); assert main(sys.argv[1:]) == 0; print(peak() - before)"
    )
    command = [sys.executable, "-c", code, "convert", "in.tfrecord", "out.array_record", "--quiet"]
    done = subprocess.run(
        [*command, "--options", "uncompressed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.split()[-1]) < 40 << 10  # KiB


def hidden_after_interrupt(folder, at, place):
    """What an interrupted conversion leaves beside the files with their names; how many places."""
    (folder / "in.jsonl").write_bytes(b'{"a": 1}\n' * 30)
    interrupt = Interrupt(at, KeyboardInterrupt, place)
    # It may also come before `main` expects it.
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        main(["convert", str(folder / "in.jsonl"), str(folder / "out.array_record")])
    names = {path.name for path in folder.iterdir()} - {"in.jsonl"}
    if "out.array_record" in names:  # the journal says that it is complete
        names -= {"out.array_record", ".out.array_record.converting"}
    return names, at - interrupt.left


# An interrupt may come when a file has just been opened: it is closed with its last reference.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("place", ["line", "c_return"])
def test_interrupted_conversion_leaves_no_file_without_a_name(place, tmp_path, capsys):
    _, num_places = hidden_after_interrupt(tmp_path, 10**9, place)
    for number, at in enumerate(range(1, num_places + 1, effort.cases(3, 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        left, _ = hidden_after_interrupt(folder, at, place)
        assert not left, at
    gc.collect()
    capsys.readouterr()
