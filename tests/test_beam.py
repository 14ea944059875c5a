"""Beam transforms: what they read and write, on any runner, however often a bundle is tried."""

import gzip
import inspect
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import apache_beam as beam
import google_crc32c
import numpy as np
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import core
from beam_files import PREFIX
from effort import cases
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

import grainmill as grain
from grainmill import beam as gb
from grainmill._beam import read, sorting, tfrecord
from grainmill._beam.files import BeamStore
from grainmill._materialize import Shards, part_name
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

pytestmark = pytest.mark.better_than_grain("Grain has no such transforms")

# Every bundle is run twice, and what the first run gave is dropped.
REPEATED = ["--direct_runner_bundle_repeat=1"]


@pytest.fixture(scope="module", autouse=True)
def _signatures_are_read_once():
    """Beam reads those of all methods of each `DoFn` dozens of times, a third of its CPU here."""
    read, known = core.get_function_args_defaults, {}

    def once(function):
        key = getattr(function, "__func__", function), inspect.ismethod(function)
        if key not in known:
            known[key] = read(function)
        return tuple(map(list, known[key]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "get_function_args_defaults", once)
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_by_beam = str(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setattr(tempfile, "tempdir", left_by_beam)
    monkeypatch.setenv("TMPDIR", left_by_beam)
    return tmp_path


@pytest.fixture(params=["local", "far"])
def place(request, tmp_path):
    """What paths begin with: a local folder, or one of another file system."""
    return f"{PREFIX}{tmp_path}" if request.param == "far" else str(tmp_path)


# For tests of what is written where, which is the same: others read and write in both places.
mostly_far = pytest.mark.parametrize(
    "place", ["far", pytest.param("local", marks=pytest.mark.long)], indirect=True
)


def pipeline(*options, **arguments):
    # The one that `DirectRunner` chooses after it has tried to fetch Prism from elsewhere.
    return beam.Pipeline(options=PipelineOptions([*options, "--runner=FnApiRunner"]), **arguments)


def write(path, records, options="group_size:1"):
    with ArrayRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)


def read_all(*paths):
    return [record for path in paths for record in ArrayRecordReader(path)]


def masked(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecords(records):
    """The bytes of a TFRecord file."""
    pieces = []
    for record in records:
        length = struct.pack("<Q", len(record))
        pieces += [length, struct.pack("<I", masked(length)), record]
        pieces.append(struct.pack("<I", masked(record)))
    return b"".join(pieces)


def numbered(count, prefix="record"):
    return [f"{prefix} {number}".encode() for number in range(count)]


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# --- reading ----------------------------------------------------------------------------------


def test_every_record_is_read_with_its_origin(place, folder, monkeypatch):
    monkeypatch.setattr(read, "_BLOCK_LEN", 200)
    monkeypatch.setattr(read, "_RANGE_LEN", 2000)
    for name, count, options in (
        ("a", 300, "group_size:1"),
        ("b", 0, ""),
        ("c", 7, "group_size:4"),
    ):
        write(folder / f"{name}.array_record", numbered(count, name), options)
    expected = [
        (f"{place}/{name}.array_record", index, f"{name} {index}".encode())
        for name, count in (("a", 300), ("c", 7))
        for index in range(count)
    ]
    with pipeline() as p:
        records = p | gb.ReadFromArrayRecord(f"{place}/*.array_record", with_origin=True)
        assert_that(records, equal_to(expected))


def test_all_patterns_are_read_and_decoded(folder):
    write(folder / "a.array_record", [b"1", b"2"])
    write(folder / "b.array_record", [b"3"])
    with pipeline() as p:
        patterns = p | beam.Create(["a.*", str(folder / "b.array_record")])
        records = patterns | gb.ReadAllFromArrayRecord(beam.coders.StrUtf8Coder())
        assert_that(records, equal_to(["1", "2", "3"]))


def blocks_read(file, do_fn, restriction, splits):
    """What is read from a range that is split after some of its elements."""
    found, waiting = [], [restriction]
    splits = iter(splits)
    while waiting:
        tracker = OffsetRestrictionTracker(waiting.pop())
        split_after = next(splits, None)
        for count, element in enumerate(do_fn.process(file, tracker)):
            found.append(element)
            if count == split_after and (halves := tracker.try_split(0.5)):
                waiting.append(halves[1])
        tracker.check_done()
    return found


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_ranges_split_while_they_are_read_have_every_record_once(kind, folder, monkeypatch):
    records = [os.urandom(random.Random(n).randrange(60)) for n in range(500)]
    monkeypatch.setattr(read, "_BLOCK_LEN", 300)
    monkeypatch.setattr(tfrecord, "_BLOCK_LEN", 300)
    path = folder / "records"
    if kind == "array_record":
        write(path, records, "group_size:3,uncompressed")
        file, reader = read.described(str(path)), read.ArrayRecordFileReader
    else:
        path.write_bytes(tfrecords(records))
        file, reader = tfrecord.counted(str(path), "auto"), tfrecord.TFRecordReader
    assert file.num_blocks > 20
    do_fn = read.ReadBlocks(reader, beam.coders.BytesCoder(), with_origin=True)
    for splits in ((), (0,), (10, 0, 5, 3), [1] * 60):
        found = blocks_read(file, do_fn, OffsetRange(0, file.num_blocks), splits)
        assert sorted(index for _, index, _ in found) == list(range(500))
        assert all(records[index] == record for _, index, record in found)
    do_fn.teardown()


def test_far_files_are_read_in_part(folder):
    write(folder / "a.array_record", [os.urandom(1000) for _ in range(5000)], "uncompressed")
    files = read.opened(f"{PREFIX}{folder}/a.array_record")
    expected = ArrayRecordReader(folder / "a.array_record")
    indices = np.array([3, 4000, 4], dtype=np.int64)
    assert files.read(indices) == [expected[3], expected[4000], expected[4]]
    assert files.read_totals()[1] < 1_000_000


def test_failures_of_far_files_name_the_file(folder):
    with pytest.raises(OSError, match=r"far:///missing: open: .*missing"):
        read.opened(f"{PREFIX}/missing")
    write(folder / "a.array_record", numbered(10))
    files = read.opened(f"{PREFIX}{folder}/a.array_record")
    os.truncate(folder / "a.array_record", 100)
    with pytest.raises(grain.GrainmillError, match=r"a\.array_record: the file was cut short"):
        files.read_one(9)


def test_pattern_without_files_is_an_error(folder):
    for source in (gb.ReadFromArrayRecord, gb.ReadFromTFRecordIndexed):
        with pytest.raises(FileNotFoundError, match="no file matches"):
            source(str(folder / "*.none"))
    with pytest.raises(Exception, match="no file matches"), pipeline() as p:
        _ = p | gb.ReadFromArrayRecord("*.none", validate=False)


def test_damage_is_an_error_that_names_file_and_record(folder):
    write(folder / "a.array_record", numbered(3), "uncompressed")
    data = bytearray((folder / "a.array_record").read_bytes())
    data[data.index(b"record 1")] ^= 1
    (folder / "a.array_record").write_bytes(data)
    with (
        pytest.raises(Exception, match=r"a\.array_record: chunk 1 .*\(record 1\)"),
        pipeline() as p,
    ):
        _ = p | gb.ReadFromArrayRecord("a.array_record")


# --- TFRecord ---------------------------------------------------------------------------------


def test_tfrecord_is_read_by_ranges(place, folder, monkeypatch):
    monkeypatch.setattr(tfrecord, "_BLOCK_LEN", 500)
    monkeypatch.setattr(read, "_RANGE_LEN", 2000)
    records = numbered(400)
    data = tfrecords(records)
    (folder / "a.tfrecord").write_bytes(data)
    (folder / "b.tfrecord.gz").write_bytes(gzip.compress(data))
    paths = {f"{place}/a.tfrecord": 20, f"{place}/b.tfrecord.gz": 1}
    for path, num_blocks in paths.items():
        assert tfrecord.counted(path, "auto").num_blocks == num_blocks
    with pipeline() as p:
        found = p | gb.ReadFromTFRecordIndexed(f"{place}/*", with_origin=True)
        expected = [(path, *one) for path in paths for one in enumerate(records)]
        assert_that(found, equal_to(expected))


@mostly_far
def test_conversion_keeps_the_order(place, folder, monkeypatch):
    monkeypatch.setattr(tfrecord, "_BLOCK_LEN", 50)
    parts = [numbered(5, "a"), [], numbered(4, "c")]
    for number, part in enumerate(parts):
        data = tfrecords(part)
        name = f"in-{number}.tfrecord" + ".gz" * (number == 2)
        (folder / name).write_bytes(gzip.compress(data) if number == 2 else data)
    shards = (None, 3, 11)
    with pipeline(*REPEATED) as p:  # one for all, as starting it takes longest
        for num_shards in shards:
            names = f"{place}/{num_shards}/out"
            convert = gb.ConvertTFRecordToArrayRecord(f"{place}/in-*", names, num_shards)
            paths = p | f"To {num_shards}" >> convert
            expected = equal_to(shard_paths(names, num_shards or 3))
            assert_that(paths, expected, label=f"Paths of {num_shards}")
    everything = list(itertools.chain(*parts))
    for num_shards in shards:
        count = num_shards or 3
        paths = [Path(path) for path in shard_paths(f"{folder}/{num_shards}/out", count)]
        ranges = [(9 * shard // count, 9 * (shard + 1) // count) for shard in range(count)]
        expected = [everything[start:stop] for start, stop in ranges] if num_shards else parts
        assert [read_all(path) for path in paths] == expected
        assert names_in(folder / f"{num_shards}") == [path.name for path in paths]


def damaged_tfrecord(at):
    data = bytearray(tfrecords(numbered(3)))
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (damaged_tfrecord(30), r"record 1 at byte 24: checksum mismatch of the length"),
        (damaged_tfrecord(24 + 12), r"record 1 at byte 24: checksum mismatch of the data"),
        (
            tfrecords(numbered(3))[:-1],
            r"record 2 at byte 48: record is cut short: takes 24 bytes",
        ),
        (
            tfrecords(numbered(3))[:53],
            r"record 2 at byte 48: record is cut short: takes 12 bytes",
        ),
        (
            struct.pack("<QI", 1 << 60, masked(struct.pack("<Q", 1 << 60))),
            rf"record 0 at byte 0: record is cut short: takes {(1 << 60) + 16} bytes",
        ),
    ],
)
def test_damaged_tfrecord_is_an_error_and_leaves_no_output(folder, data, message):
    (folder / "in.tfrecord").write_bytes(data)
    for num_shards in (None, 1):
        with pytest.raises(Exception, match=rf"in\.tfrecord: {message}"), pipeline() as p:
            _ = p | gb.ConvertTFRecordToArrayRecord("in.tfrecord", "out", num_shards)
    assert names_in(folder) == ["in.tfrecord"]


def test_truncation_at_any_byte_is_seen_or_ends_between_records(folder):
    data = tfrecords(numbered(3))
    for length in range(len(data)):
        (folder / "in").write_bytes(data[:length])
        if length % 24 == 0:
            assert list(tfrecord.records("in", "auto")) == numbered(length // 24)
        else:
            with pytest.raises(grain.GrainmillError, match="cut short"):
                list(tfrecord.records("in", "auto"))
            with pytest.raises(grain.GrainmillError, match="cut short"):
                tfrecord.counted("in", "auto")


def test_functions_of_the_array_record_package(folder):
    for number in range(2):
        (folder / f"in-{number}.tfrecord").write_bytes(tfrecords(numbered(5, f"{number}")))
    names = {"input": "in-*.tfrecord", "output": "disk/out"}
    everything = numbered(5, "0") + numbered(5, "1")
    gb.convert_tf_to_arrayrecord_disk(num_shards=1, args=names).run().wait_until_finish()
    assert read_all("disk/out-00000-of-00001.arrayrecord") == everything
    gb.convert_tf_to_arrayrecord_disk(3, names, {}).run().wait_until_finish()
    three = [f"disk/out-{shard:05}-of-00003.arrayrecord" for shard in range(3)]
    assert read_all(*three) == everything
    for _ in range(2):  # existing files are replaced
        run = gb.convert_tf_to_arrayrecord_disk_match_shards(names, PipelineOptions()).run()
        run.wait_until_finish()
    assert read_all("disk/out-00001-of-00002.arrayrecord") == numbered(5, "1")
    names["output"] = f"{PREFIX}{folder}/gcs"
    gb.convert_tf_to_arrayrecord_gcs(args=names).run().wait_until_finish()
    gb.convert_tf_to_arrayrecord_gcs(True, ".ar", names).run().wait_until_finish()  # noqa: FBT003
    assert names_in("gcs") == [
        *("in-0.ar", "in-0.tfrecord.arrayrecord", "in-1.ar", "in-1.tfrecord.arrayrecord")
    ]
    assert read_all("gcs/in-1.ar") == numbered(5, "1")
    with pytest.raises(ValueError, match="`args` must have paths"):
        gb.convert_tf_to_arrayrecord_disk(args={"input": "a"})


# --- writing ----------------------------------------------------------------------------------


def written(records, names, *options, in_bundles=False, **arguments):
    with pipeline(*options) as p:
        elements = p | beam.Create(records)
        if in_bundles:
            elements = elements | beam.Reshuffle()
        _ = elements | gb.WriteToArrayRecord(names, ".array_record", **arguments)
    return sorted(Path(names.removeprefix(PREFIX)).parent.glob("out*.array_record"))


def test_shards_depend_on_the_records_only(place, folder):
    records = [*numbered(300), b"", b"", b"twice", b"twice"]
    contents = []
    for attempt in range(2):
        random.Random(attempt).shuffle(records)
        names = f"{place}/{attempt}/out"
        paths = written(records, names, *REPEATED, num_shards=3, in_bundles=bool(attempt))
        assert [path.name for path in paths] == names_in(folder / f"{attempt}")
        assert [path.name[:18] for path in paths] == [f"out-{n:05}-of-00003" for n in range(3)]
        assert sorted(read_all(*paths)) == sorted(records)
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
    assert all(read_all(path) != sorted(read_all(path)) for path in paths)  # shuffled


def number_of(record):
    return int(record.split()[1])


def test_ordered_shards_follow_the_keys():
    records = numbered(100)
    random.Random(1).shuffle(records)
    paths = written(records, "out", *REPEATED, num_shards=7, order_by=number_of)
    for shard, path in enumerate(paths):
        assert read_all(path) == numbered(100)[shard::7]


def test_bundles_are_written_as_they_come(place):
    paths = written(numbered(100), f"{place}/out", *REPEATED)
    assert sorted(read_all(*paths)) == sorted(numbered(100))
    assert [path.name for path in paths] == names_in(paths[0].parent)


def test_shards_without_records_are_written():
    assert [len(ArrayRecordReader(path)) for path in written([], "out", num_shards=2)] == [0, 0]
    assert [path.name for path in written([], "none/out")] == ["out-00000-of-00001.array_record"]


def test_names_options_and_coder_of_a_writer():
    arguments = {"options": "group_size:2,brotli:3", "shard_name_template": "_S_of_N"}
    coder = beam.coders.VarIntCoder()
    (path,) = written([5, 6], "out", num_shards=1, order_by=int, coder=coder, **arguments)
    assert path.name == "out_0_of_1.array_record"
    assert [coder.decode(record) for record in read_all(path)] == [5, 6]
    assert "group_size:2" in ArrayRecordReader(path).writer_options_string()
    with pytest.raises(ValueError, match="`num_shards` must not be negative"):
        gb.WriteToArrayRecord("out", num_shards=-1)
    with pytest.raises(ValueError, match="`order_by` needs `num_shards`"):
        gb.WriteToArrayRecord("out", order_by=len)


def test_existing_files_are_replaced_only_on_request(place, folder):
    written([b"old"], f"{place}/out", num_shards=3)
    (folder / "out-note.array_record").touch()  # of another name
    with pytest.raises(FileExistsError, match=r"out-00000-of-00003.*3 of this name.*overwrite"):
        written([b"new"], f"{place}/out", num_shards=2)
    assert b"old" in read_all(*folder.glob("out-0*"))
    written([b"newer"], f"{place}/out", num_shards=2, overwrite=True)
    assert sorted(read_all(*folder.glob("out-0*"))) == [b"newer"]
    assert len(names_in(folder)) == 3


def fails_once(record, marker, at):
    if record == at and not Path(marker).exists():
        Path(marker).touch()
        raise ConnectionError("lost, once")
    return record


@pytest.mark.parametrize("num_shards", [0, 3])
def test_bundle_that_fails_is_tried_again(folder, num_shards):
    marker = str(folder / "failed")
    with beam.Pipeline(runner=BundleBasedDirectRunner()) as p:
        records = p | beam.Create(numbered(50)) | beam.Map(fails_once, marker, b"record 30")
        _ = records | gb.WriteToArrayRecord("shards/out", num_shards=num_shards)
    assert Path(marker).exists()
    assert sorted(read_all(*Path("shards").iterdir())) == sorted(numbered(50))


def test_failed_pipeline_leaves_no_file_under_a_final_name():
    def fails(record):
        if record == b"record 40":
            raise ConnectionError("lost for good")
        return record

    for num_shards in (0, 2):
        p = pipeline()
        records = p | beam.Create(numbered(50)) | beam.Map(fails)
        _ = records | gb.WriteToArrayRecord("shards/out", num_shards=num_shards)
        with pytest.raises(Exception, match="lost for good"):
            p.run().wait_until_finish()
        assert not [path for path in Path("shards").iterdir() if not path.name.endswith(".tmp")]


@settings(max_examples=cases(40, 1000))
@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=20))), st.integers(1, 3000))
def test_sorted_records_match_sorted(pairs, max_bytes):
    found = list(sorting.sorted_records(iter(pairs), max_bytes))
    assert found == [record for _, record in sorted(pairs)]


