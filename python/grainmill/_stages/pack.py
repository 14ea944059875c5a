"""Packs sequences into bins, a batch of bins at a time; each bin becomes a row."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from grainmill import _native
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState
from grainmill._iterators.base.group_len import FULL, GroupLen
from grainmill._iterators.base.node import Regrouping, runs
from grainmill._iterators.base.position import Position, constant_state, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.feature_values import FeatureValues, rows_of
from grainmill._iterators.packing import PackingStage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import check_at_least, checked_integer, checked_names, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._dataset.element_types import AnyDataset

_MIN_PULL, _MAX_PULL = 32, 256
"""Limits of the number of elements to pull at a time: as many as the last batch took."""


@lazy_dataclass
class FitPack(Regrouping):
    """Sequences packed into the first, or the fullest, bin with enough free space."""

    best_fit: bool
    length_struct: Mapping[str, Any]
    num_packing_bins: int
    seed: int = 0
    shuffle_bins: bool = True
    shuffle_bins_group_by_feature: str | None = None
    meta_features: Collection[str] = ()
    pack_alignment_struct: Mapping[str, Any] | None = None
    padding_struct: Mapping[str, Any] | None = None
    max_sequences_per_bin: int | None = None
    saves: ClassVar[str] = "the row of a batch of bins, which is packed again"
    parent_key: ClassVar[str | None] = "parent"
    restart_key: ClassVar[str | None] = "next_row"
    completes_last: ClassVar[bool] = True
    is_native: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False
    restarts_before: ClassVar[bool] = True

    def __post_init__(self) -> None:
        limit = self.max_sequences_per_bin
        if limit is not None:
            limit = checked_integer(limit, "max_sequences_per_bin")
            if limit <= 0:
                raise ValueError(
                    "If specified, `max_sequences_per_bin` must be a positive integer, but got "
                    f"{limit}."
                )
        self._set(
            max_sequences_per_bin=limit,
            num_packing_bins=checked_integer(self.num_packing_bins, "num_packing_bins", minimum=1),
            seed=checked_integer(self.seed, "seed", minimum=0),
            meta_features=checked_names(self.meta_features, "meta_features"),
        )
        self._check_structs()
        flat = [n for n, inner in self.length_struct.items() if not isinstance(inner, Mapping)]
        if self.shuffle_bins_group_by_feature not in {None, *flat, *self.meta_features}:
            raise ValueError(
                "`shuffle_bins_group_by_feature` must be a feature of `length_struct`, not a "
                f"nested one, or of `meta_features`, {[*flat, *self.meta_features]}, got "
                f"{self.shuffle_bins_group_by_feature!r}"
            )

    def _check_structs(self) -> None:
        """Raises an error unless lengths and alignments are numbers of the same features."""
        lengths = dict(leaves(self.length_struct, "length_struct"))
        if not lengths:
            raise ValueError("`length_struct` must name at least one feature, got {}")
        for path, length in lengths.items():
            check_at_least(length, 0, f"`length_struct` of `{'/'.join(map(str, path))}`")
        for name in ("pack_alignment_struct", "padding_struct"):
            struct = getattr(self, name)
            if struct is not None and {path for path, _ in leaves(struct, name)} != set(lengths):
                raise ValueError(
                    f"`{name}` must have the structure of `length_struct` "
                    f"{dict(self.length_struct)}, got {dict(struct)}"
                )
        for path, alignment in leaves(self.pack_alignment_struct or {}, "pack_alignment_struct"):
            check_at_least(alignment, 1, f"`pack_alignment_struct` of `{'/'.join(map(str, path))}`")

    def __str__(self) -> str:
        return "BestFitPackIterDataset" if self.best_fit else "FirstFitPackIterDataset"


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
        node = FitPack.after(
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


@runs(FitPack)
class FitPackStage(PackingStage):
    """Packs the elements of `parent` as `node` says.

    A batch of bins is packed, then delivered row by row. The state holds the parent's state before
    the batch and the number of rows delivered, so restoring packs the batch again. Where the data
    ended before the bins were full it has the number of elements in them, as there may be more now.
    """

    def __init__(self, node: FitPack, parent: Stage) -> None:
        super().__init__(node, parent)
        self.pull_size = node.num_packing_bins  # all rows of a batch are ready at once
        self._features = _Features(node)
        self._packer = self._features.packer()
        self._columns: dict[str, Any] | None = None
        self._order: list[int] = []
        self._start = self._end = self._cursor.position()
        self._next_row = 0
        self._counter = 0
        self._pull_len = _MIN_PULL

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; the block is lazy, since creating a row of views costs time."""
        if not self._has_rows():
            return Block([], constant_state(self.state()))
        first, columns = self._next_row, self._columns or {}
        rows = self._order[first : first + limit]
        self._next_row += len(rows)
        state_after = self._states(first, len(self._order))

        def finish(row: int, _: int) -> dict[str, Any]:
            return {key: column[row] for key, column in columns.items()}

        row_columns = columns if self._features.are_arrays else None
        return Block(rows, state_after, finish, columns=row_columns)

    def _has_rows(self) -> bool:
        """Whether there are rows to deliver; packs a batch if there are none."""
        while self._columns is None or self._next_row >= len(self._order):
            if not self._pack():
                return False
        return True

    def _states(self, first: int, num_rows: int) -> Callable[[int], State]:
        batch = self._start, self._end, self._group_len
        return functools.partial(_state_after, batch, self._counter, first, num_rows)

    def _pack(self) -> bool:
        """Packs one batch; `False` at the end of the data."""
        if self._columns is not None:
            self._counter += len(self._order)
            self._next_row -= len(self._order)
            self._columns = None
            self._start = self._end
            self._group_len = FULL
            self._num_of_group = 0
        is_full = self._fill_group(self._group_len, self._pull_len)
        self._pull_len = min(max(self._num_of_group, _MIN_PULL), _MAX_PULL)
        num_rows, columns, unpacked = self._packer.take()
        if self._next_row > num_rows:
            raise ValueError(
                f"state was saved at row {self._next_row} of a batch of bins but the batch has "
                f"{num_rows} rows; restore needs the same data and packing options"
            )
        if num_rows == 0:
            return False
        self._group_len = FULL if is_full else GroupLen(self._num_of_group)
        self._columns = self._features.columns(num_rows, columns, unpacked)
        self._order = self._shuffled(num_rows, self._columns)
        return True

    def _note_packed(self) -> None:
        self._end = self._cursor.position()  # as in Grain, before the end is noticed

    def _push(self, elements: list[Any]) -> tuple[int, bool]:
        try:
            return self._packer.push(elements, 0)
        except KeyError as failure:
            raise_interrupt(failure)
            if type(failure) is KeyError:
                failure.args = (self._features.missing(elements) or failure.args[0],)
            raise

    def _shuffled(self, num_rows: int, columns: dict[str, Any]) -> list[int]:
        if not self._node.shuffle_bins:
            return list(range(num_rows))
        rng = np.random.default_rng(self._node.seed + self._counter)
        order: list[int] = rng.permuted(range(num_rows)).tolist()
        feature = self._node.shuffle_bins_group_by_feature
        if feature is None:
            return order
        means = [_mean_of_unique(values) for values in columns[feature]]
        return sorted(range(num_rows), key=lambda row: (means[row], order[row]))

    def state(self) -> State:
        """See `Stage.state`."""
        if self._columns is not None:
            return self._states(self._next_row, len(self._order))(0)
        counter = self._counter + self._next_row
        next_row = self._group_len.in_state(self._next_row)
        return {"parent": state_at(self._start), "next_row": next_row, "counter": counter}

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        saved = CheckedState(self._node, state, ("parent", "next_row", "counter"))
        next_row = saved.index("next_row", self._node.num_packing_bins)
        counter = saved.index("counter", minimum=next_row)
        self._cursor.restore(saved["parent"])
        self._restart(GroupLen.of(saved["next_row"]))
        self._packer = self._features.packer()
        self._columns = None
        self._start = self._end = self._cursor.position()
        self._next_row = next_row
        self._counter = counter - next_row


