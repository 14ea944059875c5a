"""Pytrees: the nested containers of an element, with JAX's rules if it is installed.

With JAX installed, dict keys are sorted and `None` is a subtree without leaves; without it, dicts
keep their order and `None` is a leaf. This module never imports JAX: types that a program
registered with it are known only if the program has imported it.
"""

import functools
import importlib.util
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from grainmill._interrupts import raise_interrupt

_LEAVES: Final = frozenset({np.ndarray, int, float, bool, complex, str, bytes})


@dataclass(frozen=True, slots=True)
class Branch:
    """One container, flattened by one level.

    Attributes:
        kind: Equal for containers with the same structure.
        entries: The text that indexes each child, such as `['a']`.
        children: The values in the container, in order.
        rebuild: Makes a container of this kind from other children.
    """

    kind: Hashable
    entries: tuple[str, ...]
    children: Sequence[Any] = field(compare=False)
    rebuild: Callable[[Iterable[Any]], Any] = field(compare=False)


def branch(tree: Any) -> Branch | None:
    """Flattens the outermost container of `tree`; returns `None` for a leaf."""
    kind = type(tree)
    if kind in _LEAVES:
        return None
    known = _CONTAINERS.get(kind)
    if known is not None:
        return known(tree)
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        entries = tuple(f".{name}" for name in kind._fields)
        return Branch((kind,), entries, tree, lambda children: kind(*children))
    return _registered_branch(tree)


@functools.cache
def jax_installed() -> bool:
    """Whether this environment has JAX, imported or not."""
    return importlib.util.find_spec("jax") is not None


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a pytree without its leaves; equal for trees that can be stacked."""

    kind: Hashable
    children: tuple["Structure", ...] = ()
    rebuild: Callable[[Iterable[Any]], Any] | None = field(default=None, compare=False)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree of this structure with these leaves, in the order of `flatten`."""
        return _unflatten(self, iter(leaves))


LEAF: Final = Structure("leaf")


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree` in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten_into(tree, leaves)


def flatten_with_path(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of `tree` in order, each with its path as text, such as `['a'][0]`."""
    parts = branch(tree)
    if parts is None:
        return [(path, tree)]
    pairs = zip(parts.entries, parts.children, strict=True)
    return [found for entry, child in pairs for found in flatten_with_path(child, path + entry)]


def map_structure(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """A tree of the results of `function` on the leaves of trees of equal structure.

    Raises:
        ValueError: The structures differ.
    """
    leaves, structure = flatten(tree)
    columns = [leaves]
    for other in rest:
        more, found = flatten(other)
        if found != structure:
            raise ValueError(f"trees must have the same structure, got {tree!r} and {other!r}")
        columns.append(more)
    return structure.unflatten([function(*leaves) for leaves in zip(*columns, strict=True)])


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.rebuild is None:
        return next(leaves)
    return structure.rebuild([_unflatten(child, leaves) for child in structure.children])


def _flatten_into(tree: Any, leaves: list[Any]) -> Structure:
    parts = branch(tree)
    if parts is None:
        leaves.append(tree)
        return LEAF
    children = tuple(_flatten_into(child, leaves) for child in parts.children)
    return Structure(parts.kind, children, parts.rebuild)


def _dict_branch(tree: dict[Any, Any]) -> Branch:
    names = _ordered(tree)
    children = [tree[name] for name in names]
    if jax_installed() or names == tuple(tree):
        return Branch((dict, names), _key_entries(names), children, _zipped(dict, names))
    # Without JAX, what is made of a dict keeps its order.
    order = tuple(tree)

    def rebuild(children: Iterable[Any]) -> dict[Any, Any]:
        values = dict(zip(names, children, strict=True))
        return {name: values[name] for name in order}

    return Branch((dict, names), _key_entries(names), children, rebuild)


def _ordered_dict_branch(tree: OrderedDict[Any, Any]) -> Branch:
    names = tuple(tree)
    kind = (OrderedDict, names)
    return Branch(kind, _key_entries(names), [*tree.values()], _zipped(OrderedDict, names))


def _default_dict_branch(tree: defaultdict[Any, Any]) -> Branch:
    names = _ordered(tree)
    kind = (defaultdict, tree.default_factory, names)
    make: Callable[..., Any] = functools.partial(defaultdict, tree.default_factory)
    return Branch(kind, _key_entries(names), [tree[name] for name in names], _zipped(make, names))


def _sequence_branch(tree: list[Any] | tuple[Any, ...]) -> Branch:
    kind = type(tree)
    entries = tuple(f"[{i}]" for i in range(len(tree)))
    return Branch((kind, len(tree)), entries, tree, kind)


def _none_branch(tree: None) -> Branch | None:
    return Branch((tree,), (), (), lambda _: None) if jax_installed() else None


_CONTAINERS: Final[dict[type, Callable[[Any], Branch | None]]] = {
    dict: _dict_branch,
    list: _sequence_branch,
    tuple: _sequence_branch,
    type(None): _none_branch,
    OrderedDict: _ordered_dict_branch,
    defaultdict: _default_dict_branch,
}


def _ordered(names: Iterable[Any]) -> tuple[Any, ...]:
    names = tuple(names)
    try:
        return tuple(sorted(names))
    except TypeError as failure:
        raise_interrupt(failure)
        return names  # keys that cannot be compared keep the order of the dict


def _key_entries(names: Iterable[Any]) -> tuple[str, ...]:
    return tuple(f"[{name!r}]" for name in names)


def _zipped(make: Callable[..., Any], names: tuple[Any, ...]) -> Callable[[Iterable[Any]], Any]:
    return lambda children: make(zip(names, children, strict=True))


def _registered_branch(tree: Any) -> Branch | None:
    """A container of a type registered with JAX, if the program has imported JAX."""
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None or tree_util.all_leaves([tree]):
        return None
    found, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=lambda part: part is not tree)
    entries = tuple(tree_util.keystr(path) for path, _ in found)
    return Branch(treedef, entries, [child for _, child in found], treedef.unflatten)
