"""Each command with each format it takes, in files, in a bucket and on a web server."""

import bz2
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_server import BucketServer

import grainmill as grain
from grainmill._files import formats, tf_example
from grainmill._tools import console, convert, verify
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main

COUNT = 60
LINES = [json.dumps({"number": n, "text": f"text {n}"}).encode() for n in range(COUNT)]
NAMES = {
    "array_record": "in.array_record",
    "tfrecord": "in.tfrecord",
    "tfrecord-gzip": "in.tfrecord.gz",
    "jsonl": "in.jsonl",
    "jsonl-gzip": "in.jsonl.gz",
    "jsonl-xz": "in.jsonl.xz",
    "jsonl-bzip2": "in.jsonl.bz2",
    "bagz": "in.bagz",
    "parquet": "in.parquet",
    "webdataset": "in.tar",
}
BYTES = [name for name in NAMES if name not in {"parquet", "webdataset"}]
# Compressed by what only reads here.
OTHERS = {"jsonl-xz": lzma.compress, "jsonl-bzip2": bz2.compress}
TARGETS = {
    "array_record": "out.array_record",
    "tfrecord": "out.tfrecord",
    "jsonl": "out.jsonl",
    "bagz": "out.bagz",
    "parquet": "out.parquet",
}
PLACES = ["file", "s3", "http"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of each format with the same records."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "in.jsonl").write_bytes(b"\n".join(LINES) + b"\n")
    for name in BYTES:
        if name in OTHERS:
            (folder / NAMES[name]).write_bytes(OTHERS[name](b"\n".join(LINES)))
        elif name != "jsonl":
            options = ["--options", "gzip"] if name.endswith("gzip") else []
            arguments = [str(folder / "in.jsonl"), str(folder / NAMES[name]), *options, "--quiet"]
            assert main(["convert", *arguments]) == 0
    pq.write_table(pa.Table.from_pylist(list(map(json.loads, LINES))), folder / "in.parquet")
    with tarfile.open(folder / "in.tar", "w") as tar:
        for number, line in enumerate(LINES):
            info = tarfile.TarInfo(f"{number:04}.json")
            info.size = len(line)
            tar.addfile(info, io.BytesIO(line))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with BucketServer() as server:
        for path in folder.iterdir():
            server.put(f"/bucket/{path.name}", path.read_bytes())
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith(("AWS_", "GRAINMILL_BUCKET_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    # The indices of files that have none are kept here.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def place(request, folder, monkeypatch):
    """Makes a name in the folder a path, or a URL."""
    if request.param == "file":
        return lambda name: str(folder / name)
    server = request.getfixturevalue("server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    base = "s3://bucket" if request.param == "s3" else f"{server.url}/bucket"
    return lambda name: f"{base}/{name}"


in_all_places = pytest.mark.parametrize("place", PLACES, indirect=True)
of_all_formats = pytest.mark.parametrize("kind", NAMES)
with_random_access = pytest.mark.parametrize("kind", [n for n in NAMES if n not in OTHERS])


def ran(capsys, *arguments):
    """The JSON that a command prints, one value for each line."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    out, error = capsys.readouterr()
    assert code == ExitCode.OK, error
    return [json.loads(line) for line in out.splitlines()]


def as_line(value, kind):
    """What a record, as a command shows it, was made of."""
    if kind == "webdataset":
        value = json.loads(value["json"]) if isinstance(value["json"], str) else value["json"]
    return json.dumps(value).encode()


@in_all_places
@of_all_formats
def test_info(place, folder, capsys, kind):
    (found,) = ran(capsys, "info", place(NAMES[kind]))
    assert found["records"] == COUNT
    (file,) = found["files"]
    assert file["bytes"] == (folder / NAMES[kind]).stat().st_size
    assert file["ratio"] > 0
    expected = {"bagz": "zstd", "parquet": "snappy"}
    name, _, compression = kind.partition("-")
    assert file["compression"] == expected.get(kind, compression or None)
    if kind == "parquet":
        assert file["columns"] == {"number": "Int64", "text": "Utf8"}
        assert file["row_groups"] == [COUNT]
    assert file["format"] == name
    assert file["path"] == place(NAMES[kind])
    if kind in BYTES:
        assert file["record_bytes"] == sum(map(len, LINES))


@in_all_places
@of_all_formats
def test_cat_and_head(place, capsys, kind):
    path = place(NAMES[kind])
    found = ran(capsys, "cat", path)
    assert [as_line(line["record"], kind) for line in found] == LINES
    assert [as_line(line["record"], kind) for line in ran(capsys, "head", path)] == LINES[:10]
    found = ran(capsys, "cat", path, "-i", "57,3:5")
    assert [line["index"] for line in found] == [57, 3, 4]
    assert [as_line(line["record"], kind) for line in found] == [LINES[n] for n in (57, 3, 4)]


@pytest.mark.parametrize("command", ["cat", "head"])
@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_rows_are_printed_as_json_only(folder, capsys, command, kind):
    path = str(folder / NAMES[kind])
    for view in ("hex", "raw", "example"):
        assert main([command, path, "--as", view]) == ExitCode.USAGE
        printed = capsys.readouterr()
        assert "are printed as JSON" in printed.err
        assert not printed.out
    assert main([command, path, "--as", "json"]) == ExitCode.OK


@pytest.mark.parametrize("place", ["s3"], indirect=True)
@pytest.mark.parametrize("kind", ["array_record", "tfrecord-gzip", "jsonl-gzip", "parquet"])
def test_progress_with_far_files(place, folder, monkeypatch, kind):
    made = []

    class Recorded(console.Progress):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(convert, "Progress", Recorded)
    monkeypatch.setattr(verify, "Progress", Recorded)
    assert main(["convert", place(NAMES[kind]), "out.tfrecord"]) == ExitCode.OK
    assert made[0]._total == (folder / NAMES[kind]).stat().st_size
    assert made[0]._done == pytest.approx(made[0]._total, rel=0.01)
    assert main(["verify", place(NAMES[kind]), "out.tfrecord"]) == ExitCode.OK
    assert (made[1]._total, made[1]._done) == (2, 2)


@pytest.mark.parametrize(
    "command",
    [
        ["index", "in.array_record", "-o", "s3://bucket/x.index"],
        ["verify", "in.array_record", "--manifest", "gs://bucket/m"],
        ["bench", "json:dumps", "--svg", "s3://bucket/plot.svg"],
    ],
)
def test_outputs_that_must_be_local(folder, capsys, monkeypatch, command):
    monkeypatch.chdir(folder)
    assert main(command) == ExitCode.USAGE
    assert "must be a local file" in capsys.readouterr().err


@in_all_places
@of_all_formats
def test_verify(place, capsys, kind):
    (found,) = ran(capsys, "verify", place(NAMES[kind]))
    assert found["ok"]
    assert found["files"][0]["records"] == COUNT


@of_all_formats
def test_verify_finds_a_file_that_is_cut(folder, tmp_path, capsys, kind):
    data = (folder / NAMES[kind]).read_bytes()
    cut = tmp_path / NAMES[kind]
    cut.write_bytes(data[: len(data) - 700 if kind == "webdataset" else len(data) // 2])
    if kind == "webdataset":  # without its end, and the last file
        cut.write_bytes(data[: 512 * 2 * COUNT - 100])
    code = main(["verify", str(cut)])
    assert code == ExitCode.DAMAGED, capsys.readouterr().out


@in_all_places
@of_all_formats
@pytest.mark.parametrize("target", ["array_record", "parquet"])
def test_convert(place, capsys, kind, target):
    output = Path(TARGETS[target])
    (found,) = ran(capsys, "convert", place(NAMES[kind]), output, "--verify")
    assert found["records"] == COUNT
    check_records(kind, target, [output])


def check_records(kind, target, paths, *, is_shuffled=False):
    source = formats.FORMATS[target].open(list(map(str, paths)))
    records = source.__getitems__(range(len(source)))
    if kind == "webdataset" and target == "parquet":
        records = [record["json"] for record in records]
    elif kind == "webdataset":
        records = [json.loads(record)["json"].encode() for record in records]
    elif target == "parquet":
        rows = [
            {name: getattr(v, "item", lambda v=v: v)() for name, v in r.items()} for r in records
        ]
        records = [json.dumps(row).encode() for row in rows]
    elif kind == "parquet":
        records = [json.dumps(json.loads(record)).encode() for record in records]
    if is_shuffled:
        assert records != LINES
        order = grain.MapDataset.range(COUNT).shuffle(seed=5)
        assert records == [LINES[int(at)] for at in order]
    else:
        assert records == LINES


@with_random_access
@pytest.mark.parametrize("target", TARGETS)
def test_convert_to_shards_in_a_global_order(folder, capsys, kind, target):
    arguments = ["convert", folder / NAMES[kind], TARGETS[target], "--shards", "3"]
    (found,) = ran(capsys, *arguments)
    assert [file["records"] for file in found["files"]] == [20, 20, 20]
    paths = [file["path"] for file in found["files"]]
    check_records(kind, target, paths)
    ran(capsys, *arguments, "--shuffle", "--seed", "5", "--force")
    check_records(kind, target, paths, is_shuffled=True)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_needs_random_access_says_what_to_do(folder, capsys, kind):
    path = str(folder / NAMES[kind])
    for command in (["index", path], ["convert", path, "out.bagz", "--shuffle"]):
        assert main(command) != ExitCode.OK
        error = capsys.readouterr().err
        assert "has no random access: read lines in order with `JsonLinesIterDataset`" in error
    (found,) = ran(capsys, "convert", path, "out@3.array_record")
    assert [file["records"] for file in found["files"]] == [20, 20, 20]
    check_records(kind, "array_record", [file["path"] for file in found["files"]])


@pytest.mark.parametrize("place", ["s3", "http"], indirect=True)
@pytest.mark.parametrize("kind", ["tfrecord", "jsonl-gzip", "parquet"])
def test_convert_far_files_in_a_global_order(place, capsys, kind):
    arguments = ["convert", place(NAMES[kind]), "out.array_record", "--shuffle", "--seed", "5"]
    ran(capsys, *arguments)
    check_records(kind, "array_record", ["out.array_record"], is_shuffled=True)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
@of_all_formats
def test_convert_in_a_bucket(place, server, capsys, kind):
    output = f"s3://bucket/{kind}/"
    try:
        ran(capsys, "convert", place(NAMES[kind]), output, "--to", "array_record")
        check_records(kind, "array_record", [f"{output}in.array_record"])
    finally:
        server.objects.pop(f"/bucket/{kind}/in.array_record", None)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_convert_to_each_format_in_a_bucket(place, server, capsys, target):
    output = f"s3://bucket/out/{TARGETS[target]}"
    try:
        ran(capsys, "convert", place("in.jsonl"), output, "--verify")
        check_records("jsonl", target, [output])
    finally:
        server.objects.pop(f"/bucket/out/{TARGETS[target]}", None)


@in_all_places
@with_random_access
def test_index(place, capsys, kind):
    path = place(NAMES[kind])
    if kind == "array_record":
        (found,) = ran(capsys, "index", path, "-o", "index")
        assert found["records"] == COUNT
        assert len(grain.sources.ArrayRecordDataSource([path], index="index")) == COUNT
    elif kind.startswith(("tfrecord", "jsonl", "webdataset")):
        assert ran(capsys, "index", path)[0]["records"] == COUNT
    else:
        assert main(["index", path]) == ExitCode.USAGE
        assert "files need no index" in capsys.readouterr().err


@in_all_places
@with_random_access
def test_bench(place, tmp_path, capsys, monkeypatch, kind):
    name = formats.FORMATS[kind.partition("-")[0]].source
    (tmp_path / "pipeline_of_format.py").write_text(
        "import grainmill as grain\n"
        f"source = grain.sources.{name}({place(NAMES[kind])!r})\n"
        "ds = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "pipeline_of_format", raising=False)
    (found,) = ran(capsys, "bench", "pipeline_of_format:ds", "--seconds", "100")
    assert found["elements"] == COUNT - 1  # all, without the first


def test_bagz_files_are_compressed_as_their_names_say(folder, capsys):
    source = str(folder / "in.jsonl")
    for name, options in (("a.bagz", []), ("b.bag", []), ("c.bagz", ["--options", "zstd:1"])):
        ran(capsys, "convert", source, name, "--verify", *options)
        check_records("jsonl", "bagz", [name])
    assert LINES[0] in Path("b.bag").read_bytes()
    for name, options in (("d.bagz", "uncompressed"), ("d.bag", "zstd:3")):
        assert main(["convert", source, name, "--options", options]) == ExitCode.USAGE
        assert "contradicts that" in capsys.readouterr().err


def test_shards_have_names_that_readers_expect(folder, capsys):
    for output, name in (
        ("a.bagz", "a-00000-of-00002.bagz"),
        ("a@2.parquet", "a-00000-of-00002.parquet"),
        ("a.tfrecord", "a.tfrecord-00000-of-00002"),
    ):
        (found,) = ran(capsys, "convert", folder / "in.jsonl", output, "--shards", "2")
        assert found["files"][0]["path"] == name
    (found,) = ran(capsys, "convert", "a.tfrecord@2", "out/", "--to", "parquet")
    assert found["files"][1]["path"] == "out/a-00001-of-00002.parquet"
    assert ran(capsys, "info", "out/")[0]["records"] == COUNT


def test_contents_become_columns(folder, tmp_path, capsys):
    """Of `tf.train.Example`, and back."""
    ran(capsys, "convert", folder / "in.jsonl", "examples.tfrecord", "--content", "example")
    ran(capsys, "convert", "examples.tfrecord", "out.parquet")
    table = pq.read_table("out.parquet")
    assert table.schema.types == [pa.int64(), pa.binary()]
    assert table.column("number").to_pylist() == list(range(COUNT))
    ran(capsys, "convert", "out.parquet", "back.tfrecord", "--content", "example")
    source = grain.sources.TFRecordDataSource("back.tfrecord")
    assert [tf_example.decode(source[n])["number"] for n in range(COUNT)] == [
        [n] for n in range(COUNT)
    ]
    assert not list(tmp_path.glob(".*.part"))
