"""Pipelines in processes that others start, on asyncio's threads, and on daemon threads at exit."""

import subprocess
import sys

import pytest
from under_test import IS_GRAIN
from worker_harness import environment

if IS_GRAIN:
    pytest.skip("Grain's processes print errors at exit", allow_module_level=True)

HEAD = """
import asyncio, multiprocessing, sys, threading, time
import numpy as np
import grainmill as grain

def more(x):
    return x + 1

def hangs(x):
    if x == 3:
        threading.Event().wait()
    return x

def numbers(num_workers, count=10**9, function=more):
    ds = grain.MapDataset.range(count).map(function)
    return ds.to_iter_dataset(grain.ReadOptions(num_workers=num_workers))

def prefetched(ds):
    return grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=4)
"""


def quiet(script, tmp_path, *args):
    """What the program prints; it must end by itself, with no word of anything else."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + script, "utf-8")
    command = [sys.executable, "-W", "error", str(path), *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


CHILDREN = """
live = []

def child(queue, array, num_workers):
    live.append(iter(prefetched(numbers(num_workers))))  # alive when the process ends
    queue.put((list(numbers(num_workers, 20)), [next(live[-1]) for _ in range(3)], array))
    array[num_workers] = 1

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    live.append(iter(prefetched(numbers(2))))
    assert next(live[0]) == 1
    array = grain.multiprocessing.SharedMemoryArray((3,), np.int64)
    array.unlink_on_del()
    queue = context.Queue()
    children = [context.Process(target=child, args=(queue, array, n)) for n in (0, 2)]
    for each in children:
        each.start()
    for _ in children:
        everything, first, _ = queue.get(timeout=60)
        assert everything == list(range(1, 21)) and first == [1, 2, 3]
    for each in children:
        each.join(60)
    print([each.exitcode for each in children], array.tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers and forkserver need Linux")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_use_pipelines_and_end_quietly(method, tmp_path):
    if method == "fork" and sys.version_info >= (3, 12):
        pytest.skip("a warning says that threads do not survive a fork")
    assert quiet(CHILDREN, tmp_path, method) == "[0, 0] [1, 0, 1]\n"


ASYNC = """
async def main(num_workers):
    iterator = iter(numbers(num_workers, 30))
    found = []
    while (element := await asyncio.to_thread(next, iterator, None)) is not None:
        found.append(element)
    assert found == list(range(1, 31))
    lists = [asyncio.to_thread(list, numbers(num_workers, 30)) for _ in range(3)]
    assert await asyncio.gather(*lists) == [found] * 3
    live.append(iter(prefetched(numbers(num_workers))))
    assert await asyncio.to_thread(next, live[-1]) == 1

    waiting = iter(numbers(num_workers, 9, hangs))
    try:
        await asyncio.wait_for(asyncio.to_thread(list, waiting), 1)
    except asyncio.TimeoutError:
        waiting.close()  # ends the call on the other thread

live = []
for num_workers in (0, 2):
    asyncio.run(main(num_workers))
print("done")
"""


def test_threads_of_asyncio_take_elements(tmp_path):
    assert quiet(ASYNC, tmp_path) == "done\n"


DAEMONS = """
def of_workers():
    options = grain.MultiprocessingOptions(num_workers=1)
    return grain.MapDataset.range(10**9).to_iter_dataset().map(more).mp_prefetch(options)

made = {
    "reading": lambda: numbers(0),
    "in workers": lambda: numbers(2),
    "prefetching": lambda: prefetched(numbers(0)),
    "prefetching from workers": lambda: prefetched(numbers(1)),
    "of workers": of_workers,
    "hanging": lambda: numbers(0, 9, hangs),
    "hanging in workers": lambda: numbers(1, 9, hangs),
}

def run(dataset, begun):
    for element in dataset:
        begun.set()

def run_many(begun):
    while True:
        assert len(list(numbers(0, 20))) == 20
        begun.set()

started = []
for make in made.values():
    started.append(threading.Event())
    threading.Thread(target=run, args=(make(), started[-1]), daemon=True).start()
started.append(threading.Event())
threading.Thread(target=run_many, args=(started[-1],), daemon=True).start()
assert all(begun.wait(60) for begun in started)
time.sleep(float(sys.argv[1]))
print("end")
"""


@pytest.mark.parametrize("after_s", ["0", "0.2"])
def test_daemon_threads_end_quietly_with_the_process(after_s, tmp_path):
    assert quiet(DAEMONS, tmp_path, after_s) == "end\n"


LATE = """
def consume():
    time.sleep(0.3)  # the main thread has ended
    assert list(numbers(0, 20)) == list(range(1, 21))
    try:
        list(grain.MapDataset.range(3).map(lambda x: 1 / x).to_iter_dataset())
    except ZeroDivisionError:
        print("raised", flush=True)

threading.Thread(target=consume).start()
"""


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="starts no thread once the main thread has ended"
)
def test_thread_that_outlives_the_main_thread_gets_its_errors(tmp_path):
    assert quiet(LATE, tmp_path) == "raised\n"
