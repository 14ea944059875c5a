"""`DataLoader`, its states and its operations; samplers compared with the oracle."""

import copy
import importlib
import json
import os
import sys

import cloudpickle
import effort
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import add_one, close, encode, take, tokens, transforms
from under_test import INLINE, IS_GRAIN, NAME, experimental, grain

legacy = importlib.import_module(f"{NAME}.python")
Record, RecordMetadata = grain.Record, grain.RecordMetadata
IndexSampler, SequentialSampler = grain.samplers.IndexSampler, grain.samplers.SequentialSampler
ShardOptions, NoSharding = grain.sharding.ShardOptions, grain.sharding.NoSharding
SEVEN = {"num_records": 7, "num_epochs": 2, "shuffle": True, "seed": 42}


def loader(operations=(), *, source=None, sampler=None, n=7, **options):
    """A loader over `n` records, by default each once and in order."""
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, n, 1) if source is None else source,
        sampler=IndexSampler(num_records=n, num_epochs=1) if sampler is None else sampler,
        operations=operations,
        read_options=options.pop("read_options", INLINE),
        **options,
    )


def elements(of, count=None):
    """The elements of a loader, encoded."""
    iterator = iter(of)
    found = take(iterator, count)
    close(iterator)
    return found


# --- samplers ------------------------------------------------------------------------------------


@given(
    num_records=st.integers(3, 40),
    num_epochs=st.integers(1, 3),
    shard=st.tuples(st.integers(0, 2), st.just(3), st.booleans()),
    seed=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
)
def test_sampler_matches_its_piece_shuffled_epoch_by_epoch(num_records, num_epochs, shard, seed):
    sampler = IndexSampler(num_records, ShardOptions(*shard), seed is not None, num_epochs, seed)
    shard, shard_count, drop = shard
    whole = num_records - num_records % shard_count if drop else num_records
    assert len(sampler) == num_epochs * whole
    piece = oracle.pieces(range(whole), shard_count)[shard]
    for place in range(shard, len(sampler), shard_count):
        found, at = sampler[place], place // shard_count
        if seed is not None:
            at = oracle.shuffled(at, len(piece), seed)
            expected = np.random.Generator(np.random.Philox(key=seed + place))
            assert found.rng.integers(0, 2**63) == expected.integers(0, 2**63)
        else:
            assert found.rng is None
        assert (found.index, found.record_key) == (place, piece[at % len(piece)])


def test_shards_of_an_epoch_are_disjoint_and_cover_it():
    for shard_count in (1, 2, 3, 5):
        keys = []
        for shard in range(shard_count):
            options = ShardOptions(shard, shard_count, drop_remainder=True)
            sampler = IndexSampler(23, options, shuffle=True, num_epochs=1, seed=1)
            keys += [sampler[k].record_key for k in range(shard, len(sampler), shard_count)]
        assert sorted(keys) == list(range(23 - 23 % shard_count))


def test_endless_sampler_goes_on_and_on():
    sampler = IndexSampler(3, shuffle=True, seed=5)
    assert len(sampler) == sys.maxsize
    far = 3 * 10**12
    assert sorted(sampler[far + k].record_key for k in range(3)) == [0, 1, 2]


