"""Where the time of a pipeline goes: counts, waits, and the stage that holds it back."""

import gc
import io
import itertools
import json
import random
import time

import effort
import numpy as np
import pytest

import grainmill as grain
from grainmill import MapDataset, MultiprocessingOptions, ReadOptions
from grainmill._dataset.views.statistics import asked_verdict, report_on
from grainmill._evaluate import fused, fused_blocks
from grainmill._iterators import metering
from grainmill._stats import meters, users_iterators
from grainmill._stats.meters import LoopMeter, StageMeter
from grainmill._stats.recorded import StageReport
from grainmill._stats.verdict import _computes, verdict_on
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

CALLER = ReadOptions(num_threads=0)


def sleeping(x):
    time.sleep(0.005)
    return x


def computing(x):
    stop = time.thread_time() + 0.001  # short, so that some call is not preempted
    while time.thread_time() < stop:
        pass
    return x


def kind_of(iterator):
    return verdict_on(report_on(iterator)).kind


def stage_named(stats, name):
    (stage,) = [stage for stage in stats["stages"] if stage["name"].startswith(name)]
    return stage


def drained(dataset):
    iterator = iter(dataset)
    for _ in iterator:
        pass
    return iterator


class Copies(grain.experimental.FlatMapTransform):
    max_fan_out = 40

    def __init__(self, count):
        self.count = count

    def flat_map(self, x):
        return [x] * self.count


# --- what the statistics contain --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(effort.SEED, effort.SEED + effort.cases(20, 400)))
def test_pulls_that_are_timed_stand_for_the_elements_of_all(seed):
    """Whatever number of elements a pull has, and from however many pulls those of a block are."""
    rng = random.Random(seed)
    fan_out, size = rng.choice([1, 3, 40]), rng.choice([1, 4, 64])
    ds = MapDataset.range(10**6).to_iter_dataset(rng.choice([CALLER, ReadOptions()]))
    ds = grain.experimental.FlatMapIterDataset(ds, Copies(fan_out))
    if rng.random() < 0.7:
        ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=size)
    iterator = iter(ds)
    delivered = rng.randrange(200, 4000)
    for _ in range(delivered):
        next(iterator)
    ahead = 2 * (fan_out + size)
    elements = stage_named(iterator.stats(), "FlatMap")["elements"]
    assert 0.9 * delivered - ahead <= elements <= 1.1 * delivered + ahead
    iterator.close()


def test_statistics_of_every_stage_are_there_without_switching_anything_on():
    ds = MapDataset.range(60).shuffle(seed=1).map(sleeping).to_iter_dataset(CALLER)
    iterator = drained(ds.filter(lambda x: x % 2).batch(3))
    stats = json.loads(json.dumps(iterator.stats()))
    names = [stage["name"].split("(")[0] for stage in stats["stages"]]
    assert names == [
        "BatchDatasetIterator",
        "FilterDatasetIterator",
        "PrefetchDatasetIterator",
        "MapMapDataset",
        "ShuffleMapDataset",
        "RangeMapDataset",
    ]
    assert [stage["inputs"] for stage in stats["stages"]] == [[1], [2], [3], [4], [5], []]
    assert stats["elements"] == 10
    assert stage_named(stats, "PrefetchDatasetIterator")["elements"] == 60
    mapped = stage_named(stats, "MapMapDataset")
    assert mapped["elements"] == 60
    assert 60 * 0.005 <= mapped["time_s"] <= stats["elapsed_s"]
    assert 0.005 <= mapped["min_s"] <= mapped["max_s"]
    assert mapped["wait_share"] > 0.5
    assert mapped["cpu_share"] < 0.5
    assert 60 * 0.005 <= stats["consumer_wait_s"] <= stats["elapsed_s"]


def test_shares_of_waiting_add_up_to_one():
    iterator = drained(MapDataset.range(50).map(sleeping).to_iter_dataset().batch(2))
    shares = [stage["wait_share"] for stage in iterator.stats()["stages"]]
    assert sum(shares) == pytest.approx(1, abs=0.01)


