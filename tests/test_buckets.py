"""Files in buckets and on servers: equal to local ones, whatever the server does meanwhile."""

import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import effort
import moto_server
import numpy as np
import pytest
from bucket_server import BucketServer, Fault, repeated
from moto_server import CREDENTIALS, client_of, put, use_s3

import grainmill as grain
from grainmill import _native
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

HERE = Path(__file__).parent
LENGTHS = np.random.default_rng(0).integers(0, 3000, 200).tolist()


def record(number, length):
    return np.random.default_rng(number).bytes(length)


def file_of(path, records, options="group_size:1,uncompressed"):
    with ArrayRecordWriter(str(path), options) as writer:
        for item in records:
            writer.write(item)
    return path.read_bytes()


@pytest.fixture(scope="module")
def records():
    return [record(number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def content(records, tmp_path_factory):
    return file_of(tmp_path_factory.mktemp("buckets") / "file", records)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GRAINMILL_BUCKET_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server(content):
    with BucketServer() as server:
        server.put("/bucket/dir/file", content)
        yield server


@pytest.fixture
def s3(server, monkeypatch):
    """A URL in a bucket of `server`."""
    use_s3(monkeypatch, server.port)
    return "s3://bucket/dir/file"


# --- a real server of S3 -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto():
    """The port of a server of S3 in its own process."""
    with moto_server.running() as port:
        yield port


@pytest.fixture(scope="module")
def shards(moto, records, tmp_path_factory):
    """URLs of three files in the bucket."""
    folder = tmp_path_factory.mktemp("shards")
    urls = []
    options = ["group_size:1,uncompressed", "group_size:7,zstd:3", "group_size:1"]
    for number, options_text in enumerate(options):
        name = f"data/part {number}-of-3"
        data = file_of(folder / str(number), records[number::3], options_text)
        put(moto, name, data)
        urls.append(f"s3://bucket/{name}")
    return urls


@pytest.fixture
def s3_shards(moto, shards, monkeypatch):
    use_s3(monkeypatch, moto)
    return shards


def test_objects_are_written_to_s3(moto, tmp_path, monkeypatch, capsys):
    """By a writer, and by `convert`, in several parts; failed ones leave none of them."""
    use_s3(monkeypatch, moto)
    client = client_of(moto)
    records = [record(number, 1 << 20) for number in range(20)]
    with ArrayRecordWriter("s3://bucket/out/a.array_record", "uncompressed") as writer:
        for item in records:
            writer.write(item)
    source = ArrayRecordDataSource("s3://bucket/out/a.array_record")
    assert [source[at] for at in range(len(source))] == records
    convert = ["convert", "s3://bucket/out/a.array_record", "s3://bucket/out/b.tfrecord"]
    assert main([*convert, "--verify"]) == ExitCode.OK
    local = tmp_path / "b.tfrecord"
    assert main([*convert[:2], str(local)]) == ExitCode.OK
    written = client.get_object(Bucket="bucket", Key="out/b.tfrecord")
    assert written["Body"].read() == local.read_bytes()
    assert main([*convert, "--options", "gzip"]) == ExitCode.EXISTS
    assert "out/b.tfrecord: exists already" in capsys.readouterr().err

    def attempt():
        with ArrayRecordWriter("s3://bucket/out/c.array_record", "uncompressed") as writer:
            for item in records:
                writer.write(item)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempt()
    # The service refuses to replace what has appeared meanwhile.
    put(moto, "out/d", b"mine")
    writer = _native.ObjectWriter("s3://bucket/out/e", replaces=False)
    writer.write(bytes(20 << 20))
    put(moto, "out/e", b"mine")
    with pytest.raises(FileExistsError):
        writer.close()
    writer = _native.ObjectWriter("s3://bucket/out/d", replaces=False)
    writer.write(b"other")
    with pytest.raises(FileExistsError):
        writer.close()
    found = client.list_objects_v2(Bucket="bucket", Prefix="out/")["Contents"]
    names = ["out/a.array_record", "out/b.tfrecord", "out/d", "out/e"]
    assert [entry["Key"] for entry in found] == names
    assert found[2]["Size"] == found[3]["Size"] == 4
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")


def test_records_in_s3_equal_those_of_local_files(s3_shards, records):
    source = ArrayRecordDataSource(s3_shards)
    expected = [item for number in range(3) for item in records[number::3]]
    assert len(source) == len(expected)
    order = np.random.default_rng(1).permutation(len(expected)).tolist()
    assert source.__getitems__(order) == [expected[index] for index in order]
    assert source[5] == expected[5]
    assert list(source) == expected
    again = pickle.loads(pickle.dumps(source))
    assert again[11] == expected[11]
    assert repr(again) == repr(source)


def test_ranges_and_single_files_of_s3_are_read(s3_shards, records):
    source = ArrayRecordDataSource([f"{s3_shards[1]}[3:20]"])
    assert list(source) == records[1::3][3:20]
    with ArrayRecordReader(s3_shards[1]) as reader:
        assert reader.ok()
        assert reader.read_all() == records[1::3]
        assert reader.read(2, 5) == records[1::3][2:5]
    missing = ArrayRecordReader("s3://bucket/missing")
    assert not missing.ok()
    with pytest.raises(RuntimeError, match="s3://bucket/missing"):
        len(missing)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pipeline_over_s3_is_shuffled_resumed_and_equal_to_a_local_one(
    s3_shards, records, tmp_path, num_workers
):
    local = []
    for number, url in enumerate(s3_shards):
        local.append(str(tmp_path / url.rpartition("/")[2]))
        file_of(Path(local[-1]), records[number::3])

    def pipeline(paths):
        source = ArrayRecordDataSource(paths)
        ds = grain.MapDataset.source(source).shuffle(seed=3)[:80].map(len).repeat(2).batch(8)
        return ds.to_iter_dataset(grain.ReadOptions(num_workers=num_workers))

    expected = [batch.tolist() for batch in pipeline(local)]
    iterator = iter(pipeline(s3_shards))
    found, states = [], []
    for batch in iterator:
        found.append(batch.tolist())
        states.append(iterator.get_state())
    assert found == expected
    for step in (13, len(states) - 2):
        other = iter(pipeline(s3_shards))
        other.set_state(states[step])
        assert next(other).tolist() == expected[step + 1]


def test_objects_of_s3_are_listed(s3_shards):
    listed = _native.list_objects("s3://bucket/data/part")
    assert [url for url, _ in listed] == s3_shards
    assert all(size > 0 for _, size in listed)
    assert _native.list_objects("s3://bucket/data/part 1") == [listed[1]]
    assert _native.list_objects("s3://bucket/other") == []
    with pytest.raises(FileNotFoundError, match="s3://nowhere/"):
        _native.list_objects("s3://nowhere/")


def test_index_file_has_objects_too(s3_shards, records, tmp_path):
    index = tmp_path / "index"
    source = ArrayRecordDataSource(s3_shards, index=index)
    assert len(source) == len(records)
    assert set(json.loads(index.read_bytes().partition(b"\n")[2])["paths"]) == set(s3_shards)
    assert ArrayRecordDataSource(s3_shards, index=index)[0] == records[0]


@pytest.mark.usefixtures("s3_shards")
def test_object_of_s3_that_changes_is_an_error(moto, records, tmp_path):
    url = "s3://bucket/changing"
    put(moto, "changing", file_of(tmp_path / "1", records))
    source = ArrayRecordDataSource(url)
    assert source[0] == records[0]
    put(moto, "changing", file_of(tmp_path / "2", records[::-1]))
    with pytest.raises(_native.GrainmillError, match=r"s3://bucket/changing: .*after it had been"):
        source[1]
    assert ArrayRecordDataSource(url)[0] == records[-1]


# --- other services ----------------------------------------------------------------------------


def test_google_objects_are_read_and_listed(server, records, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{server.port}")
    assert list(ArrayRecordDataSource("gs://bucket/dir/file")) == records
    assert [url for url, _ in _native.list_objects("gs://bucket/d")] == ["gs://bucket/dir/file"]
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    account = {
        "gcs_base_url": server.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
    }
    account["private_key_id"] = ""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    assert ArrayRecordDataSource("gs://bucket/dir/file")[7] == records[7]


def test_azure_objects_are_read_and_listed(server, records, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", server.url)
    assert list(ArrayRecordDataSource("az://bucket/dir/file")) == records
    assert _native.list_objects("az://bucket/dir") == [
        ("az://bucket/dir/file", len(server.objects["/bucket/dir/file"].data))
    ]


def test_files_of_a_web_server_are_read(server, records):
    server.put("/a b/ä", server.objects["/bucket/dir/file"].data)
    for path in ("/bucket/dir/file", "/a%20b/%C3%A4", "/bucket/dir/file?token=1#part"):
        assert list(ArrayRecordDataSource(server.url + path)) == records
    assert server.requests[-1].query == {"token": "1"}
    with pytest.raises(ValueError, match="does not list"):
        _native.list_objects(server.url + "/bucket/")


def test_local_files_and_objects_are_mixed(s3, server, records, content, tmp_path):
    (tmp_path / "local").write_bytes(content)
    paths = [str(tmp_path / "local"), s3, f"{server.url}/bucket/dir/file"]
    assert list(ArrayRecordDataSource(paths)) == records * 3


@pytest.mark.usefixtures("s3")
def test_long_listings_have_pages(server):
    server.page_len = 7
    for number in range(30):
        server.put(f"/bucket/many/{number:02}", b"x" * number)
    expected = [(f"s3://bucket/many/{number:02}", number) for number in range(30)]
    assert _native.list_objects("s3://bucket/many/") == expected


def test_credentials_come_from_the_profile_of_the_user(server, tmp_path, monkeypatch, records):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = WRONG\naws_secret_access_key = x\n"
        "[work]\naws_access_key_id = FROMFILE\naws_secret_access_key = x\n"
    )
    config = f"[profile work]\nregion = eu-north-1\nendpoint_url = {server.url}\n"
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert ArrayRecordDataSource("s3://bucket/dir/file")[1] == records[1]
    signed = server.requests[-1].headers["authorization"]
    assert "FROMFILE" in signed
    assert "eu-north-1" in signed


# --- servers that fail -------------------------------------------------------------------------

PASSING = {
    "429": Fault(status=429),
    "503": Fault(status=503),
    "500": Fault(status=500),
    "wait": Fault(status=503, retry_after=1),
    "reset": Fault(is_reset=True),
    "truncated": Fault(cut_at=500),
    "truncated at once": Fault(cut_at=0),
    "stalled": Fault(stall_at=1000),
    "silent": Fault(is_silent=True),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("is_first", [True, False], ids=["opening", "reading"])
def test_failures_that_pass_are_repeated(  # noqa: PLR0917
    s3, server, records, monkeypatch, fault, is_first
):
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.15")
    if is_first:
        server.faults += [fault]
        source = ArrayRecordDataSource(s3)
    else:
        source = ArrayRecordDataSource(s3)
        server.faults += [fault] if fault.retry_after else [fault, None, fault, fault]
    started = time.monotonic()
    assert list(source.__getitems__(range(200))) == records
    assert not server.faults
    if fault.retry_after and not is_first:
        assert time.monotonic() - started >= fault.retry_after


def test_answer_that_breaks_off_continues_where_it_ended(s3, server, records):
    source = ArrayRecordDataSource(s3)
    longest = max(range(200), key=LENGTHS.__getitem__)
    source[0]
    before = len(server.requests)
    server.faults += [Fault(cut_at=700)]
    assert source[longest] == records[longest]
    starts = [
        int(re.match(r"bytes=(\d+)-", request.headers["range"])[1])
        for request in server.requests[before:]
    ]
    assert starts[1] == starts[0] + 700


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(status=503), "503"),
        (Fault(status=429), "refused on purpose: 429"),
        (Fault(cut_at=10), "after 10 of"),
        (Fault(stall_at=10), "nothing for 0.2 s after 10 of"),
        (Fault(is_silent=True), "no answer within 0.2 s"),
        (Fault(is_reset=True), "attempts in"),
    ],
)
def test_failures_that_stay_are_errors_after_the_deadline(s3, server, monkeypatch, fault, text):
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.2")
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.6")
    source = repeated(lambda: ArrayRecordDataSource(s3))
    server.always = fault

    def fails():
        place = r"s3://bucket/dir/file: read: \d+ bytes at offset \d+: "
        with pytest.raises(OSError, match=place) as caught:
            source[3]
        assert text in str(caught.value)

    repeated(fails)
    server.always = None
    assert len(repeated(lambda: source[3])) == LENGTHS[3]


@pytest.mark.parametrize(
    ("status", "kind"), [(403, PermissionError), (401, PermissionError), (400, OSError)]
)
def test_refusals_are_errors_at_once(s3, server, status, kind):
    server.always = Fault(status=status)
    with pytest.raises(kind, match=f"s3://bucket/dir/file: open: .*on purpose: {status}"):
        ArrayRecordDataSource(s3)
    assert len(server.requests) <= 2


@pytest.mark.usefixtures("s3")
def test_objects_that_are_missing_are_files_that_are_missing(server):
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none: open: .*NoSuchKey"):
        ArrayRecordDataSource("s3://bucket/none")
    assert len(server.requests) == 1


def test_server_that_is_not_there_is_an_error(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        use_s3(monkeypatch, free.getsockname()[1])
        monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.5")
        with pytest.raises(OSError, match=r"s3://bucket/x: open: .*refused .*attempts"):
            ArrayRecordDataSource("s3://bucket/x")


def test_server_without_ranges_is_an_error_that_says_so(content):
    with BucketServer(has_ranges=False) as server:
        server.put("/file", content)
        with pytest.raises(OSError, match="does not serve ranges"):
            ArrayRecordDataSource(f"{server.url}/file")


@pytest.mark.parametrize("has_tags", [True, False])
def test_object_that_changes_is_an_error(content, records, tmp_path, has_tags):
    with BucketServer(has_tags=has_tags) as server:
        server.put("/file", content)
        source = ArrayRecordDataSource(f"{server.url}/file")
        assert source[4] == records[4]
        server.put("/file", file_of(tmp_path / "other", records[::-1]))
        with pytest.raises(_native.GrainmillError, match="overwritten or replaced after"):
            source[4]
        server.put("/file", content[:2000])
        with pytest.raises(_native.GrainmillError, match="overwritten or replaced after"):
            source[4]


@pytest.mark.usefixtures("s3")
def test_damaged_small_and_empty_objects_are_errors_as_local_files_are(server, content, tmp_path):
    bad = {"empty": b"", "short": content[:50], "text": b"no records " * 30_000}
    bad["damaged"] = content[:100_000] + bytes(9) + content[100_009:]
    for name, data in bad.items():
        server.put(f"/bucket/{name}", data)
        (tmp_path / name).write_bytes(data)
        messages = []
        for path in (str(tmp_path / name), f"s3://bucket/{name}"):
            with pytest.raises((_native.GrainmillError, OSError)) as e:
                ArrayRecordDataSource(path).__getitems__(range(200))
            messages.append(str(e.value).removeprefix(path))
        assert messages[0] == messages[1]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("url", ["s3://", "s3://bucket", "gs://b/../x", "http:///x"])
def test_urls_without_an_object_are_refused(url):
    with pytest.raises(ValueError, match=re.escape(url)):
        ArrayRecordDataSource(url)


@pytest.mark.usefixtures("s3")
def test_urls_of_directories_stand_for_their_files(server, content, records):
    with pytest.raises(FileNotFoundError, match=r"\.array_record .*in: 's3://bucket/dir/'"):
        ArrayRecordDataSource("s3://bucket/dir/")
    server.put("/bucket/dir/one.array_record", content)
    server.put("/bucket/dir/two.array_record", content)
    assert list(ArrayRecordDataSource("s3://bucket/dir/")) == records * 2
    assert list(ArrayRecordDataSource("s3://bucket/d*/t*.array_record")) == records


@pytest.mark.parametrize(
    "name", ["DEADLINE_S", "STALL_S", "MIN_BYTES_PER_S", "MAX_IN_FLIGHT", "CACHE_BYTES"]
)
def test_settings_that_are_no_numbers_are_refused(s3, monkeypatch, name):
    monkeypatch.setenv(f"GRAINMILL_BUCKET_{name}", "some")
    with pytest.raises(ValueError, match=f"GRAINMILL_BUCKET_{name} must be .*'?some"):
        ArrayRecordDataSource(s3)


@pytest.mark.parametrize("endpoint", ["http://", "localhost:80", "http://a b", "ftp://host"])
def test_endpoints_that_are_no_urls_are_refused(monkeypatch, endpoint):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "a b")
    for url in ("s3://bucket/x", "gs://bucket/x"):
        with pytest.raises(OSError, match="endpoint must be a URL"):
            ArrayRecordDataSource(url)
    for url in ("http://a b/x", "http://h:port/x"):
        with pytest.raises(ValueError, match=f"{url}: invalid"):
            ArrayRecordDataSource(url)


def test_messages_do_not_show_signatures(server):
    with pytest.raises(FileNotFoundError) as e:
        ArrayRecordDataSource(f"{server.url}/none?X-Amz-Signature=secret")
    assert "secret" not in str(e.value)
    assert f"{server.url}/none?..." in str(e.value)


# --- many requests -----------------------------------------------------------------------------


def test_reads_are_in_flight_together_exact_and_merged(s3, server, records):
    source = ArrayRecordDataSource(s3)
    server.requests.clear()
    server.max_active, server.keeps = 0, 4
    indices = list(range(0, 200, 25))
    assert source.__getitems__(indices) == [records[index] for index in indices]
    assert server.max_active >= 4
    # Records that are far apart are requests of their own, of about their length.
    lengths = []
    for request in server.requests:
        first, last = re.match(r"bytes=(\d+)-(\d+)", request.headers["range"]).groups()
        lengths.append(int(last) + 1 - int(first))
    assert sum(lengths) < sum(len(records[index]) for index in indices) + 200 * len(indices)
    server.requests.clear()
    source.__getitems__(range(200))
    assert len(server.requests) <= 4


@pytest.mark.usefixtures("s3")
def test_large_records_are_read_in_parts(server, tmp_path):
    large = np.random.default_rng(2).bytes(30 << 20)
    server.put("/bucket/large", file_of(tmp_path / "large", [b"x", large]))
    source = ArrayRecordDataSource("s3://bucket/large")
    source[0]
    before, server.max_active, server.keeps = len(server.requests), 0, 3
    assert source[1] == large
    assert len(server.requests) - before >= 4
    assert server.max_active >= 3


def test_thousands_of_objects_are_opened_many_at_a_time(tmp_path, monkeypatch):
    count = effort.cases(2_000, 10_000)
    path = tmp_path / "small"
    file_of(path, [b"a", b"b"])
    program = [sys.executable, str(HERE / "bucket_server.py"), str(path)]
    program += ["--count", str(count), "--keeps", "64"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        use_s3(monkeypatch, int(process.stdout.readline()))
        monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "60")  # requests would be repeated
        urls = [url for url, _ in _native.list_objects("s3://bucket/data/")]
        assert len(urls) == count
        source = ArrayRecordDataSource(urls)
        assert len(source) == 2 * count
        process.stdin.write("\n")
        process.stdin.flush()
        max_active, num_requests = map(int, process.stdout.readline().split())
        process.stdin.close()
    # One request each, beside pages of a thousand names.
    assert num_requests == count + count // 1000
    assert max_active >= 64


# --- the cache of blocks -----------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_BYTES", str(64 << 20))
    return tmp_path / "cache"


def num_reads(server):
    return sum("if-match" in request.headers for request in server.requests)


def test_cached_blocks_are_not_requested_again(s3, server, records, cache):
    assert ArrayRecordDataSource(s3).__getitems__(range(200)) == records
    assert num_reads(server) > 0
    server.requests.clear()
    assert ArrayRecordDataSource(s3).__getitems__(range(200)) == records
    assert num_reads(server) == 0
    assert len(os.listdir(cache)) == 1  # noqa: PTH208


@pytest.mark.usefixtures("cache")
def test_processes_share_cached_blocks(s3, server, records):
    assert list(ArrayRecordDataSource(s3)) == records
    server.requests.clear()
    program = (
        "import sys; from grainmill.sources import ArrayRecordDataSource as Source\n"
        "source = Source(sys.argv[1])\n"
        "print(sum(map(len, source)))"
    )
    command = [sys.executable, "-c", program, s3]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(LENGTHS)
    assert num_reads(server) == 0


def test_damaged_blocks_are_requested_again(s3, server, records, cache):
    ArrayRecordDataSource(s3).__getitems__(range(200))
    file = next(cache.iterdir())
    size = file.stat().st_size
    for damage in ("bits", "zeros", "cut"):
        data = bytearray(file.read_bytes())
        if damage == "bits":
            for at in np.flatnonzero(np.frombuffer(data, np.uint8))[::5000].tolist():
                data[at] ^= 4
        file.write_bytes({"bits": data, "zeros": bytes(size), "cut": data[: size // 3]}[damage])
        server.requests.clear()
        assert ArrayRecordDataSource(s3).__getitems__(range(200)) == records
        assert num_reads(server) > 0


@pytest.mark.usefixtures("cache")
def test_object_that_changed_is_not_read_from_the_cache(s3, server, records, tmp_path):
    assert ArrayRecordDataSource(s3)[0] == records[0]
    server.put("/bucket/dir/file", file_of(tmp_path / "other", records[::-1]))
    assert ArrayRecordDataSource(s3).__getitems__(range(200)) == records[::-1]


def test_cache_keeps_its_size(s3, server, tmp_path, cache, monkeypatch):
    limit = 4 << 20
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_BYTES", str(limit))
    many = [record(number, 100_000) for number in range(150)]
    server.put("/bucket/many", file_of(tmp_path / "many", many))
    for _ in range(2):
        assert list(ArrayRecordDataSource("s3://bucket/many")) == many
        (file,) = cache.iterdir()
        assert file.stat().st_size <= limit
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_BYTES", "1000")
    with pytest.raises(ValueError, match="needs at least"):
        ArrayRecordDataSource(s3)


def test_cache_that_cannot_be_made_is_an_error(s3, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"create a cache of blocks: .*file"):
        ArrayRecordDataSource(s3)


@pytest.mark.usefixtures("cache")
def test_cache_on_a_full_disk_is_done_without(s3):
    # A process that may write no more than a block cannot extend the file of the cache.
    program = (
        "import resource, signal, sys\n"
        "from grainmill.sources import ArrayRecordDataSource as Source\n"
        "first = Source(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "print(sum(map(len, first)))"
    )
    command = [sys.executable, "-c", program, s3]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(LENGTHS)


# --- processes ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_forked_process_has_connections_of_its_own(s3, records):
    source = ArrayRecordDataSource(s3)
    assert source[0] == records[0]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ok = source.__getitems__([5, 150]) == [records[5], records[150]]
            os.write(write_end, b"y" if ok else b"n")
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"y"
    os.close(read_end)
    os.waitpid(child, 0)
    assert source[1] == records[1]


def test_package_starts_no_thread_of_its_own_for_local_files(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    program = (
        "import sys, pathlib; from grainmill.sources import ArrayRecordDataSource as Source\n"
        "source = Source(sys.argv[1])\n"
        "source[0]\n"
        "names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(sum(name.startswith('grainmill-http') for name in names))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
