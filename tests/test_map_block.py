"""Transforms with `map_block`: the results, errors and states of `map`, from calls with blocks."""

import functools
import math
import pickle
import random
import threading
import time

import numpy as np
import pytest
from effort import SEED, cases

import grainmill as grain
from grainmill import MapDataset
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.prefetch import tuning
from grainmill._native import GrainmillError
from grainmill.array_record import ArrayRecordWriter

NUM = 200


class Scale(grain.transforms.Map):
    """Multiplies by 3, except that it fails for some, and returns `None` for others."""

    def __init__(self, bad=(), dropped=()):
        self.bad, self.dropped = set(bad), set(dropped)
        self.blocks = []
        self.singly = []

    def map(self, element):
        self.singly.append(element)
        return self._result(element)

    def map_block(self, elements):
        self.blocks.append(len(elements))
        return [self._result(element) for element in elements]

    def _result(self, element):
        if element in self.bad:
            raise KeyError(f"bad {element}")
        return None if element in self.dropped else element * 3


class OneByOne(grain.transforms.Map):
    """The same as another transform, without `map_block`."""

    def __init__(self, transform):
        self._map = transform._result

    def map(self, element):
        return self._map(element)


def noisy(element, rng):
    return element + int(rng.integers(1000))


CHAINS = {
    "alone": lambda ds, t: ds.map(t),
    "between maps": lambda ds, t: ds.map(lambda x: x + 1).map(t).map(lambda x: x - 1),
    "two of them": lambda ds, t: ds.map(t).map(Scale()).map(float),
    "after a filter": lambda ds, t: ds.filter(lambda x: x % 3).map(t),
    "before a filter": lambda ds, t: ds.map(t).filter(lambda x: x % 2),
    "random": lambda ds, t: ds.seed(5).random_map(noisy).map(t).random_map(noisy),
    "with index": lambda ds, t: ds.map_with_index(lambda i, x: x + i).map(t)[3::2],
    "shuffled, twice": lambda ds, t: ds.shuffle(seed=3).map(t).shuffle(seed=4).repeat(2),
    "mixed": lambda ds, t: MapDataset.mix([ds.map(t), ds.map(float), ds.map(Scale([7]))]),
    "concatenated": lambda ds, t: MapDataset.concatenate([ds.map(t), ds.map(Scale([150]))]),
    "batched": lambda ds, t: ds.map(t).batch(7),
}
TRANSFORMS = {
    "plain": dict,
    "failing": lambda: {"bad": [60]},
    "dropping": lambda: {"dropped": [3, 4, 190]},
    "both": lambda: {"bad": [150], "dropped": range(0, 100, 3)},
}
READERS = {
    "index": lambda ds: (ds[i] for i in range(len(ds))),
    "list": iter,
    "iterator": lambda ds: iter(ds.to_iter_dataset()),
    "without threads": lambda ds: iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=0))),
    "batches": lambda ds: iter(ds.to_iter_dataset().map(lambda x: {"x": x}).batch(10)),
}