def test_times_of_steps_in_one_loop_are_told_apart():
    def shorter(x):
        time.sleep(0.001)
        return x

    ds = MapDataset.range(80).map(shorter).map(sleeping).to_iter_dataset(CALLER)
    first, second = [
        stage for stage in drained(ds).stats()["stages"] if stage["name"].startswith("MapMap")
    ]
    assert first["time_s"] > 1.3 * second["time_s"]  # the output first


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_timed_calls_stand_for_the_elements_of_calls_of_any_length(seed, counts):
    """The calls of a pipeline get longer as it goes on, and short at the end of a batch."""
    chosen = random.Random(seed)
    stage = StageMeter()
    meter = LoopMeter([stage], 0.01, lambda _: 0, None, counts=counts)
    num_elements, element_s = 0, 1e-3 * (1 + 1j)
    for call in range(200):
        count = 1 if call == 0 else chosen.choice([1, 2, 16, 50, 1000])
        num_elements += count
        if meter.timer.countdown > 0:
            meter.pass_over(count)
        else:
            times = meter.start()
            times.of_steps[0].append(element_s)
            of_call, cost_s = element_s * count, chosen.choice([0.0, 1e-3, 1e-2])
            started_s = time.perf_counter() - of_call.real - cost_s
            meter.record(times, [None] * count, of_call, started_s)
        if chosen.random() < 0.5:
            continue
        meter.update()
        assert stage.elements == pytest.approx(num_elements)
        assert stage.total_s == pytest.approx(num_elements * 1e-3, rel=0.05)
        assert stage.cpu_s == pytest.approx(num_elements * 1e-3, rel=0.05)


def test_delivered_elements_are_counted_wherever_the_iterator_stands():
    iterator = iter(MapDataset.range(100).to_iter_dataset().filter(lambda x: x % 3))
    for count in range(1, 40):
        next(iterator)
        assert iterator.stats()["elements"] == count


def test_reads_of_files_are_counted(tmp_path):
    path = tmp_path / "records.array_record"
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for number in range(200):
            writer.write(bytes(2000 + number))
    ds = MapDataset.source(ArrayRecordDataSource(str(path))).map(len)
    for options in (CALLER, ReadOptions(num_workers=2)):
        storage = drained(ds.to_iter_dataset(options)).stats()["storage"]
        if options.num_workers:  # the last tasks of a worker may not be reported
            assert storage["reads"] > 0
            continue
        assert 1 <= storage["reads"] <= 400  # neighbouring records are read together
        assert 200 * 2100 <= storage["bytes"] <= 300 * 2600
        assert storage["mean_latency_s"] > 0


def test_workers_report_their_stages():
    read = MapDataset.range(120).map(sleeping).to_iter_dataset(ReadOptions(num_workers=2))
    shards = MapDataset.range(120).to_iter_dataset().map(sleeping)
    for ds in (read, shards.mp_prefetch(MultiprocessingOptions(2))):
        stats = drained(ds).stats()
        output = stats["stages"][0]
        assert [worker["worker"] for worker in output["workers"]] == [0, 1]
        assert all(0 < worker["busy_share"] <= 1 for worker in output["workers"])
        mapped = next(stage for stage in stats["stages"] if stage["name"].startswith("Map"))
        assert mapped["elements"] == 120 if ds is read else 0 < mapped["elements"] <= 120
        assert mapped["time_s"] > 0.99 * mapped["elements"] * 0.005
        assert mapped["wait_share"] > 0.5


def test_datasets_of_an_interleave_are_one_row():
    parts = [MapDataset.range(20).map(sleeping).to_iter_dataset(CALLER) for _ in range(5)]
    stats = drained(grain.experimental.InterleaveIterDataset(parts, cycle_length=2)).stats()
    assert len(stats["stages"]) == 4
    mapped = stage_named(stats, "MapMapDataset")
    assert mapped["elements"] == 100
    assert mapped["wait_share"] > 0.5
    assert stats["consumer_wait_s"] >= 100 * 0.005


class Own(grain.IterDataset):
    def __iter__(self):
        return OwnIterator(self._parent.__iter__())


class OwnIterator(grain.DatasetIterator):
    def __next__(self):
        with self._stats.record_self_time():
            return next(self._parent)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


def prefetched(ds):
    return grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=3)


