"""Checkpoint files: their names and contents, whole or absent, and only for the same pipeline."""

import asyncio
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from passing import Passing
from pipelines import take
from under_test import experimental, grain
from worker_harness import environment, run_script

from grainmill._checkpoint import files, pipeline, states

pytestmark = pytest.mark.better_than_grain("the tests use files and modules of grainmill")

Handler = grain.checkpoint.CheckpointHandler
RECORD = "pipeline_0-of-1.grainmill"


def numbers(length=8, seed=1, batch=2):
    return grain.MapDataset.range(length).shuffle(seed=seed).batch(batch).to_iter_dataset()


def after(dataset, count):
    iterator = iter(dataset)
    take(iterator, count)
    return iterator


def be_process(monkeypatch, index, count):
    """Makes this process the one with this index, as if there were others."""
    monkeypatch.setattr(files, "process_index_and_count", lambda: (index, count))


# --- the handler alone --------------------------------------------------------------------------


def test_file_has_the_name_and_text_of_grains(tmp_path, monkeypatch):
    be_process(monkeypatch, 1, 3)
    iterator = after(grain.MapDataset.range(8).batch(2).to_iter_dataset(), 1)
    Handler().save(tmp_path, iterator)
    assert (tmp_path / "process_1-of-3.json").read_text() == '{\n    "next_index": 1\n}'
    assert {path.name for path in tmp_path.iterdir()} == {
        "process_1-of-3.json",
        "pipeline_1-of-3.grainmill",
    }
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_processes_are_those_of_jax(monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 5)
    assert files.process_index_and_count() == (2, 5)
    monkeypatch.delitem(sys.modules, "jax")
    assert files.process_index_and_count() == (0, 1)


def test_restore_continues_and_returns_the_iterator(tmp_path):
    iterator = after(numbers(), 2)
    Handler().save(tmp_path, item=iterator)
    rest = take(iterator, None)
    restored = iter(numbers())
    assert Handler().restore(tmp_path, item=restored) is restored
    assert take(restored, None) == rest

    class Args:
        item = iter(numbers())

    assert Handler().restore(tmp_path, args=Args) is Args.item
    Handler().save(tmp_path, args=Args)
    assert take(Args.item, None) == rest
    assert take(Handler().restore(tmp_path, args=Args), None) == rest


def test_a_loader_is_saved_as_its_bytes(tmp_path):
    loader = grain.load(range(7), num_epochs=1, shuffle=True, seed=0, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    Handler().save(tmp_path, iterator)
    assert (tmp_path / "process_0-of-1.json").read_bytes() == iterator.get_state()
    rest = take(iterator, None)
    assert take(Handler().restore(tmp_path, iter(loader)), None) == rest


def test_restore_starts_to_prefetch(tmp_path):
    started = []
    ds = grain.MapDataset.range(9).map(lambda x: started.append(x) or x).to_iter_dataset()
    Handler().save(tmp_path, iter(ds))
    iterator = Handler().restore(tmp_path, iter(ds))
    deadline = time.monotonic() + 20
    while not started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started
    iterator.close()


def test_misuse_is_refused_as_by_grain(tmp_path):
    iterator = iter(numbers())
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'item'"):
        Handler().save(tmp_path)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'item'"):
        Handler().restore(tmp_path)
    with pytest.raises(AttributeError, match=r"has no attribute 'get_state'.*`iter\(dataset\)`"):
        Handler().save(tmp_path, numbers())
    for method in (Handler().save, Handler().restore):
        with pytest.raises(TypeError, match=r"pass `pathlib.Path\("):
            method(str(tmp_path), iterator)
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=r"missing/pipeline_0-of-1.grainmill"):
        Handler().save(missing, iterator)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"File .*/process_0-of-1.json does not exist\."):
        Handler().restore(tmp_path, iterator)


def test_other_methods_do_nothing():
    handler = Handler()
    for method in (handler.structure, handler.metadata, handler.finalize):
        assert method(pathlib.Path("nowhere")) is None
    assert handler.close() is None


# --- complete or absent -------------------------------------------------------------------------


