"""Files that are read from begin to end: in buckets, compressed, damaged, and from slow servers."""

import gzip
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import record_formats as formats
from bucket_server import BucketServer, Fault
from effort import cases

import grainmill as grain
from grainmill import _native
from grainmill._src.python.dataset.sources.tfrecord_dataset import (
    _TFRecordDatasetIterator,
    _TFRecordReader,
)
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

HERE = Path(__file__).parent
RECORDS = [b"record %d " % number * (number % 9) for number in range(300)]
# What files of other kinds begin with.
ZSTD, SKIPPABLE = b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"
XZ, BZIP2 = b"\xfd7zXZ\0", b"BZh91AY&SY"
MARKS = [XZ, BZIP2, b"\x1f\x8b", b"x\x9c", b"x^", ZSTD, SKIPPABLE, b"\xff\xfe", b"\xfe\xff"]
HOWS = ["none", "gzip", "members", "zlib", "zstd", "frames"]
HOWS += ["xz", "xz streams", "bzip2", "bzip2 streams"]


def tfrecord(records):
    """As `formats.tfrecord`, for many or long records."""
    parts = []
    for record in records:
        length = len(record).to_bytes(8, "little")
        for part in (length, record):
            parts += [part, _native.masked_crc32c(part).to_bytes(4, "little")]
    return b"".join(parts)


def read_all(path, format_name="tfrecord", max_records=1000):
    stream = _native.RecordStream(str(path), format_name)
    found = []
    while block := stream.read(max_records):
        found += block
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def server():
    with BucketServer() as server:
        yield server


@pytest.fixture
def slow():
    """A server that answers each request after 20 ms."""
    with BucketServer(latency_s=0.02) as server:
        yield server


# --- compression ------------------------------------------------------------------------------


@hypothesis.settings(max_examples=cases(60, 3_000))
@hypothesis.given(
    st.lists(st.binary(max_size=300) | st.sampled_from(MARKS), max_size=40),
    st.sampled_from(HOWS),
    st.integers(1, 50),
)
def test_streams_match_the_slow_twin(tmp_path_factory, records, how, max_records):
    path = tmp_path_factory.mktemp("stream") / "file"
    plain = formats.tfrecord(records)
    path.write_bytes(formats.compressed(plain, how))
    assert read_all(path, max_records=max_records) == records
    assert list(grain.experimental.TFRecordIterDataset(path)) == records
    lines = b"".join(record.replace(b"\n", b" ") + b"\n" for record in records)
    path.write_bytes(formats.compressed(lines, how))
    if formats.is_binary(lines) or formats.begins_as_other(lines):
        what = "binary data, not lines of text|UTF-16|compressed"
        with pytest.raises(grain.GrainmillError, match=what):
            read_all(path, "jsonl", max_records)
        return
    assert read_all(path, "jsonl", max_records) == formats.json_lines(lines)


@pytest.mark.parametrize("how", HOWS)
def test_states_are_offsets_of_the_decompressed_data(tmp_path, how):
    path = tmp_path / "file"
    path.write_bytes(formats.compressed(tfrecord(RECORDS), how))
    iterator = iter(grain.experimental.TFRecordIterDataset(path))
    offset = 0
    for number, record in enumerate(RECORDS):
        assert iterator.get_state() == {"reader_offset": offset}
        assert next(iterator) == record
        offset += 16 + len(record)
        if number % 40 == 7:
            resumed = iter(grain.experimental.TFRecordIterDataset(path))
            resumed.set_state(json.loads(json.dumps(iterator.get_state())))
            assert list(resumed) == RECORDS[number + 1 :]
    iterator.set_state({"reader_offset": 0})
    assert list(iterator) == RECORDS


