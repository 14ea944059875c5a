"""`grainmill.files`: what its functions return, refuse and tell, and that commands say the same."""

import json
import pickle
import random
from pathlib import Path

import pytest
from effort import cases

import grainmill as grain
from grainmill import files
from grainmill._files.messages import Argument, Message
from grainmill._tools.main import command_parser, main

LINES = [json.dumps({"number": n, "text": f"text {n}"}).encode() for n in range(200)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b"\n".join(LINES))
    return tmp_path


def options_of(command):
    """What a command calls arguments."""
    found = command_parser(command).arguments
    return {each.dest: each.option_strings[-1] for each in found if each.option_strings}


@pytest.mark.parametrize("seed", range(cases(20, 2_000)))
def test_only_arguments_have_other_names(seed):
    """A field of a record may have the name of an argument."""
    source = random.Random(seed)
    texts = ["a", "`a`", "schema", "x y"]
    parts = [(source.random() < 0.5, source.choice(texts)) for _ in range(source.randrange(6))]
    message = Message(*[Argument(text) if is_one else text for is_one, text in parts])
    assert message == "".join(f"`{text}`" if is_one else text for is_one, text in parts)
    for error in (ValueError(message), FileExistsError(message), grain.GrainmillError(message)):
        said = files.message_of(error, {"schema": "--schema", "a": "-a"})
        names = {"schema": "--schema", "a": "-a", "x y": "`x y`", "`a`": "``a``"}
        assert said == "".join(names[text] if is_one else text for is_one, text in parts)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))


def test_messages_of_others_stay():
    assert files.message_of(ValueError("`schema` is bad"), {"schema": "x"}) == "`schema` is bad"
    assert files.message_of(ValueError(), {}) == ""


REFUSED = [
    ({"num_shards": 0}, "--shards 0", ValueError),
    ({"num_threads": 0}, "--threads 0", ValueError),
    ({"schema": "number:int64"}, "--schema number:int64", ValueError),
    ({"shuffle": True, "seed": -1}, "--shuffle --seed=-1", ValueError),
    ({"output": "out.txt"}, "out.txt", ValueError),
    ({"output": "s3://bucket/out"}, "s3://bucket/out", ValueError),
    ({"output": "out.array_record.gz"}, "out.array_record.gz", ValueError),
    (
        {"output": "out.bagz", "options": "uncompressed"},
        "out.bagz --options uncompressed",
        ValueError,
    ),
    ({"output": "out@2.bagz", "num_shards": 3}, "out@2.bagz --shards 3", ValueError),
    ({"output": "in.jsonl"}, "in.jsonl", ValueError),
    ({"output": "old.jsonl"}, "old.jsonl", FileExistsError),
    ({"output": "o.parquet", "schema": "n"}, "o.parquet --schema n", ValueError),
    ({"output": "o.parquet", "schema": "n:x"}, "o.parquet --schema n:x", ValueError),
    (
        {"output": "o.parquet", "schema": "n:int8,n:int8"},
        "o.parquet --schema n:int8,n:int8",
        ValueError,
    ),
    (
        {"output": "o.parquet", "schema": "number:string"},
        "o.parquet --schema number:string",
        grain.GrainmillError,
    ),
    ({"inputs": "none.jsonl"}, "none.jsonl", FileNotFoundError),
    ({"inputs": "unknown"}, "unknown", ValueError),
]


@pytest.mark.parametrize(("arguments", "line", "kind"), REFUSED)
def test_what_a_function_refuses_a_command_says_in_its_own_words(arguments, line, kind, capsys):
    if arguments.get("output") == "o.parquet":
        pytest.importorskip("pyarrow")
    Path("old.jsonl").write_text("mine")
    Path("unknown").write_text("no format")
    given = {"inputs": "in.jsonl", "output": "out.array_record"} | arguments
    with pytest.raises(kind) as raised:
        files.convert(**given)
    places = [given[name] for name in ("inputs", "output")]
    rest = [word for word in line.split() if word not in places]
    assert main(["convert", *places, *rest]) != 0
    said = capsys.readouterr().err
    assert said == f"grainmill convert: {files.message_of(raised.value, options_of('convert'))}\n"
    assert "`num_" not in said
    assert "--" not in str(raised.value)
    assert Path("old.jsonl").read_text() == "mine"
    kept = {"in.jsonl", ".in.jsonl.grainmill_index", "old.jsonl", "unknown"}
    assert {path.name for path in Path().iterdir()} <= kept


