"""Iterators release threads, files and memory; reference cycles, forks, interpreter shutdown."""

import _thread
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
from effort import cases
from passing import Passing
from pipelines import add_one, take, tokens
from under_test import INLINE, NAME, experimental, grain
from waits import becomes

MapDataset = grain.MapDataset
HERE = Path(__file__).parent
# What each of them leaked would add up.
NUM_ABANDONED = 15 if NAME == "grain" else cases(40, 300)


@pytest.fixture(scope="module", autouse=True)
def _objects_of_other_tests_are_not_collected():
    """Otherwise each collection looks at all objects of all libraries that any test imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _shuffled(function):
    return MapDataset.range(10_000).shuffle(1).map(function).to_iter_dataset()


def _pipelines(function):
    """Datasets that apply `function`; those with several parents, to the first parent only."""
    return {
        "read_inline": lambda: MapDataset.range(10_000).map(function).to_iter_dataset(INLINE),
        "read_default": lambda: _shuffled(function),
        "read_endless": lambda: (
            MapDataset.range(100).shuffle(1).repeat().map(function).to_iter_dataset()
        ),
        "users": lambda: Passing(Passing(_shuffled(function))).map(add_one),
        "batch": lambda: _shuffled(function).batch(8),
        "map_batch": lambda: MapDataset.range(10_000).map(function).batch(8).to_iter_dataset(),
        "thread_prefetch": lambda: experimental.ThreadPrefetchIterDataset(
            _shuffled(function), prefetch_buffer_size=4
        ),
        "mix": lambda: grain.IterDataset.mix([_shuffled(function), _shuffled(add_one)]),
        "interleave": lambda: experimental.InterleaveIterDataset(
            [_shuffled(function), _shuffled(add_one), _shuffled(add_one)], cycle_length=2
        ),
        "window_shuffle": lambda: experimental.WindowShuffleIterDataset(
            _shuffled(function), window_size=50, seed=1
        ),
        "packed": lambda: experimental.FirstFitPackIterDataset(
            MapDataset.range(10_000).map(function).map(tokens).to_iter_dataset(),
            length_struct={"tokens": 12},
            num_packing_bins=4,
        ).batch(2),
        "random_map": lambda: _shuffled(function).random_map(
            lambda x, rng: x + rng.integers(9), seed=1
        ),
    }


PIPELINES = _pipelines(add_one)


def _settled(measure, limit, timeout_s=30.0):
    """Waits until `measure()` is at most `limit`, or for `timeout_s`; returns its last value."""
    until = time.monotonic() + timeout_s
    while (found := measure()) > limit and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    return found


def _num_threads():
    """All threads of the process, the engine's own included."""
    return psutil.Process().num_threads()


def _abandon(make, times, *, steps=3):
    for _ in range(times):
        iterator = iter(make())
        for _ in range(steps):
            next(iterator)


@pytest.mark.parametrize("name", PIPELINES)
def test_abandoned_iterators_leave_no_threads_and_files(name):
    make = PIPELINES[name]
    # Threads that are started once per process may stay.
    _abandon(make, 3)
    gc.collect()
    time.sleep(0.1)
    process = psutil.Process()
    threads, files = _num_threads(), process.num_fds()
    _abandon(make, NUM_ABANDONED)
    assert _settled(_num_threads, threads) <= threads
    assert _settled(process.num_fds, files) <= files


@pytest.mark.parametrize("name", ["read_default", "map_batch", "thread_prefetch", "packed"])
def test_abandoned_iterators_leave_no_memory(name):
    make = PIPELINES[name]
    _abandon(make, 30)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    _abandon(make, 100 if NAME != "grain" else 15)
    gc.collect()
    assert _settled(lambda: process.memory_info().rss - before, 24 << 20) <= 24 << 20


def test_big_buffers_of_abandoned_iterators_are_freed():
    """Each prefetches tens of MB, so a hundred of them would not fit into memory together."""

    def make():
        big = MapDataset.range(100).map(lambda x: np.full(1 << 20, x, dtype=np.uint8))
        return big.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=32))

    _abandon(make, 3)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    peak = 0
    for _ in range(100 if NAME != "grain" else 20):
        _abandon(make, 1)
        peak = max(peak, process.memory_info().rss - before)
    assert peak < 600 << 20
    assert _settled(lambda: process.memory_info().rss - before, 100 << 20) <= 100 << 20


