"""Conversion of feature values to arrays for packing, and of packed columns to rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grainmill._interrupts import raise_interrupt


class FeatureValues:
    """Converts the value of a feature that is not a plain array; the packer calls its methods.

    Args:
        names: The names of the features in messages.
        padding: The padding value of each feature; zeros if `None`.
    """

    def __init__(self, names: Sequence[str], padding: Sequence[Any] | None = None) -> None:
        self._names = names
        self._padding = padding

    def coerce(
        self,
        feature: int,
        value: Any,
        trailing: tuple[int, ...] | None,
    ) -> np.ndarray[Any, Any]:
        """Returns `value` as a contiguous array of at least one axis.

        Args:
            feature: The number of the feature.
            value: A number, a string, a list or anything NumPy converts to an array.
            trailing: The sizes of the axes after the first in the current batch; `None` at its
                start.

        Raises:
            ValueError: `value` is a dict or `None`, or its shape does not fit the batch.
        """
        if isinstance(value, Mapping):
            raise ValueError(
                f"Failed to extract segment ids for '{self._names[feature]}', which has type "
                f"{type(value)} rather than np.ndarray. Perhaps it should be marked as a meta "
                "feature?"
            )
        if value is None:
            raise ValueError(f"the feature `{self._names[feature]}` of an element is None")
        if type(value) is bool:
            value = int(value)
        array = np.asarray(value)
        if array.ndim == 0:
            array = array.reshape(1)
        if trailing is not None and array.shape[1:] != trailing:
            try:
                array = np.broadcast_to(array, (array.shape[0], *trailing))
            except ValueError as failure:
                raise_interrupt(failure)
                raise ValueError(
                    f"values of the feature `{self._names[feature]}` have shape {trailing} in this "
                    f"batch, got {array.shape[1:]}"
                ) from None
        return np.ascontiguousarray(array)

    def common_dtype(
        self, feature: int, of_rows: np.dtype[Any], of_values: np.dtype[Any]
    ) -> np.dtype[Any]:
        """Returns the dtype that `batch` would give both.

        Raises:
            ValueError: There is none, or one is of numbers and the other of text.
        """
        try:
            common = np.result_type(of_rows, of_values)
        except TypeError as failure:
            raise_interrupt(failure)
            common = None
        # NumPy would write numbers as text.
        if common is None or (common.kind in "SU" and {of_rows.kind, of_values.kind} - {*"SU"}):
            raise ValueError(
                f"values of the feature `{self._names[feature]}` have dtype {of_rows} in this "
                f"batch, got {of_values}"
            )
        return common

    def converted(self, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns `array` as a contiguous one of `dtype`."""
        return np.ascontiguousarray(array, dtype)

    def widened(
        self,
        values: bytes,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        wider: np.dtype[Any],
    ) -> np.ndarray[Any, Any] | bytes:
        """Returns the rows of `dtype` with the bytes `values` as `wider`.

        They are an array if values are Python objects, else bytes.
        """
        rows = _rows(np.frombuffer(values, np.uint8), 0, shape, dtype).astype(wider)
        return rows if wider.hasobject else rows.tobytes()

    def padding(
        self, feature: int, dtype: np.dtype[Any], trailing: tuple[int, ...]
    ) -> bytes | None:
        """Returns the bytes of one padding value, `None` for zeros."""
        if self._padding is None:
            return None
        return self.cell(feature, self._padding[feature], dtype, trailing)

    def cell(
        self, feature: int, value: Any, dtype: np.dtype[Any], trailing: tuple[int, ...]
    ) -> bytes:
        """Returns the bytes of one `value`.

        Raises:
            ValueError: It is another value in `dtype`.
        """
        try:
            with np.errstate(invalid="ignore"):
                cells = np.full(trailing, value, dtype)
            is_same = np.array_equal(
                cells, np.broadcast_to(value, trailing), equal_nan=dtype.kind in "fc"
            )
        except (OverflowError, TypeError, ValueError) as failure:
            raise_interrupt(failure)
            is_same = False
        if not is_same:
            raise ValueError(
                f"{value!r} cannot be a value of the feature `{self._names[feature]}`, which has "
                f"dtype {dtype}"
            )
        return cells.tobytes()

    def object_rows(
        self,
        feature: int,
        dtype: np.dtype[Any],
        num_rows: int,
        row_len: int,
        trailing: tuple[int, ...],
    ) -> np.ndarray[Any, Any]:
        """Returns rows of padding for values that are Python objects."""
        shape = (num_rows, row_len, *trailing)
        if self._padding is None:
            return np.zeros(shape, dtype)
        return np.full(shape, self._padding[feature], dtype)


def rows_of(
    column: tuple[Any, ...], num_bins: int, num_rows: int, row_len: int
) -> tuple[np.ndarray[Any, Any], Any, Any]:
    """Views of the first `num_rows` of `num_bins` rows: values, segment ids and positions.

    The latter two are `None` for a feature without segment ids.
    """
    values, offset, dtype, trailing, segment_ids, positions = column
    if not dtype.hasobject:
        values = _rows(values, offset, (num_bins, row_len, *trailing), dtype)
    if segment_ids is None:
        return values[:num_rows], None, None
    shape = (num_bins, row_len)
    return (
        values[:num_rows],
        segment_ids.reshape(shape)[:num_rows],
        positions.reshape(shape)[:num_rows],
    )


def _rows(
    values: np.ndarray[Any, Any], offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """A view of the bytes in `values` from `offset` on."""
    byte_len = dtype.itemsize * math.prod(shape)
    if not byte_len:
        return np.zeros(shape, dtype)
    return values[offset : offset + byte_len].view(dtype).reshape(shape)
