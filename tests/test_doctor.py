"""`grainmill doctor`: what it finds on machines of any kind, and what it says about them."""

import json
import os
import re
import resource
import types

import pytest
from test_memory_limits import CPU, OTHER, V1, V2, tree

from grainmill import _native
from grainmill._tools import doctor, machine
from grainmill._tools.main import main

GIB = 1 << 30
PIDS = "36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
SHM = "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=65536k\n"


class Machine:
    """A machine on which nothing stands in the way, to be changed by a test."""

    def __init__(self, root, monkeypatch):
        self.root, self._monkeypatch = root, monkeypatch
        self.group, self.limits, self.mounts = "0::/job\n", {}, [OTHER, V2, SHM]
        self.meminfo = "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\n"
        self.room = {"": 100 * GIB, "/dev/shm": 8 * GIB}
        self.cores = types.SimpleNamespace(machine=8, affinity=8, used=8)
        self.rlimits = dict.fromkeys(machine._LIMITS.values(), (resource.RLIM_INFINITY,) * 2)
        self.workers = "processes"
        self.profile, self.features = "release", [*machine.FEATURES]
        monkeypatch.delenv("GRAINMILL_RESTORE_ANYWAY", raising=False)

    def facts(self):
        """Its facts, read from its files."""
        tree(self.root, self.group, "".join(self.mounts), self.limits)
        (self.root / "proc/meminfo").write_text(self.meminfo)
        by_number = {getattr(resource, name): value for name, value in self.rlimits.items()}

        def statvfs(path):
            place = str(path).removeprefix(str(self.root))
            free = self.room.get(place, self.room[""])
            return types.SimpleNamespace(f_frsize=1, f_blocks=200 * GIB, f_bavail=free)

        replace = self._monkeypatch.setattr
        replace(os, "statvfs", statvfs)
        replace(os, "cpu_count", lambda: self.cores.machine)
        replace(os, "sched_getaffinity", lambda _: set(range(self.cores.affinity)))
        replace(resource, "getrlimit", by_number.__getitem__)
        replace(_native, "num_cores", lambda: self.cores.used)
        replace(_native, "profile", self.profile)
        replace(_native, "features", self.features)
        replace(machine, "machine_bytes", lambda: 32 * GIB)
        replace(machine, "workers_are_processes", lambda: self.workers == "processes")
        return machine.facts(self.root)


@pytest.fixture
def any_machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def compiled_for_debugging(this):
    this.profile = "dev"


def without_buckets(this):
    this.features.remove("buckets")


def restores_anyway(this):
    this._monkeypatch.setenv("GRAINMILL_RESTORE_ANYWAY", "1")


def without_worker_processes(this):
    this.workers = "threads"


def quota_of_v2(this):
    this.limits = {"job/cpu.max": "150000 100000", "cpu.max": "max 100000"}


def quota_of_v1(this):
    this.group, this.mounts = "3:cpu,cpuacct:/a/b\n0::/\n", [OTHER, CPU, SHM]
    this.limits = {
        "cpu/a/cpu.cfs_quota_us": 200000,
        "cpu/a/cpu.cfs_period_us": 100000,
        "cpu/a/b/cpu.cfs_quota_us": -1,
        "cpu/a/b/cpu.cfs_period_us": 100000,
    }


def one_core(this):
    this.cores = types.SimpleNamespace(machine=1, affinity=1, used=1)


def few_of_the_cores(this):
    this.cores = types.SimpleNamespace(machine=8, affinity=2, used=2)


def memory_of_v2(this):
    this.limits = {"job/memory.max": GIB}
    this.meminfo = this.meminfo.replace("25165824", "1000000")


