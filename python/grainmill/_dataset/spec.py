"""Shapes and dtypes of a dataset's elements, told from its plan alone."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from grainmill._dataset.iter_dataset import node_of
from grainmill._plan.node import Node


@runtime_checkable
class ShapeDtypeStructProtocol(Protocol):
    """Anything that describes an array by a shape and a dtype, as `jax.ShapeDtypeStruct` does."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Lengths of the axes, `None` for one that varies."""

    @property
    def dtype(self) -> Any:
        """Type of the values."""


def get_element_spec(ds: Any) -> Any:
    """Infers the shapes and dtypes of elements from the plan alone; no element is computed.

    A batch adds `batch_size` as first axis, or `None` where its last one may be shorter. A map
    needs a transform with a method `output_spec(input_spec)`, a `batch_fn` an attribute
    `output_spec(input_spec, batch_size, drop_remainder)`. Mixtures and interleaved datasets are
    described by their first dataset.

    Args:
        ds: A `MapDataset` or an `IterDataset`.

    Returns:
        The structure of an element, with a `ShapeDtypeStruct` for each leaf.

    Raises:
        ValueError: A transform upstream does not say what it returns.
        NotImplementedError: The elements of a stage are not known beforehand: sources, packing,
            flat maps and stages of one's own.

    Example:
        >>> spec = grain.experimental.get_element_spec(grain.MapDataset.range(9).batch(4))
        >>> spec.shape, spec.dtype
        ((None,), <class 'numpy.int64'>)
    """
    node = ds if isinstance(ds, Node) else node_of(ds)
    return node.spec(get_element_spec)
