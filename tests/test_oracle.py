"""Every fast path agrees with its slow twin in `oracle.py`, through the public API."""

import itertools

import numpy as np
import oracle
import pytest
from effort import LONG, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from under_test import INLINE, experimental, grain

settings.register_profile(
    "suite",
    max_examples=cases(25, 4000),
    deadline=None,
    derandomize=not LONG,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

SEEDS = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1), st.just(2**32 - 1))
ROUNDS = st.sampled_from([4, 6, 8, 40, 70, 624])


def grain_agrees_at(max_index):
    """Whether Grain's block holds `max_index`: not at sizes 4^k + 1, nor beyond float64."""
    return max_index < 2**48 and not (
        max_index >= 2**16 and max_index & (max_index - 1) == 0 and max_index.bit_length() % 2 == 1
    )


SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(60_000, 70_000),
    st.integers(1, 2**34),
    st.sampled_from([2**16, 2**17, 2**18 - 1, 2**31, 2**32 - 1]),
).filter(lambda n: grain_agrees_at(n - 1))


@given(SIZES, SEEDS, ROUNDS, st.data())
def test_index_shuffle_matches_oracle(n, seed, rounds, data):
    index = data.draw(st.integers(0, n - 1))
    found = experimental.index_shuffle(index, max_index=n - 1, seed=seed, rounds=rounds)
    assert found == oracle.index_shuffle(index, n - 1, seed, rounds)
    assert isinstance(found, int)


@pytest.mark.better_than_grain("Grain's blocks are one bit short there")
@pytest.mark.parametrize("k", [8, 9, 10, 12, 16, 24, 28, 30])
def test_index_shuffle_matches_oracle_where_grain_is_no_permutation(k):
    max_index = 4**k
    # The last index is the one that Grain never produces.
    for index, seed in itertools.product([0, 1, max_index // 3, max_index], [0, 42]):
        found = experimental.index_shuffle(index, max_index=max_index, seed=seed, rounds=4)
        assert found == oracle.index_shuffle(index, max_index, seed)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 256, 1000, 65535, 65536, 65538])
def test_index_shuffle_is_a_permutation(n):
    found = {experimental.index_shuffle(i, max_index=n - 1, seed=5, rounds=4) for i in range(n)}
    assert found == set(range(n))


@given(st.integers(1, 300), SEEDS, st.lists(st.integers(-2000, 2000), min_size=1, max_size=8))
def test_shuffle_matches_oracle(n, seed, indices):
    dataset = grain.MapDataset.range(n).shuffle(seed)
    assert [dataset[i] for i in indices] == [oracle.shuffled(i, n, seed) % n for i in indices]


@given(st.integers(1, 120), SEEDS, st.integers(1, 3), st.integers(0, 40), st.integers(1, 7))
def test_shuffled_repeated_sliced_order_matches_oracle(n, seed, epochs, start, step):
    dataset = grain.MapDataset.range(n).shuffle(seed).repeat(epochs)[start::step]
    expected = [oracle.shuffled(i, n, seed) % n for i in range(start, n * epochs, step)]
    assert len(dataset) == len(expected)
    assert list(dataset) == expected


@given(st.integers(0, 2**70), st.integers(0, 4), st.integers(1, 50))
def test_derived_seed_matches_oracle(seed, between, n):
    dataset = grain.MapDataset.range(n).seed(seed)
    for _ in range(between):
        dataset = dataset.map(lambda x: x)
    derived = oracle.derived_seed((seed, between + 1))
    expected = [oracle.shuffled(i, n, derived) % n for i in range(2 * n)]
    shuffled = dataset.shuffle()
    assert [shuffled[i] for i in range(2 * n)] == expected


@given(st.integers(0, 2**64), st.integers(0, 2**64))
def test_derived_seed_of_a_mixture_matches_oracle(first, second):
    parts = [
        grain.MapDataset.range(5).seed(first),
        grain.MapDataset.range(5),
        grain.MapDataset.range(5).seed(second).map(lambda x: x),
    ]
    shuffled = grain.MapDataset.concatenate(parts).shuffle()
    # Breadth first: the direct parent comes before the one behind a map.
    derived = oracle.derived_seed((first, 2), (second, 3))
    source = [0, 1, 2, 3, 4] * 3
    expected = [source[oracle.shuffled(i, 15, derived)] for i in range(15)]
    assert [shuffled[i] for i in range(15)] == expected


def _draws(_, rng):
    return [int(rng.integers(0, 2**63)), float(rng.random()), float(rng.standard_normal())]


@given(st.one_of(SEEDS, st.integers(0, 2**80)), st.lists(st.integers(0, 2**40), max_size=5))
def test_random_map_matches_oracle(seed, indices):
    dataset = grain.MapDataset.range(7).random_map(_draws, seed=seed)
    expected = [_draws(None, oracle.generator(seed, i)) for i in indices]
    assert [dataset[i] for i in indices] == expected


