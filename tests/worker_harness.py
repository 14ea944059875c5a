"""Worker pools for tests: iterators that use them, their processes, and child programs."""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import psutil
from under_test import grain
from waits import becomes

HERE = Path(__file__).parent
# Two seconds are the aim; a busy machine may need more. What hangs in tests does so for longer.
SOON_S = 30.0

ENTRANCES = ["read", "parts"]


def opened(ds, entrance, num_workers=2, *, batch_size=0, worker_init_fn=None, **options):
    """An iterator over `ds` with workers: by `ReadOptions` ("read") or `mp_prefetch` ("parts")."""
    if entrance == "read":
        read = grain.ReadOptions(num_workers=num_workers, worker_init_fn=worker_init_fn, **options)
        ds = ds.to_iter_dataset(read)
        return iter(ds.batch(batch_size) if batch_size else ds)
    ds = ds.to_iter_dataset()
    ds = ds.batch(batch_size) if batch_size else ds
    multi = grain.MultiprocessingOptions(num_workers=num_workers, **options)
    return iter(ds.mp_prefetch(multi, worker_init_fn=worker_init_fn))


def starters(parent=None):
    """The processes from which the zygotes of `parent`, by default this process, are forked."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.Error):
            if any("launch" in part and "fork=True" in part for part in child.cmdline()):
                found.append(child)
    return found


def children_of(processes):
    """Their child processes, those of each in the order in which they were forked."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += sorted(process.children(), key=lambda child: child.pid)
    return found


def zygotes(parent=None):
    """The processes from which the workers of each pool are forked."""
    return children_of(starters(parent))


def workers(parent=None):
    """The worker processes of all pools."""
    return children_of(zygotes(parent))


def gone(processes, timeout_s=SOON_S):
    """Whether all of `processes` exit and are reaped within the time; orphans may be unreaped."""
    return becomes(
        lambda: all(not each.is_running() or _is_dead_orphan(each) for each in processes), timeout_s
    )


def _is_dead_orphan(process):
    """Whether it exited after its parent: the system's first process reaps it at its own pace."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1
    return False


def all_of(iterator, max_elements=None):
    """The remaining elements of `iterator`, up to `max_elements`."""
    return list(itertools.islice(iterator, max_elements))


def run_script(text, tmp_path=None, *, python=sys.executable, args=(), timeout_s=240, **options):
    """Runs a program, from a file if `tmp_path` is given, else with `-c`."""
    command = [python, "-c", text, *args]
    if tmp_path is not None:
        path = tmp_path / "script.py"
        path.write_text(text, encoding="utf-8")
        command = [python, str(path), *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
        **options,
    )


def environment(**more):
    """The environment in which programs can import the tested package and this folder."""
    path = os.pathsep.join([str(Path(grain.__file__).parents[1]), str(HERE)])
    return {**os.environ, "PYTHONPATH": path, **more}
