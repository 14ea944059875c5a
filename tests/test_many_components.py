"""Mixtures of many components: threads, open files and memory are those of one pipeline."""

import itertools
import threading
import time

import numpy as np
import psutil
import pytest
from stage_harness import count_at_rest
from worker_harness import run_script, workers

import grainmill as grain
from grainmill import IterDataset, MapDataset, ReadOptions, _native
from grainmill._evaluate.context import Context
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import FirstFitPackIterDataset, InterleaveIterDataset, ZipIterDataset
from grainmill.sources import ArrayRecordDataSource

NUM_COMPONENTS = 35
FILES = 2


class Waits:
    """A function that waits, and records its threads and arguments."""

    def __init__(self, result=lambda x: x):
        self.result = result
        self.threads = set()
        self.calls = []

    def __call__(self, x):
        self.threads.add(threading.current_thread().name)
        self.calls.append(x)
        time.sleep(0.002)
        return self.result(x)


def names(count):
    return {f"grain-prefetch_{number}" for number in range(count)}


def prefetching():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def soon(condition, timeout_s=60):
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def parts(function, count, num_threads=4, **options):
    options = ReadOptions(num_threads=num_threads, **options)
    return [
        MapDataset.range(1000 * n, 1000 * n + 200).map(function).to_iter_dataset(options)
        for n in range(count)
    ]


JOINS = {
    "mix": IterDataset.mix,
    "zip": ZipIterDataset,
    "interleave": lambda parts: InterleaveIterDataset(parts, cycle_length=8),
    "mix of interleaves": lambda parts: IterDataset.mix(
        [InterleaveIterDataset(parts[:8], cycle_length=4), *parts[8:]]
    ),
}


@pytest.mark.parametrize("join", JOINS)
def test_components_share_the_threads_of_one(join):
    function = Waits()
    others = set(prefetching())  # of iterators that earlier tests have left to the collector
    iterator = iter(JOINS[join](parts(function, 16)))
    elements = list(itertools.islice(iterator, 300))
    assert names(4) >= function.threads > {"grain-prefetch_0"}
    assert len(set(prefetching()) - others) <= 4
    inline = iter(JOINS[join](parts(lambda x: x, 16, num_threads=0)))
    assert elements == list(itertools.islice(inline, 300))
    iterator.close()
    assert soon(lambda: not set(prefetching()) - others)


def test_numbers_of_threads_stay_below_the_limit_of_each_component():
    few, many = Waits(), Waits()
    ds = IterDataset.mix([*parts(few, 4, num_threads=2), *parts(many, 4, num_threads=5)])
    list(itertools.islice(ds, 400))
    # A busy machine may need fewer.
    assert {"grain-prefetch_0"} <= few.threads <= names(2)
    assert {"grain-prefetch_0"} <= many.threads <= names(5)


def test_components_that_end_leave_the_threads_to_the_others():
    function = Waits()
    with iter(InterleaveIterDataset(parts(function, 12), cycle_length=3)) as iterator:
        elements = list(iterator)
    assert sorted(elements) == [1000 * n + x for n in range(12) for x in range(200)]


def test_a_component_that_is_awaited_comes_before_the_prefetch_of_others():
    """The first has hundreds of slow elements to prefetch when the second is needed."""
    slow = Waits(lambda x: time.sleep(0.02) or x)
    options = ReadOptions(num_threads=1, prefetch_buffer_size=500)
    first = MapDataset.range(500).map(slow).to_iter_dataset(options)
    second = MapDataset.range(500).map(Waits()).to_iter_dataset(options)
    with iter(IterDataset.mix([first, second])) as iterator:
        list(itertools.islice(iterator, 60))
        assert len(slow.calls) < 200  # all of 500 if it were first come, first served


@pytest.mark.parametrize(
    ("count", "num_threads", "mebibytes"), [(8, 4, 32), (3, 8, 12), (16, 2, 16), (2, 16, 200)]
)
def test_components_share_the_memory_budget(count, num_threads, mebibytes):
    """Also before the size of their first element is known, and whatever the threads do."""
    mib = 1 << 20
    function = Waits(lambda _: np.zeros(mib, np.uint8))
    components = parts(function, count, num_threads, ram_budget_bytes=mebibytes * mib)
    with iter(IterDataset.mix(components)) as iterator:
        num_taken = 5 * count
        for _ in range(num_taken):
            next(iterator)
        num_calls = count_at_rest(function.calls)
    # Each component may have one element more, which its reader has taken.
    assert num_taken <= num_calls <= num_taken + mebibytes + count


