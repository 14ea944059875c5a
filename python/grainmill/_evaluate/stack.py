"""Batches: elements of one structure stacked leaf by leaf along a new leading axis.

The result equals `numpy.stack` of each leaf. Arrays are copied row by row into a slot of the arena
while they are in the processor's cache; all other leaves are collected and stacked at the end. A
slot returns to the arena only when the last view of it is gone, so a batch may outlive the builder,
the arena and the iterator.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from grainmill._interrupts import raise_interrupt
from grainmill._native import Arena, copy_rows, scalars_to_rows
from grainmill._tree import Branch, branch, map_structure
from grainmill._workers.main_classes import is_receivers_container

_UNLIKE: Final = "Expected all input elements to have the same structure but got:"
# Batches below the first size are plain NumPy arrays: a slot costs more than it saves. Larger ones
# than the second are not allocated whole before their elements are seen, as `batch_size` may only
# be a bound.
SLOT_BYTES: Final = 2048
_RESERVED_BYTES: Final = 1 << 28
_PLAIN_KINDS: Final = frozenset("biufcmMSUV")


# Where the values of elements go: the type of the elements (dict, tuple or list), and for each key
# the rows of an array or a list. Type and key are `None` for elements that are arrays.
Targets: TypeAlias = tuple[type | None, list[tuple[Any, np.ndarray[Any, Any] | list[Any]]]]


class ArraySource(Protocol):
    """An allocator of batches."""

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """An array with uninitialised memory."""


class BatchBuilder:
    """Stacks elements, added a few at a time, into batches.

    Attributes:
        first_position: Position of the batch's first element, for error messages. It advances
            from batch to batch.

    Example:
        >>> builder = BatchBuilder(2, Arena())
        >>> builder.push([{"x": 1}, {"x": 2}])
        >>> builder.finish()
        {'x': array([1, 2])}
    """

    def __init__(self, batch_size: int, arena: ArraySource, *, first_position: int = 0) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        self.first_position = first_position
        self._batch_size = batch_size
        self._arena = arena
        self._column: _Column | None = None
        self._num_elements = 0
        self._exact = True

    def __len__(self) -> int:
        """The number of elements in the batch so far."""
        return self._num_elements

    def push(self, elements: list[Any]) -> None:
        """Adds elements to the batch and copies their arrays.

        Raises:
            ValueError: An element differs from the batch's first in structure or shape, or there
                are more than `batch_size`. The batch is empty again afterwards.
        """
        if not elements:
            return
        total = self._num_elements + len(elements)
        if total > self._batch_size:
            self.clear()
            raise ValueError(f"a batch holds {self._batch_size} elements, got {total}")
        try:
            if self._column is None:
                self._column = _column(elements[0], self._batch_size, self._arena, "")
            self._column.push(elements, self._num_elements)
        except _UnlikeError as unlike:
            raise self._explained(unlike) from None
        except BaseException:
            self.clear()
            raise
        self._num_elements = total

    def push_rows(
        self, columns: dict[str, np.ndarray[Any, Any]], order: np.ndarray[Any, Any]
    ) -> None:
        """Adds elements as `push` does: `{key: column[row] for key, column in columns.items()}`.

        Args:
            columns: Arrays with at least one row for each element.
            order: The row of each element, in order, int64.
        """
        if not self._num_elements and len(order) > 1:  # the first determines the layout
            self.push_rows(columns, order[:1])
            order = order[1:]
        at, stop = self._num_elements, self._num_elements + len(order)
        targets = self._targets_of(columns) if stop <= self._batch_size else None
        if targets is None:
            rows = order.tolist()
            self.push([{key: column[row] for key, column in columns.items()} for row in rows])
            return
        for target, column in zip(targets, columns.values(), strict=True):
            np.take(column, order, axis=0, out=target[at:stop], mode="clip")  # `raise` copies twice
        self.add_filled(len(order))

    def _targets_of(
        self, columns: dict[str, np.ndarray[Any, Any]]
    ) -> list[np.ndarray[Any, Any]] | None:
        """The `targets` for rows of `columns`; `None` if they do not fit."""
        kind, targets = self.targets or (None, [])
        if kind is not dict or [key for key, _ in targets] != list(columns):
            return None
        rows = [target for _, target in targets if type(target) is np.ndarray]
        layout = [(target.shape[1:], target.dtype) for target in rows]
        alike = layout == [(column.shape[1:], column.dtype) for column in columns.values()]
        return rows if alike else None

    @property
    def targets(self) -> Targets | None:
        """Where further elements of this layout may be written without `push`, if possible."""
        column = self._column
        if isinstance(column, _LeafColumn) and column.rows is not None:
            target = column.target()
            return None if target is None else (None, [(None, target)])
        return column.targets() if isinstance(column, _IndexedColumn) else None

    @property
    def layout(self) -> "Layout | None":
        """The layout of elements that can be written to `targets`; `None` if they cannot."""
        column = self._column
        return None if column is None or self.targets is None else column.layout()

    def expect(self, layout: "Layout") -> None:
        """Allocates `targets` for elements of `layout` before the first arrives."""
        self._column = layout(self._batch_size, self._arena)

    def add_filled(self, num_elements: int) -> None:
        """Records that the next elements have been written to `targets`."""
        self._num_elements += num_elements

    @property
    def row_byte_len(self) -> int:
        """Bytes of the arrays of one element; 0 before the first."""
        return 0 if self._column is None else self._column.row_byte_len

    @property
    def is_exact(self) -> bool:
        """Whether stacking the rows of the last finished batch gives the same dtypes.

        Not if NumPy promoted values of several types.
        """
        return self._exact

    def finish(self) -> Any:
        """Returns the batch of the elements added since the last one, and starts a new one.

        Raises:
            ValueError: The elements differ in structure or shape, or there are none.
        """
        column, num_elements = self._column, self._num_elements
        if column is None:
            raise ValueError("a batch needs at least 1 element, got 0")
        try:
            batch = column.finish(num_elements)
            self._exact = column.is_exact
        except _UnlikeError as unlike:
            raise self._explained(unlike) from None
        finally:
            self.clear()
        self.first_position += num_elements
        return batch

    def clear(self) -> None:
        """Drops the elements added since the last batch."""
        self._column = None
        self._num_elements = 0

    def _explained(self, unlike: "_UnlikeError") -> ValueError:
        self.clear()
        first = self.first_position
        place = f"at `{unlike.path}` " if unlike.path else ""
        hint = ""
        if _described(None) in (unlike.expected, unlike.found):
            hint = (
                "; a function without `return` for some elements returns `None`: return a value "
                "for each, or drop these elements by `filter`"
            )
        return ValueError(
            f"{_UNLIKE} {place}element {first} has {unlike.expected} "
            f"and element {first + unlike.row} has {unlike.found}{hint}"
        )


_arenas: list[ArraySource] = []


def shared_arena() -> ArraySource:
    """The arena of this process, for all batches."""
    if not _arenas:
        _arenas.append(Arena())
    return _arenas[0]


def take_arrays_from(arena: ArraySource) -> None:
    """Replaces the arena of this process."""
    _arenas[:] = [arena]


def stack(elements: list[Any], arena: ArraySource) -> Any:
    """Stacks all `elements` into one batch.

    Raises:
        ValueError: If there are none, or their structures or shapes differ.
    """
    builder = BatchBuilder(max(1, len(elements)), arena)
    builder.push(elements)
    return builder.finish()


def batch_and_pad(values: Sequence[Any], *, batch_size: int, pad_value: Any = 0) -> Any:
    """Stacks `values` and fills the batch up to `batch_size` rows of `pad_value`.

    For `functools.partial(batch_and_pad, batch_size=n)` as a `batch_fn`: all batches have one
    shape.

    Args:
        values: Elements of one structure, at least one and at most `batch_size`.
        batch_size: Rows of the result.
        pad_value: The value of everything in the rows that are added, converted to each array's
            dtype.

    Returns:
        The structure of an element; arrays of shape `(...)` become ones of shape
        `(batch_size, ...)` and the same dtype.

    Raises:
        ValueError: There are no values, more than `batch_size`, or they differ in structure or
            shape.

    Example:
        >>> grain.experimental.batch_and_pad([{"x": 1}, {"x": 2}], batch_size=3, pad_value=-1)
        {'x': array([ 1,  2, -1])}
    """
    if not values:
        raise ValueError("Cannot batch 0 values.")
    if len(values) > batch_size:
        raise ValueError(f"Cannot batch {len(values)} values to {batch_size}.")
    missing = batch_size - len(values)
    batch = stack(list(values), shared_arena())

    def padded(leaf: Any) -> Any:
        row = np.full(leaf.shape[1:], pad_value, dtype=leaf.dtype)
        return np.concatenate([leaf, np.stack([row] * missing)])

    return map_structure(padded, batch) if missing else batch


class _UnlikeError(Exception):
    """Row `row` differs from row 0 at `path`; the builder converts rows to positions."""

    def __init__(self, path: str, row: int, expected: str, found: str) -> None:
        super().__init__(path, row, expected, found)
        self.path, self.row, self.expected, self.found = path, row, expected, found


class _Column(Protocol):
    """A node of the elements' structure, over the elements of a batch."""

    @property
    def is_exact(self) -> bool: ...

    @property
    def row_byte_len(self) -> int: ...

    def push(self, values: list[Any], at: int) -> None: ...

    def finish(self, num_rows: int) -> Any: ...

    def layout(self) -> "Layout": ...


