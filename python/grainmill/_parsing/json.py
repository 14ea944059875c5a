"""Fields of JSON records to NumPy and Python values, parsed by the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from grainmill._native import JsonParser
from grainmill._parsing.example import NUMBERS, check_mapping, default_value, row_shape, value_spec
from grainmill._plan.transforms import Map, OfEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike


@dataclasses.dataclass(frozen=True, eq=False)
class JsonField:
    """A field of JSON objects, as `ParseJson` is to return it.

    Attributes:
        dtype: `object` for what `json.loads` returns; `str` or `bytes` (UTF-8) for strings; an
            integer dtype, `float32`, `float64` or `bool` for numbers or truth values.
        path: The names of the members to pass, an integer for an item of an array; one name may be
            given as it is. `None` for the field's own name.
        shape: The shape of the array that a JSON array, or arrays in an array, become; `()` for one
            value, which is returned as a scalar. The first length may be -1: any.
        default: The value where the field is missing or `null`.
        optional: Whether the value is `None` there. `object` needs neither for `null`.

    Example:
        >>> grain.transforms.JsonField("int64", path=("user", "id"))
        JsonField(dtype='int64', path=('user', 'id'), shape=(), default=None, optional=False)
    """

    dtype: DTypeLike = object
    path: str | Sequence[str | int] | None = None
    shape: Sequence[int] = ()
    default: Any = None
    optional: bool = False


JsonFieldLike: TypeAlias = "JsonField | DTypeLike"


class ParseJson(OfEngine, Map):
    """Takes fields out of JSON objects, and returns dicts of NumPy and Python values.

    The engine passes each record once: it checks that all of it is JSON, and creates values only
    for `fields`. As for Python's `json`, the last of several members with one name counts, and
    `NaN`, `Infinity` and `-Infinity` are numbers. A byte order mark before the object is passed
    over.

    Args:
        fields: The fields to return by name, each a `JsonField`, or the dtype of one value.

    Raises:
        ValueError: A path, shape, dtype or default is impossible. From a pipeline: a record is not
            a JSON object in UTF-8, or a field is missing, of another type or shape, or has a value
            that does not fit its dtype. The message names the field or the byte, and a note the
            record.
        TypeError: `fields` is no mapping, or a shape no sequence. From a pipeline: an element is
            neither `bytes` nor `str`.

    Example:
        >>> record = b'{"text": "a b", "user": {"id": 7}, "tokens": [1, 2, 3], "more": [{}]}'
        >>> parse = grain.transforms.ParseJson({
        ...     "text": str,
        ...     "user": grain.transforms.JsonField("int64", path=("user", "id")),
        ...     "tokens": grain.transforms.JsonField("int32", shape=(-1,)),
        ... })
        >>> parse.map(record)
        {'text': 'a b', 'user': np.int64(7), 'tokens': array([1, 2, 3], dtype=int32)}
    """

    _engine: JsonParser

    def __init__(self, fields: Mapping[str, JsonFieldLike]) -> None:
        check_mapping("fields", fields, "`JsonField`")
        self._fields = {
            name: field if isinstance(field, JsonField) else JsonField(field)
            for name, field in fields.items()
        }
        self._engine = self._new_engine()

    def _new_engine(self) -> JsonParser:
        return JsonParser([_described(*item) for item in self._fields.items()])

    def map(self, element: bytes | str) -> dict[str, Any]:
        """Returns the fields of a record.

        Args:
            element: A JSON object.
        """
        return self._engine.parse([element])[0]

    def map_block(self, elements: list[bytes | str]) -> list[dict[str, Any]]:
        """Returns the fields of each record.

        Args:
            elements: JSON objects.
        """
        return self._engine.parse(elements)

    _takes_records = True

    def _fill_rows(
        self, elements: Sequence[bytes | str], columns: Sequence[tuple[Any, Any]], at: int
    ) -> bool:
        """Writes the fields to the rows of a batch; see `RowWriter`."""
        return self._engine.fill(elements, dict(columns), at)

    _ignores_input_spec = True

    def output_spec(self, input_spec: Any) -> dict[str, Any]:  # noqa: ARG002 - it is any object
        """Returns the shapes and dtypes of the fields; lengths that vary are `None`.

        Args:
            input_spec: Any object.

        Raises:
            ValueError: A field is `optional`, or its dtype is `object`.
        """
        spec = {}
        for name, field in self._fields.items():
            what = f"field `{name}`"
            if field.dtype is object:
                raise ValueError(f"Cannot infer element spec: {what} may be of any type")
            spec[name] = value_spec(what, field.dtype, field.shape, field.optional)
        return spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fields})"


_OBJECTS: Final = {bytes: "bytes", str: "str", object: "object"}


def _described(name: str, field: JsonField) -> tuple[Any, ...]:
    """The description that the engine takes of a field."""
    what = f"field `{name}`"
    path = (name,) if field.path is None else field.path
    path = (path,) if isinstance(path, str) else tuple(path)
    if not path or not all(
        isinstance(step, str) or (type(step) is int and step >= 0) for step in path
    ):
        raise ValueError(
            f"{what}: `path` must have names, or integers from 0 on, got {field.path!r}"
        )
    shape, any_len = row_shape(what, field.shape)
    dtype = None
    kind = next((text for of, text in _OBJECTS.items() if field.dtype is of), None)
    if kind is None:
        dtype = np.dtype(field.dtype).newbyteorder("=")
        kind = dtype.name
        if kind not in NUMBERS:
            raise ValueError(
                f"{what}: `dtype` must be `object`, `bytes`, `str`, `bool`, an integer dtype, "
                f"float32 or float64, got {field.dtype!r}"
            )
    absent: Any = None
    if field.optional and field.default is not None:
        raise ValueError(f"{what}: give `default` or `optional=True`, not both")
    if kind == "object":
        if field.shape:
            raise ValueError(f"{what}: `object` takes no `shape`, got {field.shape}")
        given = field.optional or field.default is not None
        absent = (field.default, None) if given else None
    elif field.optional:
        absent = (None, None)
    elif field.default is not None:
        kept: Any = field.dtype if dtype is None else dtype
        absent = default_value(what, field.default, field.shape, kept)
    numbers = None if dtype is None else (dtype.name, dtype)
    return list(path), kind, (name, numbers, list(shape), any_len, absent)
