"""Save and restore at any position of any stage: the same elements follow."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from effort import LONG
from pipelines import close, take
from stages import STAGES, make
from under_test import IS_GRAIN, experimental, grain

JSON_SENTINEL = "ConcatThenSplit states do not survive JSON"
KEPT_STATE = "Interleave keeps the caller's state and changes it"
FLAT_MAP_END = "the end state leaves the old buffer in place"
PREFETCH_STATE = "stages downstream of a concat-then-split or an interleave inherit its defect"

# Stages that Grain 0.2.18 does not resume exactly (section 11 of the specification).
GRAIN_FAILS = {
    **dict.fromkeys([s for s in STAGES if s.startswith("concat_split")], JSON_SENTINEL),
    **dict.fromkeys([s for s in STAGES if s.startswith("interleave")], KEPT_STATE),
    **dict.fromkeys([s for s in STAGES if "mp_prefetch" in s], KEPT_STATE),
    **dict.fromkeys([s for s in STAGES if s.startswith("multithread_prefetch")], KEPT_STATE),
    "cache_repeat": "a restored state reads differently before the first element",
    "flat_map": FLAT_MAP_END,
    "mix_of_packed": PREFETCH_STATE,
}


def _stage_param(name):
    marks = [pytest.mark.better_than_grain(GRAIN_FAILS[name])] if name in GRAIN_FAILS else []
    return pytest.param(name, marks=marks)


# Stages without a user's iterator; starting processes would take long.
PLANNED = [name for name in STAGES if name != "user_iter" and "mp_prefetch" not in name]
EVERY_STAGE = [_stage_param(name) for name in STAGES]


def _full_pass(dataset):
    """All elements of `dataset`, and as JSON the state before each, at the end and after it."""
    iterator = iter(dataset)
    elements, states = [], [json.dumps(iterator.get_state())]
    while found := take(iterator, 1):
        elements += found
        states.append(json.dumps(iterator.get_state()))
    # Further calls at the end return nothing.
    assert take(iterator, 1) == []
    states.append(json.dumps(iterator.get_state()))
    close(iterator)
    return elements, states


def _rest_after(iterator, state):
    """The elements of `iterator` after restoring `state`, which must stay unchanged."""
    before = copy.deepcopy(state)
    iterator.set_state(state)
    rest = take(iterator, None)
    assert state == before, "the state given to `set_state` was changed"
    return rest


def check_stage(make_dataset, *, few_new=False):
    """Every position of a finite dataset can be saved, and restored anywhere and repeatedly.

    A used iterator restores all of them, a new one every third; with `few_new`, one in the middle.
    `test_every_stage_resumes_in_a_fresh_process` restores each in a new one.
    """
    dataset = make_dataset()
    elements, states = _full_pass(dataset)
    assert len(states) == len(elements) + 2
    veteran = iter(make_dataset())
    take(veteran, None)
    for place, text in enumerate(states):
        rest, state = elements[place:], json.loads(text)
        is_new = place == len(states) // 2 if few_new else LONG or place % 3 == 0
        if is_new:
            fresh = iter(dataset if few_new else make_dataset())
            assert _rest_after(fresh, state) == rest, f"new iterator at {place} from {text}"
            assert _rest_after(fresh, state) == rest, f"second restore at {place} from {text}"
            close(fresh)
        # The same dataset object, and an iterator that has reached the end and was restored.
        assert _rest_after(veteran, state) == rest, f"used iterator at {place} from {text}"
        again = veteran if few_new else iter(dataset)
        again.set_state(state)
        assert json.loads(json.dumps(again.get_state())) == state, f"state at {place} changed"
        first = take(again, 1)
        assert first == rest[:1]
        # One element on, the state is the same as in the full pass.
        if first:
            assert json.dumps(again.get_state()) == states[place + 1]
        again.set_state(state)
        assert take(again, None) == rest
        # At the end, too.
        assert json.dumps(again.get_state()) == states[-1], f"from {place} to the end"
        if again is not veteran:
            close(again)
    for place in range(len(states) - 1, -1, -len(states) if few_new else -3):
        # Backwards, in one iterator, without reaching the end in between.
        iterator = veteran if few_new else iter(dataset)
        if few_new:
            iterator.set_state(json.loads(states[0]))
        take(iterator, place)
        target = place // 2
        iterator.set_state(json.loads(states[target]))
        assert take(iterator, None) == elements[target:], f"from {place} back to {target}"
        close(iterator)
    close(veteran)


@pytest.mark.parametrize("name", EVERY_STAGE)
def test_stage_resumes_at_every_place(name):
    # Starting the processes of an iterator takes longer than everything else.
    few_new = "mp_prefetch" in name and not LONG
    check_stage(lambda: make(grain, name), few_new=few_new)


def _nothing(kind):
    numbers = grain.MapDataset.range(5 * (kind != "empty")).to_iter_dataset()
    if kind == "dropped":
        return numbers.filter(lambda x: x < 0)
    if kind == "limited":
        return grain.experimental.LimitIterDataset(numbers.filter(lambda x: x < 0), 3)
    if kind == "interleaved":
        return experimental.InterleaveIterDataset(
            [_nothing("empty"), _nothing("dropped")], cycle_length=2
        )
    if kind == "repeated":
        return experimental.RepeatIterDataset(_nothing("dropped"), 2)
    return numbers


@pytest.mark.skipif(IS_GRAIN, reason="it repeats nothing for ever")
@pytest.mark.parametrize("num_epochs", [None, 1, 4])
@pytest.mark.parametrize("kind", ["empty", "dropped", "limited", "interleaved", "repeated"])
def test_repeats_of_nothing_resume(kind, num_epochs):
    check_stage(lambda: experimental.RepeatIterDataset(_nothing(kind), num_epochs))


@pytest.mark.skipif(IS_GRAIN, reason="it has no statistics of this kind")
@pytest.mark.parametrize("name", PLANNED)
def test_delivered_elements_are_counted_after_any_state(name):
    dataset = make(grain, name)
    _, states = _full_pass(dataset)
    iterator, count = iter(dataset), 0
    for place, text in enumerate(states):
        for step in (1, 2, None) if LONG or place % 3 == 0 else (1,):
            iterator.set_state(json.loads(text))
            assert iterator.stats()["elements"] == count, f"restored at {place}"
            count += len(take(iterator, step))
            assert iterator.stats()["elements"] == count, f"{step} elements from {place}"
    close(iterator)


@pytest.mark.parametrize("name", EVERY_STAGE)
def test_live_state_is_a_snapshot(name):
    """Advancing the iterator does not change earlier states; these can be restored without JSON."""
    iterator = iter(make(grain, name))
    kept, texts, elements = [], [], []
    while True:
        state = iterator.get_state()
        kept.append(state)
        texts.append(json.dumps(state))
        found = take(iterator, 1)
        if not found:
            break
        elements += found
    assert [json.dumps(state) for state in kept] == texts
    for place in range(0, len(kept), 2):
        iterator.set_state(kept[place])
        assert take(iterator, None) == elements[place:], f"place {place}"
    assert [json.dumps(state) for state in kept] == texts
    close(iterator)


def test_every_stage_resumes_in_a_fresh_process(tmp_path):
    """One test, since one process restores the states of all stages; many start workers."""
    expected, states = {}, {}
    for name in STAGES:
        if IS_GRAIN and name in GRAIN_FAILS:
            continue
        elements, texts = _full_pass(make(grain, name))
        expected[name] = {str(k): elements[k:] for k in range(len(texts))}
        states[name] = {str(k): json.loads(text) for k, text in enumerate(texts)}
    path = tmp_path / "states.json"
    path.write_text(json.dumps(states))
    here = Path(__file__).parent
    process = subprocess.run(
        [sys.executable, str(here / "resume_worker.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    # Expected values go through JSON like those that come back.
    expected = json.loads(json.dumps(expected))
    assert {name: found[name] for name in expected if found[name] != expected[name]} == {}


@pytest.mark.parametrize("name", ["read_default", "thread_prefetch", "first_fit", "mix", "batch"])
def test_shipped_check_agrees(name):
    experimental.assert_equal_output_after_checkpoint(make(grain, name))


def test_state_of_an_endless_pipeline_is_small():
    dataset = grain.MapDataset.range(1000).shuffle(seed=1).repeat().to_iter_dataset()
    dataset = experimental.WindowShuffleIterDataset(dataset, window_size=100, seed=3).batch(7)
    iterator = iter(dataset)
    take(iterator, 500)
    state = json.dumps(iterator.get_state())
    assert len(state) < 200
    expected = take(iterator, 20)
    restored = iter(dataset)
    restored.set_state(json.loads(state))
    assert take(restored, 20) == expected


@pytest.mark.better_than_grain("the refused state has changed the iterator already")
@pytest.mark.parametrize("next_index", [-1, 8])
def test_state_out_of_range_is_refused(next_index):
    iterator = iter(grain.MapDataset.range(7).to_iter_dataset())
    with pytest.raises(IndexError, match=f"Checkpoint `next_index` {next_index} is out of range"):
        iterator.set_state({"next_index": next_index})
    assert take(iterator, None) == list(range(7))


def _without_one_key(state):
    """Copies of `state` that lack one of its keys, at any depth."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in list(items):
        if isinstance(state, dict):
            yield {k: v for k, v in state.items() if k != key}
        if isinstance(value, dict | list):
            for changed in _without_one_key(value):
                damaged = copy.copy(state)
                damaged[key] = changed
                yield damaged


