"""Behaviour that real programs rely on: names, keywords, threads, own datasets, batches."""

import collections.abc
import copy
import importlib
import json
import pickle
import sys
import threading

import cloudpickle
import numpy as np
import pytest
from pipelines import add_one, close, take, tokens, user_datasets
from under_test import INLINE, IS_GRAIN, NAME, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset

# --- names ---------------------------------------------------------------------------------------

# Orbax, elastic iteration and statistics are not there yet.
NAMES = {
    "": "DataLoader DataLoaderIterator DatasetIterator IterDataset MapDataset load Record "
    "RecordMetadata ReadOptions MultiprocessingOptions config experimental constants "
    "multiprocessing samplers sharding sources transforms __version__ __version_info__",
    "experimental": "FlatMapTransform DatasetOptions apply_transformations WithOptionsIterDataset "
    "batch_and_pad CacheIterDataset FlatMapMapDataset FlatMapIterDataset InterleaveIterDataset "
    "LimitIterDataset RngPool FirstFitPackIterDataset BestFitPackIterDataset BOSHandling "
    "ConcatThenSplitIterDataset ThreadPrefetchIterDataset ThreadPrefetchDatasetIterator "
    "RebatchIterDataset RepeatIterDataset WindowShuffleMapDataset WindowShuffleIterDataset "
    "ZipMapDataset ZipIterDataset index_shuffle assert_equal_output_after_checkpoint device_put "
    "get_element_spec set_next_index get_next_index ShapeDtypeStruct MapWithIndexTransform "
    "multithread_prefetch PackAndBatchOperation",
    "multiprocessing": "MultiprocessingOptions SharedMemoryArray SharedMemoryArrayMetadata",
    "samplers": "Sampler SequentialSampler IndexSampler",
    "sharding": "ShardOptions NoSharding ShardByJaxProcess",
    "constants": "INDEX RECORD_KEY DATASET_INDEX EPOCH SEED RECORD META_FEATURES",
    "sources": "ArrayRecordDataSource SharedMemoryDataSource RangeDataSource "
    "RandomAccessDataSource",
    "transforms": "Batch Filter Map MapWithIndex RandomMap TfRandomMap Transformation "
    "Transformations DatasetSelectionMap",
    "python": "FilterTransform MapTransform MapWithIndexTransform RandomMapTransform Batch "
    "ArrayRecordDataSource InMemoryDataSource RangeDataSource RandomAccessDataSource MapDataset "
    "IterDataset DatasetIterator ReadOptions MultiprocessingOptions config experimental INDEX "
    "RECORD_KEY DataLoader PyGrainDatasetIterator SharedMemoryArray load BatchOperation "
    "FilterOperation MapOperation Operation RandomMapOperation Record RecordMetadata IndexSampler "
    "Sampler SequentialSampler ShardOptions NoSharding ShardByJaxProcess",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there(module):
    found = importlib.import_module(f"{NAME}.{module}" if module else NAME)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("MapTransform", "Map"),
        ("FilterTransform", "Filter"),
        ("RandomMapTransform", "RandomMap"),
        ("MapWithIndexTransform", "MapWithIndex"),
        ("Batch", "Batch"),
    ],
)
def test_old_names_are_the_same_classes(old, new):
    legacy = importlib.import_module(f"{NAME}.python")
    assert getattr(legacy, old) is getattr(grain.transforms, new)


def test_constants_have_grains_values():
    c = grain.constants
    values = [c.INDEX, c.RECORD_KEY, c.DATASET_INDEX, c.EPOCH, c.SEED, c.RECORD]
    assert values == ["_index", "_record_key", "_dataset_index", "_epoch", "_seed", "_record"]
    assert frozenset(values) == c.META_FEATURES


@pytest.mark.parametrize("name", ["MapDataset", "IterDataset"])
def test_keras_recognises_datasets_by_name(name):
    """Keras looks for these names in the MRO, and for `grain` in the module's name."""
    dataset = MapDataset.range(3) if name == "MapDataset" else MapDataset.range(3).to_iter_dataset()
    assert any(
        c.__name__ == name and "grain" in c.__module__.split(".")[0] for c in type(dataset).__mro__
    )


