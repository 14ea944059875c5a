"""How projects that train with JAX use Grain, a test for each of their habits."""

import dataclasses
import functools
import importlib
import json
import os
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from pipelines import close, take, tokens
from under_test import INLINE, IS_GRAIN, NAME, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset


def two_workers(ds, **options):
    return ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2), **options)


# Grain's workers need parsed flags and seconds to start.
needs_workers = pytest.mark.better_than_grain("Grain's workers need the flags of an absl program")

# --- Keras ---------------------------------------------------------------------------------------


def _loader(source, *operations, num_epochs=1, **options):
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(
            len(source), shuffle=True, num_epochs=num_epochs, seed=1
        ),
        operations=operations,
        read_options=INLINE,
        **options,
    )


def _fit(dataset, epochs):
    """Reads as `fit` does: some batches for their signature, then every epoch from the start."""
    signature = [batch.shape[1:] for batch in take_raw(iter(dataset), 2)]
    assert len(set(signature)) == 1
    return [[batch.tolist() for batch in dataset] for _ in range(epochs)]


def take_raw(iterator, count):
    found = [next(iterator) for _ in range(count)]
    close(iterator)
    return found


@pytest.mark.parametrize("kind", ["map", "iter", "loader"])
def test_fit_reads_the_same_dataset_anew_in_every_epoch(kind):
    rows = MapDataset.source(np.arange(12).reshape(6, 2)).shuffle(3)
    dataset = {
        "map": lambda: rows.batch(2),
        "iter": lambda: rows.to_iter_dataset().batch(2),
        "loader": lambda: _loader(np.arange(12).reshape(6, 2), grain.transforms.Batch(2)),
    }[kind]()
    epochs = _fit(dataset, 3)
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(row for batch in epochs[0] for row in batch) == [
        [k, k + 1] for k in range(0, 12, 2)
    ]


@needs_workers
def test_fit_starts_workers_anew_in_every_epoch():
    def pids(_):
        return np.array([os.getpid()])

    dataset = two_workers(MapDataset.range(4).map(pids).to_iter_dataset())
    epochs = [[int(batch[0]) for batch in dataset] for _ in range(2)]
    assert all(len(set(epoch)) == 2 for epoch in epochs)
    assert os.getpid() not in {pid for epoch in epochs for pid in epoch}


# --- states --------------------------------------------------------------------------------------


def _training_pipeline():
    parts = [
        experimental.FirstFitPackIterDataset(
            MapDataset.range(k, k + 40).shuffle(k).repeat().map(tokens).to_iter_dataset(INLINE),
            length_struct={"tokens": 16},
            num_packing_bins=3,
        )
        for k in (0, 40)
    ]
    mixed = IterDataset.mix(dict(zip("ab", parts, strict=True)), {"a": 1, "b": 2})
    return experimental.ThreadPrefetchIterDataset(mixed.batch(2), prefetch_buffer_size=2)


def _map_leaves(function, state):
    if isinstance(state, dict):
        return {key: _map_leaves(function, value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, dict | list) for value in state):
        return [_map_leaves(function, value) for value in state]
    return function(state)


def test_leaves_of_a_state_are_gathered_as_arrays():
    """Simply: every leaf becomes an array, is gathered between hosts, and becomes a list again."""
    iterator = iter(_training_pipeline())
    take(iterator, 3)
    arrays = _map_leaves(np.asarray, iterator.get_state())

    def gathered(array):
        assert array.dtype.kind in "biuf"
        return np.stack([array, array])[1]

    state = _map_leaves(lambda array: array.tolist(), _map_leaves(gathered, arrays))
    expected = take(iterator, 4)
    close(iterator)
    restored = iter(_training_pipeline())
    restored.set_state(state)
    assert take(restored, 4) == expected
    close(restored)


def test_states_of_all_hosts_lie_in_one_file(tmp_path):
    """Orbax, MaxText: one JSON file with a state for each host, of datasets and of loaders."""

    def host(index):
        shard = MapDataset.range(40).shuffle(7).repeat(2)[index::4]
        return iter(shard.to_iter_dataset(INLINE).batch(2))

    def loader(index):
        sampler = grain.samplers.IndexSampler(
            40, grain.sharding.ShardOptions(index, 4), shuffle=True, num_epochs=1, seed=0
        )
        source = grain.sources.RangeDataSource(0, 40, 1)
        return iter(grain.DataLoader(data_source=source, sampler=sampler, read_options=INLINE))

    def text_of(iterator):
        state = iterator.get_state()
        return json.dumps(state) if isinstance(iterator, grain.DatasetIterator) else state.decode()

    for make in (host, loader):
        iterators = [make(index) for index in range(4)]
        for index, iterator in enumerate(iterators):
            take(iterator, index + 1)
        path = tmp_path / "all.json"
        path.write_text(json.dumps({index: text_of(it) for index, it in enumerate(iterators)}))
        saved = json.loads(path.read_text())
        for index, iterator in enumerate(iterators):
            again = make(index)
            text = saved[str(index)]
            again.set_state(
                json.loads(text) if isinstance(again, grain.DatasetIterator) else text.encode()
            )
            assert take(again, None) == take(iterator, None)


