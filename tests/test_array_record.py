"""Reading ArrayRecord files from Python: valid files, damaged ones, and provoked I/O errors."""

import contextlib
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import grain as real
import numpy as np
import pytest

from grainmill import _native
from grainmill.array_record import ArrayRecordReader
from grainmill.sources import ArrayRecordDataSource

DATA = Path(__file__).parent / "data" / "array_record"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "array_record"
# The whole corpus if it is present, else the subset in the repository.
CORPUS = SHARED if SHARED.is_dir() else DATA


def manifest(directory):
    entries = json.loads((directory / "manifest.json").read_text())["files"]
    assert entries
    return [entry for entry in entries if (directory / entry["file"]).exists()]


def digest(records):
    total = hashlib.sha256()
    for record in records:
        total.update(len(record).to_bytes(8, "little"))
        total.update(record)
    return total.hexdigest()


def record_files(*paths):
    return _native.RecordFiles([(str(path), 0, None) for path in paths])


def all_of(files):
    return files.read(np.arange(len(files), dtype=np.int64))


def run_python(code, *args):
    """Runs `code` in a new process; returns its last line of output, or its error output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("entry", manifest(CORPUS), ids=lambda entry: entry["file"])
def test_file_reads_with_the_hashes_of_its_manifest(entry):
    path = CORPUS / entry["file"]
    with ArrayRecordReader(path) as reader:
        assert len(reader) == entry["num_records"]
        assert reader.writer_options_string() == entry["writer_options"]
        assert digest(reader.read_all()) == entry["records_sha256"]
        assert digest(reader) == entry["records_sha256"]
        for index, expected in entry["sample_sha256"].items():
            assert hashlib.sha256(reader[int(index)]).hexdigest() == expected


@pytest.mark.parametrize("entry", manifest(CORPUS / "bad"), ids=lambda entry: entry["file"])
def test_damaged_file_gets_its_strict_verdict(entry):
    path, verdict = CORPUS / "bad" / entry["file"], entry["reference"]
    if "open_error" in verdict:
        with pytest.raises(_native.GrainmillError, match=path.name):
            record_files(path)
        reader = ArrayRecordReader(path)
        assert (reader.ok(), reader.num_records()) == (False, 0)
        for act in (reader.read, reader.read_all, reader.close):
            with pytest.raises(RuntimeError, match=path.name):
                act()
        return
    files = record_files(path)
    assert len(files) == verdict["num_records"]
    for index in range(len(files)):
        if str(index) in verdict["failed"]:
            with pytest.raises(_native.GrainmillError, match=rf"{path.name}: chunk .*record"):
                files.read_one(index)
        else:
            assert files.read(np.array([index])) == [files.read_one(index)]
    if verdict["records_sha256"]:
        assert digest(all_of(files)) == verdict["records_sha256"]


def test_records_come_in_the_order_asked_for_with_duplicates():
    path = CORPUS / "grid_g16_zstd3.array_record"
    plain = CORPUS / "grid_g1_uncompressed.array_record"
    files = record_files(path, plain)
    expected = all_of(record_files(path)) + all_of(record_files(plain))
    asked = np.random.default_rng(0).integers(0, len(files), 2_000)
    assert files.read(asked) == [expected[index] for index in asked]
    assert files.start(asked).finish() == [expected[index] for index in asked]
    assert files.read(np.array([], dtype=np.int64)) == []


def test_index_out_of_range_is_named():
    files = record_files(CORPUS / "count_10_default.array_record")
    for index in (10, 2**62):
        with pytest.raises(IndexError, match=str(index)):
            files.read(np.array([0, index]))
    with pytest.raises(IndexError, match="-1"):
        files.read_one(-1)


def test_sub_ranges_of_files_form_one_sequence():
    path = str(CORPUS / "count_10_default.array_record")
    files = _native.RecordFiles([(path, 2, 3), (path, 0, 0), (path, 9, None)])
    assert files.num_records == [3, 0, 1]
    assert all_of(files) == [b"2", b"3", b"4", b"9"]
    with pytest.raises(IndexError, match=r"\[8:11\].*has 10"):
        _native.RecordFiles([(path, 8, 3)])


@pytest.fixture
def many_blocks(tmp_path):
    """A copy of a file with many blocks, for damaging."""
    return Path(shutil.copy(CORPUS / "chunk_many_blocks_g8.array_record", tmp_path))


def test_file_truncated_while_open_is_an_error(many_blocks):
    files = record_files(many_blocks)
    assert all_of(files)
    os.truncate(many_blocks, 70_000)
    with pytest.raises(_native.GrainmillError, match="cut short, overwritten or replaced"):
        all_of(files)


def test_file_overwritten_while_open_is_an_error(many_blocks):
    files = record_files(many_blocks)
    content = many_blocks.read_bytes()
    os.utime(many_blocks, (1, 1))
    many_blocks.write_bytes(content)
    with pytest.raises(_native.GrainmillError, match=many_blocks.name):
        files.read_one(0)


@pytest.fixture
def crowd(tmp_path):
    """More files than are kept open at a time."""
    first = shutil.copy(CORPUS / "count_1_default.array_record", tmp_path / "0")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = [first, *(tmp_path / f"{number}" for number in range(1, limit // 2 + 50))]
    for path in paths[1:]:
        os.link(first, path)
    return paths


def read_all_of(crowd):
    assert len(all_of(record_files(*crowd))) == len(crowd)


def test_file_replaced_while_closed_is_an_error(many_blocks, tmp_path, crowd):
    files = record_files(many_blocks)
    read_all_of(crowd)
    replacement = Path(shutil.copy(CORPUS / "grid_g1_zstd3.array_record", tmp_path / "new"))
    replacement.replace(many_blocks)
    with pytest.raises(_native.GrainmillError, match="replaced"):
        files.read_one(0)


def replaced_while_closed(path, replacement, crowd):
    """Files over `path`, since replaced by another file of equal length and modification time."""
    files = record_files(path)
    files.read_one(0)
    stat = path.stat()
    read_all_of(crowd)
    os.utime(replacement, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert replacement.stat().st_size == stat.st_size
    replacement.replace(path)
    return files


def test_file_that_only_got_another_number_is_the_same(many_blocks, tmp_path, crowd):
    expected = all_of(record_files(many_blocks))
    copy = Path(shutil.copy(many_blocks, tmp_path / "copy"))
    files = replaced_while_closed(many_blocks, copy, crowd)
    assert all_of(files) == expected
    assert all_of(files) == expected


def test_other_file_of_the_same_length_and_time_is_refused(tmp_path, crowd):
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        with _native.ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
            for number in range(100):
                writer.write(b"%s %d" % (path.name[:2].encode(), number))
    files = replaced_while_closed(*paths, crowd)
    with pytest.raises(_native.GrainmillError, match="replaced"):
        files.read_one(1)


@pytest.mark.parametrize("where", ["temporary file", "memory"])
@pytest.mark.parametrize("format_name", ["array_record", "tfrecord", "bagz"])
def test_indices_of_files_stay_within_their_budget(tmp_path, format_name, where):
    """Those that do not fit are in a temporary file, or read again if there is no place for it."""
    paths = []
    for number in range(12):
        paths.append(str(tmp_path / f"file-{number}"))
        output = _native.RecordOutput(paths[-1], format_name, "")
        output.copy_list([b"%d" % record for record in range(1000)])
        output.close()
    printed = run_python(
        """
        import os, sys
        import numpy as np
        from grainmill import _native
        where, format_name, *paths = sys.argv[1:]
        formats = {
            "array_record": lambda: None,
            "tfrecord": lambda: _native.Format.tfrecord("auto", False, None),
            "bagz": lambda: _native.Format.bagz("zstd", False, None),
        }
        of_format = formats[format_name]()
        files = _native.RecordFiles([(path, 0, None) for path in paths], file_format=of_format)
        asked = np.random.default_rng(0).permutation(len(files))[:500]
        expected = [b"%d" % (index % 1000) for index in asked]
        assert files.read(asked) == expected
        num_before = _native.index_bytes()
        if where == "memory":
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            import signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _native.set_index_budget(20_000)
        print(num_before > 40_000, 0 < _native.index_bytes() <= 20_000)
        assert files.start(asked).finish() == files.read(asked) == expected
        reads = files.read_totals()[0]
        for index, record in zip(asked.tolist(), expected):
            assert files.read_one(index) == record
            assert _native.index_bytes() <= 20_000
        print((files.read_totals()[0] - reads) / len(asked))
        _native.set_index_budget(0)
        assert files.read(asked) == expected
        """,
        where,
        format_name,
        *paths,
    )
    first, reads = printed.splitlines()
    assert first == "True True"
    assert (float(reads) <= 1) == (where == "temporary file")  # no index is read again


def test_chunks_kept_for_many_sources_stay_within_one_budget(tmp_path):
    """A mixture with one source per file has one limit, and keeps nothing once it is dropped."""
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"file-{number}")
        with _native.ArrayRecordWriter(str(paths[-1]), "group_size:64") as writer:
            for record in range(256):
                writer.write(b"%05d" % record * 200)
    printed = run_python(
        """
        import gc, sys
        import grainmill as grain
        from grainmill import _native
        from grainmill.sources import ArrayRecordDataSource
        sources = [ArrayRecordDataSource([path]) for path in sys.argv[1:]]
        mixed = grain.MapDataset.mix([grain.MapDataset.source(source) for source in sources])
        found, in_caller = [], grain.ReadOptions(num_threads=0)
        for budget in (1 << 28, 1 << 19):
            _native.set_chunk_budget(budget)
            is_slow = True
            while is_slow:  # storage, or so it seems where another program had the core
                most, is_slow = 0, False
                for at, record in enumerate(mixed.to_iter_dataset(in_caller)):
                    assert record == b"%05d" % (at // 40) * 200
                    if at % 64 == 0:
                        most = max(most, _native.chunk_bytes())
                        is_slow |= any(source._files.is_slow for source in sources)
            found.append((most, _native.chunk_bytes()))
        del mixed, sources, record
        gc.collect()
        (most, left), (bounded, _) = found
        print(40 * 64_000 <= most <= 40 * 70_000, left, bounded <= 1 << 19, _native.chunk_bytes())
        """,
        *paths,
    )
    assert printed == "True 0 True 0"


def test_five_thousand_files_work_with_a_thousand_descriptors(tmp_path):
    count = run_python(
        """
        import os, resource, shutil, sys
        import numpy as np
        from grainmill import _native
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        source, directory = sys.argv[1:]
        shutil.copy(source, f"{directory}/0")
        for number in range(1, 5000):
            os.symlink(f"{directory}/0", f"{directory}/{number}")
        files = _native.RecordFiles([(f"{directory}/{n}", 0, None) for n in range(5000)])
        asked = np.random.default_rng(0).permutation(len(files))[:10_000]
        records = files.read(asked)
        assert records == [b"%d" % (index % 10) for index in asked]
        print(len(files), len(os.listdir("/proc/self/fd")) < 600)
        """,
        CORPUS / "count_10_default.array_record",
        tmp_path,
    )
    assert count == "50000 True"


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_index_takes_four_bytes_a_chunk_and_none_before_the_first_record(tmp_path, codec):
    path = tmp_path / "file"
    num_records = 1_000_000
    writer = _native.ArrayRecordWriter(str(path), f"group_size:1,{codec}")
    for _ in range(num_records):
        writer.write(b"x")
    writer.close()
    program = """
        import sys
        from pathlib import Path
        from grainmill import _native

        def kib(key):
            status = Path("/proc/self/status").read_text()
            return int(status.split(f"{key}:")[1].split()[0])

        small = _native.RecordFiles([(sys.argv[2], 0, None)])
        small.read_one(0)
        bare = kib("VmRSS")
        files = _native.RecordFiles([(sys.argv[1], 0, None)])
        opened, peak_opened = kib("VmRSS"), kib("VmHWM")
        is_slow = small.is_slow or files.is_slow
        assert files.read_one(len(files) // 2) == files.read_one(len(files) - 1) == b"x"
        print(len(files), opened - bare, peak_opened - bare, kib("VmHWM") - bare, int(is_slow))
        """
    is_slow = True
    while is_slow:  # where another program had the core: then the index is read on opening
        printed = run_python(program, path, CORPUS / "count_10_default.array_record")
        count, opened, peak_opened, peak, is_slow = map(int, printed.split())
    assert count == num_records
    # Opening temporarily needs a window and a byte per chunk; then four bytes per chunk stay.
    assert max(opened, peak_opened) * 1024 < 3.5 * num_records
    assert peak * 1024 < 10 * num_records


def test_fewer_descriptors_than_usual_are_made_do_with(tmp_path):
    paths = [
        shutil.copy(CORPUS / "count_10_default.array_record", tmp_path / f"{n}") for n in range(80)
    ]
    printed = run_python(
        """
        import resource, sys
        import numpy as np
        from grainmill import _native
        files = _native.RecordFiles([(path, 0, None) for path in sys.argv[1:]])
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        more = _native.RecordFiles([(path, 0, None) for path in sys.argv[1:]])
        print(len(files.read(np.arange(800))), len(more.read(np.arange(800))))
        """,
        *paths,
    )
    assert printed == "800 800"


def test_missing_file_directory_and_empty_file_have_their_own_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        record_files(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        record_files(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(_native.GrainmillError, match="empty file"):
        record_files(tmp_path / "empty")
    with pytest.raises(NotADirectoryError):
        record_files(tmp_path / "empty" / "below")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(_native.GrainmillError, match="not a regular file"):
        record_files(tmp_path / "pipe")


def test_tfrecord_is_told_from_a_damaged_array_record():
    for name in ("tfrecord_small", "tfrecord_large"):
        with pytest.raises(_native.GrainmillError, match="a TFRecord file, not an ArrayRecord"):
            record_files(CORPUS / "bad" / f"{name}.array_record")
    with pytest.raises(_native.GrainmillError, match="truncated or its writer was not closed"):
        record_files(CORPUS / "bad" / "cut_mid_chunk.array_record")


def test_file_without_permission_is_refused(tmp_path):
    path = Path(shutil.copy(CORPUS / "count_10_default.array_record", tmp_path))
    path.chmod(0)
    directory = tmp_path
    while directory != directory.parent:  # so that the other user can reach the file
        with contextlib.suppress(PermissionError):
            directory.chmod(directory.stat().st_mode | 0o055)
        directory = directory.parent
    printed = run_python(
        """
        import os, sys
        from grainmill import _native
        if os.geteuid() == 0:
            os.seteuid(65534)  # permission checks do not apply to root
        try:
            _native.RecordFiles([(sys.argv[1], 0, None)])
        except PermissionError as error:
            print(error.filename == sys.argv[1])
        """,
        path,
    )
    assert printed == "True"


def test_abandoned_reads_and_exit_do_not_hang():
    printed = run_python(
        """
        import sys
        import numpy as np
        from grainmill import _native
        files = _native.RecordFiles([(sys.argv[1], 0, None)])
        asked = np.arange(len(files)).repeat(20)
        for _ in range(50):
            files.start(asked)
        kept = [files.start(asked) for _ in range(5)]
        print("done")
        """,
        CORPUS / "chunk_many_blocks_g8.array_record",
    )
    assert printed == "done"


def test_what_an_abandoned_read_has_fetched_is_freed_without_another_read(tmp_path):
    path = tmp_path / "file"
    with _native.ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for number in range(40):
            writer.write(bytes([number]) * (2 << 20))
    printed = run_python(
        """
        import sys, threading, time, tracemalloc
        from pathlib import Path
        import numpy as np
        from grainmill import _native
        data, may_read = Path(sys.argv[1]).read_bytes(), threading.Event()
        may_read.set()

        def open_file(path):
            def read(at, count):
                time.sleep(0.003)  # slow storage
                may_read.wait()
                return data[at : at + count]

            return len(data), 1, read

        files = _native.RecordFiles.opened_by(open_file, [sys.argv[1]])
        assert len(files.read(np.arange(20))) == 20 and files.is_slow
        tracemalloc.start()
        for is_partly_read in (True, False):
            queue = _native.ReadQueue(30)
            may_read.clear()
            pending = files.start(np.arange(40), queue)
            if is_partly_read:
                may_read.set()
                time.sleep(0.02)
                may_read.clear()
            held = tracemalloc.get_traced_memory()[0]
            del pending
            may_read.set()
            deadline = time.monotonic() + 60
            while tracemalloc.get_traced_memory()[0] > 10 << 20:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            print(held >= 80 << 20)
        """,
        path,
    )
    assert printed == "True\nTrue"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_forked_child_reads_what_it_asks_for_and_what_its_parent_began():
    files = record_files(CORPUS / "chunk_many_blocks_g8.array_record")
    asked = np.arange(len(files)).repeat(5)
    expected = files.start(asked).finish()
    begun = files.start(asked)
    child = os.fork()
    if child == 0:
        same = files.start(asked).finish() == expected == files.read(asked) == begun.finish()
        os._exit(0 if same else 1)
    assert begun.finish() == expected
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pending_read_can_be_taken_once():
    pending = record_files(CORPUS / "count_10_default.array_record").start(np.array([3]))
    assert pending.finish() == [b"3"]
    with pytest.raises(ValueError, match="returns the records of a read once"):
        pending.finish()


def test_reader_reads_next_ranges_and_lists():
    reader = ArrayRecordReader(str(CORPUS / "count_10_default.array_record"))
    assert [reader.read(), reader.read(), reader.record_index()] == [b"0", b"1", 2]
    assert reader.read([7, 7, 1]) == [b"7", b"7", b"1"]
    assert reader.read(-3, -1) == [b"7", b"8"]
    reader.seek(9)
    assert reader.read() == b"9"
    with pytest.raises(IndexError, match="Out of range of num_records: 10"):
        reader.read()
    with pytest.raises(IndexError, match=r"\[0, 11\) is of range of \[0, 10\)"):
        reader.read(0, 11)
    with pytest.raises(RuntimeError, match="index 10 out of bound 10"):
        reader.read([10])
    for wrong in ([-1], [1.0], {1}, "12"):
        with pytest.raises(TypeError):
            reader.read(wrong)
    assert (reader[-1], reader[2:4], list(reader)[:2]) == (b"9", [b"2", b"3"], [b"0", b"1"])
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="Object closed"):
        reader.read()


def test_damaged_record_raises_and_leaves_the_rest_readable():
    reader = ArrayRecordReader(CORPUS / "bad" / "flip_chunk0_data_values.array_record")
    with pytest.raises(RuntimeError, match="chunk 0 at byte 64"):
        reader.read()
    reader.seek(4)
    assert len([reader.read() for _ in range(16)]) == 16


def test_source_is_pickled_without_its_open_files():
    path = CORPUS / "count_10_default.array_record"
    source = ArrayRecordDataSource([path, f"{path}[2:5]"])
    copy = pickle.loads(pickle.dumps(source))
    assert copy._opened is None
    assert list(copy) == list(source) == [b"%d" % n for n in [*range(10), 2, 3, 4]]
    assert repr(copy) == repr(source)


def test_text_of_a_source_is_that_of_the_package_also_with_ranges():
    path = str(CORPUS / "count_10_default.array_record")
    for paths in (path, f"{path}[0:5]", f"{path}[5:10]", [path, f"{path}[5:10]"]):
        assert repr(ArrayRecordDataSource(paths)) == repr(real.sources.ArrayRecordDataSource(paths))


def test_source_refuses_keys_that_are_no_integers():
    source = ArrayRecordDataSource(CORPUS / "count_10_default.array_record")
    for key in (slice(1, 3), "1", 1.0, None):
        for read in (source.__getitem__, lambda key: source.__getitems__([0, key])):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                read(key)


def test_source_checks_keys_and_takes_lists_of_them():
    source = ArrayRecordDataSource(CORPUS / "count_10_default.array_record")
    assert source.__getitems__([]) == []
    assert source.__getitems__([9, 0, 9]) == [b"9", b"0", b"9"]
    for key in (10, -1):
        with pytest.raises(ValueError, match=r"Record key should be in \[0, num_records\)"):
            source[key]
    with source as entered:
        assert entered[1] == b"1"
    assert source[2] == b"2"
