"""How datasets and loaders show themselves: `repr`, `describe`, and boxes in a notebook."""

import html.parser
import re
import time

import numpy as np
import pytest
from record_formats import tfrecord
from stages import STAGES, make
from worker_harness import workers

import grainmill as grain
from grainmill import IterDataset, MapDataset, ReadOptions, experimental
from grainmill._dataset.iter_dataset import node_of
from grainmill._iterators.base.node import SequentialNode
from grainmill._iterators.open import open_stage
from grainmill._iterators.user_defined import UserDefined
from grainmill._iterators.workers.worker_shards import MultiprocessPrefetch
from grainmill._plan.node import MapNode
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import (
    FirstFitPackIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ThreadPrefetchIterDataset,
    ZipIterDataset,
)


def decode(x):
    return {"x": np.full(3, x, np.float32)}


def lines(ds, **options):
    return str(ds.describe(**options)).split("\n")


def facts(ds, stage, **options):
    """The facts of the stage whose title contains `stage`."""
    found = lines(ds, **options)
    at = next(number for number, line in enumerate(found) if stage in line)
    return "\n".join(line.strip() for line in found[at + 1 : at + 3])


def test_repr_names_the_stages_from_source_to_end_with_their_parameters():
    ds = MapDataset.range(100).shuffle(seed=3).map(decode)[1::2].repeat(2).batch(4)
    ds = ds.to_iter_dataset(ReadOptions(2, 8)).filter(bool)
    here = rf"@ \S*test_describe.py:{decode.__code__.co_firstlineno}"
    assert re.fullmatch(
        rf"""IterDataset, from its source to its end:
  RangeMapDataset\(start=0, stop=100, step=1\)
  ShuffleMapDataset\(seed=3\)
  MapMapDataset\(transform=decode {here}\)
  SliceMapDataset\[1:100:2\]
  RepeatMapDataset\(num_epochs=2, reseed_each_epoch=True\)
  BatchMapDataset\(batch_size=4, drop_remainder=False\)
  PrefetchIterDataset\(read_options=ReadOptions\(.*=2, .*=8\), allow_nones=False\)
  FilterIterDataset\(transform=bool\)""",
        repr(ds),
    )
    assert str(ds) == "FilterIterDataset(transform=bool)"
    assert repr(MapDataset.range(3)) == "MapDataset: RangeMapDataset(start=0, stop=3, step=1)"


def test_every_stage_shows_itself():
    for name in STAGES:
        ds = make(grain, name)
        text = ds._stages_shown()  # `repr`, except of classes that users define
        described = str(ds.describe())
        assert "0x" not in text + described, name  # no addresses, which change from run to run
        assert str(ds).partition("(")[0] in text, name
        assert len(text.split("\n")) < 60, name
        read = str(ds.describe(read_elements=True))
        assert "not known before one is computed" not in read, (name, read)


def test_parts_with_the_same_stages_are_shown_once():
    parts = [MapDataset.range(n, n + 9).map(decode).to_iter_dataset() for n in range(100)]
    ds = IterDataset.mix([*parts, MapDataset.range(3).to_iter_dataset().map(decode)])
    text = repr(ds.batch(2))
    assert "part 0, and 99 more with the same stages:" in text
    assert "part 100:" in text
    assert "MixedIterDataset(parts=101, " in text
    assert len(text.split("\n")) < 15
    assert text.split("\n")[-1] == "  BatchIterDataset(batch_size=2, drop_remainder=False)"


@pytest.mark.parametrize("sequential", [False, True])
def test_deep_pipelines_are_shown_without_their_middle(sequential):
    ds = MapDataset.range(10)
    ds = ds.to_iter_dataset() if sequential else ds
    for _ in range(1000):
        ds = ds.map(str).map(int)
    began = time.perf_counter()
    text, described = repr(ds), str(ds.describe())
    assert time.perf_counter() - began < 20  # 0.02 s on an idle machine
    assert len(text.split("\n")) < 30
    assert re.search(r"\.\.\. [\d,]+ more stages: \d+ Map\w+Dataset \.\.\.", text)
    assert len(described.split("\n")) < 90
    nested = MapDataset.range(4)
    for _ in range(50):
        nested = MapDataset.mix([nested, MapDataset.range(4)])
    assert len(repr(nested.map(str)).split("\n")) < 60


def test_wide_pipelines_are_shown_quickly():
    ds = MapDataset.concatenate([MapDataset.range(3) for _ in range(20_000)]).map(str)
    began = time.perf_counter()
    text = repr(ds)
    assert time.perf_counter() - began < 20
    assert "19,000 more parts" in text
    assert len(str(ds.describe()).split("\n")) < 30


