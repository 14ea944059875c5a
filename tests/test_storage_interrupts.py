"""Ctrl-C while a server is silent ends every call that waits for it, and loses nothing."""

import functools
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grainmill import _native
from grainmill.array_record import ArrayRecordWriter

PROGRAM = Path(__file__).with_name("programs") / "interrupt_storage.py"
NUM_PROCESSES = 4

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture
def folder(tmp_path):
    """Files that are too long to come whole with their index."""
    records = [json.dumps({"a": number, "t": "x" * 2000}).encode() for number in range(300)]
    with ArrayRecordWriter(str(tmp_path / "r.array_record"), "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(records) + b"\n")
    for name, kind, options in (("r.tfrecord", "tfrecord", ""), ("r.bag", "bagz", "uncompressed")):
        output = _native.RecordOutput(str(tmp_path / name), kind, options)
        output.copy_list(records)
        output.close()
    table = pa.table({"a": range(3000), "t": [str(number) * 600 for number in range(3000)]})
    options = {"row_group_size": 500, "compression": "none", "use_dictionary": False}
    pq.write_table(table, tmp_path / "r.parquet", **options)
    with tarfile.open(tmp_path / "r.tar", "w") as tar:
        for number, record in enumerate(records):
            member = tarfile.TarInfo(f"{number:05}.json")
            member.size = len(record)
            tar.addfile(member, io.BytesIO(record))
    return tmp_path


@functools.cache
def names_of_calls():
    code = "import interrupt_storage as program; print('\\n'.join(program.CALLS))"
    command = [sys.executable, "-c", code, str(PROGRAM.parent)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, cwd=PROGRAM.parent
    )
    return done.stdout.splitlines()


def run_calls(folder, names, environment, num_processes=NUM_PROCESSES):
    """Runs each call in one of `num_processes`, which it yields when they have ended."""

    def run(number):
        command = [sys.executable, str(PROGRAM), str(folder), *names[number::num_processes]]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env=os.environ | environment,
        )

    with ThreadPoolExecutor(num_processes) as pool:
        yield from pool.map(run, range(num_processes))


# 40 calls wait for a tenth of a second each.
def test_every_call_that_waits_for_a_server_ends(folder):
    names = names_of_calls()
    assert len(names) > 30
    for number, done in enumerate(run_calls(folder, names, {})):
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("end\n"), done.stderr
        ended = [line.split(" after ")[0] for line in done.stdout.splitlines()[:-1]]
        expected = [f"{name}: KeyboardInterrupt()" for name in names[number::NUM_PROCESSES]]
        assert ended == expected, done.stderr


HANDLED = """
import interrupt_storage as program, os, signal, time
# So long that not all of it is requested at once.
long = (program.folder / "r.tfrecord").read_bytes() * 20
(program.folder / "rlong.tfrecord").write_bytes(long)
make = lambda: iter(program.grain.experimental.TFRecordIterDataset(program.url + "long.tfrecord"))
stream, seen = program.opened(make), []

def handle(*_):
    if seen:
        raise TimeoutError("the handler's own")
    try:  # as a trainer that saves a checkpoint when it is told to end
        seen.append(stream.get_state())
    except ValueError as error:
        seen.append(str(error))

def interrupt_twice():
    for _ in range(2):
        program.interrupt()
        time.sleep(0.2)

signal.signal(signal.SIGINT, handle)
program.threading.Thread(target=interrupt_twice, daemon=True).start()
try:
    while True:
        next(stream)
except TimeoutError as error:
    print(error, len(seen))
"""


def test_handlers_run_while_a_call_waits_and_what_they_raise_ends_it(folder):
    command = [sys.executable, "-c", HANDLED, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=PROGRAM.parent
    )
    assert done.stdout == "the handler's own 1\n", done.stderr