# --- MaxText -------------------------------------------------------------------------------------


def test_source_that_is_indexed_by_the_number_of_its_thread():
    """`HFDataSource`: each reading thread has its own stream."""
    num_threads = 3
    streams = [iter(range(1000 * k, 1000 * k + 900)) for k in range(num_threads)]
    used = set()

    class Streams:
        def __len__(self):
            return 200

        def __getitem__(self, index):
            number = int(threading.current_thread().name.split("_")[1])
            used.add(number)
            return next(streams[number])

    dataset = MapDataset.source(Streams())
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=12)
    found = take(iter(dataset.to_iter_dataset(options)), None)
    assert used <= set(range(num_threads))
    for number in used:
        mine = [x for x in found if x // 1000 == number]
        assert sorted(mine) == [1000 * number + k for k in range(len(mine))]


class Tokenizer:
    """A handle that is opened where it is used, with a lock that cannot be pickled."""

    def __init__(self, offset):
        self._offset = offset
        self._lock = threading.Lock()
        self._handle = None

    def __getstate__(self):
        return {**self.__dict__, "_lock": None, "_handle": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def map(self, element):
        with self._lock:
            if self._handle is None:
                self._handle = os.getpid(), self._offset
        return element + self._handle[1], self._handle[0]


class Tokenize(Tokenizer, grain.transforms.Map):
    """The handle as a transform."""


@needs_workers
def test_lazy_handle_is_opened_in_each_worker():
    tokenizer = Tokenize(100)
    tokenizer.map(0)
    dataset = MapDataset.range(6).to_iter_dataset().map(tokenizer)
    found = list(two_workers(dataset))
    assert [x for x, _ in found] == [100 + k for k in range(6)]
    assert len({pid for _, pid in found} - {os.getpid()}) == 2


def test_lazy_handle_of_a_pickled_pipeline():
    again = cloudpickle.loads(cloudpickle.dumps(MapDataset.range(3).map(Tokenize(5))))
    assert [x for x, _ in again] == [5, 6, 7]


@needs_workers
def test_worker_init_fn_knows_the_worker():
    calls = []

    def start(index, count):
        calls.append((index, count))

    def seen(element):
        return element, calls[0]

    dataset = MapDataset.range(4).to_iter_dataset().map(seen)
    found = list(two_workers(dataset, worker_init_fn=start))
    assert found == [(0, (0, 2)), (1, (1, 2)), (2, (0, 2)), (3, (1, 2))]
    assert calls == []


def test_components_of_a_mixture_keep_their_states_by_name():
    """Another number of components later: unknown names are ignored, new ones start afresh."""

    def parts(*names):
        return {
            name: MapDataset.range(10 * k, 10 * k + 9).to_iter_dataset(INLINE)
            for k, name in enumerate("abc")
            if name in names
        }

    iterator = iter(IterDataset.mix(parts("a", "b"), {"a": 1, "b": 1}))
    assert take(iterator, 4) == [0, 10, 1, 11]
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(IterDataset.mix(parts("b", "c"), {"b": 1, "c": 1}))
    again.set_state(state)
    assert take(again, 4) == [12, 20, 13, 21]


# --- TorchTitan ----------------------------------------------------------------------------------


def _crop(element, rng):
    length = len(element["tokens"])
    return {"tokens": element["tokens"][int(rng.integers(0, length)) :]}


def _collate(rows):
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}, len(rows)


def _torchtitan():
    def source(first, count):
        ds = MapDataset.range(first, first + count).map(tokens)
        ds = ds.filter(lambda x: len(x["tokens"]) > 2).random_map(_crop, seed=11)
        return ds.filter(lambda x: len(x["tokens"]) > 1).shuffle(seed=5)[1:20].repeat()

    mixed = MapDataset.mix([source(0, 30), source(100, 40)], [0.75, 0.25])
    packed = experimental.FirstFitPackIterDataset(
        mixed.to_iter_dataset(INLINE),
        length_struct={"tokens": 12},
        num_packing_bins=4,
        padding_struct={"tokens": -1},
        seed=3,
    )
    batched = packed.batch(3, drop_remainder=True, batch_fn=_collate)
    return experimental.ThreadPrefetchIterDataset(batched, prefetch_buffer_size=2)


def test_graph_of_torchtitan_resumes_at_every_batch():
    iterator = iter(_torchtitan())
    states, batches = [], []
    for _ in range(8):
        states.append(iterator.get_state())
        batches += take(iterator, 1)
    close(iterator)
    assert len({json.dumps(batch) for batch in batches}) == 8
    for k, state in enumerate(states):
        again = iter(_torchtitan())
        again.set_state(json.loads(json.dumps(state)))
        assert take(again, 2) == batches[k : k + 2] or k == 7
        close(again)


# --- Kauldron, AXLearn ---------------------------------------------------------------------------


class _Double(grain.transforms.Map):
    def map(self, element):
        return 2 * element


class _Odd(grain.transforms.Filter):
    def filter(self, element):
        return element % 2 == 1


class _Noise(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + int(rng.integers(1, 2))


def test_transforms_are_matched_by_class():
    legacy = importlib.import_module(f"{NAME}.python")

    def kind(transform):
        match transform:
            case legacy.MapTransform():
                return "map"
            case legacy.FilterTransform():
                return "filter"
            case legacy.RandomMapTransform():
                return "random"
            case legacy.Batch(batch_size=size):
                return f"batch {size}"
        return None

    found = [kind(one) for one in (_Double(), _Odd(), _Noise(), grain.transforms.Batch(4), 3)]
    assert found == ["map", "filter", "random", "batch 4", None]


def test_users_recognise_endless_datasets_by_their_length():
    class Unbatch(IterDataset):
        """Rows of batches, one by one; the parent is reached through its private name."""

        def __init__(self, parent):
            super().__init__(parent)

        def __iter__(self):
            return _Rows(self._parent.__iter__())

    class _Rows(grain.DatasetIterator):
        def __init__(self, parent):
            super().__init__(parent)
            self._rows = []
            self._before = parent.get_state()

        def __next__(self):
            if not self._rows:
                self._before = self._parent.get_state()
                self._rows = list(next(self._parent))
            return self._rows.pop(0)

        def get_state(self):
            return {"parent": self._before, "left": len(self._rows)}

        def set_state(self, state):
            self._parent.set_state(state["parent"])
            self._before = state["parent"]
            self._rows = list(next(self._parent))
            self._rows = self._rows[len(self._rows) - state["left"] :] if state["left"] else []

    dataset = MapDataset.range(6).seed(3).shuffle()
    assert len(dataset) == 6
    endless = dataset.repeat()
    assert len(endless) == sys.maxsize
    assert len(endless.map(lambda x: x)) == sys.maxsize
    rows = iter(Unbatch(endless.batch(4).to_iter_dataset(INLINE)).map(lambda x: -x))
    found = take(rows, 5)
    state = rows.get_state()
    rest = take(rows, 5)
    rows.set_state(state)
    assert take(rows, 5) == rest
    assert [int(-x["nd"][2][0]) for x in found] == [dataset[k] for k in range(5)]


# --- Simply --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lines:
    """A source whose reader is opened when it is first used, and is not pickled with it."""

    path: str

    @functools.cached_property
    def lines(self):
        return Path(self.path).read_text("utf-8").splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"line {k}" for k in range(9)))
    return Lines(str(path))


