"""Shapes and dtypes of a dataset's elements, inferred from its plan."""

from __future__ import annotations

from typing import Any

from grainmill._dataset.iter_dataset import node_of
from grainmill._plan.node import Node


def get_element_spec(ds: Any) -> Any:
    """Infers the shapes and dtypes of elements from the plan, without computing an element.

    A batch adds `batch_size` as first axis, or `None` if the last batch may be shorter. The
    transform of a map must have a method `output_spec(input_spec)`, and a `batch_fn` must have an
    attribute `output_spec(input_spec, batch_size, drop_remainder)`. The spec of mixtures and
    interleaved datasets is that of their first dataset.

    Args:
        ds: A `MapDataset` or an `IterDataset`.

    Returns:
        The structure of an element, with a `ShapeDtypeStruct` for each leaf.

    Raises:
        ValueError: A transform or `batch_fn` upstream has no `output_spec`.
        NotImplementedError: The spec cannot be inferred: of sources, packing, flat maps and
            user-defined stages.

    Example:
        >>> spec = grain.experimental.get_element_spec(grain.MapDataset.range(9).batch(4))
        >>> spec.shape, spec.dtype
        ((None,), <class 'numpy.int64'>)
    """
    known: dict[int, tuple[Node, Any]] = {}

    def spec_of(of: Any) -> Any:
        end = of if isinstance(of, Node) else node_of(of)
        for node in end.walk_up() if id(end) not in known else ():
            if id(node) not in known:
                try:
                    known[id(node)] = node, node.spec(spec_of)
                except Exception as failure:  # raised if this spec is asked for
                    known[id(node)] = node, failure
        _, spec = known[id(end)]
        if isinstance(spec, Exception):
            raise spec
        return spec

    return spec_of(ds)
