"""Nodes of sequential stages: reading a `MapDataset` in order, and all stages downstream of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import transforms
from grainmill._plan.arguments import checked_callable, checked_integer, checked_names
from grainmill._plan.node import Node, Share, function_of, random_access, transform_name
from grainmill._plan.options import WORKER_INIT, ReadOptions
from grainmill._plan.random_access import (
    Range,
    check_flat_map,
    check_weights,
    checked_batch_size,
    checked_epochs,
    checked_seed,
    integer_proportions,
    random_map_seed,
)
from grainmill._plan.seeds import checked_shuffle_seed
from grainmill._plan.spec import batch_spec, in_rows, map_spec

if TYPE_CHECKING:
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.options import DatasetOptions


@lazy_dataclass
class Read(Node):
    """The elements of a random-access plan in order."""

    options: ReadOptions
    allow_nones: bool
    dataset_name: ClassVar[str] = "PrefetchIterDataset"
    keeps_spec: ClassVar[bool] = True

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        options = self.options
        if share.inline_size is not None:
            options = dataclasses.replace(
                options, num_threads=0, prefetch_buffer_size=share.inline_size, num_workers=0
            )
        parents = (share.of_random_access(self.parent),)
        return dataclasses.replace(self, parents=parents, options=options)

    def _arguments(self) -> str:
        return f"(read_options={self.options}, allow_nones={self.allow_nones})"


@lazy_dataclass
class UserDefined(Node):
    """A user's own `IterDataset` subclass, with or without parents.

    `with_parents` returns a copy of it over other plans.
    """

    dataset: Any
    with_parents: Callable[[Any, Sequence[Node]], Any]

    def share(self, share: Share) -> Node:
        """See `Node.share`; a dataset with the method `set_slice` slices a copy of itself."""
        if hasattr(self.dataset, "set_slice"):
            node: Node = share.of_users_dataset(self.dataset)._plan_node()  # noqa: SLF001 - opaque
            return node
        return super().share(share)

    def over(self, parents: tuple[Any, ...]) -> Self:
        """See `Node.over`."""
        dataset = self.with_parents(self.dataset, parents)
        return dataclasses.replace(self, parents=parents, dataset=dataset)

    def _source_type(self) -> type:
        return type(self.dataset)

    def __str__(self) -> str:
        return type(self.dataset).__name__


@lazy_dataclass
class Map(Node):
    """A function of every element except `None`, which stays."""

    transform: Any
    function: Callable[..., Any]
    dataset_name: ClassVar[str] = "MapIterDataset"

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that maps elements of `parent`."""
        return cls((parent,), transform, function_of(transform, transforms.Map, "map"))

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return map_spec(self.transform, lambda: spec_of(self.parent))

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"


@lazy_dataclass
class MapWithIndex(Map):
    """A function of the element and its number, counted from 0 in this iterator."""

    dataset_name: ClassVar[str] = "MapWithIndexIterDataset"

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that maps (number, element) pairs of `parent`."""
        function = function_of(transform, transforms.MapWithIndex, "map_with_index")
        return cls((parent,), transform, function)


@lazy_dataclass
class Filter(Map):
    """Drops the elements for which a predicate is false."""

    dataset_name: ClassVar[str] = "FilterIterDataset"
    drops_elements: ClassVar[bool] = True

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return spec_of(self.parent)

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that keeps the elements of `parent` for which `transform` is true."""
        return cls((parent,), transform, function_of(transform, transforms.Filter, "filter"))


@lazy_dataclass
class RandomMap(Map):
    """A function of the element and a generator keyed by (`seed`, number of the element).

    Elements have the numbers `first_number`, `first_number + number_step`, ...: several workers
    that share the elements use the numbers that a single iterator would use.
    """

    seed: int
    first_number: int = 0
    number_step: int = 1
    dataset_name: ClassVar[str] = "RandomMapIterDataset"

    @classmethod
    def of(cls, parent: Node, transform: Any, seed: int | None) -> Self:  # type: ignore[override]
        """A node that maps elements of `parent` with random numbers."""
        function = function_of(transform, transforms.RandomMap, "random_map")
        node = cls((parent,), transform, function, -1)
        return dataclasses.replace(node, seed=random_map_seed(node, seed))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return dataclasses.replace(
            self,
            parents=super().share(share).parents,
            first_number=self.first_number + self.number_step * share.worker,
            number_step=self.number_step * share.count,
        )