@pytest.mark.parametrize("name", ["format", "target_format", "content"])
def test_unknown_choices_are_named(name):
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got nothing"):
        files.convert("in.jsonl", "out.array_record", **{name: "nothing"})
    with pytest.raises(ValueError, match=r"`format` must be one of .*, got nothing"):
        files.verify("in.jsonl", format="nothing")


def test_conversions_of_random_kinds_keep_the_records():
    """One after the other, through each format, in shards or not; beside a list."""
    source = random.Random(1)
    names = {
        "array_record": "array_record",
        "tfrecord": "tfrecord",
        "jsonl": "jsonl",
        "bagz": "bag",
    }
    inputs, expected = ["in.jsonl"], LINES
    for number in range(cases(12, 200)):
        shards = source.choice([None, 1, 2, 7])
        seed = source.choice([None, source.randrange(1 << 32)])
        output = f"{number}.{names[source.choice(list(names))]}"
        found = files.convert(
            inputs,
            Path(output),
            num_shards=shards,
            shuffle=seed is not None,
            seed=seed or 0,
            num_threads=source.choice([1, 3]),
            read_back=source.random() < 0.5,
        )
        if seed is not None:
            order = grain.MapDataset.range(len(expected)).shuffle(seed=seed)
            expected = [expected[int(at)] for at in order]
        inputs = [file["path"] for file in found["files"]]
        assert len(inputs) == (shards or 1)
        assert [record for path in inputs for record in files.read_records(path)] == expected
        assert found["records"] == sum(file["records"] for file in found["files"]) == 200
        assert found["bytes"] == sum(Path(path).stat().st_size for path in inputs)
        at = source.sample(range(len(LINES) // len(inputs)), 5)
        assert files.read_at(inputs[0], at) == [expected[n] for n in at]
        assert not any(files.verify(path)["problems"] for path in inputs)
        described = [files.describe(path)["records"] for path in inputs]
        assert described == [file["records"] for file in found["files"]]


def test_progress_grows_and_what_it_raises_ends_a_conversion():
    Path("in.jsonl").write_bytes(b"\n".join(LINES * 100))
    told = []
    files.convert("in.jsonl", "out@3.tfrecord", progress=told.append)
    for name in ("bytes_read", "num_records", "num_files_done"):
        values = [getattr(each, name) for each in told]
        assert values == sorted(values)
    assert told[-1].num_records == 20_000
    assert {(each.num_files, each.bytes_sent) for each in told} == {(3, None)}
    assert told[-1].bytes_read == pytest.approx(told[-1].byte_len, rel=0.01)
    before = set(Path().iterdir())

    class StoppedError(Exception):
        pass

    def stop(now):
        if now.num_records > 1000:
            raise StoppedError

    with pytest.raises(StoppedError):
        files.convert("in.jsonl", "other.tfrecord", progress=stop)
    assert set(Path().iterdir()) == before


def test_a_manifest_tells_what_has_changed():
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    for name in names:
        Path(name).write_bytes(LINES[0])
    reports = [files.verify(name, with_sha256=True) for name in names]
    files.Manifest.write("manifest", reports)
    manifest = files.Manifest("manifest")
    assert [manifest.differences(report) for report in reports] == [[], [], []]
    Path("b.jsonl").write_bytes(LINES[1])
    Path("c.jsonl").unlink()
    (changed,) = manifest.differences(files.verify("b.jsonl", with_sha256=True))
    assert changed["problem"].startswith("the manifest states sha256")
    assert manifest.missing(names[:2]) == ["c.jsonl"]
    Path("manifest").write_bytes(LINES[0])
    with pytest.raises(ValueError, match="manifest: not a manifest"):
        files.Manifest("manifest")


def test_an_index_counts_records():
    files.convert("in.jsonl", "out@3.array_record")
    paths = files.find_files("out@3.array_record")
    assert files.write_index(paths, output="index") == [66, 67, 67]
    assert len(grain.sources.ArrayRecordDataSource(paths, index="index")) == 200
    for arguments, problem in (
        ({"paths": paths}, "`output` must name the index file"),
        ({"paths": ["in.jsonl"], "output": "index"}, "kept beside each; no `output`"),
        ({"paths": ["in.jsonl", *paths], "output": "index"}, "files of one format"),
    ):
        with pytest.raises(ValueError, match=problem):
            files.write_index(**arguments)
    with pytest.raises(ValueError, match="must name a file"):
        files.find_files([])
