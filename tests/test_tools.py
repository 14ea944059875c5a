"""The commands of `grainmill`: what they print, find, and exit with."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_formats import bagz
from test_convert import tfrecord, write_tfrecord

import grainmill as grain
from grainmill import files
from grainmill._files import formats, tf_example
from grainmill._tools import bench, bench_plot, completion, console, info
from grainmill._tools.console import ExitCode
from grainmill._tools.main import COMMANDS, command_parser, main
from grainmill.array_record import ArrayRecordWriter

CORPUS = Path(__file__).parent / "data/array_record"


def call(capsys, *arguments):
    """The exit code, output and errors of a command."""
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def write_array_record(path, records, options=""):
    with ArrayRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)


def example(**features):
    return tf_example.encode(features)


# --- help and errors ----------------------------------------------------------------------------


def test_help_of_each_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in text
        if command == "as-grain":
            assert main([command, "--help"]) == 0
        else:
            with pytest.raises(SystemExit) as ended:
                main([command, "--help"])
            assert ended.value.code == 0
        assert f"grainmill {command}" in capsys.readouterr().out
    for code in console.EXIT_CODES.values():
        assert code in text


def test_help_imports_no_command_and_the_package_no_tool():
    code = (
        "import sys, grainmill; assert not [m for m in sys.modules if '_tools' in m]\n"
        "from grainmill._tools.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if '_tools.' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['grainmill._tools.console', 'grainmill._tools.main']"


def test_unknown_commands_and_versions(capsys):
    assert call(capsys, "frobnicate")[0] == ExitCode.USAGE
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"grainmill {grain.__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "grainmill", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"grainmill {grain.__version__}\n"


@pytest.mark.parametrize("command", ["info", "cat", "head", "verify"])
def test_missing_files_are_one_line(capsys, command):
    code, out, err = call(capsys, command, "missing.array_record")
    assert (code, out) == (ExitCode.SYSTEM, "")
    assert err == f"grainmill {command}: missing.array_record: no such file\n"


def test_traceback_on_request(capsys):
    code, _, err = call(capsys, "info", "missing.array_record", "--traceback")
    assert code == ExitCode.SYSTEM
    assert "Traceback" in err


def test_a_closed_pipe_is_no_error(tmp_path):
    write_array_record(tmp_path / "a.array_record", [b"text"] * 50_000)
    command = (
        f"{sys.executable} -m grainmill cat a.array_record | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "text\n141\n"
    assert done.stderr == ""


# --- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.array_record", "array_record"),
        ("a.array_record-00000-of-00010", "array_record"),
        ("data-00003-of-00010.tfrecord", "tfrecord"),
        ("train.tfrecord-00003-of-00010.gz", "tfrecord"),
        ("a.tfrecords.gz", "tfrecord"),
        ("a.ndjson", "jsonl"),
        ("a.array_record@12", "array_record"),
        ("mnist-train.array_record-00000-of-00001", "array_record"),
        ("a.bag", "bagz"),
        ("a.txt", None),
    ],
)
def test_formats_by_name(name, expected):
    found = formats.of_name(f"some/dir/{name}")
    assert (found and found.name) == expected


def test_content_decides_before_the_name(tmp_path):
    write_array_record(tmp_path / "a.tfrecord", [b"x"])
    write_tfrecord(tmp_path / "b.array_record", [b"x"])
    (tmp_path / "c").write_bytes(b'{"a": 1}\n')
    found = [
        formats.detect_format(str(tmp_path / name)).name
        for name in ("a.tfrecord", "b.array_record", "c")
    ]
    assert found == ["array_record", "tfrecord", "jsonl"]


def test_arguments_name_many_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"a-{number:05}-of-00003.tfrecord" for number in range(3)]
    for name in [*names, "notes.txt", ".hidden.tfrecord"]:
        Path(name).write_bytes(b"")
    assert formats.find_files(["a@3.tfrecord"]) == names
    assert formats.find_files(["a-*"]) == names
    assert formats.find_files(["."]) == [f"./{name}" for name in names]
    assert formats.find_files(["notes.txt", "a-*1-*"]) == ["notes.txt", names[1]]


# --- info ---------------------------------------------------------------------------------------


def test_info_counts_records_bytes_and_chunks(tmp_path, capsys):
    records = [b"x" * length for length in (0, 1, 2, 3, 4, 200, 201)]
    path = tmp_path / "a.array_record"
    write_array_record(path, records, "group_size:3,uncompressed")
    code, out, _ = call(capsys, "info", path, "--json")
    found = json.loads(out)["files"][0]
    assert code == 0
    assert (found["records"], found["chunks"], found["records_per_chunk"]) == (7, 3, 3)
    assert (found["bytes"], found["record_bytes"]) == (path.stat().st_size, sum(map(len, records)))
    assert "uncompressed" in found["options"]
    assert found["sizes"]["histogram"] == [
        [0, 1, 1], [1, 2, 1], [2, 4, 2], [4, 8, 1], [8, 16, 0], [16, 32, 0], [32, 64, 0],
        [64, 128, 0], [128, 256, 2],
    ]  # fmt: skip
    _, text, _ = call(capsys, "info", path)
    assert "3 of 3 records" in text


def test_info_takes_a_sample_of_many_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(info, "_SAMPLE", 10)
    write_array_record(tmp_path / "a.array_record", [b"x" * (n % 5) for n in range(100)])
    found = json.loads(call(capsys, "info", tmp_path / "a.array_record", "--json")[1])["files"][0]
    assert (found["records"], found["sizes"]["exact"]) == (100, False)
    arguments = ["info", tmp_path / "a.array_record", "--full", "--json"]
    found = json.loads(call(capsys, *arguments)[1])["files"][0]
    assert (found["record_bytes"], found["sizes"]["exact"]) == (200, True)


def test_info_of_empty_and_of_several_files(tmp_path, capsys):
    write_tfrecord(tmp_path / "a.tfrecord", [])
    write_tfrecord(tmp_path / "b.tfrecord", [b"abc"])
    code, out, _ = call(capsys, "info", tmp_path)
    assert code == 0
    assert out.splitlines()[-1] == "2 files: 1 record, 19 B"


def test_info_of_compressed_files_and_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"n": 1, "t": "x"}\n' * 10, "utf-8")
    for name in ("b.jsonl.gz", "c.bagz", "d.bag"):
        assert call(capsys, "convert", "a.jsonl", name)[0] == 0
    assert call(capsys, "convert", "a.jsonl", "e.parquet", "--options", "gzip:1")[0] == 0
    lines = {
        name: [" ".join(line.split()) for line in call(capsys, "info", name)[1].splitlines()]
        for name in ("a.jsonl", "b.jsonl.gz", "c.bagz", "d.bag", "e.parquet")
    }
    assert "compression none" in lines["a.jsonl"]
    assert "compression gzip" in lines["b.jsonl.gz"]
    assert "compression zstd" in lines["c.bagz"]
    assert "compression none" in lines["d.bag"]
    assert "compression gzip" in lines["e.parquet"]
    assert "row groups 1 of up to 10 rows" in lines["e.parquet"]
    assert lines["e.parquet"][lines["e.parquet"].index("columns n: Int64") + 1] == "t: Utf8"


# --- cat and head -------------------------------------------------------------------------------


def test_views_of_records(tmp_path, capsys):
    records = [b'{"a": 1}', b"plain text", example(n=[1, -2], s=["x"]), b"\x00\xff\x01"]
    write_array_record(tmp_path / "a.array_record", records)
    _, out, _ = call(capsys, "cat", tmp_path / "a.array_record")
    lines = out.splitlines()
    assert lines[:2] == ['{"a": 1}', "plain text"]
    assert json.loads(lines[2]) == {"n": [1, -2], "s": ["x"]}
    assert lines[3:] == ["record 3, 3 bytes", f"  00000000  {'00 ff 01':<47}  ..."]
    _, out, _ = call(capsys, "cat", tmp_path / "a.array_record", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [line["index"] for line in found] == [0, 1, 2, 3]
    assert found[0]["record"] == {"a": 1}
    assert found[1]["text"] == "plain text"
    assert found[2]["record"] == {"n": [1, -2], "s": ["x"]}
    assert found[3]["hex"] == "00ff01"


def test_raw_records_are_exact(tmp_path):
    write_array_record(tmp_path / "a.array_record", [b"\x00\xff", b""])
    command = [sys.executable, "-m", "grainmill", "cat", "a.array_record", "--as", "raw"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"\x00\xff\n\n"


@pytest.mark.parametrize("name", ["a.array_record", "a.tfrecord"])
def test_records_by_index_and_range(tmp_path, capsys, name):
    records = [f"record {number}".encode() for number in range(30)]
    write = write_array_record if name == "a.array_record" else write_tfrecord
    write(tmp_path / name, records)
    for arguments, expected in [
        (["-i", "3"], [3]),
        (["-i", "3,1:4", "-i", "29"], [3, 1, 2, 3, 29]),
        (["-i", "28:"], [28, 29]),
        (["-i", ":2"], [0, 1]),
        (["-n", "2"], [0, 1]),
        (["-i", "5:9", "-n", "1"], [5]),
    ]:
        code, out, _ = call(capsys, "cat", tmp_path / name, *arguments)
        assert (code, out.split("\n")[:-1]) == (0, [f"record {number}" for number in expected])
    assert len(call(capsys, "head", tmp_path / name)[1].splitlines()) == 10
    code, _, err = call(capsys, "cat", tmp_path / name, "-i", "30")
    assert code == ExitCode.USAGE
    assert "no record 30, it has 30" in err
    assert call(capsys, "cat", tmp_path / name, "-i", "x")[0] == ExitCode.USAGE


def test_a_record_that_is_not_what_was_asked_for(tmp_path, capsys):
    write_array_record(tmp_path / "a.array_record", [b"\xff"])
    for view in ("json", "example"):
        code, _, err = call(capsys, "cat", tmp_path / "a.array_record", "--as", view)
        assert code == ExitCode.DAMAGED
        assert "record 0" in err


# --- verify -------------------------------------------------------------------------------------


def test_verify_agrees_with_readers_on_the_corpus(capsys):
    """Files that can be read whole have no problem but chunks that their index leaves out."""
    for path in sorted([*CORPUS.glob("*.array_record*"), *CORPUS.glob("bad/*.array_record")]):
        code, out, _ = call(capsys, "verify", path, "--from", "array_record", "--json")
        problems = json.loads(out)["files"][0]["problems"]
        try:
            source = grain.sources.ArrayRecordDataSource(str(path))
            source.__getitems__(range(len(source)))
            is_readable = True
        except grain.GrainmillError:
            is_readable = False
        assert code == (ExitCode.DAMAGED if problems else ExitCode.OK)
        if not is_readable:
            assert problems, path


def test_verify_names_every_bad_chunk(tmp_path, capsys):
    path = tmp_path / "a.array_record"
    write_array_record(path, [bytes([number]) * 200 for number in range(100)], "uncompressed")
    data = bytearray(path.read_bytes())
    for number in (3, 50, 99):
        data[data.index(bytes([number]) * 200) + 7] ^= 1
    path.write_bytes(data)
    code, out, _ = call(capsys, "verify", path)
    assert code == ExitCode.DAMAGED
    assert out.splitlines()[0].startswith(f"{path}: 3 problems; intact: 97 records")
    assert [line.split(" at byte")[0] for line in out.splitlines()[1:]] == [
        "  chunk 3",
        "  chunk 50",
        "  chunk 99",
    ]
    code, out, _ = call(capsys, "verify", path, "--max-problems", "2")
    assert "at least 2 problems" in out


def test_verify_names_every_bad_record_of_a_tfrecord_file(tmp_path, capsys):
    data = bytearray(tfrecord([b"x" * 10] * 20))
    for record in (2, 7):
        data[record * 26 + 15] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(data[:-1])
    code, out, _ = call(capsys, "verify", tmp_path / "a.tfrecord", "--json")
    found = json.loads(out)["files"][0]
    assert code == ExitCode.DAMAGED
    assert [(bad["record"], bad["offset"]) for bad in found["problems"]] == [
        (2, 52),
        (7, 182),
        (19, 494),
    ]
    assert found["records"] == 17


def test_verify_names_every_line_that_is_not_json(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nnope\n{}\n{"b": \n', "utf-8")
    code, out, _ = call(capsys, "verify", tmp_path / "a.jsonl", "--json")
    assert code == ExitCode.DAMAGED
    assert [bad["record"] for bad in json.loads(out)["files"][0]["problems"]] == [1, 3]


def test_content_with_a_mark_says_more_than_a_name(tmp_path):
    def format_of(name, data):
        (tmp_path / name).write_bytes(data)
        return formats.detect_format(str(tmp_path / name)).name

    assert format_of("a.bag", bagz([b'{"a": 1}'])) == "bagz"  # which has no mark
    assert format_of("b.bag", tfrecord([b"x"])) == "tfrecord"
    assert format_of("c.txt", b'{"a": 1}\n') == "jsonl"


def test_an_interrupt_that_a_lock_makes_an_error_of_is_an_interrupt(monkeypatch, capsys):
    """One that comes while a `Condition` acquires its lock again, after another one."""

    def run(_options):
        def interrupted(*_arguments):
            raise KeyboardInterrupt

        condition = threading.Condition()
        condition._acquire_restore = interrupted
        with condition:
            condition.wait(0.001)

    monkeypatch.setattr(info, "run", run)
    assert main(["info", "file"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "grainmill info: interrupted\n"


@pytest.mark.parametrize("suffix", ["array_record", "tfrecord", "jsonl", "bag"])
def test_verify_shows_progress_within_a_file_and_can_be_interrupted(tmp_path, suffix):
    records = [b'{"a": "%s"}' % (b"%d" % number * 1000) for number in range(5000)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "array_record":
        write_array_record(path, records, "uncompressed")
    elif suffix == "tfrecord":
        path.write_bytes(tfrecord(records))
    elif suffix == "jsonl":
        path.write_bytes(b"".join(record + b"\n" for record in records))
    else:
        path.write_bytes(bagz(records))
    told = []
    report = files.verify(path, progress=lambda *progress: told.append(progress))
    assert not report["problems"]
    shares, counts = zip(*told, strict=True)
    assert len(told) >= 4
    assert list(shares) == sorted(shares)
    assert 0.6 < shares[-1] <= 1
    assert list(counts) == sorted(counts)
    assert counts[-1] <= report["records"] == 5000

    def interrupt(share, _num_records):
        if share > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.verify(path, progress=interrupt)


def test_manifests_are_written_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_array_record(f"a{number}.array_record", [b"x"] * number)
    command = ["verify", "a0.array_record", "a1.array_record", "a2.array_record", "--manifest", "m"]
    assert call(capsys, *command)[0] == 0
    manifest = Path("m").read_bytes()
    assert [entry["records"] for entry in json.loads(manifest)["files"]] == [0, 1, 2]
    assert call(capsys, *command)[0] == 0
    write_array_record("a1.array_record", [b"y"])  # intact, but another
    code, out, _ = call(capsys, *command)
    assert code == ExitCode.DAMAGED
    assert "the manifest states sha256" in out
    Path("a2.array_record").unlink()
    code, out, _ = call(capsys, *command[:2], *command[4:])
    assert code == ExitCode.DAMAGED
    assert "a2.array_record: in the manifest" in out
    assert Path("m").read_bytes() == manifest
    Path("a1.array_record").rename("a2.array_record")
    assert call(capsys, "verify", *["a2.array_record", "--manifest", "m", "--update"])[0] == 0
    assert call(capsys, "verify", *["a2.array_record", "--manifest", "m"])[0] == 0
    Path("m").write_text("{}", "utf-8")
    assert call(capsys, *command[:2], *command[4:])[0] == ExitCode.USAGE


# --- index, bench, as-grain, completion ---------------------------------------------------------


def test_index_of_array_record_files(tmp_path, capsys):
    paths = [tmp_path / f"{number}.array_record" for number in range(3)]
    for number, path in enumerate(paths):
        write_array_record(path, [b"x"] * number)
    code, out, _ = call(capsys, "index", *paths, "-o", tmp_path / "index")
    assert (code, out) == (0, "3 files, 3 records\n")
    source = grain.sources.ArrayRecordDataSource(list(map(str, paths)), index=tmp_path / "index")
    assert len(source) == 3
    assert call(capsys, "index", *paths)[0] == ExitCode.USAGE


def test_bench_measures_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pipeline_to_bench.py").write_text(
        "import numpy as np, grainmill as grain\n"
        "def make():\n"
        "    return grain.MapDataset.range(100).map(lambda n: np.full(10, n)).batch(10)\n"
        "not_one = 5\n",
        "utf-8",
    )
    command = ["bench", "pipeline_to_bench.py:make", "--svg", "plot.svg"]
    code, out, err = call(capsys, *command, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["elements"] == 9  # of ten, one to warm up
    assert found["bytes_per_element"] == 800
    assert found["elements_per_s"] > 0
    assert "consumer" not in found["verdict"]
    assert ElementTree.parse("plot.svg").getroot().tag.endswith("svg")
    code, out, _ = call(capsys, *command)
    assert "elements/s" in out
    for target in ("nothing", "no_such_module:x", "pipeline_to_bench.py:y", "json:loads.x"):
        assert call(capsys, "bench", target)[0] == ExitCode.USAGE
    assert call(capsys, "bench", "pipeline_to_bench.py:not_one")[0] == ExitCode.USAGE
    assert call(capsys, "bench", "missing.py:x")[0] == ExitCode.SYSTEM


def test_bench_compares_pipelines(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("to_compare.py").write_text(
        "import numpy as np, grainmill as grain\n"
        "print('printed')\n"
        "ds = grain.MapDataset.range(100).map(lambda n: np.full(10, n))\n"
        "def batches():\n"
        "    return ds.batch(10)\n"
        "fails = 5\n",
        "utf-8",
    )
    targets = ["to_compare.py:ds", "to_compare.py:batches"]
    files = ["--svg", "plot.svg", "--html", "page.html"]
    assert call(capfd, "bench", *targets, *files, "--json")[0] == 0
    code, out, err = call(capfd, "bench", *targets, "--json", "-n", "5")
    assert code == 0, err
    found = json.loads(out)["pipelines"]
    assert [each["pipeline"] for each in found] == targets
    assert [each["elements"] for each in found] == [5, 5]
    assert len({each["pid"] for each in found}) == 2
    drawn = ElementTree.parse("plot.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{space}polyline")) == 4
    page = Path("page.html").read_text("utf-8")
    assert Path("plot.svg").read_text("utf-8") in page
    assert "href" not in page
    assert "src" not in page
    code, out, err = call(capfd, "bench", *targets)
    assert out.splitlines()[0].split() == targets
    assert "printed" in err
    assert call(capfd, "bench", targets[0], "to_compare.py:fails")[0] == ExitCode.USAGE


@given(st.lists(st.floats(1e-6, 0.3), max_size=300))
def test_rates_are_of_50_ms_at_least_and_leave_out_no_element(waits):
    ends = list(itertools.accumulate(waits))
    found = bench.rates(ends)
    assert len(found) <= 100
    times = [0.0, *(at for at, _ in found)]
    widths = [after - before for before, after in itertools.pairwise(times)]
    assert all(width >= bench._MIN_BIN_S - 1e-3 for width in widths) or len(found) == 1
    if ends:
        assert times[-1] == pytest.approx(ends[-1], abs=1e-3)
        elements = sum(rate * width for (_, rate), width in zip(found, widths, strict=True))
        if ends[-1] >= bench._MIN_BIN_S:  # times are rounded
            assert elements == pytest.approx(len(ends), rel=0.01)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(waits):
    found = bench.percentiles(waits)
    for name, share in {"p50": 50, "p99": 99, "max": 100}.items():
        expected = np.percentile(waits, share, method="inverted_cdf")
        assert found[name] == pytest.approx(expected, abs=1e-8)


def test_nothing_is_known_of_no_elements():
    assert (bench.percentiles([]), bench.rates([])) == ({}, [])


@given(st.floats(1e-3, 1e12))
def test_ticks_are_round(end):
    found = bench_plot.ticks(end)
    step = found[1]
    assert f"{step:e}"[0] in "125"
    assert float(f"{step:.0e}") == pytest.approx(step)
    assert 3 <= len(found) <= 8
    assert found[0] == 0
    assert found[-2] < end <= found[-1] * (1 + 1e-6)


def test_as_grain_runs_a_program(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys, grain\nprint(grain.MapDataset.range(3)[2], sys.argv[1:])\n", "utf-8"
    )
    command = [sys.executable, "-m", "grainmill", "as-grain", "program.py", "--json", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2 ['--json', 'x']\n"


def test_as_grain_without_a_program(tmp_path, capsys):
    for path, problem in ((tmp_path / "missing.py", "no such file"), (tmp_path, "a directory")):
        code, out, err = call(capsys, "as-grain", path)
        assert (code, out) == (ExitCode.SYSTEM, "")
        assert err == f"grainmill as-grain: {path}: {problem}\n"


def test_cores_of_a_short_run_are_not_known(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short_pipeline.py").write_text(
        "import grainmill as grain\nds = grain.MapDataset.range(100).repeat()\n", "utf-8"
    )
    command = ["bench", "short_pipeline.py:ds", "--svg", "plot.svg"]
    found = json.loads(call(capsys, *command, "-n", "10", "--json")[1])
    assert found["cores"] is None
    assert "cores" not in Path("plot.svg").read_text("utf-8")
    assert "too short to say how many cores" in call(capsys, *command, "-n", "10")[1]
    found = json.loads(call(capsys, *command, "--seconds", "0.6", "--json")[1])
    assert 0 < found["cores"] < 10


PRINTS = """
import atexit, os, sys
import grainmill as grain
print("while it is imported")
def noisy(n):
    print("in a function")
    os.write(1, b"past Python\\n")
    return n
