"""Arrays in shared memory: one memory in all processes, gone with its last array."""

import contextlib
import gc
import multiprocessing as std
import os
import pickle
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
from under_test import NAME, grain
from worker_harness import run_script

Array = grain.multiprocessing.SharedMemoryArray
Metadata = grain.multiprocessing.SharedMemoryArrayMetadata


@pytest.fixture
def array():
    """A 2 by 3 array whose memory is gone after the test."""
    made = Array((2, 3), np.int32)
    made.unlink_on_del()
    made[:] = np.arange(6).reshape(2, 3)
    return made


def exists(name):
    try:
        memory = shared_memory.SharedMemory(name=name)
    except FileNotFoundError:
        return False
    memory.close()
    return True


def test_metadata_leads_to_the_same_memory(array):
    assert array.metadata.shape == (2, 3)
    assert array.metadata.dtype == np.int32
    other = Array.from_metadata(array.metadata)
    other[1] = 9
    assert array.tolist() == [[0, 1, 2], [9, 9, 9]]


def test_pickle_passes_on_a_name(array):
    sent = pickle.dumps(array)
    array[0, 0] = 7
    received = pickle.loads(sent)
    assert received.tolist() == [[7, 1, 2], [3, 4, 5]]
    assert type(received) is Array


def _add(array):
    array += 10