def _bad_sampler(**options):
    return lambda: IndexSampler(**{"num_records": 3, **options})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_bad_sampler(num_records=0), ValueError, "Invalid number of records in Sampler. Got 0"),
        (lambda: SequentialSampler(-1), ValueError, "Invalid number of records in Sampler. Got -1"),
        (
            _bad_sampler(num_epochs=0),
            ValueError,
            "Invalid number of epochs in Index Sampler.Got 0 epochs",
        ),
        (_bad_sampler(shuffle=True), ValueError, "Shuffling requires specifying a seed."),
        (
            _bad_sampler(shuffle=True, seed=1.0),
            TypeError,
            "Expected seed of int type. Got seed with type",
        ),
        (_bad_sampler(seed=2**32), ValueError, "Seed should be positive 32-bit integer."),
        (_bad_sampler(seed=-1), ValueError, "Seed should be positive 32-bit integer."),
        (
            lambda: IndexSampler(3, num_epochs=1)[3],
            IndexError,
            "RecordMetadata object index is out of bounds; Got index 3, allowed indices should be "
            r"in \[0, 3\]",
        ),
        (lambda: SequentialSampler(3)[-1], IndexError, "Got index -1, allowed indices"),
        (lambda: ShardOptions(0, 0), ValueError, "Number of shards must be a positive integer"),
        (lambda: ShardOptions(3, 3), ValueError, "Shard shard_index must be in"),
        pytest.param(
            lambda: IndexSampler(2, ShardOptions(2, 3), num_epochs=2)[2],
            ValueError,
            "shard 2 of 3 has no record: there are 2 records",
            marks=pytest.mark.better_than_grain("a division by zero"),
        ),
    ],
)
def test_samplers_refuse_what_they_can_not_do(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_texts_that_states_hold():
    assert repr(IndexSampler(**SEVEN)) == (
        "IndexSampler(num_records=7, shard_options=NoSharding(shard_index=0, shard_count=1, "
        "drop_remainder=False), shuffle=True, num_epochs=2, seed=42)"
    )
    assert repr(SequentialSampler(7, ShardOptions(1, 3, drop_remainder=True))) == (
        "SequentialSampler(num_records=7, shard_options=ShardOptions(shard_index=1, "
        "shard_count=3, drop_remainder=True))"
    )
    assert repr(RecordMetadata(1, 2)) == "RecordMetadata(index=1, record_key=2, rng=None)"
    assert repr(grain.sharding.ShardByJaxProcess(drop_remainder=True)) == (
        "ShardByJaxProcess(shard_index=0, shard_count=1, drop_remainder=True)"
    )


def test_sharding_options_are_values():
    assert ShardOptions(1, 2) == ShardOptions(shard_index=1, shard_count=2, drop_remainder=False)
    assert NoSharding() == NoSharding()
    assert hash(NoSharding()) == hash(NoSharding())
    assert isinstance(NoSharding(), ShardOptions)
    with pytest.raises(AttributeError):
        NoSharding().shard_index = 1


@pytest.mark.better_than_grain("these are our modules")
def test_shards_by_process_are_one_without_jax_and_those_of_jax_with_it(monkeypatch):
    jax_module = importlib.import_module(f"{NAME}.jax")
    monkeypatch.setattr(jax_module, "process_index_and_count", lambda: (1, 4))
    found = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    assert (found.shard_index, found.shard_count, found.drop_remainder) == (1, 4, True)
    monkeypatch.delitem(sys.modules, f"{NAME}.jax")
    monkeypatch.setitem(sys.modules, "jax", None)
    alone = grain.sharding.ShardByJaxProcess()
    assert (alone.shard_index, alone.shard_count, alone.drop_remainder) == (0, 1, False)


@pytest.mark.better_than_grain("every host reads everything, without a word")
@pytest.mark.parametrize(
    "text",
    [
        "import jaxlib_that_is_not_there",
        "from os import something_jax_needs",
        "raise ImportError('jaxlib is too old')",
    ],
)
def test_shards_by_process_need_a_jax_that_works_where_there_is_one(tmp_path, monkeypatch, text):
    (tmp_path / "jax.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, f"{NAME}.jax", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(ImportError, match="jax"):
        grain.sharding.ShardByJaxProcess()


@pytest.mark.better_than_grain("0.2.18 has it in a private module only")
def test_even_split_gives_the_first_shards_more():
    split = grain.sharding.even_split
    assert [split(10, ShardOptions(i, 3)) for i in range(3)] == [(0, 4), (4, 7), (7, 10)]
    dropping = [split(10, ShardOptions(i, 3, drop_remainder=True)) for i in range(3)]
    assert dropping == [(0, 3), (3, 6), (6, 9)]


# --- elements ------------------------------------------------------------------------------------


def test_operations_apply_in_order():
    of = transforms(grain)
    found = elements(loader([of["Even"](), of["PlusOne"](), grain.transforms.Batch(2)]))
    assert found == [encode(np.array(batch)) for batch in ([1, 3], [5, 7])]


def test_none_is_an_element_like_any_other():
    class DropOdd(grain.transforms.Map):
        def map(self, element):
            return None if element % 2 else element

    class IsNone(grain.transforms.Map):
        def map(self, element):
            return element is None

    assert elements(loader([DropOdd()], n=4)) == [0, None, 2, None]
    assert elements(loader([DropOdd(), IsNone()], n=4)) == [False, True, False, True]
    assert elements(loader([IsNone()], source=[None, 1, None], n=3)) == [True, False, True]


@pytest.mark.parametrize("kind", ["RandomMap", "TfRandomMap"])
def test_random_maps_get_the_generator_of_the_place(kind):
    base = getattr(grain.transforms, kind)

    class Draw(base):
        def random_map(self, element, rng):
            return (element, None if rng is None else int(rng.integers(0, 2**32)))

        np_random_map = random_map

    expected = [
        (k, int(np.random.Generator(np.random.Philox(key=3 + k)).integers(0, 2**32)))
        for k in range(7)
    ]
    seeded = IndexSampler(7, num_epochs=1, seed=3)
    assert elements(loader([Draw()], sampler=seeded)) == [encode(pair) for pair in expected]
    assert elements(loader([Draw()], n=2)) == [encode((k, None)) for k in range(2)]


def test_batch_has_the_generator_of_its_last_record():
    class Draw(grain.transforms.RandomMap):
        def random_map(self, element, rng):
            return int(element[-1]), int(rng.integers(0, 2**32))

    sampler = IndexSampler(7, num_epochs=1, seed=3)
    expected = [
        (k, int(np.random.Generator(np.random.Philox(key=3 + k)).integers(0, 2**32)))
        for k in (2, 5, 6)
    ]
    found = elements(loader([grain.transforms.Batch(3), Draw()], sampler=sampler))
    assert found == [encode(pair) for pair in expected]


class DrawTwice(grain.transforms.RandomMap):
    """Draws two numbers; for elements in `failing` it fails once, after the first."""

    def __init__(self, failing=()):
        self.failing = set(failing)

    def random_map(self, element, rng):
        first = int(rng.integers(0, 2**32))
        if element in self.failing:
            self.failing.discard(element)
            raise KeyError(element)
        return (element, first, int(rng.integers(0, 2**32)))


class PlusDraw(grain.transforms.RandomMap):
    """Adds a number to the last of a tuple."""

    def __init__(self, failing=()):
        self.failing = set(failing)

    def random_map(self, element, rng):
        if element[0] in self.failing:
            self.failing.discard(element[0])
            raise KeyError(element[0])
        return (*element[:-1], element[-1] + int(rng.integers(0, 2**32)))


@pytest.mark.better_than_grain("a failure costs the element")
def test_element_that_failed_meets_the_same_random_numbers_again():
    sampler = IndexSampler(7, num_epochs=1, seed=3)
    expected = elements(loader([DrawTwice(), PlusDraw()], sampler=sampler))
    iterator = iter(loader([DrawTwice({2}), PlusDraw({4, 5})], sampler=sampler))
    found = []
    for _ in range(10):
        try:
            found += take(iterator, 1)
        except KeyError:
            found.append("failed")
    assert [x for x in found if x != "failed"] == expected
    assert found.count("failed") == 3


@pytest.mark.better_than_grain("pieces have no generator")
def test_pieces_have_generators_of_their_own():
    operations = [transforms(grain)["FanTwo"](), DrawTwice()]
    sampler = IndexSampler(7, num_epochs=1, seed=3)
    draws = [piece["tuple"][1] for piece in elements(loader(operations, sampler=sampler))]
    assert len(set(draws)) == len(draws) == 14
    check_resumes(lambda: loader(operations, sampler=sampler))


def test_flat_map_gives_all_its_pieces():
    found = elements(loader([transforms(grain)["FanOut"](), grain.transforms.Batch(4)]))
    flat = [10 * x + j for x in range(7) for j in range(x % 5)]
    batches = [flat[k : k + 4] for k in range(0, len(flat), 4)]
    assert found == [encode(np.array(batch)) for batch in batches]


@pytest.mark.better_than_grain("0.2.18 drops the remainder whatever it is told")
@pytest.mark.parametrize("drop", [False, True])
def test_remainder_of_shards_is_kept_unless_told_to_drop_it(drop):
    found = []
    for shard in range(3):
        sampler = IndexSampler(10, ShardOptions(shard, 3, drop), num_epochs=1)
        found += elements(loader(sampler=sampler, n=10))
    assert sorted(found) == list(range(9 if drop else 10))


def test_shard_options_of_the_loader_go_before_those_of_the_sampler():
    sampler = SequentialSampler(num_records=10)
    found = [
        elements(loader(sampler=sampler, n=10, shard_options=ShardOptions(shard, 2)))
        for shard in range(2)
    ]
    assert found == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


class Backwards:
    """A minimal user-defined sampler: without a length, generators or options."""

    def __init__(self, n):
        self.n = n

    def __getitem__(self, index):
        if index >= self.n:
            raise IndexError(index)
        return RecordMetadata(index=index, record_key=self.n - 1 - index)

    def __repr__(self):
        return f"Backwards({self.n})"


class EndlessBackwards(Backwards):
    def __getitem__(self, index):
        return RecordMetadata(index=index, record_key=self.n - 1 - index % self.n)


@pytest.mark.parametrize("read_options", [INLINE, grain.ReadOptions(1, 4)])
@pytest.mark.better_than_grain("with several shards the last record never comes")
@pytest.mark.parametrize("shard_count", [1, 2])
def test_sampler_without_length_ends_where_it_raises(read_options, shard_count):
    found = []
    for shard in range(shard_count):
        of = loader(
            sampler=Backwards(7),
            shard_options=ShardOptions(shard, shard_count),
            read_options=read_options,
        )
        iterator = iter(of)
        found.append(take(iterator, None))
        assert take(iterator, None) == []
        check_resumes(lambda of=of: of)
    assert found == [[6, 5, 4, 3, 2, 1, 0][shard::shard_count] for shard in range(shard_count)]


class LastFirst(IndexSampler):
    """Derived from a sampler that the package has, with an order of its own."""

    def __getitem__(self, index):
        metadata = super().__getitem__(index)
        return RecordMetadata(index=index, record_key=6 - metadata.record_key)


def test_derived_sampler_is_asked_by_its_own_method():
    assert elements(loader(sampler=LastFirst(7, num_epochs=1))) == [6, 5, 4, 3, 2, 1, 0]


def test_endless_sampler_without_length():
    of = loader(sampler=EndlessBackwards(3), n=3, shard_options=NoSharding())
    assert elements(of, 7) == [2, 1, 0, 2, 1, 0, 2]


def test_sampler_without_options_needs_those_of_the_loader():
    with pytest.raises(ValueError, match="No shard options were provided to the DataLoader"):
        loader(sampler=Backwards(3))


def test_dataset_with_random_access_is_a_source():
    dataset = grain.MapDataset.range(5).shuffle(1).map(add_one)
    of = loader(source=dataset, sampler=SequentialSampler(5))
    assert elements(of) == [dataset[k] for k in range(5)]


@pytest.mark.parametrize(
    "source", [[5, 6, 7], (5, 6, 7), {0: 5, 1: 6, 2: 7}, range(5, 8)], ids=lambda x: str(type(x))
)
def test_anything_with_indexing_is_a_source(source):
    assert elements(loader(source=source, n=3)) == [5, 6, 7]


@pytest.mark.better_than_grain("reads record by record")
def test_source_that_reads_blocks_is_asked_for_blocks():
    asked = []

    class Blocks:
        def __len__(self):
            return 64

        def __getitem__(self, key):
            return self.__getitems__([key])[0]

        def __getitems__(self, keys):
            asked.append(len(keys))
            return [10 * key for key in keys]

    of = loader(source=Blocks(), n=64, read_options=grain.ReadOptions(1, 32))
    assert elements(of) == list(range(0, 640, 10))
    assert len(asked) < 64


@pytest.mark.better_than_grain("takes it for the end of the data")
@pytest.mark.parametrize("source", [list(range(3)), grain.sources.RangeDataSource(0, 3, 1)])
def test_key_beyond_the_source_fails_at_its_place(source):
    iterator = iter(loader(source=source, n=5))
    assert take(iterator, 3) == [0, 1, 2]
    with pytest.raises(IndexError):
        next(iterator)


def test_load_shuffles_transforms_and_batches():
    found = elements(grain.load([5, 6, 7, 8], num_epochs=2, shuffle=True, seed=1, batch_size=3))
    assert sorted(x for batch in found for x in batch["nd"][2]) == [5, 5, 6, 6, 7, 7, 8, 8]
    assert [len(batch["nd"][2]) for batch in found] == [3, 3, 2]
    of = grain.load(
        source=[5, 6, 7, 8],
        num_epochs=1,
        shuffle=False,
        seed=None,
        shard_options=ShardOptions(1, 2),
        transformations=[transforms(grain)["PlusOne"]()],
        batch_size=2,
        drop_remainder=True,
        worker_count=0,
        read_options=INLINE,
    )
    assert elements(of) == [encode(np.array([8, 9]))]


# --- states --------------------------------------------------------------------------------------


def check_resumes(make, is_fresh=lambda _place, _end: True):
    """Every position can be saved, and restored in a new or used iterator, any number of times.

    New ones are tried at the places that `is_fresh` chooses.
    """
    iterator = iter(make())
    whole, states = [], [iterator.get_state()]
    while found := take(iterator, 1):
        whole += found
        states.append(iterator.get_state())
    states.append(iterator.get_state())
    used = iterator
    for place, state in enumerate(states):
        assert isinstance(state, bytes)
        kept = copy.copy(state)
        if is_fresh(place, len(whole)):
            fresh = iter(make())
            fresh.set_state(state)
            assert fresh.get_state() == state
            assert take(fresh, None) == whole[place:], f"at {place} from {state}"
            close(fresh)
        used.set_state(state)
        assert take(used, None) == whole[place:], f"at {place} in a used one"
        assert state == kept


OPERATIONS = {
    "none": list,
    "map_filter": lambda: [transforms(grain)["PlusOne"](), transforms(grain)["Even"]()],
    "random": lambda: [transforms(grain)["AddRand"]()],
    "batch": lambda: [grain.transforms.Batch(3)],
    "batch_drop": lambda: [grain.transforms.Batch(3, drop_remainder=True)],
    "filter_batch": lambda: [transforms(grain)["Even"](), grain.transforms.Batch(2)],
    "flat_map": lambda: [transforms(grain)["FanOut"]()],
    "flat_map_batch": lambda: [transforms(grain)["FanTwo"](), grain.transforms.Batch(3)],
    "older": lambda: [
        legacy.MapOperation(add_one),
        legacy.FilterOperation(lambda x: x % 2 == 0),
        legacy.BatchOperation(2),
    ],
}


def _operations_param(name):
    marks = [pytest.mark.better_than_grain(NOT_RESUMED[name])] if name in NOT_RESUMED else []
    return pytest.param(name, marks=marks)


NOT_RESUMED = {
    **dict.fromkeys(["flat_map", "flat_map_batch"], "pieces taken at the end are not forgotten"),
    "older": "a used iterator is not restored",
}


# One worker does what each of three does.
@pytest.mark.parametrize("worker_count", [0, pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", [_operations_param(name) for name in OPERATIONS])
def test_loader_resumes_at_every_place(name, worker_count):
    if IS_GRAIN and worker_count:
        pytest.skip("its processes take too long")
    check_resumes(
        lambda: loader(
            OPERATIONS[name](), sampler=IndexSampler(**SEVEN), worker_count=worker_count
        ),
        # The workers of a new loader take an interpreter to start, those of a used one do not.
        lambda place, end: (
            not worker_count or effort.LONG or place == (end if "filter" in name else 1)
        ),
    )


@pytest.mark.parametrize("shard", range(3))
def test_shards_resume_at_every_place(shard):
    sampler = IndexSampler(10, ShardOptions(shard, 3, drop_remainder=True), num_epochs=2)
    check_resumes(lambda: loader([grain.transforms.Batch(2)], sampler=sampler, n=10))


def test_state_says_the_place_of_the_record_read_last():
    of = loader(sampler=IndexSampler(10, ShardOptions(1, 3), num_epochs=1), n=10)
    iterator = iter(of)
    seen = [json.loads(iterator.get_state())["last_seen_indices"]]
    seen += [json.loads(iterator.get_state())["last_seen_indices"] for _ in iterator]
    assert seen == [{"0": place} for place in (-2, 1, 4, 7)]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([1, 2, 3], "<class 'list'>"),
        ((1, 2, 3), "<class 'tuple'>"),
        (np.arange(3), "<class 'numpy.ndarray'>"),
        (range(3), "range(0, 3)"),
        (grain.sources.RangeDataSource(0, 3, 1), "RangeDataSource(start=0, stop=3, step=1)"),
    ],
    ids=["list", "tuple", "ndarray", "range", "source"],
)
def test_state_names_the_source(source, text):
    state = json.loads(iter(loader(source=source, n=3)).get_state())
    assert state["data_source"] == text
    assert list(state) == [
        "version",
        "last_seen_indices",
        "last_worker_index",
        "worker_count",
        "sampler",
        "data_source",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker_count": 2}, "Worker count in checkpoint does not match dataloader worker count"),
        ({"sampler": "other"}, "Sampler in checkpoint does not match dataloader sampler"),
        ({"data_source": "other"}, "DataSource in checkpoint does not match datasource in"),
    ],
)
def test_state_of_another_loader_is_refused(change, message):
    iterator = iter(loader())
    state = json.loads(iterator.get_state())
    with pytest.raises(ValueError, match=message):
        iterator.set_state(json.dumps({**state, **change}).encode())
    assert take(iterator, None) == list(range(7))


_WORKERS = pytest.mark.better_than_grain("workers need parsed flags of absl")


@pytest.mark.parametrize("worker_count", [0, pytest.param(2, marks=_WORKERS)])
def test_iterator_starts_from_a_state(worker_count):
    of = loader(worker_count=worker_count)
    iterator = iter(of)
    first = take(iterator, 3)
    state = json.loads(iterator.get_state())
    close(iterator)
    for start, expected in [(state, [3, 4, 5, 6]), (None, [*first, 3, 4, 5, 6])]:
        restored = grain.DataLoaderIterator(of, start)
        assert take(restored, None) == expected
        close(restored)


def test_state_of_another_sampler_is_accepted_where_it_is_not_validated():
    def shuffled(seed):
        return loader(sampler=IndexSampler(7, shuffle=True, num_epochs=1, seed=seed))

    iterator = iter(shuffled(1))
    take(iterator, 3)
    state = iterator.get_state()
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match"):
        grain.DataLoaderIterator(shuffled(2), json.loads(state))
    expected = elements(shuffled(2))[3:]
    restored = grain.DataLoaderIterator(shuffled(2), json.loads(state), validate_state=False)
    assert take(restored, None) == expected
    restored.set_state(state)
    assert take(restored, None) == expected


@pytest.mark.better_than_grain("a KeyError")
def test_state_of_other_workers_is_refused_in_any_case():
    state = json.loads(iter(loader()).get_state())
    with pytest.raises(ValueError, match="Worker count in checkpoint does not match"):
        grain.DataLoaderIterator(loader(worker_count=2), state, validate_state=False)


@pytest.mark.better_than_grain("goes on at a place of another shard, or fails without a reason")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last_seen_indices": {"0": 5}}, "is not one of shard 1 of 3; restore needs the same"),
        ({"last_seen_indices": {"0": -5}}, "is not one of shard 1 of 3"),
        ({"last_seen_indices": {"1": 4}}, "must have an integer for each of the workers"),
        ({"last_seen_indices": {"0": "4"}}, "must have an integer for each of the workers"),
        ({"last_seen_indices": {"0": True}}, "must have an integer for each of the workers"),
        ({"last_seen_indices": {"0": 4.0}}, "must have an integer for each of the workers"),
        ({"last_seen_indices": {"00": 4}}, "must have an integer for each of the workers"),
        ({"last_seen_indices": None}, "must have an integer for each of the workers"),
        ({"version": 99}, "`version` must be 2, got 99"),
        ({"version": None}, "`version` must be 2"),
        ({"last_worker_index": 0}, "`last_worker_index` must be an integer from -1 to -1, got 0"),
        ({"worker_count": False}, "`worker_count` must be an integer"),
        ({"more": 1}, r"has \['more'\] too"),
        (None, "must have"),
        ([], "must be a JSON object"),
    ],
)
def test_damaged_state_is_refused(change, message):
    iterator = iter(loader(sampler=IndexSampler(10, ShardOptions(1, 3), num_epochs=1), n=10))
    state = json.loads(iterator.get_state())
    state = {**state, **change} if isinstance(change, dict) else (change or {})
    if change == []:
        state = []
    with pytest.raises(ValueError, match=message):
        iterator.set_state(json.dumps(state).encode())
    assert take(iterator, None) == [4, 5, 6]


