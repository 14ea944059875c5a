"""`__getitems__` of sources and datasets is called with many positions at once."""

import threading
import time

import numpy as np
import pytest
from under_test import INLINE, experimental, grain

from grainmill._dataset.iter_dataset import node_of
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.executor import Pace
from grainmill._loader.records import SampledRecords

pytestmark = pytest.mark.better_than_grain("Grain asks for one element at a time")

N = 256


class Listed:
    """The numbers from `first` on; records the requested positions."""

    def __init__(self, first=0, length=N, *, failing=(), seconds=0.0):
        self.first, self.length, self.failing, self.seconds = first, length, set(failing), seconds
        self.lists, self.singles = [], []

    def __len__(self):
        return self.length

    def _element(self, index):
        if index in self.failing:
            raise KeyError(index)
        return self.first + index

    def __getitem__(self, index):
        self.singles.append(index)
        return self._element(index)

    def __getitems__(self, indices):
        assert type(indices) is list
        assert all(type(index) is int for index in indices)
        self.lists.append(list(indices))
        time.sleep(self.seconds)
        return [self._element(index) for index in indices]


class ListedDataset(grain.MapDataset):
    """A user's own dataset, a source or over another one."""

    def __init__(self, parent=(), length=N):
        super().__init__(parent)
        self.length, self.lists, self.singles = length, [], []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        self.singles.append(index)
        return self._parent[index] if self.parents else index % self.length

    def __getitems__(self, indices):
        self.lists.append(list(indices))
        if self.parents:
            return self._parent.__getitems__(indices)
        return [index % self.length for index in indices]


class Pieces(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, -element]


def source_of(asked):
    return asked if isinstance(asked, grain.MapDataset) else grain.MapDataset.source(asked)


class Selection(grain.DatasetSelectionMap if hasattr(grain, "DatasetSelectionMap") else object):
    def __len__(self):
        return 2 * N

    def __getitem__(self, index):
        return index % 2, index // 2


PLANS = {
    "alone": lambda ds: ds,
    "map": lambda ds: ds.map(abs),
    "shuffle": lambda ds: ds.shuffle(seed=1),
    "repeat": lambda ds: ds.repeat(2),
    "slice": lambda ds: ds[3 : N - 5 : 2],
    "random_map": lambda ds: ds.random_map(lambda x, rng: x + int(rng.integers(3)), seed=1),
    "window_shuffle": lambda ds: experimental.WindowShuffleMapDataset(ds, window_size=9, seed=1),
    "mix": lambda ds: grain.MapDataset.mix([ds, grain.MapDataset.range(N)]),
    "mix_of_alike": lambda ds: grain.MapDataset.mix([ds, source_of(Listed(1000))]),
    "concatenate": lambda ds: grain.MapDataset.concatenate([ds, grain.MapDataset.range(N)]),
    "concatenate_of_alike": lambda ds: grain.MapDataset.concatenate([ds, source_of(Listed(7))]),
    "zip": lambda ds: experimental.ZipMapDataset([ds, grain.MapDataset.range(len(ds))]),
    "select": lambda ds: grain.MapDataset.select_from_datasets(
        [ds, grain.MapDataset.range(N)], Selection()
    ),
    "flat_map": lambda ds: experimental.FlatMapMapDataset(ds, Pieces()),
    "batch": lambda ds: ds.batch(64),
    "batch_fn": lambda ds: ds.batch(64, batch_fn=sum),
}

READ = {
    "caller": grain.ReadOptions(num_threads=0, prefetch_buffer_size=64),
    "threads": grain.ReadOptions(num_threads=2, prefetch_buffer_size=64),
}


def plain(element):
    return element.tolist() if hasattr(element, "tolist") else element


@pytest.mark.parametrize("options", READ)
@pytest.mark.parametrize("make", [Listed, ListedDataset])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_requests_lists(plan, make, options):
    expected = [plain(x) for x in PLANS[plan](source_of(np.arange(N).tolist()))]
    asked = make()
    ds = PLANS[plan](source_of(asked)).to_iter_dataset(READ[options])
    assert [plain(x) for x in ds] == expected
    assert asked.singles == []
    num_asked = sum(map(len, asked.lists))
    assert len(asked.lists) <= num_asked / 4, [len(indices) for indices in asked.lists]
    # No more than the prefetch buffer, or than a batch has.
    assert max(map(len, asked.lists)) <= 64


