"""Dicts of arrays as `tf.train.Example` messages, without a package for protocol buffers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_BYTES, _FLOATS, _INTEGERS = 1, 2, 3  # the fields of a `tf.train.Feature`
_SEVEN_BITS = 0x7F


def to_example(element: Mapping[str, Any]) -> bytes:
    r"""Serializes a dict as a `tf.train.Example`, which most tools for TensorFlow's data read.

    Integers and booleans become an `int64_list`, floating-point numbers a `float_list` (32 bits are
    all that it has), `bytes` and `str` (as UTF-8) a `bytes_list`. Arrays are flattened in row-major
    order: an Example has no shapes, so who reads it has to know those.

    Args:
        element: Names and their values: arrays of any shape, numbers, text, `bytes`, or lists of
            these.

    Returns:
        The message. Features are in the order of their names, so equal dicts give equal bytes.

    Raises:
        TypeError: A value or a name has a type for which there is no list.
        ValueError: An integer does not fit into 64 bits with a sign.

    Example:
        >>> grain.transforms.to_example({"label": 7})
        b'\n\x10\n\x0e\n\x05label\x12\x05\x1a\x03\n\x01\x07'
    """
    features = []
    for name in sorted(element):
        if not isinstance(name, str):
            raise TypeError(f"names of features must be `str`, got {name!r}")
        entry = field(1, name.encode()) + field(2, _feature(name, element[name]))
        features.append(field(1, entry))
    return field(1, b"".join(features))


def _feature(name: str, value: Any) -> bytes:
    if isinstance(value, bytes | str):
        return field(_BYTES, field(1, _as_bytes(value)))
    array = np.asarray(value)
    kind = array.dtype.kind
    if kind in "bui":
        if kind == "u" and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"feature `{name}`: {array.max()} does not fit into an `int64_list`")
        numbers = array.astype(np.int64).ravel()
        return field(_INTEGERS, field(1, _varints(numbers)) if numbers.size else b"")
    if kind == "f" or array.dtype.name == "bfloat16":
        floats = array.astype("<f4").tobytes()
        return field(_FLOATS, field(1, floats) if floats else b"")
    if kind in "SUO":
        values = []
        for one in _flat(value):
            if not isinstance(one, bytes | str):
                raise TypeError(f"feature `{name}`: there is no list of `{type(one).__name__}`")
            values.append(field(1, _as_bytes(one)))
        return field(_BYTES, b"".join(values))
    raise TypeError(f"feature `{name}`: there is no list of `{array.dtype}`")


def _flat(value: Any) -> Iterable[Any]:
    """The leaves of nested lists and arrays."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def field(number: int, payload: bytes) -> bytes:
    """A field with a length."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def varint(number: int) -> bytes:
    """An unsigned integer in groups of seven bits, of which all but the last have the top bit."""
    out = bytearray()
    while number > _SEVEN_BITS:
        out.append(number & _SEVEN_BITS | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    """Integers as `varint` has each."""
    unsigned = numbers.astype(np.int64).view(np.uint64)
    shifts = np.arange(10, dtype=np.uint64) * np.uint64(7)
    groups = (unsigned[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F)
    lengths = np.maximum(10 - np.argmax(groups[:, ::-1] != 0, axis=1), 1)
    lengths[unsigned == 0] = 1
    columns = np.arange(10)
    groups[columns < lengths[:, None] - 1] |= np.uint8(0x80)
    return bytes(groups[columns < lengths[:, None]].tobytes())
