"""Options of a whole pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._iterators.settings import WithOptions
from grainmill._plan.arguments import wrong_type
from grainmill._plan.options import DatasetOptions

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset


class WithOptionsIterDataset(PlannedIterDataset[T_co]):
    """Sets options of the whole pipeline, upstream and downstream.

    If several set the same option, the one furthest downstream wins.

    Args:
        parent: The dataset; its elements are not changed.
        options: The options.

    Raises:
        TypeError: `options` is not a `DatasetOptions`.

    Example:
        >>> ds = grain.MapDataset.range(2000).filter(lambda x: x > 1990).to_iter_dataset()
        >>> options = grain.experimental.DatasetOptions(filter_raise_threshold_ratio=0.99)
        >>> next(iter(grain.experimental.WithOptionsIterDataset(ds, options)))
        Traceback (most recent call last):
            ...
        ValueError: ... skipped 100.00 % of the last seen 1000 elements...
    """

    def __init__(self, parent: AnyDataset[T_co], options: DatasetOptions) -> None:
        if not isinstance(options, DatasetOptions):
            raise wrong_type("`options` must be a `DatasetOptions`", options)
        super().__init__(WithOptions((node_of(parent),), options), (parent,))