def outcome(elements):
    """The elements as texts up to a failure, and its type, text and notes."""
    seen = []
    try:
        for element in elements:
            seen.append(repr(element))  # noqa: PERF401 - a failure keeps those before
    except Exception as failure:
        notes = [note.replace("OneByOne", "Scale") for note in failure.__notes__]
        return seen, (type(failure), str(failure), [note.split(" at /")[0] for note in notes])
    return seen, None


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("chain", CHAINS)
def test_blocks_have_the_results_errors_and_notes_of_elements(chain, kind, reader):
    source = MapDataset.range(NUM)
    blocks = CHAINS[chain](source, Scale(**TRANSFORMS[kind]()))
    singly = CHAINS[chain](source, OneByOne(Scale(**TRANSFORMS[kind]())))
    expected = outcome(READERS[reader](singly))
    assert outcome(READERS[reader](blocks)) == expected
    assert expected[0] or expected[1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_have_the_same_outcome(num_workers):
    options = grain.ReadOptions(num_workers=num_workers, prefetch_buffer_size=32)
    for bad in ([], [133]):
        source = MapDataset.range(NUM).shuffle(seed=1)
        blocks = iter(source.map(Scale(bad)).to_iter_dataset(options))
        singly = iter(source.map(OneByOne(Scale(bad))).to_iter_dataset())
        seen, failure = outcome(blocks)
        expected, expected_failure = outcome(singly)
        assert seen == expected
        assert (failure is None) == (expected_failure is None)
        if failure is not None:
            assert failure[:2] == expected_failure[:2]
            assert failure[2][0] == expected_failure[2][0]


def test_mp_prefetch_calls_blocks_too():
    options = grain.MultiprocessingOptions(num_workers=2)
    ds = MapDataset.range(NUM).map(BlocksOnly()).to_iter_dataset().mp_prefetch(options)
    assert sorted(ds) == [x + 1 for x in range(NUM)]


class BlocksOnly(grain.transforms.Map):
    """Knows of each element whether it was in a block."""

    def map(self, element):
        return element + 1

    def map_block(self, elements):
        return np.asarray(elements) + 1


class Flagged(grain.transforms.Map):
    def map(self, element):  # noqa: ARG002
        return False

    def map_block(self, elements):
        return [True] * len(elements)


def test_arrays_are_accepted_as_blocks():
    rows = list(MapDataset.range(50).map(BlocksOnly()).batch(10))
    assert [row.tolist() for row in rows] == np.arange(1, 51).reshape(5, 10).tolist()


@pytest.mark.parametrize(
    "read",
    [
        lambda ds: ds,
        lambda ds: ds.to_iter_dataset(),
        lambda ds: ds.to_iter_dataset(grain.ReadOptions(num_threads=0)),
        lambda ds: ds.to_iter_dataset(grain.ReadOptions(num_workers=1)),
    ],
    ids=["map dataset", "threads", "caller", "workers"],
)
def test_most_elements_come_in_blocks(read):
    flags = list(read(MapDataset.range(2000).map(Flagged())))
    assert sum(flags) > 1900


def test_sequential_stages_pass_blocks_where_many_elements_are_requested():
    numbers = MapDataset.range(300).to_iter_dataset()
    batches = list(numbers.map(Flagged()).batch(100))
    assert sum(map(np.sum, batches)) > 250
    # Behind a filter, elements are computed one by one, when they are requested.
    assert not any(numbers.filter(lambda x: x % 2 == 0).map(Flagged()))


def test_sequential_stages_fail_at_the_element():
    def pipeline(transform):
        return MapDataset.range(NUM).to_iter_dataset().map(transform).map(str).batch(10)

    blocks = outcome(pipeline(Scale([57])))
    assert blocks == outcome(pipeline(OneByOne(Scale([57]))))
    assert len(blocks[0]) == 5


def test_states_are_those_of_elements():
    def iterator(transform):
        ds = MapDataset.range(NUM).shuffle(seed=2).map(transform).to_iter_dataset()
        return iter(ds.map(transform).filter(lambda x: x % 2).batch(3))

    blocks, singly = iterator(Scale()), iterator(OneByOne(Scale()))
    for _ in range(9):
        np.testing.assert_equal(next(blocks), next(singly))
        assert blocks.get_state() == singly.get_state()
    later = [next(blocks) for _ in range(4)]
    again = iterator(Scale())
    again.set_state(singly.get_state())
    np.testing.assert_equal([next(again) for _ in range(4)], later)


def test_a_failing_block_is_computed_one_by_one_up_to_the_element():
    transform = Scale([57])
    program = compiled(MapDataset.range(NUM).map(transform)._node)
    result = program.run(10, 100)
    assert result.elements == [x * 3 for x in range(10, 57)]
    assert transform.blocks == [100]
    assert transform.singly == list(range(10, 58))


def test_a_block_may_fail_where_no_element_does():
    class Refusing(Scale):
        def map_block(self, elements):
            elements.clear()  # its own list
            raise MemoryError("too many at once")

    assert list(MapDataset.range(NUM).map(Refusing())) == [x * 3 for x in range(NUM)]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda elements: elements[1:], "got 15 elements"),
        (dict.fromkeys, "got a dict"),
        (lambda _: None, "got a NoneType"),
        (iter, "got a list_iterator"),
        (lambda elements: "x" * len(elements), "got a str"),
    ],
)
def test_a_block_of_another_length_is_refused(answer, found, monkeypatch):
    # Else a first element for which a busy machine takes long makes the next blocks shorter.
    monkeypatch.setattr(tuning, "SHARED_FROM_S", math.inf)

    class Wrong(Scale):
        def map_block(self, elements):
            return answer(elements)

    with pytest.raises(ValueError, match=r"map_block` must return a list") as refused:
        next(iter(MapDataset.range(NUM).map(float).map(Wrong()).batch(17)))
    assert found in str(refused.value)
    assert "MapMapDataset(transform=Wrong)" in refused.value.__notes__[0]


