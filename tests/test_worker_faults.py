"""Workers that die, hang or lose their parent: a quick error or recovery, and no element lost."""

import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from effort import cases
from under_test import IS_GRAIN, grain
from waits import becomes
from worker_harness import (
    ENTRANCES,
    SOON_S,
    all_of,
    environment,
    gone,
    opened,
    run_script,
    starters,
    workers,
    zygotes,
)

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="about the pool of workers")
both = pytest.mark.parametrize("entrance", ENTRANCES)
# Each round kills two workers.
RANDOM_POOLS, RANDOM_ROUNDS = cases(3, 20), cases(4, 150)


def _raised(iterator, limit=1000):
    """The elements before the first error, the error, and the seconds that its `next` took."""
    found = []
    began = time.monotonic()
    try:
        for _ in range(limit):
            began = time.monotonic()
            found.append(next(iterator))
    except Exception as failure:
        return found, failure, time.monotonic() - began
    return found, None, 0.0


# --- death ---------------------------------------------------------------------------------------

DEATHS = {
    "sigkill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", -9),
    "sigsegv": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV", -11),
    "abort": (os.abort, "SIGABRT", -6),
    "sys_exit": (lambda: sys.exit(0), "exit code 0", 0),
    "os_exit": (lambda: os._exit(0), "exit code 0", 0),
    "sys_exit_text": (lambda: sys.exit("enough"), "exit code 1", 1),
}


@both
@pytest.mark.parametrize("death", DEATHS)
def test_death_in_user_code_names_worker_cause_and_element(entrance, death, tmp_path):
    die, cause, code = DEATHS[death]
    flag = tmp_path / "died"

    def dies_once(x):
        if x == 7 and not flag.exists():
            flag.touch()
            die()
        return x * 10

    with_none = [x * 10 for x in range(12)]
    iterator = opened(grain.MapDataset.range(12).map(dies_once), entrance)
    found, failure, took_s = _raised(iterator)
    assert found == with_none[: len(found)]
    assert took_s < SOON_S
    message = str(failure)
    assert isinstance(failure, grain_worker_error()), message
    assert "Worker process was terminated unexpectedly" in message
    assert f"exit code {code}" in message
    assert cause in message
    # If each worker has a pipeline of its own, element 7 is the fourth one of worker 1.
    assert "element 7" in message if entrance == "read" else "worker 1" in message, message
    assert [*found, *all_of(iterator)] == with_none
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < SOON_S


def grain_worker_error():
    from grainmill._workers.failures import WorkerError  # noqa: PLC0415 - Grain has no such thing

    return WorkerError


@both
def test_the_error_comes_again_where_a_worker_dies_again(entrance):
    def dies(x):
        if x == 3:
            os._exit(5)
        return x

    iterator = opened(grain.MapDataset.range(6).map(dies), entrance, 1)
    found = []
    for _ in range(5):
        more, failure, _ = _raised(iterator)
        found += more
        assert "exit code 5" in str(failure)
    # Threads of a worker with a pipeline of its own may prefetch the element that kills it.
    assert found == [0, 1, 2] if entrance == "read" else found == [0, 1, 2][: len(found)]
    iterator.close()


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_death_at_rest_is_met_and_gone_on_from(entrance, number):
    iterator = opened(grain.MapDataset.range(3000).map(lambda x: x + 1), entrance)
    found = all_of(iterator, 5)
    time.sleep(0.2)
    for worker in workers():
        worker.send_signal(number)
    while len(found) < 3000:
        more, failure, took_s = _raised(iterator, 3000 - len(found))
        found += more
        if failure is not None:
            assert took_s < SOON_S
            assert signal.Signals(number).name in str(failure)
            assert "the next call of `next` starts workers again and continues" in str(failure)
    assert found == list(range(1, 3001))
    iterator.close()


