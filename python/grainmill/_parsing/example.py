"""`tf.train.Example` messages to NumPy, parsed by the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from grainmill._native import ExampleParser
from grainmill._plan.spec import ShapeDtypeStruct
from grainmill._plan.transforms import Map, OfEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """A feature of `tf.train.Example` messages, as `ParseExample` is to return it.

    Attributes:
        dtype: The dtype of the values. `bytes` or `str` (UTF-8) for a `bytes_list`; `float32` or
            `float64` for a `float_list`; any integer dtype, or `bool`, for an `int64_list`.
        shape: The shape of the values; `()` for one value, which is returned as a scalar. If the
            first length is -1, any number of values of the remaining shape is accepted, none if the
            feature is missing.
        default: The value where the feature is missing, or a value for each of its places.
        optional: Whether the value is `None` where the feature is missing.

    Example:
        >>> grain.transforms.Feature("int32", (128,))
        Feature(dtype='int32', shape=(128,), default=None, optional=False)
    """

    dtype: DTypeLike
    shape: Sequence[int] = ()
    default: Any = None
    optional: bool = False


FeatureLike: TypeAlias = "Feature | DTypeLike"


class ParseExample(OfEngine, Map):
    """Parses serialized `tf.train.Example` messages to dicts of NumPy values.

    The engine parses a block of records at once, without the `protobuf` package and without
    TensorFlow; where `batch` follows, directly into the rows of the batch. What is in a message and
    not in `features` is passed over quickly.

    Messages are read as protocol buffers are: packed or not, with unknown fields, in parts; of
    several entries for a name, the last one with a list counts.

    Args:
        features: The features to return by name, each a `Feature`, or the dtype of one value.
        sequences: If given, records are `tf.train.SequenceExample` messages: `features` are those
            of the context, and these are the feature lists. The shape of such a `Feature` is that
            of a step; an array has the steps as its first axis, and features with steps of any
            length are lists of arrays.

    Raises:
        ValueError: A name is in both, or a shape, dtype or default is impossible. From a pipeline:
            a record is no such message, or a feature is missing, of another kind, has another
            number of values, or one that does not fit its dtype. The message names the feature, and
            a note the record.
        TypeError: `features` or `sequences` is no mapping, or a shape no sequence. From a pipeline:
            an element is not `bytes`.

    Example:
        >>> record = bytes.fromhex("0a110a0f0a06746f6b656e7312051a030a0103")
        >>> parse = grain.transforms.ParseExample({
        ...     "tokens": grain.transforms.Feature("int32", (-1,)),
        ...     "label": grain.transforms.Feature("int64", default=-1),
        ... })
        >>> parse.map(record)
        {'tokens': array([3], dtype=int32), 'label': np.int64(-1)}
    """

    _engine: ExampleParser

    def __init__(
        self,
        features: Mapping[str, FeatureLike],
        *,
        sequences: Mapping[str, FeatureLike] | None = None,
    ) -> None:
        for argument, given in (("features", features), ("sequences", sequences or {})):
            check_mapping(argument, given, "`Feature`")
        self._features = {name: _feature(name, feature) for name, feature in features.items()}
        self._sequences = {
            name: _feature(name, feature) for name, feature in (sequences or {}).items()
        }
        both = self._features.keys() & self._sequences.keys()
        if both:
            raise ValueError(f"`features` and `sequences` both have the name {min(both)!r}")
        self._engine = self._new_engine()

    def _new_engine(self) -> ExampleParser:
        return ExampleParser(
            [_described(name, feature, steps=False) for name, feature in self._features.items()],
            [_described(name, feature, steps=True) for name, feature in self._sequences.items()],
        )

    def map(self, element: bytes) -> dict[str, Any]:
        """Returns the features of a record.

        Args:
            element: A serialized message.
        """
        return self._engine.parse([element])[0]

    def map_block(self, elements: list[bytes]) -> list[dict[str, Any]]:
        """Returns the features of each record.

        Args:
            elements: Serialized messages.
        """
        return self._engine.parse(elements)

    _ignores_input_spec = True

    def output_spec(self, input_spec: Any) -> dict[str, Any]:  # noqa: ARG002 - it is any message
        """Returns the shapes and dtypes of the features; lengths that vary are `None`.

        Args:
            input_spec: Any object.

        Raises:
            ValueError: A feature is `optional`, or a list of arrays.
        """
        spec = {
            name: value_spec(f"feature `{name}`", feature.dtype, feature.shape, feature.optional)
            for name, feature in self._features.items()
        }
        for name, feature in self._sequences.items():
            what, shape = f"feature `{name}`", tuple(feature.shape)
            if -1 in shape:
                raise ValueError(f"Cannot infer element spec: {what} is a list of arrays")
            spec[name] = value_spec(what, feature.dtype, (-1, *shape), feature.optional)
        return spec

    _takes_records = True

    def _fill_rows(
        self, elements: Sequence[bytes], columns: Sequence[tuple[Any, Any]], at: int
    ) -> bool:
        """Writes the features to the rows of a batch; see `RowWriter`."""
        return self._engine.fill(elements, dict(columns), at)

    def __repr__(self) -> str:
        sequences = f", sequences={self._sequences}" if self._sequences else ""
        return f"{type(self).__name__}({self._features}{sequences})"


NUMBERS: Final = frozenset(
    {"bool", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The names of dtypes that the engine parses numbers to."""


