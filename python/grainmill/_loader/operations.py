"""The older way to write operations: callables from an iterator of records to another."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from grainmill import _native
from grainmill import _tree as tree
from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._evaluate.stack import shared_arena, stack
from grainmill._iterators.feature_values import FeatureValues, rows_of
from grainmill._loader.record import Record, RecordMetadata

Records = Iterator[Record[Any]]


class Operation(Protocol):
    """What an operation must be."""

    def __call__(self, input_iterator: Records) -> Records:
        """Returns the records that those of `input_iterator` become."""


class Operated(IterDataset[Any]):
    """The records that an operation makes of those of `parent`."""

    def __init__(self, parent: IterDataset[Any], operation: Operation) -> None:
        super().__init__(parent)
        self._operation = operation

    def __iter__(self) -> DatasetIterator[Any]:
        return _OperatedIterator(self._parent.__iter__(), self._operation)


class _OperatedIterator(DatasetIterator[Any]):
    """Runs an operation; its state says which records the operation has taken.

    What an operation keeps for later is not part of it, unless it says so: one with
    `holds_last` true has not used the record it took last when it gives one back.
    """

    def __init__(self, parent: DatasetIterator[Any], operation: Operation) -> None:
        super().__init__(parent)
        self._operation = operation
        self._begin()

    def _begin(self) -> None:
        self._made: Iterator[Any] | None = None
        self._before_last: dict[str, Any] | None = None
        self._running: Any = None

    def __next__(self) -> Any:
        if self._made is None:
            # An operation may keep things in itself; two iterators must not share them.
            self._running = copy.copy(self._operation)
            self._made = iter(self._running(self._taken()))
        state = self.get_state()
        try:
            return next(self._made)
        except StopIteration:
            raise
        except Exception:
            # A generator is over once it has raised; a new one goes on where this one was.
            self.set_state(state)
            raise

    def _taken(self) -> Iterator[Any]:
        while True:
            before = self._parent.get_state()
            try:
                record = next(self._parent)
            except StopIteration:
                return
            self._before_last = before
            yield record

    def get_state(self) -> dict[str, Any]:
        """See `DatasetIterator.get_state`."""
        if self._before_last is not None and getattr(self._running, "holds_last", False):
            return self._before_last
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `DatasetIterator.set_state`."""
        self._parent.set_state(state)
        self._begin()


def _warn_deprecated(operation: Any, instead: str) -> None:
    logging.getLogger("grainmill").error(
        "Applying deprecated PyGrain %s. Please use %s.", type(operation).__name__, instead
    )


def _without_key(record: Record[Any], data: Any) -> Record[Any]:
    return Record(record.metadata.remove_record_key(), data)


@dataclasses.dataclass
class MapOperation:
    """Replaces every element by `map_function(element)`; `transforms.Map` is newer."""

    map_function: Callable[[Any], Any]

    def __call__(self, input_iterator: Records) -> Records:
        _warn_deprecated(self, "`grainmill.transforms.Map`")
        for record in input_iterator:
            try:
                data = self.map_function(record.data)
            except Exception as error:
                raise ValueError(
                    "PyGrain encountered an error when calling map function."
                ) from error
            yield _without_key(record, data)


@dataclasses.dataclass
class RandomMapOperation:
    """Replaces every element by `random_map_function(element, rng)`; `RandomMap` is newer."""

    random_map_function: Callable[[Any, Any], Any]

    def __call__(self, input_iterator: Records) -> Records:
        _warn_deprecated(self, "`grainmill.transforms.RandomMap`")
        for record in input_iterator:
            try:
                data = self.random_map_function(record.data, record.metadata.rng)
            except Exception as error:
                raise ValueError(
                    "PyGrain encountered an error when calling random map function."
                ) from error
            yield _without_key(record, data)


@dataclasses.dataclass
class FilterOperation:
    """Leaves out the elements for which `condition_function` is false; `Filter` is newer."""

    condition_function: Callable[[Any], bool]

    def __call__(self, input_iterator: Records) -> Records:
        _warn_deprecated(self, "`grainmill.transforms.Filter`")
        for record in input_iterator:
            try:
                stays = self.condition_function(record.data)
            except Exception as error:
                raise ValueError(
                    "PyGrain encountered an error when calling condition function."
                ) from error
            if stays:
                yield _without_key(record, record.data)