class BigIterator(grain.DatasetIterator):
    """Has a state of a megabyte, all of which is one number."""

    def __init__(self):
        super().__init__()
        self._at = 0

    def __next__(self):
        self._at += 1
        return self._at

    def get_state(self):
        return {"all": [self._at] * 100_000}

    def set_state(self, state):
        assert len(state["all"]) == 100_000
        (self._at,) = set(state["all"])


KILLED = """
import pathlib, sys
sys.path.insert(0, {here!r})
from test_checkpoint import BigIterator, Handler
directory = pathlib.Path({directory!r})
iterator = BigIterator()
print("saving", flush=True)
while True:
    next(iterator)
    Handler().save(directory, iterator)
"""


def test_a_killed_process_leaves_complete_files(tmp_path):
    program = KILLED.format(here=str(pathlib.Path(__file__).parent), directory=str(tmp_path))
    reached = []
    chance = random.Random(1)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment()
        )
        process.stdout.readline()
        while not (tmp_path / "process_0-of-1.json").exists():
            time.sleep(0.01)
        time.sleep(0.1 + chance.random() / 4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        restored = BigIterator()
        Handler().restore(tmp_path, restored)
        reached.append(next(restored))
        visible = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
        assert visible == {"process_0-of-1.json", RECORD}
    assert all(number > 1 for number in reached), "nothing was saved"


KILLED_HALFWAY = """
import pathlib, sys, time
sys.path.insert(0, {here!r})
from test_checkpoint import BigIterator, Handler
directory = pathlib.Path({directory!r})
iterator = BigIterator()
next(iterator)
Handler().save(directory, iterator)
next(iterator)
files_left = {whole_files}
opened = pathlib.Path.open

def open_slowly(self, *args, **kwargs):
    global files_left
    file = opened(self, *args, **kwargs)
    files_left -= 1
    if files_left < 0:
        write = file.write
        class Slow:
            def __enter__(self):
                return self
            def __exit__(self, *_):
                pass
            def write(self, text):
                write(text[:len(text) // 2])
                file.flush()
                print("half", flush=True)
                time.sleep(600)
        return Slow()
    return file

pathlib.Path.open = open_slowly
Handler().save(directory, iterator)
"""


@pytest.mark.parametrize("whole_files", [0, 1])
def test_a_process_killed_while_it_writes_leaves_the_state_before(tmp_path, whole_files):
    program = KILLED_HALFWAY.format(
        here=str(pathlib.Path(__file__).parent), directory=str(tmp_path), whole_files=whole_files
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment()
    )
    assert process.stdout.readline() == b"half\n"
    process.kill()
    process.wait()
    process.stdout.close()
    restored = BigIterator()
    Handler().restore(tmp_path, restored)
    assert next(restored) == 2
    visible = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert visible == {"process_0-of-1.json", RECORD}
    Handler().save(tmp_path, restored)
    assert next(Handler().restore(tmp_path, BigIterator())) == 3


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_write_leaves_the_file_before(tmp_path, monkeypatch, step):
    iterator = after(numbers(), 1)
    Handler().save(tmp_path, iterator)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    next(iterator)

    def fail(*_):
        raise OSError("no space left")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(pathlib.Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        Handler().save(tmp_path, iterator)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_files_are_synced_before_they_get_their_name(tmp_path, monkeypatch):
    steps = []
    sync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("fsync"), sync(file)))
    monkeypatch.setattr(
        pathlib.Path,
        "replace",
        lambda self, target: (steps.append(target.name), replace(self, target))[1],
    )
    Handler().save(tmp_path, iter(numbers()))
    assert steps == ["fsync", RECORD, "fsync", "fsync", "process_0-of-1.json", "fsync"]


def test_files_have_the_permissions_of_new_files(tmp_path):
    (tmp_path / "other").write_text("")
    Handler().save(tmp_path, iter(numbers()))
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


class Bucket:
    """A directory that is not in the file system, with the four methods that are asked of it."""

    def __init__(self, name, objects):
        self.name = name
        self.objects = objects

    def __truediv__(self, name):
        return Bucket(f"{self.name}/{name}", self.objects)

    def exists(self):
        return self.name in self.objects

    def read_text(self):
        return self.objects[self.name]

    def write_text(self, text):
        self.objects[self.name] = text

    def __str__(self):
        return self.name


