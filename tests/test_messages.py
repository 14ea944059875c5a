"""What users write by mistake, and what the message must say."""

import json
import pathlib

import numpy as np
import pytest

import grainmill as grain
from grainmill import experimental

Handler = grain.checkpoint.CheckpointHandler


class Number(grain.transforms.MapWithIndex):
    def map_with_index(self, index, element):
        return index, element


class Double(grain.transforms.Map):
    def map(self, element):
        return 2 * element


class Even(grain.transforms.Filter):
    def filter(self, element):
        return element % 2 == 0


class Jitter(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.integers(2)


class Twice(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        yield element
        yield element


class NoArguments:
    def __call__(self, element):
        return element


class OneArgument:
    def __init__(self, value):
        self.value = value


def in_map(count=3):
    return grain.MapDataset.range(count)


def in_iter(count=3):
    return in_map(count).to_iter_dataset()


def sequences(name="text"):
    return in_map(6).map(lambda x: {name: np.full(x % 3 + 1, x)}).to_iter_dataset()


def packed(kind, ds, **options):
    return list(kind(ds, num_packing_bins=2, **options))


def none_for_one(ds):
    return ds.map(lambda x: None if x == 1 else x).batch(2)


def first_fit(*args, **options):
    return packed(experimental.FirstFitPackIterDataset, *args, **options)


def best_fit(*args, **options):
    return packed(experimental.BestFitPackIterDataset, *args, **options)


A_CLASS = ["the class `MapDataset`: did you", "the class `IterDataset`: did you"]

# What the user writes, the exception, and what it must say.
MISTAKES = {
    "a class in a mixture": (
        lambda: grain.MapDataset.mix([in_map(), grain.MapDataset]),
        TypeError,
        A_CLASS[:1],
    ),
    "a class in a sequential mixture": (
        lambda: grain.IterDataset.mix([in_iter(), grain.IterDataset]),
        TypeError,
        A_CLASS[1:],
    ),
    "a class in a zip": (
        lambda: experimental.ZipMapDataset([grain.MapDataset]),
        TypeError,
        A_CLASS[:1],
    ),
    "a class in a stage": (
        lambda: experimental.RepeatIterDataset(grain.IterDataset, 2),
        TypeError,
        A_CLASS[1:],
    ),
    "a wrong key to pack": (
        lambda: first_fit(sequences(), length_struct={"t": 8}),
        KeyError,
        ["`t` of `length_struct`", "['text']"],
    ),
    "a wrong key to pack best": (
        lambda: best_fit(sequences(), length_struct={"t": 8}),
        KeyError,
        ["`t` of `length_struct`", "['text']"],
    ),
    "a wrong meta feature": (
        lambda: first_fit(sequences(), length_struct={"text": 8}, meta_features=["m"]),
        KeyError,
        ["`m` of `meta_features`", "['text']"],
    ),
    "None in a batch": (
        lambda: list(none_for_one(in_map())),
        ValueError,
        ["element 1 has an empty NoneType", "`return`", "`filter`"],
    ),
    "None in a sequential batch": (
        lambda: list(none_for_one(in_iter())),
        ValueError,
        ["element 1 has an empty NoneType", "`return`", "`filter`"],
    ),
    "shuffle": (
        lambda: in_iter().shuffle(seed=1),
        AttributeError,
        ["an `IterDataset` has no method `shuffle`", "WindowShuffleIterDataset"],
    ),
    "shuffle a batch": (
        lambda: in_iter().batch(2).shuffle(seed=1),
        AttributeError,
        ["an `IterDataset` has no method `shuffle`", "before `to_iter_dataset()`"],
    ),
    "repeat": (lambda: in_iter().repeat(2), AttributeError, ["RepeatIterDataset"]),
    "take": (lambda: in_iter().take(2), AttributeError, ["LimitIterDataset"]),
    "take of a MapDataset": (lambda: in_map().take(2), AttributeError, ["`ds[:count]`"]),
    "workers of a MapDataset": (
        lambda: in_map().mp_prefetch(),
        AttributeError,
        ["to_iter_dataset"],
    ),
    "an unknown method": (
        lambda: in_iter().frobnicate(),
        AttributeError,
        ["'IterDataset' object has no attribute 'frobnicate'"],
    ),
    "an unknown method of a MapDataset": (
        lambda: in_map().frobnicate(),
        AttributeError,
        ["'MapDataset' object has no attribute 'frobnicate'"],
    ),
    "len": (lambda: len(in_iter()), TypeError, ["'IterDataset' has no len()"]),
    "a length": (lambda: in_iter().__len__(), AttributeError, ["may drop", "`ds.describe()`"]),
    "an index": (lambda: in_iter()[0], TypeError, ["no index", "before `to_iter_dataset()`"]),
    "a slice": (lambda: in_iter()[0:2], TypeError, ["LimitIterDataset"]),
    "next of a dataset": (lambda: next(in_iter()), TypeError, ["'IterDataset' object is not"]),
    "len of an iterator": (lambda: len(iter(in_iter())), TypeError, ["DatasetIterator'"]),
    "the wrong kind of transform": (
        lambda: in_map().map(Number()),
        TypeError,
        ["a `transforms.MapWithIndex`", "`ds.map_with_index(transform)`"],
    ),
    "a random map as a map": (
        lambda: in_iter().map(Jitter()),
        TypeError,
        ["a `transforms.RandomMap`", "`ds.random_map(transform)`"],
    ),
    "a map as a filter": (lambda: in_map().filter(Double()), TypeError, ["`ds.map(transform)`"]),
    "a flat map as a map": (lambda: in_iter().map(Twice()), TypeError, ["`ds.apply(transform)`"]),
    "a class of transforms": (lambda: in_map().map(Double), TypeError, ["mean `Double(...)`?"]),
    "another class": (lambda: in_map().map(Number), TypeError, ["did you mean `Number(...)`?"]),
    "a class as a filter": (lambda: in_iter().filter(Even), TypeError, ["mean `Even(...)`?"]),
    "a class of no transforms": (
        lambda: in_map().map(NoArguments),
        TypeError,
        ["cannot be called with an element", "did you mean `NoArguments(...)`?"],
    ),
    "a class of flat maps": (
        lambda: experimental.FlatMapIterDataset(in_iter(), Twice),
        TypeError,
        ["did you mean `Twice(...)`?"],
    ),
    "a class to apply": (
        lambda: in_map().apply(grain.transforms.Batch),
        NotImplementedError,
        ["Transformation type: ", "Did you mean `Batch(...)`?"],
    ),
    "a URL as a source": (
        lambda: grain.MapDataset.source("gs://bucket/train.array_record"),
        TypeError,
        ["'gs://bucket/train.array_record'", "`grain.sources.ArrayRecordDataSource(path)`"],
    ),
    "a pattern as a source": (
        lambda: grain.MapDataset.source("train*"),
        TypeError,
        ["whose elements are its characters"],
    ),
    "a slice of a fraction": (
        lambda: in_map().slice([0, 1.5]),
        TypeError,
        ["must be integers", "1.5", "position 1"],
    ),
    "a slice of an array of fractions": (
        lambda: in_map().slice(np.array([0.0, 1.0])),
        TypeError,
        ["must be integers", "float64"],
    ),
    "a file that is missing": (
        lambda: len(grain.sources.ArrayRecordDataSource("/missing/a.array_record")),
        FileNotFoundError,
        ["No such file or directory: '/missing/a.array_record'"],
    ),
    "a dataset to save": (
        lambda: Handler().save(pathlib.Path(), in_iter()),
        AttributeError,
        ["'IterDataset' object has no attribute 'get_state'", "`iter(dataset)`"],
    ),
    "a dataset to restore": (
        lambda: Handler().restore(pathlib.Path(), in_map()),
        TypeError,
        ["must be an iterator", "`iter(dataset)`"],
    ),
    "a text as a directory to save in": (
        lambda: Handler().save("run/1", iter(in_iter())),
        TypeError,
        ["'run/1'", "`pathlib.Path('run/1')`"],
    ),
    "a text as a directory to restore from": (
        lambda: Handler().restore("run/1", iter(in_iter())),
        TypeError,
        ["'run/1'", "`pathlib.Path('run/1')`"],
    ),
    "nothing to restore": (
        lambda: Handler().restore(pathlib.Path("run")),
        TypeError,
        ["pass `item`, the iterator that the training loop reads", "'NoneType'"],
    ),
    "a loader for Orbax to save": (
        lambda: grain.checkpoint.CheckpointSave(
            grain.DataLoader(
                data_source=range(3),
                sampler=grain.samplers.SequentialSampler(3, grain.sharding.NoSharding()),
            )
        ),
        TypeError,
        ["must be an iterator", "'DataLoader'", "`iter(dataset)`"],
    ),
    "a dataset for Orbax to save": (
        lambda: grain.checkpoint.CheckpointSave(in_iter()),
        TypeError,
        ["must be an iterator", "`iter(dataset)`"],
    ),
    "a dataset for Orbax to restore": (
        lambda: grain.checkpoint.CheckpointRestore(in_iter()),
        TypeError,
        ["must be an iterator", "`iter(dataset)`"],
    ),
}
INTERNAL = ("Planned", "Sliceable", "FitPackStage")


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Orbax
def test_a_mistake_is_named(name):
    if "for Orbax" in name:
        pytest.importorskip("orbax.checkpoint")
    act, kind, parts = MISTAKES[name]
    with pytest.raises(kind) as caught:
        act()
    for part in parts:
        assert part in str(caught.value)
    assert not any(word in str(caught.value) for word in INTERNAL)
    paths = ("/missing/a.array_record",)
    assert all(str(caught.value).count(path) <= 1 for path in paths)


def test_what_only_looks_like_a_mistake_is_none():
    assert list(in_map().map(str)) == ["0", "1", "2"]
    assert [made.value for made in in_map().map(OneArgument)] == [0, 1, 2]
    assert list(grain.MapDataset.source("abc")) == ["a", "b", "c"]
    assert list(in_map().slice([True, np.int8(2)])) == [1, 2]
    assert list(in_map().slice(np.array([2, 0], np.uint8))) == [2, 0]
    assert list(in_map().slice(np.array([]))) == []
    assert list(experimental.FlatMapIterDataset(in_iter(), Twice())) == [0, 0, 1, 1, 2, 2]


def test_what_a_dataset_lacks_is_not_there():
    """Programs ask for it by `hasattr`, `bool` and `list`."""
    for ds in (in_iter(), in_iter().batch(2), in_iter().map(lambda x: x)):
        assert ds
        assert len(list(ds)) == len([*ds])
        for name in ("shuffle", "repeat", "take", "__len__", "__getitem__"):
            assert not hasattr(ds, name)
            assert not hasattr(type(ds), name)
            assert getattr(ds, name, None) is None
    assert not hasattr(in_map(), "take")
    assert np.asarray(in_iter()).shape == ()


def test_the_error_of_a_users_property_is_not_hidden():
    class Own(grain.IterDataset):
        @property
        def take(self):
            return self.nothing

        @property
        def size(self):
            raise AttributeError("not yet known")

        def __iter__(self):
            return iter(())

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = Own().take
    with pytest.raises(AttributeError, match="not yet known"):
        _ = Own().size


# --- damaged checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b'{"next_in', b"\x80\xff\x00\x01", b" \n", b"[1, 2"])
@pytest.mark.parametrize("make", [in_iter, lambda: grain.load(range(3))])
def test_a_damaged_state_is_named(content, make, tmp_path):
    Handler().save(tmp_path, iter(make()))
    (tmp_path / "process_0-of-1.json").write_bytes(content)
    with pytest.raises(ValueError, match="state") as caught:
        Handler().restore(tmp_path, iter(make()))
    assert type(caught.value) is ValueError
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("process_0-of-1.json" in text for text in told)


@pytest.mark.parametrize("content", ["", "{", '{"next_index": '])
def test_a_damaged_state_of_a_shard_is_named(content, tmp_path):
    shards = grain.sharding.NoSharding()
    ds = in_iter(20).filter(lambda x: x % 3)
    Handler().save(tmp_path, experimental.ElasticIterator(ds, 2, shards))
    record = next(tmp_path.glob("*.grainmill"))
    record.unlink()
    for name in ("process_0-of-1.json", "shard_state_0.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"process_0-of-1\.json: a saved state must be JSON"):
        Handler().restore(tmp_path, experimental.ElasticIterator(ds, 2, shards))
    assert json.loads((tmp_path / "shard_state_1.json").read_text())


# --- the origin of an error downstream of stages that compute several elements together ----------


def tokens(count=200):
    return grain.MapDataset.range(1, count).map(lambda x: {"t": np.full(x % 5 + 1, x)})


class Same(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


TOGETHER = {
    "pack": lambda ds: experimental.FirstFitPackIterDataset(
        ds, length_struct={"t": 8}, num_packing_bins=2
    ),
    "best fit": lambda ds: experimental.BestFitPackIterDataset(
        ds, length_struct={"t": 8}, num_packing_bins=3
    ),
    "split": lambda ds: experimental.ConcatThenSplitIterDataset(ds, length_struct={"t": 8}),
    "window": lambda ds: experimental.WindowShuffleIterDataset(ds, window_size=5, seed=1),
    "flat map": lambda ds: experimental.FlatMapIterDataset(ds, Same()),
    "rebatch": lambda ds: experimental.RebatchIterDataset(
        ds.map(lambda one: {"t": one["t"][:1]}).batch(3), 2
    ),
}


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("upstream", ["plain", "mixture", "filter"])
@pytest.mark.parametrize("name", TOGETHER)
def test_the_origin_of_an_error_is_where_its_elements_begin(name, upstream, batches):
    ds = tokens().to_iter_dataset()
    if upstream == "mixture":
        ds = grain.IterDataset.mix({"a": ds, "b": tokens().to_iter_dataset()})
    elif upstream == "filter":
        ds = ds.filter(lambda element: element["t"][0] % 2)
    failed = []

    def fails(element):
        numbers = element["t"][element["t"] > 0]
        if numbers.max() >= 20:
            failed.extend(numbers.ravel().tolist())
            raise LookupError("20")
        return element

    ds = TOGETHER[name](ds)
    if batches and name in {"pack", "best fit", "split"}:
        ds = ds.batch(2)
    with pytest.raises(LookupError) as caught:
        list(ds.map(fails))
    lines = "\n".join(caught.value.__notes__).splitlines()
    starts = [int(line.split()[2]) for line in lines if line.startswith("  from element ")]
    assert len(starts) == (2 if upstream == "mixture" else 1)
    # Element `i` has the number `i + 1`.
    assert min(starts) <= min(failed) - 1
    assert max(failed) - 1 <= max(starts) + 40


DAMAGED = {"cut": b'{"next_ind', "empty": b"", "binary": b"\xff\xfe\0", "deep": b"[" * 100_000}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_of_a_checkpoint_is_named(kind, tmp_path):
    Handler().save(tmp_path, iter(in_iter()))
    (tmp_path / "process_0-of-1.json").write_bytes(DAMAGED[kind])
    found = r"process_0-of-1\.json: a saved state must be JSON, found"
    with pytest.raises(ValueError, match=found):
        Handler().restore(tmp_path, iter(in_iter()))
