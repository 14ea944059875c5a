"""Slots shared by two processes: who owns them, and how they count against the budget."""

import os

import numpy as np
import pytest

from grainmill._native import (
    Arena,
    RemoteSlots,
    SharedBudget,
    after_fork,
    before_fork,
    slot_of,
    write_arrays,
)
from grainmill._workers.shared_arena import SharedArena

SLOT_BYTES = 1 << 20
BYTE = np.dtype(np.uint8)


def budget_of(num_slots):
    shared_budget, file = SharedBudget.create(1, num_slots * SLOT_BYTES)
    os.close(file)
    return shared_budget


@pytest.mark.parametrize(
    "make",
    [lambda arena: arena.slot(SLOT_BYTES), lambda arena: arena.array((SLOT_BYTES,), BYTE)],
    ids=["slot", "array"],
)
def test_slot_that_returns_while_its_like_is_reserved_counts_once(make):
    """Another thread may drop an array at any time, even while a worker waits for memory."""
    shared_budget = budget_of(1)
    held = []

    def request_memory(byte_len):
        shared_budget.reserve_anyway(byte_len)
        held.clear()

    arena = SharedArena(shared_budget, 1, SLOT_BYTES, request_memory)
    for _ in range(3):
        slot_or_array = make(arena)
        held.append(slot_or_array)
        del slot_or_array
        assert shared_budget.reserved == SLOT_BYTES


def test_array_that_a_finalizer_asks_for_meanwhile_lies_elsewhere():
    """The garbage collector may run a finalizer at any point."""
    shared_budget = budget_of(1)
    arrays = []

    def request_memory(byte_len):
        arrays.append(arena.array((SLOT_BYTES,), BYTE))
        shared_budget.reserve_anyway(byte_len)

    arena = SharedArena(shared_budget, 1, SLOT_BYTES, request_memory)
    slots = [arena.slot(SLOT_BYTES) for _ in range(2)]
    assert len(arrays) == 2
    assert shared_budget.reserved == len(slots) * SLOT_BYTES
    assert slot_of(arrays[0]) is None


def test_slots_of_sizes_that_no_longer_come_do_not_pile_up():
    """Messages differ in size, as the number of elements in a task follows their cost."""
    shared_budget = budget_of(10_000)
    arena = SharedArena(shared_budget, 1, 10_000 * SLOT_BYTES, lambda _: None)
    in_use, max_reserved = [], 0
    for turn in range(300):
        in_use = [*in_use[-2:], arena.slot(SLOT_BYTES * (1 + turn * 7 % 40))]
        max_reserved = max(max_reserved, shared_budget.reserved)
    largest = 40 * SLOT_BYTES * 9 // 8
    # Three slots in use, and free slots of the same total size.
    assert max_reserved <= 2 * 3 * largest
    assert shared_budget.reserved < 300 * SLOT_BYTES


def test_slot_serves_again_for_what_is_a_little_smaller():
    shared_budget = budget_of(100)
    arena = SharedArena(shared_budget, 1, 100 * SLOT_BYTES, lambda _: None)
    first = arena.slot(10 * SLOT_BYTES)
    number, reserved = first.shared_id, shared_budget.reserved
    del first
    for size in (9, 7, 5, 10):
        assert arena.slot(size * SLOT_BYTES).shared_id == number
    assert shared_budget.reserved == reserved
    assert arena.slot(SLOT_BYTES).shared_id != number


