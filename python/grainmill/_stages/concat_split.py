"""Concatenates sequences and splits them into full rows."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from grainmill import _native
from grainmill._dataset.iter_dataset import PlannedIterDataset, node_of
from grainmill._iterators.base.checked_state import CheckedState, integer
from grainmill._iterators.base.group_len import FULL, GroupLen
from grainmill._iterators.base.node import Regrouping, runs
from grainmill._iterators.base.position import Position, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.feature_values import FeatureValues, rows_of
from grainmill._iterators.packing import PackingStage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import check_at_least, checked_integer, checked_names

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset

_PULL_LEN = 32
"""How many elements to pull from the parent at a time."""

_NONE = (-1, -1)
"""The remainder of a feature where no sequence was cut."""

_Slices = list[tuple[int, int]] | None


class BOSHandling(enum.Enum):
    """What concat-then-split packing does with the first token of each segment.

    Attributes:
        DO_NOTHING: Keeps it.
        REPLACE_FIRST_TOKEN_WITH_BOS: Replaces it by `bos_token_id`, in the features `bos_features`.
    """

    DO_NOTHING = 1
    REPLACE_FIRST_TOKEN_WITH_BOS = 2


@lazy_dataclass
class ConcatThenSplit(Regrouping):
    """Sequences concatenated and split into full rows."""

    length_struct: Mapping[str, int]
    meta_features: Collection[str] = ()
    split_full_length_features: bool = True
    bos_handling: BOSHandling = BOSHandling.DO_NOTHING
    bos_features: Collection[str] = ()
    bos_token_id: int | None = None
    dataset_name: ClassVar[str] = "ConcatThenSplitIterDataset"
    saves: ClassVar[str] = "the sequence that is split, and the rows since"
    parent_key: ClassVar[str | None] = "parent_state"
    restart_key: ClassVar[str | None] = "elements_from_buffer_after_checkpoint"
    completes_last: ClassVar[bool] = True
    is_native: ClassVar[bool] = True
    keeps_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        length_struct, bos_handling = self.length_struct, self.bos_handling
        if not isinstance(length_struct, Mapping):
            raise TypeError(
                "`length_struct` must be a mapping from feature names to lengths, got "
                f"{length_struct!r}"
            )
        if not length_struct:
            raise ValueError("`length_struct` must name at least one feature, got {}")
        meta_features = checked_names(self.meta_features, "meta_features")
        bos_features = checked_names(self.bos_features, "bos_features")
        for name, features in (("meta_features", meta_features), ("bos_features", bos_features)):
            if unknown := [feature for feature in features if feature not in length_struct]:
                raise ValueError(
                    f"`{name}` must be features of `length_struct` {list(length_struct)}, but "
                    f"{unknown} are not"
                )
        for name, length in length_struct.items():
            check_at_least(length, 1, f"`length_struct` of `{name}`")
        if not isinstance(bos_handling, BOSHandling):
            raise TypeError(f"`bos_handling` must be a `BOSHandling`, got {bos_handling!r}")
        if self.bos_token_id is not None:
            self._set(bos_token_id=checked_integer(self.bos_token_id, "bos_token_id"))
        if bos_handling is BOSHandling.DO_NOTHING:
            if self.bos_token_id is not None or bos_features:
                raise ValueError(
                    f"bos_handling={bos_handling} indicates that BOS handling is not used. So "
                    "bos_token_id and bos_features should not be set."
                )
        elif self.bos_token_id is None:
            raise ValueError(f"bos_token_id must be set if bos_handling is {bos_handling}.")
        if set(bos_features) & set(meta_features):
            raise ValueError(
                "bos_features and meta_features should not overlap. bos_features: "
                f"{list(bos_features)}, meta_features: {list(meta_features)}"
            )
        self._set(
            length_struct=dict(length_struct),
            meta_features=meta_features,
            bos_features=bos_features,
        )


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
        bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: int | None = None,
    ) -> None:
        node = ConcatThenSplit.after(
            node_of(parent),
            length_struct=length_struct,
            meta_features=meta_features,
            split_full_length_features=split_full_length_features,
            bos_handling=bos_handling,
            bos_features=bos_features,
            bos_token_id=bos_token_id,
        )
        super().__init__(node, (parent,))


@runs(ConcatThenSplit)
class ConcatThenSplitStage(PackingStage):
    """Fills rows with the sequences of `parent` as `node` says.

    A step fills one row, and one more for each sequence on the way that gets a row of its own. The
    state holds the parent's state before the step, the remainder of the sequence that was split
    there, and how many rows of the step were delivered. Where the data ended before the row was
    full it has the number of elements of the step, as there may be more now.
    """

    def __init__(self, node: ConcatThenSplit, parent: Stage) -> None:
        super().__init__(node, parent)
        self._features = [name for name in node.length_struct if name not in node.meta_features]
        self._names = list(node.length_struct)
        self._packer = self._row_packer()
        self._rows: list[dict[str, Any]] = []
        self._next_row = 0
        self._skip = 0
        self._start: tuple[Position, _Slices] = (self._cursor.position(), None)
        self._step: tuple[Position, _Slices] | None = None

    def _row_packer(self) -> _native.RowPacker:
        node = self._node
        replace = node.bos_handling is BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS
        return _native.RowPacker(
            names=self._names,
            capacities=list(node.length_struct.values()),
            whole=[name in node.meta_features for name in self._names],
            alone=not node.split_full_length_features,
            begin_tokens=[
                node.bos_token_id if replace and name in node.bos_features else None
                for name in self._names
            ],
            cells=_FlatFeatureValues(self._names, node.length_struct),
        )

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        while self._next_row >= len(self._rows):
            if not self._fill():
                return Block([], self._states(self._next_row))
        first = self._next_row
        elements = self._rows[first : first + limit]
        self._next_row += len(elements)
        return Block(elements, self._states(first))

    def _states(self, first: int) -> Callable[[int], State]:
        start, remainder = self._start
        slices = dict(zip(self._names, remainder, strict=True)) if remainder else {}
        slices = {name: slices.get(name, _NONE) for name in self._features}
        return functools.partial(_state_after, start, slices, self._group_len, first + self._skip)

    def _fill(self) -> bool:
        """Computes the rows of one step; `False` at the end of the data."""
        if self._step is None:
            self._step = (self._cursor.position(), self._packer.remainder)
            self._num_of_group = 0
        is_full = self._fill_group(self._group_len if self._skip else FULL, _PULL_LEN)
        rows = [self._row(columns) for columns in self._packer.take()]
        if not rows:
            self._step = None
            if self._skip:
                raise _other_data(self._skip, 0)
            return False
        self._start, self._step = self._step, None
        self._group_len = FULL if is_full else GroupLen(self._num_of_group)
        self._next_row, self._skip = self._skip, 0
        if self._next_row > len(rows):
            self._rows = []
            raise _other_data(self._next_row, len(rows))
        self._rows = rows
        return True

    def _push(self, elements: list[Any]) -> tuple[int, bool]:
        count, is_full, limited = self._packer.push(elements, 0)
        if limited is not None:
            name, length, num_free = limited
            _LOG.error(
                "Meta feature '%s' limited packing. Resulting sequences might have unnecessary "
                "padding. Feature '%s' has sequence_length=%d but only have %d available tokens "
                "(target_sequence_length=%d). Consider increasing the target sequence length for "
                "'%s'.",
                name,
                name,
                length,
                num_free,
                self._node.length_struct[name],
                name,
            )
        return count, is_full

    def _row(self, columns: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        for name, column in zip(self._names, columns, strict=True):
            length = self._node.length_struct[name]
            values, segment_ids, positions = rows_of(column, 1, 1, length)
            if segment_ids is None:
                meta[name] = values[0]
                continue
            row[name] = values[0]
            row[f"{name}_segment_ids"] = segment_ids[0]
            row[f"{name}_positions"] = positions[0]
        return row | meta

    def state(self) -> State:
        """See `Stage.state`."""
        return self._states(self._next_row)(0)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        keys = ("parent_state", "remainder_slices", "elements_from_buffer_after_checkpoint")
        saved = CheckedState(self._node, state, keys)
        remainder = self._remainder_of(saved)
        skip = saved.index("elements_from_buffer_after_checkpoint")
        group_len = GroupLen.of(saved["elements_from_buffer_after_checkpoint"])
        self._cursor.restore(saved["parent_state"])
        self._restart(group_len)
        self._packer = self._row_packer()
        self._packer.restart(remainder)
        self._rows = []
        self._next_row = 0
        self._skip = skip
        self._start = (self._cursor.position(), remainder)
        self._step = None

    def _remainder_of(self, saved: CheckedState) -> _Slices:
        slices = saved["remainder_slices"]
        if not isinstance(slices, dict) or set(slices) != set(self._features):
            expected = f"must have the features {self._features}"
            raise saved.refusal("`remainder_slices`", expected, slices)
        checked = {name: _checked(saved, name, ends) for name, ends in slices.items()}
        if all(ends == _NONE for ends in checked.values()):
            return None
        if _NONE in checked.values():
            expected = f"must be {list(_NONE)} for all features or for none"
            raise saved.refusal("`remainder_slices`", expected, slices)
        return [checked.get(name, (0, 0)) for name in self._names]


def _checked(saved: CheckedState, name: str, ends: Any) -> tuple[int, int]:
    part = f"`remainder_slices` of `{name}`"
    if not isinstance(ends, list | tuple) or len(ends) != len(_NONE):
        raise saved.refusal(part, "must be a list of a start and a stop", ends)
    if tuple([integer(end) for end in ends]) == _NONE:
        return _NONE
    start = saved.checked_index(f"the start in {part}", ends[0])
    stop = saved.checked_index(f"the stop in {part}", ends[1])
    if stop < start:
        raise saved.refusal(part, "must be a slice, which does not stop before it starts", ends)
    return start, stop


def _other_data(saved: int, found: int) -> ValueError:
    return ValueError(
        f"state was saved after {saved} rows of a step but the step has {found}; restore needs "
        "the same data and packing options"
    )


_LOG = logging.getLogger("grainmill")


class _FlatFeatureValues(FeatureValues):
    """Values of elements that must be flat and have exactly the features of `length_struct`."""

    def __init__(self, names: Sequence[str], length_struct: Mapping[str, int]) -> None:
        super().__init__(names)
        self._length_struct = dict(length_struct)

    def refuse(self, element: Any) -> NoReturn:
        """Raises what is wrong with the structure of `element`."""
        if not isinstance(element, dict) or any(isinstance(v, Mapping) for v in element.values()):
            raise ValueError(
                f"Parent elements must be unnested dictionaries but got {_shown(element)}."
            )
        raise ValueError(
            f"Parent element has structure {_shown(dict(sorted(element.items())))} but target "
            f"sequence length is {self._length_struct}. There must be a sequence length for each "
            "feature."
        )

    def coerce(
        self,
        feature: int,
        value: Any,
        trailing: tuple[int, ...] | None,
    ) -> np.ndarray[Any, Any]:
        """See `FeatureValues.coerce`."""
        if isinstance(value, Mapping):
            self.refuse({self._names[feature]: value})
        return super().coerce(feature, value, trailing)


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shown(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return f"{type(value).__name__}[]"


def _state_after(
    start: Position, slices: dict[str, tuple[int, int]], group_len: GroupLen, first: int, count: int
) -> State:
    return {
        "parent_state": state_at(start),
        "remainder_slices": slices.copy(),
        "elements_from_buffer_after_checkpoint": group_len.in_state(first + count),
    }
