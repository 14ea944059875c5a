"""Parquet files: rows by position, columns as batches, orders that keep rows close, and damage."""

import datetime
import decimal
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import grain as real_grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_tables import KINDS, plain, random_table, rows_of, same_value

import grainmill as grain
from grainmill._evaluate.compile import compiled
from grainmill._native import GrainmillError
from grainmill._sources.parquet_dataset import ParquetDatasetIterator
from grainmill.experimental import ParquetIterDataset
from grainmill.sources import ParquetDataSource

# What reading a file that has been damaged may raise.
DAMAGE = (GrainmillError, ValueError, OSError, NotImplementedError)


@st.composite
def files(draw):
    """A random table, and how it is written."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    table = random_table(rng, KINDS, draw(st.sampled_from([0, 1, 7, 200])))
    options = {
        "row_group_size": rng.choice([1, 13, 100, 1000]),
        "data_page_size": rng.choice([64, 300, 1 << 20]),
        "write_batch_size": rng.choice([1, 10, 1024]),
        "use_dictionary": rng.random() < 0.5,
        "compression": rng.choice(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "write_page_index": rng.random() < 0.5,
        "write_page_checksum": rng.random() < 0.5,
        "store_schema": rng.random() < 0.8,
    }
    return table, options


@settings(max_examples=cases(30, 1_500))
@given(files(), st.integers(0, 2**32), st.sampled_from([0, 3000, 1 << 29]))
def test_rows_are_those_of_pyarrow(tmp_path_factory, file, seed, cache_bytes):
    table, options = file
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    pq.write_table(table, path, **options)
    try:
        expected = rows_of(pq.read_table(path))
    except pa.lib.ArrowException:  # with tiny pages, pyarrow writes some lists that it cannot read
        return
    source = ParquetDataSource(path, cache_bytes=cache_bytes)
    assert len(source) == len(expected)
    found = source.__getitems__(range(len(source)))
    assert [plain(row) for row in found] == expected
    rng = random.Random(seed)
    if expected:
        index = [rng.randrange(len(expected)) for _ in range(50)]
        assert [plain(row) for row in source.__getitems__(index)] == [expected[k] for k in index]
        at = rng.randrange(len(expected))
        assert plain(source[at]) == expected[at]


@settings(max_examples=cases(25, 1_250))
@given(files(), st.integers(1, 40))
def test_batches_are_the_stacked_elements(tmp_path_factory, file, batch_size):
    table, options = file
    dense = [name for name in table.column_names if table[name].null_count == 0]
    dense = [name for name in dense if not pa.types.is_date(table[name].type)]
    if not dense:
        return
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    pq.write_table(table.select(dense), path, **options)
    source = ParquetDataSource(path)
    for name in dense:
        of_one = grain.MapDataset.source(ParquetDataSource(path, columns=[name]))
        rows = source.__getitems__(range(len(source)))
        try:
            slow = list(
                grain.MapDataset.source([{name: row[name]} for row in rows]).batch(batch_size)
            )
        except Exception as failure:
            with pytest.raises(type(failure)):
                list(of_one.batch(batch_size))
            continue
        fast = list(of_one.batch(batch_size))
        assert len(fast) == len(slow)
        for ours, theirs in zip(fast, slow, strict=True):
            assert_same(ours, theirs)
        for ours, theirs in zip(
            list(of_one.to_iter_dataset().batch(batch_size)), slow, strict=True
        ):
            assert_same(ours, theirs)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert plain(ours) == plain(theirs)
    else:
        assert plain(ours) == plain(theirs)


def write(path, num_rows=1000, **options):
    table = pa.table(
        {
            "id": np.arange(num_rows),
            "x": np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4).tolist(),
            "name": [f"row {k}" for k in range(num_rows)],
        }
    ).cast(pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float32())), ("name", pa.string())]))
    pq.write_table(table, path, **{"row_group_size": 128, **options})
    return table


def test_values_have_the_documented_types(tmp_path):
    table = pa.table(
        {
            "i": pa.array([1, None], pa.int16()),
            "f": pa.array([1.5, 2.5], pa.float32()),
            "b": pa.array([True, None]),
            "s": pa.array(["a", None]),
            "bin": pa.array([b"a", b"b"]),
            "l": pa.array([[1, 2], [3, None]]),
            "ls": pa.array([["a"], None]),
            "t": pa.array([1, None], pa.timestamp("ms", tz="UTC")),
            "d": pa.array([datetime.date(2020, 1, 2), None]),
            "st": pa.array([{"x": 1}, None]),
            "m": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
            "dec": pa.array([decimal.Decimal("1.20"), None]),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    one, two = ParquetDataSource(tmp_path / "x.parquet").__getitems__([0, 1])
    assert type(one["i"]) is np.int16
    assert type(one["f"]) is np.float32
    assert type(one["b"]) is np.bool_
    assert type(one["s"]) is str
    assert type(one["bin"]) is bytes
    assert one["l"].dtype == np.int64
    assert two["l"].dtype == object
    assert two["l"].tolist() == [3, None]
    assert one["ls"].dtype == object
    assert one["t"] == np.datetime64(1, "ms")
    assert one["t"].dtype == "datetime64[ms]"
    assert one["d"] == np.datetime64("2020-01-02")
    assert type(one["st"]["x"]) is np.int64
    assert one["m"] == [("a", 1)]
    assert one["dec"] == decimal.Decimal("1.20")
    assert str(one["dec"]) == "1.20"
    assert all(two[name] is None for name in ("i", "b", "s", "ls", "t", "d", "st", "dec"))


def test_columns_and_fields_are_selected_in_the_order_given(tmp_path):
    table = pa.table(
        {
            "a": [1, 2],
            "image": [{"bytes": b"x", "path": "p", "size": {"h": 1, "w": 2}}] * 2,
            "c": ["u", "v"],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    source = ParquetDataSource(tmp_path / "x.parquet", columns=["c", "image.bytes", "image.size.w"])
    assert plain(source[1]) == {"c": "v", "image": {"bytes": b"x", "size": {"w": 2}}}
    assert list(source[1]) == ["c", "image"]
    assert list(source.column_types) == ["c", "image"]
    with pytest.raises(ValueError, match=r"no column `d` among .*image"):
        ParquetDataSource(tmp_path / "x.parquet", columns=["d"])


def test_names_with_dots_are_told_from_fields(tmp_path):
    table = pa.table(
        {
            "meta": [{"url": "nested", "size": {"w": 1}}],
            "meta.url": ["flat"],
            "meta.size.w": [2],
            "a.b": [{"c": 3, "d.e": 4}],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    expected = {
        "meta": {"meta": {"url": "nested", "size": {"w": 1}}},
        "meta.url": {"meta.url": "flat"},  # a column comes before a field
        "meta.size": {"meta": {"size": {"w": 1}}},
        "meta.size.w": {"meta.size.w": 2},
        "a.b": {"a.b": {"c": 3, "d.e": 4}},
        "a.b.c": {"a.b": {"c": 3}},
        "a.b.d.e": {"a.b": {"d.e": 4}},
    }
    for name, row in expected.items():
        assert plain(ParquetDataSource(tmp_path / "x.parquet", columns=[name])[0]) == row
    for name in ("a", "met", "meta.", "a.b.d"):
        with pytest.raises(ValueError, match="no column"):
            ParquetDataSource(tmp_path / "x.parquet", columns=[name])


def test_columns_of_one_name_are_an_error_unless_others_are_selected(tmp_path):
    pq.write_table(pa.table([[1], [2], [3]], names=["x", "x", "y"]), tmp_path / "x.parquet")
    for columns in (None, ["x"], ["y", "x"]):
        with pytest.raises(ValueError, match=r"x\.parquet: two columns are called `x`"):
            ParquetDataSource(tmp_path / "x.parquet", columns=columns)
    assert plain(ParquetDataSource(tmp_path / "x.parquet", columns=["y"])[0]) == {"y": 3}


def test_fields_of_one_name_are_an_error_unless_others_are_selected(tmp_path):
    """Of structures, which are dicts, at any depth."""
    kinds = {
        "s.k": lambda twins: twins,
        "s.in.k": lambda twins: pa.StructArray.from_arrays([twins], ["in"]),
        "s.element.k": lambda twins: pa.ListArray.from_arrays(
            pa.array([0, 1, 2], pa.int32()), twins
        ),
    }
    groups = [pa.StructArray.from_arrays([pa.array([5, 6])], [name]) for name in "ab"]
    for values in ([pa.array([1, 2]), pa.array([3, 4])], groups):
        twins = pa.StructArray.from_arrays(values, ["k", "k"])
        for name, nested in kinds.items():
            path = tmp_path / "x.parquet"
            pq.write_table(pa.table({"s": nested(twins), "y": [7, 8]}), path)
            for columns in (None, ["s"], ["y", "s"]):
                with pytest.raises(
                    ValueError, match=rf"x\.parquet: two fields are called `{name}`"
                ):
                    ParquetDataSource(path, columns=columns)
                with pytest.raises(
                    ValueError, match=rf"x\.parquet: two fields are called `{name}`"
                ):
                    next(iter(ParquetIterDataset(str(path), columns=columns)))
            assert plain(ParquetDataSource(path, columns=["y"])[1]) == {"y": 8}


def test_pages_of_lists_that_state_other_numbers_of_rows_are_read():
    """As pyarrow wrote them up to version 11, in the newer form."""
    path = Path(__file__).parent / "data/parquet/lists_v2.parquet"
    expected = pq.read_table(path).to_pylist()
    source = ParquetDataSource(path)
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    assert [plain(row) for row in source.__getitems__(order)] == [expected[at] for at in order]
    for at in order[:20]:
        assert plain(ParquetDataSource(path)[at]) == expected[at]


def test_many_files_are_one_sequence_and_must_have_the_same_columns(tmp_path):
    paths = []
    for number in range(12):
        paths.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"x": pa.array([number] * number, pa.int64())}), paths[-1])
    source = ParquetDataSource(paths)
    assert [int(row["x"]) for row in source] == [n for n in range(12) for _ in range(n)]
    assert source._record_location(1) == (str(paths[2]), 0)
    pq.write_table(pa.table({"x": ["text"]}), paths[3])
    with pytest.raises(ValueError, match=r"same columns, but .*0.parquet.*3.parquet.*Utf8"):
        ParquetDataSource(paths)


def test_files_whose_writers_had_other_types_in_memory_have_other_columns(tmp_path):
    """What is stored is the same, so columns would be shared if only that were compared."""
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for path, zone in zip(paths, ["UTC", "Europe/Paris"], strict=True):
        table = pa.table({"x": pa.array([0, 10**9], pa.timestamp("us", zone))})
        pq.write_table(table, path)
    assert pq.read_metadata(paths[0]).schema.equals(pq.read_metadata(paths[1]).schema)
    with pytest.raises(ValueError, match=r"same columns, but .*0.parquet has .*UTC.*Paris"):
        ParquetDataSource(paths)


def test_one_row_costs_its_pages_where_there_is_an_index_and_where_not(tmp_path):
    for index in (True, False):
        path = tmp_path / f"{index}.parquet"
        table = pa.table({"x": [os.urandom(1000) for _ in range(10_000)]})
        pq.write_table(
            table,
            path,
            write_page_index=index,
            data_page_size=8000,
            use_dictionary=False,
            compression="none",
            write_batch_size=8,
        )
        source = ParquetDataSource(path)
        _, before, _, _ = source._files.read_totals()
        assert source[5000]["x"] == table["x"][5000].as_py()
        _, after, _, _ = source._files.read_totals()
        first_cost = after - before
        source[7000]
        _, last, _, _ = source._files.read_totals()
        assert last - after < 100_000
        assert source._files.cached_bytes < 200_000
        if index:
            assert first_cost < 200_000


def test_the_size_of_short_rows_is_known(tmp_path):
    pq.write_table(pa.table({"x": pa.array([1] * 100)}), tmp_path / "x.parquet")
    metadata = pq.read_metadata(tmp_path / "x.parquet").row_group(0).column(0)
    mean = ParquetDataSource(tmp_path / "x.parquet")._files.mean_byte_len
    assert mean == metadata.total_uncompressed_size / 100 > 0


def test_decoded_pages_are_kept_within_the_limit(tmp_path):
    write(tmp_path / "x.parquet", 20_000, row_group_size=500)
    source = ParquetDataSource(tmp_path / "x.parquet", cache_bytes=100_000)
    rng = random.Random(0)
    for _ in range(20):
        source.__getitems__([rng.randrange(20_000) for _ in range(100)])
        assert source._files.cached_bytes <= 100_000


@pytest.mark.parametrize("has_index", [True, False])
def test_where_pages_are_is_kept_within_the_limit_of_indices(tmp_path, has_index):
    """All of it counts, none of it may be needed, and it is freed with its source."""
    for number in range(4):
        path = tmp_path / f"{number}.parquet"
        write(path, 2000, row_group_size=500, write_page_index=has_index, data_page_size=200)
    code = textwrap.dedent(
        """
        import random, sys
        from concurrent.futures import ThreadPoolExecutor
        from grainmill import _native
        from grainmill.sources import ParquetDataSource
        paths = sys.argv[1:]

        def is_right(index):
            return [int(row["id"]) for row in source.__getitems__(index)] == [
                at % 2000 for at in index
            ]

        for limit in (256 << 20, 10_000, 0):
            _native.set_index_budget(limit)
            source = ParquetDataSource(paths, cache_bytes=0)
            orders = [random.Random(seed).sample(range(8000), 200) for seed in range(8)]
            with ThreadPoolExecutor(4) as threads:
                assert all(threads.map(is_right, orders))
            print(_native.index_bytes())
            del source
            assert _native.index_bytes() == 0
        """
    )
    paths = [tmp_path / f"{number}.parquet" for number in range(4)]
    command = [sys.executable, "-c", code, *paths]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    unlimited, limited, none = map(int, printed.split())
    assert unlimited > 20_000
    assert 0 < limited <= 10_000
    assert none == 0


def test_threads_read_the_same_rows(tmp_path):
    write(tmp_path / "x.parquet", 5000)
    source = ParquetDataSource(tmp_path / "x.parquet", cache_bytes=200_000)
    failures = []

    def read(seed):
        rng = random.Random(seed)
        for _ in range(30):
            index = [rng.randrange(5000) for _ in range(50)]
            if [int(row["id"]) for row in source.__getitems__(index)] != index:
                failures.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_any_positions_of_several_epochs_are_those_of_single_rows(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": range(24)}), path, row_group_size=4)
    source = ParquetDataSource(path, shuffle_seed=1, shuffle_window=1)
    rows = grain.MapDataset.source(source).map(lambda row: int(row["id"])).repeat(4)
    single = [rows[position] for position in range(len(rows))]
    assert [single[at] for at in range(24)] != [single[at] for at in range(24, 48)]
    options = grain.ReadOptions(num_threads=0)
    for step in (5, 7, 23, 24, 25):
        for begin in range(step):
            assert list(rows[begin::step].to_iter_dataset(options)) == single[begin::step]


def test_pickles_hold_paths_and_the_text_stays_the_same(tmp_path):
    write(tmp_path / "x.parquet")
    source = ParquetDataSource(tmp_path / "x.parquet", columns=["id"], shuffle_seed=3)
    data = pickle.dumps(source)
    assert len(data) < 1500
    copy = pickle.loads(data)
    assert copy._opened is None
    assert [row["id"] for row in copy] == [row["id"] for row in source]
    assert repr(copy) == repr(source)
    assert "columns=['id'], shuffle_seed=3, shuffle_window=100000" in repr(source)


def test_workers_give_the_same_batches(tmp_path):
    write(tmp_path / "x.parquet")
    source = ParquetDataSource(tmp_path / "x.parquet", columns=["id", "x"])
    ds = grain.MapDataset.source(source).shuffle(seed=1).batch(32)
    alone = list(ds.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    threads = list(ds.to_iter_dataset(grain.ReadOptions(num_threads=4)))
    workers = list(ds.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    for other in (threads, workers):
        for ours, theirs in zip(other, alone, strict=True):
            np.testing.assert_array_equal(ours["id"], theirs["id"])
            np.testing.assert_array_equal(ours["x"], theirs["x"])


def test_positions_out_of_range_are_refused(tmp_path):
    write(tmp_path / "x.parquet", 10)
    source = ParquetDataSource(tmp_path / "x.parquet")
    for index in (-1, 10):
        with pytest.raises(IndexError, match=f"row {index} is out of range for 10 rows"):
            source[index]
    for key in (slice(1, 3), "1", 1.0):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            source[key]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"paths": []}, "Paths sequence can not be of 0 length"),
        ({"paths": 3}, "must be a Sequence, String"),
        ({"columns": "id"}, "sequence of names"),
        ({"columns": []}, "at least one column"),
        ({"cache_bytes": -1}, "`cache_bytes` must be at least 0, got -1"),
        ({"shuffle_seed": -1}, "`shuffle_seed` must be in"),
        ({"shuffle_seed": 1, "shuffle_window": 0}, "`shuffle_window` must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, arguments, problem):
    write(tmp_path / "x.parquet", 10)
    with pytest.raises(ValueError, match=problem):
        ParquetDataSource(**{"paths": tmp_path / "x.parquet", **arguments})


# --- mixtures -------------------------------------------------------------------------------------


def numbers_file(path, first, num_rows, **columns):
    table = pa.table(
        {
            "id": np.arange(first, first + num_rows),
            "x": np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4).tolist(),
            **columns,
        }
    )
    schema = table.schema.set(1, pa.field("x", pa.list_(pa.float32())))
    pq.write_table(table.cast(schema), path, row_group_size=64)
    return grain.MapDataset.source(ParquetDataSource(path))


def stacked_one_by_one(ds, batch_size):
    """Batches made of the elements, each a dict."""
    rows = [ds[k] for k in range(len(ds))]
    return list(grain.MapDataset.source(rows).batch(batch_size))


def is_of_columns(ds, count):
    """Whether a batch of the first elements is made without a dict for each row."""
    return compiled(ds._plan_node()).batch_of_columns(0, count, count) is not None


@pytest.mark.parametrize("joined", ["mix", "concatenate", "nested"])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_batches_of_mixtures_are_the_stacked_elements(tmp_path, joined, others):
    calls = []

    def element(number):
        calls.append(number)
        return {"id": np.int64(number), "x": np.full(4, number, np.float32)}

    parts = [numbers_file(tmp_path / f"{k}.parquet", 1000 * k, 90 + 50 * k) for k in range(2)]
    parts[0] = parts[0].shuffle(seed=1)
    parts += [grain.MapDataset.range(5000, 5080).map(element) for _ in range(others)]
    if joined == "mix":
        ds = grain.MapDataset.mix(parts, weights=[1, 2, 3, 4][: len(parts)])
    elif joined == "concatenate":
        ds = grain.MapDataset.concatenate(parts)
    else:
        ds = grain.MapDataset.concatenate([grain.MapDataset.mix(parts[:2]), *parts[2:]])
    slow = stacked_one_by_one(ds, 32)
    assert is_of_columns(ds, min(len(ds), 64))
    del calls[:]
    pipelines = [
        ds.batch(32),
        ds.to_iter_dataset().batch(32),
        ds.to_iter_dataset(grain.ReadOptions(num_threads=0)).batch(32),
    ]
    for pipeline in pipelines:
        fast = list(pipeline)
        assert len(fast) == len(slow)
        for ours, theirs in zip(fast, slow, strict=True):
            assert_same(ours, theirs)
    num_others = sum(row["id"] >= 5000 for batch in slow for row in rows_of_batch(batch))
    # Once for each element, except for what shows the layout.
    assert num_others <= len(calls) / len(pipelines) <= num_others + 40


def rows_of_batch(batch):
    return [{name: column[k] for name, column in batch.items()} for k in range(len(batch["id"]))]


@pytest.mark.parametrize(
    "other",
    [
        lambda n: {"id": np.int64(n)},
        lambda n: {"id": np.int64(n), "x": np.zeros(3, np.float32)},
        lambda n: {"id": np.int32(n), "x": np.zeros(4, np.float32)},
        lambda n: {"id": np.int64(n), "x": "text"},
        lambda n: None if n == 5003 else {"id": np.int64(n), "x": np.zeros(4, np.float32)},
    ],
)
def test_mixtures_of_unlike_elements_are_batched_as_others_are(tmp_path, other):
    parts = [numbers_file(tmp_path / "0.parquet", 0, 90)]
    parts.append(grain.MapDataset.range(5000, 5050).map(other))
    ds = grain.MapDataset.mix(parts, weights=[2, 1])

    def outcome(pipeline):
        try:
            return [plain(batch) for batch in pipeline]
        except Exception as failure:
            return type(failure), str(failure)

    # A function downstream of the mixture hides the columns.
    hidden = ds.map(lambda row: row)
    assert outcome(ds.batch(16)) == outcome(hidden.batch(16))
    assert outcome(ds.to_iter_dataset().batch(16)) == outcome(hidden.to_iter_dataset().batch(16))


def test_failure_of_a_part_of_a_mixture_names_its_element(tmp_path):
    def fail(number):
        if number == 5007:
            raise ValueError("this one")
        return {"id": np.int64(number), "x": np.zeros(4, np.float32)}

    ds = grain.MapDataset.concatenate(
        [
            numbers_file(tmp_path / "0.parquet", 0, 90),
            grain.MapDataset.range(5000, 5050).map(fail),
        ]
    )
    iterator = iter(ds.to_iter_dataset().batch(10))
    for _ in range(9):
        next(iterator)
    with pytest.raises(ValueError, match="this one") as caught:
        next(iterator)
    assert "97" in "\n".join(caught.value.__notes__)


def test_rows_before_a_source_that_cannot_be_opened_are_read(tmp_path):
    paths = [tmp_path / f"{number}.parquet" for number in range(20)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"id": np.arange(100) + 100 * number}), path)
    # In another process, files are opened when they are read.
    pickles = [pickle.dumps(ParquetDataSource(path)) for path in paths]
    paths[-1].unlink()
    for batch_size in (0, 10):
        ds = grain.MapDataset.concatenate(
            [grain.MapDataset.source(pickle.loads(each)) for each in pickles]
        ).to_iter_dataset()
        rows = iter(ds.batch(batch_size) if batch_size else ds)
        count = 1900 // (batch_size or 1)
        found = [np.atleast_1d(next(rows)["id"]) for _ in range(count)]
        assert np.concatenate(found).tolist() == list(range(1900))
        with pytest.raises(FileNotFoundError, match=r"19\.parquet"):
            next(rows)


# --- orders that keep rows close ------------------------------------------------------------------


def close_order(lens, seed, window, epoch):
    """The order of an epoch, written out."""

    def shuffled(count, number):
        permutation = grain.experimental.index_shuffle
        seed_of = (seed + number) % 2**32
        return [permutation(k, max_index=count - 1, seed=seed_of, rounds=4) for k in range(count)]

    starts = np.cumsum([0, *lens])
    rows = [
        row
        for group in shuffled(len(lens), epoch)
        for row in range(starts[group], starts[group + 1])
    ]
    num_rows = len(rows)
    per_epoch = -(-num_rows // window)
    order = []
    for number in range(per_epoch):
        part = rows[number * window : (number + 1) * window]
        order += [part[k] for k in shuffled(len(part), epoch * per_epoch + number)]
    return order


@pytest.mark.parametrize(("row_group_size", "window"), [(100, 250), (37, 100), (1000, 5000)])
def test_the_close_order_is_the_one_written_out(tmp_path, row_group_size, window):
    write(tmp_path / "x.parquet", row_group_size=row_group_size)
    source = ParquetDataSource(
        tmp_path / "x.parquet", columns=["id"], shuffle_seed=9, shuffle_window=window
    )
    lens = source.row_group_lens
    assert sum(lens) == 1000
    expected = [row for epoch in range(3) for row in close_order(lens, 9, window, epoch)]
    ds = grain.MapDataset.source(source).repeat(3)
    assert [int(element["id"]) for element in ds] == expected
    assert sorted(expected[:1000]) == list(range(1000))
    assert expected[:1000] != expected[1000:2000]
    assert [int(row["id"]) for row in source] == expected[:1000]
    batches = list(ds.batch(10))
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == expected
    shard = ds[1::3]
    assert [int(element["id"]) for element in shard] == expected[1::3]


def test_the_close_order_resumes_at_every_element(tmp_path):
    write(tmp_path / "x.parquet", 60, row_group_size=7)
    source = ParquetDataSource(tmp_path / "x.parquet", shuffle_seed=9, shuffle_window=20)
    ds = grain.MapDataset.source(source).repeat(2).to_iter_dataset()
    expected = [int(row["id"]) for row in ds]
    iterator = iter(ds)
    states = []
    for _ in expected:
        states.append(iterator.get_state())
        next(iterator)
    for at, state in enumerate(states):
        restored = iter(pickle.loads(pickle.dumps(ds))) if at % 20 == 0 else iter(ds)
        restored.set_state(state)
        assert int(next(restored)["id"]) == expected[at]


def test_each_row_group_is_decoded_about_once_in_the_close_order(tmp_path):
    write(tmp_path / "x.parquet", 20_000, row_group_size=500)
    path = tmp_path / "x.parquet"
    size = path.stat().st_size
    source = ParquetDataSource(path, shuffle_seed=1, shuffle_window=2000, cache_bytes=1_000_000)
    _, before, _, _ = source._files.read_totals()
    for _ in grain.MapDataset.source(source).batch(50, batch_fn=len):
        pass
    _, after, _, _ = source._files.read_totals()
    assert after - before < 3.5 * size


def test_messages_name_the_row_in_its_file(tmp_path):
    write(tmp_path / "x.parquet", 60, row_group_size=7)

    def fail(row):
        if row["id"] == 33:
            raise ValueError("this one")
        return row

    for options in ({}, {"shuffle_seed": 9, "shuffle_window": 20}):
        source = ParquetDataSource(tmp_path / "x.parquet", **options)
        with pytest.raises(ValueError, match="this one") as caught:
            list(grain.MapDataset.source(source).shuffle(seed=1).map(fail))
        notes = "\n".join(caught.value.__notes__)
        assert f"record 33 of {tmp_path / 'x.parquet'}" in notes


# --- the sequential dataset -----------------------------------------------------------------------


def test_null_of_a_dictionary_is_none(tmp_path):
    path = str(tmp_path / "x.parquet")
    column = pa.array(["a", None, "b", None]).dictionary_encode()
    pq.write_table(pa.table({"name": column}), path)
    rows = [
        [row["name"] for row in g.experimental.ParquetIterDataset(path)]
        for g in (real_grain, grain)
    ]
    assert rows == [["a", "b", "b", "b"], ["a", None, "b", None]]


@settings(max_examples=cases(25, 1_250))
@given(files())
def test_sequential_rows_are_those_of_grain(tmp_path_factory, file):
    table, options = file
    # Columns of which Grain's values differ: `test_null_of_a_dictionary_is_none`.
    names = [
        name
        for name in table.column_names
        if not (pa.types.is_dictionary(table[name].type) and table[name].null_count)
    ]
    if not table.num_rows or not names:
        return
    table = table.select(names)
    path = str(tmp_path_factory.mktemp("p") / "x.parquet")
    pq.write_table(table, path, **options)
    try:
        theirs = list(real_grain.experimental.ParquetIterDataset(path))
    except pa.lib.ArrowException:
        return
    ours = list(ParquetIterDataset(path))
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in b:
            assert same_value(a[name], b[name]), (number, name, a[name], b[name])


def test_sequential_states_are_those_of_grain(tmp_path):
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for number, path in enumerate(paths):
        pq.write_table(
            pa.table({"x": range(100 * number, 100 * number + 5 + number)}),
            path,
            row_group_size=2,
        )
    for argument in (paths[0], [paths[1]], paths):
        ours = iter(ParquetIterDataset(argument))
        theirs = iter(real_grain.experimental.ParquetIterDataset(argument))
        states = [ours.get_state()]
        assert ours.get_state() == theirs.get_state()
        rest = []
        for element in theirs:
            rest.append(int(element["x"]))
            assert int(next(ours)["x"]) == rest[-1]
            assert ours.get_state() == theirs.get_state()
            states.append(ours.get_state())
        with pytest.raises(StopIteration):
            next(ours)
        for at, state in enumerate(states):
            restored = iter(ParquetIterDataset(argument))
            restored.set_state(state)
            assert [int(element["x"]) for element in restored] == rest[at:]


def test_sequential_rows_of_large_row_groups_agree_on_their_types(tmp_path):
    # The only null comes after many blocks.
    values = [[k, k] for k in range(20_000)] + [None, [None]]
    table = pa.table({"x": [*range(20_001), None], "l": values, "b": [True] * 20_001 + [None]})
    path = str(tmp_path / "x.parquet")
    pq.write_table(table, path)
    ours, theirs = ParquetIterDataset(path), real_grain.experimental.ParquetIterDataset(path)
    for a, b in zip(ours, theirs, strict=True):
        assert same_value(a["x"], b["x"])
        assert same_value(a["b"], b["b"])
        assert same_value(a["l"], b["l"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_child_forked_while_a_row_group_is_read_reads_rows(tmp_path):
    numbers = pa.array(np.arange(6_000_000), mask=np.arange(6_000_000) == 7)
    options = {"row_group_size": 6_000_000, "use_dictionary": False}
    pq.write_table(pa.table({"x": numbers}), tmp_path / "x.parquet", **options)
    iterator = ParquetDatasetIterator(tmp_path / "x.parquet")
    thread = threading.Thread(target=next, args=[iterator])
    thread.start()
    while thread.is_alive() and not iterator._files.cached_bytes:
        pass
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            row = iterator._files.read_like_pandas(0, 100, 1, 1)[0]
        finally:
            os._exit(0 if row["x"] == 1 else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_sequential_dataset_is_sliced_by_file(tmp_path):
    paths = [str(tmp_path / f"{number}.parquet") for number in range(4)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"x": [number] * 3}), path)
    ds = ParquetIterDataset(paths)
    ds.set_slice(slice(1, None, 2))
    assert [int(row["x"]) for row in ds] == [1, 3] * 3
    assert list(ParquetIterDataset(list(map(Path, paths)))) == list(ParquetIterDataset(paths))
    assert list(ParquetDatasetIterator(Path(paths[2]))) == [{"x": 2}] * 3
    ds = ParquetIterDataset(paths)
    workers = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    assert sorted(int(row["x"]) for row in workers) == sorted([0, 1, 2, 3] * 3)


def test_sequential_arguments_are_those_of_a_parquet_file(tmp_path):
    write(tmp_path / "x.parquet", 10)
    path = str(tmp_path / "x.parquet")
    rows = list(ParquetIterDataset(path, memory_map=True, pre_buffer=True, columns=["id"]))
    assert list(rows[0]) == ["id"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        ParquetIterDataset(path, foo=1)
    with pytest.raises(ValueError, match="`metadata` is not supported"):
        ParquetIterDataset(path, metadata=3)
    with pytest.raises(ValueError, match="`columns` must be a sequence of names, got 'id'"):
        ParquetIterDataset(path, columns="id")
    iterator = iter(ParquetIterDataset(path))
    with pytest.raises(ValueError, match="1 row groups; restore needs the same file"):
        iterator.set_state({"row_group": 7, "index_within_row_group": 0})
    with pytest.raises(FileNotFoundError):
        iter(ParquetIterDataset("missing.parquet"))


# --- damage ---------------------------------------------------------------------------------------


def small_file(path, **options):
    table = pa.table(
        {
            "x": pa.array([*range(50), None]),
            "s": [f"text {k % 7}" for k in range(51)],
            "l": [[k, k + 1] for k in range(51)],
        }
    )
    pq.write_table(
        table,
        path,
        row_group_size=20,
        write_page_index=True,
        data_page_size=100,
        write_page_checksum=True,
        **options,
    )
    return rows_of(table)


def read_all(path):
    return [plain(row) for row in ParquetDataSource(path)]


def test_a_file_cut_at_any_byte_is_an_error(tmp_path):
    small_file(tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    cut = tmp_path / "cut.parquet"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(DAMAGE, match=r"cut\.parquet"):
            read_all(cut)


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "lz4", "brotli", "none"])
def test_flipped_bits_are_an_error_or_leave_the_rows_alone(tmp_path, compression):
    # Pages have checksums; the footer and page headers have none, so rows may differ there.
    small_file(tmp_path / "whole.parquet", compression=compression)
    whole = (tmp_path / "whole.parquet").read_bytes()
    footer_len = int.from_bytes(whole[-8:-4], "little")
    flipped = tmp_path / "flipped.parquet"
    rng = random.Random(1)
    num_errors, num_flips = 0, cases(80, 20_000)
    for _ in range(num_flips):
        damaged = bytearray(whole)
        bit = rng.randrange(8 * len(whole))
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        try:
            read_all(flipped)
        except DAMAGE:
            num_errors += 1
    assert num_errors > num_flips / 20
    assert footer_len < len(whole)


def test_other_files_are_errors_that_name_them(tmp_path):
    others = {
        "empty": (b"", "the file is empty"),
        "short": (b"PAR1", "too short"),
        "text": (b"hello world, this is text\n" * 10, "not a Parquet file"),
        "encrypted": (b"PARE" + bytes(20) + b"PARE", "encrypted"),
        "footer": (
            b"PAR1" + bytes(20) + b"\xff\xff\xff\x7fPAR1",
            "footer: its length is 2147483647",
        ),
        "zeros": (b"PAR1" + bytes(20) + b"\x10\0\0\0PAR1", "footer"),
    }
    for name, (content, problem) in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DAMAGE, match=rf"{name}: .*{problem}"):
            ParquetDataSource(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no file that ends with \.parquet"):
        ParquetDataSource(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        ParquetDataSource(tmp_path / "missing")


def test_a_file_that_changes_is_an_error(tmp_path):
    path = tmp_path / "x.parquet"
    write(path, 1000)
    source = ParquetDataSource(path, cache_bytes=0)
    source[0]
    write(path, 900)
    with pytest.raises(DAMAGE, match=r"x\.parquet: the file was"):
        source[500]


def test_a_page_that_claims_to_be_huge_is_refused(tmp_path):
    # 64 MiB of zeros in one page of a few kilobytes.
    table = pa.table({"x": pa.array([bytes(64 << 20)])})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "x.parquet").stat().st_size < 20_000
    with pytest.raises(DAMAGE, match=r"x\.parquet: .*column `x`.*more than is plausible"):
        ParquetDataSource(tmp_path / "x.parquet")[0]


def varint(value):
    """`value` as Thrift's compact encoding has it, zigzag."""
    value = value << 1
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


