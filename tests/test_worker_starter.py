"""One process starts the workers of successive pools, and they are as those of a fresh one."""

import contextlib
import os
import signal
import textwrap
import threading

import psutil
import pytest
from effort import SEED, cases
from under_test import IS_GRAIN, grain
from worker_harness import ENTRANCES, all_of, gone, opened, run_script, starters, workers, zygotes

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="about the pool of workers")


def doubled(ds):
    return ds.map(lambda x: 2 * x)


def take_all(entrance="read", count=12):
    with opened(doubled(grain.MapDataset.range(count)), entrance) as iterator:
        assert all_of(iterator) == [2 * x for x in range(count)]


def test_pools_share_a_starter_one_after_another_and_at_a_time():
    take_all()
    [starter] = starters()
    for entrance in ENTRANCES:
        take_all(entrance)
    iterators = [opened(doubled(grain.MapDataset.range(40)), each) for each in 2 * ENTRANCES]
    firsts = [next(iterator) for iterator in iterators]
    assert len(zygotes()) == len(iterators)
    assert len(workers()) == 2 * len(iterators)
    # Standard streams, its socket, and the process files of the parent and the workers.
    assert {zygote.num_fds() for zygote in zygotes()} == {3 + 1 + 1 + 2}
    iterators.pop().close()
    for first, iterator in zip(firsts, iterators, strict=False):
        assert sorted([first, *iterator]) == list(range(0, 80, 2))
    for iterator in iterators:
        iterator.close()
    assert starters() == [starter]
    assert not zygotes()


def test_threads_that_open_pools_at_the_same_time_share_a_starter():
    failures, barrier = [], threading.Barrier(6)

    def take(number):
        try:
            barrier.wait()
            take_all(ENTRANCES[number % 2])
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(starters()) == 1


def test_starter_that_died_is_replaced_unnoticed():
    take_all()
    [starter] = starters()
    for how in (signal.SIGKILL, signal.SIGABRT):
        starter.send_signal(how)
        starter.wait()
        take_all()
        before, [starter] = starter, starters()
        assert before != starter


def test_stopped_starter_is_killed_with_what_it_has_started():
    iterator = opened(doubled(grain.MapDataset.range(1000)), "read")
    assert next(iterator) == 0
    processes = [*starters(), *zygotes(), *workers()]
    for process in processes:
        process.suspend()
    iterator.close()
    assert gone(processes)
    take_all()