def test_a_mix_of_each_kind_of_part_is_bounded():
    parts = [MapDataset.range(5) for _ in range(30)]
    for number in range(30):
        for _ in range(number):
            parts[number] = parts[number].map(str).map(int)
    assert "parts with 22 other lists of stages" in repr(MapDataset.mix(parts).map(str))


# --- describe -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda ds: ds.map(decode), 10),
        (lambda ds: ds.batch(4), 3),
        (lambda ds: ds.batch(4, drop_remainder=True), 2),
        (lambda ds: LimitIterDataset(ds, 4), 4),
        (lambda ds: LimitIterDataset(ds, 40), 10),
        (lambda ds: RepeatIterDataset(ds, 3), 30),
        (lambda ds: ZipIterDataset([ds, LimitIterDataset(ds, 4)], strict=False), 4),
        (lambda ds: ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2).seed(1), 10),
        (lambda ds: ds.map(str).mp_prefetch(grain.MultiprocessingOptions(num_workers=3)), 10),
        (lambda ds: ds.batch(4).mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), 3),
    ],
)
def test_lengths_are_those_of_the_elements(make, length):
    ds = make(MapDataset.range(10).to_iter_dataset())
    assert f"{length} elements" in facts(ds, str(ds).partition("(")[0])
    assert len(list(ds)) == length


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda ds: ds.filter(bool), "at most 10 elements"),
        (RepeatIterDataset, "endlessly many elements"),
        (lambda ds: LimitIterDataset(ds.filter(bool), 4), "at most 4 elements"),
        (lambda ds: IterDataset.mix([ds, ds]), "an unknown number of elements"),
        (
            lambda ds: ds.batch(4).mp_prefetch(grain.MultiprocessingOptions(num_workers=3)),
            "an unknown number of elements",
        ),
    ],
)
def test_lengths_that_are_not_known_are_not_claimed(make, text):
    ds = make(MapDataset.range(10).to_iter_dataset())
    assert text in facts(ds, str(ds).partition("(")[0].partition("[")[0])


def test_endless_and_dropping_random_access_stages():
    ds = MapDataset.range(10).filter(bool).repeat().to_iter_dataset()
    assert facts(ds, "RepeatMapDataset").startswith("endlessly many elements, random access")
    read = MapDataset.range(10).filter(bool).to_iter_dataset()
    assert facts(read, "PrefetchIterDataset").startswith("at most 10 elements, sequential")


def test_where_stages_run():
    def ds(options):
        return MapDataset.range(10).shuffle(1).map(decode).to_iter_dataset(options)

    shuffled = "random access; computed in Rust, on up to 4 threads"
    assert shuffled in facts(ds(ReadOptions(num_threads=4)), "ShuffleMapDataset")
    mapped = facts(ds(ReadOptions(num_threads=1)).map(str), "MapMapDataset")
    assert "computed in Python, on up to 1 thread\n" in mapped
    in_caller = facts(ds(ReadOptions(0, 0)), "MapMapDataset")
    assert "computed in Python, on the caller's thread" in in_caller
    in_workers = facts(ds(ReadOptions(num_workers=3)), "MapMapDataset")
    assert "computed in Python, in 3 worker processes" in in_workers
    prefetched = ThreadPrefetchIterDataset(ds(ReadOptions(0, 0)).map(str), prefetch_buffer_size=2)
    assert "on a thread of its own" in facts(prefetched, "MapIterDataset")
    parts = ds(None).batch(2).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    assert "computed in Rust, in each of 2 worker processes" in facts(parts, "BatchIterDataset")
    expected = "computed in Python, on up to 16 threads in each of 2 worker processes"
    assert expected in facts(parts, "MapMapDataset")
    custom = ds(None).batch(2, batch_fn=list)
    assert "computed in Python" in facts(custom, "BatchIterDataset")


def test_element_specs_where_they_are_known_or_asked_for():
    calls = []

    def called(x):
        calls.append(x)
        return {"x": np.zeros((2, x + 1), np.int16), "y": "text"}

    ds = MapDataset.range(10).map(called).to_iter_dataset().batch(2)
    assert "elements: int64[]" in facts(ds, "RangeMapDataset")
    assert "elements: not known before one is computed" in facts(ds, "MapMapDataset")
    assert not calls
    read = facts(ds, "MapMapDataset", read_elements=True)
    assert "elements: {'x': int16[2, 1], 'y': str}" in read
    assert set(calls) <= {0, 1}
    failing = MapDataset.range(10).map(lambda x: x // 0)
    assert "none, as ZeroDivisionError was raised" in facts(failing, "MapMap", read_elements=True)
    empty = MapDataset.range(3).filter(lambda _: False).map(str)
    assert "there are no elements" in facts(empty, "MapMap", read_elements=True)


def test_reading_elements_starts_no_worker():
    ds = MapDataset.range(10).map(decode).to_iter_dataset()
    ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)).map(dict)
    before = {worker.pid for worker in workers()}  # of other tests, which may still be ending
    assert "{'x': float32[3]}" in facts(ds, "MapIterDataset", read_elements=True)
    assert {worker.pid for worker in workers()} <= before


