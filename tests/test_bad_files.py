"""What is no file of records, or is not the file it should be: each format, each source, each tool.

Every cell of this table is a test, and each test causes its fault. "Error" is one that names the
file, and the place in it where there is one; nothing hangs, and nothing is left behind.

| fault                            | where it is tested |
| -------------------------------- | ------------------ |
| the bad files of the corpora     | `rust/core/tests/records.rs`, `test_tfrecord.py`, `test_bagz.py`, `test_tools.py` (`verify`) |
| 2,000 flipped bits               | `rust/core/tests/damage.rs` (ArrayRecord with each codec and transposed, TFRecord, JSON lines, WebDataset, Bagz, by position and in order; JSON; `tf.train.Example`), `test_parquet.py`, `test_images.py`, `block_cache.rs`, here (Hugging Face, index files, caches, manifests, journals, `cat --as example`) |
| cut at every byte                | `damage.rs`, `test_parquet.py`, `test_images.py`, `test_parse_json.py`, `test_parse_example.py`, `test_convert.py`, here (Hugging Face) |
| a length of 2^60                 | `damage.rs`, `rust/core/tests/memory_limits.rs`, `test_parquet.py`, `test_parse_example.py`, `test_images.py` (pixels) |
| decompression bombs              | `damage.rs`, `memory_limits.rs`, `test_tfrecord.py`, `test_bagz.py`, `test_parquet.py`, `test_images.py` |
| deeply nested JSON               | `test_parse_json.py`, here |
| empty, a directory, a FIFO, a device, a dangling link, no permission | here: each format and each command |
| one format read as another       | here: each pair, by sources and by commands |
| changed while it is read         | here (local), `test_bad_servers.py` (objects) |
| a server that fails              | `test_buckets.py`, `test_bad_servers.py` (each format) |
| a full disk                      | `test_full_disk.py` (conversion, index files, caches, manifests, shards), `test_buckets.py` (block cache) |
| killed, or two at once           | `test_convert.py`, `test_full_disk.py`, `test_caching.py`, `test_beam.py`, `test_ray.py` |
"""  # noqa: E501 - a table

import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import effort
import pytest
from bad_files import FORMATS, LINES, OBJECTS, made, plain

import grainmill as grain
from grainmill._files import outputs, tf_example
from grainmill._files.local_outputs import LocalOutputs
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main

HERE = Path(__file__).parent
NAMES = list(FORMATS)
# What a source raises for a bad file. Whatever else it raises fails the test.
ERRORS = (grain.GrainmillError, ValueError, OSError)
COMMANDS = ("info", "head", "cat", "verify", "convert", "index")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "caches"))