# Creates the column of a batch of the given size; it refers to no element.
Layout: TypeAlias = Callable[[int, ArraySource], _Column]


def _column(first: Any, batch_size: int, arena: ArraySource, path: str) -> _Column:
    parts = branch(first)
    if parts is None:
        return _LeafColumn(batch_size, arena, path)
    pairs = zip(parts.entries, parts.children, strict=True)
    children = [_column(child, batch_size, arena, path + entry) for entry, child in pairs]
    if type(first) in {dict, list, tuple}:
        return _IndexedColumn(parts, children, path, first)
    return _BranchColumn(parts, children, path, first)


class _BranchColumn:
    """A container in every element; its children are columns themselves."""

    def __init__(self, parts: Branch, children: list[_Column], path: str, first: Any) -> None:
        self.parts = parts
        self.children = children
        self._path = path
        self._described = _described(first)

    @property
    def is_exact(self) -> bool:
        return all(child.is_exact for child in self.children)

    @property
    def row_byte_len(self) -> int:
        return sum(child.row_byte_len for child in self.children)

    def push(self, values: list[Any], at: int) -> None:
        for child, column in zip(self.children, self._columns(values, at), strict=True):
            child.push(column, at)

    def finish(self, num_rows: int) -> Any:
        return self.parts.rebuild([child.finish(num_rows) for child in self.children])

    def layout(self) -> Layout:
        layouts = [child.layout() for child in self.children]
        empty = copy.copy(self)
        empty.parts = dataclasses.replace(self.parts, children=())
        empty.children = []

        def column(batch_size: int, arena: ArraySource) -> _BranchColumn:
            column = copy.copy(empty)
            column.children = [layout(batch_size, arena) for layout in layouts]
            return column

        return column

    def _columns(self, values: list[Any], at: int) -> list[list[Any]]:
        rows = []
        for row, value in enumerate(values, at):
            parts = branch(value)
            if parts is None or parts.kind != self.parts.kind:
                raise _UnlikeError(self._path, row, self._described, _described(value))
            rows.append(parts.children)
        return [list(column) for column in zip(*rows, strict=True)]


