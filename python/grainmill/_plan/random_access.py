"""Nodes whose element `i` is a function of `i`: sources, index stages, maps, batch."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import transforms
from grainmill._plan.applying import Applying, Filtering, RandomApplying
from grainmill._plan.arguments import checked_integer, checked_number, wrong_type
from grainmill._plan.batching import Batching, num_batches
from grainmill._plan.node import (
    MapNode,
    Node,
    Share,
    StepKind,
    Tree,
    check_not_class,
    random_access,
    transform_name,
)
from grainmill._plan.seeds import checked_seed, checked_shuffle_seed, derived_seed
from grainmill._plan.spec import ShapeDtypeStruct
from grainmill._url import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENDLESS = sys.maxsize
# Batches and slices of an endless dataset have a length, too, which nobody should read.
PRACTICALLY_ENDLESS = 10**15
# A folder, a URL, a pattern, or a name with the extension of a file.
_PATH_LIKE = re.compile(r"[/\\*]|\.\w+$")


def check_source(source: Any, name: str = "source") -> None:
    """Raises a `TypeError` if `source` is none although it may be indexed."""
    kind = type(source).__name__
    if isinstance(source, type):
        raise TypeError(
            f"`{name}` must be an object with records, got the class `{source.__name__}`: did you "
            f"mean `{source.__name__}(...)`?"
        )
    is_text = isinstance(source, str) and _PATH_LIKE.search(source)
    if is_text or isinstance(source, os.PathLike):
        found = (
            f"the text {shown(source)!r}, whose elements are its characters"
            if is_text
            else f"{source!r}"
        )
        raise TypeError(
            f"`{name}` must be an object with records, got {found}: to read a file, pass a "
            "source such as `grain.sources.ArrayRecordDataSource(path)`"
        )
    if (
        hasattr(source, "__getitem__")
        and hasattr(source, "__iter__")
        and not hasattr(source, "__len__")
    ):
        raise TypeError(
            f"`{name}` must have `__len__`, but a {kind} can only be iterated: derive a class from "
            "`grain.IterDataset` whose iterator does so, or read it by index, for example a data "
            "set of Hugging Face without `streaming=True`"
        )


def source_len(source: Any) -> int | None:
    """The number of records of a user's object, `None` if it has no `__len__`: it never ends.

    Raises:
        TypeError: The object cannot be indexed, or can be iterated and has no length.
    """
    check_source(source)
    if not hasattr(source, "__getitem__"):
        is_iterated = hasattr(source, "__iter__") and not hasattr(source, "__len__")
        hint = (
            "; what can only be iterated is read by a class that derives from `grain.IterDataset`"
        )
        raise TypeError(
            "`source` must have `__getitem__` and `__len__`, such as a list or an "
            f"`ArrayRecordDataSource`, got {source!r} of type {type(source).__name__}"
            f"{hint if is_iterated else ''}"
        )
    if not hasattr(source, "__len__"):
        return None
    try:
        return len(source)
    except TypeError as error:
        error.add_note(f"in `len` of the source, a {type(source).__name__}")
        raise


@lazy_dataclass
class Source(MapNode):
    """Elements of a user's object with `__len__` and `__getitem__`.

    If `wraps`, positions are taken modulo `length`, the object's length.
    """

    source: Any
    wraps: bool
    dataset_name: ClassVar[str] = "SourceMapDataset"

    @classmethod
    def of(cls, source: Any) -> Self:
        """A source node; an object without `__len__` is read at the requested positions.

        Raises:
            TypeError: The object cannot be indexed, or can be iterated and has no length.
        """
        length = source_len(source)
        if length is None:
            return cls((), ENDLESS, source, wraps=False)
        return cls((), length, source, wraps=True)

    @property
    def slices_own_epoch(self) -> bool:  # type: ignore[override]
        """See `MapNode.slices_own_epoch`."""
        return self.wraps

    def _arguments(self) -> str:
        return f"(source={type(self.source).__name__})"


@lazy_dataclass
class Range(MapNode):
    """The integers of a `range`."""

    numbers: range
    dataset_name: ClassVar[str] = "RangeMapDataset"

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return ShapeDtypeStruct((), np.int64)

    def consecutive(self, share: Share) -> MapNode:
        """See `MapNode.consecutive`."""
        numbers = self.numbers[slice(*share.bounds(self.length))]
        # Messages must not attribute these numbers to a line of the user's code.
        return dataclasses.replace(self, length=len(numbers), numbers=numbers, added_at="")

    def _arguments(self) -> str:
        numbers = self.numbers
        return f"(start={numbers.start}, stop={numbers.stop}, step={numbers.step})"


@lazy_dataclass
class UserDefined(MapNode):
    """A user's own `MapDataset` subclass, with or without parents.

    `with_parents` returns a copy of it over other plans.
    """

    dataset: Any
    with_parents: Callable[[Any, Sequence[Node]], Any]

    runs_users_code: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        dataset: Any,
        parents: Sequence[Any],
        with_parents: Callable[[Any, Sequence[Node]], Any],
    ) -> Self:
        """The node of `dataset`, whose length is determined only when needed."""
        return cls(tuple(parents), -1, dataset, with_parents)

    def over(self, parents: tuple[MapNode, ...]) -> Self:
        """See `MapNode.over`."""
        return self.of(self.with_parents(self.dataset, parents), parents, self.with_parents)

    @property
    def slices_itself(self) -> bool:  # type: ignore[override]
        """See `MapNode.slices_itself`."""
        return hasattr(self.dataset, "set_slice")

    def consecutive(self, share: Share) -> MapNode:
        """See `MapNode.consecutive`."""
        if not self.slices_itself:
            return super().consecutive(share)
        node: MapNode = share.of_users_dataset(self.dataset)._plan_node()  # noqa: SLF001 - opaque
        return node

    @property
    def users_dataset(self) -> Any:
        """See `Node.users_dataset`."""
        return self.dataset

    def _source_type(self) -> type:
        return type(self.dataset)

    def __getattribute__(self, name: str) -> Any:
        if name == "length":
            return len(object.__getattribute__(self, "dataset"))
        return object.__getattribute__(self, name)

    def __str__(self) -> str:
        return type(self.dataset).__name__


@lazy_dataclass
class Map(Applying, MapNode):
    """A function of each element that is not `None`."""

    dataset_name: ClassVar[str] = "MapMapDataset"
    step_kind: ClassVar[StepKind | None] = "map"


@lazy_dataclass
class MapWithIndex(Map):
    """A function of the requested position, not reduced to one epoch, and the element."""

    dataset_name: ClassVar[str] = "MapWithIndexMapDataset"
    transform_kind: ClassVar[type] = transforms.MapWithIndex
    step_kind: ClassVar[StepKind | None] = "indexed"


@lazy_dataclass
class Filter(Filtering, Map):
    """Replaces elements for which a predicate is false by `None`."""

    dataset_name: ClassVar[str] = "FilterMapDataset"
    step_kind: ClassVar[StepKind | None] = "filter"
    drops_elements: ClassVar[bool] = True


@lazy_dataclass
class RandomMap(RandomApplying, Map):
    """A function of the element and a generator keyed by (`seed`, index)."""

    dataset_name: ClassVar[str] = "RandomMapMapDataset"
    step_kind: ClassVar[StepKind | None] = "random"


@lazy_dataclass
class Shuffle(MapNode):
    """A permutation of each epoch, different in every one."""

    seed: int
    dataset_name: ClassVar[str] = "ShuffleMapDataset"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, seed: int | None) -> Self:
        """A node that permutes each epoch of `parent`."""
        node = cls.after(parent, -1)
        if seed is None:
            seed = derived_seed(node)
        if seed is None:
            raise ValueError(
                "`shuffle` requires a seed. Please provide it with `ds.seed(seed)` before any "
                "random transformations or pass it directly with `ds.shuffle(seed=seed)`."
            )
        return dataclasses.replace(node, seed=checked_shuffle_seed(seed))

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        return ("shuffle", self.length, self.seed, *upstream)


@lazy_dataclass
class WindowShuffle(MapNode):
    """Shuffles elements within windows of `window_size` consecutive ones."""

    window_size: int
    seed: int
    dataset_name: ClassVar[str] = "WindowShuffleMapDataset"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, window_size: int, seed: int) -> Self:
        """A node that permutes each window of `parent`."""
        window_size = checked_integer(window_size, "window_size", minimum=1)
        return cls.after(parent, window_size, checked_shuffle_seed(seed))

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        return ("window_shuffle", self.length, self.window_size, self.seed, *upstream)


@lazy_dataclass
class Slice(MapNode):
    """Elements `start, start + step, ...` of every epoch of the parent."""

    start: int
    stop: int
    step: int
    dataset_name: ClassVar[str] = "SliceMapDataset"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, sl: slice) -> Self:
        """A node that takes `sl` of each epoch of `parent`."""
        start, stop, step = sl.indices(random_access(parent).length)
        return cls((parent,), len(range(start, stop, step)), start, stop, step)

    def over(self, parents: tuple[MapNode, ...]) -> Self:
        """See `MapNode.over`."""
        return self.of(parents[0], slice(self.start, None, self.step))

    @property
    def slices_own_epoch(self) -> bool:  # type: ignore[override]
        """See `MapNode.slices_own_epoch`; an endless slice cannot be split."""
        return self.stop < ENDLESS

    def _arguments(self) -> str:
        return f"[{self.start}:{self.stop}:{self.step}]"

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        parent_len = random_access(self.parent).length
        return ("slice", self.start, self.step, self.length, parent_len, *upstream)


@lazy_dataclass
class Take(MapNode):
    """Elements of every epoch of the parent at listed indices.

    A negative index refers to the previous epoch; it is not counted from the end.
    """

    indices: Any
    dataset_name: ClassVar[str] = "ReindexMapDataset"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True
    slices_own_epoch: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, indices: Any) -> Self:
        """A node that takes `indices` of each epoch of `parent`."""
        random_access(parent)
        if isinstance(indices, str | bytes) or not (
            hasattr(indices, "__len__") and hasattr(indices, "__getitem__")
        ):
            # Grain's text, which programs may match on.
            raise ValueError(
                f"sl is not a slice: {type(indices)}, nor a sequence of integers: got {indices!r}"
            )
        _check_integers(indices)
        return cls((parent,), len(indices), indices)

    def _arguments(self) -> str:
        shown = [str(int(self.indices[k])) for k in _ends(self.length)]
        if self.length > _SHOWN_INDICES:
            shown.insert(2, "...")
        return f"(indices=[{', '.join(shown)}], len={self.length})"

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        indices = np.array([operator.index(i) for i in self.indices], np.int64)
        return ("take", indices, random_access(self.parent).length, *upstream)


_SHOWN_INDICES = 5


def _check_integers(indices: Any) -> None:
    """Raises `TypeError` if an index is no integer; other sequences are asked when used."""
    dtype = getattr(indices, "dtype", None)
    if isinstance(dtype, np.dtype):
        if len(indices) and dtype.kind not in "iuO":
            raise TypeError(f"the indices of a slice must be integers, got an array of {dtype}")
    elif isinstance(indices, list | tuple) and set(map(type, indices)) - {int}:
        for number, index in enumerate(indices):
            if not hasattr(index, "__index__"):
                raise TypeError(
                    f"the indices of a slice must be integers, got {index!r} of type "
                    f"{type(index).__name__} at position {number}"
                )


def _ends(length: int) -> Sequence[int]:
    if length <= _SHOWN_INDICES:
        return range(length)
    return (0, 1, length - 2, length - 1)


@lazy_dataclass
class Repeat(MapNode):
    """Several epochs as one; if `reseed_each_epoch`, random stages upstream differ in each."""

    num_epochs: int | None
    reseed_each_epoch: bool
    dataset_name: ClassVar[str] = "RepeatMapDataset"
    grows_by: ClassVar[str | None] = "num_epochs"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parent, num_epochs = random_access(self.parent), checked_epochs(self.num_epochs)
        if parent.length >= ENDLESS:
            raise ValueError(
                f"Repeating already infinite dataset {parent} does nothing."
                " `repeat` it once, at the end."
            )
        length = min(ENDLESS, parent.length * (ENDLESS if num_epochs is None else num_epochs))
        self._set(length=length, num_epochs=num_epochs)

    def _arguments(self) -> str:
        return f"(num_epochs={self.num_epochs})"

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        if self.reseed_each_epoch:
            return upstream[0]
        return ("wrap", random_access(self.parent).length, *upstream)


@lazy_dataclass
class Batch(Batching, MapNode):
    """Consecutive elements of one epoch stacked along a new leading axis."""

    dataset_name: ClassVar[str] = "BatchMapDataset"

    def __post_init__(self) -> None:
        super().__post_init__()
        parent = random_access(self.parent)
        for node in parent.walk():
            if node.drops_elements:
                stage = "`MapDataset.filter`" if isinstance(node, Filter) else node.dataset_name
                stage = stage if stage.startswith("`") else f"`{stage}`"
                raise ValueError(
                    f"`MapDataset.batch` can not follow {stage} because it may drop elements and "
                    "batches would have unequal sizes. Use `ds.to_iter_dataset().batch(...)`."
                )
        batches = num_batches(parent.length, self.batch_size, drop_remainder=self.drop_remainder)
        self._set(length=batches)

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """See `MapNode.inputs`."""
        return [(0, self.positions(index, random_access(self.parent).length))]

    def positions(self, index: int, parent_len: int) -> range:
        """The indices in the parent, of length `parent_len`, of the elements of batch `index`."""
        length, size = self.length, self.batch_size
        if not length:
            raise IndexError(f"`batch` of an empty dataset has no position {index}")
        epoch, number = divmod(index, length)
        start = epoch * parent_len + number * size
        return range(start, min(start + size, (epoch + 1) * parent_len))


def checked_epochs(num_epochs: int | None) -> int | None:
    """Returns `num_epochs` as an `int` or `None`.

    Raises:
        TypeError: The argument is neither an integer nor `None`.
        ValueError: The argument is not positive.
    """
    if num_epochs is None:
        return None
    num_epochs = checked_integer(num_epochs, "num_epochs")
    if num_epochs <= 0:
        raise ValueError(f"num_epochs must be positive, but got {num_epochs}.")
    return num_epochs


def check_flat_map(transform: Any) -> None:
    """Raises `TypeError` unless `transform` has a method `flat_map`."""
    if isinstance(transform, type):
        check_not_class(transform)
    if not callable(getattr(transform, "flat_map", None)):
        expected = "`transform` must be a `FlatMapTransform` or have a method `flat_map`"
        raise wrong_type(expected, transform)


@lazy_dataclass
class Cache(MapNode):
    """The elements of the first epoch of the parent, each computed once and kept in `store`.

    `store` is of another layer, an `ElementStore` of `_cache/make.py`.
    """

    store: Any
    dataset_name: ClassVar[str] = "CacheMapDataset"
    keeps_spec: ClassVar[bool] = True
    slices_own_epoch: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, make_store: Callable[[MapNode], Any]) -> Self:
        """A node that keeps the elements of `parent` in the store that `make_store` returns."""
        parent = random_access(parent)
        if parent.length >= ENDLESS:
            raise ValueError(
                f"Cannot cache infinite dataset {parent}. Put `cache` upstream of `repeat`."
            )
        return cls((parent,), parent.length, make_store(parent))

    def over(self, parents: tuple[MapNode, ...]) -> Self:
        """See `MapNode.over`; elements of another plan are stored elsewhere."""
        if parents[0] is self.parents[0]:
            return self
        return self.of(parents[0], self.store.for_parent)

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """See `MapNode.inputs`; of the first epoch."""
        return [(0, index % self.length)]


@lazy_dataclass
class FlatMap(MapNode):
    """Up to `max_fan_out` elements for each element, filled up with `None`."""

    transform: transforms.FlatMapLike[Any, Any]
    dataset_name: ClassVar[str] = "FlatMapMapDataset"
    runs_users_code: ClassVar[bool] = True
    drops_elements: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_flat_map(self.transform)
        name = f"max_fan_out` of `{type(self.transform).__name__}"
        fan_out = getattr(self.transform, "max_fan_out", None)
        fan_out = checked_integer(fan_out, name, minimum=1)
        self._set(length=min(ENDLESS, fan_out * random_access(self.parent).length))

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """See `MapNode.inputs`."""
        return [(0, index // self.transform.max_fan_out)]

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"


@lazy_dataclass
class Zip(MapNode):
    """Tuples of the elements of several datasets at the same index."""

    dataset_name: ClassVar[str] = "ZipMapDataset"

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("Must provide at least one dataset to zip.")
        lengths = [random_access(parent).length for parent in self.parents]
        if len(set(lengths)) > 1:
            raise ValueError(f"All datasets to zip must have the same length, got {lengths}.")
        self._set(length=lengths[0])

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """See `MapNode.inputs`."""
        return [(number, index) for number in range(len(self.parents))]

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return tuple([spec_of(parent) for parent in self.parents])

    def _arguments(self) -> str:
        return f"[{len(self.parents)} parents]"


@lazy_dataclass
class Mix(MapNode):
    """Elements of several datasets in fixed proportions."""

    proportions: tuple[int, ...]
    dataset_name: ClassVar[str] = "MixedMapDataset"
    joins: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parents: Sequence[Node], weights: Sequence[float] | None) -> Self:
        """A node that mixes `parents` by `weights`, evenly if `None`."""
        chosen = tuple(weights) if weights is not None else (1.0,) * len(parents)
        check_weights(parents, chosen)
        proportions = (1,) * len(parents) if weights is None else integer_proportions(chosen)
        return cls(tuple(parents), 0, proportions)

    def __post_init__(self) -> None:
        lengths = [random_access(parent).length for parent in self.parents]
        if empty := [
            f"index {number} ({self.parents[number]})"
            for number, length in enumerate(lengths)
            if not length
        ]:
            raise ValueError(
                "All datasets must have positive length for mixing, but dataset(s) at "
                f"{', '.join(empty)} have length 0."
            )
        total = sum(self.proportions)
        # Rounded in floating point: the length of existing mixtures must not change.
        length = min(
            length / (share / total)
            for length, share in zip(lengths, self.proportions, strict=True)
        )
        self._set(length=min(ENDLESS, int(length)))

    def __str__(self) -> str:
        return f"{self.dataset_name}[{len(self.parents)} parents]"

    def __repr__(self) -> str:
        lengths = [random_access(parent).length for parent in self.parents]
        return (
            f"MixedMapDataset(parent_lengths={lengths}, selection_map="
            f"SelectionWithProportionsMap(proportions={self.proportions}, length={self.length}))"
        )

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        return ("mix", self.proportions, upstream)


def check_weights(parents: Sequence[Node], weights: Sequence[float]) -> None:
    """Raises `ValueError` unless there is one positive weight for each of `parents`."""
    if not parents:
        raise ValueError("Must specify at least one dataset to mix.")
    if len(parents) != len(weights):
        raise ValueError(
            f"`weights` must have one weight for each of the {len(parents)} datasets, got "
            f"{len(weights)}"
        )
    for number, weight in enumerate(weights):
        checked_number(weight, f"weights[{number}]")
    if not all(weight > 0 for weight in weights):
        raise ValueError("Must specify all non-zero proportions for mixing.")


def integer_proportions(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights scaled to a minimum of 100 and truncated; orders depend on the rounding."""
    factor = 100 / min(weights)
    return tuple(int(weight * factor) for weight in weights)