@pytest.mark.better_than_grain("an error that does not say what is wrong")
@pytest.mark.parametrize("state", [b"", b"{", "no bytes", None, {"version": 2}, b"\xff"])
def test_state_that_is_no_json_is_refused(state):
    iterator = iter(loader())
    next(iterator)
    with pytest.raises(ValueError, match="state of a `DataLoader` must be the bytes"):
        iterator.set_state(state)
    assert take(iterator, None) == [1, 2, 3, 4, 5, 6]


@pytest.mark.better_than_grain("found out by the workers, or never")
@pytest.mark.parametrize("worker_count", [0, 2])
def test_state_beyond_the_records_is_refused_at_once(worker_count):
    operations = [grain.transforms.Batch(2)]
    iterator = iter(loader(operations, worker_count=worker_count))
    first = take(iterator, 1)
    state = json.loads(iterator.get_state())
    stride = max(worker_count, 1)
    for change in (
        {"last_seen_indices": {str(i): i + 1000 * stride for i in range(stride)}},
        {"last_worker_index": worker_count},
    ):
        with pytest.raises((IndexError, ValueError), match=r"out of range|last_worker_index"):
            iterator.set_state(json.dumps({**state, **change}).encode())
        assert json.loads(iterator.get_state()) == state
    assert first + take(iterator, None) == elements(loader(operations, worker_count=worker_count))
    close(iterator)


