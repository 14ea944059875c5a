"""Stages that are written as classes around a dataset rather than as methods of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._dataset.map_dataset import PlannedMapDataset
from grainmill._plan import random_access, sequential
from grainmill._plan.arguments import checked_integer
from grainmill._plan.slicing import check_sliceable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from grainmill._dataset.iter_dataset import IterDataset
    from grainmill._dataset.map_dataset import MapDataset
    from grainmill._plan import transforms
    from grainmill._plan.options import DatasetOptions

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

T = TypeVar("T")


class FlatMapMapDataset(PlannedMapDataset[Any]):
    """Each element becomes up to `transform.max_fan_out` elements; missing ones are `None`."""

    def __init__(self, parent: MapDataset[Any], transform: transforms.FlatMap) -> None:
        super().__init__(random_access.FlatMap.of(node_of(parent), transform), (parent,))


class ZipMapDataset(PlannedMapDataset[tuple[Any, ...]]):
    """Tuples of what several datasets of one length have at the same index.

    Raises:
        ValueError: There is no dataset, or lengths differ.
    """

    def __init__(self, parents: Sequence[MapDataset[Any]]) -> None:
        super().__init__(random_access.Zip.of([node_of(parent) for parent in parents]), parents)


class WindowShuffleMapDataset(PlannedMapDataset[T]):
    """Moves elements inside windows of `window_size` consecutive ones.

    Every epoch is a permutation: where the window does not divide its length, its last window is
    shorter.
    """

    def __init__(self, parent: MapDataset[T], *, window_size: int, seed: int) -> None:
        node = random_access.WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


class FlatMapIterDataset(PlannedIterDataset[Any]):
    """Each element becomes the elements of a sequence."""

    def __init__(self, parent: IterDataset[Any], transform: transforms.FlatMap) -> None:
        super().__init__(sequential.FlatMap.of(node_of(parent), transform), (parent,))


class ZipIterDataset(PlannedIterDataset[tuple[Any, ...]]):
    """Tuples of one element of each of several datasets.

    Args:
        parents: The datasets.
        strict: Whether datasets of unequal length are an error; if not, the shortest ends it.

    Raises:
        ValueError: There are no datasets.
    """

    def __init__(self, parents: Sequence[IterDataset[Any]], *, strict: bool = True) -> None:
        if not parents:
            raise ValueError("At least one parent must be provided. `parents` is empty.")
        nodes = tuple(node_of(parent) for parent in parents)
        super().__init__(sequential.Zip(nodes, strict), parents)


class WindowShuffleIterDataset(PlannedIterDataset[T]):
    """Permutes each run of `window_size` consecutive elements."""

    def __init__(self, parent: IterDataset[T], *, window_size: int, seed: int) -> None:
        node = sequential.WindowShuffle.of(node_of(parent), window_size, seed)
        super().__init__(node, (parent,))


class RepeatIterDataset(PlannedIterDataset[T]):
    """The same epoch again and again; `num_epochs` times, or without end if `None`."""

    def __init__(self, parent: IterDataset[T], num_epochs: int | None = None) -> None:
        super().__init__(sequential.Repeat.of(node_of(parent), num_epochs), (parent,))


class CacheIterDataset(PlannedIterDataset[T]):
    """Remembers the elements of the first epoch; of use under `RepeatIterDataset`."""

    def __init__(self, parent: IterDataset[T]) -> None:
        super().__init__(sequential.Cache((node_of(parent),)), (parent,))


class LimitIterDataset(PlannedIterDataset[T]):
    """The first `count` elements, at least 1."""

    def __init__(self, parent: IterDataset[T], count: int) -> None:
        super().__init__(sequential.Limit.of(node_of(parent), count), (parent,))


class TakeWhileIterDataset(PlannedIterDataset[T]):
    """The elements up to the first for which `predicate` is false, which is left out too.

    Args:
        parent: Where elements come from.
        predicate: A function of an element, or a `transforms.Filter`. It is called once for each
            element, when that is asked for.

    Example:
        >>> ds = MapDataset.range(10).to_iter_dataset()
        >>> list(TakeWhileIterDataset(ds, lambda x: x < 3))
        [0, 1, 2]
    """

    def __init__(
        self, parent: IterDataset[T], predicate: transforms.Filter | Callable[[T], bool]
    ) -> None:
        super().__init__(sequential.TakeWhile.of(node_of(parent), predicate), (parent,))


class RebatchIterDataset(PlannedIterDataset[Any]):
    """Batches of one size cut and joined into batches of `batch_size` rows."""

    def __init__(
        self,
        parent: IterDataset[Any],
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - as programs call it
    ) -> None:
        node = sequential.Rebatch.of(node_of(parent), batch_size, drop_remainder=drop_remainder)
        super().__init__(node, (parent,))


class ThreadPrefetchIterDataset(PlannedIterDataset[T]):
    """Elements made ahead by one thread, up to `prefetch_buffer_size` of them."""

    def __init__(self, parent: IterDataset[T], *, prefetch_buffer_size: int) -> None:
        node = sequential.ThreadPrefetch.of(node_of(parent), prefetch_buffer_size)
        super().__init__(node, (parent,))


def multithread_prefetch(
    ds: IterDataset[T],
    num_threads: int,
    buffer_size: int,
    sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
) -> IterDataset[T]:
    """Makes elements ahead on threads, which share them as workers of `mp_prefetch` do.

    Args:
        ds: The dataset.
        num_threads: With 0, `ds` is returned as it is.
        buffer_size: The most elements each thread holds ready; 0 makes each when it is asked for.
        sequential_slice: Whether a thread gets a run of consecutive elements of each source
            instead of every `num_threads`-th of them.

    Raises:
        ValueError: A number is negative, or a source cannot be shared.
    """
    if not checked_integer(num_threads, "num_threads"):
        return ds
    node = sequential.MultithreadPrefetch.of(
        node_of(ds), num_threads, buffer_size, sequential_slice=sequential_slice
    )
    check_sliceable(node_of(ds), num_threads, sequential=sequential_slice)
    return PlannedIterDataset(node, (ds,))


class InterleaveIterDataset(PlannedIterDataset[T]):
    """One element of each of up to `cycle_length` datasets in turn, until all are used up.

    Args:
        datasets: Datasets by index; a `MapDataset` of datasets opens each when its turn comes.
        cycle_length: How many are open at a time.
        num_make_iter_threads: Threads that open the next ones.
        make_iter_buffer_size: How many are opened ahead.
        iter_buffer_size: How many elements of each are made ahead, on a thread for each; with 1
            an element is made when its turn comes. What a `MapDataset` makes ahead is as always.
    """

    def __init__(
        self,
        datasets: Sequence[IterDataset[T] | MapDataset[T]] | MapDataset[Any],
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


class WithOptionsIterDataset(PlannedIterDataset[T]):
    """Sets options of the whole pipeline, up- and downstream; the later one wins."""

    def __init__(self, parent: IterDataset[T], options: DatasetOptions) -> None:
        super().__init__(sequential.WithOptions((node_of(parent),), options), (parent,))


class _FitPackIterDataset(PlannedIterDataset[dict[str, Any]]):
    """Packs sequences into rows of fixed length, several to a row.

    An element is a flat dict of 1-d arrays. A row has each feature of `length_struct`, and with
    it `<feature>_segment_ids` (int32, from 1; 0 is padding) and `<feature>_positions` (int32,
    from 0 in each sequence), all of shape `(length_struct[feature],)`.

    Args:
        parent: What to pack.
        length_struct: The length of a row for each feature.
        num_packing_bins: Rows that are open at a time. Beyond some ten thousand, and where
            features differ in length, the time per sequence grows with it.
        seed: For the order in which full rows come out.
        shuffle_bins: Whether that order is random.
        shuffle_bins_group_by_feature: A feature by whose mean the rows are sorted.
        meta_features: Features that describe sequences; they get no ids or positions.
        pack_alignment_struct: For each feature, what the start of a sequence is a multiple of.
        padding_struct: For each feature, the value where there is no token; 0 if `None`.
        max_sequences_per_bin: The most sequences in a row.

    Raises:
        ValueError: `max_sequences_per_bin` is not positive.
    """

    _best_fit: bool

    def __init__(
        self,
        parent: IterDataset[Any],
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
    __doc__ = f"""{_FitPackIterDataset.__doc__}
    A sequence goes into the first row that has room for it.
    """
    _best_fit = False


class BestFitPackIterDataset(_FitPackIterDataset):
    __doc__ = f"""{_FitPackIterDataset.__doc__}
    A sequence goes into the fullest row that has room for it.
    """
    _best_fit = True


class ConcatThenSplitIterDataset(PlannedIterDataset[dict[str, Any]]):
    """Lays sequences end to end and cuts them into full rows.

    A row is padded with zeros where another feature is full first, and the last one is. Of each
    feature that is no meta feature come its values, of shape `(length_struct[f],)`, and as int32
    `<f>_segment_ids` (1, 2, ... in the order of the row, 0 is padding) and `<f>_positions`, which
    begin at 0 again in the rest of a sequence that was cut.

    Args:
        parent: What to pack: flat dicts of 1-d arrays with exactly the keys of `length_struct`,
            which names meta features too.
        length_struct: The length of a row for each feature.
        meta_features: Features that describe sequences; they are never cut.
        split_full_length_features: Whether a sequence that fills a row by itself is cut too.
        bos_handling: What happens to the first token of each segment.
        bos_features: The features it happens to; none if empty.
        bos_token_id: The token that marks a beginning.

    Raises:
        ValueError: An argument does not fit the others, or, when read, an element has other keys.
    """

    def __init__(
        self,
        parent: IterDataset[Any],
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
