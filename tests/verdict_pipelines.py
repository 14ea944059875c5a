"""Pipelines that are slow on purpose, each with what makes it slow.

`python tests/verdict_pipelines.py [NAME ...] [--runs N] [--busy N]` shows the verdicts on them, on
request beside busy processes.
"""

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import grainmill as grain
from grainmill import MapDataset, MultiprocessingOptions, ReadOptions
from grainmill._dataset.views.statistics import report_on
from grainmill._stats.verdict import verdict_on
from grainmill.array_record import ArrayRecordWriter

SECONDS = 0.25
ENOUGH = 25  # elements, on a busy machine
LENGTH = 1_000_000

# --- what costs ---------------------------------------------------------------------------------
# Loops of a fixed length: what they cost is CPU time, whatever else the machine does.


def _loops_of_a_millisecond():
    def once():
        began = time.thread_time()
        _loop(20_000)
        return time.thread_time() - began

    return round(20_000 * 1e-3 / min(once() for _ in range(7)))


def _loop(count):
    total = 0
    for number in range(count):
        total += number * number
    return total


LOOPS = _loops_of_a_millisecond()
BYTES = bytes(np.random.default_rng(0).integers(0, 64, 60_000, np.uint8))


def compute(ms):
    """Holds the interpreter lock for `ms` milliseconds of CPU time."""
    _loop(round(ms * LOOPS))


def compress(ms):
    """Computes for about so long without the lock: 60 KB take about 2 ms."""
    zlib.compress(BYTES[: round(len(BYTES) * ms / 2)], 6)


def wait(ms):
    time.sleep(ms / 1e3)


def costs(kind, ms, value):
    """Spends `ms` milliseconds in the way that `kind` names, and returns `value`."""
    kind(ms)
    return value


# Their names tell which is slow: a verdict that names `dear` is right, one that names `cheap` not.
def dear(x):
    return costs(compute, 2, x)


def cheap(x):
    return costs(compute, 0.2, x)


def dear_native(x):
    return costs(compress, 3, x)


def dear_wait(x):
    return costs(wait, 5, x)


def cheap_wait(x):
    return costs(wait, 0.3, x)


def modest(x):
    return costs(compute, 0.7, x)


def trifling(x):
    return costs(compute, 0.03, x)


def very_dear(x):
    return costs(compute, 10, x)


def very_dear_step():
    compute(10)


def very_dear_wait(x):
    return costs(wait, 15, x)


def dear_predicate(x):
    return costs(compute, 2, x) % 3 > 0


def dear_indexed(_, x):
    return costs(compute, 2, x)


def cheap_random(x, rng):
    return costs(compute, 0.2, x + int(rng.integers(2)))


def dear_random(x, rng):
    return costs(compute, 2, x + int(rng.integers(2)))


def dear_stacked(xs):
    return costs(compute, 12, np.stack(xs))


def tokens(x):
    return {"tokens": np.arange(int(x) % 50 + 1, dtype=np.int32)}


def cheap_row(row):
    return costs(compute, 0.2, row)


OBJECTS = [str(number) for number in range(3000)]


def objects(_):
    return OBJECTS


IMAGE = np.ones((1000, 2000), np.uint8)


def image(_):
    return IMAGE


LOCK = threading.Lock()


def dear_with_a_lock(x):
    with LOCK:
        time.sleep(0.004)
    return x


class DearFlatMap(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, x):
        return costs(compute, 4, [x, x])


class DearWideFlatMap(grain.experimental.FlatMapTransform):
    max_fan_out = 40

    def flat_map(self, x):
        return costs(compute, 10, [x] * 40)


class DearBatches(grain.IterDataset):
    """A user's own data set."""

    ms = 3

    def __init__(self, parent, kind=compute):
        super().__init__(parent)
        self.kind = kind

    def __iter__(self):
        return CostlyIterator(self._parent.__iter__(), self.kind, self.ms)


class CheapBatches(DearBatches):
    ms = 0.2