class PrefetchedByItself(grain.IterDataset):
    def __iter__(self):
        parent = self._parent.__iter__()
        return grain.experimental.ThreadPrefetchDatasetIterator(parent, 3)


# What stages are around others, whose times must not get lost.
AROUND = {
    "map": lambda ds: ds.map(lambda x: x),
    "thread": prefetched,
    "threads": lambda ds: grain.experimental.multithread_prefetch(ds, 2, 3),
    "own": Own,
    "own thread": PrefetchedByItself,
    "interleave": lambda ds: grain.experimental.InterleaveIterDataset([ds] * 4, cycle_length=2),
    "prefetched parts": lambda ds: grain.experimental.InterleaveIterDataset(
        [ds.map(lambda x: x)] * 4, cycle_length=2, iter_buffer_size=3
    ),
    "mix": lambda ds: grain.IterDataset.mix([prefetched(ds), prefetched(ds)]),
    "batch": lambda ds: ds.batch(1).map(lambda x: x[0]),
}


def nested(seed):
    """Stages around stages that run a function, on threads and in workers; and their names."""
    rng = random.Random(seed)
    read = ReadOptions(num_threads=rng.choice([0, 1, 4]))
    ds = MapDataset.range(64).map(computing).to_iter_dataset(read).map(sleeping)
    names = [rng.choice(list(AROUND)) for _ in range(rng.choice([1, 2, 2, 3]))]
    for name in names:
        ds = AROUND[name](ds)
    if rng.random() < 0.7:
        ds = ds.mp_prefetch(MultiprocessingOptions(2))
        names.append("mp_prefetch")
    return ds.map(lambda x: x), names


@pytest.mark.parametrize("seed", range(effort.SEED, effort.SEED + effort.cases(12, 300)))
def test_functions_are_timed_wherever_they_run(seed):
    """Inside of stages that open others while they run, on threads, in workers, in any order."""
    ds, names = nested(seed)
    iterator = iter(ds)
    for _ in range(60):
        next(iterator)
    report = report_on(iterator)
    for function, least_s in ((computing, 0.0009), (sleeping, 0.005)):
        found = [
            stage for stage in report.stages if getattr(stage.node, "transform", None) is function
        ]
        assert found, names
        for stage in found:
            assert stage.meter.elements >= 10, (function, names)
            assert stage.meter.total_s / stage.meter.elements >= 0.9 * least_s, (function, names)
    assert abs(sum(stage.wait_share for stage in report.stages) - 1) < 1e-9, names
    assert iterator.verdict(), names
    iterator.close()
    assert iterator.stats()["stages"], names


def test_iterators_that_were_not_looked_at_before_they_were_closed_have_statistics():
    ds = MapDataset.range(10).map(computing).to_iter_dataset(ReadOptions(num_threads=1))
    iterator = iter(grain.experimental.InterleaveIterDataset([ds] * 3, cycle_length=1))
    first = next(iterator)
    iterator.close()
    gc.collect()
    assert first == 0
    assert stage_named(iterator.stats(), "MapMapDataset")["elements"] > 0
    assert iterator.verdict()


def test_statistics_of_a_thread_around_an_iterator_are_those_of_that():
    prefetching = grain.experimental.ThreadPrefetchDatasetIterator
    parent = iter(MapDataset.range(8).map(computing).to_iter_dataset(CALLER))
    iterator = prefetching(parent, 2)
    assert list(iterator) == list(range(8))  # to the end: until then, its thread changes them
    assert stage_named(iterator.stats(), "MapMapDataset")["elements"] == 8
    assert iterator.verdict() == parent.verdict()
    for method in ("stats", "verdict"):
        with pytest.raises(NotImplementedError, match="reads from no iterator"):
            getattr(prefetching(iter([1]), 1), method)()


def test_prefetching_threads_are_told_from_the_consumer():
    ds = MapDataset.range(60).to_iter_dataset(CALLER).map(sleeping).batch(2)
    iterator = drained(grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2))
    stats = iterator.stats()
    assert stats["stages"][0]["is_prefetch"]
    assert stats["stages"][0]["wait_s"] > 0.1
    assert stage_named(stats, "MapDatasetIterator")["wait_share"] > 0.8


SLEPT = {"recorded": 0.0, "unrecorded": 0.0}


