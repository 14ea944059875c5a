"""What servers may not make this machine do: redirects, endless and slow answers, odd names."""

import asyncio
import itertools
import os
import re
import socket
import stat

import pytest
from bucket_server import BucketServer, Fault, Object, repeated
from moto_server import use_s3

import grainmill as grain
from grainmill import _native
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource, JsonLinesDataSource, expand_paths

LINES = [b'{"number": %d}' % number for number in range(3000)]
CONTENT = b"\n".join(LINES) + b"\n"


def records(source):
    """All of them, many in flight."""
    return source.__getitems__(range(len(source)))


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GRAINMILL_BUCKET_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "caches"))


class Server(BucketServer):
    """A server that may redirect, drip, and list whatever it likes.

    Attributes:
        redirect: What a path is redirected to.
        status: Of a redirect.
        drip: (bytes, seconds): so much of a part of an object it sends at a time.
        page: What it answers to a request for a page of a list; it gets the token.
    """

    redirect = page = drip = None
    status = 307

    async def _answer(self, request, body, fault, writer):
        where = self.redirect and self.redirect(request.path)
        if where:
            return await self._send(writer, self.status, b"", {"Location": where})
        return await super()._answer(request, body, fault, writer)

    def _listing(self, request):
        if self.page is None:
            return super()._listing(request)
        names, following = self.page(request.query.get("continuation-token", ""))
        keys = "".join(
            f"<Contents><Key>{name}</Key><Size>1</Size><ETag>e</ETag>"
            "<LastModified>2023-11-14T22:13:20.000Z</LastModified></Contents>"
            for name in names
        )
        more = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
        is_cut = str(bool(following)).lower()
        text = f"<IsTruncated>{is_cut}</IsTruncated>{more}{keys}"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()

    async def _send(self, writer, status, body, headers, *, length=None, fault=None):
        if self.drip is None or status != 206:
            return await super()._send(writer, status, body, headers, length=length, fault=fault)
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = ["HTTP/1.1 206 Part", *lines, f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(head).encode())
        count, pause_s = self.drip
        for begin in range(0, len(body), count):
            writer.write(body[begin : begin + count])
            await writer.drain()
            await asyncio.sleep(pause_s)
        return True


@pytest.fixture
def server():
    with Server() as server:
        for path in ("/bucket/x.jsonl", "/x.jsonl"):
            server.put(path, CONTENT)
        yield server


@pytest.fixture
def other():
    with BucketServer() as other:
        for path in ("/bucket/x.jsonl", "/x.jsonl"):
            other.put(path, CONTENT)
        yield other


@pytest.fixture
def s3(server, monkeypatch):
    use_s3(monkeypatch, server.port)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
    return "s3://bucket/x.jsonl"


# --- redirects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_requests_with_credentials_stay_with_their_server(s3, server, other, status, host):
    server.redirect = lambda path: f"http://{host}:{other.port}{path}"
    server.status = status
    for call in (
        lambda: JsonLinesDataSource(s3),
        lambda: _native.object_identities([s3]),
        lambda: _native.ObjectWriter("s3://bucket/new").close(),
        lambda: _native.remove_object("s3://bucket/x.jsonl"),
    ):
        with pytest.raises(OSError, match=r"redirected to .*, which is not followed since"):
            call()
    assert not other.requests


def test_a_bucket_may_redirect_within_its_server(s3, server):
    server.put("/bucket/there.jsonl", CONTENT)
    del server.objects["/bucket/x.jsonl"]
    moved = f"{server.url}/bucket/there.jsonl"
    server.redirect = lambda path: moved if path.endswith("/x.jsonl") else None
    assert records(JsonLinesDataSource(s3)) == LINES


def test_a_file_may_be_on_another_server_which_gets_no_secrets(server, other):
    server.redirect = lambda path: f"{other.url}{path}"
    host = server.url.partition("://")[2]
    source = JsonLinesDataSource(f"http://user:password@{host}/x.jsonl?signature=of-the-first")
    assert records(source) == LINES
    for request in other.requests:
        told = [*request.query.items(), *request.headers.items()]
        assert not [text for pair in told for text in pair if "of-the-first" in text]
        assert "authorization" not in request.headers
        assert "referer" not in request.headers


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("file:///etc/passwd", "which is not of HTTP"),
        ("ftp://host/x", "which is not of HTTP"),
        ("/x.jsonl", "after more redirects than are followed"),
    ],
)
def test_other_redirects_are_errors_at_once(server, where, why):
    server.redirect = lambda _: where
    with pytest.raises(OSError, match=re.escape(f"redirected to {where}, {why}")):
        JsonLinesDataSource(f"{server.url}/x.jsonl")
    assert len(server.requests) <= 12


