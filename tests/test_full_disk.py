"""Disks that are full wherever something is written, and conversions that are killed there.

What was there before stays, what has its final name is complete, nothing else is left behind, and
the same command continues when there is room again.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import record_formats as formats

from grainmill._files import local_outputs
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordReader

HERE = Path(__file__).parent
RECORDS = [json.dumps({"n": n, "text": "abc" * (n % 50)}).encode() for n in range(400)]

# What each of the programs begins with.
BEGIN = """
    import contextlib, io, json, os, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from small_disk import PAGE, SmallDisk
    inputs, place = Path(sys.argv[2]), Path(sys.argv[3])
    disk = SmallDisk(place)
    import grainmill as grain
    from grainmill._tools.main import main

    def run(*command):
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = main([str(part) for part in command])
        return code, said.getvalue()

    def names():
        return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())

    def clear():
        import shutil
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
"""


def run_program(tmp_path, program, *arguments):
    """Runs a program on a small disk; returns what it prints as JSON."""
    place = tmp_path / "disk"
    place.mkdir()
    script = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", script, HERE, tmp_path, place, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "GRAINMILL_CACHE_DIR": str(place / "caches")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def inputs(tmp_path):
    for number in range(3):
        (tmp_path / f"in-{number}.tfrecord").write_bytes(formats.tfrecord(RECORDS[number::3]))
    return tmp_path


# Room on the disk, in pages.
SIZES = [0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32, 40, 64, 100, 150]


CONVERT = """
    name, sizes, options = sys.argv[4], json.loads(sys.argv[5]), sys.argv[6:]
    paths = sorted(inputs.glob("in-*"))
    found = []

    def contents():
        return {name: (place / name).read_bytes().hex() for name in names()}

    assert run("convert", *paths, place / name, *options)[0] == 0
    whole = contents()
    for size in sizes:
        for before in ({}, {name: "6d696e65" for name in whole}):
            disk.resize(None)
            clear()
            for each, content in before.items():
                (place / each).write_bytes(bytes.fromhex(content))
            disk.resize(size * PAGE)
            forced = ["--force"] if before else []
            code, said = run("convert", *paths, place / name, *options, *forced)
            left = contents()
            disk.resize(None)
            again = code, ""
            if code:
                again = run("convert", *paths, place / name, *options, *forced)
            found.append(
                {
                    "size": size,
                    "code": code,
                    "said": said,
                    "hidden": [each for each in left if each.startswith(".")],
                    "complete": sum(left.get(each) == whole[each] for each in whole),
                    "as before": all(
                        left.get(each) in (whole[each], before.get(each)) for each in whole
                    ),
                    "again": again,
                    "is whole": contents() == whole,
                }
            )
    print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.array_record", ["--options", "uncompressed"]),
        (".", ["--threads", "2", "--options", "group_size:10"]),  # a file for each input
        ("out.tfrecord", ["--shards", "2"]),
        ("out.jsonl", ["--shards", "1", "--shuffle"]),
        ("out.bag", ["--shards", "1", "--verify"]),
    ],
)
def test_a_conversion_on_a_full_disk_leaves_what_was_there(inputs, name, options):
    found = run_program(inputs, CONVERT, name, json.dumps(SIZES), *options)
    for case in found:
        assert case["as before"], case
        assert case["is whole"], case
        assert case["again"] == [0, ""], case
        if case["code"] == ExitCode.OK:
            assert not case["hidden"], case
            continue
        assert case["code"] == ExitCode.SYSTEM, case
        assert case["said"].count("\n") == 1, case
        assert "No space left" in case["said"] or "too large" in case["said"], case
        # The list of finished files stays for the next run, where there are any.
        assert len(case["hidden"]) <= (1 if case["complete"] else 0), case
    assert found[0]["code"] == ExitCode.SYSTEM
    assert found[-1]["code"] == ExitCode.OK