def test_what_a_state_holds():
    ds = MapDataset.range(100).map(lambda x: {"x": np.full(2, x)}).to_iter_dataset()
    ds = LimitIterDataset(
        FirstFitPackIterDataset(ds, length_struct={"x": 8}, num_packing_bins=2), 5
    )
    assert lines(ds)[-2] == (
        "State: the next index (stage 3); the row of a batch of bins, which is packed again "
        "(stage 4); the number of elements passed (stage 5)."
    )
    with iter(ds) as iterator:
        next(iterator)
        state = iterator.get_state()
    assert set(state) == {"parent", "count_elements_read"}
    assert set(state["parent"]) == {"parent", "next_row", "counter"}
    assert lines(MapDataset.range(3))[-2] == "State of an iterator: the next index."


def test_interleaved_datasets_are_described():
    parts = [MapDataset.range(n, n + 4).map(decode) for n in range(30)]
    ds = InterleaveIterDataset(parts, cycle_length=4)
    assert "part 0, and 29 more with the same stages" in repr(ds)
    assert "4 elements, random access; computed in Python, on the caller's thread" in facts(
        ds, "MapMapDataset"
    )
    lazy = InterleaveIterDataset(MapDataset.range(3).map(MapDataset.range), cycle_length=2)
    assert "each dataset is an element of:" in repr(lazy)
    assert "3 elements, random access" in facts(lazy, "RangeMapDataset")


def test_users_datasets_and_sources_are_named_and_not_asked():
    class Twice(IterDataset):
        def __iter__(self):
            return iter([x for x in self._parent for _ in range(2)])

    class Source:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return index

        def __repr__(self):
            raise AssertionError("may print millions of records")

    ds = Twice(MapDataset.source(Source()).to_iter_dataset()).map(str)
    assert "SourceMapDataset(source=Source)\n" in repr(ds)
    assert "  Twice\n" in repr(ds)
    assert "what `get_state` returns (stage 3)" in str(ds.describe())
    assert "Twice" in str(Twice(MapDataset.range(3).to_iter_dataset()).describe())
    listed = repr(MapDataset.source(list(range(100_000))))
    assert listed == "MapDataset: SourceMapDataset(source=list)"


def test_long_parameters_are_cut():
    names = {f"feature_{n}": 8 for n in range(1000)}
    ds = MapDataset.range(3).map(lambda x: dict.fromkeys(names, np.full(2, x))).to_iter_dataset()
    text = repr(FirstFitPackIterDataset(ds, length_struct=names, num_packing_bins=2))
    assert "'feature_0': 8" in text
    assert "... 1,000 in all" in text
    assert max(map(len, text.split("\n"))) < 400


def test_a_loader_shows_itself():
    class Double(grain.transforms.Map):
        def map(self, x):
            return 2 * x

    loader = grain.DataLoader(
        data_source=range(20),
        sampler=grain.samplers.IndexSampler(20, shuffle=True, seed=1, num_epochs=2),
        operations=[Double(), grain.transforms.Batch(4)],
    )
    assert repr(loader).startswith("DataLoader over range, sampled by IndexSampler(num_records=20,")
    assert "MapIterDataset(transform=Double)\n" in repr(loader)
    assert "elements: int64[4]" in str(loader.describe(read_elements=True))
    assert "10 elements, sequential" in str(loader.describe())


def test_states_of_loaders_keep_the_short_form_of_datasets():
    """States written before datasets had another `repr` must still be accepted."""
    for ds, text in [
        (MapDataset.range(10).shuffle(1), "<grainmill._dataset.map_dataset.ShuffleMapDataset>"),
        (
            MapDataset.mix([MapDataset.range(4)] * 2),
            "MixedMapDataset(parent_lengths=[4, 4], "
            "selection_map=SelectionWithProportionsMap(proportions=(1, 1), length=8))",
        ),
    ]:
        sampler = grain.samplers.SequentialSampler(8, grain.sharding.NoSharding())
        loader = grain.DataLoader(data_source=ds, sampler=sampler, operations=[])
        with iter(loader) as iterator:
            next(iterator)
            assert f'"data_source": "{text}"'.encode() in iterator.get_state()


# --- in a notebook ----------------------------------------------------------------------------


