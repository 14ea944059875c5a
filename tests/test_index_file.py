"""Sources that know from an index file how many records their files hold."""

import errno
import os
import pickle
import shutil
import threading
import types
from pathlib import Path

import pytest

from grainmill import MapDataset, _native
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource, JsonLinesDataSource


@pytest.fixture
def paths(tmp_path):
    """Three files of two, three and four records."""
    made = []
    for count in (2, 3, 4):
        made.append(str(tmp_path / f"{count}.array_record"))
        with ArrayRecordWriter(made[-1], "group_size:1") as writer:
            for number in range(count):
                writer.write(b"%d/%d" % (number, count))
    return made


EXPECTED = [b"%d/%d" % (number, count) for count in (2, 3, 4) for number in range(count)]


def test_index_is_written_once_and_files_are_opened_when_they_are_read(paths, tmp_path):
    index = tmp_path / "index"
    assert list(ArrayRecordDataSource(paths, index=index)) == EXPECTED
    before = index.stat()
    hidden = Path(paths[1]).rename(tmp_path / "hidden")
    source = ArrayRecordDataSource(paths, index=index)
    assert len(source) == 9
    assert [source[0], source[8]] == [EXPECTED[0], EXPECTED[8]]
    assert list(MapDataset.source(source)[5:]) == EXPECTED[5:]
    with pytest.raises(FileNotFoundError, match=r"3\.array_record"):
        source[2]
    hidden.rename(paths[1])
    assert source[2] == EXPECTED[2]
    assert list(pickle.loads(pickle.dumps(source))) == EXPECTED
    assert index.stat() == before
    assert set(tmp_path.iterdir()) == {*map(Path, paths), index}


def test_files_that_the_index_lacks_are_added_to_it(paths, tmp_path):
    index = str(tmp_path / "index")
    assert len(ArrayRecordDataSource(paths[:1], index=index)) == 2
    assert len(ArrayRecordDataSource(paths, index=index)) == 9
    for path in paths:
        Path(path).unlink()
    assert len(ArrayRecordDataSource(paths[::-1], index=index)) == 9
    assert len(ArrayRecordDataSource([f"{paths[2]}[1:3]", paths[0]], index=index)) == 4


def test_file_that_is_not_the_one_noted_is_an_error_that_says_what_to_do(paths, tmp_path):
    index = str(tmp_path / "index")
    ArrayRecordDataSource(paths, index=index)
    shutil.copy(paths[0], paths[2])
    source = ArrayRecordDataSource(paths, index=index)
    assert source[1] == EXPECTED[1]
    with pytest.raises(_native.GrainmillError, match=r"4\.array_record: .*delete the index file"):
        source[8]
    Path(index).unlink()
    assert len(ArrayRecordDataSource(paths, index=index)) == 7


def test_damaged_index_and_other_files_are_refused(paths, tmp_path):
    index = tmp_path / "index"
    ArrayRecordDataSource(paths, index=index)
    sound = index.read_bytes()
    for at in range(0, len(sound), 7):
        index.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(ValueError, match=str(index)):
            ArrayRecordDataSource(paths, index=index)
    index.write_bytes(sound[:-1])
    with pytest.raises(ValueError, match="damaged"):
        ArrayRecordDataSource(paths, index=index)
    with pytest.raises(ValueError, match="not an index"):
        ArrayRecordDataSource(paths, index=paths[0])


def test_writers_at_the_same_time_leave_a_sound_index(paths, tmp_path):
    index = tmp_path / "index"
    threads = [
        threading.Thread(target=ArrayRecordDataSource, args=(paths,), kwargs={"index": index})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ArrayRecordDataSource(paths, index=index)) == 9


def test_files_of_instructions_are_not_opened_for_their_length(paths):
    instructions = [
        types.SimpleNamespace(filename=path, skip=0, take=2, examples_in_shard=3)
        for path in [*paths, "/nowhere"]
    ]
    source = ArrayRecordDataSource(instructions)
    assert len(source) == 8
    assert [source[0], source[5]] == [EXPECTED[0], EXPECTED[6]]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        source[7]


RANGES = ["[0:1000]", "[2:4]", "[4:4]", "[9:9]"]  # of a file with three records


@pytest.mark.parametrize("text", RANGES)
def test_ranges_that_a_file_does_not_have_are_refused_at_once(paths, text, tmp_path):
    problem = rf"records \{text[:-1]}\] requested, but the file has 3"
    for given in (paths[1] + text, [*paths, paths[1] + text]):
        with pytest.raises(IndexError, match=problem):
            ArrayRecordDataSource(given)
    index = str(tmp_path / "index")
    ArrayRecordDataSource(paths, index=index)
    with pytest.raises(IndexError, match=problem):
        ArrayRecordDataSource([paths[0], paths[1] + text], index=index)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ArrayRecordDataSource(f"/nowhere{text}")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("1\n2\n3\n")
    with pytest.raises(IndexError, match=problem):
        JsonLinesDataSource(f"{lines}{text}")
    assert list(JsonLinesDataSource(f"{lines}[1:3]")) == [b"2", b"3"]


def refusing(number):
    def sync(_):
        raise OSError(number, os.strerror(number))

    return sync


def test_error_that_comes_when_the_index_is_synced_leaves_the_one_before(
    paths, tmp_path, monkeypatch
):
    index = tmp_path / "index"
    ArrayRecordDataSource(paths[:1], index=index)
    before = index.read_bytes()
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: '.*index.*part'"):
        ArrayRecordDataSource(paths, index=index)
    assert index.read_bytes() == before
    assert set(tmp_path.iterdir()) == {*map(Path, paths), index}


def test_index_is_synced_before_it_has_its_name(paths, tmp_path, monkeypatch):
    index, synced = tmp_path / "index", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(index.exists()))
    ArrayRecordDataSource(paths, index=index)
    assert synced == [False, True]  # the file, then its directory


def test_index_is_written_where_files_cannot_be_synced(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    ArrayRecordDataSource(paths, index=tmp_path / "index")
    assert (tmp_path / "index").exists()