def test_iterator_prints_its_state():
    iterator = iter(loader(n=3))
    assert str(iterator) == f"PyGrainDatasetIterator(state={iterator.get_state().decode()})"
    assert not isinstance(iterator, grain.DatasetIterator)
    assert isinstance(iterator, grain.DataLoaderIterator)


# --- the object ----------------------------------------------------------------------------------


def test_loader_has_what_keras_makes_another_from():
    of = grain.DataLoader(
        data_source=[1, 2, 3],
        sampler=SequentialSampler(3, ShardOptions(0, 1)),
        operations=[grain.transforms.Batch(batch_size=2)],
        worker_count=0,
        worker_buffer_size=3,
        shard_options=None,
        read_options=None,
        enable_profiling=False,
    )
    again = grain.DataLoader(
        data_source=of._data_source,
        sampler=of._sampler,
        operations=of._operations,
        worker_count=of._multiprocessing_options.num_workers,
        worker_buffer_size=of._multiprocessing_options.per_worker_buffer_size,
        shard_options=of._shard_options,
        read_options=of._read_options,
        enable_profiling=of._multiprocessing_options.enable_profiling,
    )
    assert elements(again) == elements(of) == [encode(np.array([1, 2])), encode(np.array([3]))]
    assert again._multiprocessing_options == of.multiprocessing_options
    assert any(c.__name__ == "DataLoader" and "grain" in c.__module__ for c in type(of).__mro__)


