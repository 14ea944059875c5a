"""One element of each of several open parts in turn."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grainmill._iterators.cursor import END, Cursor, ResumePoint, fixed
from grainmill._iterators.opening import ConcurrentOpener
from grainmill._iterators.saved import Saved
from grainmill._iterators.stage import Block, Stage, State
from grainmill._iterators.turns import AT_ONCE, turns
from grainmill._plan.closing import closed_error
from grainmill._plan.notes import add_note, located

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.sequential import Interleave


class InterleaveStage(Stage):
    """Round robin over slots, each of which holds one open part.

    A slot found at its end passes its turn on and takes the next part at its following turn;
    when no parts are left it is passed over. Parts are those of `open_part(0)` to
    `open_part(num_parts - 1)`, each opened when it is first needed or a little ahead. With
    `at_once`, the first pull sets all open parts to work, not only the one whose turn it is.

    No part is asked before its turn; those that have elements at hand give whole rounds. Messages
    about states call it `name`, or by its node.
    """

    def __init__(
        self,
        node: Interleave,
        open_part: Callable[[int], Stage],
        num_parts: int,
        *,
        at_once: bool = False,
        name: object = None,
    ) -> None:
        super().__init__()
        self._name = node if name is None else name
        self._node = node
        self._at_once = at_once
        self._at_work = False
        self._cancelled = False
        self._num_parts = num_parts
        self._num_slots = min(node.cycle_length, num_parts)
        self._openings = ConcurrentOpener(
            open_part,
            num_parts,
            num_threads=node.num_make_iter_threads,
            ahead=node.make_iter_buffer_size,
        )
        self._slots: list[_OpenDataset] | None = None
        self._turn = 0
        self._next_part = self._num_slots
        self._num_exhausted = 0
        self._future: dict[int, State] = {}
        self._changed: list[tuple[int, _SlotPlace]] = []  # slots, since last looked at

    @property
    def pull_size(self) -> int:
        """See `Stage.pull_size`."""
        return AT_ONCE

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`."""
        if self._at_once and not self._at_work:
            self.start_prefetch()
        self._opened()
        self._openings.look_ahead(self._next_part)
        self._changed = []
        base = self._standing()
        if self._at_end():
            return Block([], base.state)
        block = self._rounds(limit, base)
        if block is not None:
            return block
        if not any(slot.cursor.is_lazy for slot in self._opened()):
            limit = min(limit, self._num_slots)  # then all have some at hand
        return turns(self._step, self._move, base.state_after_moves, limit)

    def _rounds(self, limit: int, base: _Standing) -> Block | None:
        """Elements that the slots have at hand, up to the first turn of one that has none."""
        slots = self._opened()
        ring: list[int] = []
        at_hand: list[int] = []
        run = limit
        for step in range(len(slots)):
            number = (self._turn + step) % len(slots)
            slot = slots[number]
            if slot.exhausted and self._next_part >= self._num_parts:
                continue
            count = 0 if slot.exhausted else slot.cursor.at_hand
            if not count:
                run = len(ring)
                break
            ring.append(number)
            at_hand.append(count)
        if not ring:
            return None
        size = len(ring)
        run = min(run, *(count * size + turn for turn, count in enumerate(at_hand)))
        elements: list[Any] = [None] * run
        for turn, number in enumerate(ring[:run]):
            elements[turn::size] = slots[number].cursor.take(_turns(run, turn, size))
        self._turn = base.turn_after(ring, run)
        return Block(elements, functools.partial(base.state_after, ring))

    def _step(self) -> Any:
        """Takes the element of the next slot that has one; `END` if there is none."""
        slots = self._opened()
        while not self._at_end():
            number = self._turn
            slot = slots[number]
            if slot.exhausted and self._next_part < self._num_parts:
                slots[number] = slot = self._replaced(slot)
                self._check_open()
                self._num_exhausted -= 1
            element = END
            if not slot.exhausted:
                element = slot.cursor.next()
                if element is END:
                    slot.exhausted = True
                    self._num_exhausted += 1
                self._changed.append((number, slot.place))
            self._turn = (number + 1) % len(slots)
            if element is not END:
                return element
        return END

    def _move(self) -> _Move:
        """What has changed since the last look."""
        changed, self._changed = self._changed, []
        return self._turn, self._next_part, self._future, changed

    def _at_end(self) -> bool:
        return self._next_part >= self._num_parts and self._num_exhausted >= self._num_slots

    def _replaced(self, slot: _OpenDataset) -> _OpenDataset:
        index = self._next_part
        cursor = Cursor(self._taken(index))
        if index in self._future:
            cursor.restore(self._future[index])
            self._future = {i: state for i, state in self._future.items() if i != index}
        slot.close()
        self._next_part += 1
        self._openings.look_ahead(self._next_part)
        return _OpenDataset(index, cursor)

    def _opened(self) -> list[_OpenDataset]:
        if self._slots is None:
            self._slots = [
                _OpenDataset(index, Cursor(self._taken(index))) for index in range(self._num_slots)
            ]
            self._check_open()
        return self._slots

    def _taken(self, index: int) -> Stage:
        """The part `index`, from its start."""
        try:
            return self._openings.take(index)
        except Exception as failure:
            if self._node.added_at:
                add_note(failure, [f"while opening dataset {index} of {located(self._node)}"])
            raise

    def _standing(self) -> _Standing:
        places = [slot.place for slot in self._opened()]
        return _Standing(self._turn, self._next_part, places, self._future)

    def state(self) -> State:
        """See `Stage.state`; opens the first parts, whose states belong to it."""
        return self._standing().state()

    def restore(self, state: State) -> None:
        """See `Stage.restore`; parts that are open stay so where the state has them too."""
        saved_places, turn, next_part, future = self._checked(state)
        held = {slot.index: slot for slot in self._slots or ()}
        slots = []
        for index, saved, exhausted in saved_places:
            slots.append(self._restored(index, saved, held.pop(index, None), exhausted))
        for slot in held.values():
            slot.close()
        self._openings.close()
        self._slots = slots
        self._check_open()
        self._num_exhausted = sum(slot.exhausted for slot in slots)
        self._at_work = False
        self._turn = turn
        self._next_part = next_part
        self._future = {index: copy.deepcopy(saved) for index, saved in future.items()}

    def _checked(
        self, state: State
    ) -> tuple[list[tuple[int, State | None, bool]], int, int, dict[int, State]]:
        """The slots of `state`, whose turn it is, the next part, and states of later parts."""
        saved = Saved(self._name, state, _KEYS, _OPTIONAL_KEYS)
        num_slots, num_parts = self._num_slots, self._num_parts
        slots = f"the {num_slots} that are open at a time, of {num_parts}"
        indices = [
            saved.checked_index(f"`{_INDICES}`, entry {slot},", index, num_parts - 1)
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
        least = max(indices, default=-1) + 1  # those in use were opened in their order
        next_part = saved.index("next_index_in_datasets", num_parts, least)
        future = state.get("future_states") or {}
        if not isinstance(future, dict):
            expected = "must be a dict with indices of datasets"
            raise saved.refusal("`future_states`", expected, future)
        of_later = {
            saved.checked_index("a key of `future_states`", _number(index), num_parts - 1): of_part
            for index, of_part in future.items()
        }
        return list(zip(indices, states, exhausted, strict=True)), turn, next_part, of_later

    def _restored(
        self,
        index: int,
        saved: State | None,
        held: _OpenDataset | None,
        exhausted: bool,  # noqa: FBT001 - as states have it
    ) -> _OpenDataset:
        if held is not None and saved is None and not exhausted:
            held.close()
            held = None
        cursor = Cursor(self._taken(index)) if held is None else held.cursor
        slot = _OpenDataset(index, cursor)
        if saved is not None:
            cursor.restore(saved)
        if exhausted:
            slot.exhausted = True
            slot.saved = (fixed(saved), 0)
        return slot

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        return self._only("get_next_index").cursor.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        slot = self._only("set_next_index")
        slot.cursor.seek(index)
        self._at_work = False
        slot.exhausted, slot.saved = False, None
        self._num_exhausted = 0

    def _only(self, name: str) -> _OpenDataset:
        if self._num_parts != 1:
            raise NotImplementedError(
                f"{name} is not supported for InterleaveDatasetIterator with more than one dataset."
            )
        return self._opened()[0]

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        for slot in self._opened():
            if not slot.exhausted:
                slot.cursor.stage.start_prefetch()
        self._at_work = True

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True
        self._openings.cancel()
        for slot in tuple(self._slots or ()):
            slot.cursor.stage.cancel()

    def _check_open(self) -> None:
        """Raises `ValueError` after `cancel`, which knows nothing of a part opened since."""
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:
        """See `Stage.close`."""
        self._openings.close()
        for slot in self._slots or ():
            slot.close()


class _OpenDataset:
    """One place of the round, with the part that is open there."""

    __slots__ = ("cursor", "exhausted", "index", "saved")

    def __init__(self, index: int, cursor: Cursor) -> None:
        self.index = index
        self.cursor = cursor
        self.exhausted = False
        self.saved: ResumePoint | None = None

    @property
    def place(self) -> _SlotPlace:
        return self.index, self.saved or self.cursor.place(), self.exhausted

    def close(self) -> None:
        self.cursor.stage.close()


_SlotPlace: TypeAlias = tuple[int, ResumePoint, bool]

_Move: TypeAlias = "tuple[int, int, dict[int, State], list[tuple[int, _SlotPlace]]]"
"""Whose turn it is, the next part, what was saved of later ones, and slots that have changed."""


class _Standing(NamedTuple):
    """Where an interleave stands: whose turn it is, and the place of each slot."""

    turn: int
    next_part: int
    places: list[_SlotPlace]
    future: dict[int, State]

    def turn_after(self, ring: list[int], count: int) -> int:
        """The slot that has its turn after `count` turns of the slots of `ring`."""
        return (ring[(count - 1) % len(ring)] + 1) % len(self.places) if count else self.turn

    def state_after(self, ring: list[int], count: int) -> State:
        """The state after `count` turns of the slots of `ring`."""
        places = self.places.copy()
        for turn, number in enumerate(ring[:count]):
            index, (after, position), exhausted = places[number]
            taken = _turns(count, turn, len(ring))
            places[number] = (index, (after, position + taken), exhausted)
        return self._replace(turn=self.turn_after(ring, count), places=places).state()

    def state_after_moves(self, moves: list[_Move]) -> State:
        """The state after these."""
        places = self.places.copy()
        for _, _, _, changed in moves:
            for number, place in changed:
                places[number] = place
        turn, next_part, future, _ = moves[-1]
        return _Standing(turn, next_part, places, future).state()

    def state(self, _: int = 0) -> State:
        """The state here, a new dict each time."""
        return {
            "next_index_in_cycle": self.turn,
            "next_index_in_datasets": self.next_part,
            "iterators_in_use_indices": [index for index, *_ in self.places],
            "iterators_in_use_states": [after(taken) for _, (after, taken), _ in self.places],
            "exhausted": [int(exhausted) for *_, exhausted in self.places],
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
    """The integer that a key of JSON stands for, if it does."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _turns(count: int, turn: int, size: int) -> int:
    """How many of `count` turns the one at `turn` of a round of `size` has."""
    return (count - turn + size - 1) // size