@lazy_dataclass
class Select(MapNode):
    """Elements selected by a user's map from an index to (dataset number, index in it)."""

    selection: transforms.DatasetSelectionMap
    dataset_name: ClassVar[str] = "MixedMapDataset"
    runs_users_code: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True
    slices_own_epoch: ClassVar[bool] = True

    @classmethod
    def of(cls, parents: Sequence[Node], selection: transforms.DatasetSelectionMap) -> Self:
        """A node that reads the elements of `parents` that `selection` selects."""
        for parent in parents:
            random_access(parent)
        return cls(tuple(parents), len(selection), selection)

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """See `MapNode.inputs`; asks the selection."""
        number, at = self.selection[index]
        return [(number, operator.index(at))]

    def _arguments(self) -> str:
        return f"[{len(self.parents)} parents]"


@lazy_dataclass
class Concatenate(MapNode):
    """Several datasets in sequence: epoch `e` consists of epoch `e` of each."""

    dataset_name: ClassVar[str] = "MixedMapDataset"
    joins: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("Must specify at least one dataset to concatenate.")
        lengths = [random_access(parent).length for parent in self.parents]
        for parent, length in zip(self.parents, lengths, strict=True):
            if length >= ENDLESS:
                raise ValueError(f"Cannot concatenate infinite datasets. {parent} is infinite.")
        self._set(length=min(ENDLESS, sum(lengths)))

    def _arguments(self) -> str:
        return f"[{len(self.parents)} parents]"

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        lengths = tuple([random_access(parent).length for parent in self.parents])
        return ("concatenate", lengths, upstream)


@lazy_dataclass
class Seed(MapNode):
    """Sets the seed that random stages downstream derive theirs from."""

    own_seed: int | None = dataclasses.field(default=None, kw_only=True)
    dataset_name: ClassVar[str] = "WithOptionsMapDataset"
    rearranges: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = True
    passes_on: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, seed: int | None) -> Self:
        """A node that sets `seed`, any non-negative integer; with `None`, it sets none."""
        return cls.after(parent, own_seed=None if seed is None else checked_seed(seed))

    def tree(self, *upstream: Tree) -> Tree:
        """See `MapNode.tree`."""
        return upstream[0]