def test_another_process_writes_into_it(array):
    process = std.get_context("spawn").Process(target=_add, args=(array,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert array.tolist() == [[10, 11, 12], [13, 14, 15]]


def test_memory_goes_with_the_last_view():
    array = Array((4,), np.float64)
    array[:] = 1
    array.unlink_on_del()
    name, view = array.metadata.name, array[2:]
    del array
    gc.collect()
    assert view.tolist() == [1, 1]
    assert exists(name)
    del view
    gc.collect()
    assert not exists(name)


def test_memory_stays_for_others_unless_told_otherwise():
    array = Array((4,), np.uint8)
    metadata = array.metadata
    del array
    gc.collect()
    assert exists(metadata.name)
    metadata.close_and_unlink_shm()
    assert not exists(metadata.name)
    with pytest.raises(FileNotFoundError):
        Array.from_metadata(metadata)


def test_what_is_computed_from_it_is_a_usual_array(array):
    assert type(array + 1) is np.ndarray
    assert type(np.exp(array)) is np.ndarray
    assert type(array.sum()) is np.int64
    assert (array + 1).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert array.sum() == 15


@pytest.mark.better_than_grain("has the metadata of another part of the memory")
def test_view_that_starts_elsewhere_is_sent_by_value(array):
    view = array[1]
    with pytest.raises(ValueError, match="fills shared memory from its start"):
        _ = view.metadata
    received = pickle.loads(pickle.dumps(view))
    assert received.tolist() == [3, 4, 5]
    assert pickle.loads(pickle.dumps(array.T)).tolist() == array.T.tolist()


@pytest.mark.better_than_grain("pointers of one process are not values of another")
def test_python_objects_are_refused():
    with pytest.raises(ValueError, match="without Python objects"):
        Array((2,), object)


@pytest.mark.better_than_grain("refused")
def test_empty_array():
    array = Array((0, 3), np.int32)
    array.unlink_on_del()
    assert array.shape == (0, 3)
    assert Array.from_metadata(array.metadata).shape == (0, 3)


def test_metadata_is_a_value():
    assert Metadata("a", (2,), np.int32) == Metadata(name="a", shape=(2,), dtype=np.int32)


RELEASED_BY_THREADS = """
import gc, os, threading, time
import numpy as np
from multiprocessing import shared_memory
import {module} as grain

Array = grain.multiprocessing.SharedMemoryArray


def is_gone(name):
    deadline = time.monotonic() + 60
    while os.path.exists("/dev/shm/" + name) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not os.path.exists("/dev/shm/" + name)


def is_mapped(name):
    with open("/proc/self/maps") as maps:
        return name in maps.read()


before = set(threading.enumerate())
Array.enable_async_del(num_threads=2, max_outstanding_requests=3)
Array.enable_async_del(num_threads=5)  # does nothing
names = []
for number in range(20):
    array = Array((1000,), np.int64)
    array.unlink_on_del()
    array[:] = number
    view = array[500:]
    names.append(array.metadata.name)
    del array
    assert view.sum() == 500 * number
    del view
kept = Array((10,), np.int64)
name = kept.metadata.name
del kept  # released here, but not removed from the system
assert all(map(is_gone, names))
deadline = time.monotonic() + 60
while any(map(is_mapped, [*names, name])) and time.monotonic() < deadline:
    time.sleep(0.01)
print([is_mapped(name) for name in [*names, name]].count(True), os.path.exists("/dev/shm/" + name))
memory = shared_memory.SharedMemory(name=name)
Array.close_shm_async(memory, unlink=True)
print(is_gone(name))
if os.fork() == 0:  # the child has none of the threads
    array = Array((10,), np.int64)
    array.unlink_on_del()
    name = array.metadata.name
    del array
    os._exit(not is_gone(name))
print(os.wait()[1])
last = Array((10,), np.int64)
last.unlink_on_del()
print(last.metadata.name)
"""


@pytest.mark.better_than_grain("a forked child has none of the threads")
def test_threads_release_memory_where_asked_to():
    done = subprocess.run(
        # Python 3.12 warns of any fork beside threads.
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            RELEASED_BY_THREADS.format(module=NAME),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    assert lines == ["0 True", "True", "0"]
    assert not exists(last)  # removed at exit
    assert not done.stderr


def test_memory_is_released_at_once_where_no_threads_were_asked_for():
    memory = shared_memory.SharedMemory(create=True, size=10)
    with contextlib.suppress(AssertionError):  # Grain raises it afterwards
        Array.close_shm_async(memory, unlink=True)
    assert not exists(memory.name)


@pytest.mark.better_than_grain("accepts some, and starts no threads")
@pytest.mark.parametrize(
    ("numbers", "error"), [((0, 5), ValueError), ((1, -1), ValueError), ((1.5, 5), TypeError)]
)
def test_numbers_of_threads_and_requests_are_checked(numbers, error):
    with pytest.raises(error, match=r"num_threads|max_outstanding_requests|an integer"):
        Array.enable_async_del(*numbers)


TOO_LARGE = """
import os, sys
from pathlib import Path
from small_disk import SmallDisk
import numpy as np
import grainmill as grain

disk = SmallDisk("/dev/shm")
if not disk.is_mounted:
    sys.exit(77)
disk.resize(8 << 20)
SharedMemoryArray = grain.multiprocessing.SharedMemoryArray
held = SharedMemoryArray((4 << 20,), np.uint8)
held[:] = 1
attempts = {
    "array": lambda: SharedMemoryArray((20 << 20,), np.uint8),
    "array of what is left": lambda: SharedMemoryArray((5 << 20,), np.uint8),
    "source": lambda: grain.sources.SharedMemoryDataSource(["x" * 1000] * 9_000),
    "named source": lambda: grain.sources.SharedMemoryDataSource([b"x" * (6 << 20)], name="mine"),
}
for name, attempt in attempts.items():
    for _ in range(3):
        try:
            attempt()
        except OSError as failure:
            assert failure.errno == 28, failure
            assert "shared memory of " in str(failure) and "bytes left" in str(failure), failure
        else:
            raise AssertionError(name)
        assert len(list(Path("/dev/shm").iterdir())) == 1, name  # nothing is left behind
fits = SharedMemoryArray((3 << 20,), np.uint8)
fits[:] = 2
fits.unlink_on_del()
del fits
source = grain.sources.SharedMemoryDataSource(["x" * 1000] * 2_000)
assert list(source) == ["x" * 1000] * 2_000
same = grain.sources.SharedMemoryDataSource(name=source.shm.name)
assert same[1_999] == "x" * 1000
same.close()
source.close()
source.unlink()
ds = grain.MapDataset.range(8).map(lambda i: np.full(1 << 20, i, np.uint8)).batch(8)
batches = ds.to_iter_dataset(grain.ReadOptions(num_workers=1))  # not in `/dev/shm`
assert [batch.shape for batch in batches] == [(8, 1 << 20)]
held.unlink_on_del()
print("done")
"""


@pytest.mark.better_than_grain("the process ends with SIGBUS")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, names are not in a file system")
def test_shared_memory_that_does_not_fit_is_an_error(tmp_path):
    done = run_script(TOO_LARGE, tmp_path)
    if done.returncode == 77:
        pytest.skip("the system lets this process mount nothing")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.better_than_grain("the process ends with SIGBUS")
def test_interrupt_while_memory_is_reserved_leaves_none_behind(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = set(Path("/dev/shm").iterdir())
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Array((1 << 20,), np.uint8)
    with pytest.raises(KeyboardInterrupt):
        grain.sources.SharedMemoryDataSource(["x"])
    assert set(Path("/dev/shm").iterdir()) == before
