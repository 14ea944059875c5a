"""Orders, elements, states and errors recorded from Grain.

They are in `../shared/data/grain_vectors`, and a small subset in `golden/`.

A change to what passes here breaks users' checkpoints. Every case of every file is either run or
listed in `NOT_YET` with the reason.
"""

import collections
import copy
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from pipelines import build, close, encode, take, transforms
from under_test import IS_GRAIN, experimental, grain

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "data" / "grain_vectors"

ELASTIC = "elastic iteration is not there yet"

# {file: {case id, or "*" for the whole file: reason}}
NOT_YET = {"elastic": {"*": ELASTIC}}

NO_PERMUTATION = "Grain's `index_shuffle` is no permutation at sizes 4^k + 1; ours is"
PAST_THE_EPOCH = "Grain's last window takes elements of the next epoch; ours stays inside the epoch"
FLOAT_LENGTH = "Grain's length of an endless batch goes through floats; ours is exact"

# {file: {case id: (reason, check of ours)}}: cases where ours deliberately differs from Grain.
BETTER = {
    "index_shuffle": {
        "all-65537-0": (NO_PERMUTATION, "permutation"),
        "all-65537-42": (NO_PERMUTATION, "permutation"),
        "points": (NO_PERMUTATION, "other_sizes_equal"),
    },
    "shuffle": {"big65537": (NO_PERMUTATION, "epoch_is_permutation")},
    "batch": {"infinite-len": (FLOAT_LENGTH, "length_is_exact")},
    "window_shuffle": {"map-ragged": (PAST_THE_EPOCH, "windows_stay_in_epoch")},
}

# Where Grain 0.2.18 differs from the vectors, which were recorded from a later Grain.
GRAIN_FAILS = {
    ("reindex", "list"): "newer than 0.2.18",
    ("reindex", "shuffled-parent"): "newer than 0.2.18",
    ("reindex", "negative"): "newer than 0.2.18",
    ("checkpoints", "concat_split"): "states do not survive JSON",
    ("checkpoints", "concat_split-nosplit"): "states do not survive JSON",
    ("data_loader", "shard0of3-False"): "0.2.18 drops the remainder whatever it is told",
    ("data_loader", "shard1of3-False"): "0.2.18 drops the remainder whatever it is told",
    ("data_loader", "shard2of3-False"): "0.2.18 drops the remainder whatever it is told",
}


def _read(directory):
    """{(file, case id): case} of a directory of vectors."""
    return {
        (path.stem, case["id"]): case
        for path in sorted(directory.glob("*.json"))
        for case in json.loads(path.read_text())["cases"]
    }


def _reason_not_run(file, case_id):
    reasons = NOT_YET.get(file, {})
    return reasons.get("*") or reasons.get(case_id)


CASES = {**_read(HERE / "golden" / "grain_vectors"), **_read(SHARED)}
TO_RUN = [
    key for key in CASES if not _reason_not_run(*key) and key[1] not in BETTER.get(key[0], {})
]
TO_IMPROVE = [
    (file, case_id) for file, rows in BETTER.items() for case_id in rows if (file, case_id) in CASES
]


def _mark(key):
    marks = [pytest.mark.better_than_grain(GRAIN_FAILS[key])] if key in GRAIN_FAILS else []
    return pytest.param(*key, id="/".join(key), marks=marks)


# --- the kinds of cases --------------------------------------------------------------------------


def digest(values):
    """A hash in place of a long list of ints."""
    values = [int(v) for v in values]
    joined = ",".join(map(str, values)).encode()
    return {
        "n": len(values),
        "first": values[:16],
        "last": values[-4:],
        "sha256": hashlib.sha256(joined).hexdigest(),
    }


def run_index_shuffle(case):
    shuffle = experimental.index_shuffle
    if "points" in case:
        return [shuffle(i, max_index=m, seed=s, rounds=r) for i, m, s, r in case["points"]]
    max_index = case["n"] - 1
    found = [
        shuffle(i, max_index=max_index, seed=case["seed"], rounds=case["rounds"])
        for i in range(case["n"])
    ]
    return found if case["n"] <= 64 else digest(found)


def run_map_items(case):
    dataset = build(grain, case["ops"])
    indices = case["indices"]
    items = [dataset[i] for i in (range(indices) if isinstance(indices, int) else indices)]
    shown = digest(items) if case.get("digest") else [encode(x) for x in items]
    return {"len": len(dataset), "items": shown}


def run_elements(case):
    iterator = iter(build(grain, case["ops"]))
    found = take(iterator, case.get("take"))
    close(iterator)
    return digest(found) if case.get("digest") else found


