"""`ParseExample` agrees with TensorFlow, with `protobuf` and with a slow decoder in Python."""

import json
import pickle
from pathlib import Path

import numpy as np
import oracle_example as oracle
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_example import bytes_list, entry, example, float_list, int64_list, part, varint

import grainmill as grain
from grainmill import MapDataset
from grainmill.array_record import ArrayRecordWriter
from grainmill.transforms import Feature, ParseExample

GOLDEN = json.loads((Path(__file__).parent / "golden/tf_example.json").read_text("utf-8"))
DTYPES = {"int64": np.int64, "float32": np.float32, "bytes": bytes}
DEFAULTS = {"int64": -7, "float32": 0.5, "bytes": b"none"}

# Where TensorFlow refuses what is a message for `protobuf`, or passes over parts of it.
NOT_AS_TENSORFLOW = {
    "mixed",
    "two packed",
    "two lists",
    "two lists d",
    "two kinds",
    "unknown in features",
    "unknown in entry",
    "unknown in feature",
    "no key",
    "no value",
    "key twice",
    "value twice",
    "value twice2",
    "group",
    "long tag",
}
# What it reads, and `protobuf` refuses.
REFUSED = {"field0", "cut floats"}


def read(transform, record):
    try:
        return transform.map(record)
    except ValueError:
        return None


