"""The memory that a process may use: the machine's, or the limit of its control groups."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from under_test import IS_GRAIN

if IS_GRAIN:
    pytest.skip("about grainmill's own budget", allow_module_level=True)

from worker_harness import ENTRANCES, opened, workers

from grainmill import MapDataset, MultiprocessingOptions, ReadOptions, _native
from grainmill._evaluate.context import Context
from grainmill._evaluate.prefetch import tuning
from grainmill._iterators.read import ReadStage
from grainmill._memory import default_budget_bytes, usable_bytes
from grainmill._workers.limits import Limits
from grainmill.array_record import ArrayRecordWriter

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = "31 23 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
OTHER = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
V1_OF_CONTAINER = "35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
NO_LIMIT_OF_V1 = 9_223_372_036_854_771_712


def tree(root, cgroup, mounts, limits):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup, encoding="utf-8")
    (root / "proc/self/mountinfo").write_text(mounts, encoding="utf-8")
    for name, limit in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("cgroup", "mounts", "limits", "expected"),
    [
        pytest.param("0::/job\n", OTHER + V2, {"job/memory.max": 1 << 20}, 1 << 20, id="v2"),
        pytest.param("0::/job\n", V2, {"job/memory.max": "max"}, MACHINE, id="v2_without_limit"),
        pytest.param(
            "0::/pod/job\n",
            V2,
            {"pod/job/memory.max": 3 << 20, "pod/memory.max": 2 << 20, "memory.max": 5 << 20},
            2 << 20,
            id="v2_ancestor_is_tighter",
        ),
        pytest.param("0::/\n", V2, {"memory.max": 4 << 20}, 4 << 20, id="v2_namespace"),
        pytest.param(
            "0::/../other\n", V2, {"memory.max": 4 << 20}, 4 << 20, id="v2_outside_of_namespace"
        ),
        pytest.param(
            "4:memory:/a/b\n3:cpu:/c\n0::/\n",
            CPU + V1,
            {"memory/a/b/memory.limit_in_bytes": 7 << 20},
            7 << 20,
            id="v1",
        ),
        pytest.param(
            "4:memory:/a\n",
            V1,
            {"memory/a/memory.limit_in_bytes": NO_LIMIT_OF_V1},
            MACHINE,
            id="v1_without_limit",
        ),
        pytest.param(
            "4:cpu,memory:/docker/ab/job\n",
            V1_OF_CONTAINER,
            {"memory/job/memory.limit_in_bytes": 6 << 20},
            6 << 20,
            id="v1_mounts_a_part",
        ),
        pytest.param(
            "4:memory:/seen/by/host\n",
            V1_OF_CONTAINER,
            {"memory/memory.limit_in_bytes": 6 << 20},
            6 << 20,
            id="v1_path_of_the_host",
        ),
        pytest.param("4:memory:/a\n", CPU, {}, MACHINE, id="not_mounted"),
        pytest.param("", "", {}, MACHINE, id="no_control_groups"),
    ],
)
def test_usable_memory_is_the_least_limit(tmp_path, cgroup, mounts, limits, expected):
    assert usable_bytes(tree(tmp_path, cgroup, mounts, limits)) == expected


def test_system_without_proc_has_the_machines_memory(tmp_path):
    assert usable_bytes(tmp_path) == MACHINE


def test_budget_is_a_quarter_of_the_usable_memory_unless_given():
    assert default_budget_bytes() == usable_bytes() // 4 <= MACHINE // 4
    assert Limits.of(ReadOptions()).budget_bytes == default_budget_bytes()
    assert Limits.of(ReadOptions(ram_budget_bytes=1000)).budget_bytes == 1000


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_indices_of_files_take_below_a_gigabyte_on_a_host_however_many_workers(entrance):
    """4 bytes a chunk: with 10^9 records, one in each chunk, only recently read files fit."""
    ds = MapDataset.range(64).map(lambda _: (os.getpid(), _native.index_budget()))
    budgets = dict(opened(ds, entrance, 4))
    assert len(budgets) > 1
    assert set(budgets.values()) == {_native.index_budget() // 8}
    own, shared = 4 * max(budgets.values()), tuning.WORKERS_INDEX_BYTES
    assert _native.index_budget() + own + shared == 640 << 20


def test_workers_share_what_elements_ahead_may_take():
    """16 workers that each used a quarter of the memory would need four times the memory."""
    node = MapDataset.range(100).map(str).to_iter_dataset()._plan_node()
    totals = []
    for num_workers in (0, 1, 16):
        context = pickle.loads(pickle.dumps(Context(num_workers=num_workers)))
        stage = ReadStage(node, context)
        totals.append(stage._blocks._budget.total)
        stage.close()
    assert totals[0] == totals[1] == default_budget_bytes()
    assert totals[2] == totals[0] // 16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000000", "read"),
        (" 999999 ", "chunk 0 at byte 64 (record 0): states 1000000 decoded bytes, expected at"),
        ("1 GB", "`GRAINMILL_MAX_RECORD_BYTES` must be a number of bytes, got 1 GB"),
    ],
)
def test_environment_bounds_what_a_chunk_may_decode_to(tmp_path, text, expected):
    path = str(tmp_path / "one.array_record")
    writer = ArrayRecordWriter(path, "zstd")
    writer.write(bytes(1_000_000))
    writer.close()
    code = "import sys, grainmill; source = grainmill.sources.ArrayRecordDataSource(sys.argv[1]); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('read', len(source[0]))", path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GRAINMILL_MAX_RECORD_BYTES": text},
    )
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == (expected == "read")
    if "states" in expected:
        assert f"{path}: chunk 0" in done.stderr


def _slot_bytes(process):
    """Resident bytes of the slots of a worker, and of other anonymous files."""
    lines = Path(f"/proc/{process.pid}/smaps").read_text(encoding="utf-8").splitlines()
    total, counts = 0, False
    for line in lines:
        if "-" in line.split(maxsplit=1)[0]:
            counts = "/memfd:" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "budget", "buffer_size", "expected"),
    [
        ([MIB], None, 2, 64 * MIB),
        ([MIB // 8], 8 * MIB, 500, 8 * MIB),
        ([MIB // 8, 3, MIB // 2, 70_000, MIB], 8 * MIB, 3, 12 * MIB),
        ([MIB, 3 * MIB, 5], MIB // 2, 4, 5 * 4 * MIB),
    ],
    ids=["default", "many ahead", "sizes that vary", "larger than the budget"],
)
def test_results_of_each_worker_stay_within_their_budget(sizes, budget, buffer_size, expected):
    """Quick elements are sent in blocks, whose length must follow the size of the elements."""
    rng = random.Random(4)
    sizes = [rng.choice(sizes) for _ in range(400)]
    ds = MapDataset.range(len(sizes)).map(lambda i: np.full(sizes[i], i % 251, np.uint8))
    given = {} if budget is None else {"per_worker_budget_bytes": budget}
    options = MultiprocessingOptions(2, buffer_size, **given)
    iterator = iter(ds.to_iter_dataset().mp_prefetch(options))
    most = [0, 0]
    for number, array in enumerate(iterator):
        assert (len(array), array[0]) == (sizes[number], number % 251)
        if number % 40 == 20:
            most = [*map(max, most, map(_slot_bytes, workers()))]
    iterator.close()
    assert max(most) <= expected * 5 // 4  # sizes of slots are rounded up
