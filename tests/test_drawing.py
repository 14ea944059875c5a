"""Pipelines drawn as text, SVG and HTML; the execution summary; metrics and traces."""

import contextlib
import dataclasses
import functools
import html.parser
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter

import effort
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grainmill as grain
from grainmill import MapDataset, ReadOptions
from grainmill._dataset.iter_dataset import node_of
from grainmill._dataset.views import drawing, observers
from grainmill._dataset.views.statistics import report_on
from grainmill._dataset.views.titles import name_and_arguments
from grainmill._stats.element_specs import spec_of
from grainmill._stats.jax_trace import trace_annotation
from grainmill._stats.meters import Recorder
from grainmill._stats.recorded import Recorded
from grainmill._stats.summary import duration, size, summary_text, table


@contextlib.contextmanager
def setting(name, value, default):
    grain.config.update(name, value)
    try:
        yield
    finally:
        grain.config.update(name, default)


def drawing_to(directory):
    return setting("py_dataset_visualization_output_dir", directory, None)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "grainmill"]


class Slow(grain.transforms.Map):
    def map(self, element):
        return {"x": np.full(100, element, np.float32)}


def pipeline():
    read = ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return (
        MapDataset.source([1, 2, 3, 4]).shuffle(seed=1).map(Slow()).to_iter_dataset(read).batch(2)
    )


DRAWN = """\
Grain Dataset graph:

SourceMapDataset(source=list)
  ││
  ││\N{SPACE}\N{SPACE}
  ││
  \u2572\u2571
'int[]'

  ││
  ││  ShuffleMapDataset
  ││
  \u2572\u2571
'int[]'

  ││
  ││  MapMapDataset(transform=Slow)
  ││
  \u2572\u2571
{'x': 'float32[100]'}

  ││
  ││  PrefetchDatasetIterator(read_options=ReadOptions(num_threads=2, prefetch_buffer_size=4), \
allow_nones=False)
  ││
  \u2572\u2571
{'x': 'float32[100]'}

  ││
  ││  BatchDatasetIterator(batch_size=2, drop_remainder=False)
  ││
  \u2572\u2571
{'x': 'float32[2, 100]'}
"""


def test_pipeline_is_drawn_to_the_log_once_at_the_first_element(caplog):
    caplog.set_level(logging.INFO, "grainmill")
    with drawing_to(""):
        iterator = iter(pipeline())
        assert not messages(caplog)
        assert len(list(iterator)) == 2
        assert messages(caplog) == [DRAWN]
        iterator.set_state({"next_index": 0})
        next(iterator)
    assert len(messages(caplog)) == 1


def test_nothing_is_drawn_by_default(caplog):
    caplog.set_level(logging.INFO, "grainmill")
    list(pipeline())
    assert not messages(caplog)


def test_lazy_functions_are_drawn_with_their_specs(caplog):
    caplog.set_level(logging.INFO, "grainmill")
    with drawing_to(""):
        next(iter(MapDataset.range(9).to_iter_dataset().map(str).filter(len).batch(2)))
    (text,) = messages(caplog)
    specs = [block.splitlines()[-1] for block in text.strip().split("\n\n")[1:]]
    assert specs == ["'int[]'", "'int[]'", "'str[]'", "'str[]'", "'<U1[2]'"]


def test_lazy_functions_of_blocks_are_drawn_with_their_specs(caplog):
    class Texts(grain.transforms.Map):
        def map(self, element):
            return str(element)

        def map_block(self, elements):
            return list(map(str, elements))

    caplog.set_level(logging.INFO, "grainmill")
    with drawing_to(""):
        next(iter(MapDataset.range(9).to_iter_dataset().map(Texts()).map(float).batch(2)))
    (text,) = messages(caplog)
    specs = [block.splitlines()[-1] for block in text.strip().split("\n\n")[1:]]
    assert specs == ["'int[]'", "'int[]'", "'str[]'", "'float[]'", "'float64[2]'"]