def test_loader_starts_again_whenever_it_is_iterated_over():
    of = loader()
    first, second = iter(of), iter(of)
    assert take(first, 3) == [0, 1, 2]
    assert take(second, None) == list(range(7))
    assert take(first, None) == [3, 4, 5, 6]


@pytest.mark.better_than_grain("its iterator cannot be closed")
def test_iterator_is_a_context():
    with iter(loader(read_options=grain.ReadOptions(1, 4))) as iterator:
        assert next(iterator) == 0
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_worker_count_is_checked_and_counted(monkeypatch):
    with pytest.raises(ValueError, match="Worker count should be greater than or equal zero"):
        loader(worker_count=-1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert loader(worker_count=None).multiprocessing_options.num_workers == 3
    with pytest.raises(ValueError, match="`buffer_size` must be greater than 0"):
        loader(worker_count=2, worker_buffer_size=0)


@pytest.mark.better_than_grain("found out when it is called")
def test_operation_of_no_known_kind_is_refused():
    with pytest.raises(TypeError, match="operation 1 must be a transform"):
        loader([transforms(grain)["PlusOne"](), 5])
    with pytest.raises(TypeError, match="operation 0 must be a transform"):
        loader([transforms(grain)["Indexed"]()])


def test_loader_and_its_samplers_can_be_pickled():
    of = loader([transforms(grain)["PlusOne"]()], sampler=IndexSampler(**SEVEN))
    again = cloudpickle.loads(cloudpickle.dumps(of))
    assert elements(again) == elements(of)


@pytest.mark.better_than_grain("a failure costs the element")
def test_a_failure_comes_at_its_place_and_costs_no_element():
    failing = {3}

    class FailOnce(grain.transforms.Map):
        def map(self, element):
            if element in failing:
                failing.discard(element)
                raise KeyError(element)
            return element

    iterator = iter(loader([transforms(grain)["PlusOne"](), FailOnce()]))
    assert take(iterator, 2) == [1, 2]
    with pytest.raises(KeyError):
        next(iterator)
    assert take(iterator, None) == [3, 4, 5, 6, 7]


# --- older operations ----------------------------------------------------------------------------


def records(*data):
    return iter([Record(RecordMetadata(k, 10 + k), x) for k, x in enumerate(data)])


def run(operation, *data):
    """(index, record key, element) of the records that an operation returns."""
    return [
        (record.metadata.index, record.metadata.record_key, encode(record.data))
        for record in operation(records(*data))
    ]


def test_older_operations_drop_the_record_key():
    assert run(legacy.MapOperation(map_function=add_one), 1, 2) == [(0, None, 2), (1, None, 3)]
    assert run(legacy.FilterOperation(condition_function=lambda x: x > 1), 1, 2) == [(1, None, 2)]
    keep = legacy.RandomMapOperation(random_map_function=lambda x, rng: (x, rng))
    assert run(keep, 4) == [(0, None, encode((4, None)))]


def test_older_batches_keep_what_is_known_of_the_last():
    expected = [(1, None, encode(np.array([1, 2]))), (2, None, encode(np.array([3])))]
    assert run(legacy.BatchOperation(batch_size=2), 1, 2, 3) == expected
    assert run(legacy.BatchOperation(2, drop_remainder=True), 1, 2, 3) == expected[:1]
    assert run(legacy.BatchOperation(2, batch_fn=sum), 1, 2, 3) == [(1, None, 3), (2, None, 3)]


def test_older_batches_say_that_they_are_deprecated_unless_told_not_to(caplog):
    operation = legacy.BatchOperation(2)
    run(operation, 1, 2)
    assert ["deprecated" in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    operation.disable_deprecation_message()
    assert run(operation, 1, 2) == [(1, None, encode(np.array([1, 2])))]
    assert not caplog.records


def _fail(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (legacy.MapOperation(_fail), "map function"),
        (legacy.RandomMapOperation(_fail), "random map function"),
        (legacy.FilterOperation(_fail), "condition function"),
    ],
)
def test_older_operations_say_which_function_failed(operation, what):
    with pytest.raises(
        ValueError, match=f"PyGrain encountered an error when calling {what}."
    ) as caught:
        run(operation, 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_older_batches_refuse_what_can_not_be_stacked():
    with pytest.raises(ValueError, match=r"batch_size must be a positive integer. Got 0\."):
        legacy.BatchOperation(0)
    with pytest.raises(
        TypeError, match=r"Record structures do not match. Record at position 0 has structure {'a'"
    ):
        run(legacy.BatchOperation(2), {"a": 1}, {"b": 1})


@pytest.mark.better_than_grain("a used iterator is not restored")
def test_any_callable_from_records_to_records_is_an_operation():
    def pairs(iterator):
        for record in iterator:
            yield Record(record.metadata, (record.data, next(iterator).data))

    of = loader([pairs], n=6)
    assert elements(of) == [encode(pair) for pair in ((0, 1), (2, 3), (4, 5))]
    check_resumes(lambda: of)


@pytest.mark.better_than_grain("a generator that has raised is at its end")
def test_a_failing_operation_costs_no_element():
    failing = {3}

    def fail_once(x):
        if x in failing:
            failing.discard(x)
            raise KeyError(x)
        return x

    iterator = iter(loader([legacy.MapOperation(fail_once)]))
    assert take(iterator, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="calling map function"):
        next(iterator)
    assert take(iterator, None) == [3, 4, 5, 6]


def _packing(**options):
    return experimental.PackAndBatchOperation(length_struct={"tokens": 12}, batch_size=2, **options)


def test_pack_and_batch_fills_the_first_row_with_room():
    found = list(_packing()(records(*(tokens(x) for x in range(6)))))
    packed = oracle.fitted([tokens(x)["tokens"] for x in range(6)], 12, 2, best=False)
    rows = [oracle.packed_row(row, 12) for row in packed]
    shown = []
    for record in found:
        assert record.metadata.record_key is None
        parts = [part["tokens"] for part in record.data]
        assert [part.shape for part in parts] == [(2, 12)] * 3
        assert [str(part.dtype) for part in parts] == ["int32"] * 3
        shown += [
            tuple(part[row].tolist() for part in parts) for row in range(2) if parts[1][row].any()
        ]
    assert shown == [tuple(row) for row in rows]


def test_pack_and_batch_counts_sequences_and_checks_lengths():
    found = list(_packing(max_sequences_per_bin=1)(records(*(tokens(x) for x in range(5)))))
    assert [int(record.data[1]["tokens"].max()) for record in found] == [1, 1, 1]
    assert [record.metadata.index for record in found] == [1, 3, 4]
    with pytest.raises(ValueError, match="Inputs to PackAndBatchOperation must be truncated to"):
        list(_packing()(records({"tokens": np.arange(13)})))


@pytest.mark.better_than_grain("the sequence that did not fit is lost")
def test_pack_and_batch_resumes_without_losing_the_sequence_that_did_not_fit():
    class Tokens(grain.transforms.Map):
        def map(self, element):
            return tokens(element)

    check_resumes(lambda: loader([Tokens(), _packing()], n=9))


@pytest.mark.better_than_grain("not asked for by Grain")
def test_two_iterators_share_nothing_an_operation_keeps():
    class Counting:
        def __init__(self):
            self.count = 0

        def __call__(self, iterator):
            for record in iterator:
                self.count += 1
                yield Record(record.metadata, self.count)

    of = loader([Counting()], n=3)
    assert elements(of) == elements(of) == [1, 2, 3]


@pytest.mark.better_than_grain("it bounds the memory of a worker by the number of elements")
def test_budget_of_workers_is_that_of_their_options():
    def loader(**given):
        sampler = SequentialSampler(3, ShardOptions(0, 1))
        return grain.DataLoader(data_source=[1, 2, 3], sampler=sampler, **given)

    default = grain.MultiprocessingOptions().per_worker_budget_bytes
    assert loader().multiprocessing_options.per_worker_budget_bytes == default
    for budget in (1 << 20, None):
        made = loader(per_worker_budget_bytes=budget)
        assert made.multiprocessing_options.per_worker_budget_bytes == budget
    with pytest.raises(ValueError, match="per_worker_budget_bytes"):
        loader(per_worker_budget_bytes=0)