def test_packages_that_ask_for_lengths_take_sequential_datasets_for_iterables():
    """Some test the class, others the attribute, others call `len` and expect a `TypeError`."""
    import pandas as pd  # noqa: PLC0415 - both take long, and no other test here needs them
    import polars as pl  # noqa: PLC0415

    ds = MapDataset.range(3).map(lambda x: {"x": x}).to_iter_dataset()
    for one in (ds, iter(ds)):
        assert not isinstance(one, collections.abc.Sized)
        assert not hasattr(one, "__len__")
        with pytest.raises(TypeError, match="has no len"):
            len(one)
        assert bool(one)
    assert pl.DataFrame(ds).to_dicts() == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert pd.Series(ds).tolist() == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert isinstance(MapDataset.range(3), collections.abc.Sized)


def test_version_is_a_string_and_a_tuple():
    assert isinstance(grain.__version__, str)
    assert isinstance(grain.__version_info__, tuple)


# --- keyword arguments ---------------------------------------------------------------------------


def _int_iter(n=8):
    return MapDataset.range(start=0, stop=n).to_iter_dataset()


def _token_iter():
    return MapDataset.range(8).map(tokens).to_iter_dataset()


KEYWORDS = {
    "batch": lambda: MapDataset.range(8).batch(batch_size=2, drop_remainder=True, batch_fn=None),
    "iter_batch": lambda: _int_iter().batch(batch_size=2, drop_remainder=True, batch_fn=None),
    "shuffle": lambda: MapDataset.range(8).shuffle(seed=1),
    "repeat": lambda: MapDataset.range(8).repeat(num_epochs=2, reseed_each_epoch=False),
    "random_map": lambda: MapDataset.range(8).random_map(lambda x, _: x, seed=1),
    "slice": lambda: MapDataset.range(8).slice(slice(1, 5)),
    "getitem": lambda: MapDataset.range(8)[1::2],
    "seed": lambda: MapDataset.range(8).seed(seed=3).shuffle(),
    "map": lambda: MapDataset.range(8).map(transform=add_one),
    "filter": lambda: MapDataset.range(8).filter(transform=lambda x: x > 2),
    "to_iter": lambda: MapDataset.range(8).to_iter_dataset(
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2), allow_nones=False
    ),
    "mix": lambda: MapDataset.mix(
        datasets=[MapDataset.range(3), MapDataset.range(4)], weights=[1, 2]
    ),
    "iter_mix": lambda: IterDataset.mix(datasets=[_int_iter(), _int_iter()], weights=[1, 2]),
    "iter_mix_named": lambda: IterDataset.mix({"a": _int_iter()}, weights={"a": 1}),
    "select": lambda: MapDataset.select_from_datasets(
        datasets=[MapDataset.range(3), MapDataset.range(4)], selection_map=[(0, 0), (1, 3)]
    ),
    "concatenate": lambda: MapDataset.concatenate(datasets=[MapDataset.range(3)]),
    "first_fit": lambda: experimental.FirstFitPackIterDataset(
        parent=_token_iter(),
        length_struct={"tokens": 12},
        num_packing_bins=2,
        seed=1,
        shuffle_bins=True,
        meta_features=(),
        padding_struct=None,
        max_sequences_per_bin=None,
    ),
    "best_fit": lambda: experimental.BestFitPackIterDataset(
        _token_iter(), length_struct={"tokens": 12}, num_packing_bins=2
    ),
    "concat_split": lambda: experimental.ConcatThenSplitIterDataset(
        parent=_token_iter(),
        length_struct={"tokens": 12},
        bos_handling=experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
        bos_features=["tokens"],
        bos_token_id=1,
    ),
    "interleave": lambda: experimental.InterleaveIterDataset(
        [_int_iter(3), _int_iter(2)],
        cycle_length=2,
        num_make_iter_threads=1,
        make_iter_buffer_size=1,
        iter_buffer_size=1,
    ),
    "window_shuffle": lambda: experimental.WindowShuffleIterDataset(
        _int_iter(), window_size=3, seed=1
    ),
    "thread_prefetch": lambda: experimental.ThreadPrefetchIterDataset(
        _int_iter(), prefetch_buffer_size=2
    ),
    "repeat_iter": lambda: experimental.RepeatIterDataset(_int_iter(), num_epochs=2),
    "limit": lambda: experimental.LimitIterDataset(_int_iter(), count=2),
    "rebatch": lambda: experimental.RebatchIterDataset(
        _int_iter().batch(3), batch_size=2, drop_remainder=True
    ),
    "zip": lambda: experimental.ZipIterDataset([_int_iter(), _int_iter()], strict=True),
    "index_shuffle": lambda: [experimental.index_shuffle(index=1, max_index=9, seed=3, rounds=4)],
    "multiprocessing_options": lambda: _int_iter().mp_prefetch(
        options=grain.MultiprocessingOptions(
            num_workers=2, per_worker_buffer_size=1, enable_profiling=False
        ),
        worker_init_fn=None,
        sequential_slice=False,
    ),
    "multithread_prefetch": lambda: experimental.multithread_prefetch(
        _int_iter(), num_threads=2, buffer_size=1, sequential_slice=False
    ),
    "pipe": lambda: MapDataset.range(8).pipe(lambda ds, a, b: ds[a:b], 1, b=4),
    "apply": lambda: MapDataset.range(8).apply(
        [grain.transforms.Batch(batch_size=2, drop_remainder=True)]
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_in_use_are_accepted(name):
    assert len(list(KEYWORDS[name]())) > 0


def test_batch_and_pad_as_a_partial():
    padded = experimental.batch_and_pad([np.int64(1), np.int64(2)], batch_size=3, pad_value=-1)
    assert padded.tolist() == [1, 2, -1]


# --- threads -------------------------------------------------------------------------------------


def _thread_names(options, n=64):
    names = set()

    def note(x):
        names.add(threading.current_thread().name)
        return x

    iterator = iter(MapDataset.range(n).map(note).to_iter_dataset(options))
    assert take(iterator, None) == list(range(n))
    iterator.close()
    return names


@pytest.mark.parametrize("num_threads", [1, 4, 16])
def test_maps_run_on_threads_named_by_number(num_threads):
    """MaxText indexes its list of `num_threads` streams with the number in the name."""
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=32)
    for name in _thread_names(options):
        prefix, number = name.split("_")
        assert prefix == "grain-prefetch"
        assert 0 <= int(number) < num_threads


