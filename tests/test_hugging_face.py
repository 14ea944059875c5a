"""Hugging Face data sets as sources: tables with random access, and streams."""

import json
import pickle
import subprocess
import sys

import datasets
import numpy as np
import pytest

import grainmill as grain

HuggingFaceDataSource = grain.sources.HuggingFaceDataSource
HuggingFaceIterDataset = grain.experimental.HuggingFaceIterDataset
datasets.disable_progress_bars()


def table():
    n = 23
    features = datasets.Features(
        {
            "i": datasets.Value("int32"),
            "missing": datasets.Value("float64"),
            "flag": datasets.Value("bool"),
            "text": datasets.Value("string"),
            "raw": datasets.Value("binary"),
            "ragged": datasets.Sequence(datasets.Value("uint8")),
            "holes": datasets.Sequence(datasets.Value("int64")),
            "fixed": datasets.Sequence(datasets.Value("float32"), length=3),
            "grid": datasets.Sequence(datasets.Sequence(datasets.Value("int16"))),
            "shaped": datasets.Array2D((2, 2), "int32"),
            "words": datasets.Sequence(datasets.Value("string")),
            "inner": {"k": datasets.Value("int64"), "l": datasets.Sequence(datasets.Value("int8"))},
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    return datasets.Dataset.from_dict(
        {
            "i": list(range(n)),
            "missing": [None if k % 3 == 0 else k / 2 for k in range(n)],
            "flag": [k % 2 == 0 for k in range(n)],
            "text": ["ä" * k for k in range(n)],
            "raw": [bytes(k) for k in range(n)],
            "ragged": [None if k == 5 else list(range(k)) for k in range(n)],
            "holes": [[k, None] if k % 2 else [k, k] for k in range(n)],
            "fixed": [[k, k, 1.5] for k in range(n)],
            "grid": [[[1] * k] * 2 if k % 2 else [[1], [2, 3]] for k in range(n)],
            "shaped": [[[k, 1], [2, 3]] for k in range(n)],
            "words": [["a"] * (k % 3) for k in range(n)],
            "inner": [{"k": k, "l": [1] * (k % 4)} for k in range(n)],
            "label": [k % 2 for k in range(n)],
        },
        features=features,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "saved"
    table().save_to_disk(str(path), num_shards=3)
    return path


def as_python(value):
    """The value with lists in place of arrays, as `datasets` returns it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_python(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_python(inner) for inner in value]
    return value


def test_rows_are_those_of_datasets_in_any_blocks(saved):
    rows = table()
    expected = [rows[k] for k in range(len(rows))]
    shuffled = rows.select([7, 3, 3, 20, 0])
    for source, wanted in [
        (HuggingFaceDataSource(rows), expected),
        (HuggingFaceDataSource(saved), expected),
        (HuggingFaceDataSource(shuffled), [expected[k] for k in (7, 3, 3, 20, 0)]),
        (HuggingFaceDataSource(rows.shard(3, 1)), list(rows.shard(3, 1))),
    ]:
        assert len(source) == len(wanted)
        assert [as_python(source[k]) for k in range(len(source))] == wanted
        keys = np.random.default_rng(0).integers(0, len(wanted), 50).tolist()
        assert as_python(source.__getitems__(keys)) == [wanted[k] for k in keys]
        ds = grain.MapDataset.source(source)
        assert as_python(list(ds)) == wanted
        np.testing.assert_equal(list(ds), [source[k] for k in range(len(source))])


def test_values_have_the_types_of_the_columns():
    source = HuggingFaceDataSource(table())
    row = source[4]
    assert {name: value.dtype.name for name, value in row.items() if hasattr(value, "dtype")} == {
        "i": "int32",
        "missing": "float64",
        "flag": "bool",
        "ragged": "uint8",
        "holes": "int64",
        "fixed": "float32",
        "shaped": "int32",
        "label": "int64",
    }
    assert row["shaped"].shape == (2, 2)
    assert source[3]["grid"].shape == (2, 3)
    assert source[3]["grid"].dtype == np.int16
    assert isinstance(row["grid"], list)
    assert row["inner"]["l"].dtype == np.int8
    assert source[3]["missing"] is None
    assert source[5]["ragged"] is None
    assert source[5]["holes"] == [5, None]
    row["ragged"][:] = 9
    assert source[4]["ragged"].tolist() == [0, 1, 2, 3]


def test_columns_formats_and_transforms():
    rows = table()
    source = HuggingFaceDataSource(rows, columns=["text", "i"])
    assert source[2] == {"text": "ää", "i": 2}
    assert list(source[2]) == ["text", "i"]
    with pytest.raises(ValueError, match="no column 'nope'; there are"):
        HuggingFaceDataSource(rows, columns=["nope"])
    transformed = rows.with_transform(lambda batch: {"j": [i + 1 for i in batch["i"]]})
    assert HuggingFaceDataSource(transformed)[3] == {"j": 4}
    assert HuggingFaceDataSource(rows.with_format("numpy"))[3]["fixed"].tolist() == [3, 3, 1.5]


def test_arrow_files_and_splits(saved, tmp_path):
    files = sorted(saved.glob("*.arrow"))
    source = HuggingFaceDataSource([str(file) for file in files])
    assert as_python(source[22]) == table()[22]
    assert as_python(HuggingFaceDataSource(f"{saved}/*.arrow")[9]) == table()[9]
    assert len(HuggingFaceDataSource(str(files[1]))) == 8
    datasets.DatasetDict({"train": table()}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"has the splits \['train'\]; pass the directory of one"):
        HuggingFaceDataSource(tmp_path / "splits")
    assert len(HuggingFaceDataSource(tmp_path / "splits" / "train")) == 23
    with pytest.raises(FileNotFoundError):
        HuggingFaceDataSource(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        HuggingFaceDataSource(tmp_path / "*.arrow")


def test_pickle_is_small_and_repr_is_stable(saved):
    source = HuggingFaceDataSource(saved)
    data = pickle.dumps(source)
    assert len(data) < 1000
    assert as_python(pickle.loads(data)[5]) == table()[5]
    script = "import sys, grainmill as g; print(repr(g.sources.HuggingFaceDataSource(sys.argv[1])))"
    again = subprocess.run(
        [sys.executable, "-c", script, str(saved)], capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == repr(source)
    assert repr(source) != repr(HuggingFaceDataSource(saved, columns=["i"]))
    assert "fingerprint=" in repr(HuggingFaceDataSource(table()))


def test_workers_read_it_and_states_are_exact(saved):
    ds = grain.MapDataset.source(HuggingFaceDataSource(saved, columns=["i", "fixed"]))
    ds = ds.shuffle(seed=1).map(lambda row: row["i"] + row["fixed"][0]).repeat(2)
    # One worker, as each imports `datasets`, which takes longer than all the rest.
    read = ds.to_iter_dataset(grain.ReadOptions(num_workers=1)).batch(3)
    iterator = iter(read)
    expected = [batch.tolist() for batch in read]
    for k in range(len(expected)):
        state = json.loads(json.dumps(iterator.get_state()))
        assert next(iterator).tolist() == expected[k]
        if k % 5 == 0:
            again = iter(ds.to_iter_dataset().batch(3))
            again.set_state(state)
            assert [batch.tolist() for batch in again] == expected[k:]


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="got int"):
        HuggingFaceDataSource(3)
    with pytest.raises(TypeError, match="HuggingFaceIterDataset"):
        HuggingFaceDataSource(table().to_iterable_dataset())
    with pytest.raises(TypeError, match="got Dataset, which has no `state_dict`"):
        HuggingFaceIterDataset(table())
    source = HuggingFaceDataSource(table())
    for key in (-1, 23):
        with pytest.raises(IndexError, match=f"row {key} is out of range for 23 rows"):
            source[key]
    for other in (slice(1, 3), "1", 1.0):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            source[other]
    with pytest.raises(ValueError, match="`columns` must be a sequence of names, got 'i'"):
        HuggingFaceDataSource(table(), columns="i")


@pytest.mark.parametrize(
    "paths", ["s3://data/hf", "gs://data/hf/*.arrow", ["a.arrow", "https://h/b.arrow"]]
)
def test_tables_in_a_bucket_are_refused_with_what_to_do(paths):
    with pytest.raises(
        ValueError, match=r"must be local files, got '\w+://.*; copy .*grainmill convert.*stream"
    ):
        HuggingFaceDataSource(paths)


def test_a_missing_package_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'grainmill\[huggingface\]'"):
        HuggingFaceDataSource(saved)


# --- streams -------------------------------------------------------------------------------------


STREAMS = {
    "plain": lambda rows: rows.to_iterable_dataset(num_shards=3),
    "mapped": lambda rows: (
        rows.to_iterable_dataset(num_shards=2)
        .map(lambda row: {"j": row["i"] * 2})
        .filter(lambda row: row["i"] % 3 > 0)
    ),
    "batched": lambda rows: rows.to_iterable_dataset().map(
        lambda b: {"i": b["i"]}, batched=True, batch_size=4
    ),
    "shuffled": lambda rows: rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5),
}


def stream_of(saved, name):
    """A stream over the same rows whenever it is called."""
    if name in STREAMS:
        return STREAMS[name](table().select_columns(["i", "text"]))
    return datasets.load_dataset(
        "arrow",
        data_files=f"{saved}/*.arrow",
        split="train",
        streaming=True,
        cache_dir=str(saved / "cache"),
    )


@pytest.mark.parametrize("name", [*STREAMS, "files"])
def test_states_of_streams_are_exact_at_every_row(saved, name):
    stream = stream_of(saved, name)
    expected = list(stream)
    ds = HuggingFaceIterDataset(stream)
    assert list(ds) == list(ds) == expected
    iterator, other = iter(ds), iter(ds)
    anew = HuggingFaceIterDataset(stream_of(saved, name))
    for k in range(len(expected) + 1):
        state = json.loads(json.dumps(iterator.get_state()))
        again = iter(anew)
        again.set_state(state)
        assert again.get_state() == state
        assert list(again) == expected[k:]
        other.set_state(state)
        if k < len(expected):
            assert next(other) == next(iterator) == expected[k]


def test_stages_and_workers_downstream_of_a_stream(saved):
    ds = HuggingFaceIterDataset(stream_of(saved, "plain")).map(lambda row: row["i"])
    assert next(iter(ds.batch(4))).tolist() == [0, 1, 2, 3]
    read = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    assert sorted(read) == list(range(23))
    with pytest.raises(ValueError, match="has 3 shards, which 4 workers cannot share"):
        ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=4))


def test_streams_are_shown_by_what_identifies_them(saved, tmp_path):
    stream = stream_of(saved, "plain")
    ds = HuggingFaceIterDataset(stream)
    shown = "HuggingFaceIterDataset(IterableDataset, columns=['i', 'text'], num_shards=3)"
    assert repr(ds) == shown
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    files = {"test": str(tmp_path / "a.jsonl")}
    stream = datasets.load_dataset("json", data_files=files, split="test", streaming=True)
    assert repr(HuggingFaceIterDataset(stream)) == (
        "HuggingFaceIterDataset(IterableDataset, dataset_name='json', config_name='default', "
        "split='test', columns=['n'], num_shards=1)"
    )
    assert str(ds) == "HuggingFaceIterDataset"