class Timed(grain.IterDataset):
    def __iter__(self):
        return TimedIterator(self._parent.__iter__())


class TimedIterator(grain.DatasetIterator):
    def __next__(self):
        element = next(self._parent)
        began = time.perf_counter()
        time.sleep(0.002)
        recorded = time.perf_counter()
        with self._stats.record_self_time():
            time.sleep(0.003)
            SLEPT["unrecorded"] += recorded - began
            SLEPT["recorded"] += time.perf_counter() - recorded
            return self._stats.record_output_spec(element)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


def test_users_iterator_reports_its_own_time():
    ds = Timed(MapDataset.range(40).map(sleeping).to_iter_dataset(CALLER)).map(lambda x: x)
    SLEPT.update(recorded=0.0, unrecorded=0.0)
    stats = drained(ds).stats()
    time_s = stage_named(stats, "Timed")["time_s"]
    assert 40 * 0.003 <= time_s < SLEPT["recorded"] + SLEPT["unrecorded"] / 2
    assert stage_named(stats, "MapMapDataset")["time_s"] >= 40 * 0.005


CLOCK = {"now_s": 0.0}


class Ticks(grain.IterDataset):
    """Its iterator takes time only of `CLOCK`, which `own_s` adds up."""

    def __init__(self, parent, seed, kind):
        super().__init__(parent)
        self.seed, self.kind = seed, kind
        self.own_s = 0.0

    def __iter__(self):
        return self.kind(self._parent.__iter__(), self)

    def tick(self, seconds):
        self.own_s += seconds
        CLOCK["now_s"] += seconds


class TicksIterator(grain.DatasetIterator):
    """Calls its parent at any time: several times for an element, or not at all."""

    def __init__(self, parent, dataset):
        super().__init__(parent)
        self._dataset = dataset
        self._random = random.Random(dataset.seed)
        self._ready = []

    def __next__(self):
        while True:
            self._dataset.tick(self._random.random())
            if self._ready:
                return self._ready.pop()
            for _ in range(self._random.randrange(4)):
                self._ready.append(next(self._parent))
                self._dataset.tick(self._random.random())

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


class TicksWithSlots(TicksIterator):
    __slots__ = ("more",)


class TicksOfAFamily(TicksIterator):
    def __init_subclass__(cls, *, name="", **options):
        super().__init_subclass__(**options)


class TicksOfNoOtherClass(TicksIterator):
    def __init_subclass__(cls):
        raise TypeError("it is complete")


class TicksOverOwn(TicksIterator):
    """Takes elements from another iterator that is no data set's, whose time is its own, too."""

    def __init__(self, parent, dataset):
        super().__init__(TicksIterator(parent, dataset), dataset)


@pytest.fixture
def timed_by_ticks(monkeypatch):
    """Makes statistics take the time from `CLOCK`, and time all calls."""
    grain.config.update("py_debug_mode", value=True)
    for module in (metering, users_iterators, meters, fused, fused_blocks):
        monkeypatch.setattr(module, "both_clocks", lambda: CLOCK["now_s"] * (1 + 1j))
    monkeypatch.setattr(meters, "reading_cost", lambda: 0j)
    yield
    grain.config.update("py_debug_mode", value=False)


@pytest.mark.usefixtures("timed_by_ticks")
@pytest.mark.parametrize("seed", range(effort.SEED, effort.SEED + effort.cases(30, 1000)))
def test_users_datasets_have_their_own_times_exactly(seed):
    """Directly over each other, or with stages between them."""
    rng = random.Random(seed)
    ds = MapDataset.range(100_000).to_iter_dataset(CALLER)
    own = []
    kinds = [TicksIterator, TicksWithSlots, TicksOfAFamily]
    for _ in range(rng.randrange(1, 5)):
        ds = Ticks(ds, rng.random(), rng.choice(kinds))
        own.append(ds)
        if rng.random() < 0.3:
            ds = rng.choice([ds.map(lambda x: x), ds.filter(np.any), ds.batch(2)])
    with iter(ds.map(lambda x: x)) as iterator:
        for _ in range(rng.randrange(1, 30)):
            next(iterator)
        stages = report_on(iterator).stages
    found = {stage.node.dataset: stage.meter for stage in stages if stage.name.startswith("Ticks")}
    for dataset in own:
        assert found[dataset].total_s == pytest.approx(dataset.own_s), seed
        assert found[dataset].cpu_s == pytest.approx(dataset.own_s), seed


