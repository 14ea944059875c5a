"""Outputs in buckets: what is seen of them, whatever the server or the user does meanwhile."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bucket_server import BucketServer, Fault
from waits import becomes

from grainmill import _native
from grainmill._files import bucket_outputs, outputs
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

PART_LEN = 8 << 20
MANY = 9 * PART_LEN // 8  # two parts


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GRAINMILL_BUCKET_")):
            monkeypatch.delenv(name)


@pytest.fixture
def impatient(monkeypatch):
    """For servers that are silent; others may be slow, where other programs have the cores."""
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "20")
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.5")


@pytest.fixture
def server(monkeypatch):
    with BucketServer() as server:
        use(monkeypatch, "s3", server)
        yield server


def use(monkeypatch, scheme, server):
    """Sets the environment; returns the URL of a bucket."""
    variables = {
        "s3": {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
        },
        "gs": {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{server.port}"},
        "az": {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": server.url,
            "AZURE_STORAGE_ENDPOINT": f"{server.url}/devstoreaccount1",
        },
    }
    for name, value in variables[scheme].items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://bucket"


def write_lines(path, count, length=60):
    lines = [json.dumps({"number": number, "text": "x" * length}) for number in range(count)]
    Path(path).write_text("\n".join(lines) + "\n")
    return [line.encode() for line in lines]


def records_of(urls):
    source = ArrayRecordDataSource(urls)
    return [source[at] for at in range(len(source))]


def names(server):
    return sorted(server.objects)


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(("count", "length"), [(300, 60), (20, 900_000)])
def test_objects_equal_local_files(tmp_path, monkeypatch, scheme, count, length):
    """Of one request, and of several parts."""
    lines = write_lines(tmp_path / "in.jsonl", count, length)
    local = tmp_path / "out.array_record"
    options = ["--options", "uncompressed", "--quiet"]
    assert main(["convert", str(tmp_path / "in.jsonl"), str(local), *options]) == 0
    with BucketServer() as server:
        bucket = use(monkeypatch, scheme, server)
        url = f"{bucket}/train/out.array_record"
        assert main(["convert", str(tmp_path / "in.jsonl"), url, "--verify", *options]) == 0
        assert names(server) == ["/bucket/train/out.array_record"]
        assert server.objects["/bucket/train/out.array_record"].data == local.read_bytes()
        assert not server.uploads
        assert records_of(url) == lines
        has_parts = any("uploadId" in request.query for request in server.requests)
        has_parts |= any(request.query.get("comp") == "block" for request in server.requests)
        assert has_parts == (length == 900_000)


@pytest.mark.parametrize("shards", [["--shards", "3"], ["--shards", "3", "--shuffle"], []])
def test_each_input_or_equal_shares(tmp_path, server, capsys, shards):
    lines = []
    for number in range(2):
        lines += write_lines(tmp_path / f"in-{number}.jsonl", 50)
    output = "s3://bucket/train/all.array_record" if shards else "s3://bucket/train/"
    arguments = ["convert", str(tmp_path / "in-*.jsonl"), output, *shards, "--threads", "3"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stems = ["in-0.array_record", "in-1.array_record"]
    if shards:
        stems = [f"all.array_record-0000{number}-of-00003" for number in range(3)]
    assert [file["path"] for file in found["files"]] == [f"s3://bucket/train/{n}" for n in stems]
    assert names(server) == [f"/bucket/train/{name}" for name in stems]
    assert found["records"] == 100
    assert found["bytes"] == sum(len(object_.data) for object_ in server.objects.values())
    records = records_of([file["path"] for file in found["files"]])
    assert (sorted(records) if "--shuffle" in shards else records) == (
        sorted(lines) if "--shuffle" in shards else lines
    )


def test_writer_shows_nothing_before_it_is_closed(server):
    url = "s3://bucket/a/file.array_record"
    records = [os.urandom(1 << 20) for _ in range(20)]
    writer = ArrayRecordWriter(url, "uncompressed")
    for record in records:
        writer.write(record)
    assert not server.objects
    assert server.uploads  # two parts
    writer.close()
    assert names(server) == ["/bucket/a/file.array_record"]
    assert not server.uploads
    with ArrayRecordReader(url) as reader:
        assert reader.read_all() == records


@pytest.mark.parametrize("end", ["exception", "dropped", "aborted by an error"])
def test_writer_that_is_not_closed_leaves_nothing(server, end):
    url = "s3://bucket/a/file.array_record"
    writer = ArrayRecordWriter(url, "uncompressed")

    def write(count):
        for _ in range(count):
            writer.write(os.urandom(1 << 20))

    if end == "exception":
        with contextlib.suppress(ZeroDivisionError), writer:
            write(20)
            raise ZeroDivisionError
    elif end == "dropped":
        write(20)
        assert server.uploads
        del writer
    else:
        server.faults += [Fault(status=403, only="partNumber")] * 9
        with pytest.raises(RuntimeError, match=r"file.array_record: write: .*403"):
            write(40)
        with pytest.raises(RuntimeError, match="403"):
            writer.close()
    assert not server.objects
    assert not server.uploads


@pytest.mark.usefixtures("server")
def test_writer_refuses_what_is_no_object():
    for url, problem in (
        ("http://127.0.0.1:1/x", "a file of a web server cannot be written"),
        ("s3://bucket/dir/", "it names no object"),
    ):
        writer = ArrayRecordWriter(url)
        assert not writer.ok()
        with pytest.raises(RuntimeError, match=problem):
            writer.close()


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("http://host/dir/", "a web server's files cannot be written"),
        ("https://host/x.array_record", "a web server's files cannot be written"),
        ("ftp://host/x.array_record", "`ftp://` is not supported"),
        ("s3://bucket/dir", "a directory of a bucket ends with /"),
        ("s3://bucket/x.tar", "WebDataset files are not written"),
    ],
)
def test_outputs_that_cannot_be(tmp_path, server, capsys, output, problem):
    write_lines(tmp_path / "in.jsonl", 3)
    assert main(["convert", str(tmp_path / "in.jsonl"), output]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not server.requests


# --- nothing is replaced ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_existing_objects_are_replaced_with_force_only(tmp_path, monkeypatch, capsys, scheme):
    write_lines(tmp_path / "in.jsonl", 3)
    with BucketServer() as server:
        output = f"{use(monkeypatch, scheme, server)}/out.tfrecord"
        server.put("/bucket/out.tfrecord", b"mine")
        arguments = ["convert", str(tmp_path / "in.jsonl"), output]
        assert main(arguments) == ExitCode.EXISTS
        assert "exists already; --force" in capsys.readouterr().err
        assert server.objects["/bucket/out.tfrecord"].data == b"mine"
        assert names(server) == ["/bucket/out.tfrecord"]
        assert main([*arguments, "--force"]) == 0
        assert len(server.objects["/bucket/out.tfrecord"].data) > 100


@pytest.mark.parametrize("case", [(60, True), (60, False), (60_000, True), (60_000, False)])
def test_object_that_appears_meanwhile_stays(tmp_path, server, capsys, monkeypatch, case):
    """The service refuses; where it has no conditions, it is looked up at the end."""
    length, server.takes_conditions = case
    write_lines(tmp_path / "in.jsonl", 300, length)
    check = bucket_outputs.BucketOutputs.existing

    def existing(self):
        found = check(self)
        server.put("/bucket/out.tfrecord", b"mine")
        return found

    monkeypatch.setattr(bucket_outputs.BucketOutputs, "existing", existing)
    arguments = ["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]
    assert main(arguments) == ExitCode.EXISTS
    assert "out.tfrecord: exists already" in capsys.readouterr().err
    assert server.objects["/bucket/out.tfrecord"].data == b"mine"
    assert not server.uploads
    assert names(server) == ["/bucket/out.tfrecord"]


# --- what a server does -------------------------------------------------------------------------

FAULTS = {
    "busy": Fault(status=503),
    "too many": Fault(status=429, retry_after=1),
    "reset": Fault(is_reset=True),
    "reset in the body": Fault(reads=100_000, is_reset=True),
    "stalls in the body": Fault(reads=100_000, is_silent=True),
    "never answers": Fault(is_silent=True),
    "loses the answer": Fault(is_done=True),
}


random_bytes = functools.cache(os.urandom)


OTHERS = ["busy", "reset", "loses the answer"]
REQUESTS = {
    "s3": ["uploads", "partNumber", "uploadId", "PUT"],
    "gs": ["uploads", "partNumber", "uploadId", "PUT"],
    "az": ["blockid", r"\?comp=blocklist$", "PUT"],
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "case",
    [
        (scheme, name, only, replaces)
        for scheme, requests in REQUESTS.items()
        for name in (FAULTS if scheme == "s3" else OTHERS)
        for only in requests
        for replaces in ([False, True] if FAULTS[name].is_done else [False])
    ],
)
def test_failed_requests_are_repeated(server, monkeypatch, case):
    """Those that begin an upload, send a part, complete it, and send a small object."""
    scheme, name, only, replaces = case
    bucket = use(monkeypatch, scheme, server)
    fault = Fault(**{**vars(FAULTS[name]), "only": only})
    if fault.retry_after and only != "PUT":  # one of them waits for the second
        fault = Fault(**{**vars(fault), "retry_after": 0})
    data = random_bytes(100_000 if only == "PUT" else MANY)
    if replaces:
        server.put("/bucket/file", bytes(len(data)))
    server.put("/bucket/other", b"")
    assert _native.read_object(f"{bucket}/other") == b""  # the server is known to answer
    if fault.reads is not None and only in {"uploads", "uploadId"}:
        fault = Fault(**{**vars(fault), "reads": 0})
    if only == "uploadId":  # of a part, or of the last request
        server.faults += [None, None, None]
    server.faults.append(fault)
    writer = _native.ObjectWriter(f"{bucket}/file", replaces=replaces)
    writer.write(data)
    writer.close()
    assert not server.faults
    assert server.objects["/bucket/file"].data == data
    assert writer.num_sent == writer.num_written == len(data)
    if not (fault.is_done and only == "uploads"):  # an upload that nobody knows of
        assert not server.uploads


@pytest.mark.usefixtures("impatient")
def test_a_service_may_take_long_to_join_the_parts(server):
    """S3 sends white space meanwhile, so that the connection stays open."""
    server.faults += [None, None, None, Fault(blank_s=1.5, only="uploadId")]
    writer = _native.ObjectWriter("s3://bucket/file")
    writer.write(bytes(MANY))
    writer.close()
    assert not server.faults
    assert len(server.objects["/bucket/file"].data) == MANY
    assert [request.method for request in server.requests].count("POST") == 2


@pytest.mark.parametrize("read", [_native.read_object, _native.remove_object])
def test_missing_credentials_are_no_missing_object(server, monkeypatch, read):
    server.put("/bucket/file", b"content")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)  # which has no role
    with pytest.raises(OSError, match="404") as caught:
        read("s3://bucket/file")
    assert not isinstance(caught.value, FileNotFoundError)
    assert "/bucket/file" in server.objects


def test_a_cancelled_upload_takes_nothing_more(server):
    writer = _native.ObjectWriter("s3://bucket/file")
    writer.cancel()
    with pytest.raises(OSError, match="the upload was ended"):
        writer.write(b"x")
    with pytest.raises(OSError, match="the upload was ended"):
        writer.close()
    assert not server.objects


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("length", [3, MANY])
def test_a_forked_child_writes_nothing_of_its_parent(server, length):
    writer = _native.ObjectWriter("s3://bucket/file")
    writer.write(bytes(length))
    child = os.fork()
    if not child:
        refused = 0
        for use_it in (lambda: writer.write(b"x"), writer.close):
            try:
                use_it()
            except OSError as error:
                refused += "forked process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    writer.close()
    assert server.objects["/bucket/file"].data == bytes(length)


@pytest.mark.parametrize("scheme", ["s3", "az"])
@pytest.mark.parametrize("length", [3, MANY])
def test_object_of_another_is_not_taken_for_ours(server, monkeypatch, scheme, length):
    """It appears while the last request is repeated."""
    bucket = use(monkeypatch, scheme, server)
    server.put("/bucket/other", b"")
    assert _native.read_object(f"{bucket}/other") == b""
    last = r"uploadId" if scheme == "s3" else r"\?comp=blocklist$"
    answer, mine = server._answer, bytes(length + 1)

    async def after_another(request, body, fault, writer):
        if fault.is_reset:
            server.put("/bucket/file", mine)
            server.uploads.clear()
        return await answer(request, body, fault, writer)

    server._answer = after_another
    if length > PART_LEN and scheme == "s3":
        server.faults += [None, None, None]
    server.faults.append(Fault(is_reset=True, only="PUT" if length == 3 else last))
    writer = _native.ObjectWriter(f"{bucket}/file", replaces=False)
    writer.write(bytes(length))
    with pytest.raises(OSError, match="file: write"):
        writer.close()
    assert server.objects["/bucket/file"].data == mine


def test_a_busy_server_does_not_make_an_object_that_of_another(server):
    """Neither if the answer is lost nor if the question whose object it is fails."""
    server.put("/bucket/other", b"")
    assert _native.read_object("s3://bucket/other") == b""
    server.faults += [Fault(is_done=True, only="PUT"), Fault(status=503, only="HEAD")]
    writer = _native.ObjectWriter("s3://bucket/file", replaces=False)
    writer.write(b"abc")
    writer.close()
    assert not server.faults
    assert server.objects["/bucket/file"].data == b"abc"


def test_conditions_that_the_environment_disables(server, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    for _ in range(2):
        writer = _native.ObjectWriter("s3://bucket/file", replaces=False)
        writer.write(b"abc")
        if server.objects:
            with pytest.raises(FileExistsError):
                writer.close()
            assert not writer.may_be_visible
        else:
            writer.close()


def test_an_object_without_one_of_its_parts_is_never_complete(server):
    # Also if it is sent again, as the answer took too long.
    server.faults += [Fault(status=403, only=r"partNumber=2\b")] * 9
    writer = _native.ObjectWriter("s3://bucket/file")
    errors = []
    for _ in range(7):
        try:
            writer.write(bytes(PART_LEN))
        except OSError as error:
            errors.append(str(error))
    if errors:  # where the answer came while parts were written, nothing can be written any more
        with pytest.raises(OSError, match="403"):
            writer.write(b"x")
    with pytest.raises(OSError, match="403"):
        writer.close()
    assert all("403" in error for error in errors)
    assert not server.objects
    assert not server.uploads


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=403), Fault(is_silent=True)])
def test_failure_is_one_line_and_leaves_nothing(tmp_path, server, capsys, monkeypatch, fault):
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.8")
    write_lines(tmp_path / "in.jsonl", 400, 60_000)
    server.put("/bucket/out.tfrecord", b"mine")
    server.faults += [Fault(**{**vars(fault), "only": "partNumber"})] * 50
    output = "s3://bucket/out.tfrecord"
    began = time.monotonic()
    code = main(["convert", str(tmp_path / "in.jsonl"), output, "--force"])
    assert code == ExitCode.SYSTEM
    assert time.monotonic() - began < 30
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "s3://bucket/out.tfrecord: write: part " in error
    assert names(server) == ["/bucket/out.tfrecord"]
    assert server.objects["/bucket/out.tfrecord"].data == b"mine"
    assert not server.uploads


def test_parts_are_sent_while_more_are_written(server):
    server.keeps, server.patience_s = 2, 1
    writer = _native.ObjectWriter("s3://bucket/file")
    for _ in range(8):
        writer.write(bytes(PART_LEN))
    writer.close()
    assert 2 <= server.max_active <= 4
    assert len(server.objects["/bucket/file"].data) == 8 * PART_LEN


# --- interruptions ------------------------------------------------------------------------------


def start(arguments, **variables):
    command = [sys.executable, "-m", "grainmill", "convert", *map(str, arguments)]
    # A shell that runs the tests in the background has them, and what they start, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_conversions_continue(tmp_path, server, how):
    inputs = [tmp_path / f"{number}.jsonl" for number in range(4)]
    lines = [line for path in inputs for line in write_lines(path, 10, 900_000)]  # two parts each
    arguments = [*inputs, "s3://bucket/out/", "--options", "uncompressed"]
    arguments += ["--threads", "1"]

    def finished():
        return [name for name in names(server) if re.search(r"/out/\d", name)]

    # The second file has parts whose answers do not come, however often they are sent.
    server.faults += [Fault(is_silent=True, only=r"/1\.array_record\?.*partNumber")] * 50
    process = start(arguments, GRAINMILL_BUCKET_STALL_S="60")
    try:
        # The journal is written once a second.
        assert becomes(lambda: has_told(server, "out/.out", begun=1, done=1))
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in {-signal.SIGKILL, ExitCode.INTERRUPTED}
    assert "Traceback" not in error
    kept = finished()
    assert 1 <= len(kept) < 4
    before = {name: server.objects[name].written for name in kept}
    assert bool(server.uploads) == (how == signal.SIGKILL)
    assert "/bucket/out/.out.converting" in server.objects
    server.faults.clear()
    process = start([*arguments, "--json"])
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert json.loads(out)["kept"] == len(kept)
    assert {name: server.objects[name].written for name in kept} == before
    assert not server.uploads  # also those of the process that was killed
    assert names(server) == [f"/bucket/out/{n}.array_record" for n in range(4)]
    assert records_of([f"s3:/{name}" for name in names(server)]) == lines


def test_objects_of_another_conversion_are_not_kept(tmp_path, server, capsys):
    inputs = [tmp_path / f"{number}.tfrecord" for number in range(2)]
    write_lines(tmp_path / "lines.jsonl", 10)
    for path in inputs:
        assert main(["convert", str(tmp_path / "lines.jsonl"), str(path)]) == 0
    whole = inputs[1].read_bytes()
    inputs[1].write_bytes(whole[:-1])
    arguments = [
        "convert",
        *map(str, inputs),
        "s3://bucket/all/",
        "--to",
        "jsonl",
        "--threads",
        "1",
    ]
    first = "/bucket/all/0.jsonl"
    assert main(arguments) == ExitCode.DAMAGED
    assert names(server) == ["/bucket/all/.all.converting", first]
    assert main([*arguments, "--options", "gzip"]) == ExitCode.EXISTS
    assert main([*arguments, "--options", "gzip", "--force"]) == ExitCode.DAMAGED
    assert server.objects[first].data[:2] == b"\x1f\x8b"
    written = server.objects[first].written
    inputs[1].write_bytes(whole)  # a changed input makes another conversion
    assert main([*arguments, "--options", "gzip"]) == ExitCode.EXISTS
    assert server.objects[first].written == written
    capsys.readouterr()
    assert main([*arguments, "--force"]) == 0
    assert capsys.readouterr().out.startswith("s3://bucket/all/: 2 files, 20 records")
    assert names(server) == [first, "/bucket/all/1.jsonl"]


def test_two_conversions_do_not_write_the_same_objects(tmp_path, server, capsys):
    write_lines(tmp_path / "in.jsonl", 200, 100_000)
    arguments = [tmp_path / "in.jsonl", "s3://bucket/out.tfrecord"]
    server.faults += [Fault(is_silent=True, only="partNumber")] * 50
    process = start(arguments, GRAINMILL_BUCKET_STALL_S="60")
    try:
        assert becomes(lambda: server.uploads)
        assert main(["convert", *map(str, arguments)]) == ExitCode.EXISTS
        assert f"another conversion is writing these files (process {process.pid}" in (
            capsys.readouterr().err
        )
        assert server.uploads  # those of the other are left alone
    finally:
        process.kill()
        process.communicate()


def test_another_host_counts_as_alive_for_a_while(tmp_path, server, capsys):
    write_lines(tmp_path / "in.jsonl", 3)
    arguments = ["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]
    journal = {
        "header": {},
        "host": "elsewhere",
        "process": 1,
        "time": time.time() - 100,
        "has_ended": False,
        "begun": {},
        "done": {},
    }
    path = "/bucket/.out.tfrecord.converting"
    server.put(path, json.dumps(journal).encode())
    assert main(arguments) == ExitCode.EXISTS
    assert "process 1 on elsewhere, 100 s ago" in capsys.readouterr().err
    server.put(path, json.dumps(journal | {"time": time.time() - 400}).encode())
    assert main(arguments) == 0
    assert names(server) == ["/bucket/out.tfrecord"]


def test_a_foreign_journal_is_left_alone(tmp_path, server, capsys):
    write_lines(tmp_path / "in.jsonl", 3)
    server.put("/bucket/.out.tfrecord.converting", b"mine")
    arguments = ["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]
    assert main(arguments) == ExitCode.EXISTS
    assert "not the journal of a conversion" in capsys.readouterr().err
    assert names(server) == ["/bucket/.out.tfrecord.converting"]


@pytest.mark.usefixtures("server")
def test_progress_shows_the_upload(tmp_path, capsys, monkeypatch):
    write_lines(tmp_path / "in.jsonl", 900, 100_000)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("grainmill._tools.console.Progress._PERIOD_S", 0.0)
    arguments = ["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]
    assert main(arguments) == 0
    error = capsys.readouterr().err
    assert "0 of 1 files" in error
    assert re.search(r"\d+\.0 MiB uploaded", error)


@pytest.mark.usefixtures("impatient")
def test_threads_end_when_uploads_are_cancelled(server):
    server.faults += [Fault(is_silent=True)] * 3
    writer = _native.ObjectWriter("s3://bucket/file")
    failure = []

    def write():
        try:
            for _ in range(9):
                writer.write(bytes(PART_LEN))
        except OSError as error:
            failure.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    assert becomes(lambda: server.requests)
    writer.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert failure == ["s3://bucket/file: write: the upload was ended"]


# --- journals -----------------------------------------------------------------------------------


def journal_of(server, name=".out.tfrecord"):
    return json.loads(server.objects[f"/bucket/{name}.converting"].data)


def has_told(server, name, *, begun, done):
    """Whether a journal has so many objects that are complete, and that are not."""
    if f"/bucket/{name}.converting" not in server.objects:
        return False
    journal = journal_of(server, name)
    return len(journal["begun"]) >= begun and len(journal["done"]) >= done


def two_inputs(path):
    """Of which the second one is damaged."""
    write_lines(path / "lines.jsonl", 10)
    inputs = [path / f"{number}.tfrecord" for number in range(2)]
    for each in inputs:
        assert main(["convert", str(path / "lines.jsonl"), str(each), "--quiet"]) == 0
    inputs[1].write_bytes(inputs[1].read_bytes()[:-1])
    return inputs


def test_changed_inputs_in_a_bucket_make_another_conversion(tmp_path, server, capsys):
    for number, path in enumerate(two_inputs(tmp_path)):
        server.put(f"/bucket/in/{number}.tfrecord", path.read_bytes())
    arguments = ["convert", "s3://bucket/in/0.tfrecord", "s3://bucket/in/1.tfrecord"]
    arguments += [f"{tmp_path}/out/", "--to", "jsonl", "--threads", "1"]
    assert main(arguments) == ExitCode.DAMAGED
    assert main(arguments) == ExitCode.DAMAGED  # continues
    whole = server.objects["/bucket/in/0.tfrecord"].data
    for number in range(2):
        server.put(f"/bucket/in/{number}.tfrecord", whole)
    assert main(arguments) == ExitCode.EXISTS
    assert main([*arguments, "--force"]) == 0
    assert "from an earlier run" not in capsys.readouterr().out


def test_an_object_that_was_replaced_is_not_kept(tmp_path, server, capsys):
    """Also if the other one has its length."""
    arguments = ["convert", *map(str, two_inputs(tmp_path)), "s3://bucket/all/"]
    arguments += ["--to", "jsonl", "--threads", "1"]
    first = "/bucket/all/0.jsonl"
    assert main(arguments) == ExitCode.DAMAGED
    server.put(first, b"#" * len(server.objects[first].data))
    capsys.readouterr()
    assert main(arguments) == ExitCode.EXISTS
    assert f"s3:/{first}: exists already" in capsys.readouterr().err
    assert server.objects[first].data[:1] == b"#"


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_a_refused_command_leaves_the_journal_of_another(tmp_path, server, capsys, place):
    output = "s3://bucket/all/" if place == "bucket" else f"{tmp_path}/all/"
    inputs = two_inputs(tmp_path)
    arguments = ["convert", *map(str, inputs), output, "--to", "jsonl", "--threads", "1", "--json"]
    assert main(arguments) == ExitCode.DAMAGED
    assert main([*arguments, "--options", "gzip"]) == ExitCode.EXISTS
    assert main(arguments) == ExitCode.DAMAGED  # not that something exists
    assert main([*arguments, "--options", "gzip", "--force"]) == ExitCode.DAMAGED
    assert main(arguments) == ExitCode.EXISTS
    found = names(server) if place == "bucket" else (tmp_path / "all").iterdir()
    assert any(".all.converting" in str(name) for name in found)
    capsys.readouterr()


def test_progress_is_shown_while_objects_are_finished():
    found = bucket_outputs.BucketOutputs(
        [outputs.Shard("s3://bucket/x", (0,))], "s3://bucket/x", None, {}, force=False
    )

    class Finishing(list):
        """Another thread finishes an object while this one is counted."""

        def __getitem__(self, at):
            found._done[str(len(found._done))] = [1, [1]]
            return super().__getitem__(at)

    found._done = {str(number): [1, Finishing([2])] for number in range(2)}
    assert found.num_sent() == 4


def test_an_interruption_during_the_last_request(tmp_path, server):
    """The object is there, and is this conversion's, which replaces it."""
    inputs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path in inputs:
        write_lines(path, 20)
    answer, slow = server._answer, []

    async def answered_late(request, body, fault, writer):
        if request.method == "PUT" and "/1.tfrecord" in request.path and not slow:
            slow.append(server._changed(request, body))
            fault = Fault(is_silent=True)
        return await answer(request, body, fault, writer)

    server._answer = answered_late
    arguments = [*inputs, "s3://bucket/out/", "--to", "tfrecord", "--threads", "1"]
    process = start(arguments, GRAINMILL_BUCKET_STALL_S="20")
    try:
        assert becomes(lambda: slow)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == ExitCode.INTERRUPTED
        assert "/bucket/out/1.tfrecord" in server.objects
        journal = journal_of(server, "out/.out")
        assert list(journal["begun"]) == ["1.tfrecord"]
        assert list(journal["done"]) == ["0.tfrecord"]
        process = start([*arguments, "--json"])
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert json.loads(out)["kept"] == 1
    finally:
        process.kill()