class CostlyIterator(grain.DatasetIterator):
    def __init__(self, parent, kind, ms):
        super().__init__(parent)
        self.kind, self.ms = kind, ms

    def __next__(self):
        return costs(self.kind, self.ms, next(self._parent))

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


class Generated(DearBatches):
    """Its iterator is a generator."""

    def __iter__(self):
        for element in self._parent:
            yield costs(self.kind, self.ms, element)


class CheaplyGenerated(Generated):
    ms = 0.2


class Hidden(grain.IterDataset):
    """Its elements come from a pipeline that nobody else knows."""

    def __iter__(self):
        source = numbers().map(dear).to_iter_dataset(CALLER)
        return UnrelatedIterator(iter(source), compute, 0.2)


class Unrelated(CheapBatches):
    """Its iterator does not say what it reads from."""

    def __iter__(self):
        return UnrelatedIterator(self._parent.__iter__(), self.kind, self.ms)


class UnrelatedIterator(CostlyIterator):
    _parent = None  # which is a property of the base class

    def __init__(self, parent, kind, ms):
        grain.DatasetIterator.__init__(self)
        self._parent, self.kind, self.ms = parent, kind, ms


class Source:
    """Numbers, each of which takes a while."""

    def __init__(self, kind, ms):
        self.kind, self.ms = kind, ms

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return costs(self.kind, self.ms, int(index))


# A bucket that answers after `LATENCY_MS`: with `FEW` reads in flight, a record takes 10 ms.
LATENCY_MS = 40
FEW = {"max_reads_in_flight": 4}
SOME = {"max_reads_in_flight": 64}
FAR_RECORDS = 2000
FAR: dict[str, Any] = {}
NEAR: dict[str, Any] = {}