# --- pipelines --------------------------------------------------------------------------------


def element_at(index, rng):
    return f"{index} {rng.integers(1 << 30)}".encode()


def random_pipeline(count=10):
    ds = grain.MapDataset.range(count).seed(5).shuffle()
    return ds.random_map(element_at).repeat(2).filter(lambda record: not record.startswith(b"7"))


def materialized(ds, num_shards, names, *options, **arguments):
    with pipeline(*options) as p:
        paths = p | gb.MaterializeDataset(ds, num_shards, names, **arguments)
        assert_that(paths, equal_to(shard_paths(names, num_shards)))
    return [path.removeprefix(PREFIX) for path in shard_paths(names, num_shards)]


def shard_paths(names, count):
    return [f"{names}-{shard:05}-of-{count:05}.array_record" for shard in range(count)]


@mostly_far
def test_shards_are_ranges_of_the_dataset(place, folder):
    ds = random_pipeline()
    with pipeline(*REPEATED) as p:  # one for all, as starting it takes longest
        for count in (1, 3, 21):
            names = f"{place}/{count}/out"
            paths = p | f"To {count}" >> gb.MaterializeDataset(ds, count, names)
            assert_that(paths, equal_to(shard_paths(names, count)), label=f"Paths of {count}")
    for count in (1, 3, 21):
        for shard, path in enumerate(shard_paths(f"{folder}/{count}/out", count)):
            start, stop = 20 * shard // count, 20 * (shard + 1) // count
            expected = [ds[index] for index in range(start, stop) if ds[index] is not None]
            assert read_all(path) == expected