class InTasks(grain.experimental.FlatMapTransform):
    """Elements come in tasks of 16, of which the first one has to be waited for."""

    max_fan_out = 15

    def flat_map(self, x):
        CLOCK["now_s"] += 0.002 * (x % 2 == 0)
        return [x] * (1 if x % 2 == 0 else 15)


def test_pulls_that_wait_for_many_elements_are_not_timed_more_often(monkeypatch):
    def read():
        CLOCK["now_s"] += 3e-6
        return CLOCK["now_s"]

    started = []
    start = metering.PullMeter._start
    monkeypatch.setattr(metering.PullMeter, "_start", lambda self: (started.append(1), start(self)))
    monkeypatch.setattr(metering, "clock_s", read)
    monkeypatch.setattr(metering, "both_clocks", lambda: read() * (1 + 1j))
    monkeypatch.setattr(metering, "reading_cost_s", lambda: 3e-6)
    ds = MapDataset.range(2000).to_iter_dataset(CALLER)
    with iter(grain.experimental.FlatMapIterDataset(ds, InTasks())) as iterator:
        assert len(list(iterator)) == 16_000
    assert 10 < len(started) < 300  # of 2,000


class TickingFunction:
    """Takes time only of `CLOCK`, which `own_s` adds up."""

    def __init__(self, seed, keeps=1.0):
        self.random, self.keeps, self.own_s = random.Random(seed), keeps, 0.0

    def __call__(self, *_):
        seconds = self.random.choice([0.0, 0.1, 5.0]) * self.random.random()
        self.own_s += seconds
        CLOCK["now_s"] += seconds
        return 1 if self.keeps == 1 else self.random.random() < self.keeps


def ticking_map(ds, function):
    return ds.map(function)


def ticking_map_with_index(ds, function):
    return ds.map_with_index(function)


def ticking_filter(ds, function):
    function.keeps = 0.7
    return ds.filter(function)


def ticking_random_map(ds, function):
    return ds.random_map(function, seed=1)


@pytest.mark.usefixtures("timed_by_ticks")
@pytest.mark.parametrize("seed", range(effort.SEED, effort.SEED + effort.cases(30, 1000)))
def test_functions_of_datasets_that_share_a_loop_have_their_own_times(seed):
    """But for the first calls, of which single elements are timed."""
    rng = random.Random(seed)
    kinds = [ticking_map, ticking_map_with_index, ticking_filter, ticking_random_map]
    chain = rng.choices(kinds, k=rng.randrange(1, 4))
    functions, parts = [], []
    for number in range(rng.randrange(1, 5)):
        ds = MapDataset.range(1000 * number, 1000 * number + rng.choice([3, 30, 1000]))
        for kind in chain:
            functions.append(TickingFunction(rng.random()))
            ds = kind(ds, functions[-1])
        parts.append(ds)
    join = rng.choice([MapDataset.mix, MapDataset.concatenate])
    with iter(join(parts).repeat().to_iter_dataset(CALLER)) as iterator:
        for _ in range(rng.randrange(400, 600)):
            next(iterator)
        stages = report_on(iterator).stages
    # In proportion: the time of all is that of blocks, by a real clock.
    found = {
        of_stage.node.transform: of_stage.meter.total_s
        for of_stage in stages
        if hasattr(of_stage.node, "transform")
    }
    whole, all_s = sum(found.values()), sum(function.own_s for function in functions)
    for function in functions:
        assert found[function] / whole == pytest.approx(function.own_s / all_s, abs=0.05), seed


@pytest.mark.usefixtures("timed_by_ticks")
def test_time_of_an_iterator_that_is_no_datasets_is_that_of_the_one_that_calls_it():
    below = Ticks(MapDataset.range(1000).to_iter_dataset(CALLER), 1, TicksIterator)
    above = Ticks(below.map(lambda x: x), 2, TicksOverOwn)
    with iter(above.map(lambda x: x)) as iterator:
        for _ in range(20):
            next(iterator)
        stages = report_on(iterator).stages
    found = [stage.meter.total_s for stage in stages if stage.name.startswith("Ticks")]
    assert found == pytest.approx([above.own_s, below.own_s])