@needs_workers
def test_frozen_source_is_read_in_workers(lines):
    dataset = two_workers(MapDataset.source(lines).shuffle(2).to_iter_dataset().batch(2))
    found = [line for batch in dataset for line in batch.tolist()]
    assert sorted(found) == [f"line {k}" for k in range(9)]


def test_frozen_source_is_told_by_its_text_in_states_of_loaders(lines, tmp_path):
    iterator = iter(_loader(lines))
    take(iterator, 2)
    state = iterator.get_state()
    again = iter(_loader(Lines(lines.path)))
    again.set_state(state)
    assert take(again, None) == take(iterator, None)
    other = tmp_path / "other.txt"
    other.write_text("a\nb\nc\nd\ne\nf\ng\nh\ni")
    with pytest.raises(ValueError, match="DataSource in checkpoint"):
        iter(_loader(Lines(str(other)))).set_state(state)


# --- Flax, Orbax ---------------------------------------------------------------------------------


def test_gemma_pipeline_of_flax():
    class Rekey(grain.transforms.Map):
        def map(self, features):
            text = features.pop("tokens")
            return {
                "inputs": text,
                "inputs_position": features["tokens_positions"],
                "inputs_segmentation": features["tokens_segment_ids"],
                "targets": text.copy(),
                "targets_segmentation": features["tokens_segment_ids"].copy(),
            }

    def shift(batch):
        batch["targets"] = np.roll(batch["targets"], -1, axis=-1)
        batch["targets_segmentation"][..., -1] = 0
        return batch

    ds = MapDataset.range(60).filter(lambda x: x % 7 != 0).shuffle(seed=0).repeat(2).map(tokens)
    ds = experimental.FirstFitPackIterDataset(
        ds.to_iter_dataset(INLINE), length_struct={"tokens": 16}, num_packing_bins=30
    )
    batches = list(ds.map(Rekey()).batch(4, drop_remainder=True).map(shift))
    assert len(batches) > 5
    for batch in batches:
        assert all(array.shape == (4, 16) for array in batch.values())
        assert (batch["targets_segmentation"][:, -1] == 0).all()
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
        assert (batch["inputs"][batch["inputs_segmentation"] == 0] == 0).all()