def run_checkpoint(case):
    iterator = iter(build(grain, case["ops"]))
    states, elements = {}, []
    while True:
        if len(elements) in case["at"]:
            states[str(len(elements))] = copy.deepcopy(iterator.get_state())
        found = take(iterator, 1)
        if not found:
            break
        elements += found
    if -1 in case["at"]:
        states["end"] = copy.deepcopy(iterator.get_state())
    close(iterator)
    return {"elements": elements, "states": states}


def make_sampler(case):
    options = dict(case["sampler"])
    shard = options.pop("shard", None)
    kind = getattr(grain.samplers, options.pop("kind", "IndexSampler"))
    sharding = grain.sharding
    shard_options = sharding.NoSharding() if shard is None else sharding.ShardOptions(*shard)
    return kind(shard_options=shard_options, **options)


def run_sampler(case):
    sampler = make_sampler(case)
    rows = []
    for index in case["indices"]:
        found = sampler[index]
        rng = None if found.rng is None else int(found.rng.integers(0, 2**32))
        rows.append([found.index, int(found.record_key), rng])
    return {"len": len(sampler), "repr": repr(sampler), "records": rows}


def make_loader(case):
    operations = [
        grain.transforms.Batch(*args) if name == "Batch" else transforms(grain)[name]()
        for name, *args in case.get("operations", [])
    ]
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, case["sampler"]["num_records"], 1),
        sampler=make_sampler(case),
        operations=operations,
        worker_count=case.get("worker_count", 0),
    )


def close_loader(iterator):
    close(iterator._iterator if IS_GRAIN else iterator)


def run_data_loader(case):
    iterator = iter(make_loader(case))
    states, elements = {}, []
    for k in range(case.get("take", 1000)):
        if k in case["at"]:
            states[str(k)] = iterator.get_state().decode()
        found = take(iterator, 1)
        if not found:
            break
        elements += found
    close_loader(iterator)
    return {"elements": elements, "states": states}


def _provoke(case):
    match case["what"]:
        case "build":
            build(grain, case["ops"])
        case "index":
            build(grain, case["ops"])[case["index"]]
        case "list":
            list(build(grain, case["ops"]))
        case "state":
            iter(build(grain, case["ops"])).set_state(case["state"])
        case "index_shuffle":
            experimental.index_shuffle(**case["args"])
        case "read_options":
            grain.ReadOptions(**case["args"])
        case "sampler":
            make_sampler(case)[case.get("index", 0)]
        case "shard_options":
            grain.sharding.ShardOptions(*case["args"])
        case "closed":
            iterator = iter(build(grain, case["ops"]))
            iterator.close()
            next(iterator)
        case other:
            pytest.fail(f"no way to provoke {other!r}")


def run_error(case):
    try:
        _provoke(case)
    except Exception as error:  # Grain may raise any type
        return {"type": type(error).__name__, "bases": [c.__name__ for c in type(error).__mro__]}
    return {"type": None, "bases": []}


KINDS = {
    "index_shuffle": run_index_shuffle,
    "map_items": run_map_items,
    "elements": run_elements,
    "checkpoint": run_checkpoint,
    "error": run_error,
    "sampler": run_sampler,
    "data_loader": run_data_loader,
}


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "case_id"), [_mark(key) for key in TO_RUN])
def test_case_equals_grain(file, case_id):
    case = CASES[file, case_id]
    found = KINDS[case["kind"]](case)
    if case["kind"] == "error":
        assert case["expect"]["type"] in found["bases"] or case["expect"] == {"type": found["type"]}
        return
    # Through JSON, like the expected values.
    assert json.loads(json.dumps(found)) == case["expect"]


CHECKPOINTS = [key for key in TO_RUN if CASES[key]["kind"] == "checkpoint"]


@pytest.mark.parametrize(("file", "case_id"), [_mark(key) for key in CHECKPOINTS])
@pytest.mark.parametrize("through_json", [False, True], ids=["direct", "json"])
def test_states_restore(file, case_id, through_json):
    case = CASES[file, case_id]
    elements = case["expect"]["elements"]
    written_by_us = {} if through_json else run_checkpoint(case)["states"]
    for key, state in case["expect"]["states"].items():
        start = len(elements) if key == "end" else int(key)
        # Our state, directly or through JSON; or Grain's recorded state.
        restored = state if through_json else written_by_us[key]
        iterator = iter(build(grain, case["ops"]))
        iterator.set_state(copy.deepcopy(restored) if IS_GRAIN else restored)
        assert take(iterator, None) == elements[start:], f"restored at {key} from {restored}"
        close(iterator)


