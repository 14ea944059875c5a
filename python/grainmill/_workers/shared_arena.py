"""The slots of a worker, which its parent can map, within the memory that all workers share."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._native import Arena
from grainmill._workers.messages import OWN_SLOT_BYTES, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._native import SharedBudget, Slot

# Slots that the parent was not sent yet hold a descriptor each, of those that a process may have.
_MOST_UNSENT = 128
_TASKS_UNTIL_TIDY = 32
# What a worker takes without asking leaves room for so many like it from each of the others.
_SPARE_PER_WORKER = 2


class SharedArena:
    """The worker's slots, within the memory that all workers have together."""

    def __init__(
        self, shared_budget: SharedBudget, count: int, budget_bytes: int, ask: Callable[[int], None]
    ) -> None:
        self._num_made = 0
        self._sent: set[int] = set()  # of the slots there are, those that the parent knows
        self._budget_bytes = budget_bytes
        self._num_tasks = 0
        self._least_free = 0
        self._arena = Arena(shared=True)
        self._private = Arena()
        self._shared_budget = shared_budget
        self._spare = _SPARE_PER_WORKER * count
        self._ask = ask
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._busy = False
        self._dropped: list[int] = []

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """An array in a slot of its own, where it is large enough for that.

        Only the thread that does the tasks can wait for room: where there is none, the arrays of
        others lie in memory of their own, to be copied when they are sent. So do those of a
        finalizer that the collector runs in the middle of this.
        """
        byte_len = math.prod(shape) * np.dtype(dtype).itemsize
        if byte_len < OWN_SLOT_BYTES:
            return self._private.array(shape, dtype)
        with self._alone() as alone:
            growth = self._growth(byte_len) if alone else 0
            if not alone or (growth and not self._affords(growth)):
                return self._private.array(shape, dtype)
            try:
                with self._settled(growth):
                    array: np.ndarray[Any, Any] = self._arena.array(shape, dtype)
            except ValueError:  # no descriptor is left: then by copy, through the one that is
                return self._private.array(shape, dtype)
            return array

    def _affords(self, growth: int) -> bool:
        """Whether a batch may have a slot of its own that is new; if so, it is reserved."""
        if self._num_made - len(self._sent) >= _MOST_UNSENT:
            return False
        if self._reserve(growth):
            return True
        if threading.get_ident() != self._thread:
            return False
        self._ask(growth)
        return True

    def slot(self, byte_len: int) -> Slot:
        """A slot of `byte_len` bytes."""
        with self._alone():
            growth = self._growth(byte_len)
            if growth and not self._reserve(growth):
                self._ask(growth)
            with self._settled(growth):
                return self._arena.slot(byte_len)

    def _growth(self, byte_len: int) -> int:
        """Bytes that a slot of `byte_len` bytes adds.

        One that is made has others give way that wait, of sizes that no longer come: they may
        take as much as those in use, so that memory stays within twice what is needed.
        """
        growth = self._arena.growth(byte_len)
        if growth:
            in_use = self._arena.total_bytes - self._arena.free_bytes
            self._trim(max(in_use, growth))
        return growth

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Waits for other threads; gives whether this one is not in the middle of it already."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False

    @contextlib.contextmanager
    def _settled(self, reserved: int) -> Iterator[None]:
        """Gives back what the slot that is made meanwhile does not need of `reserved` bytes.

        Slots come back on any thread, at any time: one that did so after the bytes were reserved
        is used in place of a new one. The bytes of all slots change under the lock only.
        """
        before = self._arena.total_bytes
        try:
            yield
        finally:
            grown = self._arena.total_bytes - before
            self._num_made += bool(grown)
            self._shared_budget.release(reserved - grown)

    def _reserve(self, growth: int) -> bool:
        """Reserves `growth` bytes, in place of slots that wait if need be; says whether."""
        if self._shared_budget.reserve(growth, self._spare * growth):
            return True
        self._trim(0)
        return self._shared_budget.reserve(growth, self._spare * growth)

    def note_sent(self, numbers: list[int]) -> None:
        """Takes note that the parent has slots from now on."""
        self._sent.update(numbers)

    def give_up(self, slot: Slot) -> None:
        """Takes a slot that the parent has out of use for good."""
        with self._alone():
            slot.give_up()
            self._num_made -= 1
            self._sent.discard(number_of(slot))

    def tidy(self) -> None:
        """Gives back slots that are too many, or that no task has needed for a while."""
        with self._alone():
            free = self._arena.free_bytes
            excess = self._shared_budget.reserved - self._budget_bytes
            if free and excess > 0:
                self._trim(max(0, free - excess))
            self._least_free = min(self._least_free, free)
            self._num_tasks += 1
            if self._num_tasks % _TASKS_UNTIL_TIDY == 0:
                if self._least_free:
                    self._trim(max(0, self._arena.free_bytes - self._least_free))
                self._least_free = self._arena.free_bytes

    def _trim(self, most_free: int) -> None:
        before = self._arena.total_bytes
        dropped = self._arena.trim(most_free)
        self._num_made -= len(dropped)
        self._sent.difference_update(dropped)
        self._dropped += dropped
        self._shared_budget.release(before - self._arena.total_bytes)

    def take_dropped(self) -> list[int]:
        """The slots that are gone since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped
