"""Pipelines split among threads, and loaders, equal those of Grain 0.2.18, states included.

Threads are used in place of processes, which have the same shares and order but take Grain seconds
to start.
"""

import functools
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import grain as real
import numpy as np
import pytest
from effort import cases
from kept_shuffles import _shuffles_are_kept  # noqa: F401 - a fixture
from pipelines import add_one, close, encode, is_even, rand_u32, transforms
from test_random_pipelines import MAX_ELEMENTS, SEEDS, Maker, compare_by_iteration
from under_test import IS_GRAIN, grain
from worker_cases import CASES, remaining
from worker_cases import run as run_with_workers

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
    maker = Maker(seed, is_split=True).by_iteration()
    rng = random.Random(f"workers {seed}")
    shown = json.dumps(maker.ops)
    # In Grain, an interleave of fewer datasets than workers fails.
    num_threads = rng.randint(1, 2 if '"interleave' in shown else 3)
    maker.ops.append(["multithread_prefetch", num_threads, rng.choice([0, 1, 2])])
    if rng.random() < 0.4:
        maker.ops.append(["map_with_index", "pair"])
    elif "rand" not in shown and rng.random() < 0.5:  # these divide the threads, not the elements
        maker.ops.append(["multithread_prefetch", rng.randint(1, num_threads), rng.choice([0, 1])])
    # Like its interleave, Grain's ring of workers keeps and changes the state it is given.
    maker.restores = False
    maker.compared = without_ended
    # At the end of one worker its parent may have noticed the end, or not.
    splits = "concat_split" in shown and ("iter_mix" in shown or "iter_repeat" in shown)
    maker.loose_states |= splits or "rebatch" in shown
    return maker


@pytest.mark.parametrize("seeds", SEEDS[: cases(1, 1000)], ids=str)
def test_shared_pipelines_equal_grain(seeds):
    for seed in seeds:
        maker = shared_pipeline(seed)
        try:
            compare_by_iteration(maker, random.Random(f"compare {seed}"))
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(maker.ops)}")
            raise


# --- worker processes ----------------------------------------------------------------------------

RESTORED_FROM = 2  # the state after so many elements and one
RESTORED = ["one_worker", "loader"]
# What `real_workers.py` has printed: Grain takes seconds to start workers.
RECORDED = Path(__file__).parents[1] / "golden/grain_workers.json"


@pytest.mark.skipif(IS_GRAIN, reason="compares the two")
def test_worker_processes_equal_those_of_grain():
    ours = {name: run_with_workers(grain, name) for name in CASES}
    recorded = json.loads(RECORDED.read_text())
    assert list(recorded["found"]) == CASES
    for name in RESTORED:  # it is known how Grain continues from these
        assert ours[name][1][RESTORED_FROM] == recorded["restored"][name], name
    for name, (elements, states, rest) in recorded["found"].items():
        assert ours[name][0] == elements, name
        compared = [[without_ended(state) for state in both] for both in (ours[name][1], states)]
        assert compared[0] == compared[1], name
        for position in {0, RESTORED_FROM, len(elements) - 2}:
            expected = elements[position + 1 :]
            assert remaining(grain, name, states[position]) == expected, f"{name}, {position}"
        if name in RESTORED:
            assert rest == elements[RESTORED_FROM + 1 :], name


