"""The older way to write operations: callables from an iterator of records to another."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeAlias

import numpy as np

from grainmill import _native
from grainmill import _tree as tree
from grainmill._dataset.element_types import In, Out, P, S
from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._evaluate.batches.stack import stack
from grainmill._interrupts import raise_interrupt, suppressed
from grainmill._iterators.base.position import of_state
from grainmill._iterators.feature_values import FeatureValues, rows_of
from grainmill._iterators.notes import note
from grainmill._loader.record import Record, RecordMetadata
from grainmill._plan.node import transform_name

Records = Iterator[Record[Any]]


class Operation(Protocol):
    """A callable from an iterator of records to another; transforms are newer."""

    def __call__(self, input_iterator: Records) -> Records:
        """Returns the records that those of `input_iterator` become.

        Args:
            input_iterator: The records; taken as far as is needed for the next result.
        """


OperationLike: TypeAlias = Operation | Callable[[Records], Records]


class Operated(IterDataset[Any]):
    """The records that an operation returns for those of `parent`."""

    def __init__(self, parent: IterDataset[Any], operation: OperationLike) -> None:
        super().__init__(parent)
        self._operation = operation

    def __iter__(self) -> DatasetIterator[Any]:
        return _OperatedIterator(self._parent.__iter__(), self._operation)


class _OperatedIterator(DatasetIterator[Any]):
    """Runs an operation; its state is the position in the records that the operation reads.

    What an operation buffers is not part of the state, with one exception: while its `holds_last`
    is true, the record that it read last is not in the output yet, and will be read again.
    """

    def __init__(self, parent: DatasetIterator[Any], operation: OperationLike) -> None:
        super().__init__(parent)
        self._operation = operation
        self._reset()

    def _reset(self) -> None:
        self._output: Iterator[Any] | None = None
        self._state_before_last: dict[str, Any] | None = None
        self._running: Any = None

    def __next__(self) -> Any:
        if self._output is None:
            # An operation may have state of its own, which two iterators must not share.
            self._running = copy.copy(self._operation)
            self._output = iter(self._running(self._input()))
        state = self.get_state()
        try:
            return next(self._output)
        except StopIteration as stop:
            raise_interrupt(stop)
            raise
        except Exception as failure:
            raise_interrupt(failure)
            parent: Any = self._parent
            what = f"`{transform_name(self._operation)}` in a `DataLoader`"
            with suppressed():
                now = parent.get_state()
                if now != state:  # otherwise upstream has failed
                    note(failure, what, of_state(state), of_state(now), parent._node)  # noqa: SLF001
            # A generator that has raised is exhausted; a new one continues at its position.
            self.set_state(state)
            raise

    def _input(self) -> Iterator[Any]:
        while True:
            before = self._parent.get_state()
            try:
                record = next(self._parent)
            except StopIteration as stop:
                raise_interrupt(stop)
                return
            self._state_before_last = before
            yield record

    def get_state(self) -> dict[str, Any]:
        """See `DatasetIterator.get_state`."""
        if self._state_before_last is not None and getattr(self._running, "holds_last", False):
            return self._state_before_last
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `DatasetIterator.set_state`."""
        self._parent.set_state(state)
        self._reset()


def _warn_deprecated(operation: Any, instead: str) -> None:
    logging.getLogger("grainmill").error(
        "Applying deprecated PyGrain %s. Please use %s.", type(operation).__name__, instead
    )


def _called(name: str, function: Callable[P, S], *args: P.args, **named: P.kwargs) -> S:
    """What `function` returns; what it raises comes out as the cause of a `ValueError`."""
    try:
        return function(*args, **named)
    except Exception as error:
        raise_interrupt(error)
        raise ValueError(f"PyGrain encountered an error when calling {name} function.") from error


def _without_key(record: Record[Any], data: Any) -> Record[Any]:
    return Record(record.metadata.remove_record_key(), data)


@dataclasses.dataclass
class MapOperation(Generic[In, Out]):
    """Replaces every element by `map_function(element)`; `transforms.Map` is newer.

    Attributes:
        map_function: A function of an element. What it raises comes out as the cause of a
            ValueError.
    """

    map_function: Callable[[In], Out]

    def __call__(self, input_iterator: Iterator[Record[In]]) -> Iterator[Record[Out]]:
        _warn_deprecated(self, "`grainmill.transforms.Map`")
        for record in input_iterator:
            yield _without_key(record, _called("map", self.map_function, record.data))


