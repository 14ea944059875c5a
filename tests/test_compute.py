"""Loops of the engine that threads share: any number of them gives the same results."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import grainmill

PACKAGE = Path(grainmill.__file__).parent
IMAGES = Path(__file__).parent / "data/images"
has_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or not Path("/proc/self/task").exists(),
    reason="affinity and names of threads are those of Linux",
)

# Each program is a process of its own, whose first loop decides how many threads there are.
PRELUDE = """
import os, pathlib, random, sys
import numpy as np
from grainmill import _native

def count_threads():
    return len(os.listdir("/proc/self/task"))

# Those of NumPy's libraries.
others = count_threads()

def num_helpers():
    return count_threads() - others

def names_of_helpers():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    # The system cuts names to 15 bytes; a thread names itself.
    return [name for name in names if name.startswith("grainmill-compu")]

def copies(seed=0, rows=64):
    elements = [np.full(1 << 20, (seed + row) % 251, np.uint8) for row in range(rows)]
    out = np.zeros((rows, 1 << 20), np.uint8)
    assert _native.copy_rows(out, elements, 0, hot=False) == rows
    return bool((out == np.array([row[0] for row in elements])[:, None]).all())
"""


def output(program, *arguments):
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@has_affinity
def test_threads_are_made_for_large_loops_and_as_many_as_there_are_cores():
    program = """
        _native.limit_threads(3)
        print(copies(rows=0), num_helpers())
        print(copies(), num_helpers())
        print(copies(1), num_helpers())
        while len(names_of_helpers()) < 2:
            pass
    """
    assert output(program) == ["True", "0", "True", "2", "True", "2"]


@has_affinity
def test_no_thread_is_made_for_one_core():
    program = """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(_native.num_cores(), copies(), num_helpers())
    """
    assert output(program) == ["1", "True", "0"]


def test_cores_are_those_of_the_quota(tmp_path):
    """In a mount namespace, where files of the test lie over those of the control group."""
    group = tmp_path / "groups/job"
    group.mkdir(parents=True)
    for place in (group, group.parent):
        (place / "cgroup.controllers").touch()
    (group / "cpu.max").write_text("100000 100000")
    (tmp_path / "cgroup").write_text("0::/job\n")
    program = f"""
        set -e
        mount --bind {group.parent} /sys/fs/cgroup
        mount --bind {tmp_path}/cgroup /proc/$$/cgroup
        echo mounted
        exec {sys.executable} -c "$1"
    """
    limits = "import os; from grainmill._dataset.performance_config import Limits; "
    limits += "os.cpu_count = lambda: 64; print(Limits.of(1, None, None).cores)"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", program, "sh", limits]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("needs `unshare`")
    if "mounted" not in done.stdout:
        pytest.skip(f"needs a mount namespace: {done.stderr}")
    assert done.stdout.split() == ["mounted", "1"], done.stderr


def test_cores_are_counted_in_one_place():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"cpu_count|sched_getaffinity", path.read_text("utf-8"))
    }
    # `doctor` shows each of the numbers; that of workers is Grain's, as states depend on it.
    assert found == {"_tools/machine.py", "_loader/data_loader.py"}


@has_affinity
def test_forked_child_has_a_pool_of_its_own():
    program = """
        _native.limit_threads(2)
        assert copies() and num_helpers() == 1
        child = os.fork()
        if child == 0:
            before = count_threads()
            is_right = not names_of_helpers() and copies(1)
            os._exit(7 if is_right and count_threads() == before + 1 else 1)
        assert copies(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), copies(3))
    """
    assert output(program) == ["7", "True"]


@has_affinity
def test_child_forked_while_threads_share_loops_does_not_wait_for_them():
    program = """
        import threading
        _native.limit_threads(3)
        may_end = threading.Event()
        def work():
            while not may_end.is_set():
                assert copies(rows=8)
        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        codes = set()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(7 if copies(1, rows=16) else 1)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        may_end.set()
        [thread.join() for thread in threads]
        print(codes)
    """
    assert output(program) == ["{7}"]


@has_affinity
@pytest.mark.parametrize("num_more", [0, 1, 5])
def test_threads_that_cannot_be_started_are_not_needed(num_more):
    """All of a pool or none: of six helpers, the first ones end again."""
    program = """
        import resource, time
        others = count_threads()
        if os.getuid() == 0:
            os.setuid(2_000_000_123)  # root has no limit, and nobody else has threads of this user
        resource.setrlimit(resource.RLIMIT_NPROC, (others + int(sys.argv[1]),) * 2)
        _native.limit_threads(7)
        print(copies(rows=8), copies(1), copies(2))
        while count_threads() > others:
            time.sleep(0.01)
        print(copies(3), num_helpers())
    """
    assert output(program, num_more) == ["True", "True", "True", "True", "0"]


@has_affinity
def test_cores_may_be_taken_away_and_given_back_at_any_time():
    program = """
        cores = os.sched_getaffinity(0)
        _native.limit_threads(3)
        found = []
        for allowed in [cores, {min(cores)}, cores, {max(cores)}]:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), allowed)
            found += [copies(seed, rows=16) for seed in range(5)]
        print(all(found), len(found), num_helpers())
    """
    assert output(program) == ["True", "20", "2"]


@has_affinity
def test_workers_share_the_cores():
    program = """
        import grainmill as grain
        def helpers(_):
            for _ in range(20):
                assert copies(rows=16)
            return len(names_of_helpers())
        if __name__ == "__main__":
            num_workers = min(4, max(2, _native.num_cores()))
            options = grain.ReadOptions(num_workers=num_workers)
            ds = grain.MapDataset.range(8).map(helpers).to_iter_dataset(options)
            print(max(_native.num_cores() // num_workers, 1) - 1, *set(ds))
    """
    expected, *found = output(program)
    assert set(found) == {expected}


@has_affinity
def test_examples_are_parsed_alike_by_any_number_of_threads():
    pytest.importorskip("google.protobuf")
    program = """
        from grainmill.transforms import Feature, ParseExample
        sys.path.insert(0, sys.argv[1])
        from oracle_example import bytes_list, example, float_list, int64_list
        rng = random.Random(5)
        spec = {"ids": Feature("int32", (500,)), "x": Feature("float32", (), default=1.5),
                "name": Feature(bytes)}
        parse = ParseExample(spec)
        def record(count, has_x):
            ids = [rng.randrange(1 << rng.randrange(1, 31)) for _ in range(count)]
            name = bytes_list([rng.randbytes(rng.randrange(900))])
            features = {"ids": int64_list(ids), "name": name}
            if has_x:
                features["x"] = float_list([rng.random()])
            return example(**features)
        def outcome(records):
            ids, x = np.zeros((len(records), 500), np.int32), np.zeros(len(records), np.float32)
            names = []
            columns = {"ids": ids, "x": x, "name": names}
            try:
                assert parse._engine.fill(records, columns, 0)
            except ValueError as error:
                return str(error)
            return ids.tobytes(), x.tobytes(), names
        for num_records in [1, 2, 30, 300, 1000]:
            for bad in [(), (num_records // 2,), (num_records // 3, num_records - 1)]:
                records = [record(500, rng.random() < 0.8) for _ in range(num_records)]
                for place, at in enumerate(bad):
                    records[at] = record(499 - place, True)
                found = []
                for num_threads in [7, 2, 1]:
                    _native.limit_threads(num_threads)
                    found.append(outcome(records))
                assert found[0] == found[1] == found[2]
                assert isinstance(found[0], str) == bool(bad)
        print(num_helpers())
    """
    assert output(program, Path(__file__).parent) == ["6"]


@has_affinity
def test_images_are_decoded_alike_by_any_number_of_threads():
    program = """
        rng = random.Random(5)
        decoder = _native.ImageDecoder(channels=3, resample="bilinear", exif_orientation=False,
                                       draft=False, max_pixels=1 << 20, allow_damaged=False)
        files = [path.read_bytes() for path in sorted(pathlib.Path(sys.argv[1]).iterdir())]
        def outcome(call):
            try:
                return call()
            except Exception as error:
                return type(error), str(error)
        def block(images):
            arrays = decoder.decode_block(images, [None] * len(images), (9, 7))
            return [array.tobytes() for array in arrays]
        def fill(images, size):
            out = np.zeros((len(images), 9, 7, 3), np.uint8)
            filled = decoder.fill(images, [None] * len(images), size, out, 0)
            return filled and out.tobytes()
        for num_images in [0, 1, 2, 5, 40, 200]:
            for num_bad in [0, 1, 2]:
                images = [rng.choice(files) for _ in range(num_images)]
                for _ in range(num_bad if num_images else 0):
                    at = rng.randrange(num_images)
                    images[at] = images[at][: len(images[at]) // rng.randrange(2, 9)]
                found = []
                for num_threads in [7, 2, 1]:
                    _native.limit_threads(num_threads)
                    whole = outcome(lambda: fill(images, None))
                    resized = outcome(lambda: fill(images, (9, 7)))
                    found.append([outcome(lambda: block(images)), resized, whole])
                assert found[0] == found[1] == found[2]
                assert isinstance(found[0][0], tuple) == (num_bad > 0 and num_images > 0)
        print(num_helpers())
    """
    assert output(program, IMAGES) == ["6"]