def make():
    print("while it is made")
    ds = grain.MapDataset.range(4).map(noisy)
    return ds.to_iter_dataset(grain.ReadOptions(num_workers=1))
"""


OWN_VERDICT = """
import grainmill as grain
class Own(grain.IterDataset):
    def __iter__(self):
        return OwnIterator(self._parent.__iter__())
class OwnIterator(grain.DatasetIterator):
    def __next__(self):
        return next(self._parent)
    def get_state(self):
        return self._parent.get_state()
    def set_state(self, state):
        self._parent.set_state(state)
    def verdict(self):
        return "all is well"
ds = Own(grain.MapDataset.range(4).to_iter_dataset())
"""


def test_bench_takes_the_verdict_of_a_users_iterator(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outspoken_pipeline.py").write_text(OWN_VERDICT, "utf-8")
    code, out, err = call(capsys, "bench", "outspoken_pipeline.py:ds", "--json")
    assert code == 0, err
    assert json.loads(out)["verdict"] == "all is well"


def test_bench_prints_json_alone(tmp_path):
    (tmp_path / "noisy_pipeline.py").write_text(PRINTS, "utf-8")
    command = [sys.executable, "-m", "grainmill", "bench", "noisy_pipeline.py:make", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["elements"] == 3
    for text in ("while it is imported", "while it is made", "in a function", "past Python"):
        assert text in done.stderr


def test_count_is_that_of_all_files_together(tmp_path, capsys):
    paths = [tmp_path / f"{number}.array_record" for number in range(3)]
    for number, path in enumerate(paths):
        write_array_record(path, [b"%d%d" % (number, at) for at in range(3)])
    for command in ("cat", "head"):
        for count in (0, 2, 3, 5, 9, 20):
            code, out, _ = call(capsys, command, *paths, "-n", count, "--as", "raw")
            assert code == 0
            assert out.split() == [f"{n // 3}{n % 3}" for n in range(min(count, 9))]
    assert len(call(capsys, "cat", *paths, "--as", "raw")[1].split()) == 9


def test_completion_in_zsh_keeps_what_help_says(capsys):
    _, out, _ = call(capsys, "completion", "zsh")
    assert r"how many records at most, of all files together (default\: all)" in out
    out = out.replace("'\\''", "'")
    for command in COMMANDS:
        for option in completion.options_of(command):
            text = option.help.replace("%%", "%")
            for char in "[]:":
                text = text.replace(char, f"\\{char}")
            assert f"[{text}]" in out


def test_completion_in_bash():
    script = (
        'source <("$1" -m grainmill completion bash)\n'
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _grainmill; echo "${COMPREPLY[*]}"; }\n'
        "try grainmill ver; try grainmill convert --sh; try grainmill cat --as ''; "
        "try grainmill completion f"
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "verify",
        "--shards --shuffle",
        "auto raw json example hex",
        "fish",
    ]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_names_every_option(shell, capsys):
    _, out, _ = call(capsys, "completion", shell)
    for command in COMMANDS:
        assert command in out
        for option in completion.options_of(command):
            for name in option.names:
                assert (name if shell != "fish" else name.lstrip("-")) in out


def test_every_command_has_json():
    for command in COMMANDS.keys() - {"as-grain", "completion"}:
        assert "--json" in command_parser(command).format_help()


def test_progress_line_has_rate_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    progress = console.Progress("convert", 100, shown=True)
    progress.tell(20, 5000, "1 of 4 files")
    assert capsys.readouterr().err == (
        "\rconvert  [####................]  20%  1 of 4 files  5,000 records, 500/s  0:00:40 left"
        "\x1b[K"
    )