class Parser(html.parser.HTMLParser):
    """Checks that tags are balanced, and collects the text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert not {name for name, _ in attrs} - {"style"}  # nothing from elsewhere, no script
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_datasets_are_drawn_in_notebooks():
    parts = [MapDataset.range(5).map(lambda x: x).to_iter_dataset() for _ in range(3)]
    ds = IterDataset.mix(parts).batch(2)
    text = Parser(ds._repr_html_()).text
    assert any("MapMapDataset(transform=<lambda>" in part for part in text)  # it was escaped
    assert text.index("part 0, and 2 more with the same stages:") < text.index("↓")
    described = Parser(ds.describe()._repr_html_()).text
    assert "5 elements, random access; computed in Python, on up to 16 threads" in described
    assert described[-1].startswith("State: ")
    loader = grain.DataLoader(
        data_source=range(9), sampler=grain.samplers.SequentialSampler(9), shard_options=None
    )
    assert Parser(loader._repr_html_()).text[0].startswith("DataLoader over range")


def test_showing_changes_nothing():
    ds = MapDataset.range(50).map(decode).to_iter_dataset().batch(4)
    before = len(list(ds))
    assert ds.describe(read_elements=True)._repr_html_() != ds._repr_html_()
    assert len(list(ds)) == before
    assert str(ds.describe()) == repr(ds.describe())


# --- what is said of a stage is what runs ---------------------------------------------------------


def described_length(ds):
    """The text of the number of elements of the last stage."""
    fact = next(line for line in reversed(lines(ds)) if " elements, " in line)
    return fact.strip().partition(" elements, ")[0]


@pytest.mark.parametrize("name", STAGES)
def test_the_number_of_elements_is_not_exceeded(name):
    ds = make(grain, name)
    text = described_length(ds)
    if text == "an unknown number of" or name == "read_map_drops":  # any function may return `None`
        return
    with iter(ds) as iterator:
        count = sum(1 for _ in iterator)
    number = int(text.removeprefix("at most ").replace(",", ""))
    assert count <= number if text.startswith("at most ") else count == number


@pytest.mark.parametrize("name", STAGES)
def test_what_a_state_has_of_the_last_stage_is_said(name):
    """A state that is more than the parent's is that of a stage which says so."""
    ds = make(grain, name)
    node = node_of(ds)
    if not isinstance(node, SequentialNode) or len(node.parents) != 1:
        return
    if isinstance(node, UserDefined | MultiprocessPrefetch) or isinstance(node.parent, MapNode):
        return
    opened, parent = open_stage(node), open_stage(node.parent)
    try:
        is_parents = opened.state() == parent.state()
    finally:
        opened.close()
        parent.close()
    assert is_parents == (not node.saves), name


def test_what_reads_files_is_the_engine(tmp_path):
    records = [b'{"x": 1}', b'{"x": 2}']
    (tmp_path / "a.tfrecord").write_bytes(tfrecord(records))
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(records))
    with ArrayRecordWriter(str(tmp_path / "a.array_record")) as writer:
        for record in records:
            writer.write(record)
    sources = grain.sources
    of_files = [
        sources.ArrayRecordDataSource(str(tmp_path / "a.array_record")),
        sources.TFRecordDataSource(str(tmp_path / "a.tfrecord")),
        sources.JsonLinesDataSource(str(tmp_path / "a.jsonl")),
    ]
    for source in of_files:
        ds = MapDataset.source(source)
        assert "computed in Rust" in facts(ds, "SourceMapDataset"), source
        # Threads run functions of Python, of which there are none.
        read = facts(ds.shuffle(seed=1).batch(2).to_iter_dataset(), "SourceMapDataset")
        assert "computed in Rust, on the caller's thread" in read, source

    class Own(sources.ArrayRecordDataSource):
        def __getitem__(self, index):
            return super().__getitem__(index)

    ds = MapDataset.source(Own(str(tmp_path / "a.array_record")))
    assert "computed in Python" in facts(ds, "SourceMapDataset")
    assert "computed in Python" in facts(MapDataset.source([1, 2]), "SourceMapDataset")

    ds = experimental.TFRecordIterDataset(str(tmp_path / "a.tfrecord"))
    assert "computed in Rust" in str(ds.describe())

    class OwnRecords(experimental.TFRecordIterDataset):
        def __iter__(self):
            return super().__iter__()

    assert "computed in Python" in str(OwnRecords(str(tmp_path / "a.tfrecord")).describe())


def test_repr_of_a_mixture_is_grains():
    ds = MapDataset.mix([MapDataset.range(3), MapDataset.range(5)], [1, 2])
    assert repr(ds) == (
        "MixedMapDataset(parent_lengths=[3, 5], selection_map="
        "SelectionWithProportionsMap(proportions=(100, 200), length=7))"
    )
    assert "RangeMapDataset(start=0, stop=3, step=1)" in str(ds.describe())
    assert "RangeMapDataset(start=0, stop=3, step=1)" in ds._repr_html_()
