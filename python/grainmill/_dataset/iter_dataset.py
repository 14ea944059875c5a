"""Datasets whose elements come one after another."""

from __future__ import annotations

import abc
import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grainmill._dataset.apply import apply_each
from grainmill._dataset.iterator import DatasetIterator, PlannedIterator
from grainmill._plan import sequential as plan
from grainmill._plan import transforms
from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill._plan.slicing import check_sliceable
from grainmill._plan.tracebacks import line_of_user

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
        nodes: Any = (
            {name: node_of(dataset) for name, dataset in datasets.items()}
            if isinstance(datasets, Mapping)
            else [node_of(dataset) for dataset in datasets]
        )
        node = plan.Mix.of(nodes, weights)
        keys: Any = range(len(datasets)) if node.names is None else node.names
        return PlannedIterDataset(node, [datasets[key] for key in keys])


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

    def mp_prefetch(
        self,
        options: MultiprocessingOptions | None = None,
        worker_init_fn: Callable[[int, int], None] | None = None,
        sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> IterDataset[T]:
        """Makes elements ahead in worker processes.

        Every worker runs all stages above on a share of the elements: of each dataset with
        random access, every `num_workers`-th element, cut after its last stage. So stages of
        an `IterDataset`, as batches, count per worker. One element of each worker is taken in
        turn; where stages neither drop nor join elements, the order is that without workers.

        Args:
            options: How many workers, and how far ahead; 10 workers if `None`. With 0 workers
                nothing is added.
            worker_init_fn: Called in each worker with its number and the number of workers,
                before it makes anything.
            sequential_slice: Whether a worker gets a run of consecutive elements of each source
                instead, before they are shuffled.

        Raises:
            TypeError: `options` are others, as `ReadOptions`.
            ValueError: An option is out of range, a source cannot be shared between workers,
                or there are workers above already.
        """
        options = MultiprocessingOptions(num_workers=10) if options is None else options
        if not isinstance(options, MultiprocessingOptions):
            raise TypeError(f"`options` must be MultiprocessingOptions, got {options!r}")
        if not options.num_workers:
            return self
        node = after(
            self,
            plan.MultiprocessPrefetch.of,
            options,
            worker_init_fn,
            sequential_slice=sequential_slice,
        )
        check_sliceable(node_of(self), options.num_workers, sequential=sequential_slice)
        return node

    def prefetch(self, multiprocessing_options: MultiprocessingOptions) -> IterDataset[T]:
        """An older name of `mp_prefetch`."""
        warnings.warn(
            "`prefetch` is deprecated, use `mp_prefetch` instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.mp_prefetch(multiprocessing_options)

    def pipe(self, func: Callable[..., S], /, *args: Any, **kwargs: Any) -> S:
        """Returns `func(self, *args, **kwargs)`, for chaining."""
        return func(self, *args, **kwargs)

    def _over(self, node: Any) -> IterDataset[T]:
        """This dataset where its node is replaced by `node`, the same on other parents."""
        copied: IterDataset[T] = node.dataset
        return copied

    def _plan_node(self) -> Node:
        parents = tuple(node_of(parent) for parent in self.parents)
        return plan.UserDefined(parents, self, with_parents)

    def __str__(self) -> str:
        return str(self._plan_node())


class PlannedIterDataset(IterDataset[T]):
    """A dataset that is a plan."""

    def __init__(self, node: Node, parents: Sequence[Any] = ()) -> None:
        super().__init__(tuple(parents))
        if node.added_at is None:
            node.note_added(line_of_user())
        self._node = node

    def _plan_node(self) -> Node:
        return self._node

    def _over(self, node: Any) -> IterDataset[T]:
        copied: PlannedIterDataset[T] = with_node(self, node)
        return copied

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


def with_parents(dataset: Any, parents: Sequence[Node]) -> Any:
    """A copy of a user's own dataset that takes its elements from the plans `parents`."""
    changed = copy.copy(dataset)
    replaced = {
        id(old): old._over(node)  # noqa: SLF001 - datasets share plans
        for old, node in zip(dataset.parents, parents, strict=True)
    }
    attributes = vars(changed)
    attributes["_parents"] = tuple(replaced[id(old)] for old in dataset.parents)
    # A class may keep its parent under a name of its own too.
    for name, value in attributes.items():
        attributes[name] = replaced.get(id(value), value)
    return changed


def with_node(dataset: Any, node: Node) -> Any:
    """A copy of a dataset that is a plan, with `node` as its plan."""
    copied = copy.copy(dataset)
    changed: dict[str, Any] = {"_node": node}
    if len(node.parents) == len(dataset.parents):
        above = zip(dataset.parents, node.parents, strict=True)
        changed["_parents"] = tuple(parent._over(its) for parent, its in above)  # noqa: SLF001
    vars(copied).update(changed)
    return copied


def after(
    dataset: IterDataset[Any], make: Callable[..., Node], *args: Any, **kw: Any
) -> PlannedIterDataset[Any]:
    """`dataset` with the node that `make` appends to it."""
    return PlannedIterDataset(make(node_of(dataset), *args, **kw), (dataset,))
