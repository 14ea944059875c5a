"""The record writer from Python, including I/O errors."""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grainmill._native import ArrayRecordWriter, GrainmillError


def test_plain_file_has_the_bytes_that_array_record_writes(tmp_path):
    path = tmp_path / "file"
    with ArrayRecordWriter(str(path), "uncompressed") as writer:
        for number in range(12_000):
            writer.write(b"%d" % number)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == (
        "14c087187b0a6c9815aec61e8609b159f5eff87985c209744b01bafd900736df"
    )


def test_only_bytes_are_records(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "file"))
    for value in ("text", bytearray(b"x"), memoryview(b"x"), None, 3):
        with pytest.raises(TypeError):
            writer.write(value)
    writer.write(b"")
    writer.close()


def test_options_that_make_no_sense_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="Option group_size: invalid value: 0, valid values"):
        ArrayRecordWriter(str(tmp_path / "file"), "group_size:0")
    assert not (tmp_path / "file").exists()


def test_unknown_keyword_arguments_are_ignored(tmp_path):
    writer = ArrayRecordWriter(path=str(tmp_path / "file"), options="", buffer=3)
    assert writer.ok()
    writer.close()


def test_writer_tells_whether_it_is_open(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "file"))
    assert writer.ok()
    assert writer.is_open()
    writer.close()
    writer.close()
    assert not writer.ok()
    assert not writer.is_open()
    with pytest.raises(RuntimeError, match="Object closed"):
        writer.write(b"late")


@pytest.mark.parametrize(
    ("place", "problem"), [("missing/file", "No such file"), (".", "Is a directory")]
)
def test_path_that_cannot_be_opened_shows_on_first_use(tmp_path, place, problem):
    path = tmp_path / place
    writer = ArrayRecordWriter(str(path))
    assert not writer.ok()
    assert writer.is_open()
    for call in (lambda: writer.write(b"x"), writer.close, writer.close):
        with pytest.raises(RuntimeError, match=problem) as caught:
            call()
        assert str(path) in str(caught.value)
    assert not writer.is_open()


def test_full_disk_is_an_error_that_names_the_file():
    writer = ArrayRecordWriter("/dev/full", "uncompressed")
    with pytest.raises(GrainmillError, match="/dev/full: write: No space left on device"):
        writer.write(bytes(2 << 20))
    assert not writer.ok()
    assert writer.is_open()
    for call in (lambda: writer.write(b"x"), writer.close, lambda: writer.write(b"x")):
        with pytest.raises(RuntimeError, match="No space left on device"):
            call()
    assert not writer.is_open()


def test_full_disk_shows_in_close_if_not_before():
    writer = ArrayRecordWriter("/dev/full")
    writer.write(b"short")
    with pytest.raises(RuntimeError, match="/dev/full: write: No space left on device"):
        writer.close()


def test_files_that_cannot_be_synced_are_closed_without_error(tmp_path):
    writer = ArrayRecordWriter("/dev/null")
    writer.write(b"short")
    writer.close()
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with ArrayRecordWriter(str(tmp_path / "pipe")) as writer:
        writer.write(b"short")
    reader.join()
    assert len(found[0]) % 65536 == 0
    assert found[0]


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_close_lets_go_of_the_file_whatever_becomes_of_it(path):
    def num_open():
        files = Path("/proc/self/fd").iterdir()
        return sum(file.is_symlink() and str(file.readlink()) == path for file in files)

    before = num_open()
    writer = ArrayRecordWriter(path)
    writer.write(b"short")
    assert num_open() == before + 1
    for _ in range(2):
        with contextlib.suppress(GrainmillError):
            writer.close()
        assert num_open() == before


def test_file_size_limit_is_an_error_and_not_a_short_file(tmp_path):
    program = f"""
import resource, signal
from grainmill._native import ArrayRecordWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
writer = ArrayRecordWriter({str(tmp_path / "file")!r}, "uncompressed")
for number in range(300):
    writer.write(bytes(1000))
try:
    writer.close()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert "write: File too large" in done.stdout
    assert (tmp_path / "file").stat().st_size <= 150_000


def test_exception_inside_with_leaves_the_file_unfinished(tmp_path):
    path = tmp_path / "file"
    writer = ArrayRecordWriter(str(path))

    def fail():
        with writer:
            writer.write(b"x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not writer.is_open()
    assert path.stat().st_size < 65536, "no postscript"
    with pytest.raises(RuntimeError, match="Object closed"):
        writer.write(b"late")


def test_dropped_writer_leaves_the_file_unfinished(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "file"))
    writer.write(b"x")
    del writer
    assert (tmp_path / "file").stat().st_size < 65536


def test_interpreter_is_free_while_a_chunk_is_compressed(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "file"), "brotli:11")
    record = b"".join(b"%d," % (number * number) for number in range(50_000))
    thread = threading.Thread(target=writer.write, args=(record,))
    thread.start()
    ticks = 0
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    writer.close()
    assert ticks > 10, "this thread ran while the other one compressed"


def test_threads_may_share_a_writer(tmp_path):
    path = tmp_path / "file"
    with ArrayRecordWriter(str(path), "group_size:10,uncompressed") as writer:
        write = lambda: [writer.write(b"same length") for _ in range(5_000)]  # noqa: E731
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    alone = tmp_path / "alone"
    with ArrayRecordWriter(str(alone), "group_size:10,uncompressed") as writer:
        for _ in range(20_000):
            writer.write(b"same length")
    assert path.read_bytes() == alone.read_bytes()
