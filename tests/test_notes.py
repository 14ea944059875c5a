"""Notes on exceptions name the element, its stage and its record."""

import dataclasses
import functools
import inspect
import itertools
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from effort import SEED, cases
from under_test import INLINE, experimental, grain

from grainmill.array_record import ArrayRecordWriter

MapDataset = grain.MapDataset
BAD = 61


class BrokenError(Exception):
    """The exception of the functions below."""


def here():
    """The caller's file and line, in the format of notes."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fail_at_bad(element):
    if int(element) == BAD:
        raise BrokenError("no good")
    return int(element)


def same(element):
    return element


def is_odd(element):
    return int(element) % 2 == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files with the numbers 0 to 49 and 50 to 99."""
    folder = tmp_path_factory.mktemp("files")
    paths = [str(folder / f"train-{number}.array_record") for number in range(2)]
    for number, path in enumerate(paths):
        with ArrayRecordWriter(path, "group_size:1") as writer:
            for record in range(50):
                writer.write(str(number * 50 + record).encode())
    return paths


def raised(consume):
    """The exception of `consume()`, and its notes."""
    with pytest.raises(Exception) as info:  # noqa: PT011 - each test checks it
        consume()
    return info.value, list(getattr(info.value, "__notes__", ()))


def lines_of(consume):
    """The lines of the notes on the element, without the note of a worker."""
    failure, notes = raised(consume)
    assert type(failure) is BrokenError
    assert failure.args == ("no good",)
    assert len(set(notes)) == len(notes)
    told = [note for note in notes if not note.startswith("in worker")]
    return [line.strip() for note in told for line in note.split("\n")]


def prefetched(dataset):
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))


def in_workers(dataset):
    return dataset.to_iter_dataset(grain.ReadOptions(num_workers=2))


def mp_prefetched(dataset, **options):
    options = {"options": grain.MultiprocessingOptions(num_workers=2), **options}
    return dataset.mp_prefetch(**options)


WAYS = {
    "index": lambda ds: ds[BAD],
    "block": lambda ds: ds.__getitems__([3, BAD, 5]),
    "inline": lambda ds: list(ds.to_iter_dataset(INLINE)),
    "threads": lambda ds: list(prefetched(ds)),
    "default": list,
    "num_workers": lambda ds: list(in_workers(ds)),
    "mp_prefetch": lambda ds: list(mp_prefetched(ds.to_iter_dataset())),
    "mp_prefetch_in_runs": lambda ds: list(
        mp_prefetched(ds.to_iter_dataset(), sequential_slice=True)
    ),
    "multithread_prefetch": lambda ds: list(
        experimental.multithread_prefetch(ds.to_iter_dataset(), 2, 3)
    ),
    "thread_prefetch": lambda ds: list(
        experimental.ThreadPrefetchIterDataset(ds.to_iter_dataset(), prefetch_buffer_size=2)
    ),
    "mapped_further": lambda ds: list(ds.to_iter_dataset().filter(lambda _: True).map(same)),
}

# --- random access -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_failed_map_names_element_stage_line_and_record(way, files):
    source = grain.sources.ArrayRecordDataSource(files)
    ds, line = MapDataset.source(source).map(fail_at_bad), here()
    text, record = lines_of(lambda: WAYS[way](ds.map(same)))
    assert text == f"while computing element 61 of `{ds}` at {line}"
    assert record == f"from record 11 of {files[1]}"


def with_index(_, element):
    return fail_at_bad(element)


def with_rng(element, _):
    return fail_at_bad(element)


class Splits(experimental.FlatMapTransform):
    max_fan_out = 1

    def flat_map(self, element):
        return [fail_at_bad(element)]


class FailingSource:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return fail_at_bad(index)


class FailingBlocks(FailingSource):
    def __getitems__(self, indices):
        return [fail_at_bad(index) for index in indices]


class OwnDataset(MapDataset):
    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index):
        return fail_at_bad(self._parent[index])


def number_source():
    return MapDataset.range(100).map(same)


class FailingSelection(grain.transforms.DatasetSelectionMap):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return 0, fail_at_bad(index)


