"""Shapes and dtypes of a dataset's elements, told from its plan alone."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from grainmill._dataset.iter_dataset import node_of
from grainmill._plan.node import Node


@runtime_checkable
class ShapeDtypeStructProtocol(Protocol):
    """What describes an array: a shape, with `None` for a length that varies, and a dtype."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """Type of the values."""


def get_element_spec(ds: Any) -> Any:
    """The shapes and dtypes of the elements of `ds`, in their structure.

    Raises:
        ValueError: A transform on the way does not say what it makes: it has no
            `output_spec(input_spec)`.
        NotImplementedError: A stage's elements cannot be told beforehand.
    """
    node = ds if isinstance(ds, Node) else node_of(ds)
    return node.spec(get_element_spec)