def test_a_dataset_over_another_passes_lists_on():
    inner = Listed()
    outer = ListedDataset(grain.MapDataset.source(inner).shuffle(seed=3))
    expected = list(grain.MapDataset.range(N).shuffle(seed=3))
    assert list(outer[0:N].map(lambda x: x)) == expected
    assert outer.singles == inner.singles == []
    assert len(outer.lists) < N / 4


def test_batches_of_an_iterator_request_lists():
    asked = Listed()
    batches = list(grain.MapDataset.source(asked).to_iter_dataset(INLINE).batch(64))
    assert np.concatenate(batches).tolist() == list(range(N))
    assert len(asked.lists) < N / 8
    assert asked.singles == []


def test_nothing_is_requested_early():
    asked = Listed()
    iterator = iter(grain.MapDataset.source(asked).map(abs).to_iter_dataset(INLINE))
    for index in range(20):
        assert next(iterator) == index
        assert asked.lists == [[i] for i in range(index + 1)]


def test_no_more_is_requested_than_the_prefetch_buffer():
    asked = Listed(length=10**6)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=40)
    with iter(grain.MapDataset.source(asked).to_iter_dataset(options)) as iterator:
        for taken in range(1, 300):
            next(iterator)
            assert sum(map(len, asked.lists)) <= taken + 2 * 40


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_request_lists(num_workers, tmp_path):
    class Told(Listed):
        def __getitems__(self, indices):
            with (tmp_path / "asked").open("a") as file:
                file.write(f"{len(indices)}\n")
            return super().__getitems__(indices)

    options = grain.ReadOptions(num_workers=num_workers)
    ds = grain.MapDataset.source(Told(length=2000)).shuffle(seed=1).to_iter_dataset(options)
    assert sorted(ds) == list(range(2000))
    assert len((tmp_path / "asked").read_text().split()) < 2000 / 4


@pytest.mark.parametrize("options", READ)
def test_lists_grow_where_a_call_costs_the_same_for_any_number(options):
    asked = Listed(seconds=0.03)
    ds = grain.MapDataset.source(asked).to_iter_dataset(READ[options])
    assert list(ds) == list(range(N))
    assert len(asked.lists) <= N / 4


def test_batches_of_slow_sources_request_lists():
    asked = Listed(seconds=0.03)
    batches = grain.MapDataset.source(asked).batch(64).to_iter_dataset(READ["caller"])
    assert [len(batch) for batch in batches] == [64] * 4
    assert len(asked.lists) <= N / 16


def run_pace(pace, call_s, element_s, blocks):
    for _ in range(blocks):
        pace.record(pace.count, call_s + element_s * pace.count)
    return pace.count


def test_lists_grow_while_elements_get_cheaper():
    def pace():
        return Pace(500, tuning.HAND_OVER_S, by_lists=True)

    assert run_pace(pace(), 0.05, 0.0, 20) >= 256
    assert run_pace(pace(), 0.05, 0.01, 20) == tuning.MIN_LIST_LEN
    # If elements get slower later, lists get shorter again.
    once_quick = pace()
    assert run_pace(once_quick, 0.0, 1e-6, 20) == 500
    assert run_pace(once_quick, 0.0, 0.02, 20) <= 2 * tuning.MIN_LIST_LEN


@pytest.mark.parametrize("make", [lambda ds: ds, lambda ds: ds.map(abs)])
@pytest.mark.parametrize("options", READ)
@pytest.mark.parametrize("bad", [0, 1, 37, N - 1])
def test_a_failure_is_raised_at_its_element(bad, options, make):
    asked = Listed(failing=[bad])
    iterator = iter(make(grain.MapDataset.source(asked)).to_iter_dataset(READ[options]))
    assert [next(iterator) for _ in range(bad)] == list(range(bad))
    for _ in range(2):
        with pytest.raises(KeyError, match=str(bad)):
            next(iterator)
    asked.failing.clear()
    assert list(iterator) == list(range(bad, N))