def test_dropped_batches_return_their_memory():
    def batch_of_8_mb(x):
        return np.full(1 << 20, x, dtype=np.float64)

    iterator = iter(MapDataset.range(400).map(batch_of_8_mb).batch(1).to_iter_dataset(INLINE))
    for _ in range(10):
        next(iterator)
    process = psutil.Process()
    before = process.memory_info().rss
    for batch in iterator:
        assert batch.shape == (1, 1 << 20)
    assert process.memory_info().rss - before < 64 << 20


@pytest.mark.better_than_grain("Grain hands out a window or a packed batch after close")
@pytest.mark.parametrize("name", PIPELINES)
def test_close_is_idempotent_and_final(name):
    iterator = iter(PIPELINES[name]())
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


@pytest.mark.better_than_grain("Grain keeps what it made until something else is made")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_threads", [0, 16])
def test_what_was_delivered_is_the_users_alone(num_threads, num_workers):
    options = grain.ReadOptions(num_threads=num_threads, num_workers=num_workers)
    ds = grain.MapDataset.range(64).map(lambda x: np.full(50_000, x)).to_iter_dataset(options)
    for batches in (ds.batch(4), ds.batch(4).map(lambda batch: batch + 1), ds):
        with iter(batches) as iterator:
            for _ in range(5):
                delivered = next(iterator)
                known = weakref.ref(delivered)
                del delivered
                # A thread that helped may be about to let go of it.
                assert becomes(lambda: known() is None)  # noqa: B023 - called at once


@pytest.mark.better_than_grain("iterators of Grain are no context managers")
@pytest.mark.parametrize("name", PIPELINES)
def test_with_block_closes(name):
    with iter(PIPELINES[name]()) as iterator:
        next(iterator)
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


@pytest.mark.parametrize("name", PIPELINES)
def test_close_before_the_first_element(name):
    iterator = iter(PIPELINES[name]())
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


@pytest.mark.parametrize("name", ["read_default", "thread_prefetch", "window_shuffle"])
def test_close_stops_reading(name):
    read = []

    class Slow:
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            read.append(index)
            time.sleep(0.001)
            return index

    source = MapDataset.source(Slow()).to_iter_dataset(
        grain.ReadOptions(num_threads=2, prefetch_buffer_size=200)
    )
    dataset = {
        "read_default": lambda: source,
        "thread_prefetch": lambda: experimental.ThreadPrefetchIterDataset(
            source, prefetch_buffer_size=5
        ),
        "window_shuffle": lambda: experimental.WindowShuffleIterDataset(
            source, window_size=5, seed=1
        ),
    }[name]()
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    time.sleep(0.05)
    after = len(read)
    time.sleep(0.2)
    assert len(read) <= after + 2
    assert len(read) < 10**4


@pytest.mark.parametrize("name", PIPELINES)
def test_state_and_iter_start_no_thread(name):
    threads = set(threading.enumerate())
    native = _num_threads()
    iterator = iter(PIPELINES[name]())
    iterator.get_state()
    assert set(threading.enumerate()) <= threads
    assert _num_threads() <= native
    iterator.close()


@pytest.mark.parametrize("name", ["read_default", "thread_prefetch", "batch"])
def test_restoring_starts_no_thread(name):
    running = threading.active_count()
    first = iter(PIPELINES[name]())
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    _settled(threading.active_count, running)
    threads = set(threading.enumerate())
    iterator = iter(PIPELINES[name]())
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert set(threading.enumerate()) <= threads
    iterator.close()


@pytest.fixture
def _no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("name", PIPELINES)
def test_datasets_are_freed_without_the_collector(name):
    dataset = PIPELINES[name]()
    gone = weakref.ref(dataset)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    del iterator, dataset
    until = time.monotonic() + 30
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("name", PIPELINES)
def test_abandoned_iterator_is_freed_without_the_collector(name):
    iterator = iter(PIPELINES[name]())
    next(iterator)
    gone = weakref.ref(iterator)
    del iterator
    until = time.monotonic() + 30
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


