"""Shapes and dtypes of a dataset's elements, told from its plan alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from grainmill._dataset.iter_dataset import node_of
from grainmill._evaluate import tree
from grainmill._plan import random_access, sequential
from grainmill._plan.node import Node, transform_name

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class ShapeDtypeStructProtocol(Protocol):
    """What describes an array: a shape, with `None` for a length that varies, and a dtype."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """Type of the values."""


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """The shape and dtype of an array.

    Attributes:
        shape: Lengths of the axes, `None` for one that varies.
        dtype: Type of the values.
    """

    shape: tuple[int | None, ...]
    dtype: Any


def get_element_spec(ds: Any) -> Any:
    """The shapes and dtypes of the elements of `ds`, in their structure.

    Raises:
        ValueError: A transform on the way does not say what it makes: it has no
            `output_spec(input_spec)`.
        NotImplementedError: A stage's elements can not be told beforehand.
    """
    return _spec(node_of(ds))


def _spec(node: Node) -> Any:
    for kind, rule in _RULES.items():
        if isinstance(node, kind):
            return rule(node)
    raise NotImplementedError(f"the element spec of {node} can not be told beforehand")


def _mapped(node: Any) -> Any:
    output_spec = getattr(node.transform, "output_spec", None)
    if output_spec is None:
        raise ValueError(
            f"Cannot infer element spec for transform {transform_name(node.transform)} because it "
            "does not implement `output_spec` method."
        )
    return output_spec(_spec(node.parent))


def _batched(node: Any) -> Any:
    spec = _spec(node.parent)
    if node.batch_fn is not None:
        output_spec = getattr(node.batch_fn, "output_spec", None)
        if output_spec is None:
            raise ValueError(
                f"Cannot infer element spec for batch function {node.batch_fn} because it does "
                "not implement `output_spec` method."
            )
        return output_spec(spec, batch_size=node.batch_size, drop_remainder=node.drop_remainder)
    return _in_rows(node, spec, 0)


def _in_rows(node: Any, spec: Any, num_axes: int) -> Any:
    """`spec` with the rows of the batches of `node` instead of its first `num_axes` axes."""
    rows = node.batch_size if node.drop_remainder else None
    return tree.map_structure(
        lambda leaf: ShapeDtypeStruct((rows, *leaf.shape[num_axes:]), leaf.dtype), spec
    )


def _first_part(node: Any) -> Any:
    return get_element_spec(node.datasets[0])


_RULES: dict[type[Node], Callable[[Any], Any]] = {
    random_access.Range: lambda _: ShapeDtypeStruct((), np.int64),
    random_access.Filter: lambda node: _spec(node.parent),
    sequential.Filter: lambda node: _spec(node.parent),
    random_access.Map: _mapped,
    sequential.Map: _mapped,
    random_access.Batch: _batched,
    sequential.Batch: _batched,
    sequential.Rebatch: lambda node: _in_rows(node, _spec(node.parent), 1),
    random_access.Zip: lambda node: tuple(_spec(parent) for parent in node.parents),
    sequential.Zip: lambda node: tuple(_spec(parent) for parent in node.parents),
    random_access.Mix: lambda node: _spec(node.parents[0]),
    sequential.Mix: lambda node: _spec(node.parents[0]),
    random_access.Concatenate: lambda node: _spec(node.parents[0]),
    random_access.Select: lambda node: _spec(node.parents[0]),
    sequential.Interleave: _first_part,
    **dict.fromkeys(
        (
            random_access.Shuffle,
            random_access.WindowShuffle,
            random_access.Slice,
            random_access.Take,
            random_access.Repeat,
            random_access.Seed,
            sequential.Read,
            sequential.Repeat,
            sequential.Cache,
            sequential.Limit,
            sequential.WindowShuffle,
            sequential.ThreadPrefetch,
            sequential.MultithreadPrefetch,
            sequential.MultiprocessPrefetch,
            sequential.Seed,
            sequential.WithOptions,
        ),
        lambda node: _spec(node.parent),
    ),
}
