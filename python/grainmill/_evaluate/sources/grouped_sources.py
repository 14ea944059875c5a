"""One source for many datasets of the same kind; each is opened when a block first needs it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.grouped_steps import read_step
from grainmill._evaluate.sources.element_sources import (
    ElementSource,
    FileSource,
    Gathered,
    GatheringSource,
    PendingRequest,
    merged,
    one_by_one,
)
from grainmill._interrupts import raise_interrupt
from grainmill._native import RecordFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.fused import Step
    from grainmill._evaluate.sources.element_sources import DatasetNumbers, Indices
    from grainmill._native import ReadQueue

DatasetIndices: TypeAlias = "tuple[Indices, DatasetNumbers]"

# `mean_byte_len` and the like are taken from this many evenly spaced datasets at most.
_MAX_SAMPLED = 16


class GroupedObjects(ElementSource[DatasetIndices]):
    """Users' objects, called for one element at a time."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._step = read_step([source.__getitem__ for source in sources])

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return self._step

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Any:
        """See `ElementSource.request`."""
        return index, datasets

    def read(self, request: DatasetIndices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        index, datasets = request
        return one_by_one(self._step.function, zip(datasets.tolist(), index.tolist(), strict=True))


class GroupedFiles(FileSource):
    """Records of many sources of files, read as one sequence of files."""

    def __init__(self, files: Sequence[RecordFiles], reads: ReadQueue) -> None:
        super().__init__(RecordFiles.joined(files), reads)
        self._starts = np.cumsum([0, *map(len, files[:-1])], dtype=np.int64)
        self.mean_byte_len = max(files[dataset].mean_byte_len for dataset in _sampled(len(files)))

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Indices:
        """See `ElementSource.request`."""
        return index if datasets is None else self._starts[datasets] + index


class GroupedLazySources(GatheringSource[DatasetIndices]):
    """Any other sources, each created when a block first needs it.

    What is known of them is known of the sampled ones.
    """

    def __init__(
        self, functions: Sequence[Callable[[], ElementSource[Indices]]], *, runs_user_code: bool
    ) -> None:
        self._sources = _LazySources(functions)
        super().__init__([self._sources[dataset] for dataset in _sampled(len(functions))])
        self.runs_user_code = runs_user_code

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Any:
        """See `ElementSource.request`."""
        return index, datasets

    def gathered(self, request: DatasetIndices) -> tuple[list[PendingRequest], Any]:
        """See `GatheringSource.gathered`; the places are the positions of each source."""
        index, datasets = request
        by_source = self._by_source(datasets)
        parts = [
            PendingRequest(source, source.request(index[positions], None))
            for source, positions in by_source
        ]
        return parts, [positions.tolist() for _, positions in by_source]

    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """See `GatheringSource.joined`."""
        return merged(places, [part() for part in parts], sum(map(len, places)))

    def started(self, request: DatasetIndices) -> Gathered:
        """See `ElementSource.started`; also where only those that were not sampled are slow."""
        return Gathered(*self.gathered(request)).start()

    def _by_source(self, datasets: DatasetNumbers) -> list[tuple[Any, Indices]]:
        """Each source with its ascending positions in the block."""
        return [
            (self._opened(dataset), positions)
            for dataset, positions in _positions_by_dataset(datasets)
        ]

    def _opened(self, dataset: int) -> Any:
        """A source, or what fails at its first element if it cannot be opened."""
        try:
            return self._sources[dataset]
        except Exception as failure:
            raise_interrupt(failure)
            return _Unopened(failure)


class GroupedRows(GroupedLazySources):
    """Rows of several sources of files with columns."""

    reads_beyond = True

    @property
    def has_room(self) -> bool:
        """See `ElementSource.has_room`."""
        # A copy: threads that open sources add them meanwhile.
        return all(source.has_room for source in list(self._sources.values()))

    def batches(self, request: DatasetIndices) -> list[tuple[Indices, dict[str, Any]]] | None:
        """The rows of each source as a batch, with their positions; `None` if one has none."""
        index, datasets = request
        batches = []
        for source, positions in self._by_source(datasets):
            batch = source.batch(source.request(index[positions], None))
            if batch is None:
                return None
            batches.append((positions, batch))
        return batches


class _Unopened(ElementSource["Indices"]):
    """In the place of a source that could not be opened."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        return Evaluated([], self._failure)

    def batch(self, request: Indices) -> None:
        """See `RowSource.batch`."""


class _LazySources(dict[int, Any]):
    """The results of a list of functions, called on the first lookup of their number."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __missing__(self, number: int) -> Any:
        source = self[number] = self._functions[number]()
        return source


def _sampled(num_datasets: int) -> range:
    return range(0, num_datasets, -(-num_datasets // _MAX_SAMPLED))


def _positions_by_dataset(datasets: DatasetNumbers) -> list[tuple[int, Indices]]:
    """Each dataset's number with its ascending positions in the block."""
    order = np.argsort(datasets, kind="stable")
    in_order = datasets[order]
    starts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    bounds = [0, *starts.tolist(), len(datasets)]
    numbers = in_order[bounds[:-1]].tolist() if len(datasets) else []
    return [
        (number, order[start:stop])
        for number, (start, stop) in zip(numbers, pairwise(bounds), strict=False)
    ]