# How each stage is appended to a dataset, or begins one.
STAGES = {
    "map": lambda: number_source().map(fail_at_bad),
    "map_with_index": lambda: number_source().map_with_index(with_index),
    "random_map": lambda: number_source().random_map(with_rng, seed=1),
    "filter": lambda: number_source().filter(fail_at_bad),
    "flat_map": lambda: experimental.FlatMapMapDataset(number_source(), Splits()),
    "source": lambda: MapDataset.source(FailingSource()),
    "source_of_blocks": lambda: MapDataset.source(FailingBlocks()),
    "batch_fn": lambda: number_source().batch(1, batch_fn=lambda xs: fail_at_bad(xs[0])),
    "select": lambda: MapDataset.select_from_datasets([number_source()], FailingSelection()),
}


@pytest.mark.parametrize("more", [lambda ds: ds, lambda ds: ds.map(same).map(same)])
@pytest.mark.parametrize("name", STAGES)
def test_failed_stage_is_the_one_named(name, more):
    ds = STAGES[name]()
    text, *_ = lines_of(lambda: list(more(ds)))
    code = STAGES[name].__code__
    assert (
        text == f"while computing element 61 of `{ds}` at {code.co_filename}:{code.co_firstlineno}"
    )


def test_own_dataset_is_named_with_its_class():
    text, *_ = lines_of(lambda: list(OwnDataset(number_source()).map(same)))
    line = OwnDataset.__getitem__.__code__.co_firstlineno
    assert text == f"while computing element 61 of `OwnDataset` at {__file__}:{line}"


def test_stages_on_the_way_have_their_own_index():
    ds, line = MapDataset.range(100).map(fail_at_bad), here()
    shuffled, shuffle_line = ds.shuffle(seed=4), here()
    last, last_line = shuffled.repeat()[1000:2000], here()
    position = next(i for i in range(1000) if MapDataset.range(100).shuffle(4)[1000 + i] == BAD)
    text, wanted, record = lines_of(lambda: last[position])
    epoch = 10 + position // 100
    assert text == f"while computing element {epoch * 100 + 61} of `{ds}` at {line}"
    assert wanted == f"for element {position} of `{last}` at {last_line}"
    assert record == (
        f"from record 61 of `RangeMapDataset(start=0, stop=100, step=1)` at {line} (epoch {epoch})"
    )
    assert shuffle_line != last_line


def test_part_of_a_mixture_is_the_one_named():
    parts = [MapDataset.range(100).map(same), MapDataset.source(FailingSource()).map(str)]
    many = [MapDataset.range(100).map(lambda x: x) for _ in range(5)]
    bad, line = MapDataset.range(50, 70).map(fail_at_bad), here()
    text, wanted, _ = lines_of(lambda: list(MapDataset.mix([*many, bad]).map(same)))
    assert text == f"while computing element 11 of `{bad}` at {line}"
    assert wanted.startswith("for element 71 of `MapMapDataset(transform=same")
    text, wanted, _ = lines_of(lambda: list(MapDataset.concatenate(parts)))
    assert text.startswith("while computing element 61 of `SourceMapDataset(source=FailingSource)`")
    assert wanted.startswith("for element 161 of `MixedMapDataset[2 parents]`")