# --- slow and endless answers ------------------------------------------------------------------


def test_a_server_that_drips_is_given_up(server, monkeypatch):
    monkeypatch.setenv("GRAINMILL_BUCKET_STALL_S", "0.2")
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.5")
    source = repeated(lambda: JsonLinesDataSource(f"{server.url}/x.jsonl"))
    server.drip = (1, 0.05)
    with pytest.raises(OSError, match=r"only \d+ bytes in 0.2 s, after \d+ of \d+ bytes"):
        source.__getitems__(range(0, 3000, 100))
    monkeypatch.setenv("GRAINMILL_BUCKET_MIN_BYTES_PER_S", "0")
    server.drip = None
    source = repeated(lambda: JsonLinesDataSource(f"{server.url}/x.jsonl"))
    server.drip = (10, 0.05)
    assert repeated(lambda: source[3]) == LINES[3]


def test_the_deadline_counts_from_the_last_progress(server, monkeypatch, tmp_path):
    """A long read that breaks off, be it late or often, is not given up for how long it takes."""
    with ArrayRecordWriter(str(tmp_path / "r"), "group_size:1,uncompressed") as writer:
        for _ in range(3):
            writer.write(os.urandom(700_000))
    server.put("/r", (tmp_path / "r").read_bytes())
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "1")
    source = ArrayRecordDataSource(f"{server.url}/r")
    expected = ArrayRecordDataSource(str(tmp_path / "r"))[0]
    server.latency_s = 0.4
    server.faults += [Fault(cut_at=150_000)] * 4
    assert source[0] == expected
    assert not server.faults
    # What brings next to nothing is no progress.
    server.latency_s = 0
    server.always = Fault(cut_at=20)
    with pytest.raises(OSError, match=r"attempts in"):
        source[0]


@pytest.mark.usefixtures("s3")
def test_what_took_long_to_send_is_sent_a_second_time(server, monkeypatch):
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.5")
    server.latency_s = 0.6
    server.faults.append(Fault(reads=200_000))
    writer = _native.ObjectWriter("s3://bucket/new")
    writer.write(bytes(300_000))
    writer.close()
    assert len(server.objects["/bucket/new"].data) == 300_000


NUMBERS = itertools.count()
ENDLESS = {
    "the same page": lambda _: (["a", "b"], "token"),
    "other tokens": lambda _: (["a", "b"], f"token-{next(NUMBERS)}"),
    "two pages in turn": lambda token: (["a"], "2") if token != "2" else (["b"], "1"),
    "no objects": lambda _: ([], f"token-{next(NUMBERS)}"),
}


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", ENDLESS)
def test_lists_that_never_end_are_errors(server, name):
    server.page = ENDLESS[name]
    with pytest.raises(OSError, match=r"s3://bucket/: list: .*(never ends|does not end)"):
        expand_paths("s3://bucket/*")


@pytest.mark.usefixtures("s3")
def test_pages_without_objects_do_not_end_a_list(server):
    pages = {"": (["a"], "1"), "1": ([], "2"), "2": ([], "3"), "3": (["b"], "")}
    server.page = pages.get
    assert expand_paths("s3://bucket/*") == ["s3://bucket/a", "s3://bucket/b"]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("status", [200, 503])
