"""Servers that fail while files of any format are read, and objects that change."""

import time

import pytest
from bad_files import FORMATS, LINES, made, plain
from bucket_server import BucketServer, Fault, Object

import grainmill as grain
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main

# `datasets` reads files of its own from a disk.
NAMES = [name for name in FORMATS if name != "hugging_face"]
STAYING = {
    "503": (Fault(status=503), "refused on purpose: 503"),
    "429": (Fault(status=429), "refused on purpose: 429"),
    "cut": (Fault(cut_at=0), "after 0 of"),
    "stalled": (Fault(stall_at=0), "nothing for 0.1 s"),
    "reset": (Fault(is_reset=True), "attempts in"),
}


@pytest.fixture(autouse=True)
def _settings(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.1")
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "5")


@pytest.fixture
def server():
    with BucketServer() as server:
        yield server


def put(server, name, directory):
    """The URL of an intact file."""
    path = made(name, directory)
    for file in directory.iterdir():
        if file.is_file():
            server.put(f"/{file.name}", file.read_bytes())
    return f"{server.url}/{path.name}"


def uncached(name, url):
    options = {"cache_bytes": 0} if name == "parquet" else {}
    options |= FORMATS[name].options
    return getattr(grain.sources, FORMATS[name].source)(url, **options)


@pytest.mark.parametrize("name", NAMES)
def test_failures_that_pass_are_repeated(server, tmp_path, name):
    url = put(server, name, tmp_path)
    expected = plain(FORMATS[name].read(tmp_path / url.rsplit("/", 1)[1]))
    faults = [Fault(status=503), Fault(cut_at=7), Fault(is_reset=True), Fault(stall_at=3)]
    server.faults += [*faults, Fault(status=429)]
    source = uncached(name, url)
    server.faults.clear()
    server.faults += [*faults, None, Fault(cut_at=1)]
    assert plain(source.__getitems__(range(len(source)))) == expected
    server.faults.clear()
    assert plain(list(source)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_failures_that_stay_name_the_object_and_the_offset(server, tmp_path, monkeypatch, name):
    url = put(server, name, tmp_path)
    sources = {how: uncached(name, url) for how in STAYING}
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.2")
    late = uncached(name, url)
    for how, (fault, text) in STAYING.items():
        del sources[how]
        server.always = fault
        started = time.monotonic()
        with pytest.raises(OSError, match=rf"{url}: read: \d+ bytes at offset \d+: ") as caught:
            late[len(late) - 1]
        assert text in str(caught.value), how
        assert time.monotonic() - started < 5
        with pytest.raises(OSError, match=url):
            FORMATS[name].open(url)
        server.always = None
    assert len(late.__getitems__(range(len(late)))) == len(LINES)


@pytest.mark.parametrize("has_tags", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_objects_that_change_between_reads_are_errors(tmp_path, name, has_tags):
    with BucketServer(has_tags=has_tags) as server:
        url = put(server, name, tmp_path)
        source = uncached(name, url)
        place = "/" + url.rsplit("/", 1)[1]
        data = server.objects[place].data
        for changed in (data[::-1], data[: len(data) // 2], b""):
            server.put(place, changed)
            with pytest.raises(grain.GrainmillError, match=f"{url}: .*overwritten or replaced"):
                source.__getitems__(range(len(source)))
        server.put(place, data)


def test_limits_in_a_file_of_their_own_that_change_are_an_error(server, tmp_path):
    url = put(server, "bagz_separate", tmp_path)
    place = f"/limits.{url.rsplit('/', 1)[1]}"
    limits = server.objects[place].data
    server.put(place, limits[:-8])
    with pytest.raises(grain.GrainmillError, match="limits"):
        list(uncached("bagz_separate", url))
    del server.objects[place]
    with pytest.raises(FileNotFoundError, match=place):
        uncached("bagz_separate", url)


def test_index_of_an_object_is_not_used_for_another_of_the_same_length_and_time(server):
    """Lines have no checksum: by the index of another file, they would be cut anywhere."""
    line = b'{"a": "%s"}\n' % (b"x" * 89)
    ends = line * 100  # of which an index has a hash
    one, other = ends + b"{}\n" * 300 + ends, ends + b'{"b": "%s"}\n' % (b"y" * 890) + ends
    assert len(one) == len(other)
    server.put("/lines.jsonl", one)
    written = server.objects["/lines.jsonl"].written
    for data in (one, other, one):
        server.objects["/lines.jsonl"] = Object(data, f'"{hash(data)}"', written)
        source = grain.sources.JsonLinesDataSource(f"{server.url}/lines.jsonl")
        assert list(source) == data.splitlines()


@pytest.mark.parametrize("name", ["array_record", "tfrecord", "tfrecord_gzip", "bagz", "parquet"])
def test_commands_on_a_failing_server_leave_nothing(server, tmp_path, monkeypatch, capsys, name):
    url = put(server, name, tmp_path)
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.2")
    output = tmp_path / "out" / "out.jsonl"
    for command in (["info", url], ["verify", url], ["convert", url, str(output)]):
        for fault, _ in STAYING.values():
            # The first request succeeds, and what follows does not.
            for begin in ([], [None], [None, None]):
                server.faults.clear()
                server.faults += begin
                server.always = fault
                code = main([*command, "--from", FORMATS[name].command])
                said = capsys.readouterr()
                if code == ExitCode.OK:
                    assert begin
                    output.unlink(missing_ok=True)
                    continue
                assert code in {ExitCode.SYSTEM, ExitCode.DAMAGED}, said
                assert url in said.err + said.out
                assert "Traceback" not in said.err
                assert not list(output.parent.glob("*"))
                assert not list(output.parent.glob(".*"))
    server.always = None
    server.faults.clear()
    assert main(["convert", url, str(output), "--from", FORMATS[name].command]) == ExitCode.OK
    assert len(output.read_bytes().splitlines()) == len(LINES)
