"""Batches: elements of one structure stacked leaf by leaf along a new leading axis.

The result equals `numpy.stack` of each leaf. Arrays are copied row by row into a slot of the arena
while they are in the processor's cache; all other leaves are collected and stacked at the end. A
slot returns to the arena only when the last view of it is gone, so a batch may outlive the builder,
the arena and the iterator.

Elements that are all alike are copied by the engine (`Rows`), to memory that follows from the first
(`Layout`). From the first that differs on, a batch is built leaf by leaf (`_Column`): what NumPy
promotes, what containers of other types have, and errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from grainmill._interrupts import raise_interrupt
from grainmill._native import Arena, Layout, Rows, allocate_rows, copy_rows, scalars_to_rows
from grainmill._tree import Branch, branch, jax_installed, map_structure
from grainmill._workers.main_classes import is_receivers_container

_UNLIKE: Final = "Expected all input elements to have the same structure but got:"
# Larger batches are not allocated whole before their elements are seen, as `batch_size` may only be
# a bound.
_RESERVED_BYTES: Final = 1 << 28
_PLAIN_KINDS: Final = frozenset("biufcmMSUV")


class ArraySource(Protocol):
    """An allocator of batches."""

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """An array with uninitialised memory."""


class BatchBuilder:
    """Stacks elements, added a few at a time, into batches.

    Example:
        >>> builder = BatchBuilder(2, Arena())
        >>> builder.push([{"x": 1}, {"x": 2}])
        >>> builder.finish()
        {'x': array([1, 2])}
    """

    def __init__(self, batch_size: int, arena: ArraySource) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        self._batch_size = batch_size
        self._arena = arena
        self._layout: Layout | None = None
        self._rows: Rows | None = None
        self._column: _Column | None = None  # in place of `_rows`, once elements are not alike
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
        at, total = self._num_elements, self._num_elements + len(elements)
        if total > self._batch_size:
            self.clear()
            raise ValueError(f"a batch holds {self._batch_size} elements, got {total}")
        try:
            if not self._put(elements):
                self._column = self._column or self._column_so_far(elements[0])
                self._rows = None
                self._column.push(elements, at)
        except _UnlikeError as unlike:
            raise self._explained(unlike) from None
        except BaseException:
            self.clear()
            raise
        self._num_elements = total

    def _put(self, elements: list[Any]) -> bool:
        """Copies elements that are like all before them; returns whether they are."""
        at = self._num_elements
        if not at and self._column is None and not self._fits(elements[0]):
            layout = _layout_of(elements[0])
            self._rows = None if layout is None else self._allocated(layout, len(elements))
        if self._rows is None:
            return False
        # Parts of a batch have just been computed; a whole batch exceeds the cache.
        return self._rows.put(elements, at, hot=len(elements) < self._batch_size)

    def _fits(self, first: Any) -> bool:
        """Whether the rows that were allocated for elements to come are right for the first."""
        return self._rows is not None and self._layout is not None and self._layout.matches(first)

    def _allocated(self, layout: Layout, min_rows: int) -> Rows:
        self._layout = layout
        return layout.rows(self._batch_size, min_rows, _RESERVED_BYTES, self._arena, _as_array)

    def _column_so_far(self, first: Any) -> "_Column":
        """The elements added until now, to be continued leaf by leaf."""
        rows = self._rows
        if rows is None or not self._num_elements:
            return _column(first, self._batch_size, self._arena, "")
        column = _column(rows.element(0), self._batch_size, self._arena, "")
        for leaf, target in zip(column.leaves(), rows.targets, strict=True):
            leaf.continue_from(target)
        return column

    def push_rows(
        self, columns: dict[str, np.ndarray[Any, Any]], order: Sequence[int] | np.ndarray[Any, Any]
    ) -> None:
        """Adds elements as `push` does: `{key: column[row] for key, column in columns.items()}`.

        Args:
            columns: Arrays with at least one row for each element.
            order: The row of each element, in order.
        """
        order = np.asarray(order, np.int64)
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
        """The arrays of `targets` for rows of `columns`; `None` if they do not fit."""
        targets = self.targets
        found = None if targets is None else targets.columns
        if found is None or found[0] is not dict or [key for key, _ in found[1]] != list(columns):
            return None
        rows = [target for _, target in found[1] if type(target) is np.ndarray]
        layout = [(target.shape[1:], target.dtype) for target in rows]
        alike = layout == [(column.shape[1:], column.dtype) for column in columns.values()]
        return rows if alike else None

    @property
    def targets(self) -> Rows | None:
        """Where further elements of this layout may be written without `push`, if possible."""
        rows = self._rows
        return rows if rows is not None and rows.num_rows >= self._batch_size else None

    @property
    def layout(self) -> Layout | None:
        """The layout of elements that can be written to `targets`; `None` if they cannot."""
        return None if self.targets is None else self._layout

    def expect(self, layout: Layout) -> None:
        """Allocates `targets` for elements of `layout` before the first arrives."""
        self._rows = self._allocated(layout, 1)

    def add_filled(self, num_elements: int) -> None:
        """Records that the next elements have been written to `targets`."""
        self._num_elements += num_elements

    @property
    def row_byte_len(self) -> int:
        """Bytes of the arrays of one element; 0 before the first."""
        column = self._rows or self._column
        return 0 if column is None else column.row_byte_len

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
        rows, column, num_elements = self._rows, self._column, self._num_elements
        try:
            if rows is not None and num_elements:
                batch, self._exact = rows.finish(num_elements, _stacked)
            elif column is not None:
                batch, self._exact = column.finish(num_elements), column.is_exact
            else:
                raise ValueError("a batch needs at least 1 element, got 0")
        except _UnlikeError as unlike:
            raise self._explained(unlike) from None
        finally:
            self.clear()
        return batch

    def clear(self) -> None:
        """Drops the elements added since the last batch."""
        self._rows = self._column = None
        self._num_elements = 0

    def _explained(self, unlike: "_UnlikeError") -> ValueError:
        self.clear()
        place = f"at `{unlike.path}` " if unlike.path else ""
        hint = ""
        if _described(None) in (unlike.expected, unlike.found):
            hint = (
                "; a function without `return` for some elements returns `None`: return a value "
                "for each, or drop these elements by `filter`"
            )
        return ValueError(
            f"{_UNLIKE} {place}element 0 has {unlike.expected} "
            f"and element {unlike.row} has {unlike.found}{hint}"
        )


class ElementList:
    """The elements of a batch for a user's batch function, in place of a `BatchBuilder`."""

    def __init__(self, batch_fn: Callable[[list[Any]], Any]) -> None:
        self._batch_fn = batch_fn
        self.clear()

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, elements: list[Any]) -> None:
        """See `BatchBuilder.push`."""
        self._elements += elements

    def finish(self) -> Any:
        """See `BatchBuilder.finish`."""
        return self._batch_fn(self._elements)

    def clear(self) -> None:
        """See `BatchBuilder.clear`."""
        self._elements: list[Any] = []


