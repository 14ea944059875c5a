"""`TFRecordIterDataset` beside Grain's, and classes derived from its private ones."""

import io
import json
import subprocess
import sys
from pathlib import Path

import grain as real
import pytest
import record_formats as formats

import grainmill as grain
from grainmill._src.python.dataset.sources.tfrecord_dataset import (
    _TFRecordDatasetIterator,
    _TFRecordReader,
)

DATA = Path(__file__).parent / "data/tfrecord"
GOOD = ["example", "sequence_example", "empty", "empty_records", "large"]
BAD = ["bad_cut_in_data", "bad_cut_in_header", "bad_length", "bad_length_crc", "bad_data"]
BAD += ["bad_data_crc"]


def path_of(name):
    return str(DATA / f"{name}.tfrecord")


@pytest.mark.parametrize("name", GOOD)
def test_records_and_states_are_those_of_grain(name):
    ours = iter(grain.experimental.TFRecordIterDataset(path_of(name)))
    theirs = iter(real.experimental.TFRecordIterDataset(path_of(name)))
    states = [ours.get_state()]
    assert states == [theirs.get_state()]
    while (element := next(ours, None)) is not None:
        assert element == next(theirs)
        states.append(ours.get_state())
        assert states[-1] == theirs.get_state()
    assert next(theirs, None) is None
    rest = formats.tfrecords(Path(path_of(name)).read_bytes())[0]
    for number, state in enumerate(states):
        for package in (grain, real):
            resumed = iter(package.experimental.TFRecordIterDataset(path_of(name)))
            resumed.set_state(json.loads(json.dumps(state)))
            assert list(resumed) == rest[number:]


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_raise_after_the_records_before(name):
    intact, _ = formats.tfrecords(Path(path_of(name)).read_bytes())
    iterator = iter(grain.experimental.TFRecordIterDataset(path_of(name)))
    assert [next(iterator) for _ in intact] == intact
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Not a valid TFRecord.*byte \d+"):
            next(iterator)
        assert iterator.get_state() == state


def test_checksums_are_verified_and_not_by_grain():
    def read(package, name):
        return list(package.experimental.TFRecordIterDataset(path_of(name)))

    intact, good = formats.tfrecords(Path(path_of("example")).read_bytes())
    assert good
    theirs = read(real, "bad_data")
    assert len(theirs) == len(intact)
    assert theirs != intact
    with pytest.raises(OverflowError):
        read(real, "bad_length")
    for name in ("bad_data", "bad_length"):
        with pytest.raises(ValueError, match=r"record at byte \d+: checksum mismatch"):
            read(grain, name)


def test_a_missing_file_is_an_error_when_iteration_starts():
    dataset = grain.experimental.TFRecordIterDataset("/nowhere/data")
    with pytest.raises(FileNotFoundError):
        iter(dataset)


def test_files_are_interleaved_mapped_and_resumed_in_another_process(tmp_path):
    paths = []
    for shard in range(3):
        paths.append(str(tmp_path / str(shard)))
        records = [b"%d %d" % (shard, number) for number in range(shard * 5 + 2)]
        Path(paths[-1]).write_bytes(formats.tfrecord(records))
    code = (
        "import json, sys, grainmill as grain\n"
        "paths, state = json.loads(sys.argv[1])\n"
        "ds = grain.MapDataset.source(paths).map(grain.experimental.TFRecordIterDataset)\n"
        "ds = grain.experimental.InterleaveIterDataset(ds, cycle_length=2).map(bytes.decode)\n"
        "it = iter(ds)\n"
        "if state: it.set_state(state)\n"
        "out = []\n"
        "for element in it: out.append((element, it.get_state()))\n"
        "print(json.dumps(out))"
    )

    def run(state):
        argument = json.dumps([paths, state])
        done = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, check=True
        )
        return json.loads(done.stdout)

    whole = run(None)
    assert len(whole) == 2 + 7 + 12
    for position in (0, 3, 9, 20):
        rest = run(whole[position][1])
        assert [element for element, _ in rest] == [e for e, _ in whole[position + 1 :]]


def test_slices_are_refused_as_by_grain():
    dataset = grain.experimental.TFRecordIterDataset(path_of("example"))
    assert not hasattr(dataset, "set_slice")


class RemoteReader(_TFRecordReader):
    """As MaxText reads files of a bucket: the parent's `__init__` is not called."""

    def __init__(self, path):
        self._reader = Path(path).open("rb")  # noqa: SIM115 - the reader owns it


class RemoteIterator(_TFRecordDatasetIterator):
    def __init__(self, path):
        super(_TFRecordDatasetIterator, self).__init__()
        self._reader = RemoteReader(path)


class RemoteDataset(grain.experimental.TFRecordIterDataset):
    def __iter__(self):
        return RemoteIterator(self._path)


@pytest.mark.parametrize("name", GOOD)
def test_derived_readers_of_other_files_give_the_same_records_and_states(name):
    plain = iter(grain.experimental.TFRecordIterDataset(path_of(name)))
    derived = iter(RemoteDataset(path_of(name)))
    assert isinstance(derived, grain.DatasetIterator)
    for element in plain:
        assert next(derived) == element
        assert derived.get_state() == plain.get_state()
    assert next(derived, None) is None
    resumed = iter(RemoteDataset(path_of(name)).map(len).batch(2))
    assert [x for batch in resumed for x in batch] == [
        len(record) for record in grain.experimental.TFRecordIterDataset(path_of(name))
    ]


@pytest.mark.parametrize("name", BAD)
def test_derived_readers_notice_damage(name):
    intact, _ = formats.tfrecords(Path(path_of(name)).read_bytes())
    iterator = iter(RemoteDataset(path_of(name)))
    assert [next(iterator) for _ in intact] == intact
    with pytest.raises(ValueError, match="Not a valid TFRecord"):
        next(iterator)


class InterruptedFile(io.FileIO):
    """Interrupts its second read, as the user may."""

    reads = 0

    def read(self, count):
        self.reads += 1
        if self.reads == 2:
            raise KeyboardInterrupt
        return super().read(min(count, 250_000))


def test_an_interruption_comes_at_once_and_loses_no_record(tmp_path):
    records = [bytes([number]) * 100_000 for number in range(5)]
    (tmp_path / "f").write_bytes(formats.tfrecord(records))
    reader = RemoteReader.__new__(RemoteReader)
    reader._reader = InterruptedFile(tmp_path / "f")
    with pytest.raises(KeyboardInterrupt):
        next(reader)
    assert [next(reader, None) for _ in range(6)] == [*records, None]