def test_elements_are_serialized():
    ds = grain.MapDataset.range(3).map(lambda x: {"x": np.full(2, x), "name": f"{x}"})
    paths = materialized(ds, 1, f"{Path.cwd()}/out", serialize=gb.to_example)
    assert read_all(*paths) == [gb.to_example({"x": [x, x], "name": f"{x}"}) for x in range(3)]
    with pytest.raises(Exception, match="records must be `bytes`, but an element is a `dict`"):
        materialized(ds, 1, f"{Path.cwd()}/other")
    with pytest.raises(Exception, match="`serialize` returned a `str`"):
        materialized(ds, 1, f"{Path.cwd()}/other", serialize=str)


def test_datasets_that_cannot_be_written_are_refused():
    ds = grain.MapDataset.range(3)
    with pytest.raises(ValueError, match="`ds` must have an end"):
        gb.MaterializeDataset(ds.repeat(), 1, "out")
    with pytest.raises(ValueError, match="`num_shards` must be at least 1, got 0"):
        gb.MaterializeDataset(ds, 0, "out")
    with pytest.raises(TypeError, match="`ds` must be a `MapDataset`, got list"):
        gb.MaterializeDataset([1], 1, "out")


@mostly_far
def test_finished_shards_are_kept(place, folder):
    ds, names = random_pipeline(), f"{place}/out"
    paths = [Path(path) for path in materialized(ds, 3, names)]
    paths[1].unlink()
    Path(part_name(str(paths[1]))).touch()  # of a writer that was killed
    before = [paths[0].stat().st_ino, paths[2].stat().st_ino]
    expected = len([1 for index in range(20) if ds[index] is not None])
    materialized(random_pipeline(), 3, names)
    assert [paths[0].stat().st_ino, paths[2].stat().st_ino] == before
    assert len(read_all(*paths)) == expected
    assert names_in(folder) == [*(path.name for path in paths), "out-of-00003.materialize.json"]