def test_indices_on_a_full_disk_are_done_without(inputs):
    program = """
        found = []
        data = b"".join(path.read_bytes() for path in sorted(inputs.glob("in-*")))
        for room in range(4):
            disk.resize(None)
            clear()
            path = place / "data.tfrecord"
            path.write_bytes(data)
            disk.resize(room * PAGE)
            records = list(grain.sources.TFRecordDataSource(path))
            found.append([len(records), names()])
        # The files of command-line tools, which are wanted and not done without.
        for command in (
            ["index", inputs / "a.array_record", "-o", place / "out"],
            ["verify", inputs / "a.array_record", "--manifest", place / "out", "--update"],
        ):
            disk.resize(None)
            clear()
            (place / "out").write_bytes(b"")
            if command[0] == "index":
                (place / "out").unlink()
            (place / "filler").write_bytes(b"x" * PAGE)
            disk.resize(0 if disk.is_mounted else 10)
            code, said = run(*command)
            found.append([code, said, names()])
        print(json.dumps(found))
    """
    with_writer = textwrap.dedent("""
        import sys, grainmill as grain
        with grain.array_record.ArrayRecordWriter(sys.argv[1]) as writer:
            writer.write(b"record")
    """)
    subprocess.run([sys.executable, "-c", with_writer, inputs / "a.array_record"], check=True)
    *read, index, manifest = run_program(inputs, program)
    for number, left in read:
        assert number == len(RECORDS)
        assert not [name for name in left if name.endswith(".part")]
    for code, said, left in (index, manifest):
        assert code == ExitCode.SYSTEM, said
        assert said.count("\n") == 1
        assert "out" in said
        assert not [name for name in left if name.startswith(".")]
    assert index[2] == ["filler"]
    assert manifest[2] == ["filler", "out"]


@pytest.mark.parametrize("kind", ["random access", "sequence"])
def test_a_cache_on_a_full_disk_gives_all_elements_and_nothing_half_written(inputs, kind):
    program = """
        import logging, numpy as np
        logging.disable()
        ds = grain.MapDataset.range(300).map(lambda x: np.full(700, x))
        cached = (ds if sys.argv[4] == "random access" else ds.to_iter_dataset())
        found = []
        for size in [*range(8), 20, 50, 100, 200, 400, 700]:
            disk.resize(None)
            clear()
            disk.resize(size * PAGE)
            error = ""
            try:
                for _ in range(2):
                    values = [int(x[0]) for x in cached.cache(place / "cache")]
                    assert values == list(range(300)), size
            except OSError as failure:
                error = str(failure)
            left = names()
            disk.resize(None)
            again = [int(x[0]) for x in cached.cache(place / "cache")] == list(range(300))
            found.append([size, error, left, again, names()])
        print(json.dumps(found))
    """
    found = run_program(inputs, program, kind)
    for size, error, left, again, after in found:
        # Where not even the description of a cache can be written, the error says so.
        assert not error or "No space left" in error or "too large" in error, (size, error)
        assert not error or size < 5, (size, error)
        assert again, size
        unfinished = [name for name in left if ".tmp" in name or "unfinished" in name]
        assert not unfinished, (size, unfinished)
        assert any(name.endswith("manifest.json") for name in after), (size, after)
        if any(name.endswith("manifest.json") for name in left):
            assert size > 100, left
    assert any(name.endswith("manifest.json") for name in found[-1][2])


def test_shards_of_a_pipeline_on_a_full_disk_are_complete_or_absent(inputs):
    program = """
        from grainmill import _materialize
        ds = grain.MapDataset.range(100).map(lambda x: b"%05d" % x * 500)
        found = []
        for size in [0, 1, 2, 3, 6, 10, 40, 80, 200]:
            disk.resize(None)
            clear()
            disk.resize(size * PAGE)
            store, errors = _materialize.LocalStore(), []

            def work():
                options = _materialize.JobOptions(
                    serialize=None, options="uncompressed", file_name_suffix=".array_record",
                    read_options=None, version="1", overwrite=False,
                )
                job = _materialize.job_of(ds, 2, place / "out", options)
                for shard in job.begin(store):
                    job.write(shard, store)
                return job.finish(store)

            try:
                work()
            except (OSError, grain.GrainmillError) as failure:
                errors.append(str(failure))
            left = names()
            counts = [
                len(grain.sources.ArrayRecordDataSource(str(place / name)))
                for name in left if name.endswith(".array_record")
            ]
            disk.resize(None)
            work()
            found.append([size, errors, left, counts, names()])
        print(json.dumps(found))
    """
    found = run_program(inputs, program)
    for size, errors, left, counts, after in found:
        assert all(count == 50 for count in counts), (size, counts)
        assert not [name for name in left if name.endswith(".part")], (size, left)
        assert len(after) == 3, after
        assert errors or len(counts) == 2, (size, left)
    assert found[0][1]
    assert not found[-1][1]


# --- killed -------------------------------------------------------------------------------------

