"""Pipelines split among threads, and loaders, equal those of Grain 0.2.18, states included.

Threads are used in place of processes, which have the same shares and order but take Grain seconds
to start.
"""

import json
import os
import random

import grain as real
import pytest
from pipelines import close, encode, transforms
from test_random_pipelines import (
    FIRST_SEED,
    MAX_ELEMENTS,
    PER_TEST,
    Maker,
    compare_by_iteration,
)
from under_test import IS_GRAIN, grain

NUM_CASES = int(os.environ.get("GRAINMILL_PARITY_PIPELINES", "320")) // 2
SEEDS = [
    range(s, min(s + PER_TEST, FIRST_SEED + NUM_CASES))
    for s in range(FIRST_SEED, FIRST_SEED + NUM_CASES, PER_TEST)
]

# --- workers -------------------------------------------------------------------------------------


def without_ended(state):
    """A state without those of exhausted workers, which differ in form."""
    if isinstance(state, list):
        return [without_ended(part) for part in state]
    if not isinstance(state, dict):
        return state
    if "exhausted" in state:
        parts = zip(state["iterators_in_use_states"], state["exhausted"], strict=True)
        state = {**state, "iterators_in_use_states": [None if end else s for s, end in parts]}
    return {name: without_ended(part) for name, part in state.items()}


def shared_pipeline(seed):
    """A pipeline with prefetching threads, with or without stages downstream of them."""
    maker = Maker(seed).by_iteration()
    rng = random.Random(f"workers {seed}")
    # At most three: in Grain, an interleave of fewer datasets than workers fails.
    maker.ops.append(["multithread_prefetch", rng.randint(1, 3), rng.choice([0, 1, 2])])
    if rng.random() < 0.4:
        maker.ops.append(["map_with_index", "pair"])
    # Like its interleave, Grain's ring of workers keeps and changes the state it is given.
    maker.restores = False
    maker.compared = without_ended
    return maker


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_shared_pipelines_equal_grain(seeds):
    for seed in seeds:
        maker = shared_pipeline(seed)
        try:
            compare_by_iteration(maker, random.Random(f"compare {seed}"))
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(maker.ops)}")
            raise


# --- loaders -------------------------------------------------------------------------------------


def loader_plan(seed):
    """The parameters of a loader, as plain values."""
    rng = random.Random(f"loader {seed}")
    num_records = rng.choice([1, 2, 5, 8, 12, 17])
    # A shard without any record divides by zero in Grain.
    shard_count = min(num_records, rng.choice([1, 1, 2, 3]))
    plan = {
        "num_records": num_records,
        "sequential": rng.random() < 0.2,
        "shuffle": rng.random() < 0.6,
        "num_epochs": rng.choice([1, 2, 3, None]),
        "seed": rng.randrange(2**32),
        # Grain 0.2.18 always drops the remainder.
        "shard": (rng.randrange(shard_count), shard_count, True),
        "operations": [],
    }
    kind, names = "int", ["PlusOne", "Even", "AddRand", "FanOut", "FanTwo", "Batch"]
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(names) if kind == "int" else "Batch"
        if name == "Batch":
            plan["operations"].append([name, rng.choice([1, 2, 3]), rng.random() < 0.5])
        else:
            plan["operations"].append([name])
        # Elements of a flat map get generators here, but not in Grain.
        if name.startswith("Fan"):
            names = ["PlusOne", "Even", "FanTwo", "Batch"]
        kind = "int" if name in ("PlusOne", "Even", "FanOut", "FanTwo") else "pair"
        if name == "Batch":
            break
        if name in ("Even", "FanOut") and plan["num_epochs"] is None:
            plan["num_epochs"] = 2  # it may drop every element, endlessly
    return plan


def make_loader(g, plan):
    """The loader of `plan`, built with module `g`."""
    shard = g.sharding.ShardOptions(*plan["shard"])
    n, seed = plan["num_records"], plan["seed"]
    if plan["sequential"]:
        sampler = g.samplers.SequentialSampler(n, shard, seed)
    else:
        sampler = g.samplers.IndexSampler(n, shard, plan["shuffle"], plan["num_epochs"], seed)
    operations = [
        g.transforms.Batch(*args) if name == "Batch" else transforms(g)[name]()
        for name, *args in plan["operations"]
    ]
    return g.DataLoader(
        data_source=g.sources.RangeDataSource(0, n, 1),
        sampler=sampler,
        operations=operations,
        read_options=g.ReadOptions(0, 0),
    )


def close_loader(iterator):
    close(iterator if hasattr(iterator, "close") else iterator._iterator)


def run(g, plan, state=None, at_most=MAX_ELEMENTS):
    """Elements, the state before each, and the state at the end."""
    iterator = iter(make_loader(g, plan))
    if state is not None:
        iterator.set_state(state)
    elements, states = [], [iterator.get_state()]
    for element in iterator:
        elements.append(encode(element))
        states.append(iterator.get_state())
        if len(elements) == at_most:
            break
    close_loader(iterator)
    return elements, states


def compare_loaders(plan, rng):
    elements, states = run(real, plan)
    found, our_states = run(grain, plan)
    assert found == elements
    # After dropped elements, or the last element of a flat map, different states are equivalent.
    loose = any(name in ("Even", "FanOut", "FanTwo") for name, *_ in plan["operations"])
    for k, (theirs, ours) in enumerate(zip(states, our_states, strict=True)):
        assert theirs == ours or loose, f"state {k}: {theirs} and {ours}"
    for k in {0, rng.randrange(len(states)), len(states) - 1}:
        rest, left = elements[k:], MAX_ELEMENTS - k
        for g, state in ((grain, states[k]), (grain, our_states[k]), (real, our_states[k])):
            if left:
                assert run(g, plan, state, left)[0] == rest, f"{g.__name__} from {state}"


@pytest.mark.skipif(IS_GRAIN, reason="compares the two")
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_loaders_equal_grain(seeds):
    for seed in seeds:
        plan = loader_plan(seed)
        try:
            compare_loaders(plan, random.Random(f"compare {seed}"))
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(plan)}")
            raise