@both
def test_death_in_the_middle_of_a_large_batch(entrance):
    """Writing 64 MB takes long enough for a kill to interrupt it."""
    ds = grain.MapDataset.range(32).map(lambda x: np.full(1 << 20, x))
    iterator = opened(ds, entrance, 2, batch_size=8)
    rng = random.Random(4)
    sums = []
    errors = 0
    until = time.monotonic() + 120
    while len(sums) < 4 and time.monotonic() < until:
        if errors < 4:
            timer = threading.Timer(rng.uniform(0.02, 0.3), _kill_one, (rng.random(),))
            timer.start()
        try:
            sums.append(next(iterator)[:, [0, -1]].tolist())
        except grain_worker_error():
            errors += 1
        finally:
            if errors < 4:
                timer.join()
    iterator.close()
    order = list(range(32))
    if entrance == "parts":
        order = [x for row in range(2) for w in (0, 1) for x in range(16 * row + w, 32, 2)[:8]]
    assert [pair for batch in sums for pair in batch] == [[x, x] for x in order]


def _kill_one(chance):
    found = workers()
    if found:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[int(chance * len(found))].kill()


@pytest.mark.timeout(3600)
def test_deaths_at_random_moments_cost_nothing():
    rng = random.Random(20)
    kills = errors = 0
    for pool in range(RANDOM_POOLS):
        ds = grain.MapDataset.range(10**6).map(lambda x: np.full(9, x)).seed(1)
        entrance = ENTRANCES[pool % 5 == 4]
        iterator = (
            opened(ds, entrance, 2, prefetch_buffer_size=16)
            if entrance == "read"
            else (opened(ds, entrance, 2))
        )
        expected = 0
        for _ in range(RANDOM_ROUNDS):
            for worker in (0, 1):
                for _ in range(rng.randrange(8)):
                    expected, failed = _checked_next(iterator, expected)
                    errors += failed
                alive = workers()
                if rng.random() < 0.5:
                    time.sleep(rng.uniform(0, 0.002))
                kind = rng.choice([signal.SIGKILL, signal.SIGABRT])
                if worker < len(alive):
                    with contextlib.suppress(psutil.NoSuchProcess):  # gone by itself meanwhile
                        alive[worker].send_signal(kind)
                        kills += 1
        for _ in range(100):
            expected, failed = _checked_next(iterator, expected)
            errors += failed
        began = time.monotonic()
        iterator.close()
        assert time.monotonic() - began < SOON_S
    assert kills > RANDOM_POOLS * RANDOM_ROUNDS * 0.5
    assert errors > kills * 0.1
    assert not zygotes()


def _checked_next(iterator, expected):
    began = time.monotonic()
    try:
        element = next(iterator)
    except grain_worker_error():
        assert time.monotonic() - began < SOON_S
        return expected, 1
    assert element.tolist() == [expected] * 9
    return expected + 1, 0


@both
@pytest.mark.parametrize("victims", [zygotes, starters])
def test_death_of_what_forks_is_met_and_gone_on_from(entrance, victims):
    iterator = opened(grain.MapDataset.range(1000).map(lambda x: x), entrance)
    found = all_of(iterator, 3)
    before = workers()
    for victim in victims():
        victim.kill()
    while len(found) < 1000:
        more, failure, took_s = _raised(iterator, 1000 - len(found))
        found += more
        assert took_s < SOON_S
        if failure is not None:
            assert isinstance(failure, grain_worker_error())
            assert "which was killed by SIGKILL" in str(failure)
            assert "the next call of `next` starts workers again" in str(failure)
    assert found == list(range(1000))
    assert gone(before)
    iterator.close()


def test_worker_whose_child_holds_its_socket_dies_noticed(tmp_path):
    ended = tmp_path / "ended"

    def forks_and_dies(x):
        if x == 2:
            if os.fork() == 0:
                while not ended.exists():
                    time.sleep(0.01)
                os._exit(0)
            os._exit(9)
        return x

    iterator = opened(grain.MapDataset.range(5).map(forks_and_dies), "read", 1)
    try:
        found, failure, took_s = _raised(iterator)
    finally:
        ended.touch()
    assert found == [0, 1]
    assert "exit code 9" in str(failure)
    assert took_s < SOON_S
    iterator.close()


