"""Restoring into a pipeline that was changed where all saved positions stay valid."""

import copy
import itertools
import json
import logging
import random
from collections import Counter

import numpy as np
import pytest
from effort import cases

import grainmill as grain
from grainmill import experimental
from grainmill._checkpoint import changes, ends

Handler = grain.checkpoint.CheckpointHandler
ENDS = object()


def numbers_in(elements):
    """All numbers in elements, batches and packed rows, in order; 0 is padding."""
    found = []
    for element in elements:
        values = element["t"] if isinstance(element, dict) else element
        found += [int(x) for x in np.ravel(values) if x]
    return found


def advanced(dataset, count):
    """An iterator after `count` elements, or after its end, and these."""
    iterator = iter(dataset)
    if count is ENDS:
        return iterator, list(iterator)
    return iterator, list(itertools.islice(iterator, count))


def restored(iterator, dataset, directory):
    """Saves one iterator and continues from it by another; `None` if that is refused."""
    directory.mkdir(exist_ok=True)
    Handler().save(directory, iterator)
    try:
        return Handler().restore(directory, iter(dataset))
    except ValueError as refusal:
        if "was saved from another pipeline" not in str(refusal):
            raise
        return None


# --- longer --------------------------------------------------------------------------------------


def tokens(element):
    """As many tokens as its first number has remainder, all of that number."""
    if isinstance(element, dict):
        return {"t": element["t"]}
    number = int(np.ravel(element)[0])
    return {"t": np.full(1 + number % 3, number)}


def flat(batch):
    return {"t": np.ravel(batch["t"])} if isinstance(batch, dict) else np.ravel(batch)


def packed(rows):
    return experimental.FirstFitPackIterDataset(
        rows.map(tokens), length_struct={"t": 5}, num_packing_bins=2
    )


def best_fit(rows):
    return experimental.BestFitPackIterDataset(
        rows.map(tokens), length_struct={"t": 5}, num_packing_bins=3
    )


class Pieces(experimental.FlatMapTransform):
    """An element of several numbers for each number."""

    max_fan_out = 9

    def flat_map(self, element):
        return [np.array([number]) for number in numbers_in([element])]


def rebatched(rows):
    return experimental.RebatchIterDataset(rows.map(tokens), batch_size=2).map(flat)


def split(rows):
    return experimental.ConcatThenSplitIterDataset(rows.map(tokens), length_struct={"t": 4})


RANDOM_ACCESS = {
    "map": lambda ds: ds.map(lambda x: x),
    "filter": lambda ds: ds.filter(lambda x: np.ravel(x)[0] % 5),
    "even": lambda ds: ds[0::2],
    "odd": lambda ds: ds[1::2],
    "first": lambda ds: ds[:9],
    "shuffle": lambda ds: ds.shuffle(seed=4),
    "batches": lambda ds: ds.batch(3),
    "full batches": lambda ds: ds.batch(3, drop_remainder=True),
}
SEQUENTIAL = {
    "map": lambda ds: ds.map(lambda x: x),
    "filter": lambda ds: ds.filter(lambda x: isinstance(x, dict) or np.ravel(x)[0] % 3),
    "random map": lambda ds: ds.random_map(lambda x, _: x, seed=1),
    "with index": lambda ds: ds.map_with_index(lambda _, x: x),
    "batch": lambda ds: ds.batch(1).map(flat),
    "thread": lambda ds: experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    "threads": lambda ds: experimental.multithread_prefetch(ds, 2, 1),
    "window": lambda ds: experimental.WindowShuffleIterDataset(ds, window_size=4, seed=1),
    "pack": packed,
    "best fit": best_fit,
    "pieces": lambda ds: experimental.FlatMapIterDataset(ds, Pieces()),
    "rebatch": rebatched,
    "split": split,
    "repeat": lambda ds: experimental.RepeatIterDataset(ds, 2),
    "zip": lambda ds: experimental.ZipIterDataset([ds, ds]).map(lambda pair: pair[0]),
    "mix": lambda ds: grain.IterDataset.mix([ds, grain.MapDataset.range(90, 99).repeat()], [2, 1]),
}
GROWING = ("epochs", "epochs of all", "limit")
ALWAYS_ACCEPTED = {"map", "filter", "random map", "with index", "batch", "thread"}
# Their last element may have been a part of what it is now; accepted if the parent's was not.
GROUPING = {"window", "pack", "best fit", "split", "rebatch"}
REORDERED = {"threads", "window", "pack", "best fit"}


def is_accepted(names):
    """Whether a longer sequence must be accepted by stages of these names."""
    is_regrouped = False
    for name in names:
        if name in GROUPING | {"pieces"}:
            if is_regrouped:
                return False
            is_regrouped = name in GROUPING
        elif name not in ALWAYS_ACCEPTED:
            return False
        is_regrouped |= name == "batch"
    return True


