"""Shapes and dtypes of elements, inferred from plans."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from grainmill import _tree
from grainmill._plan.node import transform_name

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class ShapeDtypeStructProtocol(Protocol):
    """Anything that describes an array by a shape and a dtype, as `jax.ShapeDtypeStruct` does."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Lengths of the axes, `None` for one that varies."""

    @property
    def dtype(self) -> Any:
        """Type of the values."""


@dataclasses.dataclass(frozen=True, slots=True)  # slots hide the properties of the protocol
class ShapeDtypeStruct(ShapeDtypeStructProtocol):
    """The shape and dtype of an array, a leaf of what `get_element_spec` returns.

    Attributes:
        shape: Lengths of the axes, `None` for one that varies.
        dtype: Type of the values.
    """

    # A bare annotation would take the protocol's property for a default.
    shape: tuple[int | None, ...] = dataclasses.field()
    dtype: Any = dataclasses.field()


def map_spec(transform: Any, parent_spec: Callable[[], Any]) -> Any:
    """The spec of the elements that `transform` returns.

    Raises:
        ValueError: `transform` has no `output_spec`.
    """
    output_spec = getattr(transform, "output_spec", None)
    if output_spec is None:
        raise ValueError(
            f"Cannot infer element spec for transform {transform_name(transform)} because it "
            "does not implement `output_spec` method."
        )
    return output_spec(None if getattr(transform, "_ignores_input_spec", False) else parent_spec())


def in_rows(rows: int | None, spec: Any, num_axes: int) -> Any:
    """`spec` with its first `num_axes` axes replaced by a batch axis of `rows`."""
    return _tree.map_structure(
        lambda leaf: ShapeDtypeStruct((rows, *leaf.shape[num_axes:]), leaf.dtype), spec
    )