# --- hanging -------------------------------------------------------------------------------------

HANGS = {"busy": "while True: pass", "asleep": "__import__('time').sleep(1e9)"}


def _hangs(how, begun=None):
    def hangs(x):
        if x >= 4:
            if begun is not None:
                begun.touch()
            exec(HANGS[how])
        time.sleep(0.02)  # elements this slow are sent one by one
        return x

    return hangs


@both
@pytest.mark.parametrize("how", HANGS)
def test_close_and_collection_do_not_wait_for_what_hangs(entrance, how, tmp_path):
    for end in ("close", "collect", "with"):
        iterator = opened(grain.MapDataset.range(9).map(_hangs(how, tmp_path / end)), entrance)
        assert all_of(iterator, 3) == [0, 1, 2]
        assert becomes((tmp_path / end).exists, SOON_S)
        processes = [*workers(), *zygotes()]
        assert len(processes) == 3
        began = time.monotonic()
        if end == "close":
            iterator.close()
        elif end == "with":
            with pytest.raises(LookupError), iterator:
                raise LookupError
        else:
            del iterator
        assert time.monotonic() - began < SOON_S
        assert gone(processes)


@both
def test_close_from_another_thread_ends_the_wait(entrance):
    iterator = opened(grain.MapDataset.range(9).map(_hangs("asleep")), entrance)
    assert all_of(iterator, 4) == [0, 1, 2, 3]
    threading.Timer(0.3, iterator.close).start()
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"closed iterator"):
        next(iterator)
    assert time.monotonic() - began < SOON_S


@both
def test_stall_is_warned_of_and_timeout_raises(entrance, caplog):
    iterator = opened(
        grain.MapDataset.range(9).map(_hangs("asleep")),
        entrance,
        stall_warning_s=0.2,
        timeout_s=1.5,
    )
    found = []
    while len(found) < 4:  # on a busy machine the workers may take longer to start
        with contextlib.suppress(grain_worker_error()):
            found.append(next(iterator))
    assert found == [0, 1, 2, 3]
    message = r"worker \d returned no result for .* element \d"
    with pytest.raises(grain_worker_error(), match=message):
        next(iterator)
    warning = r"worker \d has returned no result for 0.2 s"
    assert [r for r in caplog.records if re.search(warning, r.getMessage())]
    assert "element" in caplog.text
    with pytest.raises(grain_worker_error(), match="timeout_s"):
        next(iterator)
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < SOON_S


HANGING_SCRIPT = """
import pathlib, signal, sys, time, threading
import grainmill as grain
from worker_harness import opened, starters, workers, zygotes
signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
begun = pathlib.Path({begun!r})

def hangs(x):
    if x >= 4:
        begun.touch()
        {hang}
    time.sleep(0.02)
    return x

iterator = opened(grain.MapDataset.range(9).map(hangs), {entrance!r})
for _ in range(4):
    next(iterator)
while not begun.exists():
    time.sleep(0.01)
print("pids", *[p.pid for p in [*starters(), *zygotes(), *workers()]], flush=True)
sys.stdin.readline()
{then}
"""


_started = []


@pytest.fixture(autouse=True)
def _end_programs():
    """Kills programs that a failed test left running, which would slow down later tests."""
    yield
    while _started:
        with _started.pop() as process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _hanging(entrance, how, then, folder):
    begun = str(folder / "begun")
    text = HANGING_SCRIPT.format(hang=HANGS[how], entrance=entrance, then=then, begun=begun)
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    _started.append(process)
    pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
    assert len(pids) == 4, process.communicate()
    processes = [psutil.Process(pid) for pid in pids]
    process.stdin.write("\n")  # the program waits until here
    process.stdin.flush()
    return process, processes