@given(SEEDS, st.integers(0, 30))
def test_random_map_of_iter_dataset_matches_oracle(seed, n):
    dataset = grain.MapDataset.range(n).to_iter_dataset().random_map(_draws, seed=seed)
    assert list(dataset) == [_draws(None, oracle.generator(seed, i)) for i in range(n)]


@given(st.integers(0, 60), st.integers(1, 25), st.integers(0, 2**31))
def test_window_shuffle_matches_oracle(n, window_size, seed):
    dataset = grain.MapDataset.range(n).to_iter_dataset(INLINE)
    dataset = experimental.WindowShuffleIterDataset(dataset, window_size=window_size, seed=seed)
    assert list(dataset) == oracle.window_shuffled(list(range(n)), window_size, seed)


@given(st.integers(1, 5), st.integers(1, 25), st.integers(0, 2**31))
def test_window_shuffle_by_index_matches_oracle(num_windows, window_size, seed):
    n = num_windows * window_size
    dataset = grain.MapDataset.range(n)
    dataset = experimental.WindowShuffleMapDataset(dataset, window_size=window_size, seed=seed)
    expected = [oracle.window_shuffled_index(i, n, window_size, seed) for i in range(n)]
    assert [dataset[i] for i in range(n)] == expected


@pytest.mark.better_than_grain("Grain's last window takes elements of the next epoch")
@given(st.integers(1, 40), st.integers(1, 25), st.integers(0, 2**31), st.integers(0, 2))
def test_window_shuffle_by_index_keeps_epochs_and_windows(n, window_size, seed, epoch):
    dataset = grain.MapDataset.range(n)
    dataset = experimental.WindowShuffleMapDataset(dataset, window_size=window_size, seed=seed)
    found = [dataset[epoch * n + i] for i in range(n)]
    for start in range(0, n, window_size):
        window = range(start, min(start + window_size, n))
        assert sorted(found[start : start + window_size]) == list(window)


WEIGHTS = st.lists(
    st.one_of(st.integers(1, 9), st.floats(0.01, 1, allow_nan=False)), min_size=1, max_size=5
)


@given(WEIGHTS, st.data())
def test_mix_matches_oracle(weights, data):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=len(weights), max_size=len(weights)))
    parts = [grain.MapDataset.range(1000 * j, 1000 * j + n) for j, n in enumerate(lengths)]
    dataset = grain.MapDataset.mix(parts, weights)
    assert len(dataset) == oracle.mixed_length(lengths, weights)
    expected = [1000 * j + k % lengths[j] for j, k in oracle.mixed(60, weights)]
    # Beyond the length the mixture goes on.
    assert [dataset[i] for i in range(60)] == expected


@given(WEIGHTS, st.data())
def test_mix_of_iter_datasets_matches_oracle(weights, data):
    lengths = data.draw(st.lists(st.integers(0, 15), min_size=len(weights), max_size=len(weights)))
    parts = [list(range(1000 * j, 1000 * j + n)) for j, n in enumerate(lengths)]
    datasets = [grain.MapDataset.source(part).to_iter_dataset(INLINE) for part in parts]
    found = list(grain.IterDataset.mix(datasets, weights))
    assert found == oracle.iter_mixed(parts, weights)


# --- packing -------------------------------------------------------------------------------------

CAPACITY = 16
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


def _sequences(lengths):
    return [[100 * k + j for j in range(n)] for k, n in enumerate(lengths, start=1)]


def _token_dataset(sequences):
    rows = [{"x": np.array(s, dtype=np.int32)} for s in sequences]
    return grain.MapDataset.source(rows).to_iter_dataset(INLINE)


def _shown(row):
    for name in ("x", "x_segment_ids", "x_positions"):
        assert row[name].dtype == np.int32
        assert row[name].shape == (CAPACITY,)
    return row["x"].tolist(), row["x_segment_ids"].tolist(), row["x_positions"].tolist()


@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
@given(
    LENGTHS,
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, -1, 7]),
)
def test_fit_packing_matches_oracle(  # noqa: PLR0917
    kind, lengths, num_bins, max_sequences, alignment, padding
):
    sequences = _sequences(lengths)
    cls = {
        "first_fit": experimental.FirstFitPackIterDataset,
        "best_fit": experimental.BestFitPackIterDataset,
    }[kind]
    dataset = cls(
        _token_dataset(sequences),
        length_struct={"x": CAPACITY},
        num_packing_bins=num_bins,
        shuffle_bins=False,
        max_sequences_per_bin=max_sequences,
        pack_alignment_struct={"x": alignment},
        padding_struct={"x": padding},
    )
    rows = oracle.fitted(
        sequences,
        CAPACITY,
        num_bins,
        best=kind == "best_fit",
        max_sequences=max_sequences,
        alignment=alignment,
    )
    expected = [oracle.packed_row(row, CAPACITY, padding=padding) for row in rows]
    assert [_shown(row) for row in dataset] == expected