def test_only_the_first_of_several_parents_is_drawn(caplog):
    caplog.set_level(logging.INFO, "grainmill")
    with drawing_to(""):
        next(iter(grain.experimental.ZipIterDataset([pipeline(), pipeline()])))
    (text,) = messages(caplog)
    warning = "WARNING: Detected multi-parent datasets. Only displaying the first parent.\n\n"
    assert text.startswith(f"Grain Dataset graph:\n\n{warning}SourceMapDataset")
    assert text.count("ShuffleMapDataset") == 1


@pytest.mark.parametrize(
    ("element", "spec"),
    [
        (1, "int[]"),
        (b"x", "bytes[]"),
        ([1, 2], "list<int>[2]"),
        ((), "tuple<>[0]"),
        ([[1], [1, 2]], "list<list>[unknown shape]"),
        ([1, "x"], ["int[]", "str[]"]),
        ({"a": np.zeros((2, 3), np.float32), "b": None}, {"a": "float32[2, 3]", "b": None}),
    ],
)
def test_specs_of_elements(element, spec):
    assert spec_of(element) == spec


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.references = []

    def handle_starttag(self, _tag, attrs):
        self.references += [value for name, value in attrs if name in {"href", "src"}]


def test_pipeline_is_drawn_to_files(tmp_path):
    folder = tmp_path / "new" / "folder"
    with drawing_to(str(folder)):
        mixed = grain.experimental.ZipIterDataset([pipeline(), pipeline()])
        assert len(list(mixed)) == 2
    svg, page = sorted(folder.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (svg.suffix, page.suffix) == (".svg", ".html")
    root = ET.fromstring(svg.read_text("utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}rect")
    assert len(boxes) == 1 + 2 * 5
    arrows = root.findall(f"{space}path")
    assert len(arrows) == 10
    text = " ".join(node.text for node in root.findall(f"{space}text"))
    assert text.count("MapMapDataset transform=Slow {x: float32[100]}") == 2
    assert text.count("ShuffleMapDataset seed=1") == 2
    assert "float32[2, 100]" in text
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == len(boxes)
    parser = Page()
    parser.feed(page.read_text("utf-8"))
    assert not parser.references
    assert svg.read_text("utf-8") in page.read_text("utf-8")


@given(st.lists(st.text("abc,=()_-", min_size=1, max_size=150), max_size=30).map(" ".join))
def test_lines_break_no_word(text):
    lines = drawing.wrapped(text)
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(len(line) <= drawing.MAX_CHARS or len(line.split()) == 1 for line in lines)


def named(name):
    """A function with this name."""

    def function(x):
        return x

    function.__name__ = name
    return function


NAMES = st.text("ab_", min_size=1, max_size=90)
SOURCES = st.integers(1, 9).map(MapDataset.range)
READ = st.builds(
    lambda ds, name, is_read: ds.map(named(name)).shuffle(seed=1) if is_read else ds,
    SOURCES,
    NAMES,
    st.booleans(),
)


def _joined(parts):
    """Map datasets that read several, some of them more than once."""
    several = st.lists(parts, min_size=1, max_size=4) | st.builds(
        lambda part, count: [part] * count, parts, st.integers(1, 100)
    )
    return st.one_of(
        several.map(MapDataset.mix),
        several.map(MapDataset.concatenate),
        several.map(lambda parts: grain.experimental.ZipMapDataset([part[:1] for part in parts])),
        st.builds(lambda part, name: part.map(named(name)).repeat(2), parts, NAMES),
    )


MAPS = st.recursive(READ, _joined, max_leaves=12)
ITERS = st.one_of(
    MAPS.map(lambda ds: ds.to_iter_dataset()),
    st.lists(MAPS.map(lambda ds: ds.to_iter_dataset()), min_size=1, max_size=100).map(
        grain.IterDataset.mix
    ),
    st.lists(MAPS.map(lambda ds: ds.to_iter_dataset()), min_size=1, max_size=9).map(
        lambda parts: grain.experimental.InterleaveIterDataset(parts, cycle_length=2)
    ),
)


def laid_out(ds, specs=None):
    return drawing.layout(Recorded(node_of(ds), Recorder()).stages, specs or {})


def is_between(value, low, high):
    return low < value < high


def overlap(first, second):
    """Whether the insides of two rectangles (left, top, right, bottom) have a point in common."""
    across = first[0] < second[2] and second[0] < first[2]
    return across and first[1] < second[3] and second[1] < first[3]


def segments(corners):
    """The straight parts of an arrow, as rectangles that may have no width or no height."""
    for (x, y), (to_x, to_y) in itertools.pairwise(corners):
        assert x == to_x or y == to_y
        yield min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y)


def check_layout(found):
    """Nothing overlaps, crosses or lies outside, and texts lie in their boxes."""
    rectangles = [(b.x, b.y, b.x + b.width, b.y + b.height) for b in found.boxes]
    for left, top, right, bottom in rectangles:
        assert left >= 0 <= top
        assert right <= found.width
        assert bottom <= found.height
    for box in found.boxes:
        assert len(box.lines) * 16 < box.height
        assert max(len(text) for _, text in box.lines) * 7.23 < box.width - drawing.PADDING
    for one, other in itertools.combinations(rectangles, 2):
        assert not overlap(one, other)
    drawn = [(tuple(arrow[-1]), list(segments(arrow))) for arrow in found.arrows]
    for _, parts in drawn:
        for part in parts:
            assert not any(overlap(part, rectangle) for rectangle in rectangles)
            assert part[0] >= 0 <= part[1]
            assert part[2] <= found.width
            assert part[3] <= found.height
    # Arrows to the same box end as one; others have no point in common.
    for (end, parts), (other_end, other_parts) in itertools.combinations(drawn, 2):
        if end != other_end:
            for (x, y, to_x, to_y), other in itertools.product(parts, other_parts):
                assert not overlap((x - 1, y - 1, to_x + 1, to_y + 1), other)


@settings(max_examples=effort.cases(60, 2000))
@given(ITERS)
def test_boxes_do_not_overlap_and_arrows_do_not_cross(ds):
    found = laid_out(ds)
    check_layout(found)
    assert len(found.arrows) == len(found.boxes) - 1
    stages = Recorded(node_of(ds), Recorder()).stages
    drawn = [box.lines[0][1] for box in found.boxes if box.is_stage]
    assert len(drawn) <= len(stages)
    if all(len(stage.inputs) <= 4 for stage in stages):  # none is left out
        assert Counter(drawn) == Counter(name_and_arguments(stage.node)[0] for stage in stages)


def test_what_is_wrong_with_a_drawing_is_found():
    for change in (
        lambda box: dataclasses.replace(box, place=(box.place[0] - 200, *box.place[1:])),
        lambda box: dataclasses.replace(box, place=(box.place[0], box.place[1] + 40, box.place[2])),
        lambda box: dataclasses.replace(box, place=(-100, *box.place[1:])),
    ):
        found = laid_out(MapDataset.mix([MapDataset.range(3), MapDataset.range(4)]))
        found.boxes[2] = change(found.boxes[2])
        with pytest.raises(AssertionError):
            check_layout(found)


def test_of_many_branches_with_the_same_stages_some_are_drawn():
    parts = [MapDataset.range(9).shuffle(seed=seed) for seed in range(100)]
    parts.insert(50, MapDataset.range(9).map(named("other")))
    found = laid_out(MapDataset.mix(parts))
    texts = [text for box in found.boxes for _, text in box.lines]
    assert [text for text in texts if text.startswith("seed=")] == ["seed=0", "seed=1", "seed=2"]
    assert "and 97 more with the same stages" in texts
    assert any("transform=other" in text for text in texts)


def test_a_stage_that_several_read_is_drawn_once():
    shared = MapDataset.range(9).map(named("shared"))
    for _ in range(30):  # as a tree, it would have a billion stages
        shared = MapDataset.concatenate([shared, shared])
    found = laid_out(shared)
    check_layout(found)
    assert sum(box.is_stage for box in found.boxes) == 32
    assert ("note", "stage 31") not in found.boxes[0].lines
    texts = [text for box in found.boxes for _, text in box.lines]
    assert texts.count("MapMapDataset, stage 30, again") == 1
    assert texts.count("stage 30") == 1


def test_long_plans_are_drawn():
    ds = MapDataset.range(9)
    for number in range(3000):
        ds = ds.repeat(1) if number % 2 else MapDataset.concatenate([ds, MapDataset.range(1)])
    assert len(laid_out(ds).boxes) == 4501


def test_titles_can_be_read():
    class Named(grain.transforms.RandomMap):
        def random_map(self, x, rng):  # noqa: ARG002
            return x

    class Object:
        def __call__(self, x):
            return x

    functions = {
        "transform=test @": named("test"),
        "transform=partial(test @": functools.partial(named("test"), y=1),
        "transform=partial(Object, ...)": functools.partial(Object(), y=1),
        "transform=<lambda> @ ...": lambda x: x,
        "transform=Object": Object(),
        "transform=len": len,
    }
    for expected, function in functions.items():
        texts = laid_out(MapDataset.range(3).map(function)).boxes[0].lines
        assert texts[1][1].startswith(expected)
        assert "0x" not in str(texts)
    ds = MapDataset.range(3).seed(1).random_map(Named())
    assert [text for _, text in laid_out(ds).boxes[0].lines][1] == "transform=Named"
    assert [text for _, text in laid_out(ds).boxes[0].lines][2].startswith("seed=")


def drawn_specs(folder, ds):
    """The specs in the drawing of a dataset, from its output on, once an element was taken."""
    with drawing_to(str(folder)), contextlib.closing(iter(ds)) as iterator:
        next(iterator)
    (svg,) = folder.glob("*.svg")
    texts = ET.fromstring(svg.read_text("utf-8")).iterfind("{http://www.w3.org/2000/svg}text")
    boxes = []
    for text in texts:
        kind = text.get("class")
        boxes += [[]] if kind == "name" else []
        boxes[-1] += [text.text] if kind in {"name", "spec"} else []
    return {box[0]: " ".join(map(str.strip, box[1:])) for box in boxes}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["FirstFitPackIterDataset", "ConcatThenSplitIterDataset"])