@both
@pytest.mark.parametrize("how", HANGS)
def test_interpreter_ends_though_a_worker_hangs(entrance, how, tmp_path):
    process, processes = _hanging(entrance, how, "", tmp_path)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < SOON_S
    assert process.returncode == 0
    assert gone(processes)
    assert not errors


@both
@pytest.mark.parametrize("how", HANGS)
def test_ctrl_c_ends_the_wait_and_the_program(entrance, how, tmp_path):
    process, processes = _hanging(entrance, how, "next(iterator)", tmp_path)
    time.sleep(0.3)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < SOON_S
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert errors.count("Traceback") == 1, errors
    assert gone(processes)


def test_after_ctrl_c_the_iterator_goes_on(tmp_path):
    text = """
    import os, signal, threading, time
    import grainmill as grain
    from worker_harness import opened
    signal.signal(signal.SIGINT, signal.default_int_handler)
    iterator = opened(
        grain.MapDataset.range(300).map(lambda x: time.sleep(0.002) or x), "read", 2
    )
    found, stops = [], 0
    while True:
        timer = None
        if stops < 5:
            timer = threading.Timer(0.06, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
        try:
            if timer is None:
                found += list(iterator)
                break
            while True:
                found.append(next(iterator))
        except KeyboardInterrupt:
            stops += 1
        except StopIteration:
            break
    assert set(found) <= set(range(300)) and found == sorted(found)
    assert stops and len(found) >= 300 - stops, len(found)  # one may be lost on its way to the list
    print("stops", stops)
    """
    done = run_script(textwrap.dedent(text), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stops" in done.stdout


@both
@pytest.mark.parametrize("is_sent", [False, True])
def test_an_interrupt_while_a_task_is_sent_loses_nothing(entrance, is_sent, monkeypatch):
    from grainmill._workers.pool import WorkerPool  # noqa: PLC0415 - Grain has no such thing

    send, left = WorkerPool._send, [0]

    def interrupted(pool, worker, message):
        left[0] -= 1
        if left[0] or is_sent:
            send(pool, worker, message)
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(WorkerPool, "_send", interrupted)
    for task in [1, *random.Random(12).sample(range(2, 7), cases(2, 5))]:
        left[0] = task
        iterator = opened(grain.MapDataset.range(60).map(lambda x: x + 1), entrance)
        found, interrupts = [], 0
        while len(found) < 60:
            try:
                found.append(next(iterator))
            except KeyboardInterrupt:
                interrupts += 1
        assert (found, interrupts) == (list(range(1, 61)), 1)
        iterator.close()


# --- preemption ----------------------------------------------------------------------------------

PREEMPTED = """
    import os, signal, subprocess, sys, time
    import grainmill as grain
    from grainmill import MultiprocessingOptions, ReadOptions

    def slow(x):
        time.sleep(0.002)
        if x == 250:  # programs that workers run end by the signal
            child = subprocess.Popen(["sleep", "60"])
            child.terminate()
            assert child.wait(20) == -signal.SIGTERM
        return x

    entrance, early = sys.argv[1], sys.argv[2] == "early"
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    ds = grain.MapDataset.range(600).map(slow)
    if entrance == "read":
        ds = ds.to_iter_dataset(ReadOptions(num_workers=2)).batch(4)
    else:
        ds = ds.to_iter_dataset().batch(4).mp_prefetch(MultiprocessingOptions(num_workers=2))
    iterator = iter(ds)
    found = []
    if early:  # while workers start
        iterator.start_prefetch()
        for _ in range(20):
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.02)
    found += [next(iterator).tolist() for _ in range(5)]
    for _ in range(3):
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.1)
    state = iterator.get_state()
    found += [batch.tolist() for batch in iterator]
    assert sorted(sum(found, [])) == list(range(600)), found
    assert stop
    iterator.set_state(state)
    assert [batch.tolist() for batch in iterator] == found[5:]
    print("all")
"""


@both
@pytest.mark.parametrize("when", ["early", "late"])
def test_workers_of_a_trainer_that_handles_a_preemption_go_on(entrance, when, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PREEMPTED))
    done = subprocess.run(
        [sys.executable, str(script), entrance, when],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "all"), done.stderr