@contextlib.contextmanager
def far_bucket():
    """Runs the server of the pipelines that read from a bucket, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "records"
        rest = np.random.default_rng(0).bytes(40_000)  # too long to be read with its neighbours
        with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
            for number in range(FAR_RECORDS):
                writer.write(number.to_bytes(4, "little") + rest)
        program = [sys.executable, str(pathlib.Path(__file__).parent / "bucket_server.py")]
        program += [str(path), "--count", "1", "--latency-ms", str(LATENCY_MS)]
        with subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/bucket/data/00000"
            FAR["source"] = grain.sources.ArrayRecordDataSource([url])
            NEAR["source"] = grain.sources.ArrayRecordDataSource([str(path)])
            try:
                yield
            finally:
                FAR.clear()
                NEAR.clear()
                server.stdin.close()


def number_of(record):
    return int.from_bytes(record[:4], "little")


def far(place=FAR):
    """Numbers that are read from the bucket, or from the same file near by."""
    return MapDataset.source(place["source"]).shuffle(seed=0).repeat().map(number_of)


WORKER = {}


def remember_worker(worker, _):
    WORKER["number"] = worker


def slow_in_worker_1(x):
    return costs(wait, 12 if WORKER["number"] == 1 else 1, x)


# --- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slow:
    """A pipeline.

    Attributes:
        name: What is slow, and how it runs.
        build: Returns the dataset.
        kinds: The kinds of a right verdict.
        names: A pattern that its text must contain.
        consume: What the consumer does with each element.
    """

    name: str
    build: Callable[[], Any]
    kinds: str
    names: str
    consume: Callable[[], object] | None = None


TABLE: list[Slow] = []


def slow(name, kinds, names, consume=None):
    def add(build):
        TABLE.append(Slow(name, build, kinds, names, consume))
        return build

    return add


def numbers():
    return MapDataset.range(LENGTH).shuffle(seed=0)


CALLER = ReadOptions(num_threads=0)
ONE = ReadOptions(num_threads=1)
MANY = ReadOptions()  # 16
WORKERS = ReadOptions(num_workers=2)
MODES = {"0 threads": CALLER, "1 thread": ONE, "16 threads": MANY}
FUNCTION = "function lock"


def packed(ds, **options):
    return grain.experimental.FirstFitPackIterDataset(
        ds, length_struct={"tokens": 128}, num_packing_bins=16, **options
    )


def prefetched(ds, size=4):
    return grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=size)


def in_workers(ds):
    return ds.mp_prefetch(MultiprocessingOptions(2))


def add_in_every_mode(name, kinds, names, build, *, consume=None, modes=MODES):
    for mode, options in modes.items():
        slow(f"{name}: {mode}", kinds, names, consume)(functools.partial(build, options))


BOTH = {mode: MODES[mode] for mode in ("0 threads", "16 threads")}
add_in_every_mode(
    "map, before a cheap one",
    FUNCTION,
    "`dear @",
    lambda options: numbers().map(dear).map(cheap).to_iter_dataset(options),
)
add_in_every_mode(
    "map, after a cheap one, batch",
    FUNCTION,
    "`dear @",
    lambda options: numbers().map(cheap).map(dear).batch(8).to_iter_dataset(options),
    modes=BOTH,
)
add_in_every_mode(
    "map, pack, batch",
    FUNCTION,
    "`dear @",
    lambda options: packed(numbers().map(dear).map(tokens).to_iter_dataset(options)).batch(2),
)
add_in_every_mode(
    "map, iter.batch",
    FUNCTION,
    "`dear @",
    lambda options: (
        numbers()
        .map(tokens)
        .map(lambda e: e["tokens"].sum())
        .map(dear)
        .to_iter_dataset(options)
        .batch(8)
    ),
    modes={"16 threads": MANY},
)
add_in_every_mode(
    "map without the lock, pack, batch",
    FUNCTION,
    "`dear_native @",
    lambda options: packed(
        numbers().map(cheap).map(dear_native).map(tokens).to_iter_dataset(options)
    ).batch(2),
    modes=BOTH,
)
add_in_every_mode(
    "map that waits, beside one that computes, batch",
    FUNCTION,
    "`very_dear_wait @",
    lambda options: numbers().map(trifling).map(very_dear_wait).to_iter_dataset(options).batch(4),
)
add_in_every_mode(
    "map that waits, pack, batch",
    FUNCTION,
    "`dear_wait @",
    lambda options: packed(numbers().map(dear_wait).map(tokens).to_iter_dataset(options)).batch(1),
    modes={"16 threads": MANY},
)
slow("map with a lock: 16 threads", FUNCTION, "`dear_with_a_lock @")(
    lambda: numbers().map(cheap).map(dear_with_a_lock).to_iter_dataset(MANY)
)
slow("random map: 16 threads", FUNCTION, "`dear_random @")(
    lambda: numbers().seed(0).random_map(dear_random).map(cheap).to_iter_dataset(MANY)
)
slow("map with index, filter: 0 threads", FUNCTION, "`dear_indexed @")(
    lambda: (
        numbers()
        .map(cheap)
        .map_with_index(dear_indexed)
        .filter(lambda x: x % 2)
        .to_iter_dataset(CALLER)
    )
)
slow("filter: 16 threads", FUNCTION, "`dear_predicate @")(
    lambda: numbers().map(cheap).filter(dear_predicate).to_iter_dataset(MANY).batch(2)
)
slow("flat map before a map: 16 threads", FUNCTION, "DearFlatMap")(
    lambda: (
        grain.experimental.FlatMapMapDataset(numbers(), DearFlatMap())
        .map(cheap)
        .to_iter_dataset(MANY)
    )
)
# Functions on the consumer's thread.
slow("iter.map after a cheap map: 16 threads", FUNCTION, "`dear @")(
    lambda: numbers().map(cheap).to_iter_dataset(MANY).map(dear).batch(4)
)
slow("iter.map that waits: 16 threads", FUNCTION, "`dear_wait @")(
    lambda: numbers().map(cheap).to_iter_dataset(MANY).map(cheap).map(dear_wait)
)
slow("iter.filter: 0 threads", FUNCTION, "`dear_predicate @")(
    lambda: numbers().map(cheap).to_iter_dataset(CALLER).filter(dear_predicate).map(cheap)
)
slow("iter flat map: 16 threads", FUNCTION, "DearFlatMap")(
    lambda: grain.experimental.FlatMapIterDataset(
        numbers().map(cheap).to_iter_dataset(MANY), DearFlatMap()
    ).batch(4)
)
slow("batch_fn: 16 threads", FUNCTION, "Batch.*on the thread that asks")(
    lambda: numbers().map(cheap).to_iter_dataset(MANY).batch(8, batch_fn=dear_stacked)
)
slow("user's own data set: 16 threads", FUNCTION, "DearBatches")(
    lambda: DearBatches(numbers().map(cheap).to_iter_dataset(MANY)).map(cheap)
)
slow("user's own data set that waits: 0 threads", FUNCTION, "DearBatches")(
    lambda: DearBatches(numbers().map(cheap).to_iter_dataset(CALLER), wait).map(cheap)
)
slow("user's own data set over a slow function of elements: 0 threads", FUNCTION, "DearBatches")(
    lambda: DearBatches(numbers().to_iter_dataset(CALLER).map(dear)).map(cheap)
)


def with_own(options, kinds, add=lambda ds: ds):
    """A pipeline of users' own data sets, each directly over the next one of `kinds`."""
    ds = numbers().map(trifling).to_iter_dataset(options)
    return add(functools.reduce(lambda ds, kind: kind(ds), reversed(kinds), ds)).map(trifling)