@pytest.mark.parametrize("kind", ["FirstFit", "BestFit", "ConcatThenSplit"])
def test_functions_of_packed_rows_are_applied_before_they_are_batched(kind):
    """MaxText's and Flax' `Rekey`; rows that nothing touches are copied column by column."""
    bins = {} if kind == "ConcatThenSplit" else {"num_packing_bins": 4}
    stage = getattr(experimental, f"{kind}PackIterDataset", None) or getattr(
        experimental, f"{kind}IterDataset"
    )
    packed = stage(_tokens_of(30), length_struct={"tokens": 12}, **bins)
    renamed = packed.map(lambda row: {"inputs": row["tokens"] + 1})
    rows = list(renamed)
    for ds in (renamed, renamed.map(lambda row: row), renamed.filter(lambda _: True)):
        batches = list(ds.batch(3))
        assert [list(batch) for batch in batches] == [["inputs"]] * -(-len(rows) // 3)
        found = np.concatenate([batch["inputs"] for batch in batches])
        np.testing.assert_array_equal(found, np.stack([row["inputs"] for row in rows]))


def _tokens_of(n):
    return MapDataset.range(n).map(tokens).to_iter_dataset(INLINE)


def test_loader_over_a_dataset_as_orbax_builds_it():
    """Positional sampler options; a batch of one number compares with a list."""
    loader = grain.DataLoader(
        data_source=MapDataset.range(10),
        sampler=grain.samplers.SequentialSampler(10, grain.sharding.ShardOptions(0, 1)),
        operations=[grain.transforms.Batch(1)],
        read_options=INLINE,
    )
    iterator = iter(loader)
    for k in range(3):
        assert next(iterator) == [k]
    state = iterator.get_state()
    assert next(iterator) == [3]
    iterator.set_state(state)
    assert next(iterator) == [3]


def test_sampler_with_only_what_is_needed():
    """swirl-lm, nanodo: `__getitem__` and `__repr__`, no generators and no options."""

    class Odd:
        def __getitem__(self, index):
            return grain.RecordMetadata(index=index, record_key=2 * index + 1)

        def __len__(self):
            return 3

        def __repr__(self):
            return "Odd()"

    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 10, 1),
        sampler=Odd(),
        shard_options=grain.sharding.NoSharding(),
        operations=[_Double()],
        read_options=INLINE,
    )
    iterator = iter(loader)
    assert next(iterator) == 2
    state = iterator.get_state()
    assert json.loads(state)["sampler"] == "Odd()"
    rest = list(iterator)
    iterator.set_state(state)
    assert list(iterator) == rest == [6, 10]


def test_elements_are_fresh_for_whoever_changes_them():
    """Maps change and empty elements in place; the next epoch finds them whole."""

    def consume(element):
        element["seen"] = [element.pop("value")]
        element["array"] *= 0
        return element

    dataset = MapDataset.range(4).map(lambda x: {"value": x, "array": np.full(3, x)}).map(consume)
    for _ in range(2):
        assert [x["seen"] for x in dataset.to_iter_dataset()] == [[k] for k in range(4)]
    first = dataset[2]
    first["seen"].append("mine")
    assert dataset[2]["seen"] == [2]
    assert IS_GRAIN or dataset[2] is not dataset[2]
