"""`MapDataset.cache` and `IterDataset.cache`, in memory and in files."""

import copy
import functools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bucket_server import BucketServer
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import grainmill as grain
from grainmill._cache.encoding import decoded, encoded
from grainmill._cache.fingerprint import Fingerprint
from grainmill._native import ReadQueue
from grainmill.array_record import ArrayRecordWriter

RepeatIterDataset = grain.experimental.RepeatIterDataset


class Counted:
    """A function that counts its calls by argument."""

    def __init__(self):
        self.calls = Counter()

    def __call__(self, x):
        self.calls[int(x)] += 1
        return {"x": np.full(3, x, np.int16), "text": f"<{x}>"}

    def __reduce__(self):  # the count is not what makes elements
        return Counted, ()


def plain(elements):
    return [None if e is None else (e["x"].tolist(), e["x"].dtype, e["text"]) for e in elements]


@pytest.fixture(params=["memory", "files"])
def where(request, tmp_path):
    return {} if request.param == "memory" else {"path": tmp_path / "cache"}


def finished(path):
    return sorted(Path(path).glob("*/manifest.json"))


def run(script, *args, check=True, **kw):
    """Runs a program in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kw,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


# --- encoding -------------------------------------------------------------------------------------

ELEMENTS = [
    b"bytes",
    b"",
    None,
    7,
    "text",
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(20)[::3],
    np.zeros((0, 4), np.float16),
    np.float32(1.5),
    np.array(["a", "bcd"]),
    np.array(["a", None, 3], object),
    np.array([(1, 2.0)], dtype=[("a", "i1"), ("b", "f8")]),
    {"a": np.ones(5, np.uint8), "b": {"c": (np.arange(3), [b"x", np.bool_(1)])}},
]


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_decoded_element_equals_the_encoded_one(element, kind):
    again = decoded(kind(b"".join(encoded(element))))
    assert type(again) is type(element)
    np.testing.assert_equal(again, element)
    if isinstance(element, np.ndarray):
        assert again.dtype == element.dtype
        assert again.flags.writeable
        assert again.flags.aligned


def test_arrays_are_stored_as_they_lie_in_memory_and_not_pickled():
    array = np.arange(10_000, dtype=np.int64)
    pieces = encoded({"a": array, "b": array[:5]})
    assert max(len(piece) for piece in pieces if isinstance(piece, bytes)) < 500
    assert np.shares_memory(np.frombuffer(pieces[4], np.int64), array)


# --- both kinds of dataset, in memory and in files ------------------------------------------------


def test_each_element_is_computed_once_in_any_order_of_access(where):
    count = Counted()
    ds = grain.MapDataset.range(50).map(count)
    expected = plain(ds)
    count.calls.clear()
    cached = ds.cache(**where)
    shuffled = cached.shuffle(seed=5).repeat(3)
    assert plain(shuffled) == plain(ds.shuffle(seed=5).repeat(3))
    count.calls.clear()
    assert plain(cached) == expected
    assert plain(cached.to_iter_dataset(grain.ReadOptions(num_threads=4))) == expected
    assert not count.calls


def test_threads_that_need_the_same_element_compute_it_once():
    count = Counted()

    def slow(x):
        time.sleep(0.02)
        return count(x)

    ds = grain.MapDataset.range(5).map(slow).cache().shuffle(seed=1).repeat(20)
    read = ds.to_iter_dataset(grain.ReadOptions(num_threads=8, prefetch_buffer_size=100))
    assert len(list(read)) == 100
    assert set(count.calls.values()) == {1}


def test_elements_are_those_of_the_first_epoch_in_every_epoch(where):
    ds = (
        grain.MapDataset.range(7)
        .shuffle(seed=1)
        .random_map(lambda x, rng: x + rng.random(), seed=2)
    )
    assert list(ds.cache(**where).repeat(3)) == list(ds) * 3
    assert len(set(ds.repeat(3))) == 21


@settings(max_examples=25)
@given(
    length=st.integers(1, 30),
    requests=st.lists(st.lists(st.integers(0, 89), min_size=1, max_size=8), max_size=12),
    in_files=st.booleans(),
)
def test_any_sequence_of_requests_gives_what_the_parent_gives(
    tmp_path_factory, length, requests, in_files
):
    def f(x):
        return None if x % 5 == 3 else {"x": np.full(x % 4, x), "y": b"z" * x}

    ds = grain.MapDataset.range(length).map(f)
    path = tmp_path_factory.mktemp("cache") if in_files else None
    for cached in [ds.cache(path), ds.cache(path)]:  # the second finds what the first has written
        for indices in requests:
            expected = [ds[i % length] for i in indices]
            np.testing.assert_equal(cached.__getitems__(indices), expected)


def test_changing_an_element_does_not_change_the_cache(where):
    ds = grain.MapDataset.range(4).map(Counted()).cache(**where)
    sequential = ds.to_iter_dataset().cache(**where)
    for cached in (ds, sequential):
        expected = plain(cached)
        for _ in range(3):
            for element in cached:
                element["x"][:] = -1
                element.clear()
        assert plain(cached) == expected


def test_mapdataset_states_and_resume_are_exact_at_every_element(where):
    def make(**kw):
        ds = grain.MapDataset.range(9).map(lambda x: x * 2)
        ds = ds.cache(**kw) if kw != {"off": True} else ds
        ds = ds.shuffle(seed=3).repeat(2).filter(lambda x: x % 3)
        return ds.to_iter_dataset().batch(2)

    expected = [batch.tolist() for batch in make(off=True)]
    for k in range(len(expected) + 1):
        iterator = iter(make(**where))
        assert [next(iterator).tolist() for _ in range(k)] == expected[:k]
        state = json.loads(json.dumps(iterator.get_state()))
        again = iter(make(**where))
        again.set_state(state)
        assert [batch.tolist() for batch in again] == expected[k:]


@pytest.mark.parametrize("budget", [None, 300, 1])
@pytest.mark.parametrize("lazy", [False, True])
def test_iterdataset_states_and_resume_are_exact_at_every_element(tmp_path, budget, lazy):
    def make(cached, path=None):
        ds = grain.MapDataset.range(9).map(lambda x: x * 2).to_iter_dataset()
        ds = ds.filter(lambda x: x % 3) if lazy else ds
        if cached:
            ds = ds.cache(path, ram_budget_bytes=None if path else budget)
        return RepeatIterDataset(ds, 3)

    expected = list(make(cached=False))
    assert list(make(cached=True)) == expected
    paths = [None] if budget else [None, tmp_path / "one"]
    for path in paths:
        states = []
        iterator = iter(make(cached=True, path=path))
        for k in range(len(expected) + 1):
            states.append(json.loads(json.dumps(iterator.get_state())))
            if k < len(expected):
                assert next(iterator) == expected[k]
        with pytest.raises(StopIteration):
            next(iterator)
        for other in [path, None, tmp_path / f"fresh-{lazy}-{path is None}"]:
            for k, state in enumerate(states):
                again = iter(make(cached=True, path=other))
                again.set_state(state)
                assert again.get_state() == state
                assert list(again) == expected[k:]
                iterator.set_state(state)
                assert next(iterator, None) == (expected[k] if k < len(expected) else None)


def test_failures_are_raised_at_their_element_and_are_not_cached(where):
    broken = [True]

    def f(x):
        if x == 3 and broken[0]:
            raise KeyError("broken")
        return x

    class Failing:
        def __call__(self, x):
            return f(x)

        def __reduce__(self):
            return Failing, ()

    ds = grain.MapDataset.range(6).map(Failing()).cache(**where)
    sequential = grain.MapDataset.range(6).map(Failing()).to_iter_dataset().cache(**where)
    iterators = [iter(ds), iter(ds.to_iter_dataset()), iter(sequential)]
    for iterator in iterators:
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="broken") as caught:
            next(iterator)
        assert any("element 3" in note for note in caught.value.__notes__)
    broken[0] = False
    for iterator in iterators:
        assert list(iterator) == [3, 4, 5]
    assert list(ds) == list(sequential) == list(range(6))


def test_an_element_that_cannot_be_pickled_is_an_error_at_its_place(where):
    ds = grain.MapDataset.range(6).map(lambda x: (lambda: x) if x == 2 else x)
    for cached in (ds.cache(**where), ds.to_iter_dataset().cache(**where)):
        iterator = iter(cached)
        assert [next(iterator), next(iterator)] == [0, 1]
        for _ in range(2):
            with pytest.raises(
                TypeError, match="function cannot be cached, as it cannot be pickled"
            ):
                next(iterator)


def test_bad_arguments_are_refused(tmp_path):
    ds = grain.MapDataset.range(3)
    for dataset in (ds, ds.to_iter_dataset()):
        with pytest.raises(ValueError, match="has no effect on one in files"):
            dataset.cache(tmp_path, ram_budget_bytes=5)
        with pytest.raises(ValueError, match="local file system, got 's3://bucket"):
            dataset.cache("s3://bucket/x")
        with pytest.raises(ValueError, match="must not be empty"):
            dataset.cache("")
        with pytest.raises(TypeError, match="`path` must be a path"):
            dataset.cache(3)
        with pytest.raises(ValueError, match="ram_budget_bytes"):
            dataset.cache(ram_budget_bytes=0)
    with pytest.raises(ValueError, match="upstream of `repeat`"):
        ds.repeat().cache()
    (tmp_path / "file").write_text("")
    for dataset in (ds, ds.to_iter_dataset()):
        with pytest.raises(OSError, match="cannot write a cache"):
            list(dataset.cache(tmp_path / "file" / "below"))


def test_an_empty_dataset_can_be_cached(where):
    ds = grain.MapDataset.range(3)[3:]
    assert list(ds.cache(**where)) == []
    sequential = ds.to_iter_dataset().cache(**where)
    assert list(sequential) == list(sequential) == []


# --- in memory ------------------------------------------------------------------------------------


def test_memory_stays_within_the_budget_and_the_rest_is_computed():
    count = Counted()
    make = functools.partial(
        grain.MapDataset.range(20).map(count).map, lambda _: np.zeros(1000, np.uint8)
    )
    for ds in (make(), make().to_iter_dataset()):
        cached = ds.cache(ram_budget_bytes=8_000)
        assert len(list(cached)) == 20
        count.calls.clear()
        assert len(list(cached)) == 20
        assert 13 <= sum(count.calls.values()) < 20


def test_elements_that_did_not_fit_are_read_from_the_parent_in_each_pass():
    ds = grain.MapDataset.range(30).map(lambda x: np.full(100, x)).to_iter_dataset()
    cached = RepeatIterDataset(ds.cache(ram_budget_bytes=9_000), 3)
    assert [int(x[0]) for x in cached] == list(range(30)) * 3


def test_workers_share_the_cache_in_memory(tmp_path):
    def f(x):
        (tmp_path / f"{x}-{os.getpid()}-{time.monotonic_ns()}").touch()
        return x, os.getpid()

    ds = grain.MapDataset.range(200).map(f).cache()
    read = ds.to_iter_dataset(grain.ReadOptions(num_workers=3))
    elements = list(read)
    assert list(read) == elements
    assert len({process for _, process in elements}) > 1
    assert list(ds) == elements[:200]  # the main process finds them, too
    assert len(list(tmp_path.iterdir())) == 200


@pytest.mark.parametrize("attempt", range(cases(6, 100)))
def test_copies_in_threads_take_room_of_their_own(attempt):
    """Whatever other copies of the data set come and go meanwhile."""
    count, num_writers = 3000 + attempt, 4
    ds = grain.MapDataset.range(count).cache(ram_budget_bytes=1 << 20)
    assert ds[0] == 0
    stores = [copy.deepcopy(ds)._node.store for _ in range(num_writers)]

    def put_some(first):
        for x in range(first + 1, count, num_writers):
            stores[first].put([x], [(x, "y" * (x % 7))])
            if x % 500 == first:
                copy.deepcopy(ds)[0]  # opens the file and, soon, closes it

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=put_some, args=(n,)) for n in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    stored = ds._node.store.read(np.arange(1, count))
    assert list(stored) == [(x, "y" * (x % 7)) for x in range(1, count)]


def test_forked_children_take_room_of_their_own():
    script = """
        import copy, os, sys, time
        import numpy as np
        import grainmill as grain

        for attempt in range(int(sys.argv[1])):
            count = 3000 + attempt
            ds = grain.MapDataset.range(count).cache(ram_budget_bytes=1 << 20)
            assert ds[0] == 0
            start = time.monotonic() + 0.05
            children = []
            for first in range(4):
                children.append(os.fork())
                if not children[-1]:
                    time.sleep(max(0, start - time.monotonic()))
                    for x in range(first + 1, count, 4):
                        ds._node.store.put([x], [(x, "y" * (x % 7))])
                        if x % 500 == first:
                            copy.deepcopy(ds)[0]
                    os._exit(0)
            assert all(os.waitpid(child, 0)[1] == 0 for child in children)
            stored = ds._node.store.read(np.arange(1, count))
            assert list(stored) == [(x, "y" * (x % 7)) for x in range(1, count)]
        print("all")
    """
    assert run(script, cases(6, 100)).strip() == "all"


def test_a_pickled_dataset_shares_memory_only_with_its_own():
    ds = grain.MapDataset.range(4).map(Counted()).cache()
    copy = pickle.loads(pickle.dumps(ds))
    assert plain(copy) == plain(ds)
    key = ds._node.store.__reduce__()[1][2]
    assert copy._node.store.__reduce__()[1][2][1] == key[1]
    wrong = type(ds._node.store)(*ds._node.store.__reduce__()[1][:2])
    assert wrong.missing(np.arange(4)).all()


# --- in files -------------------------------------------------------------------------------------


def test_finished_cache_is_opened_by_later_runs_without_computing(tmp_path):
    script = """
        import sys, numpy as np, grainmill as grain
        def f(x):
            print("called\\n", end="")  # in one piece: several threads print
            return np.arange(x)
        ds = grain.MapDataset.range(300).map(f)
        sequential = ds.to_iter_dataset().map(lambda x: x + 1)
        first = list(ds.cache(sys.argv[1]).shuffle(seed=2))
        second = list(sequential.cache(sys.argv[1]))
        print(sum(map(len, first)), sum(map(sum, second)))
    """
    first = run(script, tmp_path, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert first.count("called") == 600
    assert len(finished(tmp_path)) == 2
    second = run(script, tmp_path, env={**os.environ, "PYTHONHASHSEED": "2"})
    assert second.split() == first.split()[600:]
    manifest = json.loads(finished(tmp_path)[0].read_text())
    assert manifest["num_elements"] == 300
    assert [stage["stage"] for stage in manifest["pipeline"]][:2] == [
        "RangeMapDataset",
        "MapMapDataset",
    ]


WRITER = """
    import sys, time, numpy as np, grainmill as grain
    def f(x):
        if x == 150:
            print("half", flush=True)
            time.sleep(60)
        return np.full(20_000 if x < 100 else 9, x)  # parts, and then one that stays open
    ds = grain.MapDataset.range(300).map(f)
    if sys.argv[2] == "random access":
        list(ds.cache(sys.argv[1]))
    else:
        list(ds.to_iter_dataset(grain.ReadOptions(num_threads=0)).cache(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["random access", "sequence"])
def test_what_a_killed_writer_left_is_not_used_unless_it_is_whole(tmp_path, kind):
    script = textwrap.dedent(WRITER)
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), kind], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "half\n"

    def unfinished():
        found = tmp_path.rglob("*")
        return [path for path in found if "tmp" in path.suffix or "unfinished" in str(path)]

    # Other threads may still compute what comes before; the one that said so sleeps for longer.
    deadline = time.monotonic() + 30
    while kind != "sequence" and not (list(tmp_path.rglob("part-*")) and unfinished()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait(60)
    writer.stdout.close()
    left = unfinished()
    assert left
    assert kind == "sequence" or list(tmp_path.rglob("part-*"))
    assert not finished(tmp_path)
    # The function itself must stay the same, or this would be another pipeline.
    rest = script.replace("def f(x):", "time.sleep = lambda _: None\ndef f(x):")
    done = subprocess.run(
        [sys.executable, "-c", rest, str(tmp_path), kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(finished(tmp_path)) == 1
    (directory,) = {path.parent for path in finished(tmp_path)}
    assert not [path for path in directory.parent.rglob("*") if "unfinished" in path.name]
    assert not list(directory.glob("*.tmp"))
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["num_elements"] == 300


def test_processes_that_race_for_one_path_all_get_the_elements(tmp_path):
    script = """
        import sys, random, numpy as np, grainmill as grain
        def f(x):
            return np.full(2000, x)
        ds = grain.MapDataset.range(400).map(f)
        seed = int(sys.argv[2])
        shuffled = ds.shuffle(seed=seed) if seed % 2 else ds
        cached = ds.cache(sys.argv[1])
        cached = cached.shuffle(seed=seed) if seed % 2 else cached
        for _ in range(2):
            assert [int(x[9]) for x in cached] == [int(x[9]) for x in shuffled]
        sequential = ds.to_iter_dataset().cache(sys.argv[1])
        for _ in range(2):
            assert [int(x[9]) for x in sequential] == list(range(400))
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(seed)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(finished(tmp_path)) == 2
    assert not [path for path in tmp_path.rglob("*") if "unfinished" in path.name]
    assert not list(tmp_path.rglob("*.tmp"))


def test_processes_that_read_a_shard_each_finish_the_cache_together(tmp_path):
    count = Counted()
    ds = grain.MapDataset.range(40).map(count)
    for shard in range(4):
        assert len(list(ds.cache(tmp_path)[shard::4])) == 10
        assert len(finished(tmp_path)) == (shard == 3)
    count.calls.clear()
    assert plain(ds.cache(tmp_path)) == plain(ds)
    assert max(count.calls.values()) == 1


def test_workers_write_parts_that_later_runs_read(tmp_path):
    ds = grain.MapDataset.range(200).map(lambda x: (x, np.zeros(50)))
    for _ in range(2):
        read = ds.cache(tmp_path).repeat(2).to_iter_dataset(grain.ReadOptions(num_workers=3))
        assert [x for x, _ in read] == [*range(200)] * 2
    # Workers flush when they end, and whoever comes next finds all elements.
    deadline = time.monotonic() + 30
    while not finished(tmp_path) and time.monotonic() < deadline:
        assert [x for x, _ in ds.cache(tmp_path)] == list(range(200))
    assert finished(tmp_path)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_of_mp_prefetch_cache_their_shares(tmp_path, num_workers):
    ds = grain.MapDataset.range(40).to_iter_dataset().map(lambda x: x + 1)
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    expected = list(RepeatIterDataset(ds, 2).mp_prefetch(options))
    for _ in range(2):
        cached = RepeatIterDataset(ds.cache(tmp_path), 2)
        assert list(cached.mp_prefetch(options)) == expected
        assert len(finished(tmp_path)) == num_workers
    assert list(ds.cache(tmp_path)) == list(range(1, 41))


def test_a_pass_that_stops_in_the_middle_leaves_nothing(tmp_path):
    ds = grain.MapDataset.range(20).to_iter_dataset().cache(tmp_path)
    iterator = iter(ds)
    assert [next(iterator) for _ in range(5)] == list(range(5))
    state = iterator.get_state()
    iterator.close()
    assert list(tmp_path.iterdir()) == []
    iterator = iter(ds)
    iterator.set_state(state)
    assert list(iterator) == list(range(5, 20))
    assert list(tmp_path.iterdir()) == []  # it has not seen the first five
    assert list(ds) == list(range(20))
    assert len(finished(tmp_path)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no such limit")
@pytest.mark.parametrize("kind", ["random access", "sequence"])
def test_a_full_disk_ends_the_caching_and_nothing_else(tmp_path, kind):
    out = run(
        """
        import logging, resource, sys, numpy as np, grainmill as grain
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        ds = grain.MapDataset.range(100).map(lambda x: np.full(1000, x))
        if sys.argv[2] == "random access":
            cached = ds.cache(sys.argv[1])
        else:
            cached = ds.to_iter_dataset().cache(sys.argv[1])
        for _ in range(2):
            assert [int(x[0]) for x in cached] == list(range(100))
        """,
        tmp_path,
        kind,
    )
    assert out.count("no longer cached, as writing failed") == 1
    assert not finished(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


INTERRUPTED = """
    import json, os, sys, grainmill as grain
    from grainmill._cache.files import PartWriter
    computed = []

    class Square:
        def __call__(self, x):
            computed.append(x)
            return x * x

        def __reduce__(self):
            return Square, ()

    def found(folder, place, number, when):
        original, calls, interrupts = getattr(PartWriter, place), [], 0

        def interrupted(self, *arguments):
            calls.append(1)
            if when == "before" and len(calls) == number:
                raise KeyboardInterrupt
            original(self, *arguments)
            if when == "after" and len(calls) == number:
                raise KeyboardInterrupt

        setattr(PartWriter, place, interrupted)
        cached = grain.MapDataset.range(30).map(Square()).cache(folder)
        for index in [*range(10), *range(30), *range(30)]:
            try:
                assert cached[index] == index * index, (index, place, number, when)
            except KeyboardInterrupt:
                interrupts += 1
        return f"{interrupts} {len(computed)}"

    for case in json.loads(sys.argv[1]):  # each in a process of its own
        if os.fork() == 0:
            print(found(*case))
            break
        assert os.wait()[1] == 0
"""


def test_an_interrupt_while_an_element_is_stored_changes_none(tmp_path):
    places = {
        tmp_path / f"{place} {number} {when}": (place, number, when)
        for place, number in (("write", 1), ("write", 5), ("finish", 1))
        for when in ("before", "after")
    }
    out = run(INTERRUPTED, json.dumps([[str(path), *case] for path, case in places.items()]))
    for path, line in zip(places, out.splitlines(), strict=True):
        assert line.startswith("1 "), path.name
        assert len(finished(path)) == 1, path.name
    never = [[str(path), place, 100, when] for path, (place, _, when) in places.items()]
    again = run(INTERRUPTED, json.dumps(never))  # in new processes
    for path, line in zip(places, again.splitlines(), strict=True):
        assert line == "0 0", path.name
        assert not list(path.rglob("*.tmp")), path.name


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("place", [(np, "save"), (Path, "glob")], ids=["index", "manifest"])
def test_an_index_that_no_manifest_names_does_not_stay(
    tmp_path, caplog, monkeypatch, place, failure
):
    original = getattr(*place)

    def fail(*arguments):
        original(*arguments)
        raise failure

    count = Counted()
    ds = grain.MapDataset.range(10).map(count)
    cached = ds.cache(tmp_path)
    assert cached[3]["text"] == "<3>"
    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                list(cached)
        else:
            assert plain(cached) == plain(ds)
            assert caplog.records
    assert len(list(tmp_path.rglob("index-*"))) == len(finished(tmp_path)) == (place[0] is Path)
    count.calls.clear()
    assert plain(ds.cache(tmp_path)) == plain(ds)
    assert max(count.calls.values()) == 1
    assert len(list(tmp_path.rglob("index-*"))) == len(finished(tmp_path)) == 1


def test_a_part_that_appears_as_the_directory_is_listed_is_seen(tmp_path):
    ds = grain.MapDataset.range(10).map(Counted())
    store, other = (ds.cache(tmp_path)._node.store for _ in range(2))
    index = np.arange(10)
    assert store.missing(index).all()
    changed = store.directory.stat()
    other.put(range(5), [ds[i] for i in range(5)])
    other.flush()
    os.utime(store.directory, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert store.missing(index).tolist() == [False] * 5 + [True] * 5


def test_a_foreign_file_among_the_parts_is_an_error_each_time(tmp_path):
    ds = grain.MapDataset.range(10).map(Counted())
    store = ds.cache(tmp_path)._node.store
    index = np.arange(10)
    assert store.missing(index).all()
    writer = ArrayRecordWriter(str(store.directory / "part-0.array_record"), "group_size:1")
    writer.write(bytes(8))
    writer.write(bytes(24))
    writer.close()
    changed = store.directory.stat()
    for _ in range(3):
        time.sleep(0.03)
        with pytest.raises(ValueError, match=r"part-0\.array_record: not a part of this cache"):
            store.missing(index)
    (store.directory / "part-0.array_record").unlink()
    os.utime(store.directory, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert store.missing(index).all()


def test_stored_records_that_were_read_can_be_used_twice(tmp_path):
    ds = grain.MapDataset.range(10).map(Counted()).cache(tmp_path)
    elements = plain(ds)
    store, index = ds._node.store, np.array([7, 2, 7])
    pending = store.start_read(index, ReadQueue(4))
    for _ in range(2):
        assert plain(store.read(index, pending)) == [elements[i] for i in index]
        store._files = None  # nothing is read again


def test_damage_is_an_error_that_names_the_file(tmp_path):
    ds = grain.MapDataset.range(10).map(lambda x: np.full(100, x))
    for make in (ds.cache, ds.to_iter_dataset().cache):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        assert len(list(make(path))) == 10
        (manifest,) = finished(path)
        part = next(manifest.parent.glob("part-*"))
        data = part.read_bytes()
        part.write_bytes(data[:2000] + bytes([data[2000] ^ 4]) + data[2001:])
        with pytest.raises(RuntimeError, match=part.name):
            list(make(path))
        part.write_bytes(data[:-1])
        with pytest.raises(ValueError, match=f"{part.name}: expected .* bytes, but it has"):
            list(make(path))
        part.unlink()
        with pytest.raises(ValueError, match=f"{part.name}.* is missing; delete"):
            list(make(path))
        manifest.write_text("{}")
        with pytest.raises(ValueError, match="not the manifest of a cache; delete"):
            list(make(path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_child_leaves_the_open_part_to_its_parent(tmp_path):
    ds = grain.MapDataset.range(10).map(lambda x: x * x).cache(tmp_path)
    assert [ds[i] for i in range(5)] == [0, 1, 4, 9, 16]
    child = os.fork()
    if not child:
        try:
            ok = [ds[i] for i in range(8)] == [i * i for i in range(8)]
            ds._node.store.flush()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(ds) == [i * i for i in range(10)]
    assert len(finished(tmp_path)) == 1


# --- what makes a cache another one ---------------------------------------------------------------


def digest(ds):
    return Fingerprint.of(ds._plan_node(), "test").digest


def made(code, **names):
    """A dataset whose function `f` is defined by `code`."""
    scope = {"__name__": "made", "np": np, **names}
    exec(compile(textwrap.dedent(code), "made.py", "exec"), scope)
    return grain.MapDataset.range(5).map(scope["f"])


@functools.cache
def digest_of_code(code):
    return digest(made(code))


SAME = "def f(x): return x + 1"


@pytest.mark.parametrize(
    "code",
    [
        "def f(x): return x + 2",
        "def f(x): return x - 1",
        "def f(x, y=1): return x + 1",
        "def f(x):\n    def g(): return 1\n    return x + g()",
        "k = 1\ndef f(x): return x + k",
        "k = 2\ndef f(x): return x + k",
        "def g(x): return x + 1\ndef f(x): return g(x)",
        "def g(x): return x + 2\ndef f(x): return g(x)",
        "def h(k):\n    return lambda x: x + k\nf = h(1)",
        "def h(k):\n    return lambda x: x + k\nf = h(2)",
        "table = np.arange(5)\ndef f(x): return table[x]",
        "table = np.arange(5) + 1\ndef f(x): return table[x]",
        "class C:\n    k = 1\n    def __call__(self, x): return x + self.k\nf = C()",
        "class C:\n    k = 2\n    def __call__(self, x): return x + self.k\nf = C()",
        "class C:\n    def __init__(s, k): s.k = k\n    def __call__(s, x): return x\nf = C(1)",
        "class C:\n    def __init__(s, k): s.k = k\n    def __call__(s, x): return x\nf = C(2)",
        "import functools\ndef g(k, x): return x\nf = functools.partial(g, 1)",
        "import functools\ndef g(k, x): return x\nf = functools.partial(g, 2)",
    ],
)
def test_a_change_of_code_or_values_is_seen(code):
    assert digest(made(code)) == digest_of_code(code)
    others = [
        SAME,
        *(mark for mark in test_a_change_of_code_or_values_is_seen.pytestmark[0].args[1]),
    ]
    digests = {digest_of_code(other) for other in others if other != code}
    assert digest_of_code(code) not in digests


def test_comments_and_lines_do_not_count():
    again = "\n\n\ndef f(x):\n    # Adds one.\n    return x + 1"
    assert digest(made(SAME)) == digest(made(again))


def test_stages_parameters_sources_and_files_count(tmp_path):
    path = tmp_path / "a.array_record"
    with ArrayRecordWriter(str(path), "") as writer:
        writer.write(b"1")
    source = grain.sources.ArrayRecordDataSource(str(path))
    ds = grain.MapDataset.source(source)
    before = digest(ds)
    assert before == digest(grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(path))))
    os.utime(path, ns=(1, 1))
    assert digest(ds) != before
    ranges = grain.MapDataset.range(9)
    several = [
        grain.MapDataset.range(10),
        ranges,
        ranges.shuffle(seed=1),
        ranges.shuffle(seed=2),
        ranges.seed(1).shuffle(),
        ranges[::2],
        grain.MapDataset.source([1, 2, 3]),
        grain.MapDataset.source([1, 2, 4]),
        grain.MapDataset.source(np.arange(3)),
        grain.MapDataset.mix([ranges, grain.MapDataset.source([1])], [0.5, 0.5]),
        grain.MapDataset.mix([ranges, grain.MapDataset.source([2])], [0.5, 0.5]),
        ranges.batch(3),
        ranges.batch(3, batch_fn=sum),
        ranges.batch(3, batch_fn=len),
    ]
    assert len({digest(ds) for ds in several}) == len(several)


def test_a_changed_object_in_a_bucket_is_seen(tmp_path):
    def content(number):
        with ArrayRecordWriter(str(tmp_path / "a"), "") as writer:
            writer.write(b"%d" % number)
        return (tmp_path / "a").read_bytes()

    def cached():
        source = grain.sources.ArrayRecordDataSource(f"{server.url}/a.array_record")
        return list(grain.MapDataset.source(source).cache(tmp_path / "cache"))

    with BucketServer() as server:
        server.put("/a.array_record", content(1))
        assert cached() == [b"1"]
        assert cached() == [b"1"]
        # As long as before, and perhaps within the same second.
        server.put("/a.array_record", content(2))
        assert cached() == [b"2"]
    assert len(finished(tmp_path / "cache")) == 2


def test_fingerprint_is_the_same_in_other_processes():
    script = """
        import collections, functools, json, re, sys
        import numpy as np, grainmill as grain
        from grainmill._cache.fingerprint import Fingerprint
        class Jitter(grain.transforms.RandomMap):
            def __init__(self):
                self.words, self.pattern = {"a", "b", "c"}, re.compile("x+")
                self.counts = collections.OrderedDict(a=1)
            def random_map(self, x, rng):
                return x, self.words & {"a", "zz"}
        class Own(grain.MapDataset):
            def __len__(self):
                return 3
            def __getitem__(self, index):
                return self._parent[index]
        def helper(x):
            return np.asarray(x) if x in {1, 2, 3, "q"} else json.dumps(x)
        def collate(elements):
            return [helper(x) for x in elements]
        parts = [grain.MapDataset.source(["x", "y"]), grain.MapDataset.range(5).seed(3).shuffle()]
        ds = grain.MapDataset.mix(parts, [0.1, 0.9]).seed(4).random_map(Jitter())
        ds = Own(ds.map(functools.partial(collate))).batch(2, batch_fn=collate)
        ds = ds.to_iter_dataset().filter(lambda x: x is not None)
        ds = grain.experimental.WindowShuffleIterDataset(ds, window_size=3, seed=1)
        print(Fingerprint.of(ds._plan_node(), "x").digest)
    """
    seeds = ["1", "2", "3"]
    digests = {run(script, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in seeds}
    assert len(digests) == 1


def test_a_changed_pipeline_makes_a_cache_of_its_own_and_says_what_changed(tmp_path, caplog):
    one, other = made("def f(x): return x + 1"), made("def f(x): return x + 2")
    with caplog.at_level(logging.WARNING, logger="grainmill"):
        assert list(one.cache(tmp_path)) == [1, 2, 3, 4, 5]
        assert not caplog.messages
        assert list(other.cache(tmp_path)) == [2, 3, 4, 5, 6]
        assert list(one.cache(tmp_path)) == [1, 2, 3, 4, 5]
    (message,) = caplog.messages
    assert "the functions, values or files of MapMapDataset have changed" in message
    assert len(finished(tmp_path)) == 2