def check_mapping(argument: str, given: Any, kind: str) -> None:
    """Raises a `TypeError` unless `given` has values by name."""
    if not hasattr(given, "items"):
        raise TypeError(
            f"`{argument}` must be a mapping from each name to a {kind} or a dtype, got "
            f"{type(given).__name__}"
        )


def _feature(name: str, feature: FeatureLike) -> Feature:
    if not isinstance(name, str):
        raise ValueError(f"names of features must be `str`, got {name!r}")
    return feature if isinstance(feature, Feature) else Feature(feature)


def _described(name: str, feature: Feature, *, steps: bool) -> tuple[Any, ...]:
    """The description that the engine takes of a feature."""
    what = f"feature `{name}`"
    own, any_len = row_shape(what, feature.shape)
    if feature.dtype in {bytes, str}:
        kind, numbers, dtype = _BYTES_LIST, None, None
    else:
        dtype = np.dtype(feature.dtype).newbyteorder("=")
        numbers = (dtype.name, dtype)
        if dtype.name not in NUMBERS:
            raise ValueError(
                f"{what}: `dtype` must be `bytes`, `str`, `bool`, an integer dtype, "
                f"float32 or float64, got {feature.dtype!r}"
            )
        kind = _FLOAT_LIST if dtype.kind == "f" else _INT64_LIST
    absent: Any = None
    if feature.optional and feature.default is not None:
        raise ValueError(f"{what}: give `default` or `optional=True`, not both")
    if feature.optional:
        absent = (None, None)
    elif steps and feature.default is not None:
        raise ValueError(f"{what}: features of steps have no `default`")
    elif feature.default is not None:
        kept: Any = feature.dtype if dtype is None else dtype
        absent = default_value(what, feature.default, feature.shape, kept)
    elif any_len and not steps:
        absent = (np.empty((0, *own), object if dtype is None else dtype), b"")
    return kind, feature.dtype is str, (name, numbers, list(own), any_len, absent)


def value_spec(
    what: str,
    dtype: Any,
    shape: Sequence[int],
    is_optional: bool,  # noqa: FBT001 - as it is stored
) -> ShapeDtypeStruct:
    """The shape and dtype of a feature or field, as it is in elements.

    Raises:
        ValueError: It may be `None`.
    """
    if is_optional:
        raise ValueError(f"Cannot infer element spec: {what} is `None` where it is missing")
    lengths = tuple(None if length == -1 else int(length) for length in shape)
    kept = np.dtype(object if lengths and dtype in {bytes, str} else dtype).newbyteorder("=")
    return ShapeDtypeStruct(lengths, kept)


def row_shape(what: str, given: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """`given` without a first length of -1, and whether it has one."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{what}: `shape` must be a sequence of lengths, got {given!r}")
    shape = tuple(given)
    if any(type(length) is not int and not isinstance(length, np.integer) for length in shape):
        raise ValueError(f"{what}: `shape` must consist of integers, got {shape}")
    any_len = shape[:1] == (-1,)
    own = tuple(int(length) for length in shape[any_len:])
    if any(length < 0 for length in own) or (any_len and not math.prod(own)):
        raise ValueError(
            f"{what}: `shape` must have lengths from 0 on, the first may be -1, got {shape}"
        )
    return own, any_len


def default_value(what: str, given: Any, shape: Sequence[int], kept: Any) -> tuple[Any, bytes]:
    """The value where a feature or field is missing, and its bytes.

    Args:
        what: The feature, for messages.
        given: The user's default.
        shape: Its shape, whose first length may be -1.
        kept: Its dtype, `bytes` or `str`.
    """
    own, any_len = row_shape(what, shape)
    is_number = isinstance(kept, np.dtype)
    refusal = ValueError(
        f"{what}: `default` {given!r} does not fit shape {tuple(shape)} and dtype {kept}"
    )
    try:
        values = np.array(given, None if is_number else object)
        if is_number:
            with np.errstate(invalid="ignore"):
                values = values.astype(kept)
        if not any_len:
            values = np.broadcast_to(values, own)
    except (ValueError, TypeError, OverflowError) as error:
        raise refusal from error
    # Rounding to float32 is what happens to all values.
    changes = is_number and kept.kind != "f" and not np.all(values == np.asarray(given))
    if changes or (any_len and (not values.ndim or values.shape[1:] != own)):
        raise refusal
    if not is_number and not all(type(value) is kept for value in values.flat):
        raise ValueError(f"{what}: `default` must be {kept.__name__}, got {given!r}")
    value = values.copy() if any_len or own else values[()]
    return value, values.tobytes() if is_number else b""