class Twice(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


class Drawn(grain.transforms.DatasetSelectionMap):
    """Selects at random; the number of elements is that of all datasets."""

    def __init__(self, lengths, draw):
        places = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
        self.places = [draw.choice(places) for _ in places]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return self.places[index % len(self.places)]


class Origins:
    """Random plans of elements that are tuples of the records that they are from, all different."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.num_records = 0

    def source(self):
        start = self.num_records = self.num_records + 100
        length = self.draw.randrange(3, 9)
        return MapDataset.range(start, start + length).map(lambda record: (record,))

    def plan(self, depth):
        if not depth:
            return self.source()
        parts = [self.plan(depth - 1) for _ in range(self.draw.randrange(1, 4))]
        lengths = [len(part) for part in parts]
        joined = [
            MapDataset.select_from_datasets(parts, Drawn(lengths, self.draw)),
            experimental.ZipMapDataset([part[: min(lengths)] for part in parts]).map(concatenated),
            MapDataset.mix(parts),
            MapDataset.concatenate(parts),
            experimental.FlatMapMapDataset(parts[0], Twice()),
            parts[0].shuffle(seed=depth).cache().repeat(2)[1:],
            parts[0].shuffle(seed=depth).repeat(2)[1:],
        ]
        return self.draw.choice(joined)


def concatenated(tuples):
    return sum(tuples, ())


# How the element at `at` is computed, which the function fails for.
FAILING = {
    "index": lambda ds, at, fail: ds.map(fail)[at],
    "inline": lambda ds, at, fail: list(ds[at:].map(fail).to_iter_dataset(INLINE)),
    "sequential": lambda ds, at, fail: list(ds[at:].to_iter_dataset(INLINE).map(fail)),
}


def fail_always(_):
    raise BrokenError("no good")


@pytest.mark.parametrize("way", FAILING)
def test_records_of_joined_datasets_are_named(way):
    for seed in range(SEED, SEED + cases(40, 3_000)):
        origins = Origins(seed)
        ds = origins.plan(origins.draw.randrange(1, 4))
        at = origins.draw.randrange(len(ds))
        lines = lines_of(functools.partial(FAILING[way], ds, at, fail_always))
        found = [re.match(r"from record (\d+) of `Range\w+\(start=(\d+)", line) for line in lines]
        records = tuple(int(each[1]) + int(each[2]) for each in found if each)
        assert records == ds[at][:4], (seed, lines)


@pytest.mark.parametrize("way", ["inline", "num_workers", "mp_prefetch"])
def test_failed_element_of_a_batch_is_named(way):
    ds, line = number_source().map(fail_at_bad), here()
    batches, batch_line = ds.batch(8), here()
    text, _, which, batch, parts = lines_of(lambda: WAYS[way](batches))
    assert text == f"while computing element 61 of `{ds}` at {line}"
    assert which == f"which is element 5 of a batch of `{batches}` at {batch_line}"
    assert batch == f"while computing element 7 of `{batches}` at {batch_line}"
    assert parts == f"from elements 56 to 63 of `{ds}` at {line}"


def test_rows_that_are_copied_in_the_engine_have_notes_too(files):
    def row(record):
        return np.full(5000, fail_at_bad(record))

    ds, line = MapDataset.source(grain.sources.ArrayRecordDataSource(files)).map(row), here()
    batches, batch_line = ds.to_iter_dataset(INLINE).batch(32), here()
    iterator = iter(batches)
    next(iterator)
    for _ in range(3):  # the same exception again
        text, record, which = lines_of(lambda: next(iterator))
        assert text == f"while computing element 61 of `{ds}` at {line}"
        assert record == f"from record 11 of {files[1]}"
        assert which == f"which is element 29 of a batch of `{batches}` at {batch_line}"


def test_damaged_record_names_the_stage_and_the_file(files, tmp_path):
    data = bytearray(Path(files[1]).read_bytes())
    at = data.index(b"61")
    data[at] ^= 1
    path = str(tmp_path / "damaged.array_record")
    Path(path).write_bytes(data)
    source = grain.sources.ArrayRecordDataSource([files[0], path])
    ds, line = MapDataset.source(source), here()
    for way in ("index", "inline", "threads"):
        failure, notes = raised(lambda way=way: WAYS[way](ds))
        assert isinstance(failure, grain.GrainmillError)
        (note,) = notes
        assert note == (
            f"while computing element 61 of `{ds}` at {line}\n  from record 11 of {path}"
        )


# --- stages of an IterDataset --------------------------------------------------------------------


def numbers():
    return MapDataset.range(100).to_iter_dataset()


def odd_numbers():
    return MapDataset.range(100).filter(is_odd).to_iter_dataset()


def source_text():
    """How notes refer to the source of `numbers()`."""
    line = numbers.__code__.co_firstlineno + 1
    return f"`RangeMapDataset(start=0, stop=100, step=1)` at {__file__}:{line}"


UPSTREAM = {
    "read": numbers,
    "filtered": lambda: numbers().filter(is_odd),
    "counted": lambda: numbers().map_with_index(lambda _, x: x),
    "zipped": lambda: experimental.ZipIterDataset([numbers()]).map(lambda pair: pair[0]),
    "mixed": lambda: grain.IterDataset.mix([odd_and_ready(), numbers()], [1, 1]),
    "mixed_lazily": lambda: grain.IterDataset.mix(
        {"a": numbers().map(lambda x: -x), "b": numbers().map(same)}, {"a": 1, "b": 2}
    ),
    "interleaved": lambda: experimental.InterleaveIterDataset(
        [numbers().map(lambda x: -x), numbers().map(same)], cycle_length=2
    ),
    "limited": lambda: experimental.LimitIterDataset(numbers().map(same), 90),
    "repeated": lambda: experimental.RepeatIterDataset(numbers(), 2),
    "cached": lambda: experimental.CacheIterDataset(numbers().map(same)),
    "thread_prefetch": lambda: experimental.ThreadPrefetchIterDataset(
        numbers(), prefetch_buffer_size=3
    ),
    "mp_prefetch": lambda: mp_prefetched(numbers().map(same)),
    "multithread_prefetch": lambda: experimental.multithread_prefetch(numbers(), 2, 3),
}


def odd_and_ready():
    return MapDataset.range(100, 400).to_iter_dataset()


@pytest.mark.parametrize("name", UPSTREAM)
def test_failed_function_of_an_iterator_names_the_element_that_was_read(name):
    ds, line = UPSTREAM[name]().map(fail_at_bad), here()
    text, element, record = lines_of(lambda: list(ds.map(same)))
    assert text == f"while computing an element of `{ds}` at {line}"
    assert element == f"from element 61 of {source_text()}"
    assert record == f"from record 61 of {source_text()}"


def test_elements_left_out_when_read_are_counted():
    ds, line = odd_numbers().map(same).map(fail_at_bad), here()
    text, element, _ = lines_of(lambda: list(ds))
    assert text == f"while computing an element of `{ds}` at {line}"
    assert element.startswith("from element 61 of `FilterMapDataset(transform=is_odd")


ITER_STAGES = {
    "map": lambda: numbers().map(fail_at_bad),
    "map_with_index": lambda: numbers().map_with_index(with_index),
    "random_map": lambda: numbers().random_map(with_rng, seed=1),
    "filter": lambda: numbers().filter(fail_at_bad),
    "take_while": lambda: experimental.TakeWhileIterDataset(numbers(), until_bad),
    "flat_map": lambda: experimental.FlatMapIterDataset(numbers(), Splits()),
    "batch_fn": lambda: numbers().batch(1, batch_fn=lambda xs: fail_at_bad(xs[0])),
}


def until_bad(element):
    fail_at_bad(element)
    return True


@pytest.mark.parametrize("way", ["here", "restored", "mp_prefetch", "thread_prefetch"])
@pytest.mark.parametrize("name", ITER_STAGES)
def test_failed_stage_of_an_iterator_is_the_one_named(name, way):
    ds = ITER_STAGES[name]()

    def consume():
        if way == "mp_prefetch":
            return list(mp_prefetched(ds))
        if way == "thread_prefetch":
            return list(experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2))
        iterator = iter(ds)
        if way == "restored":
            first = iter(ds)
            for _ in range(20):
                next(first)
            iterator.set_state(first.get_state())
        return list(iterator)

    text, element, record = lines_of(consume)
    code = ITER_STAGES[name].__code__
    assert text == (
        f"while computing an element of `{ds}` at {code.co_filename}:{code.co_firstlineno}"
    )
    assert element == f"from element 61 of {source_text()}"
    assert record == f"from record 61 of {source_text()}"


@pytest.mark.parametrize("bad", [0, 1, 61])
@pytest.mark.parametrize("way", ["index", "block", "sequential"])
def test_predicate_without_a_truth_value_is_named(way, bad):
    """Whether the element is timed or not."""
    ds = MapDataset.range(100)
    if way == "sequential":
        ds = ds.to_iter_dataset()
    ds = ds.map(same).filter(lambda x: np.zeros(2) if x == bad else True).map(same)
    _, notes = raised(lambda: [ds[at] for at in range(100)] if way == "index" else list(ds))
    assert "Filter" in "".join(notes).splitlines()[0]


def test_function_of_batches_names_the_elements_of_the_batch():
    batches = numbers().filter(is_odd).batch(4)
    ds, line = batches.map(lambda batch: [fail_at_bad(x) for x in batch]), here()
    text, elements = lines_of(lambda: list(ds))
    assert text == f"while computing an element of `{ds}` at {line}"
    assert elements == f"from elements 56 to 63 of {source_text()}"


def test_batch_names_the_element_that_failed():
    mapped = numbers().map(fail_at_bad)
    batches, line = mapped.batch(8), here()
    iterator = iter(batches)
    for _ in range(7):
        next(iterator)
    for _ in range(2):
        text, element, _, which = lines_of(lambda: next(iterator))
        assert text.startswith(f"while computing an element of `{mapped}`")
        assert element == f"from element 61 of {source_text()}"
        assert which == f"which is element 5 of a batch of `{batches}` at {line}"


def test_batch_of_unlike_elements_says_which_elements():
    unlike = MapDataset.range(20).map(lambda x: np.zeros(2 + (x == 13))).to_iter_dataset()
    batches, line = unlike.batch(4), here()
    _, notes = raised(lambda: list(batches))
    assert notes[-1].startswith(
        f"while computing an element of `{batches}` at {line}\n  from elements 12 to 15 of `MapMap"
    )


class Forward(grain.IterDataset):
    """Elements of an iterator that has no state, or has one."""

    def __init__(self, has_state):
        super().__init__()
        self.has_state = has_state

    def __iter__(self):
        return ForwardIterator(self.has_state)


class ForwardIterator(grain.DatasetIterator):
    def __init__(self, has_state):
        super().__init__()
        self.has_state, self.at = has_state, 0

    def __next__(self):
        if self.at == 20:
            raise StopIteration
        self.at += 1
        return np.zeros(2 + (self.at == 6), int) + self.at - 1

    def get_state(self):
        if not self.has_state:
            raise NotImplementedError("a stream has no state")
        return self.at

    def set_state(self, state):
        self.at = state


@pytest.mark.parametrize("stage", ["batch", "map and batch"])
def test_elements_that_a_failed_batch_loses_are_said_to_be_lost(stage):
    for has_state in (False, True):
        ds = Forward(has_state)
        ds = (ds if stage == "batch" else ds.map(lambda x: x)).batch(4)
        iterator = iter(ds)
        assert next(iterator)[:, 0].tolist() == [0, 1, 2, 3]
        _, notes = raised(lambda it=iterator: next(it))
        is_lost = [note for note in notes if "are lost" in note]
        assert bool(is_lost) is not has_state
        if has_state:  # the same elements fail again
            raised(lambda it=iterator: next(it))
        else:
            assert "a stream has no state" in str(is_lost) or "cannot be saved" in str(is_lost)
            assert next(iterator)[:, 0].tolist() == [6, 7, 8, 9]  # 4 and 5 were taken


def sequence(number):
    return {"t": np.array(["a"]) if number == 7 else np.arange(5)}


@pytest.mark.parametrize("name", ["fit", "concat"])
def test_packing_names_the_element_that_cannot_be_packed(name):
    sequences = MapDataset.range(20).map(sequence).to_iter_dataset()
    if name == "fit":
        options = {"length_struct": {"t": 10}, "num_packing_bins": 2}
        ds, line = experimental.FirstFitPackIterDataset(sequences, **options), here()
    else:
        options = {"length_struct": {"t": 10}}
        ds, line = experimental.ConcatThenSplitIterDataset(sequences, **options), here()
    _, notes = raised(lambda: list(ds))
    assert notes[0].startswith("Element 7 of those that")
    assert notes[1].startswith(
        f"while computing an element of `{ds}` at {line}\n  from element 7 of `MapMapDataset("
    )


class OwnIterator(grain.DatasetIterator):
    asked = 0

    def __next__(self):
        return fail_at_bad(next(self._parent))

    def get_state(self):
        OwnIterator.asked += 1
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


class OwnIterDataset(grain.IterDataset):
    def __iter__(self):
        return OwnIterator(self._parent.__iter__())


def test_own_iterator_is_named_and_its_state_not_asked_for():
    line = OwnIterDataset.__iter__.__code__.co_firstlineno
    (text,) = lines_of(lambda: list(OwnIterDataset(numbers()).map(same)))
    assert text == f"while computing an element of `OwnIterDataset` at {__file__}:{line}"
    ds = OwnIterDataset(MapDataset.range(60).to_iter_dataset()).map(str)
    OwnIterator.asked = 0
    next(iter(ds))
    asked, OwnIterator.asked = OwnIterator.asked, 0
    _, (note,) = raised(lambda: next(iter(ds.map(lambda _: 1 / 0))))
    assert note.startswith("while computing an element of `MapIterDataset")
    assert OwnIterator.asked == asked


def test_part_that_cannot_be_opened_is_named():
    parts = MapDataset.range(3).map(lambda x: numbers() if x < 2 else 1 / 0)
    ds, line = experimental.InterleaveIterDataset(parts, cycle_length=1), here()
    _, notes = raised(lambda: list(ds))
    assert notes[0].startswith("while computing element 2 of `MapMapDataset(")
    assert notes[-1] == f"while opening dataset 2 of `{ds}` at {line}"


# --- workers -------------------------------------------------------------------------------------


def in_worker(consume):
    """The note of the worker."""
    failure, notes = raised(consume)
    (note,) = [note for note in notes if note.startswith("in worker")]
    return failure, notes, note


@pytest.mark.parametrize("bad", [60, 61])
def test_worker_counts_as_the_consumer(bad):
    def fails(x):
        if x == bad:
            raise BrokenError("no good")
        return x

    for way in ("num_workers", "mp_prefetch"):
        _, notes, note = in_worker(lambda way=way: WAYS[way](MapDataset.range(100).map(fails)))
        assert f"at element {bad}:" in note
        assert "Traceback" in note
        assert "while computing" not in note  # that is another note
        assert sum("while computing" in note for note in notes) == 1


def test_worker_counts_batches_as_the_consumer():
    ds = number_source().map(fail_at_bad).to_iter_dataset().batch(5)
    # Of worker 1: elements 1, 3, ..., 9; ...; 61 is its 31st, in its batch 6.
    iterator = iter(mp_prefetched(ds))
    made = list(itertools.islice(iterator, 13))
    assert len(made) == 13
    _, _, note = in_worker(lambda: next(iterator))
    assert note.startswith("in worker 1, at element 13:")


def test_worker_counts_on_from_a_restored_state():
    ds = mp_prefetched(number_source().map(fail_at_bad).to_iter_dataset())
    first = iter(ds)
    for _ in range(24):
        next(first)
    second = iter(ds)
    second.set_state(first.get_state())
    _, _, note = in_worker(lambda: list(second))
    assert note.startswith("in worker 1, at element 61:")


def test_what_cannot_be_sent_has_the_number_of_the_consumer():
    ds = MapDataset.range(40).map(lambda x: (i for i in range(x)) if x == 13 else x)
    failure, _ = raised(lambda: list(mp_prefetched(ds.to_iter_dataset())))
    assert "element 13 cannot be sent by worker 1" in str(failure)


class Failing(grain.transforms.Map):
    def map(self, element):
        return fail_at_bad(element)


def operation(records):
    for record in records:
        fail_at_bad(record.data)
        yield record


@pytest.mark.parametrize("worker_count", [0, 2])
@pytest.mark.parametrize("last", ["map", "operation"])
def test_data_loader_names_place_and_record(worker_count, last, files):
    loader, line = (
        grain.DataLoader(
            data_source=grain.sources.ArrayRecordDataSource(files),
            sampler=grain.samplers.IndexSampler(100, shuffle=True, seed=3, num_epochs=1),
            operations=[Failing() if last == "map" else operation],
            worker_count=worker_count,
        ),
        here(),
    )
    text, element, record = lines_of(lambda: list(loader))
    if last == "map":
        line = f"{__file__}:{int(line.rpartition(':')[2]) - 6}"
        assert (
            text == f"while computing an element of `MapIterDataset(transform=Failing)` at {line}"
        )
    else:
        assert text.startswith("while computing an element of `operation @")
        assert text.endswith("in a `DataLoader`")
    order = MapDataset.range(100).shuffle(3)
    place = next(i for i in range(100) if order[i] == BAD)
    assert element.startswith(f"from element {place} of `SliceMapDataset[0:100:1]` at ")
    assert record == f"from record 11 of {files[1]}"
    if worker_count:
        _, _, note = in_worker(lambda: list(loader))
        assert note.startswith(f"in worker {place % 2}, at element {place}:")


# --- what is kept of the exception ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    number: int


class DeafError(Exception):
    def add_note(self, note):
        raise KeyError(note)


class OddNotesError(Exception):
    __notes__ = 5

    def __setattr__(self, name, value):
        raise AttributeError(name)


class SlotsError(Exception):
    __slots__ = ("number",)


@pytest.mark.parametrize(
    "make", [lambda: FrozenError(3), lambda: DeafError("deaf"), OddNotesError, SlotsError]
)
@pytest.mark.parametrize("way", ["index", "inline", "threads", "mapped_further", "num_workers"])
def test_exceptions_that_refuse_notes_arrive_all_the_same(make, way):
    ready = [] if way == "num_workers" else [make()]  # a frozen one cannot be pickled

    def fails(x):
        if x == BAD:
            raise ready[0] if ready else make()
        return x

    failing = make()
    failure, notes = raised(lambda: WAYS[way](MapDataset.range(100).map(fails)))
    assert type(failure) is type(failing)
    assert failure.args == failing.args
    assert notes[0].startswith("while computing element 61 of `MapMapDataset(")
    if way in ("index", "inline"):
        assert failure is ready[0]


def test_notes_of_the_user_stay_in_front():
    def fails(x):
        failure = BrokenError("no good")
        failure.add_note(f"number {x}")
        raise failure

    for way in ("inline", "num_workers"):
        _, notes = raised(lambda way=way: WAYS[way](MapDataset.range(9).map(fails)))
        assert notes[0] == "number 0"
        assert notes[1].startswith("while computing element 0 of")
        assert sum(note.count("number 0") for note in notes) == 1


def test_one_object_raised_for_several_elements_has_the_last_place():
    only = BrokenError("no good")

    def fails(_):
        raise only

    ds = MapDataset.range(100).map(fails)
    for index in range(100):
        text, _ = lines_of(lambda index=index: ds[index])
        assert text.startswith(f"while computing element {index} of")
    assert len(only.__notes__) == 1


def test_pipeline_in_a_function_has_a_note_of_its_own():
    inner = MapDataset.range(100).map(fail_at_bad)
    ds = MapDataset.range(9).map(lambda x: inner[60 + x])
    text, _, outer, _ = lines_of(lambda: list(ds))
    assert text.startswith(f"while computing element 61 of `{inner}`")
    assert outer.startswith(f"while computing element 1 of `{ds}`")


def test_stop_iteration_of_a_function_has_a_place():
    def stops(x):
        return next(iter(())) if x == BAD else x

    for make in (
        lambda: MapDataset.range(100).map(stops).map(same),
        lambda: numbers().map(stops).map(same),
    ):
        failure, (note,) = raised(lambda make=make: list(make()))
        assert isinstance(failure, RuntimeError)
        assert "Dataset(transform=stops @" in note
        assert "record 61 of" in note


def test_lines_are_no_part_of_texts_and_states():
    def make():
        return MapDataset.range(10).shuffle(1).map(same).to_iter_dataset().batch(2)

    one = make()
    other = make()
    assert str(one) == str(other)
    assert iter(one).get_state() == iter(other).get_state()
    assert __file__ not in repr(MapDataset.range(9).shuffle(1))
    assert pickle.loads(pickle.dumps(one._node)).added_at == one._node.added_at
    assert one._node.added_at.startswith(__file__)
