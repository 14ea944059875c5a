"""Stages that are classes around a dataset rather than methods of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, overload

from numpy.typing import NDArray

from grainmill._dataset.element_types import A, B, C, S, T, T_co
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._dataset.map_dataset import PlannedMapDataset
from grainmill._plan import random_access, sequential
from grainmill._plan.arguments import checked_integer
from grainmill._plan.options import DatasetOptions
from grainmill._plan.slicing import check_sliceable, sliced_datasets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from grainmill._dataset.element_types import AnyDataset
    from grainmill._dataset.iter_dataset import IterDataset
    from grainmill._dataset.map_dataset import MapDataset
    from grainmill._plan import transforms

__all__ = [
    "BestFitPackIterDataset",
    "CacheIterDataset",
    "ConcatThenSplitIterDataset",
    "FirstFitPackIterDataset",
    "FlatMapIterDataset",
    "FlatMapMapDataset",
    "InterleaveIterDataset",
    "LimitIterDataset",
    "RebatchIterDataset",
    "RepeatIterDataset",
    "TakeWhileIterDataset",
    "ThreadPrefetchIterDataset",
    "WindowShuffleIterDataset",
    "WindowShuffleMapDataset",
    "WithOptionsIterDataset",
    "ZipIterDataset",
    "ZipMapDataset",
    "multithread_prefetch",
]


class FlatMapMapDataset(PlannedMapDataset[T_co]):
    """Replaces each element by up to `transform.max_fan_out` elements.

    Element `i` is element `i % max_fan_out` of what `flat_map` returns for the parent's element
    `i // max_fan_out`, or `None` if there are fewer. The length is `max_fan_out` times the
    parent's. `flat_map` is called again for each element of its result.

    Args:
        parent: The dataset to read from.
        transform: Its `flat_map` returns a sequence, or another iterable, of at most `max_fan_out`
            elements.

    Raises:
        ValueError: When read: `flat_map` returned more than `max_fan_out` elements.
        TypeError: `transform` has no `flat_map`, or `max_fan_out` is not an integer.

    Example:
        >>> class Words(grain.experimental.FlatMapTransform):
        ...     max_fan_out = 3
        ...
        ...     def flat_map(self, element):
        ...         return element.split()
        >>> ds = grain.MapDataset.source(["one two", "three"])
        >>> ds = grain.experimental.FlatMapMapDataset(ds, Words())
        >>> len(ds), ds[2], list(ds)
        (6, None, ['one', 'two', 'three'])
    """

    def __init__(self, parent: MapDataset[S], transform: transforms.FlatMapLike[S, T_co]) -> None:
        super().__init__(random_access.FlatMap.of(node_of(parent), transform), (parent,))


class ZipMapDataset(PlannedMapDataset[T_co]):
    """Zips several datasets: element `i` is the tuple of their elements `i`.

    An element that a dataset dropped is `None` in the tuple.

    Args:
        parents: Datasets of equal length, at least one.

    Raises:
        ValueError: There is no dataset, or lengths differ.

    Example:
        >>> letters = grain.MapDataset.source("abc")
        >>> list(grain.experimental.ZipMapDataset([grain.MapDataset.range(3), letters]))
        [(0, 'a'), (1, 'b'), (2, 'c')]
    """

    @overload
    def __init__(
        self: ZipMapDataset[tuple[A, B]], parents: tuple[MapDataset[A], MapDataset[B]]
    ) -> None: ...
    @overload
    def __init__(
        self: ZipMapDataset[tuple[A, B, C]],
        parents: tuple[MapDataset[A], MapDataset[B], MapDataset[C]],
    ) -> None: ...
    @overload
    def __init__(
        self: ZipMapDataset[tuple[Any, ...]], parents: Sequence[MapDataset[Any]]
    ) -> None: ...
    def __init__(self, parents: Sequence[MapDataset[Any]]) -> None:
        super().__init__(random_access.Zip.of([node_of(parent) for parent in parents]), parents)


class WindowShuffleMapDataset(PlannedMapDataset[T_co]):
    """Shuffles elements within windows of `window_size` consecutive ones.

    So records that are adjacent in a file are still read close together. Every window of every
    epoch has a different order, by the algorithm of `MapDataset.shuffle`. Every epoch is a
    permutation: if the window size does not divide its length, its last window is shorter.

    Args:
        parent: The dataset to read from.
        window_size: Elements in a window, at least 1.
        seed: From 0 to 2**32 - 1.

    Raises:
        ValueError: `window_size` or `seed` is out of range.
        TypeError: `window_size` or `seed` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10)
        >>> list(grain.experimental.WindowShuffleMapDataset(ds, window_size=4, seed=0))
        [0, 3, 1, 2, 5, 6, 7, 4, 8, 9]
    """

    def __init__(self, parent: MapDataset[T_co], *, window_size: int, seed: int) -> None:
        node = random_access.WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


class FlatMapIterDataset(PlannedIterDataset[T_co]):
    """Replaces each element by the elements of a sequence, which may be empty.

    Args:
        parent: The dataset to read from.
        transform: Its `flat_map` returns a sequence (not a generator); `max_fan_out` does not limit
            it.

    Raises:
        TypeError: `transform` has no `flat_map`.

    Example:
        >>> class Words(grain.experimental.FlatMapTransform):
        ...     def flat_map(self, element):
        ...         return element.split()
        >>> ds = grain.MapDataset.source(["one two", "", "three"]).to_iter_dataset()
        >>> list(grain.experimental.FlatMapIterDataset(ds, Words()))
        ['one', 'two', 'three']
    """

    def __init__(self, parent: AnyDataset[S], transform: transforms.FlatMapLike[S, T_co]) -> None:
        super().__init__(sequential.FlatMap.of(node_of(parent), transform), (parent,))


class ZipIterDataset(PlannedIterDataset[T_co]):
    """Zips several datasets: tuples of their first elements, their second elements, and so on.

    Args:
        parents: The datasets, at least one.
        strict: Whether unequal lengths are an error; if not, it ends with the shortest dataset.

    Raises:
        ValueError: There are no datasets. When read, if `strict`: one ends before another.

    Example:
        >>> numbers = grain.MapDataset.range(3).to_iter_dataset()
        >>> letters = grain.MapDataset.source("ab").to_iter_dataset()
        >>> list(grain.experimental.ZipIterDataset([numbers, letters], strict=False))
        [(0, 'a'), (1, 'b')]
    """

    @overload
    def __init__(
        self: ZipIterDataset[tuple[A, B]],
        parents: tuple[AnyDataset[A], AnyDataset[B]],
        *,
        strict: bool = True,
    ) -> None: ...
    @overload
    def __init__(
        self: ZipIterDataset[tuple[A, B, C]],
        parents: tuple[AnyDataset[A], AnyDataset[B], AnyDataset[C]],
        *,
        strict: bool = True,
    ) -> None: ...
    @overload
    def __init__(
        self: ZipIterDataset[tuple[Any, ...]],
        parents: Sequence[AnyDataset[Any]],
        *,
        strict: bool = True,
    ) -> None: ...
    def __init__(self, parents: Sequence[AnyDataset[Any]], *, strict: bool = True) -> None:
        if not len(parents):
            raise ValueError("At least one parent must be provided. `parents` is empty.")
        nodes = tuple(node_of(parent) for parent in parents)
        super().__init__(sequential.Zip(nodes, strict), parents)


class WindowShuffleIterDataset(PlannedIterDataset[T_co]):
    """Shuffles each window of `window_size` consecutive elements.

    A window is held in memory. Each has a different order, by the algorithm of
    `MapDataset.shuffle`. A saved state refers to the start of the window, so restoring computes its
    elements again.

    Args:
        parent: The dataset to read from.
        window_size: Elements in a window, at least 1; the last one may be shorter.
        seed: From 0 to 2**32 - 1.

    Raises:
        ValueError: `window_size` or `seed` is out of range.
        TypeError: `window_size` or `seed` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10).to_iter_dataset()
        >>> list(grain.experimental.WindowShuffleIterDataset(ds, window_size=4, seed=0))
        [2, 1, 3, 0, 4, 7, 6, 5, 9, 8]
    """

    def __init__(self, parent: AnyDataset[T_co], *, window_size: int, seed: int) -> None:
        node = sequential.WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


class RepeatIterDataset(PlannedIterDataset[T_co]):
    """Repeats the same epoch; each one starts from the parent's initial state.

    So all epochs have the same order and random numbers, unlike those of `MapDataset.repeat`. If an
    epoch is empty, the repetition ends.

    Args:
        parent: The dataset to read from.
        num_epochs: Number of epochs; infinite if `None`.

    Raises:
        ValueError: `num_epochs` is not positive.
        TypeError: `num_epochs` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(3).to_iter_dataset()
        >>> list(grain.experimental.RepeatIterDataset(ds, num_epochs=2))
        [0, 1, 2, 0, 1, 2]
    """

    def __init__(self, parent: AnyDataset[T_co], num_epochs: int | None = None) -> None:
        super().__init__(sequential.Repeat.of(node_of(parent), num_epochs), (parent,))


class CacheIterDataset(PlannedIterDataset[T_co]):
    """Caches the elements of the first epoch; useful upstream of `RepeatIterDataset`.

    All elements are kept in memory, and later epochs deliver the same objects. Restoring a state in
    another iterator reads the parent again, up to the saved position.

    Args:
        parent: The dataset to read from.

    Example:
        >>> calls = []
        >>> ds = grain.MapDataset.range(3).to_iter_dataset().map(lambda x: calls.append(x) or -x)
        >>> ds = grain.experimental.CacheIterDataset(ds)
        >>> list(grain.experimental.RepeatIterDataset(ds, num_epochs=2)), calls
        ([0, -1, -2, 0, -1, -2], [0, 1, 2])
    """

    def __init__(self, parent: AnyDataset[T_co]) -> None:
        super().__init__(sequential.Cache((node_of(parent),)), (parent,))


class LimitIterDataset(PlannedIterDataset[T_co]):
    """Takes the first `count` elements.

    Args:
        parent: The dataset to read from.
        count: Maximum number of elements, at least 1.

    Raises:
        ValueError: `count` is not positive.
        TypeError: `count` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(10).repeat().to_iter_dataset()
        >>> list(grain.experimental.LimitIterDataset(ds, 3))
        [0, 1, 2]
    """

    def __init__(self, parent: AnyDataset[T_co], count: int) -> None:
        super().__init__(sequential.Limit.of(node_of(parent), count), (parent,))


class TakeWhileIterDataset(PlannedIterDataset[T_co]):
    """Takes the elements before the first for which `predicate` is false.

    Args:
        parent: The dataset to read from.
        predicate: A function of an element, or a `transforms.Filter`. It is called once for each
            element, when the element is requested.

    Raises:
        TypeError: `predicate` is neither.

    Example:
        >>> ds = grain.MapDataset.range(10).to_iter_dataset()
        >>> list(grain.experimental.TakeWhileIterDataset(ds, lambda x: x < 3))
        [0, 1, 2]
    """

    def __init__(
        self,
        parent: AnyDataset[T_co],
        predicate: transforms.FilterLike[T_co] | Callable[[T_co], bool | np.bool_],
    ) -> None:
        super().__init__(sequential.TakeWhile.of(node_of(parent), predicate), (parent,))


class RebatchIterDataset(PlannedIterDataset[T_co]):
    """Splits and joins batches into batches of `batch_size` rows.

    Arrays of shape `(n, ...)` become ones of shape `(batch_size, ...)` and the same dtype. A batch
    that lies within one batch of the parent is a view of it; others are copies.

    Args:
        parent: A dataset of batches of any sizes; all arrays of a batch have the same number of
            rows.
        batch_size: Rows per new batch, at least 1.
        drop_remainder: Whether to drop a last, shorter batch.

    Raises:
        ValueError: `batch_size` is not positive. When read: the arrays of a batch differ in their
            number of rows.
        TypeError: `batch_size` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(8).batch(4).to_iter_dataset()
        >>> [batch.tolist() for batch in grain.experimental.RebatchIterDataset(ds, 3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
    """

    def __init__(
        self,
        parent: AnyDataset[T_co],
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> None:
        node = sequential.Rebatch.of(node_of(parent), batch_size, drop_remainder=drop_remainder)
        super().__init__(node, (parent,))


class ThreadPrefetchIterDataset(PlannedIterDataset[T_co]):
    """Prefetches elements on one thread.

    A saved state refers to the element delivered last; prefetched elements are not part of it.

    Args:
        parent: The dataset to read from.
        prefetch_buffer_size: Maximum number of prefetched elements; 0 computes each when it is
            requested.

    Raises:
        ValueError: `prefetch_buffer_size` is negative.
        TypeError: `prefetch_buffer_size` is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(4).to_iter_dataset().batch(2)
        >>> ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=1)
        >>> [batch.tolist() for batch in ds]
        [[0, 1], [2, 3]]
    """

    def __init__(self, parent: AnyDataset[T_co], *, prefetch_buffer_size: int) -> None:
        node = sequential.ThreadPrefetch.of(node_of(parent), prefetch_buffer_size)
        super().__init__(node, (parent,))


def multithread_prefetch(
    ds: AnyDataset[T],
    num_threads: int,
    buffer_size: int,
    sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
) -> IterDataset[T]:
    """Prefetches elements on threads, which split them as workers of `mp_prefetch` do.

    Each thread runs all stages upstream on its share of the elements, so stages of an `IterDataset`
    (batches, filters, packing, limits) apply to each thread's share, and both the elements and a
    saved state depend on the number of threads.

    Args:
        ds: The dataset.
        num_threads: Number of threads; with 0, `ds` is returned unchanged.
        buffer_size: Maximum number of elements that each thread prefetches; 0 computes each when it
            is requested.
        sequential_slice: Whether a thread reads a range of consecutive elements of each source
            instead of every `num_threads`-th element.

    Raises:
        ValueError: A number is negative, or a source cannot be split among threads.
        TypeError: A number is not an integer.

    Example:
        >>> ds = grain.MapDataset.range(7).to_iter_dataset().batch(2)
        >>> ds = grain.experimental.multithread_prefetch(ds, num_threads=2, buffer_size=1)
        >>> [batch.tolist() for batch in ds]
        [[0, 2], [1, 3], [4, 6], [5]]
    """
    if not checked_integer(num_threads, "num_threads"):
        return ds  # type: ignore[return-value]  # a `MapDataset` stays one, as in Grain
    node = sequential.MultithreadPrefetch.of(
        node_of(ds), num_threads, buffer_size, sequential_slice=sequential_slice
    )
    check_sliceable(node_of(ds), num_threads, sequential=sequential_slice)
    return PlannedIterDataset(node, (ds,))


class InterleaveIterDataset(PlannedIterDataset[T_co]):
    """Takes one element from each of up to `cycle_length` datasets in turn, until all have ended.

    A dataset that has ended is replaced by the next one. Stages downstream cannot use seeds set
    upstream of `datasets`.

    Args:
        datasets: Datasets by index; of a `MapDataset` of datasets, each is computed when its turn
            comes.
        cycle_length: Number of datasets open at a time, at least 1.
        num_make_iter_threads: Number of threads that open the next datasets; 0 opens each when its
            turn comes.
        make_iter_buffer_size: Number of datasets opened in advance.
        iter_buffer_size: Number of prefetched elements of each dataset, on a thread for each; with
            1, an element is computed when its turn comes. A `MapDataset` prefetches by its own
            options.

    Raises:
        ValueError: A number is out of range.
        TypeError: A number is not an integer, or an entry of `datasets` is not a dataset.

    Example:
        >>> texts = grain.MapDataset.source(["abc", "de", "fg"]).map(grain.MapDataset.source)
        >>> list(grain.experimental.InterleaveIterDataset(texts, cycle_length=2))
        ['a', 'd', 'b', 'e', 'c', 'f', 'g']
    """

    def __init__(
        self,
        datasets: Sequence[IterDataset[T_co] | MapDataset[T_co]]
        | MapDataset[IterDataset[T_co]]
        | MapDataset[MapDataset[T_co]],
        *,
        cycle_length: int,
        num_make_iter_threads: int = 1,
        make_iter_buffer_size: int = 1,
        iter_buffer_size: int = 1,
    ) -> None:
        super().__init__(
            sequential.Interleave.of(
                datasets,
                cycle_length,
                num_make_iter_threads,
                make_iter_buffer_size,
                iter_buffer_size,
            )
        )

    def set_slice(
        self,
        sl: slice,
        sequential_slice: bool = False,  # noqa: ARG002, FBT001, FBT002 - as programs call it
    ) -> None:
        """Restricts it, in place, to some of its datasets; a second call restricts it further.

        Datasets already derived from this one change, too. Iterators do not.

        Args:
            sl: The slice of `datasets`, such as `slice(shard_index, None, shard_count)`.
            sequential_slice: Has no effect: datasets are dealt out one by one in any case.

        Example:
            >>> texts = grain.MapDataset.source(["abc", "de", "fg"]).map(grain.MapDataset.source)
            >>> ds = grain.experimental.InterleaveIterDataset(texts, cycle_length=2)
            >>> ds.set_slice(slice(0, None, 2))
            >>> list(ds)
            ['a', 'f', 'b', 'g', 'c']
        """
        node = cast("sequential.Interleave", self._node)
        node.set_datasets(sliced_datasets(node.datasets, sl))


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
            raise TypeError(
                f"`options` must be a `DatasetOptions`, got {options!r} of type "
                f"{type(options).__name__}"
            )
        super().__init__(sequential.WithOptions((node_of(parent),), options), (parent,))


class _FitPackIterDataset(PlannedIterDataset[dict[str, NDArray[Any]]]):
    """The base class of `FirstFitPackIterDataset` and `BestFitPackIterDataset`."""

    _best_fit: bool

    def __init__(
        self,
        parent: AnyDataset[Any],
        *,
        length_struct: Any,
        num_packing_bins: int,
        seed: int = 0,
        shuffle_bins: bool = True,
        shuffle_bins_group_by_feature: str | None = None,
        meta_features: Sequence[str] = (),
        pack_alignment_struct: Any = None,
        padding_struct: Any = None,
        max_sequences_per_bin: int | None = None,
    ) -> None:
        node = sequential.FitPack.of(
            node_of(parent),
            best_fit=self._best_fit,
            length_struct=length_struct,
            num_packing_bins=num_packing_bins,
            seed=seed,
            shuffle_bins=shuffle_bins,
            shuffle_bins_group_by_feature=shuffle_bins_group_by_feature,
            meta_features=meta_features,
            pack_alignment_struct=pack_alignment_struct,
            padding_struct=padding_struct,
            max_sequences_per_bin=max_sequences_per_bin,
        )
        super().__init__(node, (parent,))


class FirstFitPackIterDataset(_FitPackIterDataset):
    """Packs sequences into rows of fixed length, each into the first row where it fits.

    An element is a dict of arrays of shape `(n, ...)`, of which the first axis is packed; a number
    counts as an array of length 1. A row is a dict with sorted keys. It has each feature `f` of
    `length_struct` with shape `(length_struct[f], ...)` and the dtype of the elements, and
    with it `f_segment_ids` (int32, from 1 in the order of the sequences; 0 is padding) and
    `f_positions` (int32, from 0 in each sequence), both of shape `(length_struct[f],)`. If a
    feature is itself a dict, so are these, with the same keys. Other features are dropped.

    A sequence is placed, whole, into the first of `num_packing_bins` rows where all its features
    fit. If it fits into none, all rows are delivered, and the sequence starts the next ones.
    (Online bin packing: D. S. Johnson, "Fast algorithms for bin packing", J. Comput. Syst. Sci. 8,
    1974.) A saved state refers to the start of the rows that are delivered together, and to how
    many of them were delivered; restoring packs them again.

    Args:
        parent: The dataset of sequences. No sequence may be longer than its row.
        length_struct: The length of a row for each feature, in elements of the first axis.
        num_packing_bins: Number of rows that are filled at the same time, at least 1. More rows
            mean less padding, and more sequences held in memory. Beyond ten thousand or so, if
            features differ in length, the time per sequence grows with it.
        seed: The seed for the order in which rows are delivered.
        shuffle_bins: Whether that order is random.
        shuffle_bins_group_by_feature: A feature; rows are sorted by the mean of its distinct
            values, and equal ones stay in random order.
        meta_features: Features that describe sequences; they get no ids or positions. Those in
            `length_struct` are packed like others; of the others, a row has a list with the value
            of each sequence.
        pack_alignment_struct: For each feature, the number that the start of a sequence is a
            multiple of, with the structure of `length_struct`; 1 if `None`.
        padding_struct: For each feature, the padding value, with the structure of `length_struct`;
            0 if `None`.
        max_sequences_per_bin: Maximum number of sequences in a row; no limit if `None`.

    Raises:
        ValueError: A number is out of range, a struct is not a dict of numbers, `length_struct` is
            empty, or the structure of another struct differs from that of `length_struct`. When
            read: a sequence is longer than its row.
        KeyError: When read: an element lacks a feature.
        TypeError: `num_packing_bins`, `seed` or `max_sequences_per_bin` is not an integer.

    Example:
        >>> sequences = [[1, 1], [2, 2, 2, 2], [3], [4]]
        >>> ds = grain.MapDataset.source([{"x": np.array(x)} for x in sequences])
        >>> ds = grain.experimental.FirstFitPackIterDataset(
        ...     ds.to_iter_dataset(), length_struct={"x": 5}, num_packing_bins=2, shuffle_bins=False
        ... )
        >>> for row in ds:
        ...     print(row["x"], row["x_segment_ids"], row["x_positions"])
        [1 1 3 4 0] [1 1 2 3 0] [0 1 0 0 0]
        [2 2 2 2 0] [1 1 1 1 0] [0 1 2 3 0]
    """

    _best_fit = False


class BestFitPackIterDataset(_FitPackIterDataset):
    """Packs sequences into rows of fixed length, each into the fullest row where it fits.

    An element is a dict of arrays of shape `(n, ...)`, of which the first axis is packed; a number
    counts as an array of length 1. A row is a dict with sorted keys. It has each feature `f` of
    `length_struct` with shape `(length_struct[f], ...)` and the dtype of the elements, and
    with it `f_segment_ids` (int32, from 1 in the order of the sequences; 0 is padding) and
    `f_positions` (int32, from 0 in each sequence), both of shape `(length_struct[f],)`. If a
    feature is itself a dict, so are these, with the same keys. Other features are dropped.

    A sequence is placed, whole, into the fullest of `num_packing_bins` rows where all its features
    fit: the one with the most used space, summed over features, and the first among equals. If it
    fits into none, all rows are delivered, and the sequence starts the next ones. (Online bin
    packing: D. S. Johnson, "Fast algorithms for bin packing", J. Comput. Syst. Sci. 8, 1974.) A
    saved state refers to the start of the rows that are delivered together, and to how many of them
    were delivered; restoring packs them again.

    Args:
        parent: The dataset of sequences. No sequence may be longer than its row.
        length_struct: The length of a row for each feature, in elements of the first axis.
        num_packing_bins: Number of rows that are filled at the same time, at least 1. More rows
            mean less padding, and more sequences held in memory. Beyond ten thousand or so, if
            features differ in length, the time per sequence grows with it.
        seed: The seed for the order in which rows are delivered.
        shuffle_bins: Whether that order is random.
        shuffle_bins_group_by_feature: A feature; rows are sorted by the mean of its distinct
            values, and equal ones stay in random order.
        meta_features: Features that describe sequences; they get no ids or positions. Those in
            `length_struct` are packed like others; of the others, a row has a list with the value
            of each sequence.
        pack_alignment_struct: For each feature, the number that the start of a sequence is a
            multiple of, with the structure of `length_struct`; 1 if `None`.
        padding_struct: For each feature, the padding value, with the structure of `length_struct`;
            0 if `None`.
        max_sequences_per_bin: Maximum number of sequences in a row; no limit if `None`.

    Raises:
        ValueError: A number is out of range, a struct is not a dict of numbers, `length_struct` is
            empty, or the structure of another struct differs from that of `length_struct`. When
            read: a sequence is longer than its row.
        KeyError: When read: an element lacks a feature.
        TypeError: `num_packing_bins`, `seed` or `max_sequences_per_bin` is not an integer.

    Example:
        >>> sequences = [[1, 1], [2, 2, 2, 2], [3], [4]]
        >>> ds = grain.MapDataset.source([{"x": np.array(x)} for x in sequences])
        >>> ds = grain.experimental.BestFitPackIterDataset(
        ...     ds.to_iter_dataset(), length_struct={"x": 5}, num_packing_bins=2, shuffle_bins=False
        ... )
        >>> for row in ds:
        ...     print(row["x"], row["x_segment_ids"], row["x_positions"])
        [1 1 4 0 0] [1 1 2 0 0] [0 1 0 0 0]
        [2 2 2 2 3] [1 1 1 1 2] [0 1 2 3 0]
    """

    _best_fit = True


class ConcatThenSplitIterDataset(PlannedIterDataset[dict[str, NDArray[Any]]]):
    """Concatenates sequences and splits them into full rows.

    An element is a flat dict with exactly the keys of `length_struct`, of arrays of shape
    `(n, ...)`. A row has each feature `f` with shape `(length_struct[f], ...)` and the dtype of the
    elements, and, unless it is a meta feature, `f_segment_ids` (int32, from 1 in the order of the
    row; 0 is padding) and `f_positions` (int32), both of shape `(length_struct[f],)`. The remainder
    of a sequence that was split starts the next row, as a new segment whose positions start at 0.

    If one feature is full first, the others are padded with zeros, and so is the last row. A saved
    state contains which slice of a split sequence remains; restoring reads that sequence again.

    Args:
        parent: The dataset of sequences.
        length_struct: The length of a row for each feature, meta features included, in elements of
            the first axis, at least 1.
        meta_features: Features that describe sequences. They are never split: if one does not fit
            into the rest of a row, the row ends, and this is logged. They are repeated with each
            segment of a split sequence, and get no ids or positions.
        split_full_length_features: Whether a sequence with the length of a full row is also split
            if it does not start one; if not, it becomes a row of its own, which follows the row
            that is being filled.
        bos_handling: How the first token of each segment is handled, also where the segment is the
            remainder of a split sequence.
        bos_features: The features for which it is handled; none if empty.
        bos_token_id: The beginning-of-sequence token.

    Raises:
        ValueError: A length is not positive or not an integer; `bos_features` or `bos_token_id` are
            given but `bos_handling` does nothing, or `bos_token_id` is missing although it does
            something; or a feature is among both `bos_features` and `meta_features`. When read: an
            element has other keys.
        TypeError: `length_struct` is not a dict, or `bos_token_id` is not an integer.

    Example:
        >>> sequences = [[1, 1, 1], [2, 2], [3, 3], [4]]
        >>> ds = grain.MapDataset.source([{"x": np.array(x)} for x in sequences])
        >>> ds = grain.experimental.ConcatThenSplitIterDataset(
        ...     ds.to_iter_dataset(), length_struct={"x": 4}
        ... )
        >>> for row in ds:
        ...     print(row["x"], row["x_segment_ids"], row["x_positions"])
        [1 1 1 2] [1 1 1 2] [0 1 2 0]
        [2 3 3 4] [1 2 2 3] [0 0 1 0]
    """

    def __init__(
        self,
        parent: AnyDataset[Any],
        *,
        length_struct: Mapping[str, int],
        meta_features: Collection[str] = (),
        split_full_length_features: bool = True,
        bos_handling: sequential.BOSHandling = sequential.BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: int | None = None,
    ) -> None:
        node = sequential.ConcatThenSplit.of(
            node_of(parent),
            length_struct=length_struct,
            meta_features=meta_features,
            split_full_length_features=split_full_length_features,
            bos_handling=bos_handling,
            bos_features=bos_features,
            bos_token_id=bos_token_id,
        )
        super().__init__(node, (parent,))