def test_users_iterators_are_of_their_own_class_between_calls():
    kinds = (TicksIterator, TicksWithSlots)
    lowest = Ticks(MapDataset.range(1000).to_iter_dataset(CALLER), 1, TicksOfNoOtherClass)
    below = Ticks(lowest, 1, kinds[0])
    opened = []

    def keep(parent, dataset):
        opened.append(kinds[1](parent, dataset))
        return opened[0]

    for _ in itertools.islice(Ticks(below, 2, keep).map(lambda x: x), 200):
        assert isinstance(opened[0]._parent, kinds[0])
        assert type(opened[0]) is kinds[1]
        assert type(opened[0]._parent) is kinds[0]


def test_statistics_of_a_users_iterator_are_those_of_what_it_reads():
    iterator = iter(Timed(MapDataset.range(4).to_iter_dataset()))
    list(iterator)
    assert iterator.stats()["elements"] == 4
    with pytest.raises(NotImplementedError, match="reads from no iterator"):
        TimedIterator(()).stats()


class OutspokenIterator(TimedIterator):
    def verdict(self):
        return "mine"


class OwnVerdictIterator(TimedIterator):
    def verdict(self, **options):
        return str(options)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(OutspokenIterator, "mine"), (OwnVerdictIterator, "{'has_consumer': False}")],
)
def test_a_users_verdict_may_leave_the_argument_out(kind, said):
    own = kind(iter(MapDataset.range(4).to_iter_dataset()))
    assert asked_verdict(own, has_consumer=False) == said
    around = TimedIterator(own)
    assert around.verdict(has_consumer=False) == said


def test_loader_has_statistics():
    sampler = grain.samplers.SequentialSampler(6)
    iterator = iter(grain.DataLoader(data_source=range(6), sampler=sampler))
    list(iterator)
    assert iterator.stats()["elements"] == 6
    assert iterator.verdict()


def test_positions_and_elements_do_not_depend_on_tracking():
    def ds():
        mapped = MapDataset.range(500).shuffle(3).map(lambda x: x * 3).filter(lambda x: x % 2)
        return mapped.to_iter_dataset().map(lambda x: x + 1).filter(lambda x: x % 5).batch(7)

    def run():
        iterator = iter(ds())
        return [(batch.tolist(), iterator.get_state()) for batch in iterator]

    untracked = run()
    grain.config.update("py_debug_mode", value=True)
    try:
        assert run() == untracked
    finally:
        grain.config.update("py_debug_mode", value=False)


def tracked(ds):
    """All its pulls are timed."""
    options = grain.experimental.DatasetOptions(
        execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING
    )
    return grain.experimental.WithOptionsIterDataset(ds, options)


def test_stage_timing_counts_all_elements():
    read = MapDataset.range(3000).map(lambda x: x + 1).to_iter_dataset(CALLER)
    maps = read.map(lambda x: x).map(lambda x: x).batch(4)
    filters = read.map(lambda x: x).filter(lambda x: x % 2).map(lambda x: x).filter(lambda x: x % 3)

    def counts(ds):
        stats = drained(tracked(ds)).stats()
        return [stage["elements"] for stage in stats["stages"]]

    assert counts(maps) == [750, 3000, 3000, 3000, 3000, 3000]
    assert counts(filters) == [1000, 1500, 1500, 3000, 3000, 3000, 3000]


def test_failure_in_a_timed_call_names_its_stage():
    def failing(x):
        if x == 7:
            raise ValueError("seven")
        return x

    for ds in (
        MapDataset.range(20).map(lambda x: x).map(failing).to_iter_dataset(CALLER),
        MapDataset.range(20).to_iter_dataset(CALLER).map(lambda x: x).map(failing),
    ):
        with pytest.raises(ValueError, match="seven") as caught:
            list(ds)
        assert "failing" in "".join(caught.value.__notes__)


# --- verdicts: pipelines that are slow on purpose ---------------------------------------------