def add_own(name, kinds, modes):
    for mode, (options, add) in modes.items():
        build = functools.partial(with_own, options, kinds, add)
        slow(f"{name} of {len(kinds)} data sets of users: {mode}", FUNCTION, "DearBatches")(build)


IN_THREAD_OF_WORKERS = {"thread in workers": (MANY, lambda ds: in_workers(prefetched(ds)))}
EVERYWHERE = {
    "0 threads": (CALLER, lambda ds: ds),
    "16 threads": (MANY, lambda ds: ds),
    "thread prefetch": (CALLER, prefetched),
    "mp_prefetch": (CALLER, in_workers),
    **IN_THREAD_OF_WORKERS,
}
add_own("the upper", [DearBatches, CheapBatches], IN_THREAD_OF_WORKERS)
add_own("the lower", [CheapBatches, DearBatches], EVERYWHERE)
add_own("the middle", [CheapBatches, DearBatches, CheapBatches], EVERYWHERE)
add_own("the lowest", [CheapBatches, CheapBatches, DearBatches], IN_THREAD_OF_WORKERS)
for mode, (options, around) in EVERYWHERE.items():
    slow(f"dear generator: {mode}", FUNCTION, "Generated")(
        lambda options=options, around=around: around(
            Generated(numbers().map(cheap).to_iter_dataset(options)).map(cheap)
        )
    )
    slow(f"generator over a dear map: {mode}", FUNCTION, "`dear @")(
        lambda options=options, around=around: around(
            CheaplyGenerated(numbers().map(dear).to_iter_dataset(options)).map(cheap)
        )
    )