def outcomes(pairs, *, user="self"):
    """What another process finds in files, in so much time that it cannot have hung."""
    arguments = [str(part) for pair in pairs for part in pair]
    done = subprocess.run(
        [sys.executable, HERE / "bad_files.py", user, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_intact_files_are_read(tmp_path, name):
    found = plain(FORMATS[name].read(made(name, tmp_path)))
    records = [
        json.loads(each if isinstance(each, bytes) else each["json"])
        if isinstance(each, bytes) or "json" in each
        else each
        for each in found
    ]
    assert records == OBJECTS


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_an_error_that_names_it(tmp_path, name):
    end, found = FORMATS[name].extension, FORMATS[name]
    (tmp_path / f"directory{end}").mkdir()
    (tmp_path / f"link{end}").symlink_to("nowhere")
    made(name, tmp_path)
    cases = [f"directory{end}", f"link{end}", f"missing{end}", f"file{end}/below{end}"]
    for case in cases:
        with pytest.raises(OSError, match=case.split(".")[0]):
            found.read(tmp_path / case)
    empty = tmp_path / f"empty{end}"
    empty.touch()
    empty.with_name(f"limits.{empty.name}").touch()
    if found.may_be_empty:
        assert found.read(empty) == []
    else:
        with pytest.raises(ERRORS, match="empty"):
            found.read(empty)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hugging_face"])
def test_threads_that_need_more_files_than_may_be_open_wait_for_each_other(tmp_path, name):
    made(name, tmp_path)
    paths = []
    for number in range(40):
        copies = tmp_path / f"copy-{number}"
        copies.mkdir()
        for part in tmp_path.glob("*file.*"):
            shutil.copy(part, copies)
        paths.append(str(copies / f"file{FORMATS[name].extension}"))

    def read():
        start.wait()
        source = FORMATS[name].open(paths)
        found = source.__getitems__(range(len(source)))
        assert plain(found) == plain(FORMATS[name].open(paths[:1])) * len(paths)

    FORMATS[name].open(paths).__getitems__([0])  # what stays open when a source is first used
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A thread has at most two open: a file, and one that belongs to it.
    limit = 17 + sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    start = threading.Barrier(16)
    try:
        with ThreadPoolExecutor(16) as threads:
            done = [threads.submit(read) for _ in range(16)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in done:
        each.result()


def test_pipes_and_devices_are_errors_and_not_waited_for(tmp_path):
    pairs = []
    for name in NAMES:
        pipe = tmp_path / f"{name}{FORMATS[name].extension}"
        os.mkfifo(pipe)
        zeros = pipe.with_name(f"zeros-{pipe.name}")
        zeros.symlink_to("/dev/zero")
        pairs += [(name, pipe), (name, zeros)]
        # The file itself is one, and what belongs to it is not.
        if name == "bagz_separate":
            made(name, tmp_path)
            limits = tmp_path / f"limits.file{FORMATS[name].extension}"
            limits.unlink()
            os.mkfifo(limits)
            pairs.append((name, tmp_path / f"file{FORMATS[name].extension}"))
    for (name, path), found in zip(pairs, outcomes(pairs), strict=True):
        assert isinstance(found, str), (name, path, found)
        assert path.name in found, (name, found)


def test_pipes_in_the_place_of_an_index_are_not_waited_for(tmp_path):
    pairs = []
    for name in ("tfrecord", "json_lines_gzip", "web_dataset"):
        path = made(name, tmp_path)
        os.mkfifo(path.with_name(f".{path.name}.grainmill_index"))
        pairs.append((name, path))
    assert outcomes(pairs) == [len(LINES)] * 3
    index = tmp_path / "index"
    os.mkfifo(index)
    path = made("array_record", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "grainmill", "index", path, "-o", index],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert str(index) in done.stderr


def test_files_without_permission_are_errors():
    # Another user must be able to reach the directory, and not to write to it.
    with tempfile.TemporaryDirectory() as name_of_directory:
        directory = Path(name_of_directory)
        directory.chmod(0o755)
        closed, readable = [], []
        for name in NAMES:
            for pairs, mode in ((closed, 0o000), (readable, 0o444)):
                place = directory / f"{name}-{mode}"
                place.mkdir(0o755)
                path = made(name, place)
                path.chmod(mode)
                pairs.append((name, path))
        limits = directory / "limits"
        limits.mkdir(0o755)
        path = made("bagz_separate", limits)
        path.with_name(f"limits.{path.name}").chmod(0)
        closed.append(("bagz_separate", path))
        found = outcomes([*closed, *readable], user="nobody")
    for (name, path), text in zip(closed, found, strict=False):
        assert str(text).startswith("PermissionError"), (name, text)
        assert path.name in text
    # Where no index can be written, neither beside the file nor elsewhere, files are read.
    assert found[len(closed) :] == [len(LINES)] * len(NAMES), found


PAIRS = [
    (of, read)
    for of, read in itertools.product(NAMES, NAMES)
    if FORMATS[of].family != FORMATS[read].family
]


@pytest.mark.parametrize("of", NAMES)
def test_one_format_given_as_another_is_an_error(tmp_path, of):
    for _, read in (pair for pair in PAIRS if pair[0] == of):
        path = made(of, tmp_path)
        other = path.rename(tmp_path / f"other{FORMATS[read].extension}")
        # Lines of text are no Bagz limits, and so on: there is always something to notice.
        with pytest.raises(ERRORS, match="other") as caught:
            FORMATS[read].read(other)
        assert "defect of the engine" not in str(caught.value)
        other.unlink()


@pytest.mark.parametrize("name", ["tfrecord", "json_lines", "web_dataset", "bagz"])
def test_the_wrong_compression_is_an_error(tmp_path, name):
    path = made(name, tmp_path)
    source = getattr(grain.sources, FORMATS[name].source)
    wrong = ("zstd",) if name == "bagz" else ("gzip", "zlib", "zstd")
    for compression in wrong:
        with pytest.raises(grain.GrainmillError, match=f"{path}: record 0 at byte 0"):
            list(source(path, compression=compression))


def test_lines_in_a_file_whose_name_says_gzip_are_not_read_as_text(tmp_path):
    # One flipped bit in the first byte, and nothing else would tell it from text.
    path = made("json_lines_gzip", tmp_path)
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(grain.GrainmillError, match=f"{path}: record 0 .*1f 8b"):
        grain.sources.JsonLinesDataSource(path)
    path.write_bytes(b"text\n")
    assert list(grain.sources.JsonLinesDataSource(path, compression="none")) == [b"text"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hugging_face"])
@pytest.mark.parametrize("how", ["cut", "overwritten"])
def test_a_file_that_changes_behind_an_open_source_is_an_error(tmp_path, name, how):
    path = made(name, tmp_path)
    options = {"cache_bytes": 0} if name == "parquet" else {}
    options |= FORMATS[name].options
    source = getattr(grain.sources, FORMATS[name].source)(str(path), **options)
    source[0]
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[::-1])
        os.utime(path, (1, 1))
    with pytest.raises(ERRORS, match=path.name):
        source.__getitems__(range(len(source)))


# --- commands -----------------------------------------------------------------------------------


def run_command(command, path, tmp_path, capsys, *options):
    """Runs a command on a file; returns its exit code and what it said."""
    output = {
        "convert": [str(tmp_path / "out.array_record")],
        "index": ["-o", str(tmp_path / "out.index")] if "array_record" in str(options) else [],
    }
    code = main([command, str(path), *output.get(command, []), *options])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert not (tmp_path / "out.array_record").exists() or code == ExitCode.OK
    return code, said


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_what_is_no_file(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "pipe.tfrecord")
    (tmp_path / "zeros.bag").symlink_to("/dev/zero")
    (tmp_path / "directory.parquet").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    for name in ("pipe.tfrecord", "zeros.bag", "directory.parquet", "link.jsonl", "missing.tar"):
        code, said = run_command(command, tmp_path / name, tmp_path, capsys)
        assert code == ExitCode.SYSTEM, (name, said)
        assert said.err.count("\n") == 1
        assert name.split(".")[0] in said.err
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (name, command)
        for name, found in FORMATS.items()
        for command in COMMANDS
        if found.command
        # Of other formats it writes no index.
        and (command != "index" or found.family in {"array_record", "tfrecord", "json_lines"})
    ],
)
def test_commands_name_damage_and_leave_nothing(tmp_path, capsys, name, command):
    path = made(name, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 1])
    given = ("--from", FORMATS[name].command)
    code, said = run_command(command, path, tmp_path, capsys, *given)
    if command == "head" or name == "json_lines":
        # The first records may be intact, and nothing in a text says how long it should be.
        assert code in {ExitCode.OK, ExitCode.DAMAGED}
    else:
        assert code == ExitCode.DAMAGED, said
    if code != ExitCode.OK:
        assert path.name in said.err + said.out
        assert said.err.count("\n") <= 1
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "caches") in (
        [path.name],
        [f".{path.name}.grainmill_index", path.name],
        sorted([path.name, "out.array_record"]),
    )