class _IndexedColumn(_BranchColumn):
    """A dict, list or tuple in every element, indexed by the keys of the first element."""

    def __init__(self, parts: Branch, children: list[_Column], path: str, first: Any) -> None:
        super().__init__(parts, children, path, first)
        container = parts.rebuild(parts.children)
        self._type = type(first)
        self._names = list(container) if self._type is dict else range(len(container))

    def targets(self) -> Targets | None:
        children = [child.target() for child in self.children if isinstance(child, _LeafColumn)]
        targets = [target for target in children if target is not None]
        if len(targets) < len(self._names) or all(type(target) is list for target in targets):
            return None
        return self._type, list(zip(self._names, targets, strict=True))

    def _columns(self, values: list[Any], at: int) -> list[list[Any]]:
        alike = set(map(type, values)) == {self._type}
        if alike and set(map(len, values)) == {len(self._names)}:
            try:
                return [[value[name] for value in values] for name in self._names]
            except KeyError as failure:
                raise_interrupt(failure)  # the general method finds the element
        return super()._columns(values, at)


class _LeafColumn:
    """A leaf in every element: rows of one array, or a list of values to be stacked later."""

    def __init__(self, batch_size: int, arena: ArraySource, path: str) -> None:
        self._batch_size = batch_size
        self._arena = arena
        self._path = path
        self.rows: np.ndarray[Any, Any] | None = None
        self._pending: list[Any] = []
        self.is_exact = True

    def target(self) -> np.ndarray[Any, Any] | list[Any] | None:
        """The rows, or the list of values; `None` if there are fewer rows than `batch_size`."""
        if self.rows is None:
            return self._pending
        return self.rows if len(self.rows) == self._batch_size else None

    @property
    def row_byte_len(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes // max(1, len(self.rows))

    def push(self, values: list[Any], at: int) -> None:
        if at == 0:
            self._start_rows(values)
        if self.rows is None:
            self._pending.extend(values)
            return
        if at + len(values) > len(self.rows):
            self._grow(at + len(values))
        # Parts of a batch have just been computed; a whole batch exceeds the cache.
        hot = len(values) < self._batch_size
        num_copied = copy_rows(self.rows, values, at, hot=hot)
        if num_copied < len(values):
            self._push_unlike(values[num_copied:], at + num_copied)

    def finish(self, num_rows: int) -> Any:
        if self.rows is None:
            batch, self.is_exact = _stacked(self._pending, self._path)
            return batch
        return self.rows if len(self.rows) == num_rows else self.rows[:num_rows]

    def layout(self) -> Layout:
        path, rows = self._path, self.rows
        row = None if rows is None else (rows.shape[1:], rows.dtype)

        def column(batch_size: int, arena: ArraySource) -> _LeafColumn:
            column = _LeafColumn(batch_size, arena, path)
            if row is not None:
                column.reserve(*row, 1)
            return column

        return column

    def _start_rows(self, values: list[Any]) -> None:
        self.rows = None
        first = _as_array(values[0])
        if type(first) is np.ndarray and _keeps_dtype(first.dtype):
            self.reserve(first.shape, first.dtype, len(values))

    def reserve(self, row_shape: tuple[int, ...], dtype: Any, min_rows: int) -> None:
        row_len = math.prod(row_shape) * dtype.itemsize
        affordable = max(min_rows, _RESERVED_BYTES // max(1, row_len))
        self.rows = self._array((min(self._batch_size, affordable), *row_shape), dtype)

    def _grow(self, num_rows: int) -> None:
        rows = self.rows
        if rows is not None:
            grown = min(self._batch_size, max(num_rows, 2 * len(rows)))
            self.rows = self._array((grown, *rows.shape[1:]), rows.dtype)
            self.rows[: len(rows)] = rows

    def _array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        if math.prod(shape) * dtype.itemsize < SLOT_BYTES:
            return np.empty(shape, dtype)
        return self._arena.array(shape, dtype)

    def _push_unlike(self, values: list[Any], at: int) -> None:
        """Adds values of which the first is not an array of the rows' dtype and shape."""
        rows = self.rows
        if rows is None:
            raise AssertionError("a column without rows compares nothing")
        arrays = [_as_array(value) for value in values]
        num_copied = copy_rows(rows, arrays, at, hot=True)
        if num_copied < len(arrays):
            other = arrays[num_copied]
            if np.shape(other) != rows.shape[1:] or branch(other) is not None:
                described = (_described(rows[0]), _described(other))
                raise _UnlikeError(self._path, at + num_copied, *described)
            # Another dtype: `numpy.stack` promotes once all values are there. Scalars are kept as
            # arrays, since strings lose their width as scalars.
            stacked = [rows[i, ...] for i in range(at + num_copied)]
            self._pending = [*stacked, *arrays[num_copied:]]
            self.rows = None


def _as_array(leaf: Any) -> Any:
    """Converts arrays of other libraries, and memory-mapped files, to NumPy arrays."""
    if type(leaf) is np.ndarray or isinstance(leaf, np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    return leaf if isinstance(leaf, np.ma.MaskedArray) else np.asarray(leaf)


_stacking: dict[Any, bool] = {}


def _keeps_dtype(dtype: Any) -> bool:
    """Whether `numpy.stack` keeps `dtype`, and its values are plain bytes."""
    known = _stacking.get(dtype)
    if known is None:
        known = dtype.kind in _PLAIN_KINDS and not dtype.hasobject
        known = known and bool(np.stack([np.zeros((), dtype)] * 2).dtype == dtype)
        _stacking[dtype] = known
    return known


def _stacked(values: list[Any], path: str) -> tuple[Any, bool]:
    """Stacks leaves as `numpy.stack` does; returns whether all have one type, too."""
    rows = scalars_to_rows(values)
    if rows is not None:
        return rows, True
    kind = type(values[0])
    uniform = set(map(type, values)) == {kind} and kind is not np.timedelta64  # units may differ
    if uniform and (kind is str or kind is bytes or issubclass(kind, np.number | np.bool_)):
        if issubclass(kind, str | bytes):
            _check_ends(values, path)
        return np.array(values), True
    if is_receivers_container(kind):
        raise ValueError(
            f"objects of class {kind.__qualname__} cannot be stacked by a worker, as only the "
            "main script registered them with JAX: define the class in a module"
        )
    _check_ends(values, path)
    arrays = []
    for row, value in enumerate(values):
        arrays.append(np.asanyarray(value))
        if arrays[-1].shape != arrays[0].shape or branch(value) is not None:
            raise _UnlikeError(path, row, _described(values[0]), _described(value))
    if len(arrays) == 1:
        return np.expand_dims(arrays[0].copy(), 0), False
    try:
        return np.stack(arrays), False
    except TypeError as error:  # no common dtype, as for dates and numbers
        raise_interrupt(error)
        row = next(i for i, array in enumerate(arrays) if array.dtype != arrays[0].dtype)
        found = f"{_described(values[row])} ({error})"
        raise _UnlikeError(path, row, _described(values[0]), found) from error


def _check_ends(values: list[Any], path: str) -> None:
    """Raises if NumPy's arrays of text or bytes, which are padded with zeros, would lose some."""
    for value in values:
        is_text = isinstance(value, str)
        if (is_text and value.endswith("\0")) or (
            isinstance(value, bytes) and value.endswith(b"\0")
        ):
            raise ValueError(
                f"a batch has {type(value).__name__} that ends in a zero{path and f' at {path}'}, "
                "which an array of NumPy would lose: decode the values before the batch, for "
                "example with `np.frombuffer`, or keep them with `batch_fn=list`"
            )


def _described(value: Any) -> str:
    parts = branch(value)
    if parts is not None:
        kind = type(value).__name__
        return f"a {kind} of {', '.join(parts.entries)}" if parts.entries else f"an empty {kind}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a value of type {type(value).__name__}"
