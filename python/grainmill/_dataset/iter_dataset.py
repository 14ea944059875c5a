"""Datasets whose elements come one after another."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grainmill._dataset.apply import apply_each
from grainmill._dataset.iterator import DatasetIterator, PlannedIterator
from grainmill._plan import sequential as plan
from grainmill._plan import transforms

if TYPE_CHECKING:
    import numpy as np

    from grainmill._plan.node import Node

T = TypeVar("T")
S = TypeVar("S")


class IterDatasetFactories(abc.ABCMeta):
    """What `IterDataset` itself offers, and datasets made from it do not."""

    def mix(
        cls,
        datasets: Sequence[IterDataset[T]] | Mapping[str, IterDataset[T]],
        weights: Sequence[float] | Mapping[str, float] | None = None,
    ) -> IterDataset[T]:
        """Elements of several datasets in fixed proportions, until one is at its end.

        Args:
            datasets: At least one; with names, a saved state finds its parts again by name.
            weights: A positive share for each, by name where `datasets` have names; equal
                shares if `None`.

        Raises:
            ValueError: A weight is missing or not positive.
        """
        parents = list(datasets.values()) if isinstance(datasets, Mapping) else list(datasets)
        nodes: Any = (
            {name: node_of(dataset) for name, dataset in datasets.items()}
            if isinstance(datasets, Mapping)
            else [node_of(dataset) for dataset in datasets]
        )
        return PlannedIterDataset(plan.Mix.of(nodes, weights), parents)


class IterDataset(Iterable[T], Generic[T], metaclass=IterDatasetFactories):
    """A sequence of elements that is run through from its start, or from a saved place.

    Derive from it to write a stage of your own: call `super().__init__(parent)` and define
    `__iter__`, which returns a `DatasetIterator` made from `self._parent.__iter__()`.

    Args:
        parents: The dataset, or datasets, that elements are taken from.
    """

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, parents: Any = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)

    @property
    def parents(self) -> tuple[Any, ...]:
        """The datasets that elements are taken from."""
        return tuple(self.__dict__.get("_parents", ()))

    @property
    def _parent(self) -> Any:
        (parent,) = self.parents
        return parent

    @abc.abstractmethod
    def __iter__(self) -> DatasetIterator[T]:
        """Returns an iterator at the first element."""

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[T]], S] | None = None,
    ) -> IterDataset[S]:
        """Stacks `batch_size` consecutive elements along a new leading axis.

        Args:
            batch_size: Elements per batch, at least 1.
            drop_remainder: Whether a last, shorter batch is left out. Set it under `jax.jit`: a
                second shape compiles a second time.
            batch_fn: Makes a batch from a list of elements, in place of stacking.

        Raises:
            ValueError: `batch_size` is not positive.
        """
        return after(
            self, plan.Batch.of, batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn
        )

    def filter(self, transform: transforms.Filter | Callable[[T], bool]) -> IterDataset[T]:
        """Leaves out the elements for which `transform` is false."""
        return after(self, plan.Filter.of, transform)

    def map(self, transform: transforms.Map | Callable[[T], S]) -> IterDataset[S]:
        """Replaces every element by `transform(element)`."""
        return after(self, plan.Map.of, transform)

    def map_with_index(
        self, transform: transforms.MapWithIndex | Callable[[int, T], S]
    ) -> IterDataset[S]:
        """Replaces every element by `transform(number, element)`, counted from 0."""
        return after(self, plan.MapWithIndex.of, transform)

    def random_map(
        self,
        transform: transforms.RandomMap | Callable[[T, np.random.Generator], S],
        *,
        seed: int | None = None,
    ) -> IterDataset[S]:
        """Replaces every element by `transform(element, rng)`.

        Args:
            transform: Gets a generator of its own, a function of `seed` and the element's number.
            seed: Any non-negative integer; if `None`, drawn from `ds.seed(...)` above.

        Raises:
            ValueError: There is no seed.
        """
        return after(self, plan.RandomMap.of, transform, seed)

    def seed(self, seed: int) -> IterDataset[T]:
        """Gives random stages further down that have no seed of their own one to draw from."""
        return after(self, plan.Seed.of, seed)

    def apply(
        self, transformations: transforms.Transformation | transforms.Transformations
    ) -> IterDataset[Any]:
        """Appends transforms given as objects.

        Raises:
            NotImplementedError: An object is not of a known transform class.
        """
        result: IterDataset[Any] = apply_each(self, transformations)
        return result

    def _flat_map(self, transform: transforms.FlatMap) -> IterDataset[Any]:
        return after(self, lambda node: plan.FlatMap((node,), transform))

    def pipe(self, func: Callable[..., S], *args: Any, **kwargs: Any) -> S:
        """Returns `func(self, *args, **kwargs)`, for chaining."""
        return func(self, *args, **kwargs)

    def _plan_node(self) -> Node:
        return plan.Foreign(tuple(node_of(parent) for parent in self.parents), self)

    def __str__(self) -> str:
        return str(self._plan_node())


class PlannedIterDataset(IterDataset[T]):
    """A dataset that is a plan."""

    def __init__(self, node: Node, parents: Sequence[Any] = ()) -> None:
        super().__init__(tuple(parents))
        self._node = node

    def _plan_node(self) -> Node:
        return self._node

    def __iter__(self) -> DatasetIterator[T]:
        return PlannedIterator.over(self._node)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{self}>"


def node_of(dataset: Any) -> Node:
    """The plan of `dataset`; a user's own class becomes one opaque node of it."""
    make_node = getattr(dataset, "_plan_node", None)
    if make_node is None:
        raise TypeError(f"expected a dataset, got {type(dataset).__name__}")
    return make_node()  # type: ignore[no-any-return]


def after(
    dataset: IterDataset[Any], make: Callable[..., Node], *args: Any, **kw: Any
) -> PlannedIterDataset[Any]:
    """`dataset` with the node that `make` appends to it."""
    return PlannedIterDataset(make(node_of(dataset), *args, **kw), (dataset,))
