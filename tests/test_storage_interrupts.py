"""Ctrl-C while a server is silent ends every call that waits for it, and loses nothing."""

import io
import json
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


def names_of_calls():
    code = "import interrupt_storage as program; print('\\n'.join(program.CALLS))"
    command = [sys.executable, "-c", code, str(PROGRAM.parent)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, cwd=PROGRAM.parent
    )
    return done.stdout.splitlines()


# 40 calls wait for a tenth of a second each.
def test_every_call_that_waits_for_a_server_ends(folder):
    names = names_of_calls()
    assert len(names) > 30

    def run(number):
        command = [sys.executable, str(PROGRAM), str(folder), *names[number::NUM_PROCESSES]]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        for number, done in enumerate(pool.map(run, range(NUM_PROCESSES))):
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