@pytest.mark.parametrize(("value", "compression"), [(2**31 - 1, "none"), (2**60, "zstd")])
def test_numbers_that_claim_too_much_are_errors(tmp_path, value, compression):
    # In a process with little address space, a huge allocation would end it.
    rows = small_file(tmp_path / "whole.parquet", compression=compression)
    program = """
import resource, sys
from pathlib import Path
from grainmill.sources import ParquetDataSource
from grainmill._native import GrainmillError
whole, value, path = Path(sys.argv[1]).read_bytes(), bytes.fromhex(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
footer_at = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
failed = 0
for at in [*range(4, footer_at, 5), *range(footer_at, len(whole) - 8, 2)]:
    # Each byte in turn becomes the number, for those that are one.
    damaged = bytearray(whole[:at] + value + whole[at + 1 :])
    if at >= footer_at:
        damaged[-8:-4] = (len(damaged) - 8 - footer_at).to_bytes(4, "little")
    else:
        damaged = bytearray(whole)
        damaged[at : at + len(value)] = value[: max(0, footer_at - at)]
    Path(path).write_bytes(damaged)
    try:
        source = ParquetDataSource(path)
        list(source.__getitems__(range(min(len(source), 60))))
    except (GrainmillError, ValueError, OSError, NotImplementedError) as error:
        assert path in str(error) or isinstance(error, ValueError), error
        failed += 1
print(failed)
"""
    arguments = [tmp_path / "whole.parquet", varint(value).hex(), tmp_path / "damaged.parquet"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows
    assert int(done.stdout) > 150


def test_groups_that_nest_without_end_are_refused(tmp_path):
    # A schema of 100,000 elements: required groups `g` with one child each, and a leaf.
    footer = b"\x15\x02\x19\xfc\xa0\x8d\x06" + 99_999 * b"\x35\0\x18\x01g\x15\x02\0"
    footer += b"\x15\x02\x25\0\x18\x01x\0" + b"\x16\0\x19\x0c\0"
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(DAMAGE, match=r"x\.parquet: footer: it is damaged"):
        ParquetDataSource(tmp_path / "x.parquet")


def test_a_dictionary_that_claims_more_values_than_bytes_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": ["a", "b"] * 50}), path, compression="none")
    data = bytearray(path.read_bytes())
    head = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    # Its header ends with the number of values, 2, and its encoding.
    at = data.index(b"\x4c\x15\x04\x15", head)
    data[at + 2] = 0x7E
    path.write_bytes(data)
    with pytest.raises(DAMAGE, match=r"a dictionary of 63 values in 10 bytes"):
        ParquetDataSource(path)[0]


def test_a_dictionary_value_that_is_repeated_is_decoded_in_parts(tmp_path):
    table = pa.table({"x": pa.array([os.urandom(1 << 20)] * 300)})
    pq.write_table(table, tmp_path / "x.parquet", dictionary_pagesize_limit=4 << 20)
    assert (tmp_path / "x.parquet").stat().st_size < 3 << 20
    source = ParquetDataSource(tmp_path / "x.parquet", cache_bytes=0)
    assert source[299]["x"] == table["x"][0].as_py()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Tokyo", "+01:30", "-08:00", None])
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_nested_times_have_the_zone_of_the_writer(tmp_path, unit, zone):
    """Files have no seconds: these are milliseconds, and the zone is in what the writer adds."""
    rng = random.Random(f"{unit} {zone}")
    time, path = pa.timestamp(unit, zone), tmp_path / "t.parquet"
    kinds = [
        pa.struct([("a", pa.int64()), ("t", time)]),
        pa.struct([("x", pa.struct([("t", time)])), ("y", pa.timestamp("us", "UTC"))]),
        pa.list_(pa.struct([("t", time), ("u", pa.string())])),
    ]
    values = [
        lambda: {"a": rng.randrange(9), "t": rng.randrange(10**9)},
        lambda: {"x": {"t": rng.randrange(10**9)}, "y": rng.randrange(10**9)},
        lambda: [{"t": rng.randrange(10**9), "u": "u"} for _ in range(rng.randrange(3))],
    ]
    columns = [
        (str(number), pa.array([value() for _ in range(5)], kind))
        for number, (kind, value) in enumerate(zip(kinds, values, strict=True))
    ]
    rng.shuffle(columns)
    pq.write_table(pa.table(dict(columns)), path)
    found = list(ParquetIterDataset(str(path)))

    def shown(value):
        if isinstance(value, np.ndarray | list):
            return [shown(item) for item in value]
        if isinstance(value, dict):
            return {key: shown(item) for key, item in value.items()}
        if isinstance(value, datetime.datetime):
            return value.isoformat()
        return value

    assert shown(found) == shown(pq.read_table(path).to_pylist())