def test_inline_reading_runs_on_the_callers_thread():
    assert _thread_names(INLINE) == {threading.current_thread().name}


def test_order_and_elements_do_not_depend_on_threads():
    dataset = MapDataset.range(200).shuffle(3).map(tokens).filter(lambda x: x["tokens"][0] % 3)
    expected = take(iter(dataset.to_iter_dataset(INLINE)), None)
    for threads, size in [(1, 1), (1, 500), (3, 2), (16, 500), (16, 1)]:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=size)
        assert take(iter(dataset.to_iter_dataset(options)), None) == expected


def test_one_function_call_at_a_time_on_one_element():
    """A function sees each element of a pass exactly once."""
    seen = []
    dataset = MapDataset.range(300).map(lambda x: seen.append(x) or x)
    list(dataset.to_iter_dataset())
    assert sorted(seen) == list(range(300))


def test_read_ahead_is_bounded():
    seen = []
    dataset = MapDataset.range(1000).map(lambda x: seen.append(x) or x)
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=10)
    iterator = iter(dataset.to_iter_dataset(options))
    for k in range(50):
        next(iterator)
        # The delivered element, the prefetched ones, and one in progress in each thread.
        assert len(seen) <= k + 1 + 10 + 4
    iterator.close()


# --- users' own datasets -------------------------------------------------------------------------


def test_user_map_dataset_in_the_middle():
    shift = user_datasets(grain)["ShiftMap"]
    dataset = shift(MapDataset.range(5).shuffle(1).map(add_one)).map(add_one).repeat(2)
    inner = MapDataset.range(5).shuffle(1)
    assert [dataset[i] for i in range(10)] == [inner[i] + 1002 for i in range(10)]
    assert list(dataset) == [inner[i] + 1002 for i in range(10)]
    assert len(dataset) == 10


def test_user_map_dataset_is_sliced_shuffled_and_batched():
    shift = user_datasets(grain)["ShiftMap"]
    dataset = shift(MapDataset.range(10))
    assert list(dataset[2:8:2]) == [1002, 1004, 1006]
    assert sorted(dataset.shuffle(seed=1)) == list(range(1000, 1010))
    assert [b.tolist() for b in dataset.batch(4)] == [
        [1000, 1001, 1002, 1003],
        [1004, 1005, 1006, 1007],
        [1008, 1009],
    ]


def test_user_map_dataset_that_never_calls_super():
    class Bare(MapDataset):
        def __init__(self):
            pass

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index * 10

    assert list(Bare().map(add_one)) == [1, 11, 21, 31]
    assert list(Bare()) == [0, 10, 20, 30]


def test_user_dataset_sees_its_parents():
    class Pairs(MapDataset):
        def __init__(self, first, second):
            super().__init__([first, second])

        def __len__(self):
            return len(self.parents[0])

        def __getitem__(self, index):
            return tuple(parent[index] for parent in self.parents)

    first, second = MapDataset.range(3), MapDataset.range(10, 13).map(add_one)
    dataset = Pairs(first, second)
    assert dataset.parents == (first, second) or list(dataset.parents) == [first, second]
    assert list(dataset) == [(0, 11), (1, 12), (2, 13)]


def test_parent_of_a_builtin_stage_is_a_dataset():
    source = MapDataset.range(3)
    mapped = source.map(add_one)
    assert isinstance(mapped.parents, tuple)
    assert len(mapped.parents) == 1
    assert [mapped.parents[0][i] for i in range(3)] == [0, 1, 2]
    assert [mapped._parent[i] for i in range(3)] == [0, 1, 2]
    batched = mapped.to_iter_dataset().batch(2)
    assert isinstance(batched._parent, IterDataset)
    assert list(batched._parent) == [1, 2, 3]


def test_user_iter_dataset_in_the_middle():
    twice = user_datasets(grain)["Twice"]
    dataset = twice(MapDataset.range(3).to_iter_dataset().map(add_one)).batch(2)
    assert [b.tolist() for b in dataset] == [[1, 1], [2, 2], [3, 3]]


def test_user_iter_dataset_that_subclasses_the_iterator_only():
    """TorchTitan style: no parent, a state with whatever is needed."""
    squares = user_datasets(grain)["Squares"]
    iterator = iter(squares(5).filter(lambda x: x != 4).map_with_index(lambda i, x: (i, x)))
    assert take(iterator, 2) == [{"tuple": [0, 0]}, {"tuple": [1, 1]}]
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"parent": {"at": 2}, "counter": 2}
    rest = take(iterator, None)
    iterator.set_state(state)
    assert take(iterator, None) == rest == [{"tuple": [2, 9]}, {"tuple": [3, 16]}]


def test_user_iterator_wraps_any_builtin_iterator():
    class Doubling(grain.DatasetIterator):
        def __init__(self, parent):
            super().__init__(parent)

        def __next__(self):
            return next(self._parent) * 2

        def get_state(self):
            return self._parent.get_state()

        def set_state(self, state):
            self._parent.set_state(state)

    class Doubled(IterDataset):
        def __iter__(self):
            return Doubling(self._parent.__iter__())

    dataset = Doubled(Doubled(MapDataset.range(4).to_iter_dataset()))
    assert list(dataset) == [0, 4, 8, 12]
    iterator = iter(dataset)
    next(iterator)
    assert iterator.get_state() == {"next_index": 1}
    iterator.close()