def memory_of_v1(this):
    this.group, this.mounts = "4:memory:/a\n", [OTHER, V1, SHM]
    this.limits = {"memory/a/memory.limit_in_bytes": GIB // 2}


def memory_in_use(this):
    this.meminfo = "MemAvailable: 1048576 kB\n"


def few_processes(this):
    this.rlimits["RLIMIT_NPROC"] = (100, 200)


def few_processes_of_the_group(this):
    this.group, this.mounts = "8:pids:/a\n", [OTHER, PIDS, SHM]
    this.limits = {"pids/a/pids.max": 128}


def address_space(this):
    this.rlimits["RLIMIT_AS"] = (4 * GIB, 4 * GIB)


def few_files(this):
    this.rlimits["RLIMIT_NOFILE"] = (1024, 1 << 20)


def few_files_at_most(this):
    this.rlimits["RLIMIT_NOFILE"] = (256, 1024)


def no_room(this):
    this.room[os.path.realpath(".")] = 5 << 20


def on_a_network(this):
    # A later mount hides an earlier one; names have octal numbers for spaces.
    this.mounts += [
        f"40 22 0:40 / {os.path.realpath('.')} rw - xfs /dev/sdb rw\n",
        f"41 22 0:41 / {os.path.realpath('.')} rw - nfs4 host:/share rw\n",
        r"42 22 0:42 / /with\040space rw - ext4 /dev/sdc rw" + "\n",
    ]


def temporary_in_memory(this):
    this.mounts.append("43 22 0:43 / /tmp rw - tmpfs tmpfs rw\n")
    this._monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp/of-a-job")


def small_shared_memory(this):
    this.room["/dev/shm"] = 64 << 20


MATTERS = {
    compiled_for_debugging: "profile `dev`.*make release",
    restores_anyway: "`GRAINMILL_RESTORE_ANYWAY` is set.*Unset it",
    without_buckets: "without buckets: `s3://`.*cargo feature `buckets`",
    without_worker_processes: "Workers are threads.*Linux",
    memory_of_v2: r"may use 1\.0 GiB of memory.*ram_budget_bytes",
    memory_of_v1: r"may use 512\.0 MiB of memory.*ram_budget_bytes",
    memory_in_use: r"Only 1\.0 GiB of memory are available",
    quota_of_v2: r"time of 1\.5 cores, of 8.*OMP_NUM_THREADS=1`",
    quota_of_v1: "time of 2 cores, of 8.*OMP_NUM_THREADS=2`",
    one_core: "one core",
    few_of_the_cores: "2 of 8 cores.*taskset",
    few_processes: "At most 100 processes.*ulimit -u 256",
    few_processes_of_the_group: "At most 128 processes.*pids-limit 256",
    address_space: r"limited to 4\.0 GiB.*ulimit -v unlimited",
    few_files: "1,024 files may be open.*ulimit -n 65536",
    few_files_at_most: "256 files may be open.*hard limit, now 1,024",
    no_room: r"5\.0 MiB are left on the file system of the working directory",
    on_a_network: r"network file system \(nfs4\)",
    temporary_in_memory: "Temporary files are kept in memory.*TMPDIR",
    small_shared_memory: r"/dev/shm has 64\.0 MiB left.*--shm-size",
}


def said(facts):
    return [f"{matter.what}. {matter.do}" for matter in doctor.matters_of(facts)]


@pytest.mark.parametrize("change", MATTERS, ids=lambda change: change.__name__)
def test_what_matters_is_said_with_what_to_do(change, any_machine):
    change(any_machine)
    (text,) = said(any_machine.facts())
    assert re.search(MATTERS[change], text), text


def test_the_worst_comes_first(any_machine):
    changes = [compiled_for_debugging, memory_of_v2, quota_of_v2, few_files, small_shared_memory]
    limits = {}
    for change in reversed(changes):
        change(any_machine)
        limits |= any_machine.limits
    any_machine.limits = limits
    found = said(any_machine.facts())
    assert len(found) == len(changes)
    for change, text in zip(changes, found, strict=True):
        assert re.search(MATTERS[change], text), text


def test_a_good_machine_is_told_so(any_machine, capsys, monkeypatch):
    monkeypatch.setenv("GRAINMILL_RESTORE_ANYWAY", "0")
    found = any_machine.facts()
    assert not said(found)
    assert found["cores"] == {"machine": 8, "affinity": 8, "quota": None, "used": 8}
    assert found["places"]["/dev/shm"]["kind"] == "tmpfs"
    assert found["places"]["working directory"]["kind"] == "ext4"
    monkeypatch.setattr(doctor, "facts", lambda: found)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing here stands in the way" in printed


def test_a_system_that_says_nothing_has_a_report(any_machine, capsys, monkeypatch):
    """As on Windows: no `resource`, no `statvfs`, no affinity, no `proc`."""
    any_machine.facts()
    monkeypatch.delattr(os, "statvfs")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(machine, "resource", None)
    found = machine.facts(any_machine.root / "nowhere")
    assert set(found["limits"].values()) == set(found["places"].values()) == {None}
    assert not said(found)
    monkeypatch.setattr(doctor, "facts", lambda: found)
    assert main(["doctor"]) == 0
    assert "none known" in capsys.readouterr().out


def test_report_of_this_machine_is_one_screen_and_json(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 88
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["packages"]["numpy"] in "\n".join(lines)
    assert found["matters"] == [matter._asdict() for matter in doctor.matters_of(found)]


def test_a_missing_package_is_named_with_what_it_gives(monkeypatch, capsys):
    version = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "ray" else version(name))
    assert main(["doctor"]) == 0
    assert "ray (`grainmill.ray`)" in " ".join(capsys.readouterr().out.split())


def test_secrets_stay_where_they_are(monkeypatch, capsys):
    for name in ("AWS_SECRET_ACCESS_KEY", "GRAINMILL_PROMETHEUS_ADDRESS", "HF_TOKEN"):
        monkeypatch.setenv(name, "hidden-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for arguments in (["doctor"], ["doctor", "--json"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert "hidden-value" not in printed
        assert "OMP_NUM_THREADS" in printed
        assert os.path.realpath(".") not in printed
