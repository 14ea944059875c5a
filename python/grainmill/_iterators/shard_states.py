"""The state of an interleave as one state for each of its datasets, and back.

The states of single datasets can be dealt out anew when the number of processes changes, and the
state of an interleave cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._iterators.base.checked_state import CheckedState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._iterators.base.stage import State

EXHAUSTED, STATE = "exhausted", "state"
ENDED = None
"""The entry in `future_states` of a dataset that ended before its turn to be opened came.

Grain's states cannot say that.
"""


def by_dataset(
    state: State, num_datasets: int, start_state: Callable[[int], State]
) -> list[dict[str, Any]]:
    """The state of each dataset of an interleave, and whether it is exhausted.

    A dataset that ended and gave up its slot has its state at the start.

    Args:
        state: A state of the interleave.
        num_datasets: How many datasets it has.
        start_state: Returns the state of a dataset at its start.
    """
    indices, states = state["iterators_in_use_indices"], state["iterators_in_use_states"]
    in_use = dict(zip(indices, zip(state[EXHAUSTED], states, strict=True), strict=True))
    future = {int(index): saved for index, saved in (state.get("future_states") or {}).items()}
    shards = []
    for index in range(num_datasets):
        if index in in_use:
            exhausted, saved = in_use[index]
        elif index < state["next_index_in_datasets"]:
            exhausted, saved = 1, None
        else:
            saved = future.get(index)
            exhausted = int(index in future and saved is ENDED)
        saved = start_state(index) if saved is None else saved
        shards.append({EXHAUSTED: int(exhausted), STATE: saved})
    return shards


def of_datasets(shards: Sequence[Any], num_slots: int, name: object) -> State:
    """The state of an interleave whose datasets have these states.

    The first datasets that are not exhausted are open, and the first of them has the next turn.

    Args:
        shards: For each dataset what `by_dataset` returns.
        num_slots: How many datasets are open at a time.
        name: What messages call the interleave.

    Raises:
        ValueError: An entry has another form.
    """
    flags, states = [], []
    for number, shard in enumerate(shards):
        saved = CheckedState(name, shard, (EXHAUSTED, STATE))
        flags.append(saved.checked_flag(f"`{EXHAUSTED}` of shard {number}", saved[EXHAUSTED]))
        states.append(saved[STATE])
    left = [index for index, exhausted in enumerate(flags) if not exhausted]
    in_use = left[:num_slots]
    next_dataset = in_use[-1] + 1 if len(in_use) == num_slots and in_use else len(shards)
    # Slots for which no dataset is left hold one that is exhausted.
    in_use += [index for index, exhausted in enumerate(flags) if exhausted][
        : num_slots - len(in_use)
    ]
    return {
        "next_index_in_cycle": 0,
        "next_index_in_datasets": next_dataset,
        "iterators_in_use_indices": in_use,
        "iterators_in_use_states": [states[index] for index in in_use],
        EXHAUSTED: [int(flags[index]) for index in in_use],
        "future_states": {
            str(index): ENDED if flags[index] else states[index]
            for index in range(next_dataset, len(shards))
        },
    }