def test_an_interrupt_is_not_computed_again():
    class Interrupted(Scale):
        def map_block(self, elements):  # noqa: ARG002
            raise KeyboardInterrupt

    transform = Interrupted()
    program = compiled(MapDataset.range(NUM).map(transform)._node)
    with pytest.raises(KeyboardInterrupt):
        program.run(0, 20)
    assert not transform.singly


def test_stop_iteration_does_not_end_the_data():
    class Stopping(grain.transforms.Map):
        def map(self, element):
            return next(iter(())) if element == 30 else element

        def map_block(self, elements):
            return list(map(self.map, elements))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(MapDataset.range(NUM).map(Stopping()))


def test_a_callable_may_have_map_block():
    class Callable:
        def __call__(self, element):  # noqa: ARG002
            return False

        def map_block(self, elements):
            return [True] * len(elements)

    assert all(MapDataset.range(64).map(Callable()).batch(64)[0][1:])


def test_a_derived_class_that_replaces_map_alone_is_called_for_each_element():
    class Negative(Scale):
        def map(self, element):
            return -super().map(element)

    class NegativeBlocks(Negative):
        def map_block(self, elements):
            return [-result for result in super().map_block(elements)]

    for transform in (Negative(), NegativeBlocks()):
        assert list(MapDataset.range(NUM).map(transform)) == [-3 * n for n in range(NUM)]
        assert bool(transform.blocks) is isinstance(transform, NegativeBlocks)


def test_objects_that_answer_to_any_name_have_none():
    class Anything:
        def __call__(self, element):
            return element

        def __getattr__(self, name):
            return lambda _: []

    assert list(MapDataset.range(20).map(Anything())) == list(range(20))


def test_large_results_come_in_small_blocks():
    class Large(grain.transforms.Map):
        def __init__(self):
            self.blocks = []

        def map(self, element):  # noqa: ARG002
            return np.zeros(1 << 20, np.uint8)

        def map_block(self, elements):
            self.blocks.append(len(elements))
            return [self.map(element) for element in elements]

    large = Large()
    assert sum(MapDataset.range(100).map(large).map(len)) == 100 << 20
    assert max(large.blocks) <= tuning.LIST_BYTES >> 20


class Sized(grain.transforms.Map):
    """Texts of the lengths that the elements are."""

    def map(self, element):
        return "x" * element

    def map_block(self, elements):
        return [self.map(element) for element in elements]


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(20, 300)))
def test_results_of_any_sizes_are_complete(seed, monkeypatch):
    """Each call of a block function decides how long the next one is."""
    monkeypatch.setattr(tuning, "LIST_BYTES", 40)
    chosen = random.Random(seed)
    sizes = [chosen.choice([0, 0, 0, 1, 2, 20]) for _ in range(chosen.choice([30, 90, 3000]))]
    ds = MapDataset.source(sizes).map(Sized()).map(len)
    for _ in range(20):
        start = chosen.randrange(len(sizes))
        asked = range(start, chosen.randrange(start, len(sizes)))
        assert ds.__getitems__(asked) == [sizes[at] for at in asked]