LOADERS = [key for key in TO_RUN if CASES[key]["kind"] == "data_loader"]


@pytest.mark.parametrize(("file", "case_id"), [_mark(key) for key in LOADERS])
def test_states_of_loaders_restore(file, case_id):
    case = CASES[file, case_id]
    elements = case["expect"]["elements"]
    for key, state in case["expect"]["states"].items():
        iterator = iter(make_loader(case))
        iterator.set_state(state.encode())
        rest = take(iterator, len(elements) - int(key))
        close_loader(iterator)
        assert rest == elements[int(key) :], f"restored at {key}"


def _is_power_of_4(n):
    return n > 0 and n & (n - 1) == 0 and n.bit_length() % 2 == 1


def _permutation(case):
    found = [
        experimental.index_shuffle(i, max_index=case["n"] - 1, seed=case["seed"], rounds=4)
        for i in range(case["n"])
    ]
    assert sorted(found) == list(range(case["n"]))


def _other_sizes_equal(case):
    found = run_index_shuffle(case)
    by_size = collections.defaultdict(set)
    for (_, max_index, seed, rounds), ours, theirs in zip(
        case["points"], found, case["expect"], strict=True
    ):
        # Sizes up to 16 bits use a block of 16 bits, which always gives a permutation.
        if _is_power_of_4(max_index) and max_index >= 4**8:
            assert 0 <= ours <= max_index
            by_size[max_index, seed, rounds].add(ours)
        else:
            assert ours == theirs, f"max_index={max_index} seed={seed} rounds={rounds}"
    assert all(len(values) == 3 for values in by_size.values()), "three indices share a place"


def _epoch_is_permutation(case):
    dataset = build(grain, case["ops"])
    assert sorted(dataset[i] for i in range(case["indices"])) == list(range(case["indices"]))


def _windows_stay_in_epoch(case):
    dataset = build(grain, case["ops"])
    (_, n), (_, window, _) = case["ops"]
    assert len(dataset) == n
    for epoch in range(2):
        found = [dataset[epoch * n + i] for i in range(n)]
        assert sorted(found) == list(range(n))
        for start in range(0, n, window):
            end = min(start + window, n)
            assert sorted(found[start:end]) == list(range(start, end))
    # Full windows of the first epoch equal Grain's.
    full = math.floor(n / window) * window
    assert [encode(dataset[i]) for i in range(full)] == case["expect"]["items"][:full]


def _length_is_exact(case):
    dataset = build(grain, case["ops"])
    batch_size = case["ops"][-1][1]
    assert len(dataset) == -(-sys.maxsize // batch_size)
    assert [encode(dataset[i]) for i in case["indices"]] == case["expect"]["items"]


REQUIRED = {
    "length_is_exact": _length_is_exact,
    "permutation": _permutation,
    "other_sizes_equal": _other_sizes_equal,
    "epoch_is_permutation": _epoch_is_permutation,
    "windows_stay_in_epoch": _windows_stay_in_epoch,
}


@pytest.mark.better_than_grain("these are Grain's defects")
@pytest.mark.parametrize(("file", "case_id"), TO_IMPROVE, ids=["/".join(k) for k in TO_IMPROVE])
def test_case_is_better_than_grain(file, case_id):
    _, required = BETTER[file][case_id]
    REQUIRED[required](CASES[file, case_id])


def test_no_case_is_dropped_silently():
    named = {key for key in CASES if _reason_not_run(*key)}
    assert set(CASES) == {*TO_RUN, *TO_IMPROVE} | named
    assert not ({*TO_RUN, *TO_IMPROVE} & named)
    assert {CASES[key]["kind"] for key in TO_RUN} == set(KINDS)
    if SHARED.is_dir():
        tables = [(f, c) for f, rows in {**NOT_YET, **BETTER}.items() for c in rows if c != "*"]
        assert [key for key in tables if key not in CASES] == [], (
            "a table names a case that is gone"
        )
        assert [f for f in NOT_YET if not any(key[0] == f for key in CASES)] == []


def test_default_seed_scheme_is_seed_sequence_of_seed_and_depth():
    seed = int(np.random.SeedSequence([42, 1]).generate_state(1, np.uint32)[0])
    derived = grain.MapDataset.range(20).seed(42).shuffle()
    given = grain.MapDataset.range(20).shuffle(seed)
    assert [derived[i] for i in range(40)] == [given[i] for i in range(40)]
