"""Records in memory are read where they are needed, slow ones ahead of that."""

import threading
import time

import numpy as np
import pytest

from grainmill import MapDataset
from grainmill._evaluate.leaves import FilesLeaf
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource


class Files:
    """Stands in for the engine's files: each record read takes a nap if storage is slow."""

    mean_byte_len = 1000.0

    def __init__(self, *, slow):
        self.slow = slow
        self.started = 0

    def read(self, index):
        for _ in index:
            if self.slow:
                time.sleep(1e-4)
        return [b"%d" % i for i in index]

    def start(self, index):
        self.started += 1
        files = self

        class Pending:
            def finish(self):
                return files.read(index)

        return Pending()


def blocks_started(files, num_blocks):
    leaf = FilesLeaf(files)
    index = np.arange(100)
    for _ in range(num_blocks):
        made = leaf.finish(leaf.start(index))
        assert made.failure is None
        assert made.elements == [b"%d" % i for i in range(100)]
    return files.started


def test_records_in_memory_need_no_other_thread():
    assert blocks_started(Files(slow=False), 50) == 0


def test_slow_records_are_read_ahead_but_for_a_look_now_and_then():
    assert blocks_started(Files(slow=True), 65) == 62


def test_storage_that_became_fast_is_noticed():
    files = Files(slow=True)
    leaf = FilesLeaf(files)
    index = np.arange(100)
    leaf.finish(leaf.start(index))
    files.slow = False
    for _ in range(40):
        leaf.finish(leaf.start(index))
    started = files.started
    assert started == 31
    leaf.finish(leaf.start(index))
    assert files.started == started


def test_storage_that_became_slow_is_noticed():
    files = Files(slow=False)
    leaf = FilesLeaf(files)
    index = np.arange(100)
    for _ in range(10):
        leaf.finish(leaf.start(index))
    files.slow = True
    for _ in range(9):
        leaf.finish(leaf.start(index))
    assert leaf.waits
    assert files.started >= 1


def test_failure_of_a_record_comes_alone_after_those_before_it():
    class Damaged(Files):
        def read(self, index):
            raise ValueError(f"one of {len(index)} records")

        def read_one(self, i):
            if i == 3:
                raise ValueError("record 3")
            return b"%d" % i

    made = FilesLeaf(Damaged(slow=False)).read(np.arange(5))
    assert made.elements == [b"0", b"1", b"2"]
    assert str(made.failure) == "record 3"
    assert made.failure.__context__ is None


def numbered_file(path):
    with ArrayRecordWriter(str(path), "group_size:1") as writer:
        for number in range(100):
            writer.write(b"%d" % number)
    return str(path)


def test_pipelines_read_files_by_blocks_in_the_engine(tmp_path, monkeypatch):
    source = ArrayRecordDataSource(numbered_file(tmp_path / "numbers.array_record"))

    def unused(*_):
        pytest.fail("asked for single records or lists of them")

    monkeypatch.setattr(ArrayRecordDataSource, "__getitems__", unused)
    before = set(threading.enumerate())
    assert list(MapDataset.source(source)) == [b"%d" % number for number in range(100)]
    started = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("grain-prefetch") for thread in started)


def test_sources_that_change_records_keep_their_say(tmp_path):
    class Doubled(ArrayRecordDataSource):
        def __getitem__(self, record_key):
            return super().__getitem__(record_key) * 2

        __getitems__ = None

    source = Doubled(numbered_file(tmp_path / "numbers.array_record"))
    assert list(MapDataset.source(source))[7] == b"77"
