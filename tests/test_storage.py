"""Records in the page cache are read when needed; those on slow storage are prefetched."""

import gc
import pickle
import threading

import numpy as np
import pytest

from grainmill import MapDataset, ReadOptions, _native
from grainmill._evaluate.context import Context
from grainmill._evaluate.sources.element_sources import FileSource
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource


class Files:
    """A fake of the engine's files, which report whether storage is slow."""

    mean_byte_len = 1000.0

    def __init__(self, *, is_slow):
        self.is_slow = is_slow
        self.queues = []

    def read(self, index):
        return [b"%d" % i for i in index]

    def start(self, index, queue):
        self.queues.append(queue)
        files = self

        class Pending:
            num_reads = len(index)

            def finish(self):
                return files.read(index)

        return Pending()


def read_blocks(source, num_blocks):
    index = np.arange(100)
    for _ in range(num_blocks):
        made = source.read(index, source.start(index))
        assert made.failure is None
        assert made.elements == [b"%d" % i for i in range(100)]


def test_records_in_memory_need_no_other_thread():
    files = Files(is_slow=False)
    source = FileSource(files)
    read_blocks(source, 50)
    assert not files.queues
    assert not source.waits_for_storage
    assert source.fill_function() is not None


def test_records_on_slow_storage_are_read_ahead_within_the_bound_of_their_queue():
    files = Files(is_slow=True)
    queue = _native.ReadQueue(7)
    source = FileSource(files, queue)
    read_blocks(source, 50)
    assert files.queues == [queue] * 50
    assert source.waits_for_storage
    assert source.fill_function() is None


def test_storage_that_became_far_or_near_is_followed():
    files = Files(is_slow=False)
    source = FileSource(files)
    for is_slow in (True, False, True):
        files.is_slow = is_slow
        before = len(files.queues)
        read_blocks(source, 3)
        assert len(files.queues) - before == 3 * is_slow


def test_read_that_can_not_be_begun_is_told_where_it_is_finished():
    class Damaged(Files):
        def start(self, *_):
            raise ValueError("no index")

    read_blocks(FileSource(Damaged(is_slow=True)), 2)


def test_failure_of_a_record_comes_alone_after_those_before_it():
    class Damaged(Files):
        def read(self, index):
            raise ValueError(f"one of {len(index)} records")

        def read_one(self, i):
            if i == 3:
                raise ValueError("record 3")
            return b"%d" % i

    made = FileSource(Damaged(is_slow=False)).read(np.arange(5))
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


def test_reads_in_flight_are_an_option_of_their_own(tmp_path):
    source = ArrayRecordDataSource(numbered_file(tmp_path / "numbers.array_record"))
    ds = MapDataset.source(source).map(len)
    for options, expected in ((None, 128), (ReadOptions(max_reads_in_flight=7), 7)):
        with iter(ds.batch(3).to_iter_dataset(options)) as iterator:
            batches = iterator._stage._program.chain.source[1]
            assert batches._parent.chain.source[1]._reads.max_in_flight == expected
    with pytest.raises(ValueError, match="`max_reads_in_flight` must be at least 1 or None, got 0"):
        ReadOptions(max_reads_in_flight=0)


@pytest.mark.parametrize("limit", [None, 1, 10, 1000])
@pytest.mark.parametrize("num_workers", [0, 1, 4, 5, 16, 64])
def test_all_workers_together_have_a_bound_on_reads_in_flight(limit, num_workers):
    context = pickle.loads(pickle.dumps(Context(num_workers=num_workers))).of_reader(limit)
    of_one, count = context.reads.max_in_flight, max(1, num_workers)
    if limit is None:
        assert of_one <= 128
        assert of_one == 128 or num_workers > 4
        assert of_one * count <= max(512, 16 * count)
    else:
        assert limit <= of_one * count < limit + count


@pytest.mark.parametrize("limit", [None, 6])
def test_worker_processes_read_within_the_limit_of_their_pipeline(limit, tmp_path):
    path = tmp_path / "a.array_record"
    with ArrayRecordWriter(str(path), "group_size:1") as writer:
        for number in range(8):
            writer.write(b"%d" % number)

    def limits(_):
        sources = [o for o in gc.get_objects() if isinstance(o, FileSource)]
        return {source._reads.max_in_flight for source in sources}

    options = ReadOptions(max_reads_in_flight=limit, num_workers=2)
    ds = MapDataset.source(ArrayRecordDataSource(str(path))).map(limits).to_iter_dataset(options)
    assert list(ds) == [{128 if limit is None else 3}] * 8
