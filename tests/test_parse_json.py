"""`ParseJson` agrees with Python's `json`, and names what is wrong."""

import json
import pickle

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import grainmill as grain
from grainmill import MapDataset
from grainmill.transforms import JsonField, ParseJson

RECORD = {
    "id": 7,
    "text": 'a "quoted" é 😀 \\ /\n',
    "score": -1.5e-3,
    "ok": True,
    "user": {"name": "x", "ids": [1, 2, 300], "deep": [{"a": None}, {"a": "found"}]},
    "rows": [[1, 2], [3, 4], [5, 6]],
    "big": 2**70,
    "": 1,
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats()
    | texts,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def typed(value):
    """The value with its types, which `==` does not compare."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return type(value).__name__, repr(value)


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1, "\t"]))
@settings(max_examples=cases(200, 10_000))
def test_objects_are_those_of_json(value, ascii_only, indent):
    text = json.dumps({"before": value, "x": value}, ensure_ascii=ascii_only, indent=indent)
    expected = typed(json.loads(text)["x"])
    parse = ParseJson({"x": JsonField(object)})
    assert typed(parse.map(text.encode())["x"]) == expected
    assert typed(parse.map(text)["x"]) == expected


@given(
    text=st.lists(
        st.sampled_from(
            [
                *"{}[],: é",
                *['"x"', '"\\u00e9"', '"\\x"', '"', '{"x":1}', '"x":', "\x00", "\x01", "\n"],
                *["1", "-0", "01", "1.5", "1.", "1e5", "true", "tru", "null"],
                *["NaN", "Na", "Infinity", "-Infinity", "-", "+", "nan", "inf", "Infinit"],
            ]
        ),
        max_size=8,
    ).map("".join),
    wrapped=st.booleans(),
)  # fmt: skip
@settings(max_examples=cases(400, 20_000))
def test_what_is_an_object_is_decided_as_by_json(text, wrapped):
    if wrapped:
        text = '{"x": ' + text + "}"
    try:
        expected = json.loads(text, strict=True)
    except ValueError:
        expected = None
    parse = ParseJson({"x": JsonField(object, default="absent")})
    if not isinstance(expected, dict):
        with pytest.raises(ValueError, match="the record is not"):
            parse.map(text)
    else:
        assert typed(parse.map(text)["x"]) == typed(expected.get("x", "absent"))


def test_every_truncation_is_refused():
    record = json.dumps(RECORD).encode()
    parse = ParseJson({"id": "int64"})
    assert parse.map(record) == {"id": 7}
    for length in range(len(record)):
        with pytest.raises(ValueError, match="the record is not"):
            parse.map(record[:length])


def test_values_of_all_kinds():
    parse = ParseJson(
        {
            "id": "int16",
            "text": str,
            "bytes": JsonField(bytes, path="text"),
            "score": "float32",
            "ok": bool,
            "name": JsonField(str, path=("user", "name")),
            "ids": JsonField("int32", path=("user", "ids"), shape=(-1,)),
            "second": JsonField("uint8", path=("user", "ids", 1)),
            "found": JsonField(str, path=("user", "deep", 1, "a")),
            "names": JsonField(str, path=("user", "none"), shape=(2,), default=["a", "b"]),
            "rows": JsonField("float64", shape=(-1, 2)),
            "fixed": JsonField("int64", path="rows", shape=(3, 2)),
            "big": object,
            "user": object,
            "": int,
            "missing": JsonField("int64", default=-1),
            "null": JsonField("int64", path=("user", "deep", 0, "a"), default=5),
            "optional": JsonField("int64", optional=True),
        }
    )
    found = parse.map(json.dumps(RECORD).encode())
    expected = {
        "id": np.int16(7),
        "text": RECORD["text"],
        "bytes": RECORD["text"].encode(),
        "score": np.float32(-1.5e-3),
        "ok": np.True_,
        "name": "x",
        "ids": np.array([1, 2, 300], np.int32),
        "second": np.uint8(2),
        "found": "found",
        "names": np.array(["a", "b"], object),
        "rows": np.array(RECORD["rows"], np.float64),
        "fixed": np.array(RECORD["rows"]),
        "big": 2**70,
        "user": RECORD["user"],
        "": np.int64(1),
        "missing": np.int64(-1),
        "null": np.int64(5),
        "optional": None,
    }
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        np.testing.assert_array_equal(found[name], value)
        if isinstance(value, np.ndarray | np.generic):
            assert found[name].dtype == value.dtype


def test_a_byte_order_mark_is_passed_over():
    parse = ParseJson({"a": "int64"})
    assert parse.map(b'\xef\xbb\xbf{"a": 1}') == parse.map('\ufeff{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="expected a string at byte 1"):
        parse.map('{\ufeff"a": 1}'.encode())


def test_numbers_that_are_none_have_values():
    text = b'{"x": NaN, "y": [Infinity, -Infinity]}'
    parse = ParseJson({"x": "float32", "y": JsonField("float64", shape=(2,))})
    found = parse.map(text)
    assert np.isnan(found["x"])
    assert found["x"].dtype == np.float32
    assert found["y"].tolist() == [float("inf"), float("-inf")]
    with pytest.raises(ValueError, match="field `x`: expected an integer, found NaN"):
        ParseJson({"x": "int64"}).map(text)


def test_the_last_member_of_a_name_counts():
    parse = ParseJson({"x": JsonField("int64", path=("a", "x"), default=0)})
    assert parse.map('{"a": {"x": 1}, "a": {"x": 2, "x": 3}}') == {"x": 3}
    assert parse.map('{"a": {"x": 1}, "a": {}}') == {"x": 0}
    assert parse.map('{"\\u0061": {"x": 4}}') == {"x": 4}


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        (JsonField("int64", path="score"), "expected an integer, found -0.0015"),
        (JsonField("int64", path="text"), "expected a number, found a string"),
        (JsonField("int64", path="big"), f"the value {2**70} does not fit the dtype"),
        (JsonField("uint8", path=("user", "ids"), shape=(3,)), "the value 300 does not fit"),
        (JsonField("int64", path=("user", "ids"), shape=(2,)), "an array has 3 items, its shape"),
        (JsonField("int64", path="rows", shape=(-1,)), "expected a number, found an array"),
        (JsonField("int64", path="id", shape=(-1,)), "expected an array, found a number"),
        (JsonField(bool, path="text"), "expected true or false, found a string"),
        (JsonField(str, path="id"), "expected a string, found a number"),
        (JsonField(str, path="none"), "it is missing"),
        (JsonField(object, path="none"), "it is missing"),
        (JsonField(str, path=("user", "deep", 0, "a")), "it is missing"),
    ],
)
def test_errors_name_the_field_and_the_record(field, problem):
    records = [json.dumps(RECORD).encode()] * 3
    ds = MapDataset.source(records).map(ParseJson({"x": field}))
    with pytest.raises(ValueError, match=f"field `x`: {problem}") as failed:
        list(ds.batch(3))
    assert "while computing element 0 of `MapMapDataset(transform=ParseJson)`" in "".join(
        failed.value.__notes__
    )


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b'{"x": "\xff"}', "not valid UTF-8 at byte 7"),
        (b'{"x": 1} 2', "more text after the value at byte 9"),
        (b"[1]", "not a JSON object"),
        (b"", "expected a value at byte 0"),
        (b'{"x": "\\ud800"}', "field `x`: half a surrogate pair"),
        (b'{"a":' * 600, "nested too deep"),
        (b"\xef\xbb{}", "not valid UTF-8 at byte 0"),
    ],
)
def test_what_is_not_json_is_refused(record, problem):
    with pytest.raises(ValueError, match=problem):
        ParseJson({"x": object}).map(record)


def test_records_must_be_texts():
    with pytest.raises(TypeError, match="must be `bytes` or `str`, got a value of type int"):
        ParseJson({}).map(3)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("complex64", "`dtype` must be"),
        (JsonField("int64", path=()), "`path` must have"),
        (JsonField("int64", path=("a", -1)), "`path` must have"),
        (JsonField(object, shape=(2,)), "takes no `shape`"),
        (JsonField("int8", default=300), "does not fit"),
        (JsonField("int8", default=1, optional=True), "not both"),
    ],
)
def test_impossible_fields_are_refused(field, problem):
    with pytest.raises(ValueError, match=problem):
        ParseJson({"x": field})


def test_fields_must_have_names_and_shapes_lengths():
    with pytest.raises(TypeError, match=r"`fields` must be a mapping from each name .* got list"):
        ParseJson(["a"])
    with pytest.raises(TypeError, match="field `x`: `shape` must be a sequence of lengths, got 3"):
        ParseJson({"x": JsonField("int64", shape=3)})


def test_batches_and_workers():
    records = [json.dumps({"n": n, "skip": {"n": -1}}) for n in range(100)]
    ds = MapDataset.source(records).map(ParseJson({"n": "int32"}))
    expected = np.arange(100, dtype=np.int32).reshape(10, 10)
    for options in (grain.ReadOptions(), grain.ReadOptions(num_workers=1)):
        batches = list(ds.batch(10).to_iter_dataset(options))
        np.testing.assert_array_equal([batch["n"] for batch in batches], expected)


def test_it_is_pickled_and_shown():
    parse = ParseJson({"x": JsonField("int64", path=("a", 0), default=3)})
    again = pickle.loads(pickle.dumps(parse))
    assert repr(again) == repr(parse)
    assert again.map(b'{"a": [5]}') == {"x": 5}
