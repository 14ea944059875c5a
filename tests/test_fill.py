"""Batches filled by the engine's loop over records equal single elements."""

import random
from pathlib import Path

import numpy as np
import pytest
from effort import cases
from oracle_stack import assert_same, stacked

import grainmill as grain
from grainmill import MapDataset
from grainmill._evaluate.batches.stack import BatchBuilder
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.sources import element_sources
from grainmill._native import Arena
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ArrayRecordDataSource

NUM_RECORDS = 100
RECORD_LEN = 20_000
ODD = 97


class OddError(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for name in ("whole", "damaged"):
        with ArrayRecordWriter(str(folder / name), "group_size:1,uncompressed") as writer:
            for number in range(NUM_RECORDS):
                writer.write(bytes([number]) * RECORD_LEN)
    content = bytearray((folder / "damaged").read_bytes())
    content[content.index(bytes([ODD]) * 100) + 50] ^= 1
    (folder / "damaged").write_bytes(content)
    return folder


def as_array(record):
    return np.frombuffer(record, np.uint8)


def noisy(array, rng):
    return array + rng.integers(0, 100, dtype=np.uint8)


def unless_odd(otherwise):
    return lambda array: otherwise(array) if array[0] == ODD else array


def fails(array):
    raise OddError(f"{array[0]} is odd")


MAPS = {
    "arrays": lambda arrays: arrays,
    "random map": lambda arrays: arrays.seed(3).random_map(noisy),
    "map with index": lambda arrays: arrays.map_with_index(lambda i, array: array + np.uint8(i)),
    "filter": lambda arrays: arrays.filter(lambda array: array[0] != ODD),
    "failure": lambda arrays: arrays.map(unless_odd(fails)),
    "other shape": lambda arrays: arrays.map(unless_odd(lambda array: array[1:])),
    "other dtype": lambda arrays: arrays.map(unless_odd(lambda array: array.astype(np.int16))),
    "other layout": lambda arrays: arrays.map(lambda array: np.repeat(array, 2)[::2]),
    "not an array": lambda arrays: arrays.map(unless_odd(lambda array: array.tolist())),
}

# Elements like one another within a batch of 32, unlike those of the next.
BY_BATCH = {
    "shape by batch": lambda arrays: arrays.map_with_index(lambda i, array: array[i // 32 :]),
    "dtype by batch": lambda arrays: arrays.map_with_index(
        lambda i, array: array.astype([np.uint8, np.int16][i // 32 % 2])
    ),
}

# Elements computed from an array.
SHAPES = {
    "array": lambda array: array,
    "dict": lambda array: {"label": int(array[0]), "array": array, "half": array[::2]},
    "tuple": lambda array: (array, str(array[0])),
    "nested": lambda array: {"array": array, "inner": {"label": int(array[0])}},
    "number": lambda array: int(array[0]),
}


def dataset(folder, name, file="whole", first=as_array):
    source = ArrayRecordDataSource(str(folder / file))
    return (MAPS | BY_BATCH)[name](MapDataset.source(source).shuffle(seed=1).map(first)).repeat(2)


def rows_for(count):
    """Where elements that are arrays go, and the array."""
    builder = BatchBuilder(count, Arena())
    builder.push([np.zeros(RECORD_LEN, np.uint8)])
    return builder.targets, builder.targets.targets[0]


def alike(elements):
    first = elements[0]
    if any(type(element) is not type(first) for element in elements):
        return False
    if type(first) is dict:
        same = all(element.keys() == first.keys() for element in elements)
        return same and all(alike([element[key] for element in elements]) for key in first)
    if type(first) is tuple:
        return all(alike(list(values)) for values in zip(*elements, strict=True))
    return all(np.shape(element) == np.shape(first) for element in elements)


@pytest.mark.parametrize("file", ["whole", "damaged"])
@pytest.mark.parametrize("name", MAPS)
def test_filled_rows_are_the_elements(folder, name, file):
    program = compiled(dataset(folder, name, file)._node)
    chance = random.Random(name)
    filled_most, was_slow = 0, False
    for _ in range(cases(15, 30)):
        count = chance.randrange(1, NUM_RECORDS)
        start = chance.randrange(2 * NUM_RECORDS - count)
        at = start + chance.randrange(count)
        targets, rows = rows_for(count)
        parts = program.run_incrementally(start, count)
        filled, rest = parts.fill(targets, at, start + count, chance.randint(1, 9))
        was_slow |= program.waits_for_storage
        filled_most = max(filled_most, filled)
        whole = program.run(at, start + count - at)
        made = list(rows[at - start : at - start + filled]) + (rest.elements if rest else [])
        np.testing.assert_equal(made, whole.elements[: len(made)])
        failure = rest.failure if rest else None
        if failure is not None:
            assert (type(failure), str(failure)) == (type(whole.failure), str(whole.failure))
        # Storage that has become slow is read in another way.
        whole_block = filled in (0, start + count - at) or was_slow
        assert rest or whole_block or whole.failure is not None
    assert filled_most > 20 or was_slow


@pytest.mark.parametrize("part_len", [1, 4, NUM_RECORDS])
def test_unreadable_record_fails_at_its_position(folder, monkeypatch, part_len):
    asked_again = []
    monkeypatch.setattr(
        element_sources.FileSource, "_read", lambda _, *asked: asked_again.append(asked)
    )
    source = ArrayRecordDataSource(str(folder / "damaged"))
    program = compiled(MapDataset.source(source).map(as_array)._node)
    targets, rows = rows_for(NUM_RECORDS)
    parts = program.run_incrementally(0, NUM_RECORDS)
    filled, rest = parts.fill(targets, 0, NUM_RECORDS, part_len)
    assert filled == ODD // part_len * part_len
    assert [array[0] for array in [*rows[:filled], *rest.elements]] == list(range(ODD))
    with pytest.raises(grain.GrainmillError, match=f"record {ODD}\\)"):
        raise rest.failure
    assert not asked_again


def num_reads():
    """The number of reading system calls of this process so far."""
    with Path("/proc/self/io").open() as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("syscr"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no reads")
def test_nothing_is_read_again_after_a_damaged_record(folder):
    source = ArrayRecordDataSource(str(folder / "damaged"))
    batches = iter(
        MapDataset.source(source)
        .map(as_array)
        .batch(NUM_RECORDS // 2)
        .to_iter_dataset(grain.ReadOptions(num_threads=0))
    )
    next(batches)
    before = num_reads()
    with pytest.raises(grain.GrainmillError, match=f"record {ODD}\\)"):
        next(batches)
    # Those up to the damaged record, once more to find it among those read with it, and what tells
    # how it is damaged; `num_reads` itself takes two.
    assert num_reads() - before <= 2 * (ODD - NUM_RECORDS // 2) + 10


@pytest.mark.parametrize("name", MAPS)
def test_each_element_is_announced_before_it_is_computed(folder, name):
    marked, made_at = [0], []

    def watched(record):
        made_at.append(marked[-1])
        return as_array(record)

    program = compiled(dataset(folder, name, first=watched)._node)
    for _ in range(100):  # tells that the file is in memory, even if the first read lost its core
        program.run(0, 1)
    made_at.clear()
    program.mark = marked.append
    targets, _ = rows_for(100)
    filled, _ = program.run_incrementally(20, 100).fill(targets, 25, 120, 4)
    assert 0 < filled <= len(made_at)
    assert made_at == list(range(25, 25 + len(made_at)))


def ways(elements, batch_size=32, *, with_nones):
    for threads in (0, 16):
        options = grain.ReadOptions(num_threads=threads)
        yield elements.to_iter_dataset(options).batch(batch_size)
        if not with_nones:
            yield elements.batch(batch_size).to_iter_dataset(options)


def drained(batches):
    made = []
    try:
        made.extend(batches)
    except Exception as failure:
        return made, failure
    return made, None


# Batches of 32 elements are computed in two parts; of 8, in one. A damaged file ends both.
@pytest.mark.parametrize(
    ("batch_size", "file"),
    [(32, "whole"), (8, "damaged")]
    + [pytest.param(*case, marks=pytest.mark.long) for case in ((32, "damaged"), (8, "whole"))],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAPS | BY_BATCH)
def test_batches_are_those_of_single_elements(folder, name, shape, file, batch_size):
    elements = dataset(folder, name, file)
    if name != "not an array":
        elements = elements.map(SHAPES[shape])
    expected, group, failed = [], [], False
    for position in range(len(elements)):
        try:
            element = elements[position]
        except Exception:
            failed = True
            break
        if element is not None:
            group.append(element)
        if len(group) == batch_size or position + 1 == len(elements):
            failed = not alike(group)
            if failed:
                break
            expected.append(stacked(group))
            group = []
    for way in ways(elements, batch_size, with_nones=name == "filter"):
        made, failure = drained(way)
        assert (failure is not None) == failed
        assert len(made) == len(expected)
        for batch, wanted in zip(made, expected, strict=True):
            assert_same(batch, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_elements_may_change_from_batch_to_batch(folder, seed):
    kinds = [
        lambda array: array,
        lambda array: array.astype(np.int16),
        lambda array: int(array[0]),
        lambda array: {"a": array, "b": 1},
        lambda array: {"a": array, "b": {"c": 1}},
        lambda array: {"a": array, "b": array[:2]},
        lambda array: {"a": array, "b": [1, 2]},
        lambda array: {"b": 2, "a": array[:9]},
        lambda array: {"a": array, "c": 1.5},
        lambda array: {"a": array[:3], "b": "text" * int(array[0] % 3)},
        lambda array: (array, 1),
        lambda array: [array, 1],
    ]
    chosen = random.Random(seed).choices(range(len(kinds)), k=NUM_RECORDS)
    arrays = MapDataset.source(ArrayRecordDataSource(str(folder / "whole"))).map(as_array)
    elements = arrays.map_with_index(lambda i, array: kinds[chosen[i // 8]](array))
    expected = [
        stacked([elements[i] for i in range(start, min(start + 8, NUM_RECORDS))])
        for start in range(0, NUM_RECORDS, 8)
    ]
    for way in ways(elements, 8, with_nones=False):
        for batch, wanted in zip(way, expected, strict=True):
            assert_same(batch, wanted)


@pytest.mark.parametrize("num_nones", [1, 40])
def test_batches_of_some_nones_are_refused(folder, num_nones):
    arrays = dataset(folder, "arrays")
    batches = arrays.map_with_index(lambda i, array: None if i < num_nones else array).batch(64)
    with pytest.raises(ValueError, match=f"element 0 has an empty NoneType.* {num_nones} has"):
        batches[0]


@pytest.mark.parametrize("missing", ["key", "more", "value"])
def test_containers_of_another_structure_are_refused(folder, missing):
    def element(array):
        pair = {"label": 1, "array": array}
        if array[0] != ODD:
            return pair
        if missing == "value":
            return pair | {"array": array.tolist()}
        return {"label": 1, "row": array} if missing == "key" else pair | {"row": 1}

    arrays = dataset(folder, "arrays")
    elements = arrays.map(element)
    before = [arrays[position][0] for position in range(NUM_RECORDS)].index(ODD)
    for way in ways(elements, with_nones=False):
        made, failure = drained(way)
        assert len(made) == before // 32
        assert "same structure" in str(failure)


@pytest.mark.parametrize("name", ["arrays", "random map", "filter"])
def test_functions_are_called_once_for_each_element(folder, name):
    calls = []

    def counting(array):
        calls.append(int(array[0]))
        return array

    source = ArrayRecordDataSource(str(folder / "whole"))
    arrays = MapDataset.source(source).map(as_array).map(counting)
    options = grain.ReadOptions(num_threads=0)
    batches = MAPS[name](arrays).to_iter_dataset(options).batch(32)
    assert sum(len(batch) for batch in batches) == NUM_RECORDS - (name == "filter")
    assert calls == list(range(NUM_RECORDS))


class OnlyArray:
    """What has no more of an array than that."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array


@pytest.mark.parametrize("every", [1, 3, 8, 100])
@pytest.mark.parametrize("side", [8, 64])  # rows that are copied beside others, and by themselves
def test_rows_of_any_kind_are_those_that_numpy_stacks(every, side):
    def made(number):
        array = np.full((side, side), number, np.float32)
        return OnlyArray(array) if number % every == every - 1 else array

    rows = MapDataset.range(64).map(made)
    expected = [np.stack([np.asarray(made(at + k)) for k in range(16)]) for at in range(0, 64, 16)]
    for num_threads in (0, 4):
        options = grain.ReadOptions(num_threads=num_threads)
        for batches in (
            rows.batch(16).to_iter_dataset(options),
            rows.to_iter_dataset(options).batch(16),
        ):
            assert_same(list(batches), expected)
