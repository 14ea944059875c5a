"""Servers that fail while files of any format are read, and objects that change."""

import time
from concurrent.futures import ThreadPoolExecutor

import effort
import pytest
from bad_files import FORMATS, LINES, made, plain
from bucket_server import BucketServer, Fault, Object, repeated

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
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "100")


@pytest.fixture
def server():
    with BucketServer() as server:
        yield server


def put(server, name, directory):
    """The URL of an intact file."""
    return put_made(server, made(name, directory))


def put_made(server, path):
    """The URL of the file that is at `path`."""
    for file in path.parent.iterdir():
        if file.is_file():
            server.put(f"/{file.name}", file.read_bytes())
    return f"{server.url}/{path.name}"


def uncached(name, url):
    options = {"cache_bytes": 0} if name == "parquet" else {}
    options |= FORMATS[name].options
    return getattr(grain.sources, FORMATS[name].source)(url, **options)


def at_once(check, cases):
    """Runs `check` with each case and a server of its own: most of the time is spent waiting."""

    def run(case):
        with BucketServer() as server:
            check(server, *case)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(run, cases))


PASSING = [
    Fault(status=503),
    Fault(cut_at=7),
    Fault(is_reset=True),
    Fault(stall_at=3),
    Fault(status=429),
]


@pytest.mark.parametrize("name", NAMES)
def test_failures_that_pass_are_repeated(tmp_path, name):
    path = made(name, tmp_path)
    expected = plain(FORMATS[name].read(path))

    def check(server, faults):
        url = put_made(server, path)
        server.faults += faults
        source = uncached(name, url)
        assert len(server.faults) < len(faults)
        server.faults.clear()
        server.faults += [*faults, None, Fault(cut_at=1)]
        assert plain(source.__getitems__(range(len(source)))) == expected
        server.faults.clear()
        assert plain(list(source)) == expected

    one_after_another = [PASSING] if effort.LONG else []
    at_once(check, [([fault],) for fault in PASSING] + [(faults,) for faults in one_after_another])


def test_failures_that_pass_are_repeated_one_after_another(server, tmp_path):
    url = put(server, "array_record", tmp_path)
    server.faults += PASSING[:3]
    source = uncached("array_record", url)
    server.faults += [*PASSING[2:], None, Fault(cut_at=1)]
    assert source.__getitems__(range(len(source))) == LINES


@pytest.mark.parametrize("name", NAMES)
def test_failures_that_stay_name_the_object_and_the_offset(tmp_path, monkeypatch, name):
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.2")
    path = made(name, tmp_path)

    def check(server, fault, text):
        url = put_made(server, path)
        late = repeated(lambda: uncached(name, url))
        server.always = fault

        def fails():
            started = time.monotonic()
            place = rf"{url}: read: \d+ bytes at offset \d+: "
            with pytest.raises(OSError, match=place) as caught:
                late[len(late) - 1]
            assert text in str(caught.value)
            assert time.monotonic() - started < 50  # and not the 100 s of other tests

        repeated(fails)
        with pytest.raises(OSError, match=url):
            FORMATS[name].open(url)
        server.always = None
        assert len(repeated(lambda: late.__getitems__(range(len(late))))) == len(LINES)

    at_once(check, STAYING.values())


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
    output = tmp_path / "out" / "out.jsonl"
    for command in (["info", url], ["verify", url], ["convert", url, str(output)]):
        for how, (fault, _) in STAYING.items():
            # The first request succeeds, and what follows does not.
            for begin in ([], [None], [None, None]):
                # The shortest pause before a request is repeated is 0.05 s, so that most are not.
                is_repeated = effort.LONG or (how == "503" and len(begin) == 1)
                monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.2" if is_repeated else "0.04")
                monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.1" if is_repeated else "0.03")
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
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "100")
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "20")
    server.always = None
    server.faults.clear()
    assert main(["convert", url, str(output), "--from", FORMATS[name].command]) == ExitCode.OK
    assert len(output.read_bytes().splitlines()) == len(LINES)
