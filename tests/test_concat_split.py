"""Concat-then-split packing: rows, states, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from driven import Driven
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_parent import ListStage, drain
from test_packing import _MAPS, assert_all_same, decoded, golden, tokens

from grainmill._stages.concat_split import BOSHandling, ConcatThenSplit, ConcatThenSplitStage

BOS = BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS


def split(elements, *, block=5, **options):
    node = ConcatThenSplit.after(None, **options)
    return Driven(ConcatThenSplitStage(node, ListStage(elements, block)))


def stage_of(case):
    (_, count), (_, map_), _, (_, options) = case["ops"]
    if "bos_handling" in options:
        options = {**options, "bos_handling": BOSHandling[options["bos_handling"]]}
    return split([_MAPS[map_](x) for x in range(count)], **options)


@pytest.mark.parametrize("case", golden("packing", "concat_split"))
def test_rows_are_those_of_golden_vectors(case):
    assert_all_same(drain(stage_of(case)), [decoded(row) for row in case["expect"]])


@pytest.mark.parametrize("case", golden("checkpoints", "concat_split"))
def test_states_are_those_of_golden_vectors(case):
    expected = [decoded(row) for row in case["expect"]["elements"]]
    for place, state in case["expect"]["states"].items():
        stage = stage_of(case)
        count = len(expected) if place == "end" else int(place)
        for _ in range(count):
            stage.pull(1)
        assert json.loads(json.dumps(stage.state())) == state
        other = stage_of(case)
        other.restore(json.loads(json.dumps(state)))
        assert_all_same(drain(other), expected[count:])


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 20), max_size=30), capacity=st.integers(1, 12))
def test_concat_split_matches_slow_cut(lengths, capacity):
    cells = [(x, cell) for x, length in enumerate(lengths) for cell in range(length)]
    expected = []
    for first in range(0, len(cells), capacity):
        row = np.zeros((3, capacity), np.int64)
        segment = position = 0
        for cell, (x, value) in enumerate(cells[first : first + capacity]):
            new = cell == 0 or cells[first + cell - 1][0] != x
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            row[:, cell] = 100 * x + value, segment, position
        expected.append(row)
    elements = [{"t": 100 * x + np.arange(length)} for x, length in enumerate(lengths)]
    rows = drain(split(elements, length_struct={"t": capacity}))
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_array_equal([row["t"], row["t_segment_ids"], row["t_positions"]], other)


@settings(max_examples=60)
@given(lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_every_token_of_every_feature_comes_once(lengths):
    elements = [
        {"t": np.arange(t) + 100 * x, "u": np.arange(u) + 100 * x}
        for x, (t, u) in enumerate(lengths)
    ]
    rows = drain(split(elements, length_struct={"t": 5, "u": 3}))
    for name in ("t", "u"):
        tokens = [row[name][row[f"{name}_segment_ids"] > 0] for row in rows]
        expected = [element[name] for element in elements]
        assert np.concatenate([[], *tokens]).tolist() == np.concatenate([[], *expected]).tolist()


@pytest.mark.parametrize("block", [1, 4, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_full_length_features": False},
        {"bos_handling": BOS, "bos_features": ["tokens"], "bos_token_id": 1},
    ],
)
def test_restored_stage_continues_at_next_row(options, block):
    def stage():
        return split(
            [tokens(x) for x in range(40)], block=block, length_struct={"tokens": 7}, **options
        )

    rows = drain(stage())
    running = stage()
    states = [running.state()]
    while (pulled := running.pull(4)).elements:
        states += [pulled.state_after(count + 1) for count in range(len(pulled.elements))]
    assert len(states) == len(rows) + 1
    for count, state in enumerate(states):
        as_json = json.loads(json.dumps(state))
        other = stage()
        other.pull(2)
        other.restore(as_json)
        assert as_json == json.loads(json.dumps(state)) == json.loads(json.dumps(other.state()))
        assert_all_same(drain(other), rows[count:])


def test_failing_parent_loses_no_element():
    elements = [tokens(x) for x in range(12)]
    expected = drain(split(elements, length_struct={"tokens": 12}))
    stage = split([*elements[:7], KeyError("boom"), *elements[7:]], length_struct={"tokens": 12})
    rows, failures = [], 0
    while True:
        try:
            pulled = stage.pull(2).elements
        except KeyError:
            failures += 1
            stage.parents[0].elements.pop(7)
            continue
        if not pulled:
            break
        rows += pulled
    assert failures == 1
    assert_all_same(rows, expected)


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (
            {"t": np.zeros(2, int), "u": 1},
            r"structure {'t': 'int64\[2\]', 'u': 'int\[\]'} but target",
        ),
        ({"u": np.zeros(2, int)}, "There must be a sequence length for each feature."),
        (np.zeros(2, int), r"must be unnested dictionaries but got int64\[2\]."),
        ({"t": {"x": np.zeros(1)}}, "must be unnested dictionaries"),
    ],
)
def test_elements_of_wrong_structure_are_refused(element, message):
    with pytest.raises(ValueError, match=message) as raised:
        split([{"t": 1}, element], length_struct={"t": 4}).pull(1)
    assert "Element 1 " in raised.value.__notes__[0]


def test_meta_feature_beyond_its_row_is_refused():
    elements = [{"t": np.zeros(1), "m": np.zeros(3)}]
    with pytest.raises(ValueError, match="meta feature `m` must fit into a row of 2 values, got 3"):
        split(elements, length_struct={"t": 4, "m": 2}, meta_features=["m"]).pull(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos_handling": BOS}, "bos_token_id must be set if bos_handling is"),
        ({"bos_features": ["t"]}, "indicates that BOS handling is not used"),
        ({"bos_token_id": 3}, "indicates that BOS handling is not used"),
        (
            {"bos_handling": BOS, "bos_token_id": 1, "bos_features": ["m"], "meta_features": ["m"]},
            "bos_features and meta_features should not overlap",
        ),
        ({"length_struct": {}}, "at least one feature"),
        ({"length_struct": {"t": 0}}, "`length_struct` of `t` must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused_when_the_plan_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        ConcatThenSplit.after(None, **{"length_struct": {"t": 4, "m": 2}, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remainder_slices": {"u": [-1, -1]}}, "must have the features"),
        ({"remainder_slices": {"tokens": [3, 1]}}, "must be a slice"),
        ({"remainder_slices": {"tokens": [3, 99]}}, "restore needs the same data"),
        ({"elements_from_buffer_after_checkpoint": 5}, "after 5 rows of a step"),
    ],
)
def test_states_of_other_data_are_refused(change, message):
    stage = split([tokens(x) for x in range(6)], length_struct={"tokens": 7})
    state = {**stage.state(), **change}

    def resume():
        stage.restore(state)
        stage.pull(1)

    with pytest.raises(ValueError, match=message):
        resume()