# What a process that is started inherits changes in each way; so does what it does not.
FRESH = """
import importlib, os, pathlib, random, re, resource, signal, sys, tempfile, threading, warnings
import psutil
import grainmill as grain
from grainmill._workers import starter
from worker_harness import opened

sys.stderr = os.fdopen(os.dup(2), "w")
draw = random.Random(sys.argv[1])
top = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[2]))
sys.path.insert(0, str(top))

def new_folder():
    return tempfile.mkdtemp(dir=top)

def changed_variable():
    name = draw.choice(["GRAINMILL_SEEN", "PYTHONWARNINGS", "LC_ALL"])
    os.environ[name] = "C" if name == "LC_ALL" else f"ignore:{draw.random()}"

def removed_variable():
    os.environ.pop(draw.choice(sorted(os.environ.keys() - {"PATH", "PYTHONPATH"})))

def removed_directory():
    folder = new_folder()
    os.chdir(folder)
    os.rmdir(folder)

def other_directory():
    os.chdir(new_folder())
    pathlib.Path("nearby.py").write_text(f"number = {draw.random()}")

def limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 999) - 1, hard))

def ignored_signal():
    number = draw.choice([signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
    is_ignored = signal.getsignal(number) == signal.SIG_IGN
    signal.signal(number, signal.default_int_handler if is_ignored else signal.SIG_IGN)

def blocked_signal():
    how = draw.choice([signal.SIG_BLOCK, signal.SIG_UNBLOCK])
    signal.pthread_sigmask(how, [draw.choice([signal.SIGUSR2, signal.SIGTERM])])

def affinity():
    now = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {draw.choice(sorted(now))} if now == all_cores else all_cores)

def streams():
    for file in (1, 2):
        with open(os.path.join(new_folder(), "out"), "wb") as out:
            os.dup2(out.fileno(), file)

def module_in_the_parent():
    importlib.import_module(draw.choice(["colorsys", "wave", "plistlib", "netrc"]))

def module_on_disk():
    (top / "edited.py").write_text(f"number = {draw.random()}\\n" + "#" * draw.randrange(99))

all_cores = os.sched_getaffinity(0)
CHANGES = {
    "variable": changed_variable,
    "removed variable": removed_variable,
    "path": lambda: sys.path.append(new_folder()),
    "relative path": lambda: sys.path.insert(0, ""),
    "directory": other_directory,
    "removed directory": removed_directory,
    "umask": lambda: os.umask(os.umask(0) ^ draw.choice([0o7, 0o22, 0o70])),
    "limit": limit,
    "affinity": affinity,
    "niceness": lambda: os.nice(1),
    "policy": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "memory": lambda: pathlib.Path("/proc/self/oom_score_adj").write_text(str(draw.randrange(900))),
    "ignored signal": ignored_signal,
    "group": os.setpgrp,
    "warnings": lambda: sys.warnoptions.append(f"ignore:{draw.random()}"),
    "option": lambda: sys._xoptions.update(faulthandler=True),
}
HARMLESS = {
    "nothing": lambda: None,
    "blocked signal": blocked_signal,
    "streams": streams,
    "module in the parent": module_in_the_parent,
    "module on disk": module_on_disk,
}

def status(pid, names):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(names)]

def opened_file(file):
    try:
        return re.sub("[0-9]+", "", os.readlink(file))
    except FileNotFoundError:  # that of the list
        return ""

def place():
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None

def seen(_):
    here = os.stat(".")
    names = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNew", "Secc")
    names += ("Cpus", "Mems")
    found = {
        "environment": dict(os.environ),
        "encodings": (sys.stdout.encoding, sys.getfilesystemencoding()),
        "directory": (here.st_dev, here.st_ino),
        "place": place(),
        "status": status("self", names),
        "limits": pathlib.Path("/proc/self/limits").read_text(),
        "memory": pathlib.Path("/proc/self/oom_score_adj").read_text(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "groups": (os.getpgrp(), os.getsid(0)),
        "streams": [os.readlink(f"/proc/self/fd/{file}") for file in range(3)],
        "files": sorted(map(opened_file, pathlib.Path("/proc/self/fd").iterdir())),
        "path": sys.path,
        "flags": (str(sys.flags), sys.warnoptions, sys._xoptions),
        "handlers": {number: str(signal.getsignal(number)).split(" at ")[0]
            for number in signal.valid_signals()},
    }
    sys.dont_write_bytecode = True
    for name in ("edited", "nearby"):
        try:
            found[name] = importlib.import_module(name).number
        except ImportError:
            found[name] = None
    [line] = status(os.getppid(), "PPid")
    return found, line

def first(entrance):
    [ds] = [grain.MapDataset.range(2).map(seen)]
    with opened(ds, entrance, 1) as iterator:
        return next(iterator)

def check(name, before=None):
    # Workers see what those of a new starter see, which is returned; `before` has to start them.
    entrance = draw.choice(["read", "parts"])
    found, by = first(entrance)
    assert before in (None, by), name
    starter._starters._retire()
    fresh, new = first(entrance)
    assert new != by
    differ = {key: (found[key], fresh[key]) for key in fresh if found[key] != fresh[key]}
    assert not differ, (name, differ)
    own, _ = seen(None)
    for key in ("limits", "memory", "niceness", "policy", "groups"):
        assert found[key] == own[key], key
    assert found["streams"][1:] == own["streams"][1:]
    if own["place"] is not None:
        assert found["directory"] == own["directory"]
    return new

_, before = first("read")
for name in draw.sample(sorted(CHANGES), len(CHANGES)):
    now = starter._inherited()
    assert starter._inherited() == now
    CHANGES[name]()
    assert starter._inherited() != now or len(all_cores) == 1 and name == "affinity", name
_, by = first("read")
assert before != by
for name in draw.sample(sorted(HARMLESS), len(HARMLESS)):
    HARMLESS[name]()
before = check("all", by)
for _ in range(int(sys.argv[3])):
    name = draw.choice([*CHANGES, *HARMLESS])
    {**CHANGES, **HARMLESS}[name]()
    before = check(name, before if name in HARMLESS else None)
pathlib.Path(sys.argv[2], "done").touch()
"""


@pytest.mark.parametrize("seed", [SEED + number for number in range(cases(1, 20))])
def test_workers_see_what_those_of_a_fresh_starter_see(seed, tmp_path):
    done = run_script(FRESH, tmp_path, args=[str(seed), str(tmp_path), str(cases(0, 60))])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists(), done.stderr