@pytest.mark.parametrize("of", [name for name in NAMES if FORMATS[name].command])
def test_commands_refuse_one_format_given_as_another(tmp_path, capsys, of):
    path = made(of, tmp_path)
    for read in {FORMATS[name].command for pair, name in PAIRS if pair == of} - {""}:
        for command in ("verify", "convert"):
            code, said = run_command(command, path, tmp_path, capsys, "--from", read)
            if read == "jsonl" and command == "convert" and code == ExitCode.OK:
                # Bytes between line ends: only `verify` looks into them.
                (tmp_path / "out.array_record").unlink()
                continue
            assert code == ExitCode.DAMAGED, (read, command, said)
            assert path.name in said.err + said.out


# --- what Python parses -------------------------------------------------------------------------


NUM_FLIPS = effort.cases(150, 20_000)


def flips(data, count=NUM_FLIPS, seed=1):
    """`data` with one bit flipped, many times; the same in each run."""
    rng = random.Random(seed)
    for _ in range(count):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        yield bytes(bad)


def test_lines_nested_too_deep_are_errors_that_name_them(tmp_path, capsys):
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b"{}\n" + b"[" * 200_000 + b"]" * 200_000 + b"\n")
    source = grain.sources.JsonLinesDataSource(path, parse=True)
    for fails in (lambda: source[1], lambda: source.__getitems__([0, 1])):
        with pytest.raises(ValueError, match=rf"{path}: record 1: not valid JSON"):
            fails()
    assert main(["verify", str(path)]) == ExitCode.DAMAGED
    assert "record 1" in capsys.readouterr().out
    assert main(["cat", str(path), "--as", "json"]) == ExitCode.DAMAGED
    assert f"{path}: record 1: " in capsys.readouterr().err


