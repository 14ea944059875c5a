"""The slots of a worker in shared memory, within the budget that all workers share."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._native import Arena
from grainmill._workers.messages import OWN_SLOT_BYTES, slot_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._native import SharedBudget, Slot

# Until it is sent to the parent, a slot holds a file descriptor, of which a process has few.
_MAX_UNSENT_SLOTS = 128
_TASKS_PER_TRIM = 32
# A worker reserves memory without asking only if this many times as much per worker stays free.
_SPARE_PER_WORKER = 2


class SharedArena:
    """Allocates the worker's slots.

    Args:
        shared_budget: The page on which all workers of the pool reserve memory.
        num_workers: How many workers the pool has.
        budget_bytes: Shared memory that all workers together may hold.
        request_memory: Called with a number of bytes; waits until the parent has reserved them.
    """

    def __init__(
        self,
        shared_budget: SharedBudget,
        num_workers: int,
        budget_bytes: int,
        request_memory: Callable[[int], None],
    ) -> None:
        self._num_slots = 0
        self._sent: set[int] = set()  # the numbers of the existing slots that the parent knows
        self._budget_bytes = budget_bytes
        self._usual_bytes = budget_bytes  # beyond these, only what is in use is kept
        self._num_tasks = 0
        self._min_free_bytes = 0
        self._arena = Arena(shared=True)
        self._private_arena = Arena()
        self._shared_budget = shared_budget
        self._spare_factor = _SPARE_PER_WORKER * num_workers
        self._request_memory = request_memory
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._is_busy = False
        self._freed: list[int] = []

    def limit_free(self, byte_len: int) -> None:
        """Keeps free slots of other sizes only while all slots take `byte_len` bytes at most."""
        self._usual_bytes = min(byte_len, self._budget_bytes)

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """An array, in a slot of its own if it is large enough for that.

        If no memory is available, only the main thread waits for it. Arrays of other threads then
        get private memory, which is copied when they are sent. So do arrays that a finalizer
        allocates while this method runs.
        """
        byte_len = math.prod(shape) * np.dtype(dtype).itemsize
        if byte_len < OWN_SLOT_BYTES:
            return self._private_arena.array(shape, dtype)
        with self._exclusive() as exclusive:
            growth = self._growth(byte_len) if exclusive else 0
            if not exclusive or (growth and not self._try_reserve_new_slot(growth)):
                return self._private_arena.array(shape, dtype)
            try:
                with self._counting(growth):
                    array: np.ndarray[Any, Any] = self._arena.array(shape, dtype)
            except ValueError:  # no descriptor is left, so the array will be copied when it is sent
                return self._private_arena.array(shape, dtype)
            return array

    def _try_reserve_new_slot(self, growth: int) -> bool:
        """Reserves `growth` bytes for a new slot; returns whether the slot may be allocated."""
        if self._num_slots - len(self._sent) >= _MAX_UNSENT_SLOTS:
            return False
        if self._try_reserve(growth):
            return True
        if threading.get_ident() != self._thread:
            return False
        self._request_memory(growth)
        return True

    def slot(self, byte_len: int) -> Slot:
        """A slot of `byte_len` bytes."""
        with self._exclusive():
            growth = self._growth(byte_len)
            if growth and not self._try_reserve(growth):
                self._request_memory(growth)
            with self._counting(growth):
                return self._arena.slot(byte_len)

    def _growth(self, byte_len: int) -> int:
        """The bytes by which a slot of `byte_len` bytes would grow the arena.

        If it would, free slots are trimmed first, as they may have sizes that are no longer
        requested: they may take as many bytes as the slots in use, so memory stays within twice
        what is needed, and no more than `limit_free` says.
        """
        growth = self._arena.growth(byte_len)
        if growth:
            in_use = self._arena.total_bytes - self._arena.free_bytes
            usual = max(growth, self._usual_bytes - in_use - growth)
            self._trim(min(max(in_use, growth), usual))
        return growth

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Holds the lock; yields false if this thread is in such a block already."""
        with self._lock:
            if self._is_busy:
                yield False
                return
            self._is_busy = True
            try:
                yield True
            finally:
                self._is_busy = False

    @contextlib.contextmanager
    def _counting(self, reserved: int) -> Iterator[None]:
        """Counts the slot allocated in the block, and releases what it did not use of `reserved`.

        Any thread may free a slot at any time; one freed after the reservation is reused instead of
        allocating a new one. The total bytes of all slots change under the lock only.
        """
        before = self._arena.total_bytes
        try:
            yield
        finally:
            grown = self._arena.total_bytes - before
            self._num_slots += bool(grown)
            self._shared_budget.release(reserved - grown)

    def _try_reserve(self, growth: int) -> bool:
        """Reserves `growth` bytes, freeing unused slots if necessary; returns whether it did."""
        if self._shared_budget.reserve(growth, self._spare_factor * growth):
            return True
        self._trim(0)
        return self._shared_budget.reserve(growth, self._spare_factor * growth)

    def record_sent(self, numbers: list[int]) -> None:
        """Records that slots were sent to the parent."""
        self._sent.update(numbers)

    def retire(self, slot: Slot) -> None:
        """Never uses `slot` again, because a forked child of the parent may still see it."""
        with self._exclusive():
            slot.retire()
            self._num_slots -= 1
            self._sent.discard(slot_number(slot))

    def trim_unused(self) -> None:
        """Frees unused slots that exceed the budget, or that no task has needed for a while."""
        with self._exclusive():
            free = self._arena.free_bytes
            excess = self._shared_budget.reserved - self._budget_bytes
            if free and excess > 0:
                self._trim(max(0, free - excess))
            self._min_free_bytes = min(self._min_free_bytes, free)
            self._num_tasks += 1
            if self._num_tasks % _TASKS_PER_TRIM == 0:
                if self._min_free_bytes:
                    self._trim(max(0, self._arena.free_bytes - self._min_free_bytes))
                self._min_free_bytes = self._arena.free_bytes

    def _trim(self, max_free_bytes: int) -> None:
        before = self._arena.total_bytes
        freed = self._arena.trim(max_free_bytes)
        self._num_slots -= len(freed)
        self._sent.difference_update(freed)
        self._freed += freed
        self._shared_budget.release(before - self._arena.total_bytes)

    def take_freed(self) -> list[int]:
        """The numbers of the slots that were freed since the last call."""
        freed, self._freed = self._freed, []
        return freed