slow("data set with a pipeline of its own: 0 threads", FUNCTION, "Hidden")(
    lambda: Hidden().map(cheap)
)
slow("iterator without parents over a dear map: 0 threads", FUNCTION, "`dear @")(
    lambda: Unrelated(numbers().map(dear).to_iter_dataset(CALLER)).map(cheap)
)
# Thread prefetch.
slow("map, pack, batch, thread prefetch: 16 threads", FUNCTION, "`dear @")(
    lambda: prefetched(packed(numbers().map(dear).map(tokens).to_iter_dataset()).batch(2))
)
slow("iter.map behind thread prefetch: 16 threads", FUNCTION, "`dear @")(
    lambda: prefetched(numbers().map(cheap).to_iter_dataset().map(dear)).map(cheap).batch(4)
)
slow("iter.map that waits behind thread prefetch: 0 threads", FUNCTION, "`dear_wait @")(
    lambda: prefetched(numbers().map(cheap).to_iter_dataset(CALLER).map(dear_wait)).map(cheap)
)
slow("iter.map after thread prefetch: 16 threads", FUNCTION, "`dear @")(
    lambda: prefetched(packed(numbers().map(tokens).to_iter_dataset())).map(cheap).map(dear)
)
slow("iter flat map of many, behind thread prefetch: 16 threads", FUNCTION, "DearWideFlatMap")(
    lambda: prefetched(
        grain.experimental.FlatMapIterDataset(
            numbers().to_iter_dataset().map(modest), DearWideFlatMap()
        ),
        64,
    )
)
# Workers.
slow("map, batch: 2 workers", FUNCTION, "`dear @")(
    lambda: numbers().map(cheap).map(dear).batch(4).to_iter_dataset(WORKERS)
)
slow("map, pack, batch: 2 workers", FUNCTION, "`dear @")(
    lambda: packed(numbers().map(dear).map(tokens).to_iter_dataset(WORKERS)).batch(2)
)
slow("map that waits: 2 workers", FUNCTION, "`very_dear_wait @")(
    lambda: numbers().map(trifling).map(very_dear_wait).to_iter_dataset(WORKERS).batch(2)
)
slow("iter.map, pack: mp_prefetch", FUNCTION, "`dear @")(
    lambda: packed(numbers().to_iter_dataset(CALLER).map(dear).map(tokens)).mp_prefetch(
        MultiprocessingOptions(2)
    )
)
slow("map, iter.map: mp_prefetch of 16 threads", FUNCTION, "`dear @")(
    lambda: (
        numbers()
        .map(dear)
        .to_iter_dataset(MANY)
        .map(cheap)
        .batch(2)
        .mp_prefetch(MultiprocessingOptions(2))
    )
)
slow("iter.map after a map: 2 workers", FUNCTION, "`dear @")(
    lambda: numbers().map(cheap).to_iter_dataset(WORKERS).map(dear)
)
slow("transfer of many objects: 2 workers", "workers", "transfer")(
    lambda: numbers().map(objects).to_iter_dataset(WORKERS)
)
slow("one slow worker: mp_prefetch", "workers", "worker 1")(
    lambda: (
        numbers()
        .to_iter_dataset(CALLER)
        .map(slow_in_worker_1)
        .mp_prefetch(MultiprocessingOptions(2), remember_worker)
    )
)
# Threads in workers, stages that open others there, and threads with shares.
IN_WORKERS = MultiprocessingOptions(2)
slow("iter.map behind thread prefetch: mp_prefetch", FUNCTION, "`dear @")(
    lambda: (
        prefetched(numbers().map(cheap).to_iter_dataset(CALLER).map(dear))
        .map(cheap)
        .mp_prefetch(IN_WORKERS)
    )
)
slow(
    "iter.map that waits behind thread prefetch: mp_prefetch of 1 thread", FUNCTION, "`dear_wait @"
)(
    lambda: (
        prefetched(numbers().map(cheap).to_iter_dataset(ONE).map(dear_wait))
        .map(cheap)
        .mp_prefetch(IN_WORKERS)
    )
)
slow("map of prefetched parts of an interleave: mp_prefetch", FUNCTION, "`dear @")(
    lambda: grain.experimental.InterleaveIterDataset(
        [MapDataset.range(LENGTH).map(dear).to_iter_dataset(CALLER).map(cheap)] * 4,
        cycle_length=2,
        iter_buffer_size=4,
    ).mp_prefetch(IN_WORKERS)
)
slow("map of a prefetched part of iter.mix: mp_prefetch", FUNCTION, "`dear @")(
    lambda: (
        grain.IterDataset.mix(
            [
                prefetched(numbers().to_iter_dataset(CALLER).map(dear)),
                prefetched(numbers().to_iter_dataset(CALLER).map(cheap)),
            ],
            [0.6, 0.4],
        )
        .map(cheap)
        .mp_prefetch(IN_WORKERS)
    )
)
slow("map behind a user's own data set: mp_prefetch", FUNCTION, "`dear @")(
    lambda: (
        CheapBatches(numbers().map(dear).to_iter_dataset(CALLER)).map(cheap).mp_prefetch(IN_WORKERS)
    )
)
slow("iter.map behind a user's own data set and a thread: 0 threads", FUNCTION, "`dear @")(
    lambda: CheapBatches(prefetched(numbers().to_iter_dataset(CALLER).map(dear))).map(cheap)
)
slow("iter.map on threads with shares: 0 threads", FUNCTION, "`dear @")(
    lambda: grain.experimental.multithread_prefetch(
        numbers().map(cheap).to_iter_dataset(CALLER).map(dear), 2, 4
    ).map(cheap)
)
# Mixtures.
slow("map of one part of a mixture: 16 threads", FUNCTION, "`dear @")(
    lambda: MapDataset.mix([numbers().map(dear), numbers().map(cheap)], [0.5, 0.5]).to_iter_dataset(
        MANY
    )
)
# Alike parts share one loop, which has the time of each of their functions.
IN_ALL = {**MODES, "2 workers": WORKERS}
add_in_every_mode(
    "map of the second part of a mixture",
    FUNCTION,
    "`dear @",
    lambda options: MapDataset.mix([numbers().map(cheap), numbers().map(dear)]).to_iter_dataset(
        options
    ),
    modes=IN_ALL,
)
add_in_every_mode(
    "random map of the last part of a concatenation of three",
    FUNCTION,
    "`dear_random @",
    lambda options: MapDataset.concatenate(
        [
            numbers()[:10].random_map(cheap_random, seed=1),
            numbers()[:10].random_map(cheap_random, seed=2),
            numbers().random_map(dear_random, seed=3),
        ]
    ).to_iter_dataset(options),
    modes=IN_ALL,
)
slow("map of one part of iter.mix, pack: 16 threads", FUNCTION, "`dear @")(
    lambda: packed(
        grain.IterDataset.mix(
            [
                numbers().map(dear).map(tokens).to_iter_dataset(),
                numbers().map(cheap).map(tokens).to_iter_dataset(),
            ],
            [0.5, 0.5],
        )
    ).batch(2)
)
slow("map that waits of interleaved parts: 0 threads", FUNCTION, "`dear_wait @")(
    lambda: grain.experimental.InterleaveIterDataset(
        [MapDataset.range(300).map(cheap).map(dear_wait).to_iter_dataset(CALLER)] * 4,
        cycle_length=2,
    ).batch(2)
)
slow("map of interleaved parts, pack: 0 threads", FUNCTION, "`dear @")(
    lambda: packed(
        grain.experimental.InterleaveIterDataset(
            [MapDataset.range(LENGTH).map(dear).to_iter_dataset(CALLER)] * 4, cycle_length=2
        ).map(tokens)
    )
)
slow("map of zipped data sets: 16 threads", FUNCTION, "`dear @")(
    lambda: (
        grain.experimental.ZipMapDataset([numbers().map(dear), numbers().map(cheap)])
        .to_iter_dataset(MANY)
        .batch(4)
    )
)
slow("map of concatenated data sets, window shuffle: 16 threads", FUNCTION, "`dear @")(
    lambda: grain.experimental.WindowShuffleIterDataset(
        MapDataset.concatenate([numbers().map(dear)] * 2).map(cheap).to_iter_dataset(MANY),
        window_size=8,
        seed=0,
    ).batch(4)
)
# Storage.
add_in_every_mode(
    "source that waits, batch",
    "storage",
    "Source",
    lambda options: (
        MapDataset.source(Source(wait, 5))
        .shuffle(seed=0)
        .map(trifling)
        .to_iter_dataset(options)
        .batch(4)
    ),
)
slow("source that waits, pack, batch: 16 threads", "storage", "Source")(
    lambda: packed(MapDataset.source(Source(wait, 4)).map(tokens).to_iter_dataset(MANY)).batch(1)
)
slow("source that computes: 16 threads", FUNCTION, "Source")(
    lambda: MapDataset.source(Source(compute, 2)).map(cheap).to_iter_dataset(MANY).batch(4)
)
# Buckets: storage that is the limit, and storage that is not, as something else is slower.
FEW_READS = {
    "0 threads": ReadOptions(num_threads=0, **FEW),
    "1 thread": ReadOptions(num_threads=1, **FEW),
    "16 threads": ReadOptions(**FEW),
    "2 workers": ReadOptions(num_workers=2, **FEW),
}
SOME_FEW = {mode: FEW_READS[mode] for mode in ("16 threads", "2 workers")}
MANY_READS = {
    "0 threads": ReadOptions(num_threads=0, **SOME),
    "1 thread": ReadOptions(num_threads=1, **SOME),
    "16 threads": ReadOptions(**SOME),
    "2 workers": ReadOptions(num_workers=2, **SOME),
}
SOME_MANY = {mode: MANY_READS[mode] for mode in ("16 threads", "2 workers")}
add_in_every_mode(
    "bucket, batch",
    "storage",
    "",
    lambda options: far().map(trifling).batch(2).to_iter_dataset(options),
    modes=FEW_READS,
)
add_in_every_mode(
    "bucket, iter.map, pack, batch",
    "storage",
    "",
    lambda options: packed(far().to_iter_dataset(options).map(trifling).map(tokens)).batch(1),
    modes={mode: FEW_READS[mode] for mode in ("0 threads", "2 workers")},
)
add_in_every_mode(
    "mixture of a bucket and a near file",
    "storage",
    "",
    lambda options: MapDataset.mix([far(), far(NEAR)], [0.7, 0.3]).to_iter_dataset(options),
    modes=SOME_FEW,
)
add_in_every_mode(
    "mixture of numbers and a bucket",
    "storage",
    "",
    lambda options: MapDataset.mix([numbers(), far()], [0.5, 0.5]).to_iter_dataset(options),
    modes=SOME_FEW,
)
add_in_every_mode(
    "map after a bucket, batch",
    FUNCTION,
    "`very_dear @",
    lambda options: far().map(very_dear).map(cheap).to_iter_dataset(options).batch(2),
    modes=MANY_READS,
)
add_in_every_mode(
    "map after a mixture of a bucket and a near file, pack",
    FUNCTION,
    "`very_dear @",
    lambda options: packed(
        MapDataset.mix([far(), far(NEAR)], [0.5, 0.5])
        .map(very_dear)
        .map(tokens)
        .to_iter_dataset(options),
    ),
    modes=SOME_MANY,
)
slow("bucket, thread prefetch: 16 threads", "storage", "")(
    lambda: prefetched(
        packed(far().map(tokens).to_iter_dataset(FEW_READS["16 threads"])).batch(1)
    ).map(cheap_row)
)
slow("bucket: mp_prefetch", "storage", "")(
    lambda: (
        far()
        .to_iter_dataset(FEW_READS["1 thread"])
        .map(cheap)
        .batch(2)
        .mp_prefetch(MultiprocessingOptions(2))
    )
)
slow("iter.mix of a bucket and a near file: 16 threads", "storage", "")(
    lambda: grain.IterDataset.mix(
        [far().to_iter_dataset(FEW_READS["16 threads"]), far(NEAR).map(cheap).to_iter_dataset()],
        [0.5, 0.5],
    ).batch(2)
)
slow("iter.map after a bucket: 16 threads", FUNCTION, "`very_dear @")(
    lambda: far().map(cheap).to_iter_dataset(MANY_READS["16 threads"]).map(very_dear).batch(2)
)
slow("map that waits, after a bucket: 0 threads", FUNCTION, "`very_dear_wait @")(
    lambda: far().map(very_dear_wait).map(cheap).to_iter_dataset(MANY_READS["0 threads"])
)
slow("map after a bucket: mp_prefetch", FUNCTION, "`very_dear @")(
    lambda: (
        far()
        .map(very_dear)
        .to_iter_dataset(MANY_READS["1 thread"])
        .batch(2)
        .mp_prefetch(MultiprocessingOptions(2))
    )
)
slow("consumer that waits for a bucket's records: 16 threads", "consumer", "", lambda: wait(20))(
    lambda: far().map(cheap).to_iter_dataset(MANY_READS["16 threads"])
)
slow("consumer that computes with a bucket's records: 1 thread", "consumer", "", very_dear_step)(
    lambda: far().map(cheap).to_iter_dataset(MANY_READS["1 thread"])
)
# Consumers.
add_in_every_mode(
    "consumer that waits",
    "consumer",
    "",
    lambda options: numbers().map(cheap).to_iter_dataset(options).batch(2),
    consume=lambda: wait(6),
)
add_in_every_mode(
    "consumer that computes",
    "consumer",
    "",
    lambda options: numbers().map(cheap).to_iter_dataset(options).batch(2),
    consume=lambda: compute(3),
)
slow("consumer that waits for packed batches: 16 threads", "consumer", "", lambda: wait(20))(
    lambda: packed(numbers().map(tokens).to_iter_dataset()).batch(2)
)
slow("consumer that computes, thread prefetch: 16 threads", "consumer", "", lambda: compute(8))(
    lambda: prefetched(packed(numbers().map(tokens).to_iter_dataset()).batch(2))
)
slow("consumer that computes without the lock: 1 thread", "consumer", "", lambda: compress(6))(
    lambda: numbers().map(cheap).to_iter_dataset(ONE).batch(4)
)
slow("consumer that computes: 2 workers", "consumer", "", lambda: compute(4))(
    lambda: numbers().map(cheap).batch(2).to_iter_dataset(WORKERS)
)
# Stages of this package.
slow("batch of large arrays: 16 threads", "stage", "Batch")(
    lambda: numbers().map(image).to_iter_dataset(MANY).batch(8)
)
slow("batch of large arrays: 0 threads", "stage", "Batch")(
    lambda: numbers().map(image).batch(8).to_iter_dataset(CALLER)
)


