"""Round robin over several open datasets, one element of each at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from grainmill._interrupts import raise_interrupt
from grainmill._iterators.base.checked_state import CheckedState, refusal
from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.base.lazy_block import PULL_SIZE, lazy_block
from grainmill._iterators.base.node import Origin, SequentialNode, origins, plan_of
from grainmill._iterators.base.position import Position, of_state, state_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._iterators.concurrent_opener import ConcurrentOpener
from grainmill._iterators.open import open_part
from grainmill._iterators.pack_in_thread import PackInThreadStage
from grainmill._iterators.read import ReadStage
from grainmill._iterators.shard_states import ENDED, by_dataset, of_datasets
from grainmill._iterators.thread_prefetch import ThreadPrefetch, ThreadPrefetchStage
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import checked_integer, wrong_type
from grainmill._plan.closing import closed_error
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._plan.node import Node, Share


@lazy_dataclass
class Interleave(SequentialNode):
    """One element from each of several open iterators in turn.

    `datasets` is indexed to get datasets; it is not a parent, so seeds do not pass through.
    """

    datasets: Any
    cycle_length: int
    num_make_iter_threads: int = 0
    make_iter_buffer_size: int = 0
    iter_buffer_size: int = 1
    dataset_name: ClassVar[str] = "InterleaveIterDataset"
    saves: ClassVar[str] = "whose turn it is, and the state of each open dataset"
    keeps_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        datasets = self.datasets
        if not (hasattr(datasets, "__len__") and hasattr(datasets, "__getitem__")):
            expected = "`datasets` must be a sequence of datasets or a `MapDataset` of datasets"
            raise wrong_type(expected, datasets)
        self._set(cycle_length=checked_integer(self.cycle_length, "cycle_length", minimum=1))
        for name in ("num_make_iter_threads", "make_iter_buffer_size", "iter_buffer_size"):
            self._set(**{name: checked_integer(getattr(self, name), name, minimum=0)})

    def spec(self, spec_of: Callable[[Any], Any]) -> Any:
        """See `Node.spec`; the spec of its first dataset."""
        return spec_of(self.datasets[0])

    def share(self, share: Share) -> Node:
        """See `Node.share`; a worker opens every n-th dataset."""
        return dataclasses.replace(self, datasets=share.of_datasets(self.datasets))

    def set_datasets(self, datasets: Any) -> None:
        """Replaces `datasets`, for datasets already derived from this node, too."""
        self._set(datasets=datasets)

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        prefetch = self.iter_buffer_size > 1

        def open_dataset(index: int) -> Stage:
            dataset = self.datasets[index]
            if not (hasattr(dataset, "_plan_node") or hasattr(dataset, "to_iter_dataset")):
                raise wrong_type(f"`datasets[{index}]` of {self} must be a dataset", dataset)
            stage = open_part(self, plan_of(dataset), context)
            if prefetch and not isinstance(stage, ReadStage | PackInThreadStage):  # these prefetch
                stage = ThreadPrefetchStage(ThreadPrefetch((), self.iter_buffer_size), stage)
                stage.node, stage.recorder = self, context.recorder
            return stage

        return InterleaveStage(self, open_dataset, len(self.datasets), start_all=prefetch)

    @property
    def opens(self) -> Any:
        """See `Node.opens`."""
        return self.datasets

    @property
    def opened_plan(self) -> Node | None:
        """See `Node.opened_plan`."""
        is_known = isinstance(self.datasets, list | tuple) and self.datasets
        return plan_of(self.datasets[0]) if is_known else None

    @property
    def num_readers(self) -> int:
        """See `SequentialNode.num_readers`."""
        return min(self.cycle_length, len(self.datasets))

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        return []

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        number, *states = in_turn(before, after)
        return origins(plan_of(self.datasets[number]), *states)


def in_turn(before: State, after: State) -> tuple[int, State, State]:
    """The number of the dataset whose turn was last, and its two states."""
    indices = after["iterators_in_use_indices"]
    slot = (after["next_index_in_cycle"] - 1) % len(indices)
    states = [state["iterators_in_use_states"][slot] for state in (before, after)]
    return indices[slot], states[0], states[1]


class InterleaveStage(Stage):
    """Round robin over slots, each of which holds one open dataset.

    A slot whose dataset ends passes its turn on and takes the next dataset at its following turn;
    when no datasets are left it is skipped. No dataset is pulled from before its turn. Where all
    have computed elements ready, whole rounds are returned as one block.

    Args:
        node: The node that describes the interleave.
        open_dataset: Opens dataset `i`, from 0 to `num_datasets - 1`; called when it is first
            needed, or for a few datasets ahead.
        num_datasets: How many there are.
        start_all: Whether the first pull starts prefetching in all open datasets.
        name: What messages about states call the stage; `node` if `None`.
    """

    pull_size = PULL_SIZE

    def __init__(
        self,
        node: Interleave,
        open_dataset: Callable[[int], Stage],
        num_datasets: int,
        *,
        start_all: bool = False,
        name: object = None,
    ) -> None:
        super().__init__()
        self._name = node if name is None else name
        self._node = node
        self._start_all = start_all
        self._prefetching = False
        self._cancelled = False
        self._open_dataset = open_dataset
        self._num_datasets = num_datasets
        self._num_slots = min(node.cycle_length, num_datasets)
        self._opener = ConcurrentOpener(
            open_dataset,
            num_datasets,
            num_threads=node.num_make_iter_threads,
            num_ahead=node.make_iter_buffer_size,
        )
        self._slots: list[_OpenDataset] | None = None
        self._turn = 0
        self._next_dataset = self._num_slots
        self._num_exhausted = 0
        self._future: dict[int, State | None] = {}  # restored states of datasets not yet opened
        self._changed: list[tuple[int, _SlotPosition]] = []  # slots, since the last `_changes`

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        if self._start_all and not self._prefetching:
            self.start_prefetch()
        self._opened()
        self._opener.open_next(self._next_dataset)
        self._changed = []
        base = self._position()
        if self._at_end():
            return Block([], base.state)
        block = self._ready_block(limit, base)
        if block is not None:
            return block
        if not any(slot.cursor.is_lazy for slot in self._opened()):
            limit = min(limit, self._num_slots)  # after that, all have elements ready
        return lazy_block(self._step, self._changes, base.state_after_changes, limit)

    def _ready_block(self, limit: int, base: _Position) -> Block | None:
        """The elements that are ready, up to the first turn of a slot that has none."""
        slots = self._opened()
        ring: list[int] = []  # the slots that have a turn in each round, in order
        ready: list[int] = []  # how many elements each of them has
        run = limit
        for step in range(len(slots)):
            number = (self._turn + step) % len(slots)
            slot = slots[number]
            if slot.exhausted and self._next_dataset >= self._num_datasets:
                continue
            count = 0 if slot.exhausted else slot.cursor.num_ready
            if not count:
                run = len(ring)
                break
            ring.append(number)
            ready.append(count)
        if not ring:
            return None
        size = len(ring)
        run = min(run, *(count * size + turn for turn, count in enumerate(ready)))
        elements: list[Any] = [None] * run
        for turn, number in enumerate(ring[:run]):
            elements[turn::size] = slots[number].cursor.take(_num_turns(run, turn, size))
        self._turn = base.turn_after(ring, run)
        return Block(elements, functools.partial(base.state_after, ring))

    def _step(self) -> Any:
        """Takes the element of the next slot that has one; `END` if there is none."""
        slots = self._opened()
        while not self._at_end():
            number = self._turn
            slot = slots[number]
            if slot.exhausted and self._next_dataset < self._num_datasets:
                ended, slot = slot, self._next_opened()
                slots[number] = slot
                ended.close()
                self._check_open()
                self._num_exhausted -= 1
            element = END
            if not slot.exhausted:
                element = slot.cursor.next()
                if element is END:
                    slot.exhausted = True
                    self._num_exhausted += 1
                self._changed.append((number, slot.position))
            self._turn = (number + 1) % len(slots)
            if element is not END:
                return element
        return END

    def _changes(self) -> _Change:
        """The changes since the last call."""
        changed, self._changed = self._changed, []
        return self._turn, self._next_dataset, self._future, changed

    def _at_end(self) -> bool:
        return self._next_dataset >= self._num_datasets and self._num_exhausted >= self._num_slots

    def _next_opened(self) -> _OpenDataset:
        index = self._next_dataset
        cursor = Cursor(self._take_opened(index))
        saved = self._future.get(index)
        if saved is not None:
            cursor.restore(saved)
            self._future = {i: state for i, state in self._future.items() if i != index}
        self._next_dataset += 1
        self._skip_ended()
        self._opener.open_next(self._next_dataset)
        return _OpenDataset(index, cursor)

    def _skip_ended(self) -> None:
        """Moves on to the next dataset that is not known to have ended."""
        while self._future.get(self._next_dataset, self) is ENDED:
            self._next_dataset += 1

    def _opened(self) -> list[_OpenDataset]:
        if self._slots is None:
            self._slots = [
                _OpenDataset(index, Cursor(self._take_opened(index)))
                for index in range(self._num_slots)
            ]
            self._check_open()
        return self._slots

    def _take_opened(self, index: int) -> Stage:
        """The dataset `index` at its start."""
        try:
            return self._opener.take(index)
        except Exception as failure:
            raise_interrupt(failure)
            if self._node.added_at:
                add_note(failure, [f"while opening dataset {index} of {located(self._node)}"])
            raise

    def _position(self) -> _Position:
        slots = [slot.position for slot in self._opened()]
        return _Position(self._turn, self._next_dataset, slots, self._future)

    def state(self) -> State:
        """See `Stage.state`; opens the first datasets, whose states are part of it."""
        return self._position().state()

    def restore(self, state: State) -> None:
        """See `Stage.restore`; open datasets that the state also has are reused."""
        saved_slots, turn, next_dataset, future = self._checked(state)
        open_slots = {slot.index: slot for slot in self._slots or ()}
        slots = []
        for index, saved, exhausted in saved_slots:
            slots.append(self._restored(index, saved, open_slots.pop(index, None), exhausted))
        for slot in open_slots.values():
            slot.close()
        self._opener.close()
        self._slots = slots
        self._check_open()
        self._num_exhausted = sum(slot.exhausted for slot in slots)
        self._prefetching = False
        self._turn = turn
        self._next_dataset = next_dataset
        self._future = {index: copy.deepcopy(saved) for index, saved in future.items()}
        self._skip_ended()

    def shard_states(self, state: State) -> list[dict[str, Any]]:
        """The states of all datasets in `state`; those that were not opened are, for a moment."""
        return by_dataset(state, self._num_datasets, self._start_state)

    def state_of_shards(self, shards: Sequence[Any]) -> State:
        """The state in which each dataset has its state in `shards`; see `shard_states`.

        Raises:
            ValueError: There is another number of states, or one has another form.
        """
        if len(shards) != self._num_datasets:
            expected = f"must be one for each of the {self._num_datasets} datasets"
            raise refusal(self._name, "shard states", expected, f"{len(shards)} of them")
        return of_datasets(shards, self._num_slots, self._name)

    def _start_state(self, index: int) -> State:
        stage = self._open_dataset(index)
        try:
            return stage.state()
        finally:
            stage.close()

    def _checked(
        self, state: State
    ) -> tuple[list[tuple[int, State | None, bool]], int, int, dict[int, State | None]]:
        """The slots of `state`, the next turn, the next dataset, and states of later datasets."""
        saved = CheckedState(self._name, state, _KEYS, _OPTIONAL_KEYS)
        num_slots, num_datasets = self._num_slots, self._num_datasets
        slots = f"the {num_slots} that are open at a time, of {num_datasets}"
        indices = [
            saved.checked_index(f"`{_INDICES}`, entry {slot},", index, num_datasets - 1)
            for slot, index in enumerate(saved.list_of(_INDICES, num_slots, slots))
        ]
        if len(set(indices)) != num_slots:
            raise saved.refusal(f"`{_INDICES}`", "must name each dataset once", indices)
        exhausted = [
            saved.checked_flag(f"`exhausted`, entry {slot},", flag)
            for slot, flag in enumerate(saved.list_of("exhausted", num_slots, slots))
        ]
        states = saved.list_of("iterators_in_use_states", num_slots, slots)
        turn = saved.index("next_index_in_cycle", max(0, num_slots - 1))
        minimum = max(indices, default=-1) + 1  # datasets are opened in order
        next_dataset = saved.index("next_index_in_datasets", num_datasets, minimum)
        future = state.get("future_states") or {}
        if not isinstance(future, dict):
            expected = "must be a dict with indices of datasets"
            raise saved.refusal("`future_states`", expected, future)
        future_states = {
            saved.checked_index("a key of `future_states`", _number(key), num_datasets - 1): value
            for key, value in future.items()
        }
        return list(zip(indices, states, exhausted, strict=True)), turn, next_dataset, future_states

    def _restored(
        self,
        index: int,
        saved: State | None,
        opened: _OpenDataset | None,
        exhausted: bool,  # noqa: FBT001 - as states have it
    ) -> _OpenDataset:
        if opened is not None and saved is None and not exhausted:
            opened.close()
            opened = None
        cursor = Cursor(self._take_opened(index)) if opened is None else opened.cursor
        slot = _OpenDataset(index, cursor)
        if saved is not None:
            cursor.restore(saved)
        if exhausted:
            slot.exhausted = True
            slot.saved = of_state(saved)
        return slot

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._only("get_next_index").cursor.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        slot = self._only("set_next_index")
        slot.cursor.seek(index)
        self._prefetching = False
        slot.exhausted, slot.saved = False, None
        self._num_exhausted = 0

    def _only(self, name: str) -> _OpenDataset:
        if self._num_datasets != 1:
            raise NotImplementedError(
                f"{name} is not supported for InterleaveDatasetIterator with more than one dataset."
            )
        return self._opened()[0]

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        for slot in self._opened():
            if not slot.exhausted:
                slot.cursor.stage.start_prefetch()
        self._prefetching = True

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True
        self._opener.cancel()
        for slot in tuple(self._slots or ()):
            slot.cursor.stage.cancel()

    def _check_open(self) -> None:
        """Raises `ValueError` after `cancel`, which did not reach a dataset opened since."""
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:
        """See `Stage.close`."""
        self._opener.close()
        for slot in self._slots or ():
            slot.close()


class _OpenDataset:
    """A slot and the dataset that is open in it."""

    __slots__ = ("cursor", "exhausted", "index", "saved")

    def __init__(self, index: int, cursor: Cursor) -> None:
        self.index = index
        self.cursor = cursor
        self.exhausted = False
        self.saved: Position | None = None

    @property
    def position(self) -> _SlotPosition:
        return self.index, self.saved or self.cursor.position(), self.exhausted

    def close(self) -> None:
        self.cursor.stage.close()


_SlotPosition: TypeAlias = tuple[int, Position, bool]
"""The index of the slot's dataset, its position, and whether it is exhausted."""
_Change: TypeAlias = "tuple[int, int, dict[int, State | None], list[tuple[int, _SlotPosition]]]"
"""The next turn, the next dataset, states of later ones, and the slots that changed."""