_arenas: list[ArraySource] = []


def shared_arena() -> ArraySource:
    """The arena of this process, for all batches."""
    if not _arenas:
        _arenas.append(Arena())
    return _arenas[0]


def take_arrays_from(arena: ArraySource) -> None:
    """Replaces the arena of this process."""
    _arenas[:] = [arena]


def stack(
    elements: list[Any],
    arena: ArraySource | None = None,
    batch_fn: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Stacks all `elements` into one batch, or lets a user's `batch_fn` make it.

    Raises:
        ValueError: If there are none, or their structures or shapes differ.
    """
    if batch_fn is not None:
        return batch_fn(elements)
    builder = BatchBuilder(max(1, len(elements)), arena or shared_arena())
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
    batch = stack(list(values))

    def padded(leaf: Any) -> Any:
        row = np.full(leaf.shape[1:], pad_value, dtype=leaf.dtype)
        return np.concatenate([leaf, np.stack([row] * missing)])

    return map_structure(padded, batch) if missing else batch


class _UnlikeError(Exception):
    """Row `row` differs from row 0 at `path`; the builder converts rows to positions."""

    def __init__(self, path: str, row: int, expected: str, found: str) -> None:
        super().__init__(path, row, expected, found)
        self.path, self.row, self.expected, self.found = path, row, expected, found


# A node of the elements' structure, over the elements of a batch.
_Column: TypeAlias = "_BranchColumn | _LeafColumn"


def _column(first: Any, batch_size: int, arena: ArraySource, path: str) -> _Column:
    parts = branch(first)
    if parts is None:
        return _LeafColumn(batch_size, arena, path)
    pairs = _children(first, parts)
    children = [_column(child, batch_size, arena, path + entry) for entry, child in pairs]
    kind = _DictColumn if type(first) is dict else _BranchColumn
    return kind(parts, children, path, first)


def _children(container: Any, parts: Branch) -> Iterator[tuple[str, Any]]:
    """The children of a container, in the order of what is made of it, after their indices."""
    if type(container) is dict:
        return ((f"[{key!r}]", container[key]) for key in _keys(parts))
    return zip(parts.entries, parts.children, strict=True)


def _keys(parts: Branch) -> list[Any]:
    """The keys of a dict, in the order of what is made of it."""
    return list(parts.rebuild(parts.children))


class _BranchColumn:
    """A container in every element; its children are columns themselves."""

    def __init__(self, parts: Branch, children: list[_Column], path: str, first: Any) -> None:
        self._parts = parts
        self._children = children
        self._path = path
        self._described = _described(first)

    @property
    def is_exact(self) -> bool:
        return all(child.is_exact for child in self._children)

    @property
    def row_byte_len(self) -> int:
        return sum(child.row_byte_len for child in self._children)

    def push(self, values: list[Any], at: int) -> None:
        for child, column in zip(self._children, self._columns(values, at), strict=True):
            child.push(list(column), at)

    def _columns(self, values: list[Any], at: int) -> Iterable[Iterable[Any]]:
        rows = []
        for row, value in enumerate(values, at):
            parts = branch(value)
            if parts is None or parts.kind != self._parts.kind:
                raise _UnlikeError(self._path, row, self._described, _described(value))
            rows.append(parts.children)
        return zip(*rows, strict=True)

    def finish(self, num_rows: int) -> Any:
        return self._parts.rebuild([child.finish(num_rows) for child in self._children])

    def leaves(self) -> "Iterator[_LeafColumn]":
        for child in self._children:
            yield from child.leaves()


class _DictColumn(_BranchColumn):
    """A dict in every element, whatever the order of its keys."""

    def __init__(self, parts: Branch, children: list[_Column], path: str, first: Any) -> None:
        super().__init__(parts, children, path, first)
        self._names = _keys(parts)

    def _columns(self, values: list[Any], at: int) -> Iterable[Iterable[Any]]:
        names = self._names
        if all(type(value) is dict and len(value) == len(names) for value in values):
            try:
                return [[value[name] for value in values] for name in names]
            except KeyError as failure:
                raise_interrupt(failure)  # an element lacks it
        alike = [type(value) is dict and value.keys() == set(names) for value in values]
        row = alike.index(False)
        raise _UnlikeError(self._path, at + row, self._described, _described(values[row]))

    def finish(self, num_rows: int) -> Any:
        columns = zip(self._names, self._children, strict=True)
        return {name: child.finish(num_rows) for name, child in columns}


class _LeafColumn:
    """A leaf in every element: rows of one array, or a list of values to be stacked later."""

    def __init__(self, batch_size: int, arena: ArraySource, path: str) -> None:
        self._batch_size = batch_size
        self._arena = arena
        self._path = path
        self._rows: np.ndarray[Any, Any] | None = None
        self._pending: list[Any] = []
        self.is_exact = True

    def leaves(self) -> "Iterator[_LeafColumn]":
        yield self

    def continue_from(self, target: np.ndarray[Any, Any] | list[Any]) -> None:
        """Adds further values to these, a leaf of `Rows.targets`."""
        if isinstance(target, list):
            self._pending = target
        else:
            self._rows = target

    @property
    def row_byte_len(self) -> int:
        return 0 if self._rows is None else self._rows.nbytes // max(1, len(self._rows))

    def push(self, values: list[Any], at: int) -> None:
        if at == 0:
            self._start_rows(values)
        if self._rows is None:
            self._pending.extend(values)
            return
        if at + len(values) > len(self._rows):
            self._grow(at + len(values))
        hot = len(values) < self._batch_size
        num_copied = copy_rows(self._rows, values, at, hot=hot)
        if num_copied < len(values):
            self._push_unlike(values[num_copied:], at + num_copied)

    def finish(self, num_rows: int) -> Any:
        if self._rows is None:
            batch, self.is_exact = _stacked(self._pending, self._path)
            return batch
        return self._rows if len(self._rows) == num_rows else self._rows[:num_rows]

    def _start_rows(self, values: list[Any]) -> None:
        first = _as_array(values[0])
        if _has_rows(first):
            row_len = first.nbytes
            affordable = max(len(values), _RESERVED_BYTES // max(1, row_len))
            shape = (min(self._batch_size, affordable), *first.shape)
            self._rows = allocate_rows(self._arena, shape, first.dtype)

    def _grow(self, num_rows: int) -> None:
        rows = self._rows
        if rows is not None:
            grown = min(self._batch_size, max(num_rows, 2 * len(rows)))
            self._rows = allocate_rows(self._arena, (grown, *rows.shape[1:]), rows.dtype)
            self._rows[: len(rows)] = rows

    def _push_unlike(self, values: list[Any], at: int) -> None:
        """Adds values of which the first is not an array of the rows' dtype and shape."""
        rows = self._rows
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
            self._rows = None


# Those of the last batches, as the next one usually has one of them.
_layouts: list[Layout] = []
_MAX_LAYOUTS: Final = 8


def _layout_of(first: Any) -> Layout | None:
    """The layout of elements like `first`; `None` if the engine does not know its containers."""
    if jax_installed():  # otherwise the order of keys counts
        for known in _layouts:
            if known.matches(first):
                return known
    layout = _new_layout(first, "")
    if layout is not None:
        _layouts[:] = [layout, *_layouts[: _MAX_LAYOUTS - 1]]
    return layout


def _new_layout(first: Any, path: str) -> Layout | None:
    parts = branch(first)
    if parts is None:
        array = _as_array(first)
        if _has_rows(array):
            return Layout.of_rows(array.shape, array.dtype)
        dtype = array.dtype if type(array) is np.ndarray else None
        return Layout.of_values(path, type(first), dtype)
    kind = type(first)
    if kind not in _ENGINES_CONTAINERS:
        return None
    children = []
    for entry, child in _children(first, parts):
        layout = _new_layout(child, path + entry)
        if layout is None:
            return None
        children.append(layout)
    keys = _keys(parts) if kind is dict else list(range(len(children)))
    return Layout.of_containers(kind, keys, children)


_ENGINES_CONTAINERS: Final = frozenset({dict, list, tuple, type(None)})


def _as_array(leaf: Any) -> Any:
    """Converts arrays of other libraries, and memory-mapped files, to NumPy arrays."""
    if type(leaf) is np.ndarray or isinstance(leaf, np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    return leaf if isinstance(leaf, np.ma.MaskedArray) else np.asarray(leaf)


def _has_rows(array: Any) -> bool:
    """Whether rows of an array can hold this and the like."""
    return type(array) is np.ndarray and _keeps_dtype(array.dtype)


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
    if kind in {str, bytes} and set(map(type, values)) == {kind}:
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
