"""The number of workers changes nothing: the same elements and states, under random pipelines."""

import itertools
import random

import numpy as np
import pytest
from effort import LONG
from pipelines import build, close, encode
from under_test import grain

WORKERS = [1, 2, 3, 7]
# The first ones and few others have each kind of stage.
SEEDS = range(1000) if LONG else [*range(16), 24, 38]
PARTS_SEEDS = range(1000, 1300) if LONG else [*range(1000, 1006), 1010, 1011]
LONGEST = 40


def _source(rng):
    kind = rng.choice(["range", "range", "source", "mix", "concat", "zip"])
    if kind == "range":
        return [["range", rng.randint(8, 40)]]
    if kind == "source":
        return [["source", [rng.randrange(100) for _ in range(rng.randint(5, 30))]]]
    num_first = 20 if kind == "zip" else rng.randint(4, 20)
    parts = [[["range", num_first], ["map", "add_one"]], [["range", 30, 50]]]
    if kind == "zip":
        return [["zip", parts], ["map", "sum_pair"]]
    return [[kind, parts]] if kind == "concat" else [["mix", parts, [2, 1]]]


def _by_index(rng):
    """Random-access stages over plain numbers."""
    choices = [
        ["shuffle", rng.randrange(1000)],
        ["map", "add_one"],
        ["map", "times_two"],
        ["map_with_index", "add_index"],
        ["random_map", "add_rand", {"seed": rng.randrange(1000)}],
        ["filter", "not_mult_3"],
        ["map", "drop_mult_3"],
        ["slice", rng.randint(0, 3), None, rng.randint(1, 2)],
        ["repeat", rng.randint(2, 3)],
        ["window_shuffle", rng.randint(2, 9), rng.randrange(1000)],
    ]
    return rng.sample(choices, rng.randint(1, 4))


def _sequential(rng):
    choices = [
        ["map", "add_one"],
        ["filter", "is_even"],
        ["map_with_index", "add_index"],
        ["random_map", "add_rand", {"seed": rng.randrange(1000)}],
        ["limit", rng.randint(3, 30)],
        ["window_shuffle", rng.randint(2, 9), rng.randrange(1000)],
        ["thread_prefetch", rng.randint(1, 5)],
        ["iter_repeat", 2],
        ["user_twice"],
    ]
    return rng.sample(choices, rng.randint(0, 3))


def _batched(rng):
    size, drop = rng.randint(2, 6), rng.random() < 0.5
    return rng.choice(
        [
            [],
            [["batch", size, {"drop_remainder": drop}]],
            [["batch", size, {"drop_remainder": drop}]],
            [["batch", size], ["rebatch", rng.randint(1, 7), {"drop_remainder": drop}]],
            [["batch_and_pad", size]],
        ]
    )


def _pack(rng):
    name = rng.choice(["first_fit", "best_fit", "concat_split"])
    options = {"length_struct": {"tokens": 12}}
    if name != "concat_split":
        options["num_packing_bins"] = rng.randint(1, 4)
    return [[name, options]]


def _pipeline(seed):
    """A random pipeline; `_with_workers` sets the number of workers of its reads."""
    rng = random.Random(seed)
    ops = [*_source(rng), *_by_index(rng)]
    shape = rng.choice(["numbers", "numbers", "map_batch", "pack", "iter_mix", "iter_zip"])
    dropping = any(op[0] == "filter" or "drop_mult_3" in op for op in ops)
    read = ["to_iter", {"num_workers": 0, "prefetch_buffer_size": rng.choice([1, 16, 500])}]
    read[1]["num_threads"] = 1
    if shape == "map_batch" and not dropping:
        return [*ops, ["map", "fixed_dict"], *[["batch", rng.randint(2, 5)]], read]
    if shape == "pack":
        return [*ops, ["map", "tokens"], read, *_pack(rng), *[["batch", 2]] * rng.randrange(2)]
    if shape in {"iter_mix", "iter_zip"}:
        other = [["range", 25], ["map", "times_two"], ["shuffle", 3], read]
        joined = [["iter_mix", [[*ops, read], other], [1, 2]]]
        if shape == "iter_zip":
            joined = [["iter_zip", [[*ops, read], other], {"strict": False}], ["map", "sum_pair"]]
        return [*joined, *_sequential(rng), *_batched(rng)]
    whole = rng.random() < 0.5
    last = [["map", rng.choice(["fixed_dict", "vec4"])]] if rng.random() < 0.7 else []
    if whole:
        return [*ops, *last, read, *_batched(rng)]
    return [*ops, read, *_sequential(rng), *last, *_batched(rng)]


