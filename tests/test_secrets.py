"""Signatures, passwords and credentials are in no file, text, message or log."""

import base64
import contextlib
import json
import logging
import traceback

import pytest
from bad_files import FORMATS, made
from bucket_server import BucketServer, Fault

import grainmill as grain
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

# In every place where a URL may have one; the second is encoded in the URL.
USER, PASSWORD = "planted-user", "planted/password"
SIGNATURE, TOKEN = "planted-signature", "planted-query-token"
KEY, SESSION = "planted-secret-key", "planted-session-token"
OTHERS = ["planted-other", "planted-third"]
SECRETS = ["planted", PASSWORD, "cGxhbnRlZC11c2Vy"]  # which is how a header has the user


@pytest.fixture
def server():
    with BucketServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _settings(tmp_path, monkeypatch, server):
    variables = {
        "GRAINMILL_CACHE_DIR": str(tmp_path / "caches"),
        "GRAINMILL_BUCKET_CACHE_DIR": str(tmp_path / "blocks"),
        "GRAINMILL_BUCKET_CACHE_BYTES": str(8 << 20),
        "GRAINMILL_BUCKET_DEADLINE_S": "0.3",
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "an-access-key-id",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_SESSION_TOKEN": SESSION,
        "AWS_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


class Seen:
    """Everything that is shown: texts of objects, errors, logs and what commands print."""

    def __init__(self, capsys, caplog):
        self.texts = []
        self._capsys, self._caplog = capsys, caplog

    def add(self, *values):
        for value in values:
            self.texts += [str(value), repr(value)]

    @contextlib.contextmanager
    def fails(self, *, must=True):
        """Adds the text of the exception that the block raises."""
        try:
            yield
        except Exception as error:
            self.add(error, getattr(error, "filename", None))
            self.texts.append("".join(traceback.format_exception(error)))
        else:
            assert not must, "no error"

    def check(self, *folders):
        self.texts += [*self._capsys.readouterr(), self._caplog.text]
        for folder in folders:
            for path in folder.rglob("*"):
                self.texts.append(str(path))
                if path.is_file():
                    self.texts.append(path.read_bytes().decode("latin-1"))
        for secret in SECRETS:
            found = [text for text in self.texts if secret in text]
            assert not found, (secret, found[0][:2000])


@pytest.fixture
def seen(capsys, caplog):
    caplog.set_level(logging.DEBUG)
    return Seen(capsys, caplog)


def signed(server, name, signature=SIGNATURE):
    host = server.url.partition("://")[2]
    query = f"X-Amz-Signature={signature}&token={TOKEN}"
    return f"http://{USER}:{PASSWORD.replace('/', '%2F')}@{host}/{name}?{query}"


def put(server, kind, folder):
    """A file on the server under its signed URL."""
    folder.mkdir()
    path = made(kind, folder)
    for file in folder.iterdir():
        if file.is_file():
            server.put(f"/{file.name}", file.read_bytes())
            server.put(f"/bucket/{file.name}", file.read_bytes())
    return signed(server, path.name)


KINDS = [name for name in FORMATS if name not in {"hugging_face", "bagz_separate"}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_and_kept_of_signed_urls(server, tmp_path, seen, kind):
    url = put(server, kind, tmp_path / "made")
    open_source = lambda url: getattr(grain.sources, FORMATS[kind].source)(  # noqa: E731
        url, **FORMATS[kind].options
    )
    source = open_source(url)
    assert server.requests[-1].query == {"X-Amz-Signature": SIGNATURE, "token": TOKEN}
    assert server.requests[-1].headers["authorization"].startswith("Basic cGxhbnRlZC11c2VyOn")
    ds = grain.MapDataset.source(source).shuffle(seed=1)
    seen.add(source, ds, ds.describe(), grain.sources.expand_paths(url) and "")
    with seen.fails():
        grain.MapDataset.source(source).map(lambda _: 1 / 0)[0]
    with seen.fails():
        source[10**9]
    # A state is of the same files, whatever the signature.
    checkpoints = grain.checkpoint.CheckpointHandler()
    iterator = iter(ds.to_iter_dataset())
    next(iterator)
    (tmp_path / "work/saved").mkdir()
    checkpoints.save(tmp_path / "work/saved", iterator)
    seen.add(iterator, json.dumps(iterator.get_state()))
    again = open_source(url.replace(SIGNATURE, OTHERS[0]))
    later = iter(grain.MapDataset.source(again).shuffle(seed=1).to_iter_dataset())
    checkpoints.restore(tmp_path / "work/saved", later)
    assert repr(next(later)) == repr(next(iterator))
    # Caches, too.
    assert len(list(ds.cache(str(tmp_path / "work/elements")))) == len(source)
    cached = grain.MapDataset.source(again).shuffle(seed=1).cache(str(tmp_path / "work/elements"))
    before = len(server.requests)
    list(cached)
    assert not [one for one in server.requests[before:] if one.method != "HEAD"][2:]
    list(ds.to_iter_dataset().cache(str(tmp_path / "work/sequence")))
    command = FORMATS[kind].command
    for words in (
        ["info", url],
        ["info", "--json", url],
        ["verify", url, "--manifest", "manifest"],
        ["verify", url, "--manifest", "manifest"],
        ["head", "--json", url],
        ["convert", url, "out.jsonl", "--to", "jsonl", "--content", "json", "--json"],
    ):
        main([*words, *(["--from", command] if command else [])])
    server.faults.append(Fault(cut_at=3))
    with seen.fails(must=False):
        open_source(url.replace(SIGNATURE, OTHERS[1]))[0]
    server.always = Fault(status=503)
    with seen.fails():
        open_source(signed(server, "missing"))
    main(["convert", url, "other.array_record", "--from", command or "jsonl"])
    seen.check(tmp_path / "work", tmp_path / "caches", tmp_path / "blocks")


class Echo(BucketServer):
    """A server that answers every request with what it was sent."""

    def _fault(self, _):
        return Fault()

    async def _answer(self, request, _body, _fault, writer):
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        lines = [request.path, query, *map(str, request.headers.items())]
        text = "<Error><Code>Denied</Code>" + "\n".join(lines) + "</Error>"
        return await self._send(writer, 403, text.encode(), {})


def test_servers_that_repeat_what_they_were_sent(seen, tmp_path, monkeypatch):
    with Echo() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for url in (signed(server, "x.jsonl"), "s3://bucket/x.jsonl"):
            with seen.fails():
                grain.sources.JsonLinesDataSource(url)
            main(["info", url])
            main(["info", url, "--traceback"])
        with seen.fails():
            grain.sources.expand_paths("s3://bucket/*")
        with seen.fails(), ArrayRecordWriter("s3://bucket/x", "group_size:1") as writer:
            writer.write(b"record")
        assert any("403" in text for text in seen.texts)
    seen.check(tmp_path / "work")


def test_mistakes_in_urls(server, seen, tmp_path):
    url = signed(server, "data@5.jsonl")
    wrong = [
        url.replace("http://", "ftp://"),
        url.replace("http://", "HTTP://"),
        url.replace("%2F", "/"),
        url.replace("data@5", "*"),
        f"{url}[5:2]",
        f"{url}[0:1]",
        url.replace(str(server.port), "1"),
        url.replace("/data", "//data"),
        url.replace("/data", "/../data"),
        f"s3://{USER}:{PASSWORD}@bucket/x.jsonl",
        f"gs://{USER}@bucket/x.jsonl",
        f"abfss://container:{PASSWORD}@account/x.jsonl",
    ]
    for each in wrong:
        for make in (
            grain.sources.JsonLinesDataSource,
            grain.sources.ArrayRecordDataSource,
            grain.sources.ParquetDataSource,
            grain.sources.expand_paths,
            lambda url: list(grain.experimental.TFRecordIterDataset(url)),
            lambda url: list(grain.experimental.ParquetIterDataset(url)),
            lambda url: grain.experimental.mix_from_text(f"{url};{url}", None),
            lambda url: grain.experimental.mix_from_text(url, lambda _: 1),
            lambda url: grain.experimental.parse_mixture([url]),
            lambda url: grain.MapDataset.range(3).cache(url),
            grain.MapDataset.source,
            lambda url: grain.DataLoader(data_source=url, sampler=[]),
            grain.sources.HuggingFaceDataSource,
            lambda url: grain.sources.ArrayRecordDataSource.from_tfds_dir(url, "train"),
            ArrayRecordReader,
            lambda url: ArrayRecordWriter(url).write(b"x"),
        ):
            with seen.fails(must=False):
                make(each)
        seen.add(ArrayRecordWriter(each), grain.experimental.parse_mixture("a") and "")
        for command in ("info", "verify", "head", "index", "convert", "no-such-command"):
            with contextlib.suppress(SystemExit):
                main([command, each, *(["out"] if command == "convert" else [])])
        with contextlib.suppress(SystemExit):
            main(["convert", "in.jsonl", each])
        with contextlib.suppress(SystemExit):
            main(["info", "--from", each, "x"])
        with contextlib.suppress(SystemExit):
            main([each])
    seen.check(tmp_path / "work", tmp_path / "caches")


def test_mixtures_and_streams_name_files_without_secrets(server, seen, tmp_path):
    records = put(server, "tfrecord", tmp_path / "made")
    stream = grain.experimental.TFRecordIterDataset(records)
    seen.add(stream, stream.describe())
    text = f"{records}:0.5;{records.replace('http', 'HTTP')}:0.5"
    mixed = grain.experimental.mix_from_text(text, grain.experimental.TFRecordIterDataset)
    iterator = iter(mixed)
    next(iterator)
    seen.add(mixed, mixed.describe(), json.dumps(iterator.get_state()))
    (tmp_path / "work/saved").mkdir()
    grain.checkpoint.CheckpointHandler().save(tmp_path / "work/saved", iterator)
    rows = put(server, "parquet", tmp_path / "rows")
    seen.add(grain.experimental.ParquetIterDataset(rows))
    seen.check(tmp_path / "work", tmp_path / "caches")


def test_index_files_name_files_without_secrets(server, seen, tmp_path):
    url = put(server, "array_record", tmp_path / "made")
    source = grain.sources.ArrayRecordDataSource([url], index="index")
    before = len(server.requests)
    again = grain.sources.ArrayRecordDataSource([url.replace(SIGNATURE, OTHERS[0])], index="index")
    assert len(again) == len(source)
    assert len(server.requests) == before
    with pytest.raises(ValueError, match="differ only in the query"):
        grain.sources.ArrayRecordDataSource([url, url + "&x=1"], index="index")
    main(["index", url, "-o", "other"])
    seen.check(tmp_path / "work")


def test_one_client_serves_a_file_whose_url_is_signed_again_and_again(server, tmp_path):
    """Each has kept a client, and with it a connection, for the life of the process."""
    url = put(server, "json_lines", tmp_path / "made")
    connections = []
    serve = server._serve

    async def counted(reader, writer):
        connections.append(reader)
        await serve(reader, writer)

    server._serve = counted
    for number in range(20):
        found = grain.sources.JsonLinesDataSource(url.replace(SIGNATURE, f"planted-{number}"))
        assert found[0]
    assert {one.query["X-Amz-Signature"] for one in server.requests} >= {"planted-0", "planted-19"}


def test_journals_of_conversions(server, tmp_path, seen):
    url = put(server, "json_lines", tmp_path / "made")
    (tmp_path / "work/more.tfrecord").write_bytes(b"damaged, so that the second fails")
    assert main(["convert", url, "more.tfrecord", "out/", "--threads", "1"]) == ExitCode.DAMAGED
    assert (tmp_path / "work/out/.out.converting").exists()
    seen.check(tmp_path / "work")


def test_passwords_may_have_any_characters(server):
    server.put("/x.jsonl", b"{}\n")
    host = server.url.partition("://")[2]
    for given, expected in (("a%40b:%C3%A9%3A%25+%20", "a@b:é:%+ "), ("alone", "alone:")):
        server.requests.clear()
        grain.sources.JsonLinesDataSource(f"http://{given}@{host}/x.jsonl")
        (header,) = {r.headers["authorization"] for r in server.requests if r.path == "/x.jsonl"}
        assert base64.b64decode(header.removeprefix("Basic ")).decode() == expected


def test_seen_finds_what_is_planted(seen, tmp_path):
    """The tests above would find nothing if this did not."""
    (tmp_path / "work/file").write_text("planted")
    with pytest.raises(AssertionError):
        seen.check(tmp_path / "work")
