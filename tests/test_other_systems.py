"""What runs where the system, or its Python, lacks what Linux has: everything but processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PIPELINES = """
import sys
import warnings
import numpy as np
import other_system

other_system.imitate(sys.argv[1])
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import grainmill as grain
assert not warned, [str(w.message) for w in warned]

from grainmill.array_record import ArrayRecordWriter

with ArrayRecordWriter("numbers.array_record", "group_size:4") as writer:
    for n in range(100):
        writer.write(b"%d" % n)
source = grain.sources.ArrayRecordDataSource("numbers.array_record")

def decode(record):
    return {"x": np.full(300, int(record), np.int32)}

records = grain.MapDataset.source(source).seed(3).shuffle().repeat(2).map(decode)
plain = [b["x"][:, 0].tolist() for b in records.batch(10).to_iter_dataset(grain.ReadOptions(0, 0))]
assert sorted(sum(plain, [])) == sorted([*range(100)] * 2)

def taken(ds):
    it = iter(ds)
    head = [next(it) for _ in range(7)]
    state = it.get_state()
    rest = list(it)
    it.set_state(state)
    return [b["x"][:, 0].tolist() for b in head + rest + list(it)]

expected = plain + plain[7:]
assert taken(records.batch(10).to_iter_dataset()) == expected

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    numbers = []
    options = grain.ReadOptions(num_workers=2, worker_init_fn=lambda i, n: numbers.append((i, n)))
    assert taken(records.batch(10).to_iter_dataset(options)) == expected
    assert numbers and set(numbers) <= {(0, 2), (1, 2)}, numbers
    stream = records.batch(10).to_iter_dataset(grain.ReadOptions(0, 0))
    split = taken(stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    assert split == taken(grain.experimental.multithread_prefetch(stream, 2, 1))
    assert sorted(split[:20]) == sorted(plain)
    loader = grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(100, num_epochs=1),
        operations=[grain.transforms.Batch(10)],
        worker_count=2,
    )
    assert sum(len(batch) for batch in loader) == 100
print(*(w.message for w in warned), sep="\\n")

shared = grain.multiprocessing.SharedMemoryArray((3,), np.int32)
shared.unlink_on_del()
del shared
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_pipelines_run_and_workers_are_threads(platform, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PIPELINES, platform],
        env={**os.environ, **path_with(TESTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    (warning,) = done.stdout.splitlines()
    assert f"worker processes need Linux, this is {platform!r}" in warning


def path_with(*folders):
    """The environment with which Python finds the modules in `folders` first."""
    folders = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


# Pythons built for old versions of Linux, as those of uv and conda, lack these on every Linux.
BUILT_FOR_OLD_LINUX = """
import os
for name in ("memfd_create", "pidfd_open", "MFD_CLOEXEC"):
    delattr(os, name)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")
def test_worker_processes_need_no_call_that_a_python_for_linux_may_lack(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BUILT_FOR_OLD_LINUX)
    code = """
        import os
        import numpy as np
        import grainmill as grain
        assert not hasattr(os, "memfd_create") and not hasattr(os, "pidfd_open")

        big = np.arange(50_000)  # a job and an exception that exceed a packet

        def work(x):
            assert not hasattr(os, "memfd_create"), "the worker runs another Python"
            if x == 30:
                raise ValueError("x" * 100_000)
            return {"x": np.full(4, big[x]), "pid": os.getpid()}

        ds = grain.MapDataset.range(40).map(work).to_iter_dataset(grain.ReadOptions(num_workers=2))
        it = iter(ds)
        rows = [next(it) for _ in range(30)]
        assert [int(r["x"][0]) for r in rows] == list(range(30))
        assert os.getpid() not in {r["pid"] for r in rows}
        try:
            next(it)
        except ValueError as error:
            assert str(error) == "x" * 100_000
        else:
            raise AssertionError("no error")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **path_with(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