def test_specs_after_packing_are_drawn(tmp_path, kind, batched):
    ds = MapDataset.range(50).map(lambda n: {"a": np.arange(n % 7)}).to_iter_dataset()
    more = {"num_packing_bins": 2} if kind.startswith("First") else {}
    ds = getattr(grain.experimental, kind)(ds, length_struct={"a": 8}, **more)
    options = grain.MultiprocessingOptions(num_workers=1)
    ds = ds.batch(2).mp_prefetch(options).map(dict) if batched else ds
    specs = drawn_specs(tmp_path, ds)
    row = "{a: int64[8], a_positions: int32[8], a_segment_ids: int32[8]}"
    assert specs[kind] == row
    if batched:
        batch = row.replace("[", "[2, ")
        names = ("Batch", "MultiprocessPrefetch", "Map")
        assert [specs[f"{name}IterDataset"] for name in names] == [batch] * 3


def test_specs_of_interleaved_datasets_are_drawn(tmp_path):
    datasets = [MapDataset.range(9).map(lambda n: np.zeros(n + 1)).to_iter_dataset()] * 3
    ds = grain.experimental.InterleaveIterDataset(datasets, cycle_length=2)
    specs = drawn_specs(tmp_path, ds)
    assert specs["InterleaveIterDataset"] == specs["PrefetchIterDataset"] == "float64[1]"