# Takes the 5 s for which the end of a conversion waits for its journal.
def test_an_interruption_does_not_wait_for_the_journal(tmp_path, server):
    write_lines(tmp_path / "in.jsonl", 3)
    told, fault_of = [], server._fault

    def fault(request):
        if request.path.endswith("converting"):
            told.append(request)
            if sum(one.method == "PUT" for one in told) >= 2:
                return Fault(is_silent=True)
        return fault_of(request)

    server._fault = fault
    arguments = [tmp_path / "in.jsonl", "s3://bucket/out.tfrecord"]
    process = start(arguments, GRAINMILL_BUCKET_STALL_S="30", GRAINMILL_BUCKET_DEADLINE_S="90")
    try:
        assert becomes(lambda: sum(one.method == "PUT" for one in told) >= 2)
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=80)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED
    assert time.monotonic() - began < 20


def test_an_upload_that_begins_at_the_end_is_in_the_journal(tmp_path, server):
    """All of a row group of Parquet is sent by the last call."""
    pytest.importorskip("pyarrow")
    lines = [json.dumps({"text": os.urandom(50_000).hex()}) for _ in range(150)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    server.faults += [Fault(is_silent=True, only="partNumber")] * 9
    arguments = [tmp_path / "in.jsonl", "s3://bucket/out.parquet", "--options", "uncompressed"]
    process = start(arguments, GRAINMILL_BUCKET_STALL_S="60")
    try:
        assert becomes(lambda: server.uploads)
        (upload,) = server.uploads
        assert becomes(lambda: upload[1] in journal_of(server, ".out.parquet")["begun"].values())
    finally:
        process.kill()
        process.communicate()
    server.faults.clear()
    assert main(["convert", *map(str, arguments), "--quiet"]) == 0
    assert not server.uploads
    assert names(server) == ["/bucket/out.parquet"]


def test_a_conversion_that_waits_says_that_it_lives(tmp_path, server, monkeypatch):
    monkeypatch.setattr(bucket_outputs, "_PAUSE_S", 0.05)
    monkeypatch.setattr(bucket_outputs, "_BEAT_S", 0.1)
    write_lines(tmp_path / "in.jsonl", 3)
    check, times = bucket_outputs.BucketWriting.finish, []

    def finish(self, *arguments):
        times.append(journal_of(server)["time"])
        assert becomes(lambda: journal_of(server)["time"] > times[0] + 0.3)
        check(self, *arguments)

    monkeypatch.setattr(bucket_outputs.BucketWriting, "finish", finish)
    assert main(["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]) == 0
    assert times
    assert names(server) == ["/bucket/out.tfrecord"]


@pytest.mark.parametrize("age", [100, 400])
def test_a_process_of_the_same_number_may_be_another(tmp_path, server, age):
    write_lines(tmp_path / "in.jsonl", 3)
    journal = {
        "header": {},
        "host": socket.gethostname(),
        "process": os.getppid(),
        "time": time.time() - age,
        "has_ended": False,
        "begun": {},
        "done": {},
    }
    server.put("/bucket/.out.tfrecord.converting", json.dumps(journal).encode())
    code = main(["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"])
    assert code == (ExitCode.EXISTS if age == 100 else 0)


def test_parts_that_may_not_be_removed_stop_nothing(tmp_path, server):
    write_lines(tmp_path / "in.jsonl", 3)
    journal = {
        "header": {},
        "host": "elsewhere",
        "process": 1,
        "time": 0,
        "has_ended": False,
        "begun": {"out.tfrecord": "of-another"},
        "done": {},
    }
    server.put("/bucket/.out.tfrecord.converting", json.dumps(journal).encode())
    server.uploads["/bucket/out.tfrecord", "of-another"] = {"metadata": {}}
    server.faults.append(Fault(status=403, only="DELETE .*uploadId"))
    assert main(["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]) == 0
    assert not server.faults
    assert names(server) == ["/bucket/out.tfrecord"]


def test_the_journal_is_not_written_for_each_object(tmp_path, server):
    write_lines(tmp_path / "in.jsonl", 200)
    began = time.monotonic()
    arguments = ["convert", str(tmp_path / "in.jsonl"), "s3://bucket/out.tfrecord"]
    assert main([*arguments, "--shards", "150", "--quiet"]) == 0
    seconds = time.monotonic() - began
    written = [one for one in server.requests if one.method == "PUT" and "converting" in one.path]
    assert len(written) <= 5 + seconds
