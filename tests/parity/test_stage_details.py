"""Details of stages in which use showed a difference from Grain 0.2.18, beside it."""

import warnings

import grain as real
import numpy as np
import pytest
from under_test import IS_GRAIN, grain

BOTH = (real, grain)
pytestmark = pytest.mark.skipif(IS_GRAIN, reason="compares the two")


def reading(g, elements):
    return g.MapDataset.source(elements).to_iter_dataset(g.ReadOptions(0, 0))


# What a row of one feature holds: zeros only, equal means, negative means, not a number.
ROWS = {
    "zeros": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [3, 3, 3, 3]],
    "only_zeros": [[0, 0]] * 5,
    "opposites": [[1, -1], [2, 2], [0, 0], [-3, 3], [1, 3]],
    "negative": [[-1, -1], [0, 0], [-2, 0], [4, 0]],
    "fractions": [[0.5, 0.5], [0.0, 0.0], [0.25, 0.75], [-0.5, 0.0]],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["FirstFit", "BestFit"])
@pytest.mark.parametrize("rows", ROWS)
def test_bins_are_grouped_by_the_mean_of_a_feature(rows, kind, seed):
    """A row of zeros has the mean 0; 0/0 gave a warning, and another order."""
    kept = []
    for g in BOTH:
        elements = [{"a": np.array(row), "n": np.full(4, k)} for k, row in enumerate(ROWS[rows])]
        packed = getattr(g.experimental, f"{kind}PackIterDataset")(
            reading(g, elements),
            length_struct={"a": 4, "n": 4},
            num_packing_bins=4,
            seed=seed,
            shuffle_bins_group_by_feature="a",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if g is real else "error")
            kept.append([int(row["n"][0]) for row in packed])
    assert kept[1] == kept[0]
    assert sorted(kept[1]) == list(range(len(ROWS[rows])))


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("batch_drops", [False, True])
def test_spec_of_a_rebatched_stream_has_the_batch_size(drop_remainder, batch_drops):
    specs = []
    for g in BOTH:
        batches = g.MapDataset.range(7).to_iter_dataset().batch(3, drop_remainder=batch_drops)
        again = g.experimental.RebatchIterDataset(batches, 2, drop_remainder=drop_remainder)
        spec = g.experimental.get_element_spec(again)
        specs.append((tuple(spec.shape), np.dtype(spec.dtype)))
    assert specs[1] == specs[0] == ((2,), np.dtype(np.int64))


@pytest.mark.parametrize("sizes", [[0], [0, 2], [2, 0, 3], [3, 0]])
def test_batch_without_rows_cannot_be_rebatched(sizes):
    found = []
    for g in BOTH:
        batches = reading(g, [{"x": np.zeros(n), "y": np.zeros((n, 2))} for n in sizes])
        iterator = iter(g.experimental.RebatchIterDataset(batches, 2))
        shapes = []
        with pytest.raises(ValueError, match="Rebatching with starting batch size of 0 is not"):
            shapes.extend(batch["y"].shape for batch in iterator)
        found.append(shapes)
    assert found[1] == found[0]


def test_text_of_metadata_has_no_address():
    texts = []
    for g in BOTH:
        with_rng = g.RecordMetadata(1, 2, np.random.default_rng(0))
        texts.append([str(g.RecordMetadata(1)), str(with_rng), f"{with_rng}"])
        assert " at 0x" in repr(with_rng)
    assert texts[1] == texts[0]
    assert texts[1][1] == "RecordMetadata(index=1, record_key=2, rng=Generator(PCG64))"


# --- shared memory -------------------------------------------------------------------------------

ELEMENTS = {
    "numbers": [1, 2, 3, 4],
    "arrays": [np.arange(3) + k for k in range(4)],
    "trees": [{"a": np.arange(3.0) + k, "b": ("x" * (k + 1), b"yz")} for k in range(4)],
    "objects": [np.array([None, k], object) for k in range(4)],
}


def leaves(batch):
    if isinstance(batch, dict):
        return [leaf for name in sorted(batch) for leaf in leaves(batch[name])]
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def shared_batches(g, elements, batch_size, *, by_index):
    """The leaves of each batch: values, dtypes, and whether they lie in shared memory."""
    ds = g.MapDataset.source(elements)
    ds = (ds if by_index else ds.to_iter_dataset(g.ReadOptions(0, 0))).batch(batch_size)
    assert ds.enable_shared_memory_output() is None
    ds.enable_shared_memory_output()
    found = []
    for batch in (ds[0], ds[1]) if by_index else ds:
        for leaf in leaves(batch):
            shared = isinstance(leaf, g.multiprocessing.SharedMemoryArray)
            if shared and g is real:
                leaf.unlink_on_del()
            assert leaf.flags.writeable
            found.append((leaf.tolist(), leaf.dtype, shared))
    return found


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("kind", ELEMENTS)
def test_batches_in_shared_memory(kind, batch_size, by_index):
    found = [shared_batches(g, ELEMENTS[kind], batch_size, by_index=by_index) for g in BOTH]
    if batch_size == 1:  # Grain's iterator has two batches of two and four of one
        assert [shared for *_, shared in found[1]] == [False] * len(found[1])
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "elements",
    [
        [np.float32(1), np.float64(0.1)],
        [1, 2.5],
        [np.zeros((0, 2)), np.zeros((0, 2))],
        ["a", "longer"],
    ],
)
def test_batches_in_shared_memory_equal_others(elements):
    """Grain takes the dtype of the first element, and refuses empty arrays."""
    ds = grain.MapDataset.source(elements).batch(2)
    expected = ds[0]
    spec = repr(ds)
    ds.enable_shared_memory_output()
    found = ds[0]
    assert isinstance(found, grain.multiprocessing.SharedMemoryArray)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    assert repr(ds) == spec


def test_only_batches_can_be_put_into_shared_memory():
    for g in BOTH:
        batches = g.MapDataset.range(6).batch(2)
        assert hasattr(batches, "enable_shared_memory_output")
        for other in (g.MapDataset.range(3), batches.map(len), batches.to_iter_dataset()):
            assert not hasattr(other, "enable_shared_memory_output")


def test_batch_function_is_asked_to_use_shared_memory():
    class Count:
        asked = 0

        def enable_shared_memory_output(self):
            self.asked += 1

        def __call__(self, elements):
            return len(elements)

    for g in BOTH:
        function = Count()
        ds = g.MapDataset.range(3).to_iter_dataset().batch(2, batch_fn=function)
        ds.enable_shared_memory_output()
        assert (list(ds), function.asked) == ([2, 1], 1)
        plain = g.MapDataset.range(3).batch(2, batch_fn=len)
        plain.enable_shared_memory_output()
        assert plain[0] == 2


def test_spec_of_batches_in_shared_memory():
    for drop_remainder, rows in ((True, 2), (False, None)):
        ds = grain.MapDataset.range(3).batch(2, drop_remainder=drop_remainder)
        ds.enable_shared_memory_output()
        assert grain.experimental.get_element_spec(ds).shape == (rows,)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_send_batches_that_were_to_lie_in_shared_memory(num_workers):
    ds = grain.MapDataset.range(8).map(lambda x: np.full(3000, x)).batch(2)
    ds.enable_shared_memory_output()
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    for read in (
        ds.to_iter_dataset().mp_prefetch(options),
        ds.to_iter_dataset(grain.ReadOptions(num_workers=num_workers)),
    ):
        assert [batch[:, 0].tolist() for batch in read] == [[0, 1], [2, 3], [4, 5], [6, 7]]