def test_names_are_escaped_in_drawings(tmp_path):
    with drawing_to(str(tmp_path)):
        next(iter(MapDataset.range(3).map(lambda x: x).to_iter_dataset()))
    (svg,) = tmp_path.glob("*.svg")
    assert "&lt;lambda&gt;" in svg.read_text("utf-8")
    ET.fromstring(svg.read_text("utf-8"))


# --- the execution summary --------------------------------------------------------------------

SUMMARY = """\
|---------------------------------------------------------|
| id | name                           | percent wait time |
|---------------------------------------------------------|
| 1  | MapMapDataset(transform=Slow)  | 88.67%            |
|---------------------------------------------------------|
| 0  | PrefetchDatasetIterator(read_o | N/A               |
|    | ptions=ReadOptions(num_threads |                   |
|    | =2, prefetch_buffer_size=4), a |                   |
|    | llow_nones=False)              |                   |
|---------------------------------------------------------|"""


def test_table_has_the_form_of_grains():
    read = ReadOptions(num_threads=2, prefetch_buffer_size=4)
    rows = [
        ("id", "name", "percent wait time"),
        ("1", "MapMapDataset(transform=Slow)", "88.67%"),
        ("0", f"PrefetchDatasetIterator(read_options={read}, allow_nones=False)", "N/A"),
    ]
    assert table(rows) == SUMMARY


