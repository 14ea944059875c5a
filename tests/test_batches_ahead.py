"""Batches computed by threads, several per task if they are small, equal those of the caller."""

import numpy as np
import pytest
from stage_harness import count_at_rest, found
from under_test import INLINE

import grainmill as grain
from grainmill._evaluate.batches.batch_blocks import BatchBlock
from grainmill._evaluate.batches.batched import batched, in_batches
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.program import Program
from grainmill._tree import flatten
from grainmill.array_record import ArrayRecordWriter


def plain(x):
    return {"x": np.full(3, x), "y": x}


def one_is_none(x):
    return None if x == 333 else x


def one_fails(x):
    if x == 333:
        raise ValueError("no more")
    return x


def one_has_another_shape(x):
    return np.zeros(4 if x == 333 else 3)


def one_has_another_dtype(x):
    return np.full(3, x, np.float64 if x == 333 else np.int64)


def large(x):
    return np.full(9000, x)


def nested(x):
    return x, {"a": [np.float32(x), np.full(2, x, "<U5")], "b": (True, None)}


def one_is_float(x):
    return {"x": float(x) if x == 333 else x, "y": np.zeros(2)}


def one_is_huge(x):
    return 2**63 if x == 333 else x


def texts(x):
    return "x" * (x % 5), b"y" * (x % 3)


def spans(x):
    return np.timedelta64(x, "ms" if x % 11 == 10 else "s")


FUNCTIONS = [
    plain,
    nested,
    texts,
    spans,
    large,
    one_is_none,
    one_fails,
    one_is_float,
    one_is_huge,
    one_has_another_shape,
    one_has_another_dtype,
]


def outcomes(function, batch_size, options):
    ds = grain.MapDataset.range(400).map(function).to_iter_dataset(options)
    return found(ds.batch(batch_size))


@pytest.mark.parametrize("batch_size", [1, 7, 50])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_threads_change_no_batch_state_or_failure(function, batch_size):
    inline = outcomes(function, batch_size, INLINE)
    assert len(inline) >= 7
    for threads, prefetch in ((0, 500), (1, 1), (16, 20), (16, 500)):
        assert outcomes(function, batch_size, grain.ReadOptions(threads, prefetch)) == inline


@pytest.mark.parametrize("function", FUNCTIONS)
def test_workers_change_no_batch_state_or_failure(function):
    def without_notes(seen):
        return [("no more" if "no more" in element else element, state) for element, state in seen]

    inline = outcomes(function, 7, INLINE)
    workers = outcomes(function, 7, grain.ReadOptions(num_workers=2))
    assert without_notes(workers) == without_notes(inline)


@pytest.mark.parametrize(("function", "is_split"), [(plain, True), (nested, False)])
def test_small_batches_are_split_from_one(function, is_split):
    program = compiled(grain.MapDataset.range(100).map(function)._node)
    in_batches(program, 0, 7, 7)
    pieces, rest = in_batches(program, 7, 90, 7)
    assert rest is None
    assert (len(pieces) == 1) is is_split
    cut = [rows for piece in pieces for rows in piece.split(7)]
    assert [len(rows) for rows in cut] == [7] * 12 + [6]
    for at, rows in enumerate(cut):
        expected = grain.MapDataset.range(100).map(function).batch(7)[at + 1]
        for made, other in zip(flatten(rows.batch)[0], flatten(expected)[0], strict=True):
            assert made.dtype == other.dtype
            np.testing.assert_array_equal(made, other[: len(rows)])
            assert not isinstance(made.base, np.ndarray)  # kept, it keeps nothing else alive
            assert made.flags.writeable


def setting_again(program, name, then):
    """`program`, whose attribute `name` becomes `then` once it is read, as by another thread."""

    def read(program):
        found, program.__dict__[name] = program.__dict__[name], then
        return found

    def write(program, value):
        program.__dict__[name] = value

    program.__class__ = type("SettingAgain", (Program,), {name: property(read, write)})
    return program


def test_layout_reset_by_another_thread_is_noticed(tmp_path):
    with ArrayRecordWriter(str(tmp_path / "file"), "group_size:1") as writer:
        for number in range(20):
            writer.write(np.full(4, number, np.int32).tobytes())
    source = grain.sources.ArrayRecordDataSource(str(tmp_path / "file"))
    ds = grain.MapDataset.source(source).map(lambda record: np.frombuffer(record, np.int32))
    first = compiled(ds._node)
    batched(first, 0, 10)
    assert first.layout is not None
    program = setting_again(compiled(ds._node), "layout", None)
    program.layout = first.layout
    rows = batched(program, 10, 10)
    assert rows.batch.tolist() == [[number] * 4 for number in range(10, 20)]


def test_batches_that_another_thread_finds_large_are_not_split():
    ds = grain.MapDataset.range(100).map(lambda x: x if x < 50 else x / 2)
    program = setting_again(compiled(ds._node), "batches_small", then=False)
    program.batches_small = True
    pieces, _ = in_batches(program, 0, 100, 10)
    cut = [rows.batch for piece in pieces for rows in piece.split(10)]
    assert [batch.dtype.kind for batch in cut] == ["i"] * 5 + ["f"] * 5


def test_position_moves_within_prefetched_batches():
    ds = grain.MapDataset.range(5000).map(plain).to_iter_dataset().batch(4)
    with iter(ds) as iterator:
        for _ in range(100):
            next(iterator)
        state = iterator.get_state()
        later = [next(iterator)["y"].tolist() for _ in range(300)]
        for _ in range(3):
            iterator.set_state(state)
            assert [next(iterator)["y"].tolist() for _ in range(300)] == later
        grain.experimental.set_next_index(iterator, 7)
        assert next(iterator)["y"].tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize(("batch_size", "prefetch"), [(4, 20), (4, 500), (1000, 2)])
def test_prefetch_is_bounded(batch_size, prefetch):
    calls = []

    def function(x):
        calls.append(x)
        return x

    options = grain.ReadOptions(prefetch_buffer_size=prefetch)
    ds = grain.MapDataset.range(10**7).map(function).to_iter_dataset(options).batch(batch_size)
    with iter(ds) as iterator:
        for _ in range(2000):
            next(iterator)
        before = count_at_rest(calls)
    # The batches that are ready, and two tasks.
    assert before - 2000 * batch_size <= 3 * max(batch_size, 8 * prefetch)


@pytest.mark.parametrize("options", [INLINE, grain.ReadOptions(0, 500), grain.ReadOptions()])
def test_an_interrupt_loses_no_batch(options, monkeypatch):
    calls = 0
    cut = BatchBlock.split

    def interrupted(rows, batch_size):
        nonlocal calls
        calls += 1
        if calls % 4 == 3:
            raise KeyboardInterrupt
        return cut(rows, batch_size)

    monkeypatch.setattr(BatchBlock, "split", interrupted)
    ds = grain.MapDataset.range(20000).map(plain).to_iter_dataset(options).batch(8)
    made, interrupts = [], 0
    with iter(ds) as iterator:
        while len(made) < 20000:
            try:
                made += next(iterator)["y"].tolist()
            except KeyboardInterrupt:
                interrupts += 1
    assert made == list(range(20000))
    assert interrupts > 0


def test_small_batches_keep_all_workers_busy():
    options = grain.ReadOptions(num_workers=2)
    ds = grain.MapDataset.range(10**7).map(plain).to_iter_dataset(options).batch(8)
    with iter(ds) as iterator:
        for _ in range(3000):
            next(iterator)
        assert len(iterator._stage._reader._blocks._ahead.tasks) >= 2