def test_user_iterator_is_closed_with_its_children():
    closed = []

    class Noting(grain.DatasetIterator):
        def __init__(self):
            super().__init__()

        def __next__(self):
            return 1

        def get_state(self):
            return {}

        def set_state(self, state):
            del state

        def close(self):
            closed.append(True)
            super().close()

    class Notes(IterDataset):
        def __init__(self):
            super().__init__()

        def __iter__(self):
            return Noting()

    iterator = iter(Notes().map(add_one).batch(2))
    assert next(iterator).tolist() == [2, 2]
    iterator.close()
    assert closed


@pytest.mark.better_than_grain("Grain takes iterators with a context of its own only")
def test_plain_generator_as_iterator_of_a_user_dataset():
    class Counting(IterDataset):
        def __init__(self):
            super().__init__()

        def __iter__(self):
            return iter(range(5))

    try:
        found = list(Counting().map(add_one))
    except TypeError as error:
        pytest.fail(str(error))
    assert found == [1, 2, 3, 4, 5]


def test_re_iteration_starts_afresh():
    dataset = MapDataset.range(6).shuffle(1).to_iter_dataset().batch(2)
    first, second = iter(dataset), iter(dataset)
    whole = take(iter(dataset), None)
    assert take(first, 2) == whole[:2]
    assert take(second, None) == whole
    assert take(first, None) == whole[2:]
    assert take(iter(dataset), None) == whole


def test_infinite_length_is_maxsize():
    assert len(MapDataset.range(3).repeat()) == sys.maxsize


def test_transform_class_defined_in_a_function():
    class Halve(grain.transforms.Map):
        def map(self, element):
            return element // 2

    assert list(MapDataset.range(4).map(Halve())) == [0, 0, 1, 1]


# --- elements and batches ------------------------------------------------------------------------


def test_elements_may_be_mutated_in_place():
    def grow(x):
        x["seen"] = x.pop("a") + 1
        x["v"] += 1
        return x

    def fresh(i):
        return {"a": i, "v": np.zeros(2)}

    dataset = MapDataset.range(3).map(fresh).map(grow)
    for _ in range(2):
        found = list(dataset)
        assert [x["seen"] for x in found] == [1, 2, 3]
        assert all((x["v"] == 1).all() for x in found)


def test_batches_are_writable_and_do_not_change_later():
    dataset = MapDataset.range(64).map(lambda x: {"v": np.full(1000, x)}).batch(4)
    for pipeline in (
        dataset.to_iter_dataset(),
        MapDataset.range(64).map(lambda x: {"v": np.full(1000, x)}).to_iter_dataset().batch(4),
    ):
        iterator = iter(pipeline)
        kept = [next(iterator) for _ in range(3)]
        for batch in kept:
            assert batch["v"].flags.writeable
            assert batch["v"].flags.c_contiguous
            batch["v"][..., -1] = -7
        copies = [batch["v"].copy() for batch in kept]
        rest = list(iterator)
        iterator.close()
        del iterator
        for batch, copied in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(batch["v"], copied)
        assert len(rest) == 13
        assert not any((batch["v"] == -7).any() for batch in rest)


def test_batches_outlive_everything_even_through_views():
    views = []
    for k in range(20):
        batch = next(
            iter(MapDataset.range(10, 10 + 64).map(lambda x, k=k: np.full(4096, x + k)).batch(64))
        )
        views.append((k, batch[3:5, 7]))
        del batch
    for k, view in views:
        assert view.tolist() == [13 + k, 14 + k]


def test_packed_batches_are_writable():
    dataset = experimental.FirstFitPackIterDataset(
        _token_iter(), length_struct={"tokens": 12}, num_packing_bins=2
    )
    for batch in dataset.batch(2):
        batch["tokens_segment_ids"][..., -1] = 0
        batch["tokens"] += 1