KEPT = """
import gc, os, pathlib, sys, time, weakref
import numpy as np
import psutil
import grainmill as grain
from worker_harness import opened, starters, zygotes

class Held(np.ndarray):
    pass

def files(process):
    return sorted(os.readlink(path).split("[")[0] for path in
        pathlib.Path(f"/proc/{process.pid}/fd").iterdir())

def pool(path):
    held = np.zeros(1 << 20, np.uint8).view(Held)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 1)
    os.chdir(os.path.dirname(path))
    iterator = opened(grain.MapDataset.range(64).map(lambda x: held[:1000] + x), "read")
    next(iterator)
    return iterator, weakref.ref(held)

out = os.dup(1)
folder = sys.argv[1]
memory = []
for number in range(int(sys.argv[2])):
    os.chdir("/")
    place = pathlib.Path(folder, str(number))
    iterator, held = pool(str(pathlib.Path(folder, f"out{number}")))
    iterator.close()
    del iterator
    os.dup2(out, 1)
    os.chdir("/")
    gc.collect()
    assert held() is None
    [starter] = starters()
    assert not zygotes()
    # Nothing, two times in place of output, its socket, and the process file of the parent.
    assert len(files(starter)) == 5, files(starter)
    assert not any(folder in name for name in files(starter)), files(starter)
    assert os.readlink(f"/proc/{starter.pid}/cwd") == "/"
    memory.append(starter.memory_info().rss)
assert max(memory[-3:]) - min(memory[3:6]) < 1 << 20, memory
print("fine")
"""


def test_starter_keeps_nothing_of_closed_pools(tmp_path):
    done = run_script(KEPT, args=[str(tmp_path), str(cases(12, 300))])
    assert done.stdout == "fine\n", done.stderr


IDLE = """
import random, sys, time
import grainmill as grain
from grainmill._workers import starter
from worker_harness import all_of, opened, starters

draw = random.Random(sys.argv[1])
starter._IDLE_S = 0.05
seen = set()
for number in range(int(sys.argv[2])):
    ds = grain.MapDataset.range(4).map(lambda x: x)
    with opened(ds, draw.choice(["read", "parts"]), 1) as iterator:
        assert all_of(iterator) == [0, 1, 2, 3]
        seen |= set(starters())
    # Around the moment at which it goes.
    time.sleep(draw.choice([0, 0.05, 0.05, draw.uniform(0.045, 0.055), draw.uniform(0, 0.1)]))
assert 1 < len(seen), seen
until = time.monotonic() + 60
while any(one.is_running() and one.status() != "zombie" for one in seen):
    assert time.monotonic() < until
    time.sleep(0.01)
print("fine")
"""


def test_starter_without_pools_goes_and_no_pool_is_lost():
    done = run_script(IDLE, args=[str(SEED), str(cases(10, 800))])
    assert done.stdout == "fine\n", done.stderr
    assert not done.stderr


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import grainmill as grain
from worker_harness import all_of, opened, starters

def take():
    with opened(grain.MapDataset.range(20).map(lambda x: x), "read") as iterator:
        assert all_of(iterator) == list(range(20))

take()
[own] = starters()
for how in ("own pool", "none"):
    pid = os.fork()
    if pid == 0:
        assert starters() == []
        if how == "own pool":
            take()
            take()
            assert len(starters()) == 1 and starters() != [own]
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, how
    take()
    assert starters() == [own]
# A child holds the socket, and the starter still goes.
waits, wakes = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(wakes)
    os.read(waits, 1)
    os._exit(0)
os.close(waits)
os.environ["CHANGED"] = "1"
take()
own.wait(60)
os.close(wakes)
os.waitpid(pid, 0)
print("fine")
"""


def test_forked_child_of_the_parent_has_a_starter_of_its_own():
    done = run_script(FORKED)
    assert done.stdout == "fine\n", done.stderr
    assert not done.stderr


ENDS = """
import os, signal, sys
import grainmill as grain
from worker_harness import opened, starters
iterator = opened(grain.MapDataset.range(20).map(lambda x: x), "read")
next(iterator)
iterator.close()
print(*[process.pid for process in starters()], flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "os.execvp('true', ['true'])"],
)
def test_starter_ends_with_the_parent(then):
    done = run_script(ENDS.format(then=then))
    [pid] = map(int, done.stdout.split())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert gone([psutil.Process(pid)])
    assert not done.stderr


THREADS = """
import os, warnings
import grainmill as grain
from worker_harness import all_of, opened

warnings.simplefilter("error")
for entrance in ("read", "parts"):
    iterator = opened(grain.MapDataset.range(20).map(str), entrance)
    if entrance == "read":
        try:
            next(iterator)
        except RuntimeWarning as warning:
            assert "a fresh Python process has 2 threads here" in str(warning)
        else:
            raise AssertionError
    found = all_of(iterator)
    assert found == list(map(str, range(20))), found
    iterator.close()
print("fine")
"""


def test_starter_with_threads_forks_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import threading, time
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
        """)
    )
    script = f"import os; os.environ['PYTHONPATH'] += {os.pathsep + str(tmp_path)!r}\n" + THREADS
    done = run_script(script)
    assert done.stdout == "fine\n", done.stderr