class Short(Listed):
    """Omits missing elements, as some stores do."""

    def __getitems__(self, indices):
        return [x for x in super().__getitems__(indices) if x != self.first + 37]


@pytest.mark.parametrize("options", READ)
def test_a_list_of_another_length_is_refused(options):
    with pytest.raises(ValueError, match=r"`Short.__getitems__` must return a list .* got \d+ el"):
        list(grain.MapDataset.source(Short()).to_iter_dataset(READ[options]))


def test_an_omitted_element_that_cannot_be_read_fails_at_its_position():
    class Missing(Short):
        def _element(self, index):
            return None if index == 37 else super()._element(index)

        def __getitems__(self, indices):
            return [self.first + index for index in indices if index != 37]

        def __getitem__(self, index):
            if index == 37:
                raise KeyError(index)
            return super().__getitem__(index)

    iterator = iter(grain.MapDataset.source(Missing()).to_iter_dataset(READ["caller"]))
    assert [next(iterator) for _ in range(37)] == list(range(37))
    with pytest.raises(KeyError, match="37"):
        next(iterator)


@pytest.mark.parametrize("answer", [{"a": 1, "b": 2}, "ab", b"ab"])
def test_an_answer_that_is_no_list_is_refused(answer):
    class Columns(Listed):
        def __getitems__(self, indices):
            return answer

    with pytest.raises(ValueError, match=f"2 indices it is given, got a {type(answer).__name__}"):
        grain.MapDataset.source(Columns()).__getitems__([0, 1])


def test_any_iterable_is_accepted():
    class Generated(Listed):
        def __getitems__(self, indices):
            yield from indices

    assert list(grain.MapDataset.source(Generated())) == list(range(N))


@pytest.mark.parametrize("lists", [False, True])
def test_a_source_that_stops_does_not_end_the_data(lists):
    class Stops:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return next(iter([index] if index != 5 else []))

    class StopsInLists(Stops):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    iterator = iter(grain.MapDataset.source(StopsInLists() if lists else Stops()))
    assert [next(iterator) for _ in range(5)] == list(range(5))
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)


def test_getitem_of_a_subclass_overrides_getitems_of_its_base():
    class Doubled(Listed):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)

    class DoubledDataset(ListedDataset):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)

    assert list(grain.MapDataset.source(Doubled())) == list(range(0, 2 * N, 2))
    assert list(DoubledDataset()) == list(range(0, 2 * N, 2))


def test_lists_are_requested_by_the_threads_that_run_functions():
    names = set()

    class Named(Listed):
        def __getitems__(self, indices):
            names.add(threading.current_thread().name)
            return super().__getitems__(indices)

    list(grain.MapDataset.source(Named()).to_iter_dataset(READ["threads"]))
    assert all(name.startswith("grain-prefetch") for name in names)


def test_a_loader_requests_lists_of_a_dataset():
    asked = ListedDataset()
    loader = grain.DataLoader(
        data_source=asked,
        sampler=grain.samplers.IndexSampler(N, shuffle=True, num_epochs=1, seed=1),
        operations=[],
        worker_count=0,
    )
    assert sorted(loader) == list(range(N))
    assert asked.singles == []
    assert len(asked.lists) < N / 4


@pytest.mark.parametrize("offers_lists", [False, True])
def test_a_loader_whose_source_offers_no_lists_spreads_its_elements(offers_lists):
    kind = Listed if offers_lists else type("Single", (), dict(vars(Listed)))
    if not offers_lists:
        del kind.__getitems__
    source = kind()
    sampler = grain.samplers.SequentialSampler(N, grain.sharding.NoSharding())
    records = SampledRecords(sampler, source, with_rng=False)
    assert compiled(node_of(grain.MapDataset.source(records))).reads_lists == offers_lists
    assert [record.data for record in records.__getitems__([3, 1])] == [3, 1]