def test_states_are_numbers_and_flat_lists():
    """Simply gathers every leaf of a state between hosts as an array of numbers."""
    dataset = experimental.FirstFitPackIterDataset(
        _token_iter(), length_struct={"tokens": 12}, num_packing_bins=2
    ).batch(2)
    mixed = IterDataset.mix([dataset, dataset]).map_with_index(lambda i, x: (i, x))
    iterator = iter(mixed)
    next(iterator)

    def leaves(state):
        if isinstance(state, dict):
            return [leaf for value in state.values() for leaf in leaves(value)]
        if isinstance(state, list) and any(isinstance(v, dict) for v in state):
            return [leaf for value in state for leaf in leaves(value)]
        return [state]

    for leaf in leaves(iterator.get_state()):
        assert np.asarray(leaf).dtype.kind in "biuf", leaf
    state = json.loads(json.dumps(iterator.get_state()))
    rest = take(iterator, None)
    iterator.set_state(state)
    assert take(iterator, None) == rest


def test_pipelines_can_be_pickled():
    offset = 3
    dataset = MapDataset.range(10).shuffle(1).map(lambda x: x + offset).batch(3)
    again = cloudpickle.loads(cloudpickle.dumps(dataset))
    assert [b.tolist() for b in again] == [b.tolist() for b in dataset]
    pipeline = MapDataset.range(10).shuffle(1).map(add_one).to_iter_dataset().batch(3)
    assert take(iter(pickle.loads(pickle.dumps(pipeline))), None) == take(iter(pipeline), None)


def test_dict_batches_order_keys_as_grain_does():
    batch = MapDataset.source([{"b": 1, "a": 2}] * 2).batch(2)[0]
    assert sorted(batch) == ["a", "b"]
    assert list(batch) in (["a", "b"], ["b", "a"])


# --- read ahead and next index -------------------------------------------------------------------


def test_start_prefetch_is_idempotent_and_refused_after_close():
    dataset = experimental.ThreadPrefetchIterDataset(_int_iter(), prefetch_buffer_size=2)
    iterator = iter(dataset)
    iterator.start_prefetch()
    iterator.start_prefetch()
    assert take(iterator, 3) == [0, 1, 2]
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        iterator.start_prefetch()