def test_long_cells_are_cut_after_five_lines_and_full_ones_get_another():
    lines = table([("x" * 200,)]).splitlines()
    assert len(lines) == 2 + 5
    assert len(table([("x" * 30,)]).splitlines()) == 2 + 2
    assert len(table([("x" * 29,)]).splitlines()) == 2 + 1


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (999, "999ns"),
        (1000, "1.00us"),
        (999999, "1000.00us"),
        (1230000, "1.23ms"),
        (1500000000, "1.50s"),
    ],
)
def test_durations_have_a_unit(nanoseconds, text):
    assert duration(nanoseconds) == text


def test_sizes_have_a_unit():
    assert [size(n) for n in (0, 1600, 1 << 20)] == ["0 bytes", "1.56 KiB", "1.00 MiB"]


def test_summary_has_grains_columns_and_sorts_by_waiting():
    iterator = iter(MapDataset.range(50).map(lambda x: time.sleep(0.002) or x).to_iter_dataset())
    list(iterator)
    text = summary_text(report_on(iterator))
    head, note, _, rows = text.split("\n\n")[0], text.split("\n\n")[1], None, text.split("\n\n")[2]
    assert head == "Grain Dataset Execution Summary:"
    assert note.startswith(
        "NOTE: Before analyzing the `total_processing_time` for a node, please check the `percent "
        "wait time` column"
    )
    lines = [line for line in rows.splitlines() if not line.startswith("|-")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "id",
        "name",
        "inputs",
        "percent wait time",
        "total processing time",
        "min processing time",
        "max processing time",
        "avg processing time",
        "num produced elements",
        "memory usage",
    ]
    assert lines[1].split("|")[2].strip().startswith("MapMapDataset")
    assert len({len(line) for line in rows.splitlines()}) == 1


class SleepingSource:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        time.sleep(0.002)
        return index


@pytest.mark.parametrize("kind", ["read", "mp_prefetch"])
def test_drawing_shows_elements_of_stages_in_worker_processes(caplog, kind):
    caplog.set_level(logging.INFO, "grainmill")
    ds = MapDataset.source([1, 2, 3, 4]).map(Slow()).map(lambda x: x["x"])
    if kind == "read":
        ds = ds.to_iter_dataset(ReadOptions(num_workers=1))
    else:
        ds = ds.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    with drawing_to(""), contextlib.closing(iter(ds)) as iterator:
        next(iterator)
    (drawn,) = messages(caplog)
    assert "Slow" in drawn
    specs = [line for line in drawn.splitlines() if "float32" in line]
    assert specs[:2] == ["{'x': 'float32[100]'}", "'float32[100]'"]


def test_summary_warns_of_a_slow_source():
    iterator = iter(MapDataset.source(SleepingSource()).map(lambda x: x).to_iter_dataset())
    list(iterator)
    assert "\nWARNING: Your source is likely the bottleneck." in summary_text(report_on(iterator))


def test_summary_is_logged_while_elements_are_taken(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "grainmill")
    monkeypatch.setattr(observers, "SUMMARY_INTERVAL_S", 0.05)
    read = ReadOptions(num_workers=1)
    with setting("py_debug_mode", value=True, default=False), drawing_to(""):
        iterator = iter(MapDataset.range(1000).map(lambda x: x).to_iter_dataset(read))
        deadline = time.monotonic() + 60
        while not messages(caplog) and time.monotonic() < deadline:
            next(iterator)
            time.sleep(0.01)
        iterator.close()
    first = messages(caplog)[0]
    assert first.startswith("Grain Dataset Execution Summary:\n\nNOTE")
    assert "MapMapDataset" in first
    assert not any("graph" in message for message in messages(caplog))


# --- metrics and traces -----------------------------------------------------------------------