# --- the parent's end ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", HANGS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("other", ["none", "starter", "zygote"])
def test_workers_go_with_their_parent(how, number, other, tmp_path):
    process, processes = _hanging("read", how, "next(iterator)", tmp_path)
    time.sleep(0.1)
    os.kill(process.pid, number)
    if other != "none":
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have seen the parent's end already
            processes[["starter", "zygote"].index(other)].send_signal(number)
    process.wait(SOON_S)
    assert gone(processes)
    process.communicate()


def test_nothing_is_left_in_files_and_dev_shm_is_not_used(tmp_path):
    """Batches of 100 MB, with /dev/shm at whatever size it has."""

    def listing():
        return set(Path("/dev/shm").iterdir())

    def maps(process):
        return Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()

    def in_dev_shm(process):
        return {line.rpartition("/dev/shm/")[2] for line in maps(process) if "/dev/shm/" in line}

    ds = grain.MapDataset.range(4).map(lambda x: np.full(100 << 20, x, np.uint8))
    # Libraries that other tests use have files there, too.
    before, mapped_before = listing(), in_dev_shm(psutil.Process())
    with opened(ds, "read", 2, batch_size=1) as iterator:
        for x in range(4):
            batch = next(iterator)
            assert batch.nbytes == 100 << 20
            assert batch[0, 0] == batch[0, -1] == x
            for process in [psutil.Process(), *workers()]:
                mapped = [
                    line for line in maps(process) if "memfd:" in line or "grainmill-" in line
                ]
                assert all("memfd:" in line for line in mapped)
                assert in_dev_shm(process) <= mapped_before
        del batch
        for worker in workers():
            worker.kill()
    until = time.monotonic() + 60  # those of tests that run meanwhile will go
    while not listing() <= before and time.monotonic() < until:
        time.sleep(0.1)
    assert listing() <= before
    assert not sorted(tmp_path.iterdir())