def test_thread_prefetch_iterator_wraps_anything_with_a_state():
    class Counter:
        def __init__(self):
            self.at = 0

        def __next__(self):
            self.at += 1
            if self.at > 5:
                raise StopIteration
            return self.at

        def get_state(self):
            return {"at": self.at}

        def set_state(self, state):
            self.at = state["at"]

    iterator = experimental.ThreadPrefetchDatasetIterator(Counter(), 2)
    assert take(iterator, 2) == [1, 2]
    assert iterator.get_state() == {"at": 2}
    state = iterator.get_state()
    assert take(iterator, None) == [3, 4, 5]
    iterator.set_state(state)
    assert take(iterator, None) == [3, 4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_next_index_is_that_of_the_next_element():
    iterator = iter(MapDataset.range(20).to_iter_dataset().map(add_one).batch(3))
    next(iterator)
    assert experimental.get_next_index(iterator) == 1
    experimental.set_next_index(iterator, 4)
    assert next(iterator).tolist() == [13, 14, 15]


def test_next_index_is_known_behind_a_prefetching_iterator():
    inner = iter(MapDataset.range(20).to_iter_dataset().map(add_one))
    iterator = experimental.ThreadPrefetchDatasetIterator(inner, 3)
    assert take(iterator, 2) == [1, 2]
    assert experimental.get_next_index(ds_iter=iterator) == 2
    experimental.set_next_index(ds_iter=iterator, index=7)
    assert take(iterator, 2) == [8, 9]
    assert experimental.get_next_index(iterator) == 9
    close(iterator)


def test_zip_of_nothing_and_states_of_other_zips_are_refused():
    with pytest.raises(ValueError, match="At least one parent must be provided"):
        experimental.ZipIterDataset([])
    part = MapDataset.range(3).to_iter_dataset()
    state = iter(experimental.ZipIterDataset([part] * 3)).get_state()
    iterator = iter(experimental.ZipIterDataset([part] * 2))
    with pytest.raises((ValueError, IndexError)):
        iterator.set_state(state)
    assert next(iterator) == (0, 0)


@pytest.mark.better_than_grain("Grain names what is inside, or copies what is shared")
def test_iterators_are_not_copied():
    iterator = iter(MapDataset.range(3).to_iter_dataset())
    for copying in (pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="use its dataset and `get_state"):
            copying(iterator)


def test_function_in_a_pipe_may_have_a_keyword_func():
    for ds in (MapDataset.range(3), MapDataset.range(3).to_iter_dataset()):
        assert ds.pipe(lambda piped, *, func: (list(piped), func), func=5) == ([0, 1, 2], 5)


@pytest.mark.better_than_grain("the error is one of a missing attribute")
def test_options_of_reading_are_none_of_workers():
    with pytest.raises(TypeError, match="must be a `MultiprocessingOptions`, got ReadOptions"):
        MapDataset.range(3).to_iter_dataset().mp_prefetch(grain.ReadOptions())


def test_element_spec_follows_the_plan():
    spec = experimental.get_element_spec(MapDataset.range(7).batch(3, drop_remainder=True))
    assert (tuple(spec.shape), np.dtype(spec.dtype)) == ((3,), np.dtype(np.int64))
    open_ended = experimental.get_element_spec(MapDataset.range(7).to_iter_dataset().batch(3))
    assert tuple(open_ended.shape) == (None,)
    batches = MapDataset.range(7).to_iter_dataset().batch(3)
    regrouped = experimental.RebatchIterDataset(batches, 2, drop_remainder=True)
    spec = experimental.get_element_spec(ds=regrouped)
    assert (tuple(spec.shape), np.dtype(spec.dtype)) == ((2,), np.dtype(np.int64))


def test_options_merge_by_what_was_set():
    options = experimental.DatasetOptions
    assert options() != options(filter_warn_threshold_ratio=0.9)
    mine = options(filter_warn_threshold_ratio=0.5)
    merged = mine.merge(options(filter_warn_threshold_ratio=0.7, min_shm_size=9))
    assert merged.filter_warn_threshold_ratio == 0.5
    assert merged.min_shm_size == 9
    assert mine.merge(None) is mine


def test_read_options_are_positional_and_equal_by_value():
    assert grain.ReadOptions(3, 4) == grain.ReadOptions(num_threads=3, prefetch_buffer_size=4)
    assert repr(grain.ReadOptions()) == "ReadOptions(num_threads=16, prefetch_buffer_size=500)"
    with pytest.raises(AttributeError):
        grain.ReadOptions().no_such_field = 1


def test_range_takes_what_range_takes():
    assert list(MapDataset.range(3)) == [0, 1, 2]
    assert list(MapDataset.range(2, 8, 3)) == [2, 5]
    assert MapDataset.range(10)[-1] == 9
    assert type(MapDataset.range(10)[3]) is int


def test_range_data_source_checks_bounds_and_says_what_it_is():
    source = grain.sources.RangeDataSource(0, 7, 2)
    assert len(source) == 4
    assert source[3] == 6
    assert repr(source) == "RangeDataSource(start=0, stop=7, step=2)"
    with pytest.raises(IndexError):
        source[4]
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert list(MapDataset.source(source)) == [0, 2, 4, 6]


def test_shared_memory_source_holds_elements():
    source = grain.sources.SharedMemoryDataSource([1, "two", b"3", 4.5])
    try:
        assert len(source) == 4
        assert [source[i] for i in range(4)] == [1, "two", b"3", 4.5]
        assert next(iter(MapDataset.source(source).map(str))) == "1"
    finally:
        source.close()
        source.unlink()
    if not IS_GRAIN:
        with pytest.raises(ValueError):  # noqa: PT011
            grain.sources.SharedMemoryDataSource()