def random_pipeline(rng):
    """A function that makes a pipeline of the number that grows, and the names of its stages."""
    grows = rng.choice(GROWING)
    length, size = rng.randint(1, 9), rng.randint(1, 9)
    before = rng.sample(sorted(RANDOM_ACCESS), rng.choice((0, 0, 1, 2)))
    if {"batches", "full batches"} <= set(before):  # unequal batches cannot be joined
        before.pop()
    after = rng.sample(sorted(SEQUENTIAL), rng.choice((0, 1, 1, 2, 3)))

    def make(count):
        epochs = count if grows == "epochs" else 2
        ds = grain.MapDataset.range(1, 1 + length).shuffle(seed=size).repeat(epochs)
        for name in before:
            try:
                ds = RANDOM_ACCESS[name](ds)
            except ValueError:  # a batch after a filter
                return None
        ds = ds.to_iter_dataset()
        if grows == "epochs of all":
            ds = experimental.RepeatIterDataset(ds, count)
        elif grows == "limit":
            ds = experimental.LimitIterDataset(ds, count)
        for name in after:
            ds = SEQUENTIAL[name](ds)
        return ds

    return make, [grows, *before, *after]


@pytest.mark.parametrize("seed", range(cases(40, 4_000)))
def test_what_is_longer_continues_where_the_old_ended_or_is_refused(seed, tmp_path):
    rng = random.Random(seed)
    make, names = random_pipeline(rng)
    count = rng.randint(1, 5)
    old, new = make(count), make(count + rng.randint(1, 3))
    if old is None:
        return
    elements, total = list(old), list(new)
    for number, at in enumerate({0, len(elements), ENDS, rng.randint(0, len(elements))}):
        iterator, seen = advanced(old, at)
        then = restored(iterator, new, tmp_path / f"{number}")
        if then is None:
            assert not is_accepted(names[1:]), names
            continue
        found = numbers_in(seen) + numbers_in(then)
        if "mix" in names:  # which ends where one of its datasets does
            found, expected = ([x for x in part if x < 90] for part in (found, numbers_in(total)))
            if REORDERED & set(names):
                assert not Counter(found) - Counter(expected), names
            else:
                assert found[: len(expected)] == expected, names
        elif REORDERED & set(names):
            assert Counter(found) == Counter(numbers_in(total)), names
        else:
            assert found == numbers_in(total), names


@pytest.mark.parametrize("seed", range(cases(24, 1_000)))
def test_a_state_within_a_window_or_bins_is_valid_wherever_the_data_ended(seed, tmp_path):
    rng = random.Random(seed)
    length, size, count = rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 4)
    stages = sorted({*GROUPING, "pieces"})
    stage, drops = stages[seed % len(stages)], seed // len(stages) % 2

    def make(epochs):
        ds = grain.MapDataset.range(1, 1 + length).shuffle(seed=3).repeat(epochs)
        ds = ds.map(lambda x: x if x % 4 else None) if drops else ds
        ds = ds.to_iter_dataset().map(lambda x: np.full(1 + x % 3, x))
        if stage == "window":
            return experimental.WindowShuffleIterDataset(ds, window_size=size, seed=1)
        return SEQUENTIAL[stage](ds)

    expected = Counter(numbers_in(make(count + 2)))
    for at in range(len(list(make(count))) + 1):
        iterator, seen = advanced(make(count), at)
        # Saved once more by the pipeline that is longer, before it goes on.
        then = restored(iterator, make(count + 1), tmp_path / f"{at}")
        more = [next(then) for _ in range(rng.randint(0, 1))]
        then = restored(then, make(count + 2), tmp_path / f"{at} again")
        assert Counter(numbers_in([*seen, *more, *then])) == expected


def test_ends_are_known_of_states_from_worker_processes(tmp_path):
    def make(epochs):
        ds = grain.MapDataset.range(1, 6).repeat(epochs).to_iter_dataset()
        return best_fit(ds).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))

    iterator, seen = advanced(make(1), 2)
    then = restored(iterator, make(2), tmp_path)
    assert Counter(numbers_in([*seen, *then])) == Counter(numbers_in(make(2)))