def test_directory_may_be_in_a_bucket():
    bucket = Bucket("gs://bucket/step", {})
    iterator = after(numbers(), 1)
    Handler().save(bucket, iterator)
    assert set(bucket.objects) == {
        "gs://bucket/step/process_0-of-1.json",
        f"gs://bucket/step/{RECORD}",
    }
    rest = take(iterator, None)
    assert take(Handler().restore(bucket, iter(numbers())), None) == rest
    epath = pytest.importorskip("etils.epath")
    assert "://" in os.fspath(epath.Path("gs://bucket/step"))


# --- states that JSON cannot represent -----------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "Object of type int64 is not JSON serializable"),
        (np.random.default_rng(0), "Object of type Generator is not JSON serializable"),
        (b"x", "Object of type bytes is not JSON serializable"),
        ({(1, 2): 3}, "keys must be str"),
    ],
)
def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path, value, text):
    iterator = BigIterator()
    iterator.get_state = lambda: {"all": [1, {"at": value}]}
    with pytest.raises(TypeError, match=text) as refused:
        Handler().save(tmp_path, iterator)
    assert "`state['all'][1]['at']` cannot be written as JSON" in "".join(refused.value.__notes__)
    with pytest.raises(TypeError, match=text):
        asyncio.run(iterator.save(tmp_path))
    assert not list(tmp_path.iterdir())


# --- only for the pipeline that saved it ----------------------------------------------------------


def decode(x):
    return x + 1


def encode(x):
    return x + 2


class Scale(grain.transforms.Map):
    def __init__(self, factor):
        self._factor = factor

    def map(self, element):
        return element * self._factor


class OwnSource:
    def __init__(self, length, paths=()):
        self.length = length
        self.paths = list(paths)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def of(length=20):
    return grain.MapDataset.range(length)


def parts(*lengths):
    return [of(length).to_iter_dataset() for length in lengths]


def fit(**options):
    tokens = of().map(lambda x: {"t": np.full(3, x), "a": x, "b": x}).to_iter_dataset()
    options = {"length_struct": {"t": 8}, "num_packing_bins": 2, **options}
    return experimental.FirstFitPackIterDataset(tokens, **options)


def loader(batch=2, **options):
    sampler = grain.samplers.IndexSampler(9, num_epochs=1, shuffle=True, seed=1)
    operations = [Scale(2), grain.transforms.Batch(batch)]
    return grain.DataLoader(
        data_source=list(range(9)), sampler=sampler, operations=operations, **options
    )