@lazy_dataclass
class Batch(Node):
    """Consecutive elements stacked along a new leading axis."""

    batch_size: int
    drop_remainder: bool
    batch_fn: Callable[[list[Any]], Any] | None
    dataset_name: ClassVar[str] = "BatchIterDataset"

    @classmethod
    def of(
        cls,
        parent: Node,
        batch_size: int,
        *,
        drop_remainder: bool,
        batch_fn: Callable[[list[Any]], Any] | None,
    ) -> Self:
        """A node that batches elements of `parent`."""
        batch_size = checked_batch_size(batch_size)
        checked_callable(batch_fn, "batch_fn", "a function of a list of elements")
        return cls((parent,), batch_size, drop_remainder, batch_fn)

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return batch_spec(self, spec_of(self.parent))

    def _arguments(self) -> str:
        return f"(batch_size={self.batch_size}, drop_remainder={self.drop_remainder})"


@lazy_dataclass
class Rebatch(Node):
    """Batches split and joined into batches of another size."""

    batch_size: int
    drop_remainder: bool
    dataset_name: ClassVar[str] = "RebatchIterDataset"

    @classmethod
    def of(cls, parent: Node, batch_size: int, *, drop_remainder: bool) -> Self:
        """A node that regroups the rows of the batches of `parent`."""
        return cls((parent,), checked_batch_size(batch_size), drop_remainder)

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`; as in Grain, a last, shorter batch does not make the size unknown."""
        return in_rows(self.batch_size, spec_of(self.parent), 1)

    def _arguments(self) -> str:
        return f"(batch_size={self.batch_size}, drop_remainder={self.drop_remainder})"


@lazy_dataclass
class Mix(Node):
    """Elements of several iterators in fixed proportions, until one is exhausted.

    `names` are the keys if the parents were given as a mapping, else `None`.
    """

    proportions: tuple[int, ...]
    names: tuple[str, ...] | None
    dataset_name: ClassVar[str] = "MixedIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        parents: Sequence[Node] | Mapping[str, Node],
        weights: Sequence[float] | Mapping[str, float] | None,
    ) -> Self:
        """A node that mixes `parents` by `weights`; named datasets are ordered by name."""
        names = None
        if isinstance(parents, Mapping):
            names = tuple(sorted(parents))
            if weights is not None:
                if not isinstance(weights, Mapping) or set(weights) != set(names):
                    raise ValueError(
                        "`weights` must be a mapping with the same keys as the datasets: "
                        f"{list(names)}, got {weights}."
                    )
                weights = [weights[name] for name in names]
            parents = [parents[name] for name in names]
        elif isinstance(weights, Mapping):
            raise ValueError(
                "`weights` must be a sequence, as the datasets are a sequence, got a mapping with "
                f"keys {list(weights)}"
            )
        chosen = tuple(weights) if weights is not None else (1.0,) * len(parents)
        check_weights(parents, chosen)
        return cls(tuple(parents), integer_proportions(chosen), names)

    def _arguments(self) -> str:
        return f"([{len(self.parents)} parents], proportions={list(self.proportions)})"


@lazy_dataclass
class Zip(Node):
    """Tuples with one element from each of several iterators."""

    strict: bool
    dataset_name: ClassVar[str] = "ZipIterDataset"

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return tuple(map(spec_of, self.parents))

    def _arguments(self) -> str:
        return f"([{len(self.parents)} parents], strict={self.strict})"


@lazy_dataclass
class Interleave(Node):
    """One element from each of several open iterators in turn.

    `datasets` is indexed to get datasets; it is not a parent, so seeds do not pass through.
    """

    datasets: Any
    cycle_length: int
    num_make_iter_threads: int
    make_iter_buffer_size: int
    iter_buffer_size: int
    dataset_name: ClassVar[str] = "InterleaveIterDataset"

    @classmethod
    def of(
        cls,
        datasets: Any,
        cycle_length: int,
        num_make_iter_threads: int,
        make_iter_buffer_size: int,
        iter_buffer_size: int,
    ) -> Self:
        """A node that keeps up to `cycle_length` of `datasets` open."""
        if not (hasattr(datasets, "__len__") and hasattr(datasets, "__getitem__")):
            raise TypeError(
                "`datasets` must be a sequence of datasets or a `MapDataset` of datasets, got "
                f"{datasets!r} of type {type(datasets).__name__}"
            )
        return cls(
            (),
            datasets,
            checked_integer(cycle_length, "cycle_length", minimum=1),
            checked_integer(num_make_iter_threads, "num_make_iter_threads", minimum=0),
            checked_integer(make_iter_buffer_size, "make_iter_buffer_size", minimum=0),
            checked_integer(iter_buffer_size, "iter_buffer_size", minimum=0),
        )

    def spec(self, spec_of: Callable[[Any], Any]) -> Any:
        """See `Node.spec`; the spec of its first dataset."""
        return spec_of(self.datasets[0])

    def share(self, share: Share) -> Node:
        """See `Node.share`; a worker opens every n-th dataset."""
        return dataclasses.replace(self, datasets=share.of_datasets(self.datasets))

    def set_datasets(self, datasets: Any) -> None:
        """Replaces `datasets`, for datasets already derived from this node, too."""
        object.__setattr__(self, "datasets", datasets)


@lazy_dataclass
class Repeat(Node):
    """The same epoch several times."""

    num_epochs: int | None
    dataset_name: ClassVar[str] = "RepeatIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, num_epochs: int | None) -> Self:
        """A node that reads `parent` `num_epochs` times, endlessly if `None`."""
        return cls((parent,), checked_epochs(num_epochs))

    def _arguments(self) -> str:
        return f"(num_epochs={self.num_epochs})"


@lazy_dataclass
class Cache(Node):
    """Caches the elements of the first epoch."""

    dataset_name: ClassVar[str] = "CacheIterDataset"
    keeps_spec: ClassVar[bool] = True

    def _arguments(self) -> str:
        return f"(parent={self.parent})"


@lazy_dataclass
class StoredCache(Node):
    """The elements of the parent, which are kept in `store` during the first pass over them.

    `store` is of another layer; `store.for_parent(node)` is one for the elements of another plan,
    and `store.share(node, worker, count)` the one for a worker's share of these.
    """

    store: Any
    dataset_name: ClassVar[str] = "StoredCacheIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, make_store: Callable[[Node], Any]) -> Self:
        """A node that keeps the elements of `parent` in the store that `make_store` returns."""
        return cls((parent,), make_store(parent))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        parent = share.of(self.parent)
        return dataclasses.replace(
            self, parents=(parent,), store=self.store.share(parent, share.worker, share.count)
        )

    def over(self, parents: tuple[Any, ...]) -> Self:
        """See `Node.over`."""
        if parents[0] is self.parents[0]:
            return self
        return dataclasses.replace(self, parents=parents, store=self.store.for_parent(parents[0]))


@lazy_dataclass
class Limit(Node):
    """The first `count` elements."""

    count: int
    dataset_name: ClassVar[str] = "LimitIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, count: int) -> Self:
        """A node that ends after `count` elements of `parent`."""
        count = checked_integer(count, "count")
        if count <= 0:
            raise ValueError(f"`count` must be a positive integer, got {count}.")
        return cls((parent,), count)

    def _arguments(self) -> str:
        return f"(count={self.count})"


@lazy_dataclass
class TakeWhile(Map):
    """The elements before the first for which a predicate is false."""

    dataset_name: ClassVar[str] = "TakeWhileIterDataset"

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that ends at the first element for which `transform` is false."""
        return cls((parent,), transform, function_of(transform, transforms.Filter, "filter"))

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return spec_of(self.parent)


@lazy_dataclass
class FlatMap(Node):
    """The elements of a sequence for each element."""

    transform: transforms.FlatMapLike[Any, Any]
    dataset_name: ClassVar[str] = "FlatMapIterDataset"

    @classmethod
    def of(cls, parent: Node, transform: transforms.FlatMapLike[Any, Any]) -> Self:
        """A node that replaces each element of `parent` by several."""
        check_flat_map(transform)
        return cls((parent,), transform)

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"


@lazy_dataclass
class WindowShuffle(Node):
    """Shuffles each window of `window_size` consecutive elements."""

    window_size: int
    seed: int
    dataset_name: ClassVar[str] = "WindowShuffleIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, window_size: int, seed: int) -> Self:
        """A node that permutes each window of `parent`."""
        window_size = checked_integer(window_size, "window_size", minimum=1)
        return cls((parent,), window_size, checked_shuffle_seed(seed))


@lazy_dataclass
class ThreadPrefetch(Node):
    """Elements prefetched by a thread."""

    prefetch_buffer_size: int
    dataset_name: ClassVar[str] = "ThreadPrefetchIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, prefetch_buffer_size: int) -> Self:
        """A node that keeps up to `prefetch_buffer_size` elements of `parent` prefetched."""
        return cls((parent,), checked_prefetch_buffer_size(prefetch_buffer_size))

    def share(self, share: Share) -> Node:
        """See `Node.share`."""
        return super().share(share) if share.inline_size is None else share.of(self.parent)

    def _arguments(self) -> str:
        return f"(prefetch_buffer_size={self.prefetch_buffer_size})"


def checked_prefetch_buffer_size(size: int) -> int:
    """Returns `size` as an `int`.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative.
    """
    size = checked_integer(size, "prefetch_buffer_size")
    if size < 0:
        raise ValueError(f"`prefetch_buffer_size` must be greater than or equal to 0, got {size}.")
    return size


@lazy_dataclass
class MultiprocessPrefetch(Node):
    """Elements prefetched by worker processes, each with its share of the plan upstream."""

    options: MultiprocessingOptions
    worker_init_fn: Callable[[int, int], None] | None
    sequential_slice: bool
    dataset_name: ClassVar[str] = "MultiprocessPrefetchIterDataset"
    keeps_spec: ClassVar[bool] = True
    passes_seeds: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        parent: Node,
        options: MultiprocessingOptions,
        worker_init_fn: Callable[[int, int], None] | None,
        *,
        sequential_slice: bool,
    ) -> Self:
        """A node that runs `parent` in `options.num_workers` worker processes, at least 1."""
        num_workers = checked_integer(options.num_workers, "num_workers", minimum=1)
        buffer_size = checked_integer(options.per_worker_buffer_size, "per_worker_buffer_size")
        if buffer_size < 1:
            raise ValueError(f"`buffer_size` must be greater than 0, got {buffer_size}.")
        checked_callable(worker_init_fn, "worker_init_fn", WORKER_INIT)
        options = dataclasses.replace(
            options, num_workers=num_workers, per_worker_buffer_size=buffer_size
        )
        for node in parent.walk():
            if isinstance(node, cls):
                raise ValueError(
                    "`mp_prefetch` cannot follow `mp_prefetch`: worker processes cannot start "
                    "workers. Call it once, at the end."
                )
        return cls((parent,), options, worker_init_fn, sequential_slice)

    @property
    def num_workers(self) -> int:
        """Number of workers that share the elements."""
        return self.options.num_workers

    @property
    def buffer_size(self) -> int:
        """Maximum number of elements that each worker prefetches."""
        return self.options.per_worker_buffer_size

    def _arguments(self) -> str:
        return f"(multiprocessing_options={self.options})"


@lazy_dataclass
class MultithreadPrefetch(Node):
    """Elements prefetched by threads, each with its share of the plan upstream."""

    num_threads: int
    buffer_size: int
    sequential_slice: bool
    dataset_name: ClassVar[str] = "MultithreadPrefetchIterDataset"
    keeps_spec: ClassVar[bool] = True
    passes_seeds: ClassVar[bool] = False

    @classmethod
    def of(
        cls, parent: Node, num_threads: int, buffer_size: int, *, sequential_slice: bool
    ) -> Self:
        """A node that runs `parent` on `num_threads` threads, at least 1."""
        num_threads = checked_integer(num_threads, "num_threads", minimum=1)
        buffer_size = checked_integer(buffer_size, "buffer_size", minimum=0)
        return cls((parent,), num_threads, buffer_size, sequential_slice)

    @property
    def num_workers(self) -> int:
        """Number of workers that share the elements."""
        return self.num_threads

    def _arguments(self) -> str:
        return f"(num_threads={self.num_threads}, buffer_size={self.buffer_size})"


class BOSHandling(enum.Enum):
    """What concat-then-split packing does with the first token of each segment.

    Attributes:
        DO_NOTHING: Keeps it.
        REPLACE_FIRST_TOKEN_WITH_BOS: Replaces it by `bos_token_id`, in the features `bos_features`.
    """

    DO_NOTHING = 1
    REPLACE_FIRST_TOKEN_WITH_BOS = 2


@lazy_dataclass
class FitPack(Node):
    """Sequences packed into the first, or the fullest, bin with enough free space."""

    best_fit: bool
    length_struct: Mapping[str, Any]
    num_packing_bins: int
    seed: int
    shuffle_bins: bool
    shuffle_bins_group_by_feature: str | None
    meta_features: tuple[str, ...]
    pack_alignment_struct: Mapping[str, int] | None
    padding_struct: Mapping[str, Any] | None
    max_sequences_per_bin: int | None

    @classmethod
    def of(
        cls,
        parent: Node,
        *,
        best_fit: bool,
        length_struct: Mapping[str, Any],
        num_packing_bins: int,
        seed: int = 0,
        shuffle_bins: bool = True,
        shuffle_bins_group_by_feature: str | None = None,
        meta_features: Collection[str] = (),
        pack_alignment_struct: Mapping[str, Any] | None = None,
        padding_struct: Mapping[str, Any] | None = None,
        max_sequences_per_bin: int | None = None,
    ) -> Self:
        """A node that packs the sequences of `parent` into `num_packing_bins` bins at a time."""
        if max_sequences_per_bin is not None:
            max_sequences_per_bin = checked_integer(max_sequences_per_bin, "max_sequences_per_bin")
            if max_sequences_per_bin <= 0:
                raise ValueError(
                    "If specified, `max_sequences_per_bin` must be a positive integer, but got "
                    f"{max_sequences_per_bin}."
                )
        num_packing_bins = checked_integer(num_packing_bins, "num_packing_bins", minimum=1)
        seed = checked_integer(seed, "seed", minimum=0)
        meta_features = checked_names(meta_features, "meta_features")
        lengths = dict(leaves(length_struct, "length_struct"))
        if not lengths:
            raise ValueError("`length_struct` must name at least one feature, got {}")
        for path, length in lengths.items():
            _check_at_least(length, 0, f"`length_struct` of `{'/'.join(map(str, path))}`")
        for name, struct in (
            ("pack_alignment_struct", pack_alignment_struct),
            ("padding_struct", padding_struct),
        ):
            if struct is not None and {path for path, _ in leaves(struct, name)} != set(lengths):
                raise ValueError(
                    f"`{name}` must have the structure of `length_struct` {dict(length_struct)}, "
                    f"got {dict(struct)}"
                )
        for path, alignment in leaves(pack_alignment_struct or {}, "pack_alignment_struct"):
            _check_at_least(
                alignment, 1, f"`pack_alignment_struct` of `{'/'.join(map(str, path))}`"
            )
        flat = [name for name, inner in length_struct.items() if not isinstance(inner, Mapping)]
        if shuffle_bins_group_by_feature not in {None, *flat, *meta_features}:
            raise ValueError(
                "`shuffle_bins_group_by_feature` must be a feature of `length_struct`, not a "
                f"nested one, or of `meta_features`, {[*flat, *meta_features]}, got "
                f"{shuffle_bins_group_by_feature!r}"
            )
        return cls(
            (parent,),
            best_fit,
            length_struct,
            num_packing_bins,
            seed,
            shuffle_bins,
            shuffle_bins_group_by_feature,
            meta_features,
            pack_alignment_struct,
            padding_struct,
            max_sequences_per_bin,
        )

    def __str__(self) -> str:
        return "BestFitPackIterDataset" if self.best_fit else "FirstFitPackIterDataset"


@lazy_dataclass
class ConcatThenSplit(Node):
    """Sequences concatenated and split into full rows."""

    length_struct: Mapping[str, int]
    meta_features: tuple[str, ...]
    split_full_length_features: bool
    bos_handling: BOSHandling
    bos_features: tuple[str, ...]
    bos_token_id: int | None
    dataset_name: ClassVar[str] = "ConcatThenSplitIterDataset"

    @classmethod
    def of(
        cls,
        parent: Node,
        *,
        length_struct: Mapping[str, int],
        meta_features: Collection[str] = (),
        split_full_length_features: bool = True,
        bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: int | None = None,
    ) -> Self:
        """A node that concatenates the sequences of `parent` and splits them into rows."""
        if not isinstance(length_struct, Mapping):
            raise TypeError(
                "`length_struct` must be a mapping from feature names to lengths, got "
                f"{length_struct!r}"
            )
        if not length_struct:
            raise ValueError("`length_struct` must name at least one feature, got {}")
        meta_features = checked_names(meta_features, "meta_features")
        bos_features = checked_names(bos_features, "bos_features")
        for name, features in (("meta_features", meta_features), ("bos_features", bos_features)):
            if unknown := [feature for feature in features if feature not in length_struct]:
                raise ValueError(
                    f"`{name}` must be features of `length_struct` {list(length_struct)}, but "
                    f"{unknown} are not"
                )
        for name, length in length_struct.items():
            _check_at_least(length, 1, f"`length_struct` of `{name}`")
        if not isinstance(bos_handling, BOSHandling):
            raise TypeError(f"`bos_handling` must be a `BOSHandling`, got {bos_handling!r}")
        if bos_token_id is not None:
            bos_token_id = checked_integer(bos_token_id, "bos_token_id")
        if bos_handling is BOSHandling.DO_NOTHING:
            if bos_token_id is not None or bos_features:
                raise ValueError(
                    f"bos_handling={bos_handling} indicates that BOS handling is not used. So "
                    "bos_token_id and bos_features should not be set."
                )
        elif bos_token_id is None:
            raise ValueError(f"bos_token_id must be set if bos_handling is {bos_handling}.")
        if set(bos_features) & set(meta_features):
            raise ValueError(
                "bos_features and meta_features should not overlap. bos_features: "
                f"{list(bos_features)}, meta_features: {list(meta_features)}"
            )
        return cls(
            (parent,),
            dict(length_struct),
            meta_features,
            split_full_length_features,
            bos_handling,
            bos_features,
            bos_token_id,
        )


def leaves(struct: Any, name: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields (keys from the outermost, value) of each leaf of nested mappings, in order."""
    if not isinstance(struct, Mapping):
        raise ValueError(f"`{name}` must be a mapping from feature names to values, got {struct!r}")
    for key, value in struct.items():
        if isinstance(value, Mapping):
            for path, leaf in leaves(value, name):
                yield (key, *path), leaf
        else:
            yield (key,), value


def _check_at_least(value: Any, minimum: int, name: str) -> None:
    try:
        number = checked_integer(value, name)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


@lazy_dataclass
class Seed(Node):
    """Sets the seed that random stages downstream derive theirs from."""

    own_seed: int | None = None
    dataset_name: ClassVar[str] = "WithOptionsIterDataset"
    keeps_spec: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, seed: int | None) -> Self:
        """A node that sets `seed`, any non-negative integer; with `None`, it sets none."""
        return cls((parent,), None if seed is None else checked_seed(seed))


@lazy_dataclass
class WithOptions(Node):
    """Options for the whole pipeline."""

    options: DatasetOptions
    dataset_name: ClassVar[str] = "WithOptionsIterDataset"
    keeps_spec: ClassVar[bool] = True

    def _arguments(self) -> str:
        return f"(options={self.options})"


def read(parent: Node, options: ReadOptions | None = None, *, allow_nones: bool = False) -> Read:
    """The node that reads the random-access plan `parent` in order.

    Without `options`, it prefetches, except for a plain range: integers are too cheap.
    """
    if options is None:
        options = (
            ReadOptions(prefetch_buffer_size=0) if isinstance(parent, Range) else ReadOptions()
        )
    if not isinstance(options, ReadOptions):
        raise TypeError(
            f"`read_options` must be a `ReadOptions`, got {options!r} of type "
            f"{type(options).__name__}"
        )
    # Who changes the options later does not change the plan.
    return Read((random_access(parent),), copy.copy(options), allow_nones)