@pytest.mark.parametrize("seed", range(cases(30, 1_000)))
def test_ends_of_any_state_are_found_again_in_its_text(seed):
    rng = random.Random(seed)

    def state(depth):
        kinds = ["end", "int", "text"] if depth == 4 else ["end", "int", "dict", "list", "tuple"]
        match rng.choice(kinds):
            case "end":
                return ends.CutCount(rng.randint(0, 9), rng.randint(0, 9))
            case "int":
                return rng.randint(0, 9)
            case "text":
                return "text"
            case "dict":
                keys = rng.sample(["a", "b", 0, 1.5, None, True], rng.randint(0, 3))
                return {key: state(depth + 1) for key in keys}
            case kind:
                parts = [state(depth + 1) for _ in range(rng.randint(0, 3))]
                return parts if kind == "list" else tuple(parts)

    saved = {"state": state(0)}
    read = json.loads(json.dumps(saved))
    ends.put_back(read, json.loads(json.dumps(ends.found_in(saved))))
    assert ends.found_in(read) == ends.found_in(saved)
    assert json.dumps(read) == json.dumps(saved)
    assert ends.found_in(copy.deepcopy(saved)) == ends.found_in(saved)


# --- mixtures by name ----------------------------------------------------------------------------


def part(number, epochs=None, length=7):
    ds = grain.MapDataset.range(number * 1000 + 1, number * 1000 + 1 + length)
    return ds.shuffle(seed=number).repeat(epochs).to_iter_dataset()


def random_weights(rng, names):
    chosen = rng.sample(names, rng.randint(1, len(names)))
    return {name: rng.randint(1, 3) for name in chosen}


def mixture(weights, names, stage):
    parts = {name: part(names.index(name)) for name in weights}
    return SEQUENTIAL[stage](grain.IterDataset.mix(parts, weights))