# What saves, what restores, and what the message says.
OTHERS = {
    "seed": (
        lambda: numbers(seed=1),
        lambda: numbers(seed=2),
        "seed of ShuffleMapDataset was 1, and is 2 now",
    ),
    "length": (
        lambda: numbers(8),
        lambda: numbers(10),
        "length of RangeMapDataset was 8, and is 10 now",
    ),
    "length of a source": (
        lambda: grain.MapDataset.source(OwnSource(8)).to_iter_dataset(),
        lambda: grain.MapDataset.source(OwnSource(9)).to_iter_dataset(),
        "length of SourceMapDataset was 8, and is 9 now",
    ),
    "file": (
        lambda: grain.MapDataset.source(OwnSource(8, ["/a/train-0"])).to_iter_dataset(),
        lambda: grain.MapDataset.source(OwnSource(8, ["/a/test-0"])).to_iter_dataset(),
        "files of SourceMapDataset was ['train-0'], and is ['test-0'] now",
    ),
    "batch size": (
        lambda: numbers(batch=2),
        lambda: numbers(batch=4),
        "batch_size of BatchMapDataset was 2, and is 4 now",
    ),
    "stage": (
        lambda: of().map(decode).to_iter_dataset(),
        lambda: of().filter(decode).to_iter_dataset(),
        "stage 2 was MapMapDataset(transform=decode) when it was saved, and is "
        "FilterMapDataset(transform=decode) now",
    ),
    "stage less": (
        lambda: of().to_iter_dataset().map(decode),
        lambda: of().to_iter_dataset(),
        "stage 3 was MapIterDataset(transform=decode) when it was saved, and is absent now",
    ),
    "function": (
        lambda: of().map(decode).to_iter_dataset(),
        lambda: of().map(encode).to_iter_dataset(),
        "transform of MapMapDataset was decode, and is encode now",
    ),
    "shard": (
        of()[0::2].to_iter_dataset,
        of()[1::2].to_iter_dataset,
        "start of SliceMapDataset was 0, and is 1 now",
    ),
    "seed of all": (
        lambda: of().seed(1).shuffle().to_iter_dataset(),
        lambda: of().seed(2).shuffle().to_iter_dataset(),
        "seed of ShuffleMapDataset was",
    ),
    "part of a mixture": (
        lambda: grain.IterDataset.mix(parts(20, 30)),
        lambda: grain.IterDataset.mix(parts(20, 31)),
        "in dataset 1 of MixedIterDataset: length of RangeMapDataset was 30, and is 31 now",
    ),
    "weights": (
        lambda: grain.IterDataset.mix(parts(20, 30), [1, 2]),
        lambda: grain.IterDataset.mix(parts(20, 30), [2, 1]),
        "proportions of MixedIterDataset was [100, 200], and is [200, 100] now",
    ),
    "parts": (
        lambda: grain.MapDataset.concatenate([of(), of()]).to_iter_dataset(),
        lambda: grain.MapDataset.concatenate([of(), of(), of()]).to_iter_dataset(),
        "had 2 datasets, and has 3 now",
    ),
    "one of many parts": (
        lambda: experimental.InterleaveIterDataset(parts(*range(5, 90)), cycle_length=3),
        lambda: experimental.InterleaveIterDataset(parts(*range(5, 89), 80), cycle_length=3),
        "in dataset 84 of InterleaveIterDataset",
    ),
    "open datasets": (
        lambda: experimental.InterleaveIterDataset(parts(4, 5, 6), cycle_length=3),
        lambda: experimental.InterleaveIterDataset(parts(4, 5, 6), cycle_length=2),
        "cycle_length of InterleaveIterDataset was 3, and is 2 now",
    ),
    "packing": (
        lambda: fit(num_packing_bins=2),
        lambda: fit(num_packing_bins=3, length_struct={"t": 9}),
        "length_struct of FirstFitPackIterDataset was {'t': 8}, and is {'t': 9} now; "
        "num_packing_bins of FirstFitPackIterDataset was 2, and is 3 now",
    ),
    "window": (
        lambda: experimental.WindowShuffleIterDataset(parts(20)[0], window_size=4, seed=1),
        lambda: experimental.WindowShuffleIterDataset(parts(20)[0], window_size=4, seed=2),
        "seed of WindowShuffleIterDataset was 1, and is 2 now",
    ),
    "workers that share the elements": (
        lambda: experimental.multithread_prefetch(parts(20)[0], 2, 1),
        lambda: experimental.multithread_prefetch(parts(20)[0], 3, 1),
        "num_threads of MultithreadPrefetchIterDataset was 2, and is 3 now",
    ),
    "user's dataset": (
        lambda: Passing(parts(20)[0]),
        lambda: Passing(parts(21)[0]),
        "length of RangeMapDataset was 20, and is 21 now",
    ),
    "loader": (
        lambda: loader(batch=2),
        lambda: loader(batch=3),
        "batch_size of Batch was 2, and is 3 now",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_another_pipeline_is_refused_with_what_differs(name, tmp_path, monkeypatch):
    make, other, text = OTHERS[name]
    Handler().save(tmp_path, after(make(), 1))
    iterator = iter(other())
    before = iterator.get_state()
    with pytest.raises(ValueError, match="was saved from another pipeline: ") as refused:
        Handler().restore(tmp_path, iterator)
    assert text in str(refused.value)
    assert "process_0-of-1.json" in str(refused.value)
    assert "GRAINMILL_RESTORE_ANYWAY=1" in str(refused.value)
    assert iterator.get_state() == before
    # The same pipeline, made again, is accepted; and the refusal can be overruled.
    Handler().restore(tmp_path, iter(make()))
    if name in {"seed", "function", "batch size", "window"}:
        Handler(check_pipeline=False).restore(tmp_path, iter(other()))
        monkeypatch.setenv(states.RESTORE_ANYWAY, "1")
        Handler().restore(tmp_path, iter(other()))


def renamed(path):
    return path.replace("/disk/", "gs://bucket/")


# What saves and what restores: the same pipeline under other circumstances.
SAME = {
    "threads and buffers": (
        lambda: of().to_iter_dataset(),
        lambda: of().to_iter_dataset(
            grain.ReadOptions(num_threads=3, prefetch_buffer_size=9, num_workers=0)
        ),
    ),
    "workers that change no order": (
        lambda: of().map(decode).to_iter_dataset(),
        lambda: of().map(decode).to_iter_dataset(grain.ReadOptions(num_workers=1)),
    ),
    "directory": (
        lambda: grain.MapDataset.source(OwnSource(9, ["/disk/a-0", "/disk/a-1"])).to_iter_dataset(),
        lambda: grain.MapDataset.source(
            OwnSource(9, [renamed("/disk/a-0"), renamed("/disk/a-1")])
        ).to_iter_dataset(),
    ),
    "system": (
        lambda: grain.MapDataset.source(OwnSource(9, ["/disk/a-0"])).to_iter_dataset(),
        lambda: grain.MapDataset.source(OwnSource(9, ["C:\\disk\\a-0"])).to_iter_dataset(),
    ),
    "code and place of a function": (
        lambda: of().map(decode).to_iter_dataset(),
        lambda: of().map(local_decode()).to_iter_dataset(),
    ),
    "parameters of an object": (
        lambda: of().map(Scale(2)).to_iter_dataset(),
        lambda: of().map(Scale(3)).to_iter_dataset(),
    ),
    "prefetching": (
        lambda: of().to_iter_dataset().map(decode),
        lambda: experimental.ThreadPrefetchIterDataset(
            of().to_iter_dataset().map(decode), prefetch_buffer_size=3
        ),
    ),
    "options": (
        lambda: of().to_iter_dataset(),
        lambda: experimental.WithOptionsIterDataset(
            of().to_iter_dataset(),
            experimental.DatasetOptions(filter_warn_threshold_ratio=None),
        ),
    ),
    "buffers of an interleave": (
        lambda: experimental.InterleaveIterDataset(parts(3, 4), cycle_length=2),
        lambda: experimental.InterleaveIterDataset(
            tuple(parts(3, 4)), cycle_length=2, iter_buffer_size=2, num_make_iter_threads=2
        ),
    ),
    "buffers of workers": (
        lambda: experimental.multithread_prefetch(parts(20)[0], 2, 1),
        lambda: experimental.multithread_prefetch(parts(20)[0], 2, 5),
    ),
    "numbers of NumPy": (
        lambda: numbers(seed=1),
        lambda: numbers(length=np.int64(8), seed=np.int32(1), batch=np.uint8(2)),
    ),
    "features given as a set": (
        lambda: fit(meta_features={"a", "b"}),
        lambda: fit(meta_features=["b", "a"]),
    ),
    "loader": (loader, lambda: loader(read_options=grain.ReadOptions(num_threads=0))),
}


def local_decode():
    def decode(x):
        return 100 - x

    return decode


@pytest.mark.parametrize("name", SAME)
def test_the_same_pipeline_under_other_circumstances_is_accepted(name, tmp_path):
    make, other = SAME[name]
    iterator = after(make(), 1)
    Handler().save(tmp_path, iterator)
    state = iterator.get_state()
    assert Handler().restore(tmp_path, iter(other())).get_state() == state
    assert Handler().restore(tmp_path, iter(make())).get_state() == state


def test_state_without_a_description_is_accepted(tmp_path):
    """As Grain writes it; or with the description that an earlier save has left."""
    Handler().save(tmp_path, after(numbers(seed=1), 2))
    (tmp_path / "process_0-of-1.json").write_text('{"next_index": 1}')
    restored = Handler().restore(tmp_path, iter(numbers(seed=2)))
    assert restored.get_state() == {"next_index": 1}
    (tmp_path / RECORD).unlink()
    Handler().restore(tmp_path, iter(numbers(seed=2)))
    for text in ("", "{}", '{"format": 99}', "[]"):
        (tmp_path / RECORD).write_text(text)
        Handler().restore(tmp_path, iter(numbers(seed=2)))


def test_description_of_many_datasets_is_small(tmp_path):
    mixture = grain.IterDataset.mix(parts(*range(5, 1005)))
    Handler().save(tmp_path, iter(mixture))
    assert (tmp_path / RECORD).stat().st_size < 80_000
    shared = of(3)
    for _ in range(40):  # 2 ** 40 paths lead to it
        shared = grain.MapDataset.concatenate([shared, shared[:1]])
        shared = grain.MapDataset.mix([shared, shared])
    started = time.monotonic()
    text = json.dumps(pipeline.described(shared._node))
    assert len(text) < 80_000
    assert time.monotonic() - started < 20


def test_descriptions_are_pinned():
    """Whoever changes one raises `states._FORMAT`, or states of the version before are refused."""
    ds = grain.MapDataset.source(OwnSource(9, ["/a/b", "/a/c"])).seed(3).shuffle().map(decode)
    ds = ds[1::2].repeat(2).batch(2).to_iter_dataset()
    mixture = grain.IterDataset.mix({"x": ds, "y": fit(meta_features=["t"])}, {"x": 1, "y": 2})
    mixture = experimental.WindowShuffleIterDataset(mixture, window_size=3, seed=1)
    assert states._FORMAT == 1
    found = pipeline.described(mixture.mp_prefetch(workers())._plan_node())
    assert found == [
        {
            "stage": "MixedIterDataset",
            "proportions": [100, 200],
            "names": ["x", "y"],
            "of": [
                [
                    {
                        "stage": "SourceMapDataset",
                        "source": "OwnSource",
                        "files": ["b", "c"],
                        "length": 9,
                        "wraps": True,
                    },
                    {"stage": "ShuffleMapDataset", "seed": 457190280},
                    {"stage": "MapMapDataset", "transform": "decode"},
                    {"stage": "SliceMapDataset", "start": 1, "stop": 9, "step": 2},
                    {"stage": "RepeatMapDataset", "num_epochs": 2, "reseed_each_epoch": True},
                    {"stage": "BatchMapDataset", "batch_size": 2, "drop_remainder": False},
                    {"stage": "PrefetchIterDataset", "allow_nones": False},
                ],
                [
                    {"stage": "RangeMapDataset", "length": 20, "numbers": [0, 20, 1]},
                    {"stage": "MapMapDataset", "transform": "<lambda>"},
                    {"stage": "PrefetchIterDataset", "allow_nones": False},
                    {
                        "stage": "FirstFitPackIterDataset",
                        "best_fit": False,
                        "length_struct": {"t": 8},
                        "num_packing_bins": 2,
                        "seed": 0,
                        "shuffle_bins": True,
                        "meta_features": ["t"],
                    },
                ],
            ],
        },
        {"stage": "WindowShuffleIterDataset", "window_size": 3, "seed": 1},
        {
            "stage": "MultiprocessPrefetchIterDataset",
            "num_workers": 2,
            "sequential_slice": False,
        },
    ]
    assert json.loads(json.dumps(found)) == found


def workers():
    return grain.MultiprocessingOptions(num_workers=2)


@pytest.mark.parametrize(
    "change", [{"worker_count": 1}, {"seed": 2}, {"source": range(9)}], ids=str
)
def test_what_states_of_a_loader_have_is_refused_as_by_grain(change, tmp_path):
    """Programs match on these texts."""

    def make(worker_count=0, seed=1, source=(1,) * 9):
        return grain.load(source, seed=seed, shuffle=True, worker_count=worker_count)

    Handler().save(tmp_path, iter(make()))
    text = r"(Worker count|Sampler|DataSource) in checkpoint does not match"
    with pytest.raises(ValueError, match=text):
        Handler().restore(tmp_path, iter(make(**change)))


def test_state_is_saved_whatever_the_users_objects_do(tmp_path):
    class Broken(OwnSource):
        @property
        def paths(self):
            raise RuntimeError("no paths")

        @paths.setter
        def paths(self, _):
            pass

    dataset = grain.MapDataset.source(Broken(4)).to_iter_dataset()
    Handler().save(tmp_path, after(dataset, 1))
    assert json.loads((tmp_path / RECORD).read_text())["pipeline"] is None
    assert take(Handler().restore(tmp_path, iter(dataset)), None) == [1, 2, 3]


def test_describing_calls_nothing_of_the_user(tmp_path):
    class Lazy(grain.MapDataset):
        def __len__(self):
            raise RuntimeError("unknown")

        def __getitem__(self, index):
            raise AssertionError("it is not evaluated")

    described = pipeline.described(Lazy()._plan_node())
    assert described[0]["stage"].endswith("Lazy")
    made = of(3).map(lambda _: pytest.fail("a dataset is opened"))
    interleave = experimental.InterleaveIterDataset(made, cycle_length=1)
    assert pipeline.described(interleave._plan_node())[0]["datasets"] == 3
    assert not list(tmp_path.iterdir())


# --- awaited --------------------------------------------------------------------------------------


class NotYet:
    """A directory that exists when it is awaited."""

    def __init__(self, path):
        self.path = path

    async def await_creation(self):
        self.path.mkdir()
        return self.path


@pytest.mark.parametrize("make", [numbers, loader, lambda: Passing(numbers())])
def test_state_is_taken_by_the_call_and_written_when_awaited(make, tmp_path):
    iterator = after(make(), 1)
    target = tmp_path / "item"

    async def save():
        write = await iterator.save(NotYet(target))
        assert not target.exists()
        next(iterator)
        await write

    asyncio.run(save())
    restored = iter(make())
    before = restored.get_state()

    async def load():
        read = await restored.load(target)
        assert restored.get_state() == before
        await read

    asyncio.run(load())
    assert take(restored, None) == take(after(make(), 1), None)


def test_loading_checks_what_the_handler_checks(tmp_path, monkeypatch):
    async def load(dataset):
        await (await iter(dataset).load(tmp_path))

    with pytest.raises(ValueError, match=r"File .*process_0-of-1.json does not exist\."):
        asyncio.run(load(numbers()))
    Handler().save(tmp_path, after(numbers(seed=1), 1))
    with pytest.raises(ValueError, match="seed of ShuffleMapDataset was 1, and is 2 now"):
        asyncio.run(load(numbers(seed=2)))
    monkeypatch.setenv(states.RESTORE_ANYWAY, "1")
    asyncio.run(load(numbers(seed=2)))


# --- what is imported -----------------------------------------------------------------------------


def test_nothing_slow_is_imported():
    program = """
import pathlib, sys, tempfile
import grainmill as grain
import grainmill.python, grainmill.checkpoint
slow = {"orbax", "jax", "asyncio", "etils"}
assert not slow & set(sys.modules), slow & set(sys.modules)
directory = pathlib.Path(tempfile.mkdtemp())
ds = grain.MapDataset.range(4).to_iter_dataset()
handler = grain.checkpoint.CheckpointHandler()
handler.save(directory, iter(ds))
handler.restore(directory, iter(ds))
assert not slow & set(sys.modules), slow & set(sys.modules)
"""
    done = run_script(program)
    assert done.returncode == 0, done.stderr


def test_names_exist_only_where_orbax_is():
    program = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "orbax" else find(name, *a)
import grainmill as grain
import grainmill.python
assert grain.checkpoint.__all__ == ["CheckpointHandler"]
try:
    grain.checkpoint.CheckpointSave
except AttributeError as error:
    assert "pip install orbax-checkpoint" in str(error)
else:
    raise AssertionError
assert not hasattr(grain.python, "PyGrainCheckpointRestore")
assert grain.python.PyGrainCheckpointHandler is grain.checkpoint.CheckpointHandler
"""
    done = run_script(program)
    assert done.returncode == 0, done.stderr
