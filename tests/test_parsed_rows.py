"""What parsers write to the rows of batches is what they return for one record after the other."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from one_by_one import OneByOne
from oracle_example import bytes_list, example, float_list, int64_list
from test_parse_example import FEATURES, record_of, write

import grainmill as grain
from grainmill import MapDataset
from grainmill._native import Records
from grainmill.transforms import Feature, JsonField, ParseExample, ParseJson

NUM = 180


FIELDS = {
    "tokens": JsonField("int32", shape=(32,)),
    "label": "int64",
    "name": str,
    "weights": JsonField("float64", shape=(2, 2), default=0.25),
    "more": JsonField(object, path=("deep", "more")),
}


def json_of(number):
    rng = np.random.default_rng(number)
    fields = {
        "label": number,
        "deep": {"skipped": [{"more": None}], "more": f"{number}"},
        "tokens": rng.integers(0, 50_000, 32).tolist(),
        "name": "n\u00e9\n" * (number % 5),
    }
    if number % 3:
        fields["weights"] = None if number % 2 else [[number, 1], [2, 3]]
    return json.dumps(fields, ensure_ascii=bool(number % 2)).encode()


def write_lines(path, records):
    path.write_bytes(b"\n".join(records))
    return grain.sources.JsonLinesDataSource(str(path))


SOURCES = {
    "files": write,
    "groups": functools.partial(write, options="group_size:16,zstd"),
    "list": lambda _, records: list(records),
    "lines": write_lines,
}
PARSERS = {
    "example": (ParseExample(FEATURES), record_of),
    "json": (ParseJson(FIELDS), json_of),
}
both = pytest.mark.parametrize("parser", PARSERS)


def assert_same(found, expected):
    """Equal in structure, values, types, dtypes and shapes."""
    assert type(found) is type(expected)
    if isinstance(expected, dict | list | tuple):
        assert len(found) == len(expected)
        if isinstance(expected, dict):
            assert list(found) == list(expected)
            found, expected = found.values(), expected.values()
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    else:
        assert np.asarray(found).dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(found, expected)


@both
@pytest.mark.parametrize(
    "options", [None, grain.ReadOptions(num_threads=0), grain.ReadOptions(num_workers=1)]
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batch_size", [1, 7, 128])
def test_batches_are_those_of_single_elements(tmp_path, parser, source, batch_size, options):
    parse, make = PARSERS[parser]
    if source == "lines" and parser == "example":
        return  # its records have line ends
    records = SOURCES[source](tmp_path / "records", map(make, range(NUM)))

    def batches(transform):
        ds = MapDataset.source(records).shuffle(seed=1).map(transform).batch(batch_size)
        return list(ds if options is None else ds.to_iter_dataset(options))

    found, expected = batches(parse), batches(OneByOne(parse))
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)


@both
def test_rows_are_written_by_the_engine(tmp_path, monkeypatch, parser):
    """Only the first elements are built in Python, which show their structure, and no `bytes`."""
    parse, make = PARSERS[parser]
    source = write(tmp_path / "records", map(make, range(NUM)))
    built, taken = [], []
    of_block, fill = type(parse).map_block, type(parse)._fill_rows
    monkeypatch.setattr(
        type(parse), "map_block", lambda self, xs: built.append(len(xs)) or of_block(self, xs)
    )
    monkeypatch.setattr(
        type(parse), "_fill_rows", lambda self, xs, *to: taken.append(xs) or fill(self, xs, *to)
    )
    batches = list(MapDataset.source(source).map(parse).batch(50))
    assert sum(map(len, (batch["label"] for batch in batches))) == NUM
    assert sum(built) < NUM / 3
    assert sum(built) + sum(map(len, taken)) == NUM
    assert {type(records) for records in taken} == {Records}
    first = taken[0]
    assert list(first) == [source[sum(built) + at] for at in range(len(first))]
    assert first[-1] == first[len(first) - 1]
    for beyond in (len(first), -len(first) - 1):
        with pytest.raises(IndexError, match=f"record {beyond} of {len(first)}"):
            first[beyond]


@both
def test_shares_of_many_records_are_in_order(parser):
    """So many bytes that idle threads share them."""
    parse, make = PARSERS[parser]
    records = [make(number % NUM) for number in range(4000)]
    expected = parse.map_block(records)
    columns = {}
    for name, value in expected[0].items():
        is_row = isinstance(value, np.ndarray)
        columns[name] = np.empty((4001, *value.shape), value.dtype) if is_row else ["first"]
    assert parse._fill_rows(records, list(columns.items()), 1)
    for name, column in columns.items():
        for found, element in zip(column[1:], expected, strict=True):
            assert type(found) is type(element[name])
            np.testing.assert_array_equal(found, element[name])


@both
def test_columns_of_other_structures_are_not_filled(parser):
    parse, make = PARSERS[parser]
    names = list(parse.map(make(0)))
    lists = [(name, []) for name in names]
    assert not parse._fill_rows([make(0)], lists[1:], 0)
    assert not parse._fill_rows([make(0)], [*lists, ("x", [])], 0)
    assert not parse._fill_rows([make(0)], [*lists[1:], ("x", [])], 0)
    for rows in (np.empty((1, 31), np.int32), np.empty((1, 32), np.int64), np.empty(32, np.int32)):
        assert not parse._fill_rows([make(0)], [("tokens", rows), *lists[1:]], 0)
    few = np.empty((2, 32), np.int32)
    assert not parse._fill_rows([make(0)] * 2, [("tokens", few), *lists[1:]], 1)
    assert not any(values for _, values in lists)


@pytest.mark.parametrize("values", [["a", {"x": 1}], ["a", [1, 2]], ["a", None], [None, "a"]])
@pytest.mark.parametrize("change", [32, 40])
def test_batches_with_values_of_another_structure(tmp_path, values, change):
    """The structure of a batch is that of its own elements, not of the batch before."""
    of_element = [values[at >= change] for at in range(64)]
    records = [json.dumps({"value": value, "n": [1, 2]}).encode() for value in of_element]
    ds = MapDataset.source(write(tmp_path / "records", records))
    parse = ParseJson({"value": object, "n": JsonField("int32", shape=(2,))})
    found, failure = outcome(ds.map(parse).batch(32))
    expected, expected_failure = outcome(ds.map(OneByOne(parse)).batch(32))
    assert_same(found, expected)
    assert (failure is None) == (expected_failure is None)
    assert failure is None or failure[:2] == expected_failure[:2]


# Fields, and what a record has there: what fits mostly, and sometimes anything.
KINDS = {
    "one": ("int64", (), {}),
    "small": ("int8", (3,), {}),
    "float": ("float32", (2, 1), {"default": 1.5}),
    "any": ("int32", (-1,), {}),
    "none": ("uint16", (0,), {"optional": True}),
    "maybe": ("float64", (2,), {"optional": True}),
    "text": (str, (), {"default": "absent"}),
    "texts": (str, (2,), {}),
    "bytes": (bytes, (), {"optional": True}),
}
numbers = st.integers(-3, 3)


def fitting(name):
    dtype, shape, _ = KINDS[name]
    one = st.text(max_size=3) if dtype in {str, bytes} else numbers
    for length in reversed(shape):
        one = st.lists(one, min_size=max(length, 0), max_size=length if length >= 0 else 3)
    return one


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


def flat(value):
    return [one for item in value for one in flat(item)] if isinstance(value, list) else [value]


def example_with(fields):
    lists = {}
    for name, value in fields.items():
        values = flat(value)
        if all(type(one) is str for one in values) and (values or KINDS[name][0] is str):
            lists[name] = bytes_list([one.encode() for one in values])
        elif "float" in str(KINDS[name][0]):
            lists[name] = float_list([one for one in values if type(one) is int])
        else:
            integers = [one for one in values if type(one) is int and abs(one) < 2**63]
            lists[name] = int64_list(integers)
    return example(**lists)


def json_with(fields):
    return json.dumps(fields).encode("utf-8", "surrogatepass")


MAKERS = {
    "example": (ParseExample, Feature, example_with, KINDS),
    "json": (ParseJson, JsonField, json_with, KINDS | {"object": (object, (), {})}),
}


def outcome(ds):
    """The batches, and what ended them."""
    batches = []
    try:
        batches.extend(ds)
    except (ValueError, TypeError) as failure:
        return batches, (type(failure), str(failure), failure.__notes__)
    return batches, None


@both
@settings(max_examples=cases(25, 10_000))
@given(data=st.data())
def test_random_records_make_the_batches_of_single_elements(parser, data):
    """With values that are missing or do not fit, and what is no record: one error at its place."""
    transform, field, encode, kinds = MAKERS[parser]
    names = data.draw(st.lists(st.sampled_from(list(kinds)), min_size=1, unique=True), "names")

    def value(name):
        fits = anything if name == "object" else fitting(name)
        return fits if data.draw(st.integers(0, 60)) else anything

    records = []
    for _ in range(data.draw(st.integers(0, 24), "count")):
        kept = [name for name in names if data.draw(st.integers(0, 30))]
        record = encode({name: data.draw(value(name)) for name in kept})
        if not data.draw(st.integers(0, 60)):
            record = record[: data.draw(st.integers(0, len(record)))] + b"\xff"
        records.append(record)
    parse = transform(
        {name: field(kinds[name][0], shape=kinds[name][1], **kinds[name][2]) for name in names}
    )
    batch_size = data.draw(st.integers(1, 9), "batch size")
    with tempfile.TemporaryDirectory() as folder:
        sources = [records, write(Path(folder) / "records", records)] if records else []
        for source in sources:
            ds = MapDataset.source(source)
            expected, failure = outcome(ds.map(OneByOne(parse)).batch(batch_size))
            for options in (None, grain.ReadOptions(num_threads=0), grain.ReadOptions()):
                made = ds.map(parse).batch(batch_size)
                made = made if options is None else made.to_iter_dataset(options)
                found, found_failure = outcome(made)
                assert len(found) == len(expected)
                for batch, other in zip(found, expected, strict=True):
                    assert_same(batch, other)
                assert (found_failure is None) == (failure is None)
                if failure is not None:
                    assert found_failure[:2] == failure[:2]
                    assert found_failure[2][0].split("`")[0] == failure[2][0].split("`")[0]