@dataclasses.dataclass
class RandomMapOperation(Generic[In, Out]):
    """Replaces elements by `random_map_function(element, rng)`; `transforms.RandomMap` is newer.

    Attributes:
        random_map_function: A function of an element and the record's `numpy.random.Generator`,
            which is `None` if the sampler has no seed. What it raises comes out as the cause of a
            ValueError.
    """

    random_map_function: Callable[[In, np.random.Generator], Out]

    def __call__(self, input_iterator: Iterator[Record[In]]) -> Iterator[Record[Out]]:
        _warn_deprecated(self, "`grainmill.transforms.RandomMap`")
        for record in input_iterator:
            rng: Any = record.metadata.rng
            data = _called("random map", self.random_map_function, record.data, rng)
            yield _without_key(record, data)


@dataclasses.dataclass
class FilterOperation(Generic[In]):
    """Leaves out elements whose `condition_function` is false; `transforms.Filter` is newer.

    Attributes:
        condition_function: A function of an element. What it raises comes out as the cause of a
            ValueError.
    """

    condition_function: Callable[[In], bool | np.bool_]

    def __call__(self, input_iterator: Iterator[Record[In]]) -> Iterator[Record[In]]:
        _warn_deprecated(self, "`grainmill.transforms.Filter`")
        for record in input_iterator:
            if _called("condition", self.condition_function, record.data):
                yield _without_key(record, record.data)


@dataclasses.dataclass
class BatchOperation(Generic[In, Out]):
    """Stacks `batch_size` elements along a new leading axis; `transforms.Batch` is newer.

    The batch has the metadata of its last record.

    Attributes:
        batch_size: Elements per batch, at least 1.
        drop_remainder: Whether a last, shorter batch is left out.
        batch_fn: Makes a batch from a list of elements, in place of stacking.

    Raises:
        ValueError: `batch_size` is not positive. When read: elements differ in shape.
        TypeError: When read: elements differ in structure.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[list[In]], Out] | None = None

    def __post_init__(self) -> None:
        if self.batch_size <= 0:
            raise ValueError(f"batch_size must be a positive integer. Got {self.batch_size}.")
        self._warns = True

    def disable_deprecation_message(self) -> None:
        """Makes this operation log no error about being deprecated."""
        self._warns = False

    def __call__(self, input_iterator: Iterator[Record[In]]) -> Iterator[Record[Out]]:
        if self._warns:
            _warn_deprecated(self, "`grainmill.transforms.Batch`")
        pending: list[Record[In]] = []
        for record in input_iterator:
            pending.append(record)
            if len(pending) == self.batch_size:
                yield self._batch(pending)
                pending = []
        if pending and not self.drop_remainder:
            yield self._batch(pending)

    def _batch(self, records: list[Record[In]]) -> Record[Any]:
        data = [record.data for record in records]
        if self.batch_fn is None:
            _check_structures(data)
        return _without_key(records[-1], stack(data, batch_fn=self.batch_fn))


def _check_structures(data: list[Any]) -> None:
    expected = tree.flatten(data[0])[1]
    differing = [i for i, element in enumerate(data) if tree.flatten(element)[1] != expected]
    if differing:
        raise TypeError(
            f"Record structures do not match. Record at position 0 has structure {data[0]}, while "
            f"records at positions {differing} have structures {[data[i] for i in differing]}."
        )


@dataclasses.dataclass
class PackAndBatchOperation(Generic[In]):
    """Packs sequences into the rows of whole batches; `FirstFitPackIterDataset` is newer.

    Each sequence goes into the first row with room for it. An element becomes a tuple of three with
    the structure of `length_struct`: values of shape `(batch_size, length, ...)`, segment ids
    (int32, from 1; 0 is padding) and positions (int32, from 0 in each sequence), both of shape
    `(batch_size, length)`.

    Attributes:
        length_struct: The length of a row for each feature.
        batch_size: Rows of a batch, at least 1.
        max_sequences_per_bin: The most sequences in a row; as many as have room if `None`.

    Raises:
        ValueError: A number is not positive. When read: an element has another structure, or a
            sequence is longer than its row.
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

    def __call__(self, input_iterator: Iterator[Record[In]]) -> Iterator[Record[tuple[In, In, In]]]:
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
            paths=[(index,) for index in range(count)],
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
        assert last is not None  # an empty row has space for any sequence
        _, columns, _ = packer.take()
        size = self.batch_size
        per_leaf = [
            rows_of(column, size, size, length)
            for column, length in zip(columns, lengths, strict=True)
        ]
        trees = (structure.unflatten(iter(leaves)) for leaves in zip(*per_leaf, strict=True))
        return Record(last.remove_record_key(), tuple(trees))