def test_limits_on_reads_in_flight_are_common():
    context = Context().shared_by(3)
    limits = (None, 5, 6)
    queues = [context.of_reader(limit).reads for limit in limits]
    assert [reads.max_in_flight for reads in queues] == [128, 5, 6]
    for new, limit in enumerate(limits, start=1):
        with pytest.raises(ValueError, match="`max_in_flight` must be at least 1, got 0"):
            context.of_reader(limit).reads.max_in_flight = 0
        context.of_reader(limit).reads.max_in_flight = new
    assert [reads.max_in_flight for reads in queues] == [1, 2, 3]
    assert Context().of_reader(5).reads.max_in_flight == 5


# --- on workers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The files of each component, with sequences of tokens."""
    folder = tmp_path_factory.mktemp("components")
    rng = np.random.default_rng(0)
    components = []
    for number in range(NUM_COMPONENTS):
        files = [str(folder / f"{number}-{part}") for part in range(FILES)]
        for path in files:
            with ArrayRecordWriter(path, "group_size:1") as writer:
                for length in rng.integers(1, 60, 40):
                    writer.write(np.full(length, number, np.int32).tobytes())
        components.append(files)
    return components


def decode(record):
    time.sleep(0.001)  # all threads that are allowed will be used
    return {"tokens": np.frombuffer(record, np.int32)}


def packed(ds, options):
    ds = ds.to_iter_dataset(options)
    return FirstFitPackIterDataset(ds, length_struct={"tokens": 64}, num_packing_bins=4)


def component(files, seed):
    return MapDataset.source(ArrayRecordDataSource(files)).shuffle(seed=seed).repeat().map(decode)


FORMS = {
    "rows": lambda components, options: IterDataset.mix([packed(ds, options) for ds in components]),
    "records": lambda components, options: packed(MapDataset.mix(components), options),
}


@pytest.mark.parametrize("form", FORMS)
def test_workers_have_the_threads_files_and_memory_of_one_pipeline(form, paths):
    num_workers, num_threads, num_reads = 4, 3, 8
    components = [component(files, seed) for seed, files in enumerate(paths)]
    read = ReadOptions(num_threads, prefetch_buffer_size=100, max_reads_in_flight=num_reads)
    ds = FORMS[form](components, read)
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    with iter(ds.batch(16).mp_prefetch(options)) as iterator:
        seen = set()
        for _ in range(40):
            seen |= set(np.unique(next(iterator)["tokens"]).tolist()) - {0}
        assert len(seen) == NUM_COMPONENTS - 1  # of the first, all tokens are 0
        processes = workers()
        assert len(processes) == num_workers
        # Beside the main thread and those that compute. On a busy machine storage may seem slow:
        # then threads of the engine read, and each that prefetches opens files beside others.
        limit = 1 + (_native.num_cores() - 1) + num_threads * FILES + num_reads
        threads = [process.num_threads() for process in processes]
        assert max(threads) <= limit, threads
        # Each file once, a clock of each thread, and what an interpreter has open.
        files = [process.num_fds() for process in processes]
        assert max(files) <= NUM_COMPONENTS * FILES + num_threads + 30, files
        private = [process.memory_full_info().uss / 1e6 for process in processes]
        assert max(private) < 150, private


def test_components_have_more_files_than_a_process_may_open(paths, tmp_path):
    """At most half of the files that are allowed are records; with more, they are opened again."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from test_many_components import FORMS, component
from stage_harness import count_at_rest
from worker_harness import workers
import grainmill as grain

ds = FORMS["rows"]([component(files, 0) for files in {paths!r}], grain.ReadOptions(num_threads=2))
with iter(ds.batch(16).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))) as iterator:
    for _ in range(10):
        next(iterator)
    print(max(process.num_fds() for process in workers()))
"""
    done = run_script(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 96 - 10


def test_first_batch_of_a_hundred_components_comes_soon(paths):
    """Generous, for a busy machine: measured in `benches/many_components.py`, it is a second."""
    many = (paths * 3)[:100]
    ds = FORMS["rows"]([component(files, 0) for files in many], ReadOptions())
    num_others = psutil.Process().num_threads()  # earlier tests may have imported JAX, or Ray
    began = time.monotonic()
    with iter(ds.batch(16).mp_prefetch(grain.MultiprocessingOptions(num_workers=4))) as iterator:
        assert next(iterator)["tokens"].shape == (16, 64)
        assert time.monotonic() - began < 60
        assert len(workers()) == 4
        assert psutil.Process().num_threads() - num_others < 90