@pytest.mark.parametrize("how", HOWS[1:])
def test_damage_in_compressed_data_is_never_lost(tmp_path, how):
    records = [b"some text %d" % number for number in range(40)]
    data = formats.compressed(tfrecord(records), how)
    path = tmp_path / "file"
    cuts_between = set()
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        try:
            found = read_all(path)
        except grain.GrainmillError as error:
            assert f"{path}: record " in str(error)  # noqa: PT017
            continue
        assert found == records[: len(found)]
        cuts_between.add(len(found))
    # Only where one part ends and the other begins, if that is between two records.
    assert len(cuts_between) <= (1 if how in {"members", "frames"} else 0)
    rng = random.Random(8)
    for _ in range(cases(300, 9_000)):
        bad = bytearray(data)
        at = rng.randrange(len(bad))
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        found = []
        try:
            stream = _native.RecordStream(str(path), "tfrecord")
            while block := stream.read(1000):
                found += block
        except grain.GrainmillError:
            assert found == records[: len(found)]
        else:
            assert found == records, "in a header, most bytes say nothing about the data"


def test_data_after_a_zlib_stream_are_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(zlib.compress(tfrecord(RECORDS)) + b"more")
    with pytest.raises(grain.GrainmillError, match="other data follow the zlib stream"):
        read_all(path)


def test_records_before_damage_are_delivered_and_the_error_repeats(tmp_path):
    data = bytearray(tfrecord([b"x" * 10] * 20))
    data[26 * 7 + 15] ^= 1
    path = tmp_path / "file"
    path.write_bytes(data)
    stream = _native.RecordStream(str(path), "tfrecord")
    assert stream.read(1000) == [b"x" * 10] * 7
    for _ in range(2):
        with pytest.raises(grain.GrainmillError, match="record 7 at byte 182: checksum mismatch"):
            stream.read(1000)
    assert (stream.num_records, stream.offset) == (7, 182)


def test_a_length_beyond_the_file_reads_nothing_into_memory(tmp_path):
    length = (1 << 60).to_bytes(8, "little")
    data = length + _native.masked_crc32c(length).to_bytes(4, "little") + bytes(100)
    problem = rf"record is cut short: takes {(1 << 60) + 16} bytes, 112 are left"
    for how in HOWS:
        path = tmp_path / how
        path.write_bytes(formats.compressed(data, how))
        with pytest.raises(grain.GrainmillError, match=f"record 0 at byte 0.*{problem}"):
            read_all(path)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_decompression_bomb_is_refused_before_it_takes_memory(tmp_path, how):
    path = tmp_path / "bomb"
    length = (48 << 20).to_bytes(8, "little")
    head = length + _native.masked_crc32c(length).to_bytes(4, "little")
    path.write_bytes(formats.compressed(tfrecord([b"one"]) + head + bytes(48 << 20), how))
    code = (
        "import resource, sys, grainmill as grain;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); iterator = iter(grain.experimental.TFRecordIterDataset(sys.argv[1]));"
        "print(next(iterator))\n"
        "try: next(iterator)\n"
        "except ValueError as error: print(error)\n"
        "print(peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GRAINMILL_MAX_RECORD_BYTES": str(16 << 20)},
    )
    record, problem, memory = run.stdout.splitlines()
    assert record == "b'one'"
    assert "record at byte 19 of the decompressed data" in problem
    assert "GRAINMILL_MAX_RECORD_BYTES" in problem
    assert int(memory) < 30 << 10  # KiB


def test_one_large_frame_of_zstd_has_no_random_access_and_says_what_to_do(tmp_path):
    half = b'{"text": "%s"}\n' % (b"x" * ((64 << 20) - 13))
    assert len(half) == 64 << 20
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(formats.zstd(half * 2))  # as much as there may be between two frames
    assert grain.sources.JsonLinesDataSource(path)[1] == half[:-1]
    path.write_bytes(formats.zstd(half * 2 + b"{}\n"))
    with pytest.raises(grain.GrainmillError, match=r"a\.jsonl\.zst: .*128 MiB.*pzstd.*convert"):
        grain.sources.JsonLinesDataSource(path)
    assert [len(line) for line in read_all(path, "jsonl")] == [len(half) - 1] * 2 + [2]
    path.write_bytes(formats.zstd(half) * 3)
    assert grain.sources.JsonLinesDataSource(path)[2] == half[:-1]