def test_nothing_is_said_before_the_first_element():
    assert kind_of(iter(MapDataset.range(3).to_iter_dataset())) == "nothing"


def test_slow_consumer():
    iterator = iter(MapDataset.range(30).map(lambda x: x).to_iter_dataset().batch(2))
    for _ in iterator:
        time.sleep(0.02)
    assert kind_of(iterator) == "consumer"
    assert "the consumer holds the pipeline back" in iterator.verdict()


@pytest.mark.parametrize("threads", [0, 16])
def test_function_that_waits(threads):
    read = ReadOptions(num_threads=threads, prefetch_buffer_size=max(1, threads))
    ds = MapDataset.range(64 * max(1, threads)).map(sleeping).map(lambda x: x)
    iterator = drained(ds.to_iter_dataset(read))
    assert kind_of(iterator) == "function"
    assert "`sleeping" in iterator.verdict()
    assert "num_threads" in iterator.verdict()


@pytest.mark.parametrize(("cpu_s", "computes"), [(0.001, False), (0.006, False), (0.019, True)])
def test_functions_that_wait_in_16_threads_are_bound_by_the_lock_once_they_need_it(cpu_s, computes):
    """They wait at the same time: what they compute of the time of one call says little."""
    meter = StageMeter()
    meter.add(64, 64 * 0.005 + cpu_s, cpu_s)
    meter.min_s = 0.005
    stage = StageReport(0, None, [], meter, cost_s=64 * 0.005 / 16, lanes=16)
    assert _computes(stage) == computes


@pytest.mark.parametrize("threads", [0, 4])
def test_what_the_pipeline_computes_while_it_is_asked_is_not_the_consumers(threads):
    read = ReadOptions(num_threads=threads, prefetch_buffer_size=max(1, threads))
    ds = MapDataset.range(300).map(sleeping if threads else computing).to_iter_dataset(read)
    iterator, end, asking_s = iter(tracked(ds)), object(), 0.0
    element = None
    while element is not end:
        started_s = time.thread_time()
        element = next(iterator, end)
        asking_s += time.thread_time() - started_s
    assert report_on(iterator).consumer_s < asking_s / 2


def test_function_that_computes_in_the_caller():
    iterator = drained(MapDataset.range(200).map(computing).to_iter_dataset(CALLER))
    assert kind_of(iterator) == "function"
    assert "`computing" in iterator.verdict()
    assert "num_workers" in iterator.verdict()


def test_function_on_the_consumers_thread():
    iterator = drained(MapDataset.range(50).to_iter_dataset().map(sleeping).batch(5))
    assert kind_of(iterator) == "function"
    assert "`sleeping" in iterator.verdict()
    assert "mp_prefetch" in iterator.verdict()


def test_threads_that_wait_for_the_interpreter_lock():
    iterator = drained(MapDataset.range(400).map(computing).to_iter_dataset())
    assert kind_of(iterator) == "lock"
    assert "`computing" in iterator.verdict()


def test_function_in_workers():
    read = ReadOptions(num_workers=2)
    iterator = drained(MapDataset.range(300).map(sleeping).batch(4).to_iter_dataset(read))
    assert kind_of(iterator) == "function"
    assert "`sleeping" in iterator.verdict()
    assert "workers are busy" in iterator.verdict()


WORKER = {}


def remember_worker(worker, _):
    WORKER["number"] = worker


def slow_in_worker_1(x):
    time.sleep(0.025 if WORKER["number"] == 1 else 0.002)
    return x


def test_one_slow_worker():
    shards = MapDataset.range(80).to_iter_dataset().map(slow_in_worker_1)
    iterator = drained(shards.mp_prefetch(MultiprocessingOptions(2), remember_worker))
    assert kind_of(iterator) == "workers"
    assert "worker 1 holds the pipeline back" in iterator.verdict()


def test_workers_are_compared_by_what_elements_cost_not_by_what_was_prefetched():
    """Where one waits for a core for long, the other one's thread computes its elements ahead."""
    read = ReadOptions(num_threads=1)
    ds = MapDataset.range(80).map(sleeping).to_iter_dataset(read)
    iterator = drained(ds.mp_prefetch(MultiprocessingOptions(2)))
    recorder, node = iterator._recorder, iterator._node
    for worker, found in recorder.reports_of(node).items():
        busy_s = (0.0005, 0.006)[worker] * found.elements
        recorder.report(
            node, worker, found._replace(busy_s=busy_s, alive_s=busy_s, ready_s=found.cpu_s)
        )
    assert kind_of(iterator) == "function", iterator.verdict()