@pytest.mark.long
def test_worker_processes_of_grain_give_what_was_recorded(tmp_path):
    recorded = json.loads(RECORDED.read_text())
    saved = tmp_path / "states.json"
    saved.write_text(json.dumps(recorded["restored"]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_workers.py")), str(saved)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert without_ended(json.loads(done.stdout)) == without_ended(recorded["found"])


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
        "own_sampler": rng.random() < 0.15,
        "source": rng.choice(["range", "list", "dataset"]),
        "num_threads": rng.choice([0, 0, 0, 2]),
        # The options given to the loader, not to the sampler.
        "shard_of_loader": rng.random() < 0.3,
        "operations": [],
    }
    if plan["own_sampler"] and plan["num_epochs"] is None:
        plan["num_epochs"] = 2
    legacy = ["MapOperation", "FilterOperation", "RandomMapOperation"]
    kind, names = "int", ["PlusOne", "Even", "AddRand", "FanOut", "FanTwo", "Batch", *legacy]
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(names) if kind == "int" else "Batch"
        if name == "Batch":
            kind_of_batch = rng.choice(["Batch", "Batch", "BatchOperation"])
            plan["operations"].append([kind_of_batch, rng.choice([1, 2, 3]), rng.random() < 0.5])
        else:
            plan["operations"].append([name])
        # Elements of a flat map get generators here, but not in Grain.
        if name.startswith("Fan"):
            names = ["PlusOne", "Even", "FanTwo", "Batch"]
        kind = "pair" if name in ("AddRand", "RandomMapOperation") else "int"
        if name == "Batch":
            break
        if name in ("Even", "FanOut", "FilterOperation") and plan["num_epochs"] is None:
            plan["num_epochs"] = 2  # it may drop every element, endlessly
    return plan


@functools.cache
def backwards(g):
    """A user's own sampler: from the last record to the first, with generators of its own."""

    class Backwards:
        def __init__(self, num_records, num_epochs):
            self._num_records = num_records
            self._num_epochs = num_epochs

        def __len__(self):
            return self._num_records * self._num_epochs

        def __getitem__(self, index):
            key = self._num_records - 1 - index % self._num_records
            return g.RecordMetadata(index, key, np.random.default_rng(index))

        def __repr__(self):
            return f"Backwards({self._num_records}, {self._num_epochs})"

    return Backwards


def operation(g, name, args):
    """An operation of a plan, built with module `g`."""
    legacy = {"MapOperation": add_one, "FilterOperation": is_even, "RandomMapOperation": rand_u32}
    if name == "BatchOperation":
        return importlib.import_module(f"{g.__name__}.python").BatchOperation(*args)
    if name in legacy:
        return getattr(importlib.import_module(f"{g.__name__}.python"), name)(legacy[name])
    return g.transforms.Batch(*args) if name == "Batch" else transforms(g)[name]()


class Described:
    """A list with a text for states; that of a dataset differs between the two."""

    def __init__(self, elements):
        self._elements = elements

    def __len__(self):
        return len(self._elements)

    def __getitem__(self, index):
        return self._elements[index]

    def __repr__(self):
        return "Described()"


def make_loader(g, plan):
    """The loader of `plan`, built with module `g`."""
    shard = g.sharding.ShardOptions(*plan["shard"])
    n, seed, options = plan["num_records"], plan["seed"], {}
    of_sampler = shard
    if plan["shard_of_loader"] or plan["own_sampler"]:
        of_sampler, options = g.sharding.NoSharding(), {"shard_options": shard}
    if plan["own_sampler"]:
        sampler = backwards(g)(n, plan["num_epochs"])
    elif plan["sequential"]:
        sampler = g.samplers.SequentialSampler(n, of_sampler, seed)
    else:
        sampler = g.samplers.IndexSampler(n, of_sampler, plan["shuffle"], plan["num_epochs"], seed)
    source = {
        "range": lambda: g.sources.RangeDataSource(0, n, 1),
        "list": lambda: list(range(n)),
        "dataset": lambda: Described(g.MapDataset.range(n).shuffle(1)),
    }[plan["source"]]()
    return g.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[operation(g, name, args) for name, *args in plan["operations"]],
        read_options=g.ReadOptions(plan["num_threads"], 4),
        **options,
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
    dropping = {"Even", "FilterOperation", "FanOut", "FanTwo"}
    loose = any(name in dropping for name, *_ in plan["operations"])
    for k, (theirs, ours) in enumerate(zip(states, our_states, strict=True)):
        assert theirs == ours or loose, f"state {k}: {theirs} and {ours}"
    for k in {0, rng.randrange(len(states)), len(states) - 1}:
        rest, left = elements[k:], MAX_ELEMENTS - k
        for g, state in ((grain, states[k]), (grain, our_states[k]), (real, our_states[k])):
            if left:
                assert run(g, plan, state, left)[0] == rest, f"{g.__name__} from {state}"


@pytest.mark.skipif(IS_GRAIN, reason="compares the two")
@pytest.mark.parametrize("seeds", SEEDS[: cases(1, 1000)], ids=str)
def test_loaders_equal_grain(seeds):
    for seed in seeds:
        plan = loader_plan(seed)
        try:
            compare_loaders(plan, random.Random(f"compare {seed}"))
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(plan)}")
            raise
