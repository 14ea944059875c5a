"""`set_slice`: datasets that restrict themselves to one worker's share, and states by shard."""

import json

import pytest
from under_test import IS_GRAIN, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset
EVERY_OTHER = {0: slice(0, None, 2), 1: slice(1, None, 2)}


class CountedIterator(grain.DatasetIterator):
    """Yields the entries of a list."""

    def __init__(self, entries):
        super().__init__()
        self._entries = entries
        self._count = 0

    def __next__(self):
        if self._count == len(self._entries):
            raise StopIteration
        self._count += 1
        return self._entries[self._count - 1]

    def get_state(self):
        return {"count": self._count}

    def set_state(self, state):
        self._count = state["count"]


class Own(grain.IterDataset):
    """A source of a user that slices itself."""

    def __init__(self, count):
        super().__init__()
        self.entries = list(range(count))

    def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - the protocol
        count = len(self.entries)
        if sequential_slice:
            low, high = (count * part // sl.step for part in (sl.start, sl.start + 1))
            self.entries = self.entries[low:high]
        else:
            self.entries = self.entries[sl]

    def __iter__(self):
        return CountedIterator(self.entries)


class OwnMap(grain.MapDataset):
    """The same with random access."""

    def __init__(self, count):
        super().__init__()
        self.entries = list(range(count))

    def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - the protocol
        assert sequential_slice
        count = len(self.entries)
        low, high = (count * part // sl.step for part in (sl.start, sl.start + 1))
        self.entries = self.entries[low:high]

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self.entries[index % len(self.entries)]


class OverParent(grain.IterDataset):
    """A stage of a user that passes `set_slice` on to its parent."""

    def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - the protocol
        self._parent.set_slice(sl, sequential_slice)

    def __iter__(self):
        return self._parent.__iter__()


def threads(dataset, count, *, sequential_slice=False):
    return experimental.multithread_prefetch(dataset, count, 1, sequential_slice=sequential_slice)


def workers(dataset, count, *, sequential_slice=False):
    options = grain.MultiprocessingOptions(num_workers=count)
    return dataset.mp_prefetch(options, sequential_slice=sequential_slice)


IN_TURN = list(range(10))
IN_RANGES = [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
needs_flags = pytest.mark.better_than_grain("workers need parsed flags")


@pytest.mark.parametrize("share", [threads, pytest.param(workers, marks=needs_flags)])
@pytest.mark.parametrize(("sequential", "expected"), [(False, IN_TURN), (True, IN_RANGES)])
def test_own_dataset_slices_a_copy_of_itself(share, sequential, expected):
    dataset = Own(10)
    shared = share(dataset.map(lambda x: x * 10), 2, sequential_slice=sequential)
    assert list(shared) == [10 * x for x in expected]
    assert list(dataset) == list(range(10))


def test_set_slice_gets_the_share_and_its_kind():
    calls = []

    class Recorded(Own):
        def set_slice(self, sl, sequential_slice):
            calls.append((sl, sequential_slice))

    list(threads(Recorded(3), 2))
    list(threads(Recorded(3), 2, sequential_slice=True))
    found = {(sl.start, sl.stop, sl.step, kind) for sl, kind in calls}
    assert found == {(k, None, 2, kind) for k in (0, 1) for kind in (False, True)}


def test_one_thread_does_not_slice():
    dataset = Own(4)
    dataset.set_slice = None  # calling it would fail
    assert list(threads(dataset, 1)) == [0, 1, 2, 3]


def test_set_slice_needs_two_arguments():
    class OneArgument(Own):
        def set_slice(self, sl):
            self.entries = self.entries[sl]

    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        list(threads(OneArgument(3), 2))


@pytest.mark.parametrize("share", [threads, pytest.param(workers, marks=needs_flags)])
def test_own_map_dataset_slices_itself_consecutively(share):
    shared = share(OwnMap(10).to_iter_dataset(), 2, sequential_slice=True)
    assert list(shared) == IN_RANGES


@pytest.mark.parametrize("share", [threads, pytest.param(workers, marks=needs_flags)])
def test_own_map_dataset_is_not_asked_for_every_nth_element(share):
    assert list(share(OwnMap(10).to_iter_dataset(), 2)) == IN_TURN


def test_own_map_dataset_under_an_own_stage_slices_itself():
    class Stage(IterDataset):
        def __iter__(self):
            return self._parent.__iter__()

    class EveryNth(OwnMap):
        def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - the protocol
            assert not sequential_slice
            self.entries = self.entries[::-1][sl]

    assert list(threads(Stage(EveryNth(6)), 2)) == [5, 4, 3, 2, 1, 0]
    assert list(threads(Stage(EveryNth(6).map(lambda x: -x)), 2)) == [-5, -4, -3, -2, -1, 0]


def test_own_stage_passes_set_slice_on_to_an_interleave():
    parts = [MapDataset.range(10 * k, 10 * k + 2).to_iter_dataset() for k in range(4)]
    own = OverParent(experimental.InterleaveIterDataset(parts, cycle_length=1))
    assert list(threads(own, 2)) == [0, 10, 1, 11, 20, 30, 21, 31]
    assert list(own) == [0, 1, 10, 11, 20, 21, 30, 31]


def test_own_stage_passes_set_slice_on_to_a_source():
    own = OverParent(MapDataset.source("abcdefg"))
    found = list(threads(own, 2, sequential_slice=True))
    assert found == ["a", "e", "b", "f", "c", "g", "d"]


# --- the package's own datasets ------------------------------------------------------------------


def parts(count):
    return [MapDataset.range(10 * k, 10 * k + 2).to_iter_dataset() for k in range(count)]


@pytest.mark.parametrize("sequential", [False, True])
def test_interleave_keeps_a_slice_of_its_datasets(sequential):
    dataset = experimental.InterleaveIterDataset(parts(6), cycle_length=3)
    derived = dataset.map(lambda x: -x)
    dataset.set_slice(slice(1, None, 2), sequential)
    assert list(dataset) == [10, 30, 50, 11, 31, 51]
    assert list(derived) == [-10, -30, -50, -11, -31, -51]
    dataset.set_slice(slice(0, None, 2))
    assert list(dataset) == [10, 50, 11, 51]


def test_interleave_of_a_map_dataset_keeps_a_slice():
    datasets = MapDataset.source(parts(5))
    dataset = experimental.InterleaveIterDataset(datasets, cycle_length=5)
    dataset.set_slice(EVERY_OTHER[1])
    assert list(dataset) == [10, 30, 11, 31]


@pytest.mark.parametrize("make", [MapDataset.range, lambda n: MapDataset.source(range(n))])
@pytest.mark.parametrize(
    ("index", "count", "expected"),
    [(0, 3, [0, 1, 2, 3]), (1, 3, [4, 5, 6]), (2, 3, [7, 8, 9]), (0, 1, list(range(10)))],
)
def test_sources_keep_a_consecutive_share(make, index, count, expected):
    dataset = make(10)
    dataset.set_slice(slice(index, None, count), True)  # noqa: FBT003 - as callers do
    assert list(dataset) == expected
    assert len(dataset) == len(expected)
    assert dataset[len(dataset)] == expected[0]


@pytest.mark.parametrize(
    "make",
    [
        MapDataset.range,
        pytest.param(
            lambda n: MapDataset.source(range(n)),
            marks=pytest.mark.better_than_grain("a second call slices the first slice's length"),
        ),
    ],
)
def test_second_slice_of_a_source_replaces_the_first(make):
    dataset = make(10)
    dataset.set_slice(slice(1, None, 3), True)  # noqa: FBT003 - as callers do
    dataset.set_slice(slice(0, None, 2), True)  # noqa: FBT003 - as callers do
    assert list(dataset) == [0, 1, 2, 3, 4]


def test_sources_refuse_every_nth_element():
    with pytest.raises(AssertionError, match=r"^Only sequential slicing is supported for RangeMap"):
        MapDataset.range(10).set_slice(EVERY_OTHER[0])
    with pytest.raises(AssertionError, match=r"^Only sequential slicing is supported\.$"):
        MapDataset.source("abc").set_slice(EVERY_OTHER[0])


def test_sources_refuse_a_share_that_is_not_there():
    text = r"must be in \[0, shard_count - 1\], shard_count was 2 and shard_index was 5"
    for dataset in (MapDataset.range(10), MapDataset.source("abc")):
        with pytest.raises(ValueError, match=text):
            dataset.set_slice(slice(5, None, 2), True)  # noqa: FBT003 - as callers do


# --- consecutive shares of stages that depend on lengths -----------------------------------------

ENTIRE = {
    "map": lambda ds: ds.map(lambda x: x + 1),
    "concatenate": lambda ds: MapDataset.concatenate([ds, ds.map(lambda x: -x)]),
    "mix": lambda ds: MapDataset.mix([ds, ds.map(lambda x: -x)]),
    "slice": lambda ds: ds[::2],
    "repeat": lambda ds: ds.repeat(2),
    "batch": lambda ds: ds.batch(3).map(lambda rows: rows.tolist()),
}


@pytest.mark.better_than_grain("stages keep the length of the whole parent")
@pytest.mark.parametrize("source", ["range", "source"])
@pytest.mark.parametrize("stage", ENTIRE)
def test_consecutive_shares_have_every_element_once(stage, source):
    dataset = MapDataset.range(12) if source == "range" else MapDataset.source(range(12))
    dataset = ENTIRE[stage](dataset)
    shared = threads(dataset.to_iter_dataset(), 2, sequential_slice=True)

    def flat(elements):
        return sorted(x for e in elements for x in (e if isinstance(e, list) else [e]))

    assert flat(shared) == flat(dataset)


# --- states by shard -----------------------------------------------------------------------------


def interleaved(count=5, length=3, cycle_length=2):
    datasets = [MapDataset.range(10 * k, 10 * k + length).to_iter_dataset() for k in range(count)]
    return experimental.InterleaveIterDataset(datasets, cycle_length=cycle_length)


def test_shard_states_of_an_interleave():
    iterator = iter(interleaved())
    assert [next(iterator) for _ in range(7)] == [0, 10, 1, 11, 2, 12, 20]
    assert iterator.get_shard_states() == [
        {"exhausted": 1, "state": {"next_index": 0}},
        {"exhausted": 1, "state": {"next_index": 3}},
        {"exhausted": 0, "state": {"next_index": 1}},
        {"exhausted": 0, "state": {"next_index": 0}},
        {"exhausted": 0, "state": {"next_index": 0}},
    ]
    restored = iter(interleaved())
    restored.set_shard_states(iterator.get_shard_states())
    assert list(restored) == [21, 30, 22, 31, 32, 40, 41, 42]
    assert list(iterator) == [30, 21, 31, 22, 32, 40, 41, 42]


@pytest.mark.better_than_grain("exhausted datasets are read again; keys do not survive JSON")
@pytest.mark.parametrize("cycle_length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("again", [0, 1, 4])
def test_no_element_is_lost_or_repeated_through_shard_states(cycle_length, again):
    """Saves after every element, in another order of datasets, and saves a second time."""
    for taken in range(16):
        iterator = iter(interleaved(cycle_length=cycle_length))
        seen = [next(iterator) for _ in range(taken)]
        states = iterator.get_shard_states()[::-1]
        datasets = [MapDataset.range(10 * k, 10 * k + 3).to_iter_dataset() for k in range(5)][::-1]
        dataset = experimental.InterleaveIterDataset(datasets, cycle_length=cycle_length)
        reversed_iterator = iter(dataset)
        reversed_iterator.set_shard_states(json.loads(json.dumps(states)))
        seen += [x for _, x in zip(range(again), reversed_iterator, strict=False)]
        state = json.loads(json.dumps(reversed_iterator.get_state()))
        last = iter(dataset)
        last.set_state(state)
        assert last.get_shard_states() == reversed_iterator.get_shard_states()
        seen += list(last)
        assert sorted(seen) == [10 * k + i for k in range(5) for i in range(3)]


@pytest.mark.better_than_grain("not checked")
@pytest.mark.parametrize("states", [[], [{"exhausted": 0, "state": {"next_index": 0}}] * 6])
def test_another_number_of_shard_states_is_refused(states):
    with pytest.raises(ValueError, match="one for each of the 5 datasets"):
        iter(interleaved()).set_shard_states(states)


@pytest.mark.better_than_grain("not checked")
def test_shard_states_of_another_form_are_refused():
    iterator = iter(interleaved(count=1))
    with pytest.raises(ValueError, match="must have the keys"):
        iterator.set_shard_states([{"next_index": 0}])
    with pytest.raises(ValueError, match="true or false"):
        iterator.set_shard_states([{"exhausted": 7, "state": {"next_index": 0}}])


@pytest.mark.parametrize("share", [threads, pytest.param(workers, marks=needs_flags)])
def test_workers_have_shard_states(share):
    iterator = iter(share(interleaved(count=4, cycle_length=1), 2))
    assert [next(iterator) for _ in range(3)] == [0, 10, 1]
    states = iterator.get_shard_states()
    assert [shard["state"]["iterators_in_use_states"] for shard in states] == [
        [{"next_index": 2}],
        [{"next_index": 1}],
    ]
    rest = list(iterator)
    restored = iter(share(interleaved(count=4, cycle_length=1), 2))
    restored.set_shard_states(states)
    assert sorted(restored) == sorted(rest)


@pytest.mark.skipif(IS_GRAIN, reason="any number of elements may be read there")
def test_shard_states_do_not_read_elements():
    read = []

    def note(x):
        read.append(x)
        return x

    datasets = [MapDataset.range(3).to_iter_dataset().map(note) for _ in range(4)]
    iter(experimental.InterleaveIterDataset(datasets, cycle_length=2)).get_shard_states()
    assert read == []