@pytest.mark.parametrize("seed", range(cases(30, 2_000)))
def test_a_changed_mixture_repeats_and_loses_no_element_of_any_dataset(seed, tmp_path):
    rng = random.Random(seed)
    names = [chr(ord("a") + i) for i in range(4)]
    stage = rng.choice(sorted(set(SEQUENTIAL) - {"mix", "zip", "repeat", "filter"}))
    old_weights, new_weights = random_weights(rng, names), random_weights(rng, names)
    old = mixture(old_weights, names, stage)
    new = mixture(new_weights, names, stage)
    iterator, seen = advanced(old, rng.randint(0, 30))
    then = restored(iterator, new, tmp_path)
    if then is None:
        assert not (set(old_weights) & set(new_weights)) or stage not in ALWAYS_ACCEPTED
        return
    seen, then = numbers_in(seen), numbers_in(itertools.islice(then, 60))
    for number, name in enumerate(names):
        found = [x for x in (*seen, *then) if x // 1000 == number]
        if name in new_weights and len(seen) and stage not in {"pack", "best fit"}:
            assert any(x // 1000 == number for x in then)
        expected = numbers_in(itertools.islice(part(number), 2 * len(found) + 20))
        if stage in {"threads", "pieces", *GROUPING}:
            # Each is delivered in another order, or as often as it has tokens.
            assert set(found) <= set(expected)
            continue
        assert found == expected[: len(found)], (stage, name)


def test_a_mixture_of_any_size_may_be_changed(tmp_path):
    def make(numbers):
        return grain.IterDataset.mix({f"n{i:03}": part(i) for i in numbers})

    iterator, seen = advanced(make(range(40)), 100)
    then = restored(iterator, make([*range(1, 40), 50]), tmp_path)
    found = numbers_in([*seen, *itertools.islice(then, 200)])
    for number in range(1, 40):
        of_part = [x for x in found if x // 1000 == number]
        assert of_part == numbers_in(itertools.islice(part(number), len(of_part)))


def test_a_mixture_that_ended_goes_on_where_the_dataset_that_ended_is_longer(tmp_path):
    def make(epochs):
        parts = {"a": part(0, epochs, 3), "b": part(1)}
        return grain.IterDataset.mix(parts, {"a": 1, "b": 1})

    iterator, seen = advanced(make(1), ENDS)
    then = restored(iterator, make(3), tmp_path)
    assert numbers_in(seen) + numbers_in(then) == numbers_in(make(3))


# --- what is refused, and what is said -----------------------------------------------------------


def of(length=20):
    return grain.MapDataset.range(1, length + 1)


REFUSED = {
    "fewer epochs": (of().repeat(3).to_iter_dataset, of().repeat(2).to_iter_dataset, 3),
    "epochs, no longer endless": (of().repeat().to_iter_dataset, of().repeat(9).to_iter_dataset, 3),
    "a lower limit": (
        lambda: experimental.LimitIterDataset(of().to_iter_dataset(), 9),
        lambda: experimental.LimitIterDataset(of().to_iter_dataset(), 8),
        3,
    ),
    "a shuffle of all epochs": (
        lambda: of().repeat(2).shuffle(seed=1).to_iter_dataset(),
        lambda: of().repeat(3).shuffle(seed=1).to_iter_dataset(),
        3,
    ),
    "a slice that ends elsewhere": (
        of().repeat(2)[:35].to_iter_dataset,
        of().repeat(3)[:36].to_iter_dataset,
        3,
    ),
    "a last batch that was delivered": (
        lambda: of(4).repeat(2).batch(3).to_iter_dataset(),
        lambda: of(4).repeat(3).batch(3).to_iter_dataset(),
        3,
    ),
    "a last batch before a slice": (
        of(4).repeat(2).batch(3)[0::2].to_iter_dataset,
        of(4).repeat(3).batch(3)[0::2].to_iter_dataset,
        2,
    ),
    "records": (of(20).repeat(2).to_iter_dataset, of(21).repeat(3).to_iter_dataset, 3),
    "no dataset of the same name": (
        lambda: grain.IterDataset.mix({"a": part(0), "b": part(0)}),
        lambda: grain.IterDataset.mix({"c": part(0), "d": part(0)}),
        3,
    ),
    "weights by number": (
        lambda: grain.IterDataset.mix([part(0), part(1)], [1, 2]),
        lambda: grain.IterDataset.mix([part(0), part(1)], [2, 1]),
        3,
    ),
    "another dataset under the name": (
        lambda: grain.IterDataset.mix({"a": part(0), "b": part(1)}),
        lambda: grain.IterDataset.mix({"a": part(2), "b": part(1)}),
        3,
    ),
    "in a window": (
        lambda: mixture({"a": 1, "b": 2}, ["a", "b"], "window"),
        lambda: mixture({"a": 1, "b": 3}, ["a", "b"], "window"),
        3,
    ),
    "in a batch of bins": (
        lambda: mixture({"a": 1, "b": 2}, ["a", "b"], "pack"),
        lambda: mixture({"a": 1, "b": 3}, ["a", "b"], "pack"),
        1,
    ),
    "epochs of a loader": (
        lambda: grain.load(range(9), seed=1, shuffle=True, num_epochs=3),
        lambda: grain.load(range(9), seed=1, shuffle=True, num_epochs=2),
        3,
    ),
    "seed of a loader": (
        lambda: grain.load(range(9), seed=1, shuffle=True, num_epochs=2),
        lambda: grain.load(range(9), seed=2, shuffle=True, num_epochs=3),
        3,
    ),
}


def test_a_refusal_says_where_a_change_is_possible(tmp_path):
    old, new, count = REFUSED["in a batch of bins"]
    iterator, _ = advanced(old(), count)
    Handler().save(tmp_path, iterator)
    with pytest.raises(ValueError, match="until `next_row` of its state is 0"):
        Handler().restore(tmp_path, iter(new()))
    next(iterator)
    assert restored(iterator, new(), tmp_path)


def test_a_state_that_does_not_say_where_its_data_ended_is_refused_within_bins(tmp_path):
    ds, longer = (packed(of(9).repeat(epochs).to_iter_dataset()) for epochs in (1, 2))
    iterator, _ = advanced(ds, 1)
    Handler().save(tmp_path, iterator)
    (path,) = tmp_path.glob("*.grainmill")
    record = json.loads(path.read_text())
    del record["ends"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="delivered a part"):
        Handler().restore(tmp_path, iter(longer))


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_moves_positions_is_refused(name, tmp_path):
    old, new, count = REFUSED[name]
    iterator, _ = advanced(old(), count)
    Handler().save(tmp_path, iterator)
    with pytest.raises(ValueError, match=r"saved from another pipeline|does not match"):
        Handler().restore(tmp_path, iter(new()))


def test_between_batches_of_bins_a_mixture_may_be_changed(tmp_path):
    iterator, _ = advanced(mixture({"a": 1, "b": 2}, ["a", "b"], "pack"), 2)
    assert restored(iterator, mixture({"a": 1, "b": 3}, ["a", "b"], "pack"), tmp_path)


def test_more_epochs_of_a_loader(tmp_path):
    def make(epochs):
        return grain.load(range(9), seed=1, shuffle=True, num_epochs=epochs, batch_size=2)

    iterator, seen = advanced(make(1), 3)
    then = restored(iterator, make(3), tmp_path)
    assert numbers_in(seen) + numbers_in(then) == numbers_in(make(3))


def test_what_changed_is_logged(tmp_path, caplog):
    iterator, _ = advanced(grain.IterDataset.mix({"a": part(0), "b": part(1)}), 5)
    new = grain.IterDataset.mix({"a": part(0), "c": part(1)})
    with caplog.at_level(logging.WARNING, "grainmill"):
        restored(iterator, new, tmp_path)
    assert "has the new dataset `c`" in caplog.text
    assert "no longer has the dataset `b`" in caplog.text
    assert "process_0-of-1.json" in caplog.text


def test_the_same_pipeline_is_not_looked_at_twice():
    saved = [{"stage": "RangeMapDataset", "length": 3}]
    assert changes.compared(saved, saved, [object()], {}, say_ends=True) == ([], [])