class _Position(NamedTuple):
    """The position of an interleave: the slot whose turn is next, and the position of each slot."""

    turn: int
    next_dataset: int
    slots: list[_SlotPosition]
    future: dict[int, State | None]

    def turn_after(self, ring: list[int], count: int) -> int:
        """The slot whose turn follows `count` turns of the slots of `ring`."""
        return (ring[(count - 1) % len(ring)] + 1) % len(self.slots) if count else self.turn

    def state_after(self, ring: list[int], count: int) -> State:
        """The state after `count` turns of the slots of `ring`."""
        slots = self.slots.copy()
        for turn, number in enumerate(ring[:count]):
            index, (after, position), exhausted = slots[number]
            num_taken = _num_turns(count, turn, len(ring))
            slots[number] = (index, (after, position + num_taken), exhausted)
        return self._replace(turn=self.turn_after(ring, count), slots=slots).state()

    def state_after_changes(self, changes: list[_Change]) -> State:
        """The state after these changes."""
        slots = self.slots.copy()
        for _, _, _, changed in changes:
            for number, slot in changed:
                slots[number] = slot
        turn, next_dataset, future, _ = changes[-1]
        return _Position(turn, next_dataset, slots, future).state()

    def state(self, _: int = 0) -> State:
        """The state at this position, a new dict each time."""
        return {
            "next_index_in_cycle": self.turn,
            "next_index_in_datasets": self.next_dataset,
            "iterators_in_use_indices": [index for index, *_ in self.slots],
            "iterators_in_use_states": [state_at(position) for _, position, _ in self.slots],
            "exhausted": [int(exhausted) for *_, exhausted in self.slots],
            "future_states": {
                str(index): copy.deepcopy(state) for index, state in self.future.items()
            },
        }


_INDICES = "iterators_in_use_indices"
_KEYS = (
    "next_index_in_cycle",
    "next_index_in_datasets",
    _INDICES,
    "iterators_in_use_states",
    "exhausted",
)
_OPTIONAL_KEYS = ("future_states",)


def _number(key: Any) -> Any:
    """The integer that a JSON key spells, or the key itself."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _num_turns(count: int, turn: int, size: int) -> int:
    """How many of `count` turns fall to number `turn` of a round of `size`."""
    return (count - turn + size - 1) // size