def test_flipped_bits_of_examples_are_shown_or_refused():
    example = tf_example.encode({"ids": [1, 2, 300], "text": "hello", "x": [0.5, 1.5]})
    num_refused = 0
    damaged = [*flips(example), *(example[:end] for end in range(len(example)))]
    for bad in damaged:
        try:
            json.dumps(tf_example.example_as_json(bad))
        except ValueError:
            num_refused += 1
    assert num_refused > len(damaged) / 3


def test_flipped_bits_of_index_files_are_noticed(tmp_path):
    for name in ("tfrecord_gzip", "json_lines"):
        path = made(name, tmp_path)
        expected = FORMATS[name].open(path).__getitems__(range(len(LINES)))
        index = path.with_name(f".{path.name}.grainmill_index")
        good = index.read_bytes()
        for bad in flips(good, effort.cases(125, 10_000)):
            index.write_bytes(bad)
            assert FORMATS[name].open(path).__getitems__(range(len(LINES))) == expected
            assert index.read_bytes() == good
    path, index = made("array_record", tmp_path), tmp_path / "index"
    grain.sources.ArrayRecordDataSource(str(path), index=index)
    good = index.read_bytes()
    for bad in flips(good):
        index.write_bytes(bad)
        with pytest.raises(ValueError, match=str(index)):
            grain.sources.ArrayRecordDataSource(str(path), index=index)


def test_flipped_bits_of_manifests_are_noticed(tmp_path, capsys):
    paths = [made(name, tmp_path) for name in ("tfrecord", "json_lines")]
    manifest = tmp_path / "manifest.json"
    command = ["verify", *map(str, paths), "--manifest", str(manifest)]
    assert main(command) == ExitCode.OK
    good = manifest.read_bytes()
    for bad in flips(good):
        manifest.write_bytes(bad)
        code = main(command)
        said = capsys.readouterr()
        # Whitespace of a JSON text does not count, if it stays whitespace.
        if code == ExitCode.OK:
            assert json.loads(bad) == json.loads(good)
        else:
            assert code in {ExitCode.DAMAGED, ExitCode.USAGE}
        assert "Traceback" not in said.err
        assert manifest.read_bytes() == bad  # it is for the user to judge


def test_flipped_bits_of_a_journal_keep_nothing_that_it_did_not_have(tmp_path):
    shards = []
    for number in range(3):
        path = tmp_path / f"out-{number}"
        path.write_bytes(b"x" * number)
        shards.append(outputs.Shard(str(path), (number,)))
    header = {"format": "test", "inputs": ["a"]}

    def opened():
        return LocalOutputs(shards, str(tmp_path / "out"), None, header, force=False)

    with opened() as journal:
        assert not journal.records
        for number, shard in enumerate(shards):
            journal.add(shard.name, 100 + number, outputs.identity(shard.path))
    (place,) = tmp_path.glob(".*.converting")
    good = place.read_bytes()
    expected = {f"out-{number}": 100 + number for number in range(3)}
    num_kept = []
    for bad in itertools.chain(flips(good), (good[:end] for end in range(len(good) + 1))):
        place.write_bytes(bad)
        with opened() as journal:
            assert journal.records.items() <= expected.items()
            assert journal.kept() == frozenset(journal.records)
            num_kept.append(len(journal.records))
        if num_kept[-1]:
            assert good.startswith(place.read_bytes())  # without what is damaged
    assert set(num_kept) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["random access", "sequence"])