def assert_same(found, expected):
    """Equal in values, types, dtypes and shapes."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        np.testing.assert_array_equal(found[name], value)
        if isinstance(value, np.ndarray | np.generic):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)


def golden_features(spec):
    return {
        name: Feature(DTYPES[kind], shape, DEFAULTS[kind] if default else None)
        for name, (kind, shape, default) in spec.items()
    }


def golden_value(value, kind, shape):
    if kind == "bytes":
        if isinstance(value, str):
            return bytes.fromhex(value)
        texts, found_shape = value
        array = np.empty(len(texts), object)
        array[:] = [bytes.fromhex(text) for text in texts]
        return array.reshape(found_shape)
    array = np.array(value, DTYPES[kind])
    if not shape:
        return array[()]
    return array.reshape(-1, *shape[1:]) if shape[0] == -1 else array


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[case["name"] for case in GOLDEN["cases"]])
def test_values_are_those_of_tensorflow(case):
    found = read(ParseExample(golden_features(case["spec"])), bytes.fromhex(case["record"]))
    if case["name"] in REFUSED:
        assert found is None
        return
    expected = case["expected"]
    if expected is None and case["name"] not in NOT_AS_TENSORFLOW:
        assert found is None
    elif case["name"] not in NOT_AS_TENSORFLOW:
        spec = case["spec"]
        expected = {
            name: golden_value(expected[name], kind, shape)
            for name, (kind, shape, _) in spec.items()
        }
        assert_same(found, expected)


def by_protobuf(message):
    """What the package reads, but entries without a list do not count; `None` if nothing."""
    try:
        found = oracle.by_protobuf(message)
    except Exception:
        return None
    unset = {name for name, feature in oracle.entries(message, 1) if not oracle.values_of(feature)}
    before = oracle.features_of(message)
    return {**found, **{name: before[name] for name in unset & before.keys()}}


@pytest.mark.parametrize(
    "case",
    # The package passes over all of an entry in which it finds an unknown field.
    [case for case in GOLDEN["cases"] if case["name"] != "unknown in entry"],
    ids=lambda case: case["name"],
)
def test_values_are_those_of_protobuf(case):
    message = bytes.fromhex(case["record"])
    expected = by_protobuf(message)
    try:
        assert oracle.features_of(message) == expected
    except oracle.MalformedError:
        assert expected is None
    ragged = {name: Feature(DTYPES[kind], (-1,)) for name, (kind, _, _) in case["spec"].items()}
    found = read(ParseExample(ragged), message)
    if expected is None:
        # What is malformed inside features that are not asked for is not looked at.
        assert found is None or not ragged
        return
    names = {"float32": "float"}
    kinds = {name: names.get(kind, kind) for name, (kind, _, _) in case["spec"].items()}
    if any(expected.get(name, (kind,))[0] != kind for name, kind in kinds.items()):
        assert found is None
        return
    wanted = {
        name: oracle.shaped(expected.get(name, (0, []))[1], DTYPES[kind], (-1,))
        for name, (kind, _, _) in case["spec"].items()
    }
    assert_same(found, wanted)


int64s = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)
floats = st.floats(width=32, allow_nan=False)
lists = st.one_of(
    st.tuples(st.just("int64"), st.lists(int64s, max_size=80), st.booleans()),
    st.tuples(st.just("float"), st.lists(floats, max_size=9), st.booleans()),
    st.tuples(st.just("bytes"), st.lists(st.binary(max_size=9), max_size=4), st.booleans()),
)
WRITERS = {
    "int64": int64_list,
    "float": float_list,
    "bytes": lambda values, **_: bytes_list(values),
}
junk = st.sampled_from([b"", b"", part(9, b"zz"), varint(15 << 3) + b"\x01", b"\x0b\x08\x01\x0c"])


@st.composite
def messages(draw):
    """Messages with features a to d, in any order, repeated, split and mixed with other fields."""
    written = b""
    for _ in range(draw(st.integers(0, 3))):
        inside = b""
        for _ in range(draw(st.integers(0, 4))):
            kind, values, packed = draw(lists)
            feature = draw(junk) + WRITERS[kind](values, packed=packed) + draw(junk)
            if draw(st.booleans()):
                kind, values, packed = draw(lists)
                feature += WRITERS[kind](values, packed=packed)
            inside += entry(draw(st.sampled_from("abcd")), feature)
        written += draw(junk) + part(1, inside)
    return written


@given(messages(), st.data())
@settings(max_examples=cases(300, 15_000))
def test_random_messages_are_read_as_slowly(message, data):
    if data.draw(st.integers(0, 9)) == 0:
        message = message[: data.draw(st.integers(0, len(message)))]
    dtypes = {"int64": np.int64, "float": np.float32, "bytes": bytes}
    try:
        expected = oracle.features_of(message)
    except oracle.MalformedError:
        expected = None
    assert by_protobuf(message) == expected
    if expected is None:
        everything = {name: Feature(np.int64, (-1,)) for name in "abcd"}
        assert read(ParseExample(everything), message) is None
        return
    features = {name: Feature(dtypes[kind], (-1,)) for name, (kind, _) in expected.items()}
    values = {
        name: oracle.shaped(values, dtypes[kind], (-1,))
        for name, (kind, values) in expected.items()
    }
    assert_same(ParseExample(features).map(message), values)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
@given(values=st.lists(int64s, min_size=1, max_size=60))
@settings(max_examples=cases(30, 1_500))
def test_values_that_do_not_fit_the_dtype_are_refused(dtype, values):
    parse = ParseExample({"x": Feature(dtype, (-1,))})
    limits = np.iinfo(dtype)
    wrong = [value for value in values if not limits.min <= value <= limits.max]
    record = example(x=int64_list(values))
    if wrong:
        with pytest.raises(ValueError, match=f"feature `x`: the value {wrong[0]} does not fit"):
            parse.map(record)
    else:
        np.testing.assert_array_equal(parse.map(record)["x"], np.array(values, dtype))


def test_numbers_have_the_byte_order_of_the_machine():
    features = {"x": Feature(">i4", shape=(2,)), "y": Feature(">f4"), "z": Feature(">i8")}
    record = example(x=int64_list([1, 2]), y=float_list([0.5]), z=int64_list([3]))
    for found in (
        ParseExample(features).map(record),
        MapDataset.source([record]).map(ParseExample(features))[0],
        {
            name: rows[0]
            for name, rows in next(
                iter(MapDataset.source([record]).map(ParseExample(features)).batch(1))
            ).items()
        },
    ):
        assert (found["x"].tolist(), float(found["y"]), int(found["z"])) == ([1, 2], 0.5, 3)
        assert all(value.dtype.isnative for value in found.values())


RECORD = example(
    id=bytes_list([b"doc"]), label=int64_list([7]), tokens=int64_list([1, 2, 300]),
    weight=float_list([0.5, 1.5]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("features", "problem"),
    [
        ({"label": "float32"}, "feature `label`: it is a int64_list, expected a float_list"),
        ({"tokens": "int64"}, "feature `tokens`: it has 3 values, its shape needs 1"),
        ({"tokens": Feature("int64", (2, 2))}, "it has 3 values, its shape needs 4"),
        ({"tokens": Feature("int64", (-1, 2))}, "it has 3 values, its shape needs a multiple of 2"),
        (
            {"tokens": Feature("uint8", (3,))},
            "feature `tokens`: the value 300 does not fit the dtype",
        ),
        ({"label": bool}, "the value 7 does not fit the dtype"),
        ({"other": "int64"}, "feature `other`: it is missing"),
    ],
)
def test_errors_name_the_feature_and_the_record(features, problem):
    ds = MapDataset.source([example(), RECORD]).map(ParseExample(features))
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")) as failed:
        ds[1]
    (notes,) = failed.value.__notes__
    assert "while computing element 1 of `MapMapDataset(transform=ParseExample)`" in notes
    assert "from record 1 of `SourceMapDataset(source=list)`" in notes


@pytest.mark.parametrize(
    "record", [b"\x0a", RECORD[:-1], b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f"]
)
def test_what_is_no_message_is_refused(record):
    with pytest.raises(
        ValueError, match=r"the record is no `tf.train.Example`: .*|feature `tokens`"
    ):
        ParseExample({"tokens": Feature("int64", (-1,))}).map(record)


def test_every_truncation_is_refused_or_lacks_features():
    kinds = {"id": bytes, "label": "int64", "tokens": "int64", "weight": "float32"}
    parse = ParseExample({name: Feature(kind, (-1,)) for name, kind in kinds.items()})
    for length in range(1, len(RECORD)):
        with pytest.raises(ValueError, match="the record is no"):
            parse.map(RECORD[:length])


def test_lengths_beyond_memory_are_refused():
    huge = varint(2**60)
    for record in (b"\x0a" + huge, part(1, b"\x0a" + huge), example(x=b"\x1a" + huge)):
        with pytest.raises(ValueError, match="ends within a field"):
            ParseExample({"x": "int64"}).map(record)


def test_records_must_be_bytes():
    with pytest.raises(TypeError, match="a record must be `bytes`, got a value of type str"):
        ParseExample({}).map("text")


def test_missing_features():
    parse = ParseExample(
        {
            "ragged": Feature("int32", (-1,)),
            "pairs": Feature(bytes, (-1, 2)),
            "fixed": Feature("float32", (2,), default=1.5),
            "one": Feature("int64", default=-1),
            "text": Feature(str, default="none"),
            "given": Feature("int16", (-1,), default=[1, 2]),
            "optional": Feature("int64", (3,), optional=True),
        }
    )
    expected = {
        "ragged": np.empty(0, np.int32),
        "pairs": np.empty((0, 2), object),
        "fixed": np.full(2, 1.5, np.float32),
        "one": np.int64(-1),
        "text": "none",
        "given": np.array([1, 2], np.int16),
        "optional": None,
    }
    for record in (b"", example(), example(fixed=b"", one=b"", other=int64_list([1]))):
        assert_same(parse.map(record), expected)
    first, second = parse.map_block([b"", b""])
    first["fixed"][:] = 0
    assert_same(second, expected)


def test_texts_must_be_utf_8():
    parse = ParseExample({"x": Feature(str, (-1,))})
    assert list(parse.map(example(x=bytes_list(["é".encode(), b""])))["x"]) == ["é", ""]
    with pytest.raises(ValueError, match="feature `x`: it is not valid UTF-8"):
        parse.map(example(x=bytes_list([b"\xff"])))


@pytest.mark.parametrize(
    ("feature", "problem"),
    [
        ("complex64", "`dtype` must be"),
        (object, "`dtype` must be"),
        (Feature("int64", (-2,)), "lengths from 0 on"),
        (Feature("int64", (2, -1)), "lengths from 0 on"),
        (Feature("int64", (1.5,)), "must consist of integers"),
        (Feature("int64", (2,), default=[1, 2, 3]), "`default` .* does not fit"),
        (Feature("int8", default=300), "`default` 300 does not fit"),
        (Feature("int8", default=1.5), "`default` 1.5 does not fit"),
        (Feature(bytes, default="text"), "`default` must be bytes"),
        (Feature("int8", default=1, optional=True), "not both"),
    ],
)
def test_impossible_features_are_refused(feature, problem):
    with pytest.raises(ValueError, match=f"feature `x`: .*{problem}|{problem}"):
        ParseExample({"x": feature})


def test_features_must_have_names_and_shapes_lengths():
    with pytest.raises(TypeError, match=r"`features` must be a mapping from each name .* got list"):
        ParseExample(["label"])
    with pytest.raises(TypeError, match=r"`sequences` must be a mapping from each name .* got str"):
        ParseExample({}, sequences="label")
    with pytest.raises(
        TypeError, match="feature `x`: `shape` must be a sequence of lengths, got 3"
    ):
        ParseExample({"x": Feature("int64", 3)})


def test_sequence_examples():
    record = oracle.sequence_example(
        {"id": bytes_list([b"a"])},
        {
            "frames": [float_list([1, 2]), float_list([3, 4])],
            "words": [int64_list([1]), int64_list([]), int64_list([2, 3])],
            "names": [bytes_list([b"x"]), bytes_list([b"y"])],
            "none": [],
        },
    )
    sequences = {
        "frames": Feature("float32", (2,)),
        "words": Feature("int32", (-1,)),
        "names": bytes,
        "none": "int64",
        "absent": Feature("int64", optional=True),
    }
    found = ParseExample({"id": bytes}, sequences=sequences).map(record)
    words = found.pop("words")
    assert [word.tolist() for word in words] == [[1], [], [2, 3]]
    assert_same(
        found,
        {
            "id": b"a",
            "frames": np.array([[1, 2], [3, 4]], np.float32),
            "names": np.array([b"x", b"y"], object),
            "none": np.empty(0, np.int64),
            "absent": None,
        },
    )
    with pytest.raises(ValueError, match=r"feature `words`: step 1: .* has 0 values"):
        ParseExample({}, sequences={"words": "int64"}).map(record)
    with pytest.raises(ValueError, match="feature `more`: it is missing"):
        ParseExample({}, sequences={"more": "int64"}).map(record)
    with pytest.raises(ValueError, match="both have the name 'id'"):
        ParseExample({"id": bytes}, sequences={"id": bytes})


# --- in pipelines -------------------------------------------------------------------------------

NUM = 300
FEATURES = {
    "tokens": Feature("int32", (32,)),
    "label": np.int64,
    "name": bytes,
    "weights": Feature("float64", (2, 2), default=0.25),
}


def record_of(number, *, wrong=False):
    rng = np.random.default_rng(number)
    given = {
        "label": int64_list([number]),
        "other": bytes_list([b"x" * 50]),
        "name": bytes_list([b"n%d" % number]),
        "tokens": int64_list(rng.integers(0, 50_000, 31 if wrong else 32).tolist()),
    }
    if number % 3:
        given["weights"] = float_list([number, 1, 2, 3], packed=bool(number % 2))
    return example(**given)


def write(path, records, options="group_size:1,uncompressed"):
    with ArrayRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)
    return grain.sources.ArrayRecordDataSource(str(path))


def test_a_wrong_record_fails_at_its_place(tmp_path):
    for at in (0, 1, 77, NUM - 1):
        records = [record_of(number, wrong=number == at) for number in range(NUM)]
        source = write(tmp_path / f"records{at}", records)
        batches = iter(MapDataset.source(source).map(ParseExample(FEATURES)).batch(10))
        for _ in range(at // 10):
            next(batches)
        with pytest.raises(ValueError, match="it has 31 values") as failed:
            next(batches)
        assert f"while computing element {at} of `MapMapDataset" in failed.value.__notes__[0]


def test_maps_before_and_after(tmp_path):
    source = write(tmp_path / "records", map(record_of, range(NUM)))
    ds = MapDataset.source(source).map(lambda record: record).map(ParseExample(FEATURES))
    after = ds.map(lambda x: {"label": x["label"] + 1}).batch(100)
    assert next(iter(after))["label"].tolist() == list(range(1, 101))
    expected = list(MapDataset.source(source).map(ParseExample(FEATURES)).batch(100))
    for batch, other in zip(ds.batch(100), expected, strict=True):
        assert_same(batch, other)


def test_it_is_pickled_and_shown():
    parse = pickle.loads(pickle.dumps(ParseExample(FEATURES, sequences={"s": "int64"})))
    assert repr(parse) == repr(ParseExample(FEATURES, sequences={"s": "int64"}))
    assert "Feature(dtype='int32', shape=(32,)" in repr(parse)
    again = pickle.loads(pickle.dumps(ParseExample(FEATURES)))
    assert_same(again.map(record_of(1)), ParseExample(FEATURES).map(record_of(1)))