AGAIN = """
import interrupt_storage as program, os, signal, threading
sources = program.grain.sources
has_ended = threading.Event()

def handle(*_):
    if not has_ended.is_set():
        raise KeyboardInterrupt

def interrupt():
    program.asked.wait()
    while not has_ended.is_set():  # one that comes while Python frees an object is lost
        os.kill(os.getpid(), signal.SIGINT)
        has_ended.wait(1)

def iterate(made):
    ds = program.grain.MapDataset.source(made).shuffle(seed=1)
    list(ds.to_iter_dataset(program.grain.ReadOptions()))

def open_many(kind, name):
    getattr(sources, kind)([f"{program.url}{name}?{number}" for number in range(200)])

def stream():
    made = program.grain.experimental.TFRecordIterDataset([program.url + ".tfrecord"] * 100)
    list(program.opened(lambda: iter(made)))

kinds = program.SOURCES.items()
signal.signal(signal.SIGINT, handle)
calls = [
    *(lambda kind=kind: iterate(program.source(*kind)) for kind in kinds),
    *(lambda kind=kind: program.source(*kind).__getitems__(range(0, 300, 3)) for kind in kinds),
    lambda: open_many("ArrayRecordDataSource", ".array_record"),
    lambda: open_many("ParquetDataSource", ".parquet"),
    stream,
]
for call in calls:
    # So often that what they have requested would be all that may be in flight, were it still.
    for _ in range(4):
        program.asked.clear()
        program.silent.set()
        thread = threading.Thread(target=interrupt, daemon=True)
        has_ended.clear()
        try:
            thread.start()
            call()
        except KeyboardInterrupt:
            has_ended.set()
            thread.join()
        else:
            raise AssertionError("it was not interrupted")
    program.silent.clear()
    for suffix, kind in kinds:
        made = getattr(sources, kind)(program.url + suffix)
        made.__getitems__(range(len(made)))
    print("read", flush=True)
program.os._exit(0)
"""


# A request that nobody answers fails after ten minutes.
def test_calls_do_not_wait_for_what_interrupted_ones_have_requested(folder):
    command = [sys.executable, "-c", AGAIN, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=PROGRAM.parent
    )
    assert done.stdout.split() == ["read"] * 15, done.stderr


# 40 calls wait for a second each.
def test_every_call_that_waits_for_a_server_is_reported(folder):
    names = names_of_calls()
    for number, done in enumerate(run_calls(folder, names, {"REPORTED": "1"}, 8)):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines.pop() == "end", done.stderr
        for name, line in zip(names[number::8], lines, strict=True):
            said = r"waiting for (http|s3)://\S+ for \d+ s, 0 retries after"
            assert re.match(rf"{name}: KeyboardInterrupt\(\), {said}", line), line


REPORTED = """
import interrupt_storage as program, logging, threading, time
program.grain.config.update("stall_warning_s", 0.1)
reports = []

class Reports(logging.Handler):
    def emit(self, record):
        reports.append(record.getMessage())

logging.getLogger("grainmill").addHandler(Reports())
made = program.source()
threads = [threading.Thread(target=made.__getitem__, args=(5,), daemon=True, name="user's")]
for thread in threads:
    thread.start()
while len(reports) < 2:
    time.sleep(0.01)
print("\\n".join(reports), flush=True)
program.os._exit(0)
"""


def test_threads_of_the_user_report_too_and_then_at_growing_intervals(folder):
    command = [sys.executable, "-c", REPORTED, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=PROGRAM.parent
    )
    reports = re.findall(
        r"^storage has returned no result for ([\d.]+) s while thread user's waits for it\n"
        r"  waiting for http://\S+/r.array_record for (\d+) s, 0 retries\n",
        done.stdout,
        re.MULTILINE,
    )
    assert len(reports) == 2, (done.stdout, done.stderr)
    assert float(reports[1][0]) == 2 * float(reports[0][0])


ANSWERED = """
import interrupt_storage as program, time
from grainmill._stats import stalls
told_s = []
stalls._StorageWaits.check = lambda self, waited_s: told_s.append(waited_s)
files = [program.folder / f"r{number}.jsonl" for number in range(1200)]
for file in files:
    file.write_bytes(b"1\\n2\\n")
program.delay_s[0] = 0.2
began = time.monotonic()
program.grain.sources.JsonLinesDataSource([f"{program.url}{file.name[1:]}" for file in files])
print(time.monotonic() - began, max(told_s, default=0.0), flush=True)
program.os._exit(0)
"""


# The call waits ten times as long as a request, however busy the machine.
def test_a_call_whose_requests_are_answered_is_not_reported(folder):
    command = [sys.executable, "-c", ANSWERED, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=PROGRAM.parent
    )
    assert not done.returncode, done.stderr
    call_s, longest_s = map(float, done.stdout.split())
    assert call_s > 2
    assert longest_s < call_s / 2