@pytest.mark.better_than_grain("Grain's iterators are then anywhere")
@pytest.mark.parametrize("name", PLANNED)
def test_refused_state_leaves_the_iterator_where_it_is(name):
    """Programs try to restore a state, and continue from their position if it does not fit."""
    elements, _ = _full_pass(make(grain, name))
    for place in (0, 1, len(elements) // 2) if LONG else (0, len(elements) // 2):
        iterator = iter(make(grain, name))
        iterator.start_prefetch()
        take(iterator, place)
        state = iterator.get_state()
        for damaged in [*_without_one_key(state), {"next_index": 10**6}, {}]:
            try:
                iterator.set_state(copy.deepcopy(damaged))
            except (ValueError, IndexError):
                assert iterator.get_state() == state, damaged
            else:
                iterator.set_state(state)
        try:
            experimental.set_next_index(iterator, 10**6)
        except (NotImplementedError, IndexError):
            assert take(iterator, None) == elements[place:]
        close(iterator)


def _changed(state):
    """(path, description, copy of `state`) for each value of it, replaced by a wrong one."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    if isinstance(state, dict):
        yield "", "a key too many", {**state, "no_such_key": 1}
    else:
        yield "", "an entry too many", [*state, state[-1] if state else 0]
    for key, value in list(items):
        wrong = [1.5, "1", b"1", -(10**9), 2**70]
        if isinstance(value, dict | list):
            wrong += [None, [value], 3]
            for path, what, changed in _changed(value):
                damaged = copy.copy(state)
                damaged[key] = changed
                yield f"{key}/{path}", what, damaged
        else:
            wrong += [[value], {}]
            if not isinstance(value, bool):
                wrong += [None, True]
        for bad in wrong:
            damaged = copy.copy(state)
            damaged[key] = bad
            yield str(key), repr(bad), damaged


# Booleans as 1 and 0; states that Grain omits; a dataset removed from a mixture.
MAY_PASS = re.compile(
    r".*exhausted/\d: True|.*iterators_in_use_states/\d: None|.*future_states: None"
    r"|.*parents/: a key too many"
)

# Users' iterators check their states themselves.
CHECKED = [name for name in PLANNED if not name.startswith("user_") or name == "user_map"]


@pytest.mark.better_than_grain("Grain takes what it is given")
@pytest.mark.parametrize("name", CHECKED)
def test_state_that_can_be_told_to_be_wrong_is_refused(name):
    """Booleans, floats and keys of another stage are not accepted as a position."""
    elements, _ = _full_pass(make(grain, name))
    for place in (1, len(elements) // 2) if LONG else (len(elements) // 2,):
        iterator = iter(make(grain, name))
        take(iterator, place)
        state = json.loads(json.dumps(iterator.get_state()))
        for path, what, damaged in _changed(state):
            kept = copy.deepcopy(damaged)
            try:
                iterator.set_state(damaged)
            except (ValueError, IndexError) as refused:
                text = str(refused)
                assert re.match(r"state of \S+|Checkpoint `next_index` ", text), text
                assert json.loads(json.dumps(iterator.get_state())) == state, (path, what)
            else:
                assert MAY_PASS.fullmatch(f"{path}: {what}"), f"{path}: {what} in {state}"
                iterator.set_state(state)
            assert damaged == kept
        assert take(iterator, None) == elements[place:]
        close(iterator)


def _limit(count):
    return experimental.LimitIterDataset(grain.MapDataset.range(9).to_iter_dataset(), count)


def _parts(count):
    return [grain.MapDataset.range(3).to_iter_dataset() for _ in range(count)]


def _window(size):
    return experimental.WindowShuffleIterDataset(
        grain.MapDataset.range(9).to_iter_dataset(), window_size=size, seed=1
    )


# The pipeline that saves a state, after how many elements, the one that refuses it, and texts in
# the message.
OTHER_PIPELINES = {
    "shorter": (
        lambda: grain.MapDataset.range(9).to_iter_dataset(),
        7,
        lambda: grain.MapDataset.range(5).to_iter_dataset(),
        ["Checkpoint `next_index` 7 is out of range for dataset of length 5."],
    ),
    "smaller limit": (
        lambda: _limit(8),
        6,
        lambda: _limit(4),
        ["LimitIterDataset(count=4)", "`count_elements_read`", "from 0 to 4", "got 6", "restore a"],
    ),
    "fewer epochs": (
        lambda: experimental.RepeatIterDataset(_parts(1)[0], 5),
        11,
        lambda: experimental.RepeatIterDataset(_parts(1)[0], 2),
        ["RepeatIterDataset(num_epochs=2)", "`epoch`", "from 0 to 2, got 3"],
    ),
    "smaller window": (
        lambda: _window(8),
        6,
        lambda: _window(3),
        ["WindowShuffleIterDataset", "`pos_in_window`", "from 0 to 3, got 6"],
    ),
    "more parts to zip": (
        lambda: experimental.ZipIterDataset(_parts(2)),
        1,
        lambda: experimental.ZipIterDataset(_parts(3)),
        ["ZipIterDataset([3 parents]", "`parents` must be a list of 3", "has 2", "restore a state"],
    ),
    "more parts to mix": (
        lambda: grain.IterDataset.mix(_parts(2)),
        1,
        lambda: grain.IterDataset.mix(_parts(3)),
        ["MixedIterDataset([3 parents]", "`parents` must be a list of 3", "has 2"],
    ),
    "fewer datasets": (
        lambda: experimental.InterleaveIterDataset(_parts(5), cycle_length=2),
        9,
        lambda: experimental.InterleaveIterDataset(_parts(3), cycle_length=2),
        ["InterleaveIterDataset", "`iterators_in_use_indices`", "from 0 to 2"],
    ),
    "fewer open": (
        lambda: experimental.InterleaveIterDataset(_parts(5), cycle_length=3),
        2,
        lambda: experimental.InterleaveIterDataset(_parts(5), cycle_length=2),
        ["InterleaveIterDataset", "must be a list of 2", "has 3"],
    ),
    "another stage": (
        lambda: _limit(8),
        2,
        lambda: experimental.RepeatIterDataset(_parts(1)[0], 2),
        ["RepeatIterDataset", "lacks ['epoch']", "count_elements_read"],
    ),
    "no stage": (
        lambda: _limit(8),
        2,
        lambda: grain.MapDataset.range(9).to_iter_dataset(),
        ["PrefetchIterDataset", "lacks ['next_index']"],
    ),
}


@pytest.mark.better_than_grain("Grain goes on anywhere, or fails without saying why")
@pytest.mark.parametrize("name", OTHER_PIPELINES)
def test_state_of_another_pipeline_is_refused_with_what_differs(name):
    saved_by, place, make_other, texts = OTHER_PIPELINES[name]
    iterator = iter(saved_by())
    take(iterator, place)
    state = iterator.get_state()
    other = iter(make_other())
    first = take(other, 1)
    with pytest.raises((ValueError, IndexError)) as refused:
        other.set_state(state)
    for text in texts:
        assert text in str(refused.value)
    assert first + take(other, None) == take(iter(make_other()), None)


@pytest.mark.better_than_grain("the workers fail when the next element is asked for")
def test_state_that_workers_would_refuse_is_refused_at_once():
    dataset = grain.MapDataset.range(9).to_iter_dataset()
    iterator = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    state = iterator.get_state()
    states = state["iterators_in_use_states"]
    for damaged in ({"next_index": 6}, {"next_index": True}, {"epoch": 1}):
        with pytest.raises((ValueError, IndexError), match=r"out of range|next_index"):
            iterator.set_state({**state, "iterators_in_use_states": [states[0], damaged]})
        assert iterator.get_state() == state
    assert take(iterator, None) == list(range(9))
    close(iterator)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_numbers_of_numpy_are_numbers_of_states(kind):
    iterator = iter(_limit(8))
    iterator.set_state({"parent": {"next_index": kind(3)}, "count_elements_read": kind(3)})
    assert take(iterator, None) == [3, 4, 5, 6, 7]


@pytest.mark.better_than_grain("Grain's fails with the error of an operator, or not at all")
@pytest.mark.parametrize("index", [True, 1.5, "1", None, -1, 100])
def test_next_index_is_checked(index):
    iterator = iter(grain.MapDataset.range(9).to_iter_dataset().batch(2))
    take(iterator, 1)
    with pytest.raises((TypeError, IndexError), match=r"`index`|out of range"):
        experimental.set_next_index(iterator, index)
    assert experimental.get_next_index(iterator) == 1
    experimental.set_next_index(iterator, np.int64(2))
    assert take(iterator, 1) == [{"nd": ["int64", [2], [4, 5]]}]
