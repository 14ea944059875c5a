"""One element of each of several open parts in turn."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from grainmill._iterators.opening import Openings
from grainmill._iterators.part import After, Part, fixed
from grainmill._iterators.stage import Block, Stage, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.sequential import Interleave


class InterleaveStage(Stage):
    """Round robin over slots, each of which holds one open part.

    A slot found at its end passes its turn on and takes the next part at its following turn;
    when no parts are left it is passed over. Parts are those of `open_part(0)` to
    `open_part(num_parts - 1)`, each opened when it is first needed or a little ahead. With
    `at_once`, the first pull sets all open parts to work, not only the one whose turn it is.
    """

    def __init__(
        self,
        node: Interleave,
        open_part: Callable[[int], Stage],
        num_parts: int,
        *,
        at_once: bool = False,
    ) -> None:
        super().__init__()
        self._at_once = at_once
        self._at_work = False
        self._num_parts = num_parts
        self._num_slots = min(node.cycle_length, num_parts)
        self._openings = Openings(
            open_part,
            num_parts,
            num_threads=node.num_make_iter_threads,
            ahead=node.make_iter_buffer_size,
        )
        self._slots: list[_Slot] | None = None
        self._turn = 0
        self._next_part = self._num_slots
        self._future: dict[int, State] = {}
        self._before: _Standing | None = None

    def pull(self, limit: int, *, interior: bool = True) -> Block:
        """See `Stage.pull`."""
        if self._at_once and not self._at_work:
            self.start_prefetch()
        slots = self._opened()
        self._openings.look_ahead(self._next_part)
        # A pull that fails may have moved past slots at their end; the state shows it afterwards.
        before = self._before = self._before or self._standing()
        want = -(-limit // max(1, len(slots)))
        found = self._find_turn(want)
        self._before = None
        if not found:
            return Block([], self._standing().state)
        ring, run = self._ring(want, limit)
        standing = self._standing()
        elements: list[Any] = [None] * run
        for turn, number in enumerate(ring[:run]):
            elements[turn :: len(ring)] = slots[number].take(_turns(run, turn, len(ring)))
        self._turn = standing.turn_after(ring, run)
        return Block(elements, lambda k: standing.state_after(ring, k) if k else before.state())

    def _find_turn(self, want: int) -> bool:
        """Moves on to the first slot that has an element; `False` if there is none."""
        slots = self._opened()
        while not self._at_end():
            slot = slots[self._turn]
            if slot.exhausted and self._next_part < self._num_parts:
                slots[self._turn] = slot = self._replaced(slot)
            if not slot.exhausted:
                if slot.part.ready(want):
                    return True
                slot.part.finish()
                slot.exhausted = True
            self._turn = (self._turn + 1) % len(slots)
        return False

    def _at_end(self) -> bool:
        if self._next_part < self._num_parts:
            return False
        return all(slot.exhausted for slot in self._opened())

    def _replaced(self, slot: _Slot) -> _Slot:
        index = self._next_part
        part = Part(self._openings.take(index))
        if index in self._future:
            part.restore(self._future[index])
            self._future = {i: state for i, state in self._future.items() if i != index}
        slot.close()
        self._next_part += 1
        self._openings.look_ahead(self._next_part)
        return _Slot(index, part)

    def _ring(self, want: int, limit: int) -> tuple[list[int], int]:
        """The slots that have the next turns, over and over, and for how many turns."""
        slots = self._opened()
        ring: list[int] = []
        for step in range(len(slots)):
            number = (self._turn + step) % len(slots)
            slot = slots[number]
            if slot.exhausted and self._next_part >= self._num_parts:
                continue
            if len(ring) == limit or slot.exhausted or not slot.part.ready(want):
                return ring, len(ring)
            ring.append(number)
        size = len(ring)
        at_hand = (slots[number].part.at_hand for number in ring)
        return ring, min(limit, *(count * size + turn for turn, count in enumerate(at_hand)))

    def _opened(self) -> list[_Slot]:
        if self._slots is None:
            self._slots = [
                _Slot(index, Part(self._openings.take(index))) for index in range(self._num_slots)
            ]
        return self._slots

    def _standing(self) -> _Standing:
        places = [slot.place for slot in self._opened()]
        return _Standing(self._turn, self._next_part, places, self._future)

    def state(self) -> State:
        """See `Stage.state`; opens the first parts, whose states belong to it."""
        return (self._before or self._standing()).state()

    def restore(self, state: State) -> None:
        """See `Stage.restore`; parts that are open stay so where the state has them too."""
        indices = state["iterators_in_use_indices"]
        if len(indices) != self._num_slots or any(i >= self._num_parts for i in indices):
            raise ValueError(
                f"state was saved with datasets {indices} in use, which do not fit "
                f"{self._num_slots} of {self._num_parts} datasets"
            )
        held = {slot.index: slot for slot in self._slots or ()}
        slots = []
        for index, saved, exhausted in zip(
            indices, state["iterators_in_use_states"], state["exhausted"], strict=True
        ):
            slots.append(self._restored(index, saved, held.pop(index, None), exhausted))
        for slot in held.values():
            slot.close()
        self._openings.close()
        self._slots = slots
        self._at_work = False
        self._before = None
        self._turn = state["next_index_in_cycle"]
        self._next_part = state["next_index_in_datasets"]
        future = state.get("future_states") or {}
        self._future = {int(index): copy.deepcopy(saved) for index, saved in future.items()}

    def _restored(
        self, index: int, saved: State | None, held: _Slot | None, exhausted: int
    ) -> _Slot:
        if held is not None and saved is None and not exhausted:
            held.close()
            held = None
        part = Part(self._openings.take(index)) if held is None else held.part
        slot = _Slot(index, part)
        if exhausted:
            slot.exhausted = True
            slot.saved = fixed(saved)
        elif saved is not None:
            part.restore(saved)
        return slot

    def next_index(self) -> int:
        """See `Stage.next_index`."""
        part = self._only("get_next_index").part
        part.rewind()
        return part.stage.next_index()

    def seek(self, index: int) -> None:
        """See `Stage.seek`."""
        slot = self._only("set_next_index")
        slot.part.seek(index)
        self._at_work = False
        slot.exhausted, slot.saved = False, None

    def _only(self, name: str) -> _Slot:
        if self._num_parts != 1:
            raise NotImplementedError(
                f"{name} is not supported for InterleaveDatasetIterator with more than one dataset."
            )
        return self._opened()[0]

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        for slot in self._opened():
            if not slot.exhausted:
                slot.part.stage.start_prefetch()
        self._at_work = True

    def close(self) -> None:
        """See `Stage.close`."""
        self._openings.close()
        for slot in self._slots or ():
            slot.close()


class _Slot:
    """One place of the round, with the part that is open there."""

    __slots__ = ("exhausted", "index", "part", "saved")

    def __init__(self, index: int, part: Part) -> None:
        self.index = index
        self.part = part
        self.exhausted = False
        self.saved: After | None = None

    @property
    def place(self) -> _SlotPlace:
        after, position = self.part.place if self.saved is None else (self.saved, 0)
        return (self.index, after, position, self.exhausted)

    def take(self, count: int) -> list[Any]:
        return self.part.take(count)

    def close(self) -> None:
        self.part.stage.close()


_SlotPlace = tuple[int, After, int, bool]


class _Standing:
    """Where an interleave stands: whose turn it is, and the place of each slot."""

    __slots__ = ("_future", "_next_part", "_places", "_turn")

    def __init__(
        self, turn: int, next_part: int, places: list[_SlotPlace], future: dict[int, State]
    ) -> None:
        self._turn = turn
        self._next_part = next_part
        self._places = places
        self._future = future

    def turn_after(self, ring: list[int], count: int) -> int:
        """The slot that has its turn after `count` turns of the slots of `ring`."""
        return (ring[(count - 1) % len(ring)] + 1) % len(self._places)

    def state_after(self, ring: list[int], count: int) -> State:
        """The state after `count` turns of the slots of `ring`."""
        places = list(self._places)
        for turn, number in enumerate(ring[:count]):
            index, after, position, exhausted = places[number]
            taken = _turns(count, turn, len(ring))
            places[number] = (index, after, position + taken, exhausted)
        turn = self.turn_after(ring, count)
        return _Standing(turn, self._next_part, places, self._future).state()

    def state(self, _: int = 0) -> State:
        """The state here, a new dict each time."""
        return {
            "next_index_in_cycle": self._turn,
            "next_index_in_datasets": self._next_part,
            "iterators_in_use_indices": [index for index, *_ in self._places],
            "iterators_in_use_states": [after(place) for _, after, place, _ in self._places],
            "exhausted": [int(exhausted) for *_, exhausted in self._places],
            "future_states": {
                str(index): copy.deepcopy(state) for index, state in self._future.items()
            },
        }


def _turns(count: int, turn: int, size: int) -> int:
    """How many of `count` turns the one at `turn` of a round of `size` has."""
    return (count - turn + size - 1) // size