# --- running them -------------------------------------------------------------------------------


def verdict_of(pipeline, seconds=SECONDS, enough=ENOUGH):
    """What the verdict on `pipeline` is after it ran for `seconds`: its kind and text."""
    with contextlib.closing(iter(pipeline.build())) as iterator:
        next(iterator)
        stop = time.perf_counter() + seconds
        for count, _ in enumerate(iterator):
            if pipeline.consume is not None:
                pipeline.consume()
            if (now := time.perf_counter()) > stop and (count >= enough or now > stop + 3):
                break
        return verdict_on(report_on(iterator))


def is_right(pipeline, verdict):
    """Whether `verdict` names what makes `pipeline` slow."""
    return verdict.kind in pipeline.kinds.split() and bool(re.search(pipeline.names, verdict.text))


def _burn():
    while True:
        _loop(10_000)


@contextlib.contextmanager
def busy_processes(count):
    """Runs `count` processes that compute beside."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--texts", action="store_true", help="show right verdicts, too")
    options = parser.parse_args()
    chosen = [p for p in TABLE if all(name in p.name for name in options.names)]
    began = time.perf_counter()
    right = dict.fromkeys((p.name for p in chosen), 0)
    of_runs = []
    with far_bucket(), busy_processes(options.busy):
        for _ in range(options.runs):
            wrong = 0
            for pipeline in chosen:
                verdict = verdict_of(pipeline, options.seconds)
                is_ok = is_right(pipeline, verdict)
                right[pipeline.name] += is_ok
                wrong += not is_ok
                if options.texts or not is_ok:
                    print(
                        "ok   " if is_ok else "WRONG",
                        f"{pipeline.name}\n      {verdict.kind}: {verdict.text[:200]}",
                    )
            of_runs.append(len(chosen) - wrong)
    print(f"right of {len(chosen)}: {of_runs}; {time.perf_counter() - began:.1f} s")
    for name, count in right.items():
        print(f"{count:3} of {options.runs}  {name}")


if __name__ == "__main__":
    main()
