"""First-fit and best-fit packing: rows, states, errors."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from driven import Driven
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_pack import fit, row_arrays
from pack_parent import ListStage, drain

import grainmill as grain
from grainmill import experimental
from grainmill._iterators.feature_values import FeatureValues
from grainmill._native import BinPacker, RowPacker
from grainmill._stages.pack import FitPack, FitPackStage

_VECTORS = pathlib.Path(__file__).parents[2] / "shared" / "data" / "grain_vectors"


def tokens(x):
    n = (x * 7 + 3) % 9 + 1
    return {"tokens": np.arange(n, dtype=np.int32) + 100 * (x + 1)}


def tokens2(x):
    m = (x * 5 + 1) % 6 + 1
    inputs = tokens(x)["tokens"]
    return {"inputs": inputs, "targets": np.arange(m, dtype=np.int64) + 1000 * (x + 1)}


def tokens_meta(x):
    return {**tokens(x), "id": np.array([x], dtype=np.int64)}


def tokens_free_meta(x):
    return {**tokens(x), "name": f"doc{x}"}


def tokens_group(x):
    return {**tokens(x), "epoch": np.full(len(tokens(x)["tokens"]), x // 6 + 1, np.int32)}


_MAPS = {
    map_.__name__: map_ for map_ in (tokens, tokens2, tokens_meta, tokens_free_meta, tokens_group)
}


def packed(elements, *, best_fit=False, block=5, **options):
    options.setdefault("num_packing_bins", 3)
    node = FitPack.after(None, best_fit=best_fit, **options)
    return Driven(FitPackStage(node, ListStage(elements, block)))


def decoded(value):
    if isinstance(value, dict) and set(value) == {"dict"}:
        return {key: decoded(part) for key, part in value["dict"].items()}
    if isinstance(value, dict) and set(value) == {"nd"}:
        dtype, shape, cells = value["nd"]
        return np.array(cells, dtype).reshape(shape)
    if isinstance(value, dict) and set(value) == {"list"}:
        return [decoded(part) for part in value["list"]]
    return value


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert actual[key].dtype == value.dtype
            np.testing.assert_array_equal(actual[key], value)
        else:
            assert actual[key] == value


def assert_all_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def golden(file, *names):
    path = _VECTORS / f"{file}.json"
    if not path.exists():
        return []
    cases = json.loads(path.read_text())["cases"]
    return [
        pytest.param(case, id=f"{file}-{case['id']}")
        for case in cases
        if case["ops"][-1][0] in names and len(case["ops"]) == 4
    ]


def stage_of(case):
    (_, count), (_, map_), _, (kind, options) = case["ops"]
    elements = [_MAPS[map_](x) for x in range(count)]
    return packed(elements, best_fit=kind == "best_fit", **options)


@pytest.mark.parametrize("case", golden("packing", "first_fit", "best_fit"))
def test_rows_are_those_of_golden_vectors(case):
    assert_all_same(drain(stage_of(case)), [decoded(row) for row in case["expect"]])


@pytest.mark.parametrize("case", golden("checkpoints", "first_fit", "best_fit"))
def test_states_are_those_of_golden_vectors(case):
    expected = [decoded(row) for row in case["expect"]["elements"]]
    for place, state in case["expect"]["states"].items():
        stage = stage_of(case)
        count = len(expected) if place == "end" else int(place)
        for _ in range(count):
            stage.pull(1)
        if place == "end":
            assert stage.pull(1).elements == []
        assert stage.state() == state
        other = stage_of(case)
        other.restore(json.loads(json.dumps(state)))
        assert_all_same(drain(other), expected[count:])


def test_rows_of_documented_example():
    stage = packed([tokens(x) for x in range(10)], length_struct={"tokens": 12}, shuffle_bins=False)
    rows = drain(stage)
    assert rows[0]["tokens"].tolist() == [*range(100, 104), 200, 201, *range(500, 505), 700]
    assert rows[0]["tokens_segment_ids"].tolist() == [1] * 4 + [2] * 2 + [3] * 5 + [4]
    assert rows[1]["tokens"].tolist() == [*range(300, 309), *range(600, 603)]
    assert rows[2]["tokens"].tolist() == [*range(400, 407), 0, 0, 0, 0, 0]


_ELEMENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 6)).map(
        lambda sizes: {"a": list(range(1, sizes[0] + 1)), "b": list(range(1, sizes[1] + 1))}
    ),
    max_size=60,
)


@settings(max_examples=cases(60, 3_000))
@given(
    elements=_ELEMENTS,
    num_bins=st.integers(1, 6),
    best_fit=st.booleans(),
    max_sequences=st.none() | st.integers(1, 4),
    alignment=st.none() | st.fixed_dictionaries({"a": st.integers(1, 4), "b": st.integers(1, 4)}),
)
def test_fit_matches_slow_fit(elements, num_bins, best_fit, max_sequences, alignment):
    capacities = {"a": 9, "b": 6}
    stage = packed(
        [{key: np.array(value, np.int64) for key, value in one.items()} for one in elements],
        best_fit=best_fit,
        length_struct=capacities,
        num_packing_bins=num_bins,
        shuffle_bins=False,
        max_sequences_per_bin=max_sequences,
        pack_alignment_struct=alignment,
        padding_struct={"a": -1, "b": -2},
    )
    batches = fit(
        elements,
        capacities,
        num_bins,
        best_fit=best_fit,
        max_sequences=max_sequences,
        alignment=alignment,
    )
    rows = [row_arrays(row, capacities, {"a": -1, "b": -2}) for batch in batches for row in batch]
    actual = drain(stage, limit=4)
    assert len(actual) == len(rows)
    for one, other in zip(actual, rows, strict=True):
        assert set(one) == set(other)
        for key, value in other.items():
            np.testing.assert_array_equal(one[key], value)


@pytest.mark.parametrize("best_fit", [False, True])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_restored_stage_continues_at_next_row(best_fit, block):
    def stage():
        return packed(
            [tokens(x) for x in range(40)],
            best_fit=best_fit,
            block=block,
            length_struct={"tokens": 12},
            seed=5,
        )

    rows = drain(stage())
    running, states = stage(), []
    while (pulled := running.pull(4)).elements:
        states += [pulled.state_after(count) for count in range(len(pulled.elements))]
    assert len(states) == len(rows)
    for count, state in enumerate([*states, running.state()]):
        kept = json.loads(json.dumps(state))
        other = stage()
        other.pull(2)
        other.restore(state)
        assert other.state() == kept == state
        assert_all_same(drain(other), rows[count:])


BATCHED = {
    "one": (tokens, {"tokens": 12}),
    "two": (tokens2, {"inputs": 12, "targets": 9}),
    "unmarked": (tokens_group, {"tokens": 12, "epoch": 12}),
    "objects": (lambda x: {"tokens": np.array([b"ab", b"c"] * (x % 3), object)}, {"tokens": 12}),
    "nested": (lambda x: {"part": tokens(x)}, {"part": {"tokens": 12}}),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_are_those_of_the_rows(name, shuffle):
    make, lengths = BATCHED[name]
    ds = experimental.FirstFitPackIterDataset(
        grain.MapDataset.range(60).map(make).to_iter_dataset(),
        length_struct=lengths,
        num_packing_bins=5,
        meta_features={"epoch", "part"} & set(lengths),
        shuffle_bins=shuffle,
    )
    # With a user's function, elements are passed on singly, not as rows of columns.
    expected = list(ds.batch(7, batch_fn=list))
    batches = list(ds.batch(7))
    assert [len(rows) for rows in expected] == [7] * (len(batches) - 1) + [len(expected[-1])]
    for batch, rows in zip(batches, expected, strict=True):
        assert list(batch) == list(rows[0])
        for place, row in enumerate(rows):
            for key, stacked in batch.items():
                assert repr(place_of(stacked, place)) == repr(row[key])


def place_of(stacked, place):
    """Element `place` of a batch that may be nested."""
    if isinstance(stacked, dict):
        return {key: place_of(part, place) for key, part in stacked.items()}
    return stacked[place]


def test_failing_parent_loses_no_element():
    elements = [tokens(x) for x in range(12)]
    expected = drain(packed(elements, length_struct={"tokens": 12}))
    stage = packed([*elements[:7], KeyError("boom"), *elements[7:]], length_struct={"tokens": 12})
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


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_element_that_can_not_be_packed_raises_again_and_is_named(number):
    elements = [tokens(0), tokens(1), tokens(2)]
    elements.insert(number, {"tokens": np.zeros(13, np.int32)})
    stage = packed(elements, length_struct={"tokens": 12})
    for _ in range(2):
        with pytest.raises(ValueError, match="Inputs to PackedBatch must be truncated") as raised:
            stage.pull(1)
        assert "('tokens', 13, 12)" in str(raised.value)
        assert f"Element {number} " in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="Inputs to packer must be truncated"):
        packed(elements, best_fit=True, length_struct={"tokens": 12}).pull(1)


@pytest.mark.parametrize(
    ("element", "failure", "message"),
    [
        ({"tokens": {"x": np.zeros(1)}}, ValueError, "Failed to extract segment ids for 'tokens'"),
        ({"other": np.zeros(1)}, KeyError, "tokens"),
        ({"tokens": None}, ValueError, "is None"),
        (np.zeros(3), ValueError, "must be a dictionary"),
    ],
)
def test_elements_of_wrong_structure_are_refused(element, failure, message):
    with pytest.raises(failure, match=message):
        packed([element], length_struct={"tokens": 4}).pull(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences_per_bin": 0}, "must be a positive integer, but got 0."),
        ({"num_packing_bins": 0}, "`num_packing_bins` must be at least 1, got 0"),
        ({"length_struct": {}}, "at least one feature"),
        (
            {"length_struct": {"t": {"x": 4}}, "shuffle_bins_group_by_feature": "t"},
            "not a nested one",
        ),
        ({"padding_struct": {"u": 1}}, "must have the structure of `length_struct`"),
        ({"pack_alignment_struct": {"t": 0}}, "must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused_when_the_plan_is_built(options, message):
    chosen = {"length_struct": {"t": 4}, "num_packing_bins": 2, **options}
    with pytest.raises(ValueError, match=message):
        FitPack.after(None, best_fit=False, **chosen)


def test_lengths_and_alignments_are_integers():
    for name in ("length_struct", "pack_alignment_struct"):
        chosen = {"length_struct": {"t": 4}, "num_packing_bins": 2, name: {"t": None}}
        with pytest.raises(TypeError, match="`t` must be an integer, got None"):
            FitPack.after(None, best_fit=False, **chosen)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5, 6], np.array([5, 6, 0, 0])),
        ([np.int16(5), np.array(7, np.int16)], np.array([5, 7, 0, 0], np.int16)),
        ([5.5, 6], np.array([5.5, 6, 0, 0])),
        ([np.array([1, 2]), np.array([1.5])], np.array([1, 2, 1.5, 0])),
        ([np.arange(6)[::2], [9]], np.array([0, 2, 4, 9])),
        ([np.array(["ab", "c"]), np.array(["def"])], np.array(["ab", "c", "def", ""])),
        ([np.array(["x", None], object)], np.array(["x", None, 0, 0], object)),
        (
            [np.ones((2, 3)), np.full((1, 3), 2.0)],
            np.array([[1] * 3, [1] * 3, [2] * 3, [0] * 3], float),
        ),
        ([np.arange(3, dtype=">i4")], np.array([0, 1, 2, 0], ">i4")),
        ([np.array(["2020-01-01"], "M8[D]")], np.array([18262, 0, 0, 0], "M8[D]")),
    ],
)
def test_values_of_any_dtype_are_packed(values, expected):
    (row,) = drain(packed([{"t": value} for value in values], length_struct={"t": 4}))
    assert row["t"].dtype == expected.dtype
    np.testing.assert_array_equal(row["t"], expected)


DTYPES = ["u1", "i2", "u2", "i4", ">i4", "i8", "f4", "f8", "c8", "?", "U2", "U5", "O"]
PACKERS = {
    "first": experimental.FirstFitPackIterDataset,
    "best": experimental.BestFitPackIterDataset,
}


def random_document(rng, dtypes):
    dtype = np.dtype(rng.choice(dtypes))
    length = int(rng.integers(0, 5))
    if dtype.kind == "U":
        return np.array(
            ["x" * int(n) for n in rng.integers(0, dtype.itemsize // 4 + 1, length)], dtype
        )
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (int(limits.min), int(limits.max)) if limits else (-1000, 1000)
    values = [int(rng.integers(low, high, endpoint=True)) for _ in range(length)]
    if dtype.kind in "fc":
        values = [value * 1.001 for value in values]
    return np.array(values, dtype)


@pytest.mark.parametrize("packer", [*PACKERS, "concat"])
def test_documents_of_any_dtypes_keep_their_values(packer):
    """The rows have the dtype that `batch` gives their documents, whichever comes first."""
    for seed in range(cases(60, 3000)):
        rng = np.random.default_rng(seed)
        numbers = [name for name in DTYPES if name[0] not in "UO"]
        dtypes = rng.choice(
            [["U2", "U5"], numbers, numbers, [*numbers, "O"], ["u2", "i4"]][seed % 5], 3
        )
        documents = [random_document(rng, dtypes) for _ in range(12)]
        ds = grain.MapDataset.source([{"t": each} for each in documents]).to_iter_dataset()
        if packer == "concat":
            rows = list(experimental.ConcatThenSplitIterDataset(ds, length_struct={"t": 7}))
        else:
            rows = list(PACKERS[packer](ds, length_struct={"t": 7}, num_packing_bins=3))
        # Which documents a row has does not depend on their dtypes: pack their numbers as well.
        of = grain.MapDataset.source(
            [{"t": np.full(len(each), n + 1)} for n, each in enumerate(documents)]
        ).to_iter_dataset()
        if packer == "concat":
            numbers_of = list(experimental.ConcatThenSplitIterDataset(of, length_struct={"t": 7}))
        else:
            numbers_of = list(PACKERS[packer](of, length_struct={"t": 7}, num_packing_bins=3))
        taken = [0] * len(documents)
        assert len(rows) == len(numbers_of)
        for row, number_of in zip(rows, numbers_of, strict=True):
            for value, number in zip(row["t"].tolist(), number_of["t"].tolist(), strict=True):
                if number:
                    document = documents[number - 1]
                    expected = document[taken[number - 1] :][:1].astype(row["t"].dtype).tolist()[0]
                    taken[number - 1] += 1
                    # What numbers become beside others stays so when objects follow.
                    was_number = row["t"].dtype == object and complex(value) == complex(expected)
                    assert value == expected or was_number
                    assert np.can_cast(document.dtype, row["t"].dtype, "safe")
        assert taken == [len(document) for document in documents]


def test_dtypes_that_nothing_holds_are_an_error_that_names_them():
    documents = [np.array(["2020-01-01"], "M8[D]"), np.array([1.5])]
    with pytest.raises(ValueError, match=r"`t` have dtype datetime64\[D\] .* got float64"):
        drain(packed([{"t": each} for each in documents], length_struct={"t": 4}))


@pytest.mark.parametrize(
    ("padding", "dtype"), [(0.5, "u2"), (300, "u1"), (-1, "u4"), (2**40, "i4"), (np.nan, "i4")]
)
def test_padding_that_the_dtype_cannot_hold_is_an_error(padding, dtype):
    options = {"length_struct": {"t": 4}, "padding_struct": {"t": padding}}
    with pytest.raises(
        ValueError, match=f"cannot be a value of the feature `t`, .* {np.dtype(dtype)}"
    ):
        drain(packed([{"t": np.array([1], dtype)}], **options))
    (row,) = drain(packed([{"t": np.array([1], "f8")}], **options))
    assert row["t"].tolist()[0] == 1
    np.testing.assert_array_equal(row["t"][1:], padding)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy before 2.0")
def test_strings_without_a_width_are_padded_with_empty_ones():
    text = np.dtypes.StringDType()
    (row,) = drain(packed([{"t": np.array(["abc", "de"], text)}], length_struct={"t": 4}))
    assert row["t"].tolist() == ["abc", "de", "", ""]
    assert row["t"].dtype == text


def test_nested_meta_features_keep_their_structure():
    elements = [{"t": {"x": np.array([1, 2])}, "z": np.array([1])}, {"t": {"x": 3}, "z": 2}]
    options = {"length_struct": {"t": {"x": 4}, "z": 2}, "meta_features": ["t"]}
    (row,) = drain(packed(elements, **options))
    assert list(row) == ["t", "z", "z_positions", "z_segment_ids"]
    assert row["t"]["x"].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("best_fit", [False, True])
def test_nested_features_are_packed_as_flat_ones(best_fit):
    draw = np.random.default_rng(5)
    flat = [{k: np.arange(draw.integers(7)) for k in ("x", "y", "z")} for _ in range(50)]
    nested = [{"a": {"x": e["x"], "b": {"y": e["y"]}}, "z": e["z"]} for e in flat]
    options = {"num_packing_bins": 3, "seed": 2, "best_fit": best_fit}
    rows = drain(packed(nested, length_struct={"a": {"x": 9, "b": {"y": 8}}, "z": 10}, **options))
    expected = drain(packed(flat, length_struct={"x": 9, "y": 8, "z": 10}, **options))
    for kind in ("", "_segment_ids", "_positions"):
        for row, of_flat in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(row[f"a{kind}"]["x"], of_flat[f"x{kind}"])
            np.testing.assert_array_equal(row[f"a{kind}"]["b"]["y"], of_flat[f"y{kind}"])
            np.testing.assert_array_equal(row[f"z{kind}"], of_flat[f"z{kind}"])


def test_rows_are_writable_and_stay_as_they_were():
    stage = packed([tokens(x) for x in range(60)], length_struct={"tokens": 12})
    rows = drain(stage)
    copies = [{key: value.copy() for key, value in row.items()} for row in rows]
    rows[0]["tokens"][:] = -1
    assert_all_same(rows[1:], copies[1:])


def test_state_of_other_data_is_refused():
    stage = packed([tokens(0)], length_struct={"tokens": 12})
    stage.restore({"parent": {"next_index": 0}, "next_row": 2, "counter": 2})
    with pytest.raises(ValueError, match="saved at row 2 of a batch of bins"):
        stage.pull(1)


class FaultyValues(FeatureValues):
    """Returns an array that the engine cannot use."""

    def coerce(self, *_arguments):
        return np.asarray(3)


def bin_packer(cells):
    return BinPacker(
        paths=[["x"]], names=["x"], capacities=[4], alignments=[1], marked=[True], kept=[],
        num_bins=2, max_sequences=None, best_fit=False, cells=cells,
    )  # fmt: skip


def row_packer(cells):
    return RowPacker(
        names=["x"], capacities=[4], whole=[False], alone=False, begin_tokens=[None], cells=cells
    )


@pytest.mark.parametrize("make", [bin_packer, row_packer])
def test_packer_that_panicked_is_not_taken_for_one_used_by_two_threads(make, capfd):
    packer = make(FaultyValues(["x"]))
    with pytest.raises(BaseException, match="index out of bounds") as panic:
        packer.push([{"x": 3}], 0)
    assert type(panic.value).__name__ == "PanicException"
    assert "panicked" in capfd.readouterr().err
    for use in (lambda: packer.push([{"x": np.arange(2)}], 0), packer.take):
        with pytest.raises(RuntimeError, match=r"after a panic of the engine.*new iterator"):
            use()


@pytest.mark.parametrize("make", [bin_packer, row_packer])
def test_packer_that_is_in_use_is_told_so(make):
    class AskingValues(FeatureValues):
        def coerce(self, *_arguments):
            packer.take()

    packer = make(AskingValues(["x"]))
    with pytest.raises(RuntimeError, match="advanced by two threads at once"):
        packer.push([{"x": 3}], 0)
    packer.take()


@pytest.mark.parametrize("name", ["FirstFitPack", "BestFitPack", "ConcatThenSplit"])
def test_rows_are_intact_after_a_conversion_to_a_wider_dtype_has_failed(name, monkeypatch):
    widened, failures = FeatureValues.widened, [MemoryError("no memory")]

    def failing(self, *arguments):
        if failures:
            raise failures.pop()
        return widened(self, *arguments)

    documents = [
        {"tokens": np.arange(1, 4, dtype=np.int32)},
        {"tokens": np.arange(2, dtype=np.int64) + (1 << 40)},
        {"tokens": np.arange(7, 9, dtype=np.int32)},
    ]
    ds = grain.MapDataset.source(documents).to_iter_dataset()
    options = {} if name == "ConcatThenSplit" else {"num_packing_bins": 2}
    make = getattr(experimental, f"{name}IterDataset")
    ds = make(ds, length_struct={"tokens": 8}, **options)
    expected = [row["tokens"].tolist() for row in ds]
    monkeypatch.setattr(FeatureValues, "widened", failing)
    iterator = iter(ds)
    with pytest.raises(MemoryError):
        next(iterator)
    assert [row["tokens"].tolist() for row in iterator] == expected
    assert not failures
