"""Shapes and dtypes of elements, as plans tell them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from grainmill import _tree
from grainmill._plan.node import transform_name

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """The shape and dtype of an array; `get_element_spec` has them as leaves.

    Attributes:
        shape: Lengths of the axes, `None` for one that varies.
        dtype: Type of the values.
    """

    shape: tuple[int | None, ...]
    dtype: Any


def map_spec(transform: Any, parent_spec: Callable[[], Any]) -> Any:
    """What `transform` says that it makes of elements like those of its parent.

    Raises:
        ValueError: It does not say.
    """
    output_spec = getattr(transform, "output_spec", None)
    if output_spec is None:
        raise ValueError(
            f"Cannot infer element spec for transform {transform_name(transform)} because it "
            "does not implement `output_spec` method."
        )
    return output_spec(parent_spec())


def batch_spec(node: Any, spec: Any) -> Any:
    """What the batches of `node` look like, whose elements look like `spec`.

    Raises:
        ValueError: A function makes them and does not say.
    """
    if node.batch_fn is not None:
        output_spec = getattr(node.batch_fn, "output_spec", None)
        if output_spec is None:
            raise ValueError(
                f"Cannot infer element spec for batch function {node.batch_fn} because it does "
                "not implement `output_spec` method."
            )
        return output_spec(spec, batch_size=node.batch_size, drop_remainder=node.drop_remainder)
    return in_rows(node, spec, 0)


def in_rows(node: Any, spec: Any, num_axes: int) -> Any:
    """`spec` with the rows of the batches of `node` instead of its first `num_axes` axes."""
    rows = node.batch_size if node.drop_remainder else None
    return _tree.map_structure(
        lambda leaf: ShapeDtypeStruct((rows, *leaf.shape[num_axes:]), leaf.dtype), spec
    )