def test_answers_of_any_length_are_not_kept_in_memory(server, status, monkeypatch):
    async def answer(_request, _body, _fault, writer):
        writer.write(f"HTTP/1.1 {status} Status\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        while True:
            writer.write(bytes(1 << 20))
            await writer.drain()

    monkeypatch.setattr(server, "_answer", answer)
    monkeypatch.setenv("GRAINMILL_BUCKET_DEADLINE_S", "0.1")
    with pytest.raises(OSError, match=r"s3://bucket/: list: .*limit"):
        expand_paths("s3://bucket/*")


# --- names -------------------------------------------------------------------------------------

ODD = ["d/a//f.x", "d/../e.x", "d/./e.x", "/lead.x", "d/\u00fc .x", "d/a%20b.x", "d/a&amp;b.x"]
UNREADABLE = ["s3://bucket//lead.x", "s3://bucket/d/../e.x", "s3://bucket/d/./e.x"]
UNREADABLE += ["s3://bucket/d/a//f.x"]


@pytest.mark.usefixtures("s3")
def test_objects_with_odd_names_are_listed_and_read_or_refused_one_by_one(server):
    readable = ["d/ok.x", "d/\u00fc .x", "d/a%20b.x", "d/a&b.x"]
    for name in readable:
        server.put(f"/bucket/{name}", CONTENT)
    server.page = lambda _: (["d/", "d/ok.x", *ODD, "d/sub/"], "")
    found = expand_paths("s3://bucket/**")
    assert found == sorted([*(f"s3://bucket/{name}" for name in readable), *UNREADABLE])
    for url in found:
        if url in UNREADABLE:
            with pytest.raises(ValueError, match=re.escape(f"{url}: objects whose names begin")):
                JsonLinesDataSource(url)
        else:
            assert records(JsonLinesDataSource(url)) == LINES


@pytest.mark.usefixtures("s3")
def test_markers_of_folders_are_no_files(server):
    server.page = lambda _: (["d/", "d/a.jsonl", "d/sub/", "d/sub/x.jsonl"], "")
    assert expand_paths("s3://bucket/d/") == ["s3://bucket/d/a.jsonl"]
    assert expand_paths("s3://bucket/d/*") == ["s3://bucket/d/a.jsonl"]
    both = ["s3://bucket/d/a.jsonl", "s3://bucket/d/sub/x.jsonl"]
    assert expand_paths("s3://bucket/d/**") == both


def test_hosts_may_be_addresses_of_version_6(server, monkeypatch):
    if not socket.has_ipv6:
        pytest.skip("no IPv6")

    async def start():
        started = await asyncio.start_server(forward, "::1", 0)
        return started, started.sockets[0].getsockname()[1]

    async def forward(reader, writer):
        await server._serve(reader, writer)

    try:
        started, port = asyncio.run_coroutine_threadsafe(start(), server._loop).result(60)
    except OSError:
        pytest.skip("no IPv6")
    url = f"http://[::1]:{port}/x.jsonl"
    assert expand_paths(url) == [url]
    assert expand_paths(f"{url}[3:5]") == [f"{url}[3:5]"]
    assert records(JsonLinesDataSource(url)) == LINES
    assert records(JsonLinesDataSource(f"{url}[3:5]")) == LINES[3:5]
    use_s3(monkeypatch, server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://[::1]:{port}")
    assert records(JsonLinesDataSource("s3://bucket/x.jsonl")) == LINES
    server._loop.call_soon_threadsafe(started.close)


def test_a_query_is_no_pattern(server):
    for query in ("a[]=1", "x=*", "mail=a@3.com", "y=[0-9]"):
        url = f"{server.url}/x.jsonl?{query}"
        assert expand_paths(url) == [url]
        assert records(JsonLinesDataSource(url)) == LINES
    with pytest.raises(ValueError, match="does not list"):
        expand_paths(f"{server.url}/*.jsonl?x=1")


# --- files -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="modes")
def test_what_is_kept_of_objects_is_the_users_alone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_DIR", str(tmp_path / "blocks"))
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_BYTES", str(2 << 20))
    ds = grain.MapDataset.source(JsonLinesDataSource(f"{server.url}/x.jsonl"))
    list(ds.cache(str(tmp_path / "elements")))
    list(ds.to_iter_dataset().cache(str(tmp_path / "sequence")))
    list(grain.MapDataset.range(3).cache(str(tmp_path / "numbers")))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        above = [path, *(each for each in path.parents if each.is_relative_to(tmp_path))]
        is_open = all(each.stat().st_mode & stat.S_IROTH for each in above if each != tmp_path)
        assert is_open == path.is_relative_to(tmp_path / "numbers"), path


def test_no_home_is_no_cache(server, tmp_path, monkeypatch):
    """An empty variable stood for the root of the file system."""
    for name in ("GRAINMILL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    pwd = pytest.importorskip("pwd")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(("", "", 0, 0, "", "", "")))
    assert records(JsonLinesDataSource(f"{server.url}/x.jsonl")) == LINES
    entry = ("", "", 0, 0, "", str(tmp_path), "")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(entry))
    assert records(JsonLinesDataSource(f"{server.url}/x.jsonl")) == LINES
    assert list((tmp_path / ".cache/grainmill/index").iterdir())


def test_objects_of_one_length_and_another_query_are_not_mixed_up(server, tmp_path, monkeypatch):
    """Where tags and times tell nothing, the query may say which file is meant."""
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_DIR", str(tmp_path / "blocks"))
    monkeypatch.setenv("GRAINMILL_BUCKET_CACHE_BYTES", str(2 << 20))
    one, two = CONTENT, CONTENT.replace(b"number", b"figure")
    answer = server._answer

    async def by_query(request, body, fault, writer):
        data = two if request.query.get("file") == "2" else one
        server.objects["/get"] = Object(data, '"same"', 1_700_000_000)
        return await answer(request, body, fault, writer)

    monkeypatch.setattr(server, "_answer", by_query)
    for query, data in (("file=1", one), ("file=2", two), ("file=1&sig=a", one)):
        source = JsonLinesDataSource(f"{server.url}/get?{query}")
        assert records(source) == data.splitlines()