def test_tools_read_zstd(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    objects = [{"n": number} for number in range(50)]
    Path("a.jsonl.zst").write_bytes(formats.zstd(formats.json_text(objects)))
    assert main(["convert", "a.jsonl.zst", "out/", "--verify"]) == 0
    with ArrayRecordReader("out/a.array_record") as reader:
        assert [json.loads(record) for record in reader.read_all()] == objects
    assert main(["verify", "a.jsonl.zst"]) == 0
    capsys.readouterr()
    assert main(["head", "-n", "2", "a.jsonl.zst"]) == 0
    assert capsys.readouterr().out == '{"n": 0}\n{"n": 1}\n'
    Path("cut.jsonl.zst").write_bytes(formats.zstd(formats.json_text(objects))[:-5])
    assert main(["verify", "cut.jsonl.zst"]) == ExitCode.DAMAGED
    assert "compressed data are cut short" in capsys.readouterr().out
    assert main(["convert", "cut.jsonl.zst", "cut.array_record"]) == ExitCode.DAMAGED
    assert not Path("cut.array_record").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.tfrecord.gz"])
def test_a_file_without_bytes_has_no_records(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    assert read_all(name, "tfrecord" if "tfrecord" in name else "jsonl") == []
    assert main(["verify", name]) == 0
    assert main(["convert", name, "out.array_record"]) == 0
    with ArrayRecordReader("out.array_record") as reader:
        assert reader.read_all() == []
    if not name.endswith("zst"):
        assert main(["head", name]) == 0
        assert "problem" not in capsys.readouterr().err


# --- URLs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_files_of_a_server_are_those_of_a_disk(server, how):
    server.put("/dir/a.tfrecord", formats.compressed(tfrecord(RECORDS), how))
    url = f"{server.url}/dir/a.tfrecord"
    assert read_all(url, max_records=7) == RECORDS
    dataset = grain.experimental.TFRecordIterDataset(url)
    iterator = iter(dataset)
    assert [next(iterator) for _ in range(100)] == RECORDS[:100]
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert list(resumed) == RECORDS[100:]


def test_the_tools_read_urls(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    server.put("/a.tfrecord", tfrecord(RECORDS))
    server.put("/no-name", gzip.compress(tfrecord(RECORDS), mtime=0))
    for name in ("a.tfrecord", "no-name"):
        url = f"{server.url}/{name}"
        command = ["convert", url, "out.array_record", "--force"]
        assert main([*command, *([] if "." in name else ["--from", "tfrecord"])]) == 0
        with ArrayRecordReader("out.array_record") as reader:
            assert reader.read_all() == RECORDS
    url = f"{server.url}/a.tfrecord"
    assert main(["convert", url, "parts.jsonl", "--to", "tfrecord", "--shards", "3"]) == 0
    parts = [Path(f"parts.jsonl-{number:05}-of-00003").read_bytes() for number in range(3)]
    assert b"".join(parts) == tfrecord(RECORDS)
    capsys.readouterr()
    assert main(["cat", url, "--index", "3:5", "--as", "raw"]) == 0
    assert capsys.readouterr().out.encode() == RECORDS[3] + b"\n" + RECORDS[4] + b"\n"


def test_verify_reads_urls(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with ArrayRecordWriter("a.array_record", "group_size:7,uncompressed") as writer:
        for record in RECORDS:
            writer.write(record)
    contents = {
        "a.array_record": Path("a.array_record").read_bytes(),
        "b.tfrecord": tfrecord(RECORDS),
    }
    urls = []
    for name, content in contents.items():
        server.put(f"/{name}", content)
        urls.append(f"{server.url}/{name}")
    for _ in range(2):  # written, then compared
        assert main(["verify", *urls, "--manifest", "manifest", "--json"]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert [file["records"] for file in files] == [300, 300]
    assert [file["bytes"] for file in files] == [len(content) for content in contents.values()]
    for name, content in contents.items():
        bad = bytearray(content)
        bad[len(bad) // 2 - 20_000 if name == "a.array_record" else 200] ^= 1
        server.put(f"/{name}", bytes(bad))
        Path(name).write_bytes(bad)
        reports = []
        for path in (f"{server.url}/{name}", name):
            capsys.readouterr()
            assert main(["verify", path, "--json"]) == ExitCode.DAMAGED
            (report,) = json.loads(capsys.readouterr().out)["files"]
            reports.append({key: value for key, value in report.items() if key != "path"})
        assert reports[0] == reports[1]
        assert reports[0]["problems"]


@pytest.mark.parametrize("cached", [False, True])
def test_requests_are_in_flight_before_they_are_needed(slow, tmp_path, monkeypatch, cached):
    if cached:
        monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_DIR", str(tmp_path / "blocks"))
    records = [bytes([number % 251]) * 100_000 for number in range(400)]  # 38 MiB
    data = tfrecord(records)
    slow.put("/a.tfrecord", data)
    url = f"{slow.url}/a.tfrecord"
    for is_second, read in enumerate(
        (
            lambda: sum(1 for _ in grain.experimental.TFRecordIterDataset(url)),
            lambda: _native.RecordStream(url, "tfrecord").skip(1000),
        )
    ):
        slow.requests.clear()
        slow.max_active = 0
        slow.keeps = 0 if cached and is_second else 3
        assert read() == len(records)
        assert slow.max_active >= slow.keeps
        assert len(slow.requests) < 80


def test_scans_and_verification_have_requests_in_flight(slow, tmp_path):
    rng = random.Random(1)
    records = [rng.randbytes(1000) for _ in range(6000)]
    with ArrayRecordWriter(str(tmp_path / "a"), "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    slow.put("/a.array_record", (tmp_path / "a").read_bytes())
    slow.put("/b.tfrecord", tfrecord(records))
    slow.put("/c.tfrecord.gz", gzip.compress(tfrecord(records), 1, mtime=0))
    slow.keeps = 3
    report = _native.verify_array_record(f"{slow.url}/a.array_record", 10)
    assert (report["num_records"], report["problems"]) == (6000, [])
    # Not two for each chunk.
    assert len(slow.requests) < 80
    assert slow.max_active > 2
    for name in ("b.tfrecord", "c.tfrecord.gz"):
        slow.requests.clear()
        slow.max_active = 0
        assert len(grain.sources.TFRecordDataSource(f"{slow.url}/{name}")) == 6000
        assert len(slow.requests) < 80
        assert slow.max_active > 2


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(cut_at=1000), Fault(is_reset=True)])
def test_faults_of_the_server_change_nothing(server, fault):
    records = [b"%d" % number * 5000 for number in range(1000)]
    server.put("/a", tfrecord(records))
    server.faults.extend([fault, None, fault] * 3)
    assert list(grain.experimental.TFRecordIterDataset(f"{server.url}/a")) == records


def test_an_iterator_continues_after_an_error_of_the_storage(server):
    records = [random.Random(number).randbytes(15_000) for number in range(1000)]
    for how in ("none", "gzip"):
        server.put("/a", formats.compressed(tfrecord(records), how))
        iterator = iter(grain.experimental.TFRecordIterDataset(f"{server.url}/a"))
        found = [next(iterator) for _ in range(10)]
        server.always = Fault(status=403)
        with pytest.raises(OSError, match="403"):
            found.extend(iterator)
        state = iterator.get_state()
        server.always = None
        assert found == records[: len(found)]
        rest = list(iterator)
        assert found + rest == records
        iterator.set_state(state)
        assert list(iterator) == rest


def test_an_object_that_changes_is_an_error(server):
    records = [b"%d" % number * 5000 for number in range(1000)]
    server.put("/a", tfrecord(records))
    iterator = iter(grain.experimental.TFRecordIterDataset(f"{server.url}/a"))
    next(iterator)
    server.put("/a", tfrecord(records[::-1]))
    with pytest.raises((grain.GrainmillError, ValueError), match="replaced"):
        list(iterator)


def test_a_forked_child_reads_on(server):
    records = [b"%d" % number * 5000 for number in range(700)]
    server.put("/a", tfrecord(records))
    code = (
        "import os, sys, grainmill as grain\n"
        "it = iter(grain.experimental.TFRecordIterDataset(sys.argv[1]))\n"
        "total = sum(len(next(it)) for _ in range(30))\n"
        "child = os.fork()\n"
        "total += sum(map(len, it))\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
        "print(total, flush=True)\n"
        "os._exit(0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, f"{server.url}/a"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert [int(line) for line in run.stdout.split()] == [sum(map(len, records))] * 2


def test_memory_is_bounded_for_a_far_file(tmp_path):
    path = tmp_path / "a.tfrecord"
    block = tfrecord([bytes(100_000)] * 100)
    with path.open("wb") as file:
        for _ in range(11):  # 105 MiB
            file.write(block)
    command = [sys.executable, str(HERE / "bucket_server.py"), str(path), "--latency-ms", "20"]
    code = (
        "import resource, sys; from grainmill._tools.main import main;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak();"
        "assert main(['convert', sys.argv[1], sys.argv[2], '--from', 'tfrecord', '--quiet',"
        " '--options', 'uncompressed']) == 0;"
        "print(peak() - before)"
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as serving:
        url = f"http://127.0.0.1:{int(serving.stdout.readline())}/bucket/0"
        run = subprocess.run(
            [sys.executable, "-c", code, url, str(tmp_path / "out.array_record")],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        serving.stdin.close()
    assert int(run.stdout.split()[-1]) < 75 << 10  # KiB


# --- readers of programs ----------------------------------------------------------------------


class FlakyFile:
    """A file that raises an exception at the second read of each position."""

    name = "flaky"

    def __init__(self, data):
        self._data, self._at, self.failures = data, 0, [OSError("no network"), KeyboardInterrupt()]

    def read(self, size):
        if self._at and self.failures:
            raise self.failures.pop()
        piece = self._data[self._at : self._at + min(size, 5000)]
        self._at += len(piece)
        return piece

    def seek(self, offset):
        self._at = offset

    def tell(self):
        return self._at


class FlakyReader(_TFRecordReader):
    def __init__(self, data):
        self._reader = FlakyFile(data)


class FlakyIterator(_TFRecordDatasetIterator):
    def __init__(self, data):
        super(_TFRecordDatasetIterator, self).__init__()
        self._reader = FlakyReader(data)


@pytest.mark.parametrize("how", ["read", "skip", "next"])
def test_an_exception_after_records_is_raised_before_more_is_read(how):
    records = [b"%d" % number * 50 for number in range(500)]
    data = tfrecord(records)
    steps = [data[:5000], KeyboardInterrupt(), OSError("no network"), data[5000:], b""]

    def read(_):
        step = steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    if how == "next":
        stream = _native.RecordCursor.pulled("a", read, "tfrecord", 0)
    else:
        stream = _native.RecordStream.pulled("a", read, "tfrecord")
    found = []

    def advance():
        if how == "next":
            found.extend(iter(stream.next, None))
        elif how == "read":
            found.extend(stream.read(1000))
        else:
            found.extend(records[: stream.skip(1000)])

    with pytest.raises(KeyboardInterrupt):
        advance()
    assert found == []
    if how == "read":
        advance()
    with pytest.raises(OSError, match="no network"):
        advance()
    assert steps == [data[5000:], b""]
    if how == "skip":
        found = records[: stream.num_records]
    elif how == "next":  # `extend` has kept what it got
        assert stream.tell() == sum(16 + len(record) for record in found)
    assert 0 < len(found) < 100
    if how == "skip":
        stream.skip(1000)
        assert stream.num_records == len(records)
    else:
        advance()
        assert found == records


def test_exceptions_of_a_derived_reader_pass_and_nothing_is_lost():
    records = [b"%d" % number * 50 for number in range(500)]
    iterator = FlakyIterator(tfrecord(records))
    found, raised = [], []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except (OSError, KeyboardInterrupt) as error:
            raised.append(type(error))
            state = iterator.get_state()
            assert state == {"reader_offset": len(tfrecord(records[: len(found)]))}
    assert raised == [KeyboardInterrupt, OSError]
    assert found == records