def test_batches_of_100_mb_fit_beside_a_dev_shm_of_64_mb(tmp_path):
    """In a mount namespace of its own, if the system allows that."""
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run([*alone, small], capture_output=True, check=False).returncode:
        pytest.skip("mounting a /dev/shm of another size is not permitted")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os
        import numpy as np
        import grainmill as grain
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
        ds = grain.MapDataset.range(4).map(lambda x: np.full(100 << 20, x, np.uint8))
        ds = ds.to_iter_dataset(grain.ReadOptions(num_workers=2)).batch(1)
        with iter(ds) as batches:
            assert [(b.nbytes, b[0, 0], b[0, -1]) for b in batches] == [
                (100 << 20, x, x) for x in range(4)
            ]
        parts = grain.MapDataset.range(2).map(lambda x: np.full(100 << 20, x, np.uint8))
        parts = parts.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
        with iter(parts) as elements:
            assert [(e.nbytes, e[-1]) for e in elements] == [(100 << 20, 0), (100 << 20, 1)]
        print("fine")
        """),
        encoding="utf-8",
    )
    run = f"{small} && exec {shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    done = subprocess.run(
        [*alone, run], capture_output=True, text=True, check=False, timeout=240, env=environment()
    )
    assert "fine" in done.stdout, done.stderr


# --- memory --------------------------------------------------------------------------------------


def _slots():
    """The bytes of the slots that this process and its workers have mapped, by their inode."""
    byte_lens = {}
    for process in [psutil.Process(), *workers()]:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            addresses, *_, inode, path = line.split(maxsplit=5)
            if "memfd:grainmill-slot" in path:
                start, stop = (int(address, 16) for address in addresses.split("-"))
                byte_lens[inode] = stop - start
    return byte_lens


@pytest.fixture
def slot_bytes():
    """Counts the bytes of slots, without those that other tests have left mapped."""
    others = set(_slots())
    return lambda: sum(size for inode, size in _slots().items() if inode not in others)


@both
def test_budget_bounds_what_is_held_ready(entrance, slot_bytes):
    size, budget = 1 << 20, 12 << 20
    ds = grain.MapDataset.range(60).map(lambda x: np.full(size // 8, x))
    kwargs = {"prefetch_buffer_size": 500} if entrance == "read" else {}
    iterator = opened(ds, entrance, 3, batch_size=1, ram_budget_bytes=budget, **kwargs)
    held, max_bytes = [], 0
    for x in range(60):
        held.append(next(iterator))
        assert held[-1][0, -1] == x
        time.sleep(0.01)
        # Slots are up to an eighth larger than their contents.
        max_bytes = max(max_bytes, slot_bytes() - len(held) * size * 9 // 8)
    assert max_bytes <= budget * 1.1
    assert len({batch.ctypes.data for batch in held}) == 60
    assert [int(batch[0, 0]) for batch in held] == list(range(60))
    iterator.close()


@both
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_endless_buffer_of_large_elements_fills_within_the_budget(entrance, pause_s, slot_bytes):
    size, budget = 1 << 20, 64 << 20
    ds = grain.MapDataset.range(10**6).map(lambda _: np.zeros(size, np.uint8))
    ahead = "prefetch_buffer_size" if entrance == "read" else "per_worker_buffer_size"
    iterator = opened(ds, entrance, ram_budget_bytes=budget, **{ahead: 10**9})
    max_bytes = 0
    for turn in range(400 if not pause_s else 60):
        assert next(iterator).nbytes == size
        time.sleep(pause_s)
        if turn % 20 == 19:
            max_bytes = max(max_bytes, slot_bytes())
    held = sum(process.memory_full_info().pss for process in workers())
    iterator.close()  # before the assertions: other tests count slots too
    # Slots in use stay within the budget, and free slots may take as much again.
    assert max_bytes <= 2 * budget
    if entrance == "read":  # a worker also holds one block, and the interpreter's memory
        assert held <= 2 * budget + 2 * (60 << 20)


@both
def test_batches_larger_than_the_budget_still_come(entrance):
    ds = grain.MapDataset.range(40).map(lambda x: np.full(100_000, x))
    iterator = opened(ds, entrance, 3, batch_size=4, ram_budget_bytes=1000)
    state = iterator.get_state()
    batches = [batch[:, 0].tolist() for batch in iterator]
    for _ in range(3):
        iterator.set_state(state)
        assert next(iterator)[:, 0].tolist() == batches[0]
        time.sleep(0.05)
    assert sorted(x for batch in batches for x in batch) == list(range(40))
    iterator.close()


def test_batches_dropped_at_once_are_given_back(slot_bytes):
    size = 1 << 20
    ds = grain.MapDataset.range(10**6).map(lambda x: np.full(size // 8, x))
    iterator = opened(ds, "read", 2, batch_size=1, ram_budget_bytes=24 << 20)
    held = [next(iterator) for _ in range(150)]
    assert slot_bytes() >= 150 * size
    held.clear()
    for _ in range(60):
        next(iterator)
    assert slot_bytes() <= 40 * size
    iterator.close()


def test_slots_that_are_not_needed_any_more_are_given_back_without_pressure(slot_bytes):
    size = 1 << 20
    ds = grain.MapDataset.range(10**6).map(lambda x: np.full(size // 8, x))
    iterator = opened(ds, "read", 1, batch_size=1, num_threads=1, prefetch_buffer_size=4)
    held = [next(iterator) for _ in range(60)]
    held.clear()
    for _ in range(160):
        next(iterator)
    assert slot_bytes() <= 20 * size
    iterator.close()