def test_shards_of_another_pipeline_are_refused_or_replaced(folder):
    ds, names = random_pipeline(), f"{folder}/out"
    paths = materialized(ds, 3, names)

    def begin(ds, **arguments):
        """What the first step of a pipeline does."""
        return gb.MaterializeDataset(ds, 3, names, **arguments)._job.begin(BeamStore())

    assert begin(ds) == []
    with pytest.raises(Exception, match=r"another pipeline: num_elements was 20, and is 18 now"):
        materialized(random_pipeline(9), 3, names)
    with pytest.raises(grain.GrainmillError, match=r"version was '', and is 'b' now"):
        begin(ds, version="b")
    with pytest.raises(grain.GrainmillError, match="another pipeline: stage 6 was absent"):
        begin(random_pipeline().shuffle(seed=9))
    other = grain.MapDataset.range(4).map(lambda x: b"%d" % x)
    materialized(other, 3, names, overwrite=True)
    assert read_all(*paths) == [b"0", b"1", b"2", b"3"]
    manifest = folder / "out-of-00003.materialize.json"
    assert json.loads(manifest.read_text())["num_elements"] == 4
    manifest.write_text("{")
    with pytest.raises(grain.GrainmillError, match="it is damaged"):
        begin(other)
    manifest.unlink()
    with pytest.raises(grain.GrainmillError, match=r"it is missing, but .* exists"):
        begin(other)


