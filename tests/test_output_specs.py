"""`get_element_spec` of transforms of the package: as the elements that they return."""

import io

import numpy as np
import pytest
from oracle_example import bytes_list, entry, example, float_list, int64_list, part
from PIL import Image

import grainmill as grain
from grainmill import MapDataset
from grainmill.transforms import (
    DecodeImage,
    DecodeRandomCrop,
    Feature,
    JsonField,
    ParseExample,
    ParseJson,
    Tokenize,
)

get_element_spec = grain.experimental.get_element_spec

RECORD = example(
    a=int64_list([1]),
    b=int64_list([1, 2, 3, 4]),
    c=float_list([1, 2]),
    d=bytes_list([b"x"]),
    e=bytes_list([b"x", b"y"]),
)
STEPS = part(2, entry("f", part(1, int64_list([1, 2])) + part(1, int64_list([3, 4]))))
JSON = '{"a": 1, "b": [[1, 2], [3, 4]], "c": [0.5], "d": "text", "e": ["x", "y"]}'


def image():
    file = io.BytesIO()
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def split(texts):
    return [[len(word) for word in text.split()] for text in texts]


CASES = {
    "example": (
        RECORD,
        lambda ds: ds.map(
            ParseExample(
                {
                    "a": "int64",
                    "b": Feature(">i2", (-1, 2)),
                    "c": Feature("float64", (2,)),
                    "d": bytes,
                    "e": Feature(str, (2,)),
                    "none": Feature("uint8", (3,), default=0),
                }
            )
        ),
    ),
    "sequence example": (
        part(1, entry("a", int64_list([1]))) + STEPS,
        lambda ds: ds.map(ParseExample({"a": "bool"}, sequences={"f": Feature("int32", (2,))})),
    ),
    "json": (
        JSON,
        lambda ds: ds.map(
            ParseJson(
                {
                    "a": "int32",
                    "b": JsonField("float32", shape=(-1, 2)),
                    "c": JsonField("float64", shape=(1,)),
                    "d": str,
                    "e": JsonField(str, shape=(2,)),
                }
            )
        ),
    ),
    "tokens": ("one three", lambda ds: ds.map(Tokenize(split, dtype="uint16"))),
    "tokens in a dict": (
        JSON,
        lambda ds: ds.map(ParseJson({"d": str})).map(Tokenize(split, field="d", output="ids")),
    ),
    "image": (image(), lambda ds: ds.map(DecodeImage(size=(5, 7), channels=1))),
    "whole image": (image(), lambda ds: ds.map(DecodeImage())),
    "image as it is": (image(), lambda ds: ds.map(DecodeImage(channels=None))),
    "image in a dict": (
        example(image=bytes_list([image()]), a=int64_list([1])),
        lambda ds: ds.map(ParseExample({"image": bytes, "a": "int64"})).map(
            DecodeImage("image", size=(5, 7))
        ),
    ),
    "crop": (image(), lambda ds: ds.random_map(DecodeRandomCrop(size=(5, 7)), seed=1)),
}


def describes(spec, value):
    """Whether a spec is that of an element, which may be a dict."""
    if isinstance(spec, dict):
        assert list(spec) == list(value)
        return all(describes(spec[name], value[name]) for name in spec)
    if isinstance(value, bytes | str):
        return (spec.shape, spec.dtype) == ((), np.dtype(type(value)))
    lengths = zip(spec.shape, value.shape, strict=True)
    fits = all(length in {None, found} for length, found in lengths)
    return fits and spec.dtype == value.dtype and isinstance(spec.dtype, np.dtype)


@pytest.mark.parametrize("case", CASES)
def test_specs_are_those_of_elements(case):
    record, make = CASES[case]
    ds = make(MapDataset.source([record]))
    assert describes(get_element_spec(ds), ds[0])
    assert describes(get_element_spec(ds.to_iter_dataset()), ds[0])


def test_lengths_that_are_known_are_in_the_spec():
    ds = MapDataset.source([image()]).map(DecodeImage(size=(5, 7))).batch(8, drop_remainder=True)
    assert get_element_spec(ds).shape == (8, 5, 7, 3)
    parse = ParseExample({"a": Feature("int32", (4, 2))})
    assert get_element_spec(MapDataset.source([b""]).map(parse))["a"].shape == (4, 2)


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        (ParseExample({"a": Feature("int8", optional=True)}), "feature `a` is `None` where it is"),
        (ParseExample({}, sequences={"a": Feature("int8", (-1,))}), "feature `a` is a list of arr"),
        (ParseJson({"a": object}), "field `a` may be of any type"),
        (ParseJson({"a": JsonField("int8", optional=True)}), "field `a` is `None` where it is mis"),
    ],
)
def test_what_varies_has_no_spec(transform, problem):
    with pytest.raises(ValueError, match=f"Cannot infer element spec: {problem}"):
        get_element_spec(MapDataset.source([b""]).map(transform))


def test_values_beside_the_result_need_a_spec_upstream():
    for transform in (DecodeImage("image"), Tokenize(split, field="text")):
        with pytest.raises(NotImplementedError):
            get_element_spec(MapDataset.source([{}]).map(transform))
