"""Several datasets in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from grainmill._dataset.element_types import T_co
from grainmill._dataset.iter_dataset import IterDataset, PlannedIterDataset
from grainmill._iterators.interleave import Interleave
from grainmill._plan.slicing import sliced_datasets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._dataset.map_dataset import MapDataset


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
            Interleave(
                (),
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
        sequential_slice: bool = False,  # noqa: FBT001, FBT002 - as programs call it
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
        node = cast("Interleave", self._node)
        node.set_datasets(sliced_datasets(node.datasets, sl))
