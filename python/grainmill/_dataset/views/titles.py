"""How stages are called where pipelines are shown: their names with parameters."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._plan import random_access
from grainmill._plan.node import transform_name
from grainmill._url import shown as shown_path

if TYPE_CHECKING:
    from grainmill._plan.node import Node

_MAX_VALUE_LEN = 80
_MAX_ITEMS = 6
_PATH_PARTS = 2

_HIDDEN = {
    *("parents", "added_at", "length", "function", "with_parents", "dataset", "datasets"),
    *("wraps", "first_number", "number_step"),
}


def name_of(node: Node) -> str:
    """What a kind of stage is called."""
    return node.dataset_name or str(node)


def kind_of(node: Node) -> tuple[Any, ...]:
    """Equal for parts with the same stages."""
    kinds: list[Any] = [name_of(node)]
    while len(node.parents) == 1:
        node = node.parents[0]
        kinds.append(name_of(node))
    return (*kinds, len(node.parents))


def several(count: int, name: str) -> str:
    """A count with what is counted."""
    return f"{count:,} {name}{'s' if count > 1 else ''}"


def title(node: Node) -> str:
    """The name of a stage with its parameters."""
    name, arguments = name_and_arguments(node)
    return f"{name}({', '.join(arguments)})" if arguments else name


def name_and_arguments(node: Node) -> tuple[str, list[str]]:
    """The name of a stage, and its parameters."""
    if isinstance(node, random_access.Range) or node.reads:
        name, _, arguments = str(node).removesuffix(")").partition("(")
        return name, [arguments]
    if isinstance(node, random_access.Slice):
        return f"SliceMapDataset[{node.start}:{node.stop}:{node.step}]", []
    values = {
        field.name: getattr(node, field.name)
        for field in dataclasses.fields(node)
        if field.name not in _HIDDEN
    }
    if isinstance(node, random_access.Source):
        values["source"] = _Text(_source(node.source))
    if node.opens is not None:
        values = {"datasets": _Text(f"{len(node.opens):,} datasets"), **values}
    if len(node.parents) > 1:
        values = {"parts": len(node.parents), **values}
    return name_of(node), [
        f"{name.removeprefix('own_')}={_value(value)}"
        for name, value in values.items()
        if value is not None and value != ()
    ]


class _Text(str):
    """Shown as it is."""

    __slots__ = ()


def _value(value: Any) -> str:
    if isinstance(value, _Text):
        return value
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _items(value)
    if isinstance(value, np.ndarray):
        return spec_text(value)
    if type(value).__module__.startswith("grainmill._plan"):  # options
        return repr(value)
    if isinstance(value, int | float | str | bytes | enum.Enum):
        text = repr(value)
        return text if len(text) <= _MAX_VALUE_LEN else f"{text[: _MAX_VALUE_LEN - 3]}..."
    return transform_name(value) if callable(value) else type(value).__name__


def _items(values: Any) -> str:
    """The first items of a collection."""
    if isinstance(values, Mapping):
        items = [f"{key!r}: {_value(value)}" for key, value in list(values.items())[:_MAX_ITEMS]]
    else:
        items = [_value(value) for value in list(values)[:_MAX_ITEMS]]
    if len(values) > _MAX_ITEMS:
        items.append(f"... {len(values):,} in all")
    left, right = "()" if isinstance(values, tuple) else "[]" if isinstance(values, list) else "{}"
    return f"{left}{', '.join(items)}{right}"


def _source(source: Any) -> str:
    """A source by its type; users' `__repr__` may be slow, or print all records."""
    name = type(source).__name__
    paths = getattr(source, "_paths", None)
    if type(source).__module__.startswith("grainmill.") and paths:
        first = "/".join(shown_path(str(paths[0])).replace(os.sep, "/").split("/")[-_PATH_PARTS:])
        others = f" and {several(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
        return f"{name}({first}{others})"
    if type(source).__module__ == "grainmill.sources":
        text = repr(source)
        return text if len(text) <= _MAX_VALUE_LEN else f"{name}, {len(source):,} records"
    return name


def spec_text(spec: Any) -> str:
    """The structure of an element, with dtype and shape of each leaf, or that it is unknown."""
    if isinstance(spec, BaseException):
        return str(spec).partition("\n")[0]
    if isinstance(spec, Mapping):
        return "{" + ", ".join(f"{key!r}: {spec_text(value)}" for key, value in spec.items()) + "}"
    if isinstance(spec, list | tuple) and not hasattr(spec, "dtype"):
        parts = [spec_text(value) for value in list(spec)[:_MAX_ITEMS]]
        more = [f"... {len(spec):,} in all"] if len(spec) > _MAX_ITEMS else []
        left, right = "[]" if isinstance(spec, list) else "()"
        return left + ", ".join([*parts, *more]) + right
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or dtype is None:
        return type(spec).__name__
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return f"{name}[{', '.join('?' if size is None else str(size) for size in shape)}]"
