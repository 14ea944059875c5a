"""Agreement with the real `array_record` and with Grain's sources."""

import contextlib
import dataclasses
import random
import re
from operator import itemgetter, methodcaller

import pytest

from grainmill.array_record import ArrayRecordReader
from grainmill.sources import ArrayRecordDataSource, RangeDataSource

theirs = pytest.importorskip("array_record.python.array_record_module")
their_source = pytest.importorskip("array_record.python.array_record_data_source")

OPTIONS = [
    "group_size:1,uncompressed",
    "group_size:7,uncompressed",
    "group_size:1",
    "group_size:100,zstd:1",
    "group_size:3,brotli:5",
    "group_size:64,brotli:5,window_log:26",
    "group_size:10,snappy",
    "group_size:50,transpose,zstd",
    "group_size:50,transpose,uncompressed,transpose_bucket_size:1K",
    "group_size:4,pad_to_block_boundary:true,uncompressed",
]


def some_records(seed):
    source = random.Random(seed)
    longest = source.choice([10, 1_000, 30_000, 150_000])
    return [source.randbytes(source.randrange(longest)) for _ in range(source.randrange(120))]


def written(path, options, records):
    writer = theirs.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def outcome(act, *args):
    """The result of `act`, or the type and text of its exception."""
    try:
        return act(*args)
    except (IndexError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_files_of_array_record_read_alike(tmp_path, options, seed):
    records = some_records(f"{options}{seed}")
    path = written(tmp_path / "file", options, records)
    with ArrayRecordReader(path) as reader:
        assert reader.read_all() == records == list(reader)
        assert [reader.read() for _ in records] == records
        theirs_says = theirs.ArrayRecordReader(str(path)).writer_options_string()
        assert reader.writer_options_string() == theirs_says


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_give_what_array_record_gives(tmp_path, seed):
    source = random.Random(seed)
    path = str(written(tmp_path / "file", source.choice(OPTIONS), some_records(seed)))
    pair = ArrayRecordReader(path), theirs.ArrayRecordReader(path)
    for _ in range(60):
        first, second = source.randrange(-5, 130), source.randrange(-5, 130)
        act = source.choice(
            [
                methodcaller("read"),
                methodcaller("read", [abs(first), abs(second)]),
                methodcaller("read", first, second),
                methodcaller("seek", first),
                methodcaller("record_index"),
                methodcaller("num_records"),
                methodcaller("is_open"),
            ]
        )
        ours, expected = outcome(act, pair[0]), outcome(act, pair[1])
        if isinstance(expected, tuple) and expected[0] == "RuntimeError":
            # If both indices are invalid, the error may name either.
            assert ours[0] == "RuntimeError"
            assert "out of bound" in ours[1]
        else:
            assert ours == expected


@pytest.mark.parametrize(
    "options",
    [
        "foo",
        "max_parallelism:-1",
        "max_parallelism:x",
        "max_parallelism",
        "max_parallelism: +1",
        "max_parallelism:1,max_parallelism:2",
        "readahead_buffer_size:16MB",
        "readahead_buffer_size:2G",
        "readahead_buffer_size:1.5K",
        "readahead_buffer_size:1e3",
        "readahead_buffer_size:auto,,max_parallelism:auto",
        "index_storage_option:bar",
        "index_storage_option:",
        "index_storage_option:offloaded",
        "index_storage_option:offloaded,footer_prefetch_bytes:0",
        " max_parallelism:1",
        "default",
    ],
)
def test_reader_options_are_taken_and_refused_alike(tmp_path, options):
    path = str(written(tmp_path / "file", "", [b"a"]))
    ours = outcome(lambda: ArrayRecordReader(path, options).read())
    assert ours == outcome(lambda: theirs.ArrayRecordReader(path, options).read())


def test_missing_file_is_reported_alike(tmp_path):
    path = str(tmp_path / "nowhere")
    pair = ArrayRecordReader(path), theirs.ArrayRecordReader(path)
    for name in ("ok", "is_open", "num_records", "record_index", "read", "read_all", "close"):
        ours, expected = (outcome(getattr(reader, name)) for reader in pair)
        assert ours == expected, name


@dataclasses.dataclass
class Instruction:
    filename: str
    skip: int
    take: int
    examples_in_shard: int


def test_sources_look_and_read_alike(tmp_path):
    first = written(tmp_path / "first", "group_size:1", [b"%d" % n for n in range(10)])
    second = written(tmp_path / "second", "group_size:1", [b"%d" % n for n in range(100, 107)])
    for paths in (
        str(first),
        first,
        [first, str(second)],
        f"{first}[2:5]",
        [f"{second}[0:2]", first],
        Instruction(str(first), 3, 4, 10),
        (Instruction(str(first), 3, 4, 10), Instruction(str(second), 0, 7, 7)),
    ):
        ours = ArrayRecordDataSource(paths)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            expected = stack.enter_context(their_source.ArrayRecordDataSource(paths))
            assert (repr(ours), len(ours)) == (repr(expected), len(expected))
            assert list(ours) == [expected[index] for index in range(len(expected))]
            keys = [len(ours) - 1, 0, 0]
            assert ours.__getitems__(keys) == expected.__getitems__(keys)


@pytest.mark.parametrize("paths", [b"x", 3, [], [3], {"a": 1}, iter([])])
def test_paths_that_are_none_are_refused_alike(paths):
    kind, text = outcome(their_source.ArrayRecordDataSource, paths)
    assert kind == "ValueError"
    with pytest.raises(ValueError, match=re.escape(text.rstrip("."))):
        ArrayRecordDataSource(paths)


def test_range_sources_are_alike():
    sources = pytest.importorskip("grain").sources
    for numbers in ((0, 7, 1), (7, 0, -2), (3, 3, 1), (1, 10, 4)):
        ours, expected = RangeDataSource(*numbers), sources.RangeDataSource(*numbers)
        assert repr(ours) == repr(expected)
        assert list(ours) == [expected[index] for index in range(len(expected))]
        assert outcome(itemgetter(99), ours) == outcome(itemgetter(99), expected)