# Children end themselves at their first, second, ... call that changes something on the disk.
KILLED = """
    import fcntl
    name, options = sys.argv[4], sys.argv[5:]
    paths = sorted(inputs.glob("in-*"))
    CHANGES = ["fsync", "link", "unlink", "replace", "write", "ftruncate", "open"]

    def contents():
        return {each: (place / each).read_bytes().hex() for each in names()}

    def in_child(moment, command):
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        calls = 0
        def counted(function):
            def call(*arguments, **named):
                nonlocal calls
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return function(*arguments, **named)
            return call
        for change in CHANGES:
            setattr(os, change, counted(getattr(os, change)))
        fcntl.flock = counted(fcntl.flock)
        try:
            code, said = run(*command)
        finally:
            os._exit(code)

    def command(forced):
        return ["convert", *paths, place / name, *options, *(["--force"] if forced else [])]

    forced = "--force" in options
    options = [option for option in options if option != "--force"]
    found = []
    assert os.waitstatus_to_exitcode(in_child(-1, command(False))) == 0
    whole = contents()
    before = {each: "6d696e65" for each in whole} if forced else {}
    for moment in range(1000):
        clear()
        for each, content in before.items():
            (place / each).write_bytes(bytes.fromhex(content))
        status = in_child(moment, command(forced))
        left = contents()
        as_before = all(left.get(each) in (whole[each], before.get(each)) for each in whole)
        if contents() != whole:
            in_child(moment // 2, command(forced))  # and once more while it continues
        again = 0
        if contents() != whole:
            again = os.waitstatus_to_exitcode(in_child(-1, command(forced)))
        found.append([moment, status, as_before, again, contents() == whole, names()])
        if status == 0:
            break
    print(json.dumps(found))
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
# Takes seconds: a process is killed at each of its changes of the disk, and others continue.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.array_record", ["--shards", "2"]),
        (".", ["--threads", "1", "--force"]),  # a file for each input
    ],
)
def test_a_conversion_killed_at_any_moment_leaves_whole_files_and_continues(inputs, name, options):
    found = run_program(inputs, KILLED, name, *options)
    assert len(found) > 15
    assert {os.waitstatus_to_exitcode(status) for _, status, *_ in found} == {0, -signal.SIGKILL}
    for moment, _, as_before, again, is_whole, left in found:
        assert as_before, (moment, left)
        assert again == 0, (moment, left)
        assert is_whole, (moment, left)


def test_a_file_that_another_conversion_finishes_first_leaves_no_journal(inputs, monkeypatch):
    rename = local_outputs._rename

    def after_another(temporary, path, *, force):
        path.write_bytes(b"of another conversion")
        rename(temporary, path, force=force)

    monkeypatch.setattr(local_outputs, "_rename", after_another)
    (inputs / "out").mkdir()
    output = inputs / "out/file.array_record"
    assert main(["convert", str(inputs / "in-0.tfrecord"), str(output)]) == ExitCode.EXISTS
    assert [path.name for path in (inputs / "out").iterdir()] == ["file.array_record"]
    assert output.read_bytes() == b"of another conversion"


@pytest.mark.parametrize("forced", [False, True])
def test_two_conversions_that_name_the_same_files_differently_do_not_mix(inputs, forced):
    """Each has a journal of its own, and both write the same temporary files."""
    rng = random.Random(1)
    slow = [rng.randbytes(400).hex().encode() for _ in range(200)]
    (inputs / "slow.tfrecord").write_bytes(formats.tfrecord(slow))
    options = ["--options", "brotli:11", "--threads", "1", *(["--force"] if forced else [])]
    program = [sys.executable, "-m", "grainmill", "convert", inputs / "slow.tfrecord"]
    commands = [
        [*program, inputs / "out/slow.array_record", "--shards", "2", *options],
        [*program, inputs / "out/slow.array_record@2", *options],
    ]
    (inputs / "out").mkdir()
    for pause in (0.05, 0.2):
        processes = []
        for command in commands:
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            time.sleep(pause)
        results = []
        for process in processes:
            _, error = process.communicate(timeout=100)
            results.append((process.returncode, error))
        codes = [code for code, _ in results]
        assert ExitCode.OK in codes, results
        assert set(codes) <= {ExitCode.OK, ExitCode.EXISTS}, results
        for code, error in results:
            if code == ExitCode.EXISTS:
                assert "another conversion" in error or "exists already" in error
        # One that was refused after its first file keeps a journal, which says so to a later run.
        journals = [".slow.array_record.converting", ".slow.array_record@2.converting"]
        refused = {name for name, code in zip(journals, codes, strict=True) if code != ExitCode.OK}
        left = {path.name for path in (inputs / "out").iterdir()}
        names = [f"slow.array_record-0000{number}-of-00002" for number in range(2)]
        assert sorted(left - refused) == names
        records = [record for name in names for record in ArrayRecordReader(inputs / "out" / name)]
        assert records == slow
        for path in (inputs / "out").iterdir():
            path.unlink()