# Importing Beam takes longer than running it, so one process forks another for each run.
KILLED = """
    import os, signal, sys, traceback, warnings
    import apache_beam as beam
    import grainmill as grain
    from grainmill.beam import MaterializeDataset, WriteToArrayRecord

    def run(how, kind, folder):
        def element(x):
            if x == 70 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return b"%d" % x

        os.chdir(folder)
        with beam.Pipeline(runner="FnApiRunner") as p:
            if kind == "materialize":
                ds = grain.MapDataset.range(100).map(element)
                _ = p | MaterializeDataset(ds, 5, "out/shard", read_options=grain.ReadOptions(0, 0))
            else:
                records = p | beam.Create(range(100)) | beam.Map(element)
                _ = records | WriteToArrayRecord("out/shard")

    warnings.simplefilter("ignore")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                run(*line.split())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory, beam_python):
    """Runs `KILLED` with arguments and returns the exit code."""
    path = tmp_path_factory.mktemp("killed") / "program.py"
    path.write_text(textwrap.dedent(KILLED))
    command = [beam_python, str(path)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def run(*arguments):
            print(*arguments, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.mark.parametrize("kind", ["materialize", "write"])
def test_killed_worker_leaves_whole_files_and_nothing_is_lost(folder, program, kind):
    def run(how):
        return program(how, kind, folder)

    assert run("killed") == -signal.SIGKILL
    left = [path for path in Path("out").iterdir() if path.suffix == ".array_record"]
    finished = {path: (path.stat().st_ino, read_all(path)) for path in left}
    assert all(len(records) == 20 for _, records in finished.values())
    assert not any(path.name[:5] == "shard" and path.suffix == "" for path in left)
    assert run("finished") == 0
    everything = [b"%d" % x for x in range(100)]
    if kind == "materialize":
        paths = [Path(path) for path in shard_paths("out/shard", 5)]
        assert read_all(*paths) == everything
        for path, (number, _) in finished.items():
            assert path.stat().st_ino == number
    else:
        paths = sorted(Path("out").glob("shard-*-of-*"))
        assert sorted(read_all(*paths)) == sorted(everything)


def test_worker_processes_give_the_same_files(folder, monkeypatch, beam_python):
    monkeypatch.setattr(sys, "executable", beam_python)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (folder / "in.tfrecord").write_bytes(tfrecords(numbered(100)))
    options = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    ds = grain.MapDataset.range(100).shuffle(seed=1).map(lambda x: b"%d" % x)
    with pipeline(*options) as p:
        _ = p | "A" >> gb.MaterializeDataset(ds, 3, "out/a")
        _ = p | "B" >> gb.ConvertTFRecordToArrayRecord("in.tfrecord", "out/b", 3)
        records = p | "C" >> gb.ReadFromTFRecordIndexed("in.tfrecord")
        _ = records | "D" >> gb.WriteToArrayRecord("out/d", ".array_record", 3, order_by=number_of)
    assert read_all(*shard_paths("out/a", 3)) == list(ds)
    assert read_all(*shard_paths("out/b", 3)) == numbered(100)
    for shard, path in enumerate(shard_paths("out/d", 3)):
        assert read_all(path) == numbered(100)[shard::3]
    assert len(names_in("out")) == 10


@given(st.integers(0, 1 << 40), st.integers(1, 10_000))
def test_ranges_of_shards_follow_each_other(num_elements, num_shards):
    shards = Shards("", "", num_shards, num_elements)
    some = sorted({0, num_shards // 3, max(num_shards - 2, 0), num_shards - 1})
    for shard in some:
        start, stop = shards.range(shard)
        assert stop == (shards.range(shard + 1)[0] if shard + 1 < num_shards else num_elements)
        assert stop - start in {num_elements // num_shards, -(-num_elements // num_shards)}
    assert shards.range(0)[0] == 0


# --- examples ---------------------------------------------------------------------------------


def example_message():
    """The class of `tf.train.Example`, by the protobuf package."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    lists = {"BytesList": 12, "FloatList": 2, "Int64List": 3}
    for name, kind in lists.items():
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(lists, 1):
        field = {"label": 1, "type": 11, "type_name": f".t.{name}", "oneof_index": 0}
        feature.field.add(name=name.lower(), number=number, **field)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    map_type = ".t.Features.FeatureEntry"
    features.field.add(name="feature", number=1, label=3, type=11, type_name=map_type)
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, label=1, type=11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


