"""Columns of Arrow files: which are read, and whether values lie within what a file has of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
    # The fields that are selected of a structure; all if `None`.
    Tree: TypeAlias = "dict[str, Any] | None"

_PLAIN: Final = (
    *("integer", "floating", "boolean", "decimal", "date", "time", "timestamp", "duration"),
    *("string", "binary", "large_string", "large_binary", "fixed_size_binary", "null"),
    *("string_view", "binary_view"),
)


class Column(NamedTuple):
    """A column that is read: its number in the schema, its name, and what is selected of it."""

    number: int
    name: str
    tree: Tree


def columns_of(schema: Any, names: Sequence[str] | None) -> list[Column]:
    """The columns of these names, of which dotted ones select a field of a structure.

    Raises:
        ValueError: There is no such column, or several have the same name.
    """
    known = schema.names
    if names is None:
        names = known
        if len(set(known)) < len(known):
            raise ValueError(f"several columns have the same name: {known}")
    found: dict[str, Column] = {}
    for name in names:
        parts = [name] if name in known else name.split(".")
        number = schema.get_field_index(parts[0])
        kind = schema.field(number).type if number >= 0 else None
        for part in parts[1:]:
            kind = _field_type(kind, part)
        if kind is None:
            raise ValueError(f"there is no column {name!r}; there are {known}")
        column = found.setdefault(parts[0], Column(number, parts[0], {}))
        tree = column.tree
        for part in parts[1:-1]:
            tree = None if tree is None else tree.setdefault(part, {})
        if len(parts) == 1:
            found[parts[0]] = column._replace(tree=None)
        elif tree is not None:
            tree[parts[-1]] = None
    return list(found.values())


def _field_type(kind: Any, name: str) -> Any:
    types: Any = importlib.import_module("pyarrow").types
    if kind is None or not types.is_struct(kind):
        return None
    number = kind.get_field_index(name)
    return kind.field(number).type if number >= 0 else None


def selected(array: Any, tree: Tree) -> Any:
    """What is read of a column: of a structure the selected fields, of others their values."""
    pyarrow: Any = importlib.import_module("pyarrow")
    if tree is not None:
        fields = [selected(array.field(name), inner) for name, inner in tree.items()]
        return pyarrow.StructArray.from_arrays(fields, list(tree), mask=array.is_null())
    while hasattr(array, "storage"):  # an extension, such as arrays of a fixed shape
        array = array.storage
    return array


def dense(array: Any) -> Any:
    """The values themselves, of an array that refers to those of a dictionary."""
    return array.dictionary_decode() if hasattr(array, "dictionary_decode") else array


def type_without_views(kind: Any) -> Any:
    """The type of which `pyarrow` can take rows, with the same values: with no views of bytes."""
    pyarrow: Any = importlib.import_module("pyarrow")
    types, inner = pyarrow.types, type_without_views
    found = kind
    if types.is_string_view(kind) or types.is_binary_view(kind):
        found = pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary()
    elif types.is_dictionary(kind):
        found = pyarrow.dictionary(kind.index_type, inner(kind.value_type))
    elif types.is_map(kind):
        found = pyarrow.map_(inner(kind.key_type), inner(kind.item_type))
    elif types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        found = pyarrow.struct([field.with_type(inner(field.type)) for field in fields])
    elif types.is_fixed_size_list(kind):
        values = kind.value_field.with_type(inner(kind.value_type))
        found = pyarrow.list_(values, kind.list_size)
    elif _is_list(types, kind):
        values = kind.value_field.with_type(inner(kind.value_type))
        found = (pyarrow.large_list if types.is_large_list(kind) else pyarrow.list_)(values)
    return kind if found.equals(kind) else found


def without_views(array: Any) -> Any:
    """An array of that type."""
    kind = type_without_views(array.type)
    if kind == array.type:
        return array
    array.validate(full=True)
    if not hasattr(array, "dictionary"):
        return array.cast(kind)
    values = array.dictionary.cast(kind.value_type)
    return type(array).from_arrays(array.indices, values)


def check_type(kind: Any, *, is_nested: bool = False) -> None:
    """Checks that the values of a column can be read.

    Raises:
        NotImplementedError: They cannot.
    """
    types: Any = importlib.import_module("pyarrow").types
    if hasattr(kind, "storage_type"):
        check_type(kind.storage_type, is_nested=is_nested)
    elif types.is_struct(kind):
        for number in range(kind.num_fields):
            check_type(kind.field(number).type, is_nested=True)
    elif types.is_map(kind):
        check_type(kind.key_type, is_nested=True)
        check_type(kind.item_type, is_nested=True)
    elif (
        _is_list(types, kind)
        or types.is_fixed_size_list(kind)
        or (types.is_dictionary(kind) and not is_nested)
    ):
        check_type(kind.value_type, is_nested=True)
    elif not any(getattr(types, f"is_{name}")(kind) for name in _PLAIN):
        raise NotImplementedError(
            f"columns of type {kind} cannot be read; select others with `columns`"
        )


def check_rows(array: Any, rows: Indices) -> None:
    """Checks that the values of these rows, whose lengths vary, lie within the array.

    `pyarrow` relies on it when it takes rows, and checks arrays as a whole only.

    Raises:
        ValueError: They do not.
    """
    types: Any = importlib.import_module("pyarrow").types
    kind = array.type
    if hasattr(array, "storage"):
        check_rows(array.storage, rows)
    elif types.is_dictionary(kind) or not (len(rows) and _may_reach_beyond(types, kind)):
        pass  # what dictionaries have is checked with the rows that are taken
    elif types.is_struct(kind):
        for number in range(kind.num_fields):
            check_rows(array.field(number), rows)
    elif types.is_fixed_size_list(kind):
        firsts = (rows + array.offset) * kind.list_size
        check_rows(array.values, _counted(firsts, firsts + kind.list_size))
    else:
        children = _children(types, array)
        buffers = array.buffers()
        if buffers[1] is None:
            raise ValueError("where values begin is missing")
        is_large = types.is_large_list(kind) or types.is_large_string(kind)
        dtype = np.dtype(np.int64 if is_large or types.is_large_binary(kind) else np.int32)
        offsets = np.frombuffer(buffers[1], dtype, len(array) + 1, array.offset * dtype.itemsize)
        begins, ends = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
        limit = min(map(len, children)) if children else (buffers[2].size if buffers[2] else 0)
        bad = (begins < 0) | (ends < begins) | (ends > limit)
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(f"a value reaches from {begins[at]} to {ends[at]} of {limit}")
        for child in children:
            if _may_reach_beyond(types, child.type):
                check_rows(child, _counted(begins, ends))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _children(types: Any, array: Any) -> list[Any]:
    if types.is_map(array.type):
        return [array.keys, array.items]
    return [array.values] if _is_list(types, array.type) else []


def _may_reach_beyond(types: Any, kind: Any) -> bool:
    """Whether what says where values are is stored, here or in what is nested."""
    if hasattr(kind, "storage_type"):
        return _may_reach_beyond(types, kind.storage_type)
    if types.is_struct(kind):
        return any(_may_reach_beyond(types, kind.field(k).type) for k in range(kind.num_fields))
    if types.is_fixed_size_list(kind):
        return _may_reach_beyond(types, kind.value_type)
    names = ("list", "large_list", "map", "string", "binary", "large_string", "large_binary")
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _counted(begins: Indices, ends: Indices) -> Indices:
    """The numbers of all ranges, one after the other."""
    lens = ends - begins
    skipped = np.repeat(begins - np.append(0, np.cumsum(lens)[:-1]), lens)
    return skipped + np.arange(int(lens.sum()))