class SlowSource:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.005)
        return index


def test_slow_storage_of_a_users_source():
    ds = MapDataset.source(SlowSource()).map(lambda x: x + 1).to_iter_dataset(CALLER)
    iterator = drained(ds)
    assert kind_of(iterator) == "storage"
    assert "SlowSource" in iterator.verdict()


class SlowFiles:
    """Files whose reads take long, as `RecordFiles` counts them."""

    def __init__(self):
        self.totals = (0, 0, 0, 0.0)

    def read(self, num_bytes, elapsed_s):
        reads, total, timed, timed_s = self.totals
        self.totals = (reads + 1, total + num_bytes, timed + 1, timed_s + elapsed_s)


def test_slow_storage_of_files():
    """What the engine reports of slow reads: their number, and how long blocks waited for them."""
    ds = MapDataset.source([1, 2, 3]).map(lambda x: x).to_iter_dataset(CALLER)
    iterator = drained(ds)
    files = SlowFiles()
    iterator._recorder.watch_files(files, lambda: files.totals)
    for _ in range(50):
        files.read(4096, 0.02)
    (read,) = iterator._recorder.reads
    read.computed(0.01, 1.0, 0.01)
    iterator._activity._started_s -= 1.1
    assert kind_of(iterator) == "storage"
    assert "50 reads of 4 KiB took 20.0 ms each" in iterator.verdict()


# --- the progress bar -------------------------------------------------------------------------


def test_progress_bar_shows_the_count_and_passes_methods_on():
    bar = io.StringIO()
    iterator = iter(MapDataset.range(10).to_iter_dataset())
    shown = grain.progress(iterator, total=10, file=bar)
    assert [next(shown) for _ in range(4)] == [0, 1, 2, 3]
    state = shown.get_state()
    assert list(shown) == [4, 5, 6, 7, 8, 9]
    assert bar.getvalue().rstrip(" \n").endswith("waiting]")
    assert bar.getvalue().endswith("\n")
    last = bar.getvalue().split("\r")[-1]
    assert last.startswith("100% |########################| 10/10 [")
    shown.set_state(state)
    assert next(shown) == 4
    assert shown.stats()["elements"] >= 10


def test_progress_of_a_dataset_knows_its_length():
    bar = io.StringIO()
    assert len(list(grain.progress(MapDataset.range(7), file=bar))) == 7
    assert "7/7" in bar.getvalue()
    endless = grain.progress(MapDataset.range(7).to_iter_dataset(), file=bar)
    assert len(list(endless)) == 7


def test_progress_ends_its_line_on_a_failure():
    def failing():
        yield 1
        raise ValueError("late")

    bar = io.StringIO()
    with pytest.raises(ValueError, match="late"):
        list(grain.progress(failing(), file=bar))
    assert bar.getvalue().endswith("\n")


def test_progress_in_a_notebook_uses_its_display(monkeypatch):
    shown = []

    class Display:
        def update(self, content, *, raw):
            assert raw
            shown.append(content["text/plain"])

    class ZMQInteractiveShell:
        pass

    class Notebook:
        get_ipython = staticmethod(ZMQInteractiveShell)

    class DisplayModule:
        @staticmethod
        def display(content, *, raw, display_id):
            assert content == {"text/plain": ""}
            assert raw
            assert display_id
            return Display()

    monkeypatch.setitem(__import__("sys").modules, "IPython", Notebook)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", DisplayModule)
    bar = io.StringIO()
    assert list(grain.progress([1, 2, 3], file=bar)) == [1, 2, 3]
    assert "3/3" in shown[-1]
    assert not bar.getvalue()


def test_arrays_count_their_bytes():
    ds = MapDataset.range(40).map(lambda _: np.zeros(100, np.int64)).to_iter_dataset(CALLER)
    assert stage_named(drained(ds).stats(), "MapMapDataset")["bytes"] == 40 * 800
