"""Random pipelines over sources of all formats give what they give over lists of the elements."""

import numpy as np
import pytest
from bad_files import FORMATS, LINES, made, plain
from bucket_server import BucketServer
from effort import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_formats import bagz

import grainmill as grain
from grainmill import sources

DICTS = ["parquet", "hugging_face", "json_lines"]  # whose elements have the same fields


def _write(directory):
    """A file of each format, and three shards, by the names of the sources."""
    for name in FORMATS:
        (directory / name).mkdir()
        made(name, directory / name)
    for shard in range(3):
        path = directory / f"shard-{shard:05}-of-00003.bag"
        path.write_bytes(bagz(LINES[shard::3]))


def _opened(place, names):
    found = {
        name: FORMATS[name].open(f"{place}/{name}/file{FORMATS[name].extension}") for name in names
    }
    shards = [f"{place}/shard-{shard:05}-of-00003.bag" for shard in range(3)]
    found["bagz_interleaved"] = sources.BagzDataSource(shards, layout="interleaved")
    path = f"{place}/array_record/file.array_record"
    found["ranges"] = sources.ArrayRecordDataSource([f"{path}[2:9]", path])
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Sources of local files."""
    directory = tmp_path_factory.mktemp("local")
    _write(directory)
    return _opened(directory, FORMATS)


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """Sources of files on a server that answers late."""
    directory = tmp_path_factory.mktemp("remote")
    _write(directory)
    with pytest.MonkeyPatch.context() as patch, BucketServer(latency_s=0.001) as server:
        patch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for path in directory.rglob("*.*"):
            server.put(f"/{path.relative_to(directory)}", path.read_bytes())
        yield _opened(server.url, [name for name in FORMATS if name != "hugging_face"])


def copied(element):
    return dict(element) if isinstance(element, dict) else element


def double(element):
    return element, element


def with_index(index, element):
    return index, element


leaves = st.tuples(st.just("source"), st.integers(0, 30), st.just(None))


def many(child):
    return [child] * 20


def extended(children, functions):
    numbers = st.none() | st.integers(-6, 6)
    several = st.lists(children, min_size=2, max_size=4)
    weights = st.lists(st.integers(1, 4), min_size=4, max_size=4)
    steps = st.tuples(numbers, numbers, st.sampled_from([1, 2, -1]))
    return st.one_of(
        st.tuples(st.just("shuffle"), children, st.integers(0, 5)),
        st.tuples(st.just("repeat"), children, st.just(2)),
        st.tuples(st.just("slice"), children, steps),
        st.tuples(st.just("map"), children, st.sampled_from(functions)),
        st.tuples(st.just("concatenate"), several | st.builds(many, children), st.just(None)),
        st.tuples(st.just("mix"), several, weights),
    )


def plans(*functions):
    """Trees of (name of the stage, parent or parents, argument)."""
    return st.recursive(leaves, lambda children: extended(children, functions), max_leaves=6)


def built(plan, leaf):
    """The dataset of a plan; `leaf` makes one of the number of a source."""
    kind, on, argument = plan
    if kind == "source":
        return leaf(on)
    if isinstance(on, list):
        parts = [built(each, leaf) for each in on]
        if kind == "mix":
            return grain.MapDataset.mix(parts, argument[: len(parts)])
        return grain.MapDataset.concatenate(parts)
    ds = built(on, leaf)
    stages = {
        "shuffle": lambda: ds.shuffle(seed=argument),
        "repeat": lambda: ds.repeat(argument),
        # What is empty cannot be mixed.
        "slice": lambda: ds[slice(*argument)] if len(ds[slice(*argument)]) else ds,
        "map": lambda: (ds.map_with_index if argument is with_index else ds.map)(argument),
    }
    return stages[kind]()


def simple(element):
    """An element as plain values; arrays with their dtypes."""
    match element:
        case tuple():
            return tuple(simple(each) for each in element)
        case np.ndarray():
            return str(element.dtype), element.tolist()
        case dict():
            return {name: simple(value) for name, value in element.items()}
    return plain([element])[0]


def check(by_name, plan, batch_size, start):
    opened = list(by_name.values())
    lists = [list(source.__getitems__(range(len(source)))) for source in opened]
    ds = built(plan, lambda number: grain.MapDataset.source(opened[number % len(opened)]))
    twin = built(plan, lambda number: grain.MapDataset.source(lists[number % len(lists)]))
    assert len(ds) == len(twin)
    if batch_size:
        ds, twin = ds.batch(batch_size), twin.batch(batch_size)
    expected = [simple(element) for element in twin]
    assert [simple(element) for element in ds] == expected
    for index in {0, start, len(ds) - 1}:
        if 0 <= index < len(ds):
            assert simple(ds[index]) == expected[index]
    iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
    for _ in range(min(start, len(ds))):
        next(iterator)
    again = iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
    again.set_state(iterator.get_state())
    assert [simple(element) for element in iterator] == expected[start:]
    assert [simple(element) for element in again] == expected[start:]


# Each pipeline over the slow server takes a tenth of a second.
pytestmark = pytest.mark.timeout(cases(300, 7200))
NUM = cases(40, 3000)
LIMITS = {
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}


@settings(max_examples=NUM, **LIMITS)
@given(plan=plans(copied, double, with_index), start=st.integers(0, 40))
def test_elements_are_those_of_lists(local, plan, start):
    check(local, plan, 0, start)


@settings(max_examples=NUM, **LIMITS)
@given(plan=plans(copied), batch_size=st.integers(1, 7), start=st.integers(0, 10))
def test_batches_are_those_of_lists(local, plan, batch_size, start):
    check({name: local[name] for name in DICTS}, plan, batch_size, start)


@settings(max_examples=NUM // 2, **LIMITS)
@given(plan=plans(copied, double, with_index), start=st.integers(0, 40))
def test_elements_of_a_slow_server_are_those_of_lists(remote, plan, start):
    check(remote, plan, 0, start)


@settings(max_examples=NUM // 2, **LIMITS)
@given(plan=plans(copied), batch_size=st.integers(1, 7), start=st.integers(0, 10))
def test_batches_of_a_slow_server_are_those_of_lists(remote, plan, batch_size, start):
    kinds = {name: remote[name] for name in DICTS if name in remote}
    check(kinds, plan, batch_size, start)