@dataclasses.dataclass
class BatchOperation:
    """Stacks `batch_size` elements; the record has what is known of the last of them.

    Attributes:
        batch_size: Elements per batch, at least 1.
        drop_remainder: Whether a last, shorter batch is left out.
        batch_fn: Makes a batch from a list of elements, in place of stacking.

    Raises:
        ValueError: `batch_size` is not positive.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[Sequence[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.batch_size <= 0:
            raise ValueError(f"batch_size must be a positive integer. Got {self.batch_size}.")

    def __call__(self, input_iterator: Records) -> Records:
        _warn_deprecated(self, "`grainmill.transforms.Batch`")
        gathered: list[Record[Any]] = []
        for record in input_iterator:
            gathered.append(record)
            if len(gathered) == self.batch_size:
                yield self._batch(gathered)
                gathered = []
        if gathered and not self.drop_remainder:
            yield self._batch(gathered)

    def _batch(self, records: list[Record[Any]]) -> Record[Any]:
        data = [record.data for record in records]
        if self.batch_fn is not None:
            return _without_key(records[-1], self.batch_fn(data))
        _check_structures(data)
        return _without_key(records[-1], stack(data, shared_arena()))


def _check_structures(data: list[Any]) -> None:
    expected = tree.flatten(data[0])[1]
    unlike = [at for at, element in enumerate(data) if tree.flatten(element)[1] != expected]
    if unlike:
        raise TypeError(
            f"Record structures do not match. Record at position 0 has structure {data[0]}, while "
            f"records at positions {unlike} have structures {[data[at] for at in unlike]}."
        )


@dataclasses.dataclass
class PackAndBatchOperation:
    """Packs sequences into the rows of whole batches; `FirstFitPackIterDataset` is newer.

    Each sequence goes into the first row with room for it. An element becomes a tuple of three
    with the structure of `length_struct`: values of shape `(batch_size, length, ...)`, segment ids
    (int32, from 1; 0 is padding) and positions (int32, from 0 in each sequence).

    Attributes:
        length_struct: The length of a row for each feature.
        batch_size: Rows of a batch.
        max_sequences_per_bin: The most sequences in a row.

    Raises:
        ValueError: A number is out of range.
    """

    length_struct: Any
    batch_size: int
    max_sequences_per_bin: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size <= 0:
            raise ValueError(f"batch_size must be a positive integer. Got {self.batch_size}.")
        if self.max_sequences_per_bin is not None and self.max_sequences_per_bin <= 0:
            raise ValueError(
                "If specified, `max_sequences_per_bin` must be a positive integer, but got "
                f"{self.max_sequences_per_bin}."
            )
        self.holds_last = False

    def __call__(self, input_iterator: Records) -> Records:
        _warn_deprecated(self, "`grainmill.experimental.FirstFitPackIterDataset`")
        lengths, structure = tree.flatten(self.length_struct)
        packer = self._packer(lengths)
        last: RecordMetadata | None = None
        for record in input_iterator:
            leaves = self._leaves(record.data, structure, lengths)
            if not packer.push([leaves], 0)[0]:
                self.holds_last = True
                yield self._batch(packer, last, structure, lengths)
                self.holds_last = False
                packer.push([leaves], 0)
            last = record.metadata
        if last is not None:
            yield self._batch(packer, last, structure, lengths)

    def _packer(self, lengths: list[Any]) -> _native.BinPacker:
        names = [path or "the element" for path, _ in tree.flatten_with_path(self.length_struct)]
        count = len(lengths)
        return _native.BinPacker(
            paths=[(at,) for at in range(count)],
            names=names,
            capacities=lengths,
            alignments=[1] * count,
            marked=[True] * count,
            kept=[],
            num_bins=self.batch_size,
            max_sequences=self.max_sequences_per_bin,
            best_fit=False,
            cells=FeatureValues(names),
        )

    def _leaves(self, data: Any, structure: tree.Structure, lengths: list[Any]) -> dict[int, Any]:
        leaves, found = tree.flatten(data)
        if found != structure:
            raise ValueError(
                f"elements must have the structure of `length_struct` {self.length_struct}, "
                f"got {data}"
            )
        for leaf, length in zip(leaves, lengths, strict=True):
            size = np.shape(leaf)[0] if np.ndim(leaf) else 1
            if size > length:
                raise ValueError(
                    "Inputs to PackAndBatchOperation must be truncated to max length. A row has "
                    f"length {length}, got {size}"
                )
        return dict(enumerate(leaves))

    def _batch(
        self,
        packer: _native.BinPacker,
        last: RecordMetadata | None,
        structure: tree.Structure,
        lengths: list[Any],
    ) -> Record[Any]:
        assert last is not None  # a row is never too short for the first sequence
        _, columns, _ = packer.take()
        size = self.batch_size
        parts = [
            rows_of(column, size, size, length)
            for column, length in zip(columns, lengths, strict=True)
        ]
        trees = (structure.unflatten(iter(leaves)) for leaves in zip(*parts, strict=True))
        return Record(last.remove_record_key(), tuple(trees))
