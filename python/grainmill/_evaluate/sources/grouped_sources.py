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
    may_be_slow,
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


class GroupedSource(ElementSource[DatasetIndices]):
    """The sources of one chain, selected by dataset number.

    `mean_byte_len` is the largest of the sampled datasets.
    """

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Any:
        """See `ElementSource.request`."""
        return index, datasets


class GroupedObjects(GroupedSource):
    """Users' objects, called for one element at a time."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._step = read_step([source.__getitem__ for source in sources])

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return self._step

    def finish(self, pending: DatasetIndices) -> Evaluated:
        """See `ElementSource.finish`."""
        index, datasets = pending
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


class GroupedLazySources(GroupedSource):
    """Any other sources, each created when a block first needs it."""

    def __init__(
        self, functions: Sequence[Callable[[], ElementSource[Indices]]], *, runs_user_code: bool
    ) -> None:
        self._sources = _LazySources(functions)
        self.runs_user_code = runs_user_code
        self._sampled = [self._sources[dataset] for dataset in _sampled(len(functions))]
        self.mean_byte_len = max(source.mean_byte_len for source in self._sampled)
        self.num_records = max(source.num_records for source in self._sampled)
        self.reads_lists = any(source.reads_lists for source in self._sampled)

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`; of the sampled sources."""
        return may_be_slow(self._sampled)

    def wait(self, pending: Any) -> Any:
        """See `ElementSource.wait`."""
        count, by_source = pending
        return count, [
            (positions, source, source.wait(of_source))
            for positions, source, of_source in by_source
        ]

    def start(self, request: DatasetIndices) -> Any:
        """See `ElementSource.start`."""
        index, datasets = request
        pending = [
            (positions, source, source.start(source.request(index[positions], None)))
            for source, positions in self._by_source(datasets)
        ]
        return len(index), pending

    def finish(self, pending: Any) -> Evaluated:
        """See `ElementSource.finish`."""
        count, by_source = pending
        results = [
            (positions, source.finish(of_source)) for positions, source, of_source in by_source
        ]
        return merged(results, count)

    def read(self, request: DatasetIndices) -> Evaluated:
        """See `ElementSource.read`."""
        index, datasets = request
        results = [
            (positions, source.read(source.request(index[positions], None)))
            for source, positions in self._by_source(datasets)
        ]
        return merged(results, len(index))

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

    def start_beyond(self, request: DatasetIndices) -> Any:
        """See `ElementSource.start_beyond`."""
        index, datasets = request
        started = [
            source.start_beyond(source.request(index[positions], None))
            for source, positions in self._by_source(datasets)
        ]
        return started if any(reads is not None for reads in started) else None

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

    def finish(self, pending: Indices) -> Evaluated:
        """See `ElementSource.finish`."""
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