def _mean_of_unique(values: Any) -> Any:
    unique = np.unique(np.asarray(values))
    num_nonzero = np.count_nonzero(unique)
    return np.sum(unique) / num_nonzero if num_nonzero else 0.0


class _Features:
    """The features of an element: how they are packed, and their values in packed rows."""

    def __init__(self, node: FitPack) -> None:
        self._node = node
        lengths = dict(leaves(node.length_struct, "length_struct"))
        self._paths = list(lengths)
        self._lengths = list(lengths.values())
        self._marked = [path[0] not in node.meta_features for path in self._paths]
        self._unpacked = [name for name in node.meta_features if name not in node.length_struct]
        self.are_arrays = not self._unpacked and all(len(path) == 1 for path in self._paths)

    def packer(self) -> _native.BinPacker:
        """Empty bins for these features."""
        node = self._node
        alignment = dict(leaves(node.pack_alignment_struct or {}, ""))
        padding = dict(leaves(node.padding_struct or {}, ""))
        names = ["/".join(map(str, path)) for path in self._paths]
        return _native.BinPacker(
            paths=self._paths,
            names=names,
            capacities=self._lengths,
            alignments=[alignment.get(path, 1) for path in self._paths],
            marked=self._marked,
            kept=self._unpacked,
            num_bins=node.num_packing_bins,
            max_sequences=node.max_sequences_per_bin,
            best_fit=node.best_fit,
            cells=FeatureValues(
                names, [_zero_if_none(padding[path]) for path in self._paths] if padding else None
            ),
        )

    def missing(self, elements: Sequence[Any]) -> _Text | None:
        """What the first element that lacks a feature has instead."""
        for element in elements:
            for path in (*self._paths, *((name,) for name in self._unpacked)):
                value = element
                for key in path:
                    if not isinstance(value, Mapping):
                        break
                    if key not in value:
                        named = (
                            "`meta_features`" if path[0] in self._unpacked else "`length_struct`"
                        )
                        name = "/".join(map(str, path))
                        return _Text(
                            f"an element lacks the feature `{name}` of {named}: it has the keys "
                            f"{_shown(element)}"
                        )
                    value = value[key]
        return None

    def columns(
        self, num_rows: int, columns: list[tuple[Any, ...]], unpacked: list[list[list[Any]]]
    ) -> dict[str, Any]:
        """The values of all rows by key, sorted."""
        values_by_key: dict[str, Any] = dict(zip(self._unpacked, unpacked, strict=True))
        for path, length, column in zip(self._paths, self._lengths, columns, strict=True):
            values, segment_ids, positions = rows_of(
                column, self._node.num_packing_bins, num_rows, length
            )
            key, *inner = path
            parts = {key: values}
            if segment_ids is not None:
                parts |= {f"{key}_segment_ids": segment_ids, f"{key}_positions": positions}
            for name, part in parts.items():
                if inner:
                    rows = values_by_key.setdefault(name, [{} for _ in range(num_rows)])
                    _nest(rows, inner, part)
                else:
                    values_by_key[name] = part
        return {key: values_by_key[key] for key in sorted(values_by_key)}


class _Text(str):
    """A text that a `KeyError`, which shows the `repr` of its key, shows as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(element: Mapping[Any, Any]) -> list[Any]:
    return [
        {key: _shown(value)} if isinstance(value, Mapping) else key
        for key, value in element.items()
    ]


def _zero_if_none(value: Any) -> Any:
    return 0 if value is None else value


def _nest(rows: list[dict[str, Any]], path: Sequence[Any], values: Any) -> None:
    for row, row_values in zip(rows, values, strict=True):
        inner = row
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = row_values


def _state_after(
    batch: tuple[Position, Position, GroupLen],
    counter: int,
    first: int,
    num_rows: int,
    count: int,
) -> State:
    start, end, group_len = batch  # before and after the elements of this batch, and their end
    row = first + count
    if row < num_rows:
        return {
            "parent": state_at(start),
            "next_row": group_len.in_state(row),
            "counter": counter + row,
        }
    return {"parent": state_at(end), "next_row": 0, "counter": counter + row}