EXAMPLE = example_message()


@settings(max_examples=cases(40, 1000))
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1),
            st.lists(st.binary(max_size=5), min_size=1),
        ),
        max_size=4,
    )
)
def test_examples_match_the_protobuf_package(element):
    message = EXAMPLE.FromString(gb.to_example(element))
    found = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value)
    assert found == element


def test_example_takes_arrays_of_any_shape_and_refuses_others():
    element = {
        "image": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "flag": True,
        "text": "é",
        "words": np.array(["a", "b"]),
        "half": np.float16(0.5),
        "none": [],
    }
    feature = EXAMPLE.FromString(gb.to_example(element)).features.feature
    assert list(feature["image"].int64list.value) == [0, 1, 2, 3, 4, 5]
    assert list(feature["flag"].int64list.value) == [1]
    assert list(feature["text"].byteslist.value) == ["é".encode()]
    assert list(feature["words"].byteslist.value) == [b"a", b"b"]
    assert list(feature["half"].floatlist.value) == [0.5]
    assert list(feature["none"].floatlist.value) == []
    for wrong, error, message in (
        ({"x": None}, TypeError, "feature `x`: there is no list of `NoneType`"),
        ({"x": np.array(1j)}, TypeError, "feature `x`: there is no list of `complex128`"),
        ({1: 2}, TypeError, "names of features must be `str`, got 1"),
        ({"x": np.array([1 << 63], np.uint64)}, ValueError, "does not fit into an `int64_list`"),
    ):
        with pytest.raises(error, match=message):
            gb.to_example(wrong)