METRICS = """
import os, socket, sys, urllib.request
import grainmill as grain
from grainmill.array_record import ArrayRecordWriter
path = sys.argv[1]
with ArrayRecordWriter(path, "group_size:1,uncompressed") as writer:
    for number in range(50):
        writer.write(bytes(1000))
if sys.argv[2] == "import":
    import prometheus_client
def run():
    source = grain.sources.ArrayRecordDataSource(path)
    iterator = iter(grain.MapDataset.source(source).to_iter_dataset())
    assert len(list(iterator)) == 50
    return iterator
first = run()
del first
second = run()
if sys.argv[2] == "none":
    assert "prometheus_client" not in sys.modules
elif sys.argv[2] == "import":
    print(prometheus_client.generate_latest().decode())
else:
    port = os.environ["GRAINMILL_PROMETHEUS_PORT"]
    print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
"""


def run_metrics(tmp_path, how, **environment):
    command = [sys.executable, "-c", METRICS, str(tmp_path / "r.array_record"), how]
    env = {name: value for name, value in os.environ.items() if "PROMETHEUS" not in name}
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def values(text):
    lines = [line.split() for line in text.splitlines() if line.startswith("grain_")]
    return {re.sub(r"^grain_python_|{.*}", "", name): float(value) for name, value in lines}


def test_metrics_are_registered_where_the_program_uses_them(tmp_path):
    text = run_metrics(tmp_path, "import")
    # Grain has these names and labels, too.
    assert 'grain_python_data_sources_bytes_read_total{source="ArrayRecordDataSource"}' in text
    assert 'grain_python_dataset_source_read_time_ns_sum{source="ArrayRecordDataSource"}' in text
    metrics = values(text)
    assert metrics["data_sources_bytes_read_total"] >= 2 * 50 * 1000
    assert metrics["data_sources_reads_total"] >= 2
    assert metrics["dataset_source_read_time_ns_count"] > 0
    assert metrics["dataset_source_read_time_ns_sum"] > 0
    assert metrics["dataset_prefetch_depth"] == 0


def test_metrics_are_served_where_the_environment_asks_for_it(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY": "true",
        "GRAINMILL_PROMETHEUS_PORT": str(port),
    }
    metrics = values(run_metrics(tmp_path, "port", **environment))
    assert metrics["data_sources_bytes_read_total"] >= 2 * 50 * 1000


ADDRESS = """
import socket, sys
import grainmill as grain
import prometheus_client
started = []
prometheus_client.start_http_server = lambda *given: started.append(given)
next(iter(grain.MapDataset.range(3).to_iter_dataset()))
print(*started[0])
"""


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::1"])
def test_metrics_are_served_to_this_machine_unless_an_address_is_given(address):
    env = os.environ | {
        "ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY": "true",
        "GRAINMILL_PROMETHEUS_PORT": "7",
        "GRAINMILL_PROMETHEUS_ADDRESS": address,
    }
    command = [sys.executable, "-c", ADDRESS]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["7", address or "127.0.0.1"], done.stderr


def test_a_port_alone_serves_nothing(tmp_path):
    assert not run_metrics(tmp_path, "none", GRAINMILL_PROMETHEUS_PORT="9")


def test_no_metrics_are_computed_and_no_port_is_opened_by_default(tmp_path):
    assert not run_metrics(tmp_path, "none")


def test_pulls_are_annotated_while_a_trace_is_taken(monkeypatch):
    names = []

    class Annotation:
        enabled = False

        def __init__(self, name):
            names.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @classmethod
        def is_enabled(cls):
            return cls.enabled

    class Jax:
        class profiler:  # noqa: N801 - as the module is called
            TraceAnnotation = Annotation

    monkeypatch.setitem(sys.modules, "jax", Jax)
    iterator = iter(MapDataset.range(6).batch(2).to_iter_dataset(ReadOptions(0, 0)))
    next(iterator)
    assert not names
    Annotation.enabled = True
    assert len(list(iterator)) == 2
    assert set(names) == {f"grainmill {iterator}"}


def test_jax_knows_whether_a_trace_is_taken():
    jax = pytest.importorskip("jax")
    assert trace_annotation() is jax.profiler.TraceAnnotation
    assert not trace_annotation().is_enabled()