def test_bytes_reserved_for_an_array_that_cannot_be_made_are_given_back():
    shared_budget = budget_of(64)
    arena = SharedArena(shared_budget, 1, 64 * SLOT_BYTES, lambda _: None)
    with pytest.raises(TypeError, match="cannot be stored in a slot"):
        arena.array((SLOT_BYTES,), np.dtype(object))
    assert shared_budget.reserved == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_forked_child_writes_no_slot_of_its_parent():
    arena = Arena(poison=True, shared=True)
    remote_slots = RemoteSlots(poison=True)
    slots = [arena.slot(SLOT_BYTES) for _ in range(3)]
    for slot in slots:
        memoryview(slot)[:] = bytes([7]) * SLOT_BYTES
    remote_slots.add(slots[0].shared_id, *slots[0].take_file())
    borrowed = remote_slots.borrow(slots[0].shared_id)
    slots.pop()
    del slot  # it is free to be reused, in the child too
    child = os.fork()
    if child == 0:
        del borrowed
        slots.clear()
        for _ in range(3):
            slot = arena.slot(SLOT_BYTES)
            memoryview(slot)[:] = bytes([8]) * SLOT_BYTES
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {*bytes(slots[0]), *bytes(slots[1]), *bytes(borrowed)} == {7}
    assert 8 not in bytes(arena.slot(SLOT_BYTES))
    assert remote_slots.take_returned() == []


def test_slot_that_a_child_may_see_is_given_up():
    arena = Arena(poison=True, shared=True)
    remote_slots = RemoteSlots(poison=True)
    slot = arena.slot(SLOT_BYTES)
    number = slot.shared_id
    memoryview(slot)[:] = bytes([7]) * SLOT_BYTES
    remote_slots.add(number, *slot.take_file())
    borrowed = remote_slots.borrow(number)
    before_fork()
    after_fork()
    del borrowed
    assert {*bytes(slot)} == {7}
    assert remote_slots.take_returned() == []
    assert remote_slots.take_retired_by_fork() == [number]
    with pytest.raises(ValueError, match="not known"):
        remote_slots.borrow(number)
    slot.retire()
    del slot
    assert (arena.total_bytes, arena.free_bytes) == (0, 0)


def test_slot_lent_or_given_back_while_the_process_forks_is_given_up():
    """Other threads may run between the hooks before and after a fork."""
    arena = Arena(shared=True)
    remote_slots = RemoteSlots()
    slots = [arena.slot(SLOT_BYTES) for _ in range(3)]
    numbers = [slot.shared_id for slot in slots]
    for slot, number in zip(slots, numbers, strict=True):
        remote_slots.add(number, *slot.take_file())
    before = remote_slots.borrow(numbers[0])
    before_fork()
    del before
    during = remote_slots.borrow(numbers[1])
    after_fork()
    del during
    assert remote_slots.take_retired_by_fork() == numbers[:2]
    borrowed = remote_slots.borrow(numbers[2])
    del borrowed
    assert remote_slots.take_returned() == numbers[2:]


def test_bytes_given_back_twice_are_an_error_and_change_nothing():
    shared_budget = budget_of(2)
    assert shared_budget.reserve(SLOT_BYTES)
    shared_budget.release(SLOT_BYTES)
    with pytest.raises(ValueError, match=r"`release` must release .* got 1048576 where 0 are"):
        shared_budget.release(SLOT_BYTES)
    assert shared_budget.reserved == 0
    assert shared_budget.reserve(2 * SLOT_BYTES)
    assert not shared_budget.reserve(1)


def test_slot_that_its_maker_never_reserved_cannot_be_lent():
    arena = Arena(shared=True)
    slot = arena.slot(SLOT_BYTES)
    remote_slots = RemoteSlots(budget_of(2))
    remote_slots.add(slot.shared_id, *slot.take_file())
    with pytest.raises(ValueError, match="`release` must release reserved bytes once"):
        remote_slots.borrow(slot.shared_id)


@pytest.mark.parametrize("first", [0, 64, 4096, SLOT_BYTES - 100])
def test_array_in_the_slot_that_is_written_is_refused(first):
    slot = Arena().slot(SLOT_BYTES)
    inside = np.frombuffer(slot, np.uint8)
    inside[:] = 7
    with pytest.raises(ValueError, match="must lie elsewhere, got one in that slot"):
        write_arrays(slot, 0, [np.zeros(64, np.uint8), inside[first : first + 100]])
    assert set(inside[64:].tolist()) == {7}
    write_arrays(slot, 64, [np.full(100, 8, np.uint8), inside[:0]])
    assert set(inside[64:164].tolist()) == {8}