@given(LENGTHS, st.integers(1, 12), SEEDS)
def test_shuffled_bins_match_oracle(lengths, num_bins, seed):
    sequences = _sequences(lengths)
    common = {"length_struct": {"x": CAPACITY}, "num_packing_bins": num_bins}
    cls = experimental.FirstFitPackIterDataset
    plain = [_shown(r) for r in cls(_token_dataset(sequences), shuffle_bins=False, **common)]
    found = [_shown(r) for r in cls(_token_dataset(sequences), seed=seed, **common)]
    # Which rows belong to one batch: packing any prefix shows where batches end.
    expected, start = [], 0
    for size in _batch_sizes(sequences, num_bins):
        order = oracle.bin_order(size, seed, start)
        expected += [plain[start + k] for k in order]
        start += size
    assert found == expected


def _batch_sizes(sequences, num_bins):
    """How many rows each packed batch of first fit has."""
    sizes, used = [], [0] * num_bins
    for sequence in sequences:
        room = [b for b in range(num_bins) if used[b] + len(sequence) <= CAPACITY]
        if not room:
            sizes.append(sum(u > 0 for u in used))
            used = [0] * num_bins
            room = [0]
        used[room[0]] += len(sequence)
    last = sum(u > 0 for u in used)
    return [*sizes, last] if last else sizes


@given(st.lists(st.integers(1, 3 * CAPACITY), max_size=40))
def test_concat_then_split_matches_oracle(lengths):
    sequences = _sequences(lengths)
    dataset = experimental.ConcatThenSplitIterDataset(
        _token_dataset(sequences), length_struct={"x": CAPACITY}
    )
    rows = oracle.concatenated(sequences, CAPACITY)
    assert [_shown(row) for row in dataset] == [oracle.packed_row(r, CAPACITY) for r in rows]


@given(LENGTHS, st.integers(1, 12))
def test_packing_keeps_every_token_once(lengths, num_bins):
    sequences = _sequences(lengths)
    for cls in (experimental.FirstFitPackIterDataset, experimental.BestFitPackIterDataset):
        rows = cls(
            _token_dataset(sequences), length_struct={"x": CAPACITY}, num_packing_bins=num_bins
        )
        kept = [t for row in rows for t in row["x"][row["x_segment_ids"] > 0].tolist()]
        assert sorted(kept) == sorted(t for s in sequences for t in s)


# --- batches -------------------------------------------------------------------------------------

DTYPES = st.sampled_from(
    ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"]
)
OTHER_DTYPES = st.sampled_from(["<U3", "S4", "datetime64[s]", "i4,f4"])


@given(
    DTYPES | OTHER_DTYPES,
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_batch_matches_stack(dtype, shape, n, batch_size):
    size = int(np.prod(shape, dtype=np.int64))
    elements = [
        {"a": np.arange(k, k + size).astype("i4").astype(dtype).reshape(shape), "b": (k, [str(k)])}
        for k in range(n)
    ]
    dataset = grain.MapDataset.source(elements).batch(batch_size)
    assert len(dataset) == -(-n // batch_size)
    for k, batch in enumerate(dataset):
        part = elements[k * batch_size : (k + 1) * batch_size]
        expected = np.stack([e["a"] for e in part])
        assert batch["a"].dtype == expected.dtype
        assert batch["a"].shape == expected.shape
        np.testing.assert_array_equal(batch["a"], expected)
        assert isinstance(batch["b"], tuple)
        np.testing.assert_array_equal(batch["b"][0], np.stack([e["b"][0] for e in part]))
        assert batch["b"][0].dtype == np.int64
        assert batch["b"][1][0].dtype == np.stack([e["b"][1][0] for e in part]).dtype
        assert batch["b"][1][0].tolist() == [e["b"][1][0] for e in part]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 9), st.booleans())
def test_rebatch_matches_slices_of_the_whole(sizes, batch_size, drop):
    ends = np.cumsum(sizes, dtype=np.int64)
    parts = [
        {"x": np.arange(e - s, e) * 2, "y": np.arange(e - s, e)}
        for s, e in zip(sizes, ends, strict=True)
    ]
    dataset = grain.MapDataset.source(parts).to_iter_dataset(INLINE)
    found = list(experimental.RebatchIterDataset(dataset, batch_size, drop_remainder=drop))
    total = sum(sizes)
    starts = range(0, total - total % batch_size if drop else total, batch_size)
    assert [b["y"].tolist() for b in found] == [
        list(range(s, min(s + batch_size, total))) for s in starts
    ]
    assert all((b["x"] == 2 * b["y"]).all() for b in found)