def test_slow_functions_of_elements_are_not_collected_into_blocks():
    """Elements before a block function are delivered as soon as they are computed."""
    num_computed = 0

    def slow(x):
        nonlocal num_computed
        num_computed += 1
        time.sleep(0.02)
        return x

    options = grain.ReadOptions(num_threads=0)
    iterator = iter(MapDataset.range(NUM).map(slow).map(Scale()).to_iter_dataset(options))
    for _ in range(5):
        next(iterator)
    assert num_computed <= 8


def test_slow_calls_get_longer_blocks():
    """Where a call costs the same whatever its length, as a remote one does."""
    waits = functools.partial(time.sleep, 0.01)

    class Remote(Scale):
        def map(self, element):
            waits()
            return super().map(element)

        def map_block(self, elements):
            waits()
            return super().map_block(elements)

    transform = Remote()
    ds = MapDataset.range(NUM).map(transform)
    caller = grain.ReadOptions(num_threads=0)
    assert list(ds.to_iter_dataset(caller)) == [x * 3 for x in range(NUM)]
    assert max(transform.blocks) >= tuning.MIN_LIST_LEN
    assert len(transform.blocks) + len(transform.singly) < NUM / 4


def test_threads_get_blocks_of_their_own():
    names = set()

    class Named(Scale):
        def map_block(self, elements):
            names.add(threading.current_thread().name)
            time.sleep(0.005 * len(elements))
            return super().map_block(elements)

    options = grain.ReadOptions(num_threads=4)
    assert len(list(MapDataset.range(NUM).map(Named()).to_iter_dataset(options))) == NUM
    assert len(names) > 1


def test_data_loader_passes_blocks():
    loader = grain.DataLoader(
        data_source=range(64),
        sampler=grain.samplers.IndexSampler(64, shuffle=False, num_epochs=1),
        operations=[Flagged(), grain.transforms.Batch(32)],
    )
    assert sum(np.concatenate(list(loader))) > 48


def test_statistics_share_the_time_of_a_call_among_its_elements():
    class Slow(Scale):
        def map_block(self, elements):
            time.sleep(0.001 * len(elements))
            return super().map_block(elements)

    ds = (
        MapDataset.range(NUM)
        .map(lambda x: x)
        .map(Slow())
        .to_iter_dataset(grain.ReadOptions(num_threads=0))
    )
    # Otherwise, elements of calls that are too short to be timed are estimated.
    grain.config.update("py_debug_mode", value=True)
    try:
        iterator = iter(ds.batch(50))
        list(iterator)
        stages = iterator.stats()["stages"]
    finally:
        grain.config.update("py_debug_mode", value=False)
    (slow,) = [stage for stage in stages if "Slow" in stage["name"]]
    assert slow["elements"] == NUM
    assert slow["time_s"] >= NUM * 0.0008
    assert slow["max_s"] >= 0.001
    assert slow["wait_share"] > 0.5


def test_pickled_pipelines_keep_their_blocks():
    ds = pickle.loads(pickle.dumps(MapDataset.range(64).map(Flagged())))
    assert all(ds.batch(64)[0][1:])


def test_damaged_records_fail_at_their_place(tmp_path):
    class Lengths(grain.transforms.Map):
        def map(self, element):
            return {"x": np.full(8, len(element))}

        def map_block(self, elements):
            return list(map(self.map, elements))

    path = tmp_path / "records"
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for number in range(64):
            writer.write(bytes([number]) * 1000)
    content = bytearray(path.read_bytes())
    content[content.index(bytes([40]) * 100) + 50] ^= 1
    path.write_bytes(content)
    ds = MapDataset.source(grain.sources.ArrayRecordDataSource(str(path))).map(Lengths())
    batches = iter(ds.batch(16))
    assert [next(batches)["x"].shape for _ in range(2)] == [(16, 8)] * 2
    with pytest.raises(GrainmillError) as failed:
        next(batches)
    assert "element 40" in failed.value.__notes__[0]