def test_flipped_bits_of_a_cache_are_never_other_elements(tmp_path, kind):
    ds = grain.MapDataset.source(LINES).map(lambda line: line * 2)
    expected = [line * 2 for line in LINES]

    def read():
        cached = (
            ds.cache(tmp_path) if kind == "random access" else ds.to_iter_dataset().cache(tmp_path)
        )
        return list(cached)

    assert read() == expected
    (directory,) = tmp_path.glob("cache-*")
    num_flips = effort.cases(100, 1_000)
    for file in sorted(directory.iterdir()):
        good = file.read_bytes()
        num_noticed = 0
        # Most of a part is padding between blocks.
        for bad in flips(good[:4000], num_flips):
            file.unlink()  # threads of the iterator before may still read it where it is mapped
            file.write_bytes(bad + good[4000:])
            try:
                assert read() == expected, file.name
            except (ValueError, RuntimeError, OSError) as error:
                assert str(directory) in str(error)  # noqa: PT017
                num_noticed += 1
        file.unlink()
        file.write_bytes(good)
        # What a pipeline is called in messages is not needed to read its elements.
        assert num_noticed > num_flips / 5 or file.name == "pipeline.json", file.name
    assert read() == expected


# --- Hugging Face -------------------------------------------------------------------------------

READ_DAMAGED = """
    import json, pathlib, random, sys
    import datasets, grainmill as grain
    datasets.disable_progress_bars()
    good, path = pathlib.Path(sys.argv[1]).read_bytes(), sys.argv[2]
    num_flips, step = map(int, sys.argv[3:])
    rng = random.Random(1)
    bits = [rng.randrange(8 * len(good)) for _ in range(num_flips)]
    damaged = []
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        damaged.append(bad)
    damaged += [good[:length] for length in range(0, len(good), step)]
    for number, bad in enumerate(damaged):
        name = f"{path}/{number}.arrow"
        pathlib.Path(name).write_bytes(bad)
        print(number, end=" ", flush=True)
        try:
            source = grain.sources.HuggingFaceDataSource(name)
            rows = source.__getitems__(range(len(source)))
            text = f"{len(rows)} rows"
        except (grain.GrainmillError, ValueError, OSError) as error:
            text = "error" if f"{number}.arrow" in str(error) else f"unnamed {error!r}"
        except BaseException as error:
            text = f"unexpected {type(error).__name__}: {error!r}"
        print(text.splitlines()[0], flush=True)
        source = None
        pathlib.Path(name).unlink()
"""


def test_damaged_arrow_files_are_errors_or_rows(tmp_path):
    good = made("hugging_face", tmp_path)
    script = "\n".join(line[4:] for line in READ_DAMAGED.splitlines())
    place = tmp_path / "damaged"
    place.mkdir()
    searched = [str(effort.cases(200, 20_000)), str(effort.cases(3, 1))]
    done = subprocess.run(
        [sys.executable, "-c", script, good, place, *searched],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1], done.stderr[-500:])
    found = [line.split(" ", 1)[1] for line in lines]
    unexpected = [line for line in found if not line.endswith(("rows", "error"))]
    assert not unexpected, unexpected[:5]
    assert found.count("error") > len(found) / 2


def test_damaged_descriptions_of_saved_data_sets_are_errors(tmp_path):
    import datasets  # noqa: PLC0415 - slow to import

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(OBJECTS).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved/state.json"
    good = state.read_bytes()
    for bad in itertools.chain(
        flips(good, 200), [b"", b"[]", b"[" * 100_000, b'{"_data_files": 1}']
    ):
        state.write_bytes(bad)
        try:
            source = grain.sources.HuggingFaceDataSource(str(tmp_path / "saved"))
        except ERRORS as error:
            assert str(tmp_path) in str(error)  # noqa: PT017
        else:
            assert plain(source.__getitems__(range(len(source)))) == OBJECTS
    state.write_bytes(good)
    data = next((tmp_path / "saved").glob("*.arrow"))
    shutil.move(data, tmp_path)
    with pytest.raises(OSError, match=data.name):
        grain.sources.HuggingFaceDataSource(str(tmp_path / "saved"))
