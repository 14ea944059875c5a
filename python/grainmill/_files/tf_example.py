"""`tf.train.Example` messages without a schema; training uses `transforms.ParseExample`.

Each feature is a list of one kind. In JSON, where an empty list would not show its kind, that is
`{"int64_list": []}`; the same form states the kind of any list.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

from grainmill._example import field, varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# The numbers of the kinds in messages; 0 is that of a feature without a list.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
_NAMES = {BYTES_LIST: "bytes_list", FLOAT_LIST: "float_list", INT64_LIST: "int64_list"}
_KINDS = {name: kind for kind, name in _NAMES.items()}
_TYPES: dict[int, type | tuple[type, ...]] = {
    BYTES_LIST: (str, bytes),
    INT64_LIST: int,  # and booleans
    FLOAT_LIST: (int, float),
}
_OF_DTYPE = dict.fromkeys("OSU", BYTES_LIST) | dict.fromkeys("biu", INT64_LIST) | {"f": FLOAT_LIST}


def decode(record: bytes) -> dict[str, list[Any]]:
    """The features of an example, by name: lists of `bytes`, floats or integers.

    Raises:
        ValueError: The record is no such message.
    """
    return {name: values for name, (_, values) in decode_kinds(record).items()}


def decode_kinds(record: bytes) -> dict[str, tuple[int, list[Any]]]:
    """The same, each with its kind.

    Raises:
        ValueError: The record is no such message.
    """
    features: dict[str, tuple[int, list[Any]]] = {}
    for number, wire, value in _fields(record):
        if number != 1 or wire != _BYTES:
            raise ValueError("not a tf.train.Example")
        for inner, inner_wire, entry in _fields(value):
            if inner != 1 or inner_wire != _BYTES:
                raise ValueError("not a tf.train.Example")
            name, feature = b"", b""
            for part, part_wire, content in _fields(entry):
                if part_wire != _BYTES or part not in {1, 2}:
                    raise ValueError("not a tf.train.Example")
                if part == 1:
                    name = content
                else:
                    feature += content  # messages that occur repeatedly are merged
            features[name.decode("utf-8")] = _values(feature)
    return features


def encode(features: dict[str, Any]) -> bytes:
    """The message of features: values or lists of text, `bytes`, numbers or booleans, by name.

    Raises:
        ValueError: A value has another type.
    """
    entries = []
    for name in sorted(features):
        kind, given = _stated(features[name])
        values = given.tolist() if hasattr(given, "tolist") else given
        values = [] if values is None else values
        values = values if isinstance(values, list | tuple) else [values]
        feature = _feature(name, [_unshown(value) for value in values], kind)
        entries.append(field(1, field(1, name.encode()) + field(2, feature)))
    return field(1, b"".join(entries))


def _stated(given: Any) -> tuple[int, Any]:
    """The kind of a list where something besides its values says it, otherwise 0; and the list."""
    if isinstance(given, dict) and len(given) == 1:
        (name,) = given
        if name in _KINDS and isinstance(given[name], list):
            return _KINDS[name], given[name]
    if hasattr(given, "dtype") and not given.size:
        return _OF_DTYPE.get(given.dtype.kind, 0), given
    return 0, given


def _feature(name: str, values: list[Any], kind: int) -> bytes:
    if not values:
        return field(kind, b"") if kind else b""
    fitting = [
        each
        for each in ([kind] if kind else _TYPES)
        if all(isinstance(value, _TYPES[each]) for value in values)
    ]
    if not fitting:
        wanted = f"a `{_NAMES[kind]}`" if kind else "a list of text, bytes or numbers"
        found = " and ".join(sorted({type(value).__name__ for value in values}))
        raise ValueError(f"`{name}`: {wanted} was expected, got {found}")
    kind = fitting[0]
    if kind == BYTES_LIST:
        parts = [value.encode() if isinstance(value, str) else value for value in values]
        return field(kind, b"".join(field(1, part) for part in parts))
    if kind == FLOAT_LIST:
        try:
            return field(kind, field(1, struct.pack(f"<{len(values)}f", *values)))
        except OverflowError:
            raise ValueError(f"`{name}`: a number is too large for 32 bits") from None
    if any(not -(1 << 63) <= value < 1 << 63 for value in values):
        raise ValueError(f"`{name}`: an integer exceeds 64 bits")
    packed = b"".join(varint(int(value) & ((1 << 64) - 1)) for value in values)
    return field(kind, field(1, packed))


def shown(value: Any) -> Any:
    """A feature's value for JSON: text where bytes are text, otherwise base64."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    return value


def _unshown(value: Any) -> Any:
    """The value that `shown` shows as this one."""
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        return base64.b64decode(value["base64"], validate=True)
    return value


def example_as_json(record: bytes) -> dict[str, Any]:
    """Returns the features of a `tf.train.Example` by name, as JSON can represent them.

    Each is a list. Bytes that are no text are `{"base64": ...}`, and an empty list, which would not
    show its kind, is `{"int64_list": []}`, `{"float_list": []}` or `{"bytes_list": []}`.

    Args:
        record: The message.

    Raises:
        ValueError: The record is no such message.

    Example:
        >>> from grainmill import files
        >>> files.example_as_json(grain.transforms.to_example({"label": 7, "text": "one"}))
        {'label': [7], 'text': ['one']}
    """
    return {
        name: [shown(value) for value in values] if values or not kind else {_NAMES[kind]: []}
        for name, (kind, values) in decode_kinds(record).items()
    }


def _values(feature: bytes) -> tuple[int, list[Any]]:
    values: list[Any] = []
    kind = 0
    for number, wire, content in _fields(feature):
        if wire != _BYTES or number not in {BYTES_LIST, FLOAT_LIST, INT64_LIST}:
            raise ValueError("not a tf.train.Feature")
        if number != kind:  # another kind replaces what was before
            kind, values = number, []
        for inner, inner_wire, value in _fields(content):
            if inner != 1:
                raise ValueError("not a list of values")
            values += _value_list(kind, inner_wire, value)
    return kind, values


def _value_list(kind: int, wire: int, value: Any) -> list[Any]:
    if kind == BYTES_LIST and wire == _BYTES:
        return [value]
    if kind == FLOAT_LIST and wire in {_FIXED32, _BYTES} and len(value) % 4 == 0:
        return list(struct.unpack(f"<{len(value) // 4}f", value))
    if kind == INT64_LIST and wire == _VARINT:
        return [_signed(value)]
    if kind == INT64_LIST and wire == _BYTES:
        values, at = [], 0
        while at < len(value):
            number, at = _varint(value, at)
            values.append(_signed(number))
        return values
    raise ValueError("not a list of values")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _fields(message: bytes) -> list[tuple[int, int, Any]]:
    """Number, wire type and value of each field."""
    found: list[tuple[int, int, Any]] = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            value: Any
            value, at = _varint(message, at)
        else:
            if wire == _BYTES:
                length, at = _varint(message, at)
            elif wire in {_FIXED32, _FIXED64}:
                length = 4 if wire == _FIXED32 else 8
            else:
                raise ValueError(f"wire type {wire} in a message")
            value, at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError("a message is truncated")
        found.append((key >> 3, wire, value))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("a message is truncated")
        byte = data[at]
        result |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return result & ((1 << 64) - 1), at
        shift += 7
    raise ValueError("a number in a message is too long")