def _slow(x):
    time.sleep(0.004)
    return x


class _FailsToOpen(grain.IterDataset):
    def __iter__(self):
        _failed.set()
        raise ValueError("the seventh")


_failed = threading.Event()


def _seventh_fails(x):
    if x == 7:
        _failed.set()
        raise ValueError("the seventh")
    return x


FAILING = {
    **_pipelines(_seventh_fails),
    "map": lambda: _shuffled(add_one).map(_seventh_fails),
    "filter": lambda: _shuffled(add_one).filter(_seventh_fails),
    "mp_prefetch": lambda: _shuffled(_seventh_fails).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=1)
    ),
    "shared_batches": lambda: (
        MapDataset.range(10_000).map(_seventh_fails).map(_slow).batch(64).to_iter_dataset()
    ),
    "opening": lambda: experimental.InterleaveIterDataset(
        [_shuffled(add_one), _FailsToOpen(), _shuffled(add_one)], cycle_length=2
    ),
}


class _LingeringLock:
    """A lock after whose release a failed thread does not go on at once, as on a busy machine."""

    def __init__(self):
        self._lock = _thread.allocate_lock()
        self.acquire, self.locked = self._lock.acquire, self._lock.locked

    def release(self):
        self._lock.release()
        if _failed.is_set() and threading.get_ident() != threading.main_thread().ident:
            time.sleep(0.02)

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *_):
        self.release()


@pytest.mark.better_than_grain("a traceback and what it holds keep each other")
@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("lingers", [False, True], ids=["", "threads linger"])
@pytest.mark.parametrize("name", FAILING)
def test_failed_iterator_is_freed_without_the_collector(name, lingers, monkeypatch):
    _failed.clear()
    if lingers:
        monkeypatch.setattr(threading, "Lock", _LingeringLock)
    iterator = iter(FAILING[name]())
    with pytest.raises(ValueError, match="the seventh") as raised:
        take(iterator, None)
    assert raised.traceback[-1].name in {"_seventh_fails", "__iter__"} or name == "mp_prefetch"
    gone = weakref.ref(iterator)
    del iterator, raised
    until = time.monotonic() + 30
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("name", ["read_inline", "batch", "mix", "packed"])
def test_reference_counts_stay_while_iterating(name):
    dataset = PIPELINES[name]()
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    before = sys.getrefcount(dataset), sys.getrefcount(iterator)
    for _ in range(50):
        next(iterator)
        iterator.get_state()
    assert (sys.getrefcount(dataset), sys.getrefcount(iterator)) == before
    iterator.close()


@pytest.mark.usefixtures("_no_gc")
def test_elements_handed_out_are_not_kept():
    class Element:
        pass

    iterator = iter(MapDataset.range(100).map(lambda _: Element()).to_iter_dataset(INLINE))
    seen = [weakref.ref(next(iterator)) for _ in range(10)]
    assert sum(ref() is not None for ref in seen) <= 1
    iterator.close()


# --- in child processes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["read_default", "thread_prefetch", "interleave", "packed"])
def test_thread_that_can_not_be_started_is_an_error_and_loses_nothing(name, monkeypatch):
    expected = take(iter(PIPELINES[name]()), 20)
    start = threading.Thread.start
    to_fail = 2

    def start_or_fail(thread):
        nonlocal to_fail
        if to_fail:
            to_fail -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    iterator, found = iter(PIPELINES[name]()), []
    while len(found) < 20:
        expecting = pytest.raises(RuntimeError, match="can't start") if to_fail else nullcontext()
        with expecting:
            found += take(iterator, 1)
    assert found == expected


def _run(body, timeout_s=240):
    """Runs `body` as a script; `grain`, `experimental` and `MapDataset` are there."""
    lines = [
        "import os, sys, threading, time",
        "from under_test import grain, experimental",
        "MapDataset = grain.MapDataset",
        body,
    ]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )


LIVE = {
    "read_default": "MapDataset.range(10**6).map(lambda x: x + 1).to_iter_dataset()",
    "thread_prefetch": "experimental.ThreadPrefetchIterDataset("
    "MapDataset.range(10**6).map(lambda x: x + 1).to_iter_dataset(), prefetch_buffer_size=3)",
    "slow_map": "MapDataset.range(10**6).map(lambda x: time.sleep(0.01) or x).to_iter_dataset()",
    "slow_prefetch": "experimental.ThreadPrefetchIterDataset("
    "MapDataset.range(10**6).map(lambda x: time.sleep(0.01) or x).to_iter_dataset(), "
    "prefetch_buffer_size=3)",
    "batch": "MapDataset.range(10**6).map(lambda x: x + 1).to_iter_dataset().batch(8)",
}


@pytest.mark.better_than_grain("Grain makes noise and takes its time")
@pytest.mark.parametrize("name", LIVE)
def test_interpreter_ends_quietly_with_a_live_iterator(name):
    process = _run(
        f"iterator = iter({LIVE[name]})\nnext(iterator)\nnext(iterator)\nprint(time.monotonic())"
    )
    ended = time.monotonic()
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    # The time from the last statement to the end of the process.
    assert ended - float(process.stdout) < 30


AMID_WORK = """
begun = threading.Event()
def slow(x):
    if x:
        begun.set()
        time.sleep(0.2)
        os.write(1, b"ended")
    return x
def slow_part(x):
    return MapDataset.range(slow(x) + 1).to_iter_dataset()
read = MapDataset.range(9).map(slow).to_iter_dataset()
parts = MapDataset.range(9).map(slow_part)
"""


@pytest.mark.better_than_grain("Grain waits for none of its threads")
@pytest.mark.parametrize("leave", ["pass", "iterator.close()", "del iterator"])
@pytest.mark.parametrize(
    "dataset",
    [
        "read",
        "experimental.ThreadPrefetchIterDataset(read, prefetch_buffer_size=2)",
        "experimental.InterleaveIterDataset(parts, cycle_length=2)",
    ],
)
def test_function_under_way_ends_before_the_interpreter(dataset, leave):
    body = f"iterator = iter({dataset})\nnext(iterator)\nbegun.wait()\n{leave}"
    process = _run(AMID_WORK + body)
    assert (process.returncode, process.stderr) == (0, "")
    assert "ended" in process.stdout


LEFT_BEHIND = """
import numpy as np
class Slow:
    def __init__(self, x): self.x = x
    def __array__(self, dtype=None, copy=None):
        time.sleep(0.0002)
        return np.full(self.x % 5 + 1, self.x)
def slow(x):
    time.sleep(0.0002)
    return np.frombuffer(x, np.uint8)
inline = grain.ReadOptions(num_threads=0)
packed = experimental.FirstFitPackIterDataset(
    MapDataset.range(10**6).map(lambda x: {{"x": Slow(x)}}).to_iter_dataset(inline),
    length_struct={{"x": 64}}, num_packing_bins=2,
).batch(4)
records = MapDataset.source(grain.sources.ArrayRecordDataSource({path!r}))
filled = records.repeat().map(slow).to_iter_dataset(inline).batch(64)
batches = iter({name})
next(batches), next(batches), next(batches)
threading.Thread(target=lambda: list(batches), daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("name", ["packed", "filled"])
def test_interpreter_ends_while_a_thread_of_the_user_makes_batches(name, tmp_path):
    # The thread's stack has frames of the engine, which CPython before 3.14 would unwind.
    path = str(tmp_path / "some.array_record")
    with grain.array_record.ArrayRecordWriter(path, "group_size:1") as writer:
        for number in range(500):
            writer.write(number.to_bytes(2, "little") * 4000)
    process = _run(LEFT_BEHIND.format(path=path, name=name))
    assert process.returncode == 0, process.stderr


@pytest.mark.better_than_grain("Grain makes noise and takes its time")
def test_interpreter_ends_quietly_while_a_cycle_holds_an_iterator():
    process = _run(
        f"class Holder: pass\nholder = Holder()\nholder.me = holder\n"
        f"holder.iterator = iter({LIVE['read_default']})\nnext(holder.iterator)\n"
        "sys.keep = holder"
    )
    assert (process.returncode, process.stderr) == (0, "")


FORK = """
iterator = iter(MapDataset.range(1000).shuffle(1).map(lambda x: x + 1).to_iter_dataset())
first = [next(iterator) for _ in range(3)]
expected = list(MapDataset.range(1000).shuffle(1).map(lambda x: x + 1))
pid = os.fork()
if pid == 0:
    # A new iterator works in the child, whatever the parent's threads did during the fork.
    found = list(MapDataset.range(1000).shuffle(1).map(lambda x: x + 1).to_iter_dataset())
    batches = list(MapDataset.range(64).map(lambda x: x + 1).batch(8))
    os._exit(0 if found == expected and len(batches) == 8 else 3)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert first + list(iterator) == expected