def _with_workers(ops, num_workers):
    def changed(part):
        if isinstance(part, dict):
            return {**part, "num_workers": num_workers} if "num_workers" in part else part
        return [changed(x) for x in part] if isinstance(part, list) else part

    return changed(ops)


def _pass(iterator, max_elements=LONGEST):
    """Elements, and the states before, between and after them."""
    states = [iterator.get_state()]
    elements = []
    for element in itertools.islice(iterator, max_elements):
        elements.append(encode(element))
        states.append(iterator.get_state())
    return elements, states


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_change_nothing(seed):
    ops = _pipeline(seed)
    counts = [0, WORKERS[seed % 4], WORKERS[(seed // 4 + seed + 1) % 4]]
    iterators = [iter(build(grain, _with_workers(ops, count))) for count in counts]
    try:
        passes = [_pass(iterator) for iterator in iterators]
        elements, states = passes[0]
        for count, (found, found_states) in zip(counts[1:], passes[1:], strict=True):
            assert found == elements, f"{count} workers: {ops}"
            assert found_states == states, f"{count} workers: {ops}"
        rng = random.Random(seed)
        for _ in range(3):
            saved, restored = rng.randrange(3), rng.randrange(3)
            place = rng.randrange(len(states))
            iterators[restored].set_state(passes[saved][1][place])
            rest = elements[place : place + 8]
            found = [encode(x) for x in itertools.islice(iterators[restored], len(rest))]
            assert found == rest, f"{counts[saved]} to {counts[restored]} at {place}: {ops}"
            if place + len(rest) < len(states):
                assert iterators[restored].get_state() == states[place + len(rest)]
    finally:
        for iterator in iterators:
            close(iterator)


def _at_work(state):
    """`state` without those of exhausted shards, which may differ by whether the end was seen."""
    shards = zip(state["iterators_in_use_states"], state["exhausted"], strict=True)
    return {**state, "iterators_in_use_states": [None if end else shard for shard, end in shards]}


@pytest.mark.parametrize("seed", PARTS_SEEDS)
def test_parts_in_processes_are_those_on_threads(seed):
    rng = random.Random(seed)
    ops = [["range", rng.randint(8, 40)], *_by_index(rng)]
    ops += [["to_iter"], *_sequential(rng), ["map", "vec4"], *_batched(rng)]
    ops = [op for op in ops if op[0] != "user_twice"]
    count, ahead = rng.choice(WORKERS), rng.randint(1, 4)
    threads = iter(build(grain, [*ops, ["multithread_prefetch", count, ahead]]))
    processes = iter(build(grain, [*ops, ["mp_prefetch", count, ahead]]))
    try:
        elements, states = _pass(threads)
        found, found_states = _pass(processes)
        assert found == elements, ops
        assert [*map(_at_work, found_states)] == [*map(_at_work, states)], ops
        for place in rng.sample(range(len(states)), min(3, len(states))):
            processes.set_state(states[place])
            rest = [encode(x) for x in itertools.islice(processes, LONGEST - place)]
            assert rest == elements[place:], f"from {place}: {ops}"
    finally:
        close(threads)
        close(processes)


def test_restoring_again_and_again_never_ends_early():
    """Tasks that were dispatched and then dropped still keep the workers busy."""

    def slow(x):
        rows = np.full(20_000, x)
        for _ in range(20):
            rows = rows + 0
        return rows

    ds = grain.MapDataset.range(200).map(slow).batch(4)
    iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_workers=2)))
    try:
        for place in [0, 40, 3, 17, 49, 1] * 5:
            iterator.set_state({"next_index": place})
            assert next(iterator)[0, 0] == 4 * place
    finally:
        iterator.close()