"""


FORK_AMID_WORK = """
import numpy as np, signal
shuffled = MapDataset.range(10**7).shuffle(seed=1)
wanted = shuffled[3]
rows = MapDataset.range(64).to_iter_dataset().map(lambda x: np.full(1 << 17, x, np.uint8))
expected = next(iter(rows.batch(16)))  # threads of the engine have copied its rows
ended = False
blocks = shuffled.batch(200_000)
def work():
    while not ended:
        blocks[0]
thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        same = shuffled[3] == wanted and (next(iter(rows.batch(16))) == expected).all()
        os._exit(0 if same else 3)
    _, status = os.waitpid(pid, 0)
    if status:
        break
ended = True
thread.join()
assert os.waitstatus_to_exitcode(status) == 0, status
"""


def test_forked_child_waits_for_no_thread_of_its_parent():
    process = _run("import warnings\nwarnings.simplefilter('ignore')\n" + FORK_AMID_WORK)
    assert process.returncode == 0, process.stderr


FIRST_USE = """
import builtins
import numpy as np
from grainmill import _native
imported, real = [], builtins.__import__
builtins.__import__ = lambda name, *rest, **more: imported.append(name) or real(name, *rest, **more)
rows = np.zeros((2, 3), np.uint8)
assert _native.copy_rows(rows, [np.ones(3, np.uint8)] * 2, 0, hot=False) == 2
assert sorted(_native.Permutation(10, 1).apply(np.arange(10)).tolist()) == list(range(10))
assert not imported, imported
"""


def test_nothing_of_numpy_is_looked_up_on_first_use():
    """A child that is forked meanwhile would wait for the lock of the thread that looks it up."""
    process = _run(FIRST_USE)
    assert process.returncode == 0, process.stderr


def test_new_iterators_work_in_a_forked_child():
    process = _run("import warnings\nwarnings.simplefilter('ignore')\n" + FORK)
    assert process.returncode == 0, process.stderr


def test_importing_starts_no_thread_and_imports_no_jax():
    process = _run(
        "import psutil\n"
        "print(psutil.Process().num_threads(), threading.active_count(), 'jax' in sys.modules, "
        "'tensorflow' in sys.modules)"
    )
    assert process.returncode == 0, process.stderr
    num_threads, active, jax, tensorflow = process.stdout.split()
    if NAME != "grain":
        assert jax == "False"
        assert int(num_threads) <= 1 + os.cpu_count()  # NumPy's BLAS has its pool
    assert (active, tensorflow) == ("1", "False")


def test_take_helper_leaves_the_rest():
    """`take` reads no further than requested; the tests above rely on it."""
    iterator = iter(MapDataset.range(5).to_iter_dataset())
    assert take(iterator, 2) == [0, 1]
    assert take(iterator, None) == [2, 3, 4]


FAILS_WITH_OPEN_ITERATORS = """
import contextlib, sys
ds = MapDataset.range(1000).map(lambda x: x + 1).to_iter_dataset()
prefetched = experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=4)
sys.kept = iter(prefetched), iter(ds.batch(7))
next(sys.kept[0]), next(sys.kept[1])
contextlib.suppress = None  # as late in the shutdown, when modules are emptied
raise KeyError("the only message")
"""


def test_iterators_that_end_with_the_interpreter_say_nothing():
    process = _run(FAILS_WITH_OPEN_ITERATORS)
    assert "the only message" in process.stderr
    assert "Exception ignored" not in process.stderr
