"""Timelines: what is on them, and that they have the format of Chrome's trace events."""

import contextlib
import gzip
import io
import itertools
import json
import os
import threading
import time
from collections import defaultdict

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_server import BucketServer
from hypothesis import given
from hypothesis import strategies as st

import grainmill as grain
from grainmill import MapDataset, ReadOptions
from grainmill._evaluate.prefetch.thread_pool import NumberedThread, Turns
from grainmill._stats import meters, timeline
from grainmill._stats.trace_file import text_of
from grainmill._tools import main
from grainmill.array_record import ArrayRecordWriter

pytestmark = pytest.mark.better_than_grain("traces are ours")

INLINE = ReadOptions(num_threads=0, prefetch_buffer_size=0)
# By phase: the fields that an event has, and the types of their values.
COMMON = {"name": str, "ph": str, "pid": int, "tid": int}
FIELDS = {
    "X": {**COMMON, "cat": str, "ts": (int, float), "dur": (int, float)},
    "C": {**COMMON, "cat": str, "ts": (int, float), "args": dict},
    **{key: {**COMMON, "cat": str, "ts": (int, float), "id": str, "args": dict} for key in "be"},
    "M": {**COMMON, "args": dict},
}
CATEGORIES = {
    "function",
    "block",
    "stage",
    "consumer",
    "wait",
    "idle",
    "read",
    "transfer",
    "decode",
}


def checked(path):
    """The events of a file, which has the format."""
    found = json.loads(path.read_text("utf-8"))
    assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["displayTimeUnit"] in {"ms", "ns"}
    assert type(found["otherData"]["dropped_events"]) is int
    events = found["traceEvents"]
    for event in events:
        fields = FIELDS[event["ph"]]
        assert set(event) - set(fields) <= {"args"}
        for name, kind in fields.items():
            assert isinstance(event[name], kind), (name, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "X":
            assert event["cat"] in CATEGORIES
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} <= named
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= lanes
    assert not overlaps(events)
    for process in {event["pid"] for event in events}:
        check_reads([event for event in events if event["pid"] == process])
    return events


def check_reads(events):
    """What the events of a process have of reads: requests have one end, and a counter adds up."""
    begins, ends = ({one["id"]: one for one in events if one["ph"] == phase} for phase in "be")
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(event["ph"] == "b" for event in events)
    spans = [(begins[number]["ts"], ends[number]["ts"]) for number in begins]
    spans += [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["name"] == "read"
    ]
    shown = [event for event in events if event["ph"] == "C" and event["name"] == "reads in flight"]
    for event in shown:
        at = event["ts"]
        # Microseconds have been rounded to nanoseconds.
        number = sum(began <= at + 1e-6 and at + 1e-6 < round(ended, 3) for began, ended in spans)
        assert event["args"] == {"reads in flight": number}
    assert bool(shown) == any(began < ended for began, ended in spans)
    assert not shown or shown[-1]["args"]["reads in flight"] == 0


def overlaps(events):
    """The pairs of slices of one thread that overlap, neither within the other."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            lanes[event["pid"], event["tid"]].append((start, -(start + duration)))
    found = []
    for slices in lanes.values():
        open_slices = []
        for start, negative_end in sorted(slices):
            while open_slices and open_slices[-1] <= start:
                open_slices.pop()
            if open_slices and open_slices[-1] < -negative_end:
                found.append((start, -negative_end, open_slices[-1]))
            open_slices.append(-negative_end)
    return found


def slices(events, category):
    return [event for event in events if event.get("cat") == category]


def test_overlaps_are_found():
    def slice_(start, end, tid=1):
        return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": end - start}

    assert not overlaps([slice_(0, 9), slice_(0, 4), slice_(4, 9), slice_(5, 6)])
    assert not overlaps([slice_(0, 5), slice_(4, 9, tid=2)])
    assert overlaps([slice_(0, 5), slice_(4, 9)])


def add(x):
    return x + 1


def double(x):
    return np.full(8, 2 * x)


def odd(x):
    return x % 2 == 1


def mixed():
    parts = [MapDataset.range(400).map(add).map(double), MapDataset.range(400).map(odd).map(double)]
    return MapDataset.mix(parts).batch(4).to_iter_dataset()


def packed():
    documents = MapDataset.range(300).map(lambda n: {"x": np.arange(1 + n % 7)}).to_iter_dataset()
    return grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"x": 16}, num_packing_bins=4
    )


def in_workers(options):
    return MapDataset.range(800).map(add).map(double).batch(4).to_iter_dataset(options)


PIPELINES = {
    "threads": lambda: in_workers(ReadOptions()),
    "caller": lambda: in_workers(INLINE),
    "workers": lambda: in_workers(ReadOptions(num_workers=2)),
    "mixed": mixed,
    "packed": packed,
    "lazy": lambda: MapDataset.range(800).to_iter_dataset().map(add).filter(odd).map(double),
    "thread_prefetch": lambda: grain.experimental.ThreadPrefetchIterDataset(
        MapDataset.range(800).to_iter_dataset().map(add).map(double), prefetch_buffer_size=4
    ),
    "mp_prefetch": lambda: (
        MapDataset.range(800)
        .to_iter_dataset()
        .map(add)
        .map(double)
        .batch(4)
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_trace_has_the_format_and_changes_no_element(kind, tmp_path):
    expected = list(PIPELINES[kind]())
    with grain.trace(tmp_path / "trace.json"), contextlib.closing(iter(PIPELINES[kind]())) as it:
        elements = list(it)
    np.testing.assert_equal(elements, expected)
    events = checked(tmp_path / "trace.json")
    assert slices(events, "consumer")
    names = {event["name"].partition(" @ ")[0] for event in slices(events, "function")}
    expected_names = {
        "mixed": {"add", "odd", "double"},
        "packed": {"<lambda>"},
        "lazy": {"add", "odd", "double"},
    }
    assert names == expected_names.get(kind, {"add", "double"})
    processes = {event["pid"] for event in slices(events, "function")}
    is_in_workers = kind in {"workers", "mp_prefetch"}
    assert (os.getpid() in processes) != is_in_workers
    if is_in_workers:
        assert slices(events, "transfer")
    assert timeline.current is None


@pytest.mark.parametrize("kind", ["caller", "lazy"])
def test_every_call_that_is_timed_is_shown(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "_SHARE", 1e9)  # all are
    iterator = iter(PIPELINES[kind]())
    before = next(iterator)
    with grain.trace(tmp_path / "trace.json"):
        elements = list(iterator)
    shown = [event["name"] for event in slices(checked(tmp_path / "trace.json"), "function")]
    calls = sum(name.startswith("double") for name in shown)
    per_element = 1 if kind == "lazy" else len(before)
    assert calls >= len(elements) * per_element - 2 * 64  # those of the block before


@pytest.mark.parametrize("kind", ["caller", "workers"])
def test_running_pipelines_are_traced_and_only_during_the_trace(kind, tmp_path):
    options = ReadOptions(num_workers=2) if kind == "workers" else INLINE
    ds = MapDataset.range(800).repeat().map(add).map(double).batch(4).to_iter_dataset(options)
    with contextlib.closing(iter(ds)) as iterator:
        next(iterator)
        assert timeline.current is None
        for number in range(2):
            path = tmp_path / f"{number}.json"
            with grain.trace(path):
                began = time.perf_counter()
                for _ in range(1000):  # more than is prefetched
                    next(iterator)
                elapsed_s = time.perf_counter() - began
            events = checked(path)
            assert slices(events, "function") or slices(events, "block")
            # Those of the first trace are not in the second one.
            assert all(event.get("ts", 0) <= (elapsed_s + 1) * 1e6 for event in events)
            for _ in range(20):
                next(iterator)


def test_number_of_events_is_bounded_and_what_is_dropped_counted(tmp_path):
    def run(name, **limit):
        with grain.trace(tmp_path / name, **limit):
            for number in range(100):
                timeline.current.add(str(number), "block", 0.0, 1.0)
        found = json.loads((tmp_path / name).read_text("utf-8"))
        kept = [event["name"] for event in found["traceEvents"] if event["ph"] == "X"]
        return kept, found["otherData"]["dropped_events"]

    assert run("all") == ([str(number) for number in range(100)], 0)
    assert run("last", max_events=7) == ([str(number) for number in range(93, 100)], 93)


def test_worker_sends_names_and_events_once():
    sent = []
    worker = timeline.Timeline(max_events=5)
    for count in (3, 9, 0):
        for number in range(count):
            worker.add(str(number), "block", 0.0, 1.0)
        sent.append(worker.drain())
    assert [len(each.events) for each in sent] == [3, 5, 0]
    assert [each.num_dropped for each in sent] == [0, 4, 0]
    assert [len(each.threads) for each in sent] == [1, 0, 0]
    parent = timeline.Timeline(max_events=6)
    for each in sent:
        parent.add_worker(3, each._replace(pid=7, number=parent.number))
        parent.add_worker(4, each._replace(pid=8, number=parent.number - 1))  # came too late
    found = json.loads(text_of(parent))
    assert found["otherData"]["dropped_events"] == 4 + 2
    (process,) = [
        event["args"]["name"]
        for event in found["traceEvents"]
        if event["name"] == "process_name" and event["pid"] == 7
    ]
    assert process == "worker 3"
    assert all(event["pid"] != 8 for event in found["traceEvents"])


def calls():
    """Trees of calls: how long each takes before, between and after those within it."""
    gap = st.floats(0, 1e-3)
    leaf = st.tuples(gap, st.just([]))
    return st.recursive(
        leaf, lambda inner: st.tuples(gap, st.lists(inner, max_size=3)), max_leaves=20
    )


@given(st.lists(calls(), max_size=6), st.floats(0, 1e6))
def test_nested_calls_are_nested_slices(trees, start_s):
    taken = timeline.Timeline()
    taken.started_s = start_s

    def run(tree, now_s):
        gap_s, inner = tree
        began_s, now_s = now_s, now_s + gap_s
        for each in inner:
            now_s = run(each, now_s) + gap_s
        taken.add("call", "block", began_s, now_s)
        return now_s

    now_s = start_s
    for tree in trees:
        now_s = run(tree, now_s)
    assert not overlaps(json.loads(text_of(taken))["traceEvents"])


def test_file_is_written_after_an_exception(tmp_path):
    def fails():
        with grain.trace(tmp_path / "trace.json"):
            next(iter(MapDataset.range(5).to_iter_dataset()))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert checked(tmp_path / "trace.json")


def test_wrong_traces_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_events` must be"):
        grain.trace(tmp_path / "trace.json", max_events=0)
    with pytest.raises(FileNotFoundError, match="missing"):
        grain.trace(tmp_path / "missing" / "trace.json")
    with grain.trace(tmp_path / "trace.json"), pytest.raises(RuntimeError, match="already"):
        grain.trace(tmp_path / "other.json").__enter__()
    assert timeline.current is None


def test_failing_functions_are_shown_and_raise_as_without_a_trace(tmp_path):
    def fails(x):
        if x == 5:
            raise ValueError("no 5")
        return x

    for options in (INLINE, ReadOptions(num_threads=2)):
        ds = MapDataset.range(10).map(fails).to_iter_dataset(options)
        found = []
        with pytest.raises(ValueError, match="no 5"), grain.trace(tmp_path / "trace.json"):
            found.extend(ds)
        checked(tmp_path / "trace.json")


def test_threads_of_a_pool_take_no_turns_because_of_a_trace():
    taken, turns = timeline.Timeline(), Turns()
    thread = NumberedThread(target=taken.add, args=("x", "block", 0.0, 1.0), name="numbered")
    thread.turns = turns
    thread.start()
    thread.join()
    assert not turns.are_taken
    names = [
        event["args"]["name"]
        for event in json.loads(text_of(taken))["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert names == ["numbered"]


def test_slices_that_take_too_little_are_left_out_until_they_add_up(monkeypatch):
    for least_s, is_all in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(timeline, "LEAST_S", least_s)
        monkeypatch.setattr(timeline, "current", taken := timeline.Timeline())
        assert len(list(MapDataset.range(50).to_iter_dataset(INLINE))) == 50
        events = json.loads(text_of(taken))["traceEvents"]
        assert (len(slices(events, "block")) >= 3) == is_all
        assert (len(slices(events, "consumer")) >= 3) == is_all
    monkeypatch.setattr(timeline, "LEAST_S", 0.02)
    monkeypatch.setattr(timeline, "current", taken := timeline.Timeline())
    slow = MapDataset.range(40).map(lambda n: time.sleep(0.021 if n % 20 == 1 else 0.0))
    assert len(list(slow.to_iter_dataset(ReadOptions(0, 0), allow_nones=True))) == 40
    events = json.loads(text_of(taken))["traceEvents"]
    for category in ("block", "consumer"):  # the slow ones are there, and any that lost its core
        assert sum(event["dur"] >= 20_000 for event in slices(events, category)) >= 2


def file_of(kind, directory):
    """A file of a kind, and the elements that take long to decode together."""
    rng = np.random.default_rng(0)
    path = directory / f"file.{kind}"
    if kind == "array_record":
        with ArrayRecordWriter(str(path), "group_size:100,zstd") as writer:
            for _ in range(3000):
                writer.write(rng.bytes(1000).hex().encode())
        return path, grain.sources.ArrayRecordDataSource(str(path))
    if kind == "parquet":
        pq.write_table(pa.table({"x": rng.integers(0, 1000, 300_000)}), path, row_group_size=30_000)
        return path, grain.sources.ParquetDataSource(str(path))
    if kind == "jsonl.gz":
        lines = b"".join(b'{"x": "%s"}\n' % rng.bytes(500).hex().encode() for _ in range(3000))
        path.write_bytes(gzip.compress(lines))
        return path, grain.sources.JsonLinesIterDataset(str(path))
    image = io.BytesIO()
    PIL.Image.fromarray(rng.integers(0, 255, (400, 400, 3), np.uint8)).save(image, "png")
    return None, MapDataset.source([image.getvalue()] * 8).map(grain.transforms.DecodeImage())


@pytest.mark.parametrize("where", ["caller", "threads", "workers"])
@pytest.mark.parametrize("kind", ["array_record", "parquet", "jsonl.gz", "png"])
def test_decoding_is_shown_with_its_file(kind, where, tmp_path):
    path, source = file_of(kind, tmp_path)
    options = {"caller": INLINE, "threads": ReadOptions(), "workers": ReadOptions(num_workers=2)}
    ds = source
    if not isinstance(source, grain.IterDataset):
        ds = source if isinstance(source, MapDataset) else MapDataset.source(source).shuffle(3)
        ds = ds.map(lambda x: x).to_iter_dataset(options[where])
    elif where == "workers":
        ds = ds.map(lambda x: x).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    with grain.trace(tmp_path / "trace.json"), contextlib.closing(iter(ds)) as iterator:
        assert sum(1 for _ in itertools.islice(iterator, 3000)) > 1
    events = checked(tmp_path / "trace.json")
    decoded = [event for event in slices(events, "decode") if event["ph"] == "X"]
    assert decoded
    for event in decoded:
        arguments = event["args"]
        assert arguments.get("file") == (None if path is None else str(path))
        size = len(source[0]) * 3 if path is None else path.stat().st_size
        assert 0 < arguments.get("offset", 0) + arguments["bytes"] <= max(size, 10**6)
    assert any(event["pid"] != os.getpid() for event in decoded) == (where == "workers")


def test_reads_of_buckets_are_shown_and_how_many_are_in_flight(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path))
    path = tmp_path / "a.array_record"
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for number in range(60):
            writer.write(np.random.default_rng(number).bytes(50_000))
    with BucketServer(latency_s=0.03) as server:
        server.put("/a.array_record", path.read_bytes())
        url = f"{server.url}/a.array_record"
        with grain.trace(tmp_path / "trace.json"):
            source = grain.sources.ArrayRecordDataSource(f"{url}?token=secret")
            assert sum(1 for _ in MapDataset.source(source).shuffle(1).to_iter_dataset()) == 60
    events = checked(tmp_path / "trace.json")
    reads = [event for event in events if event["ph"] == "b"]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert {event["args"]["file"] for event in reads} == {f"{url}?..."}
    assert sum(event["args"]["bytes"] for event in reads) >= 60 * 50_000
    assert all(ends[event["id"]] - event["ts"] >= 30_000 for event in reads)
    numbers = [event["args"].get("reads in flight", 0) for event in events if event["ph"] == "C"]
    assert max(numbers) > 5
    assert "secret" not in (tmp_path / "trace.json").read_text("utf-8")


def test_the_engine_keeps_no_more_events_than_asked_for(tmp_path):
    _, source = file_of("array_record", tmp_path)
    ds = MapDataset.source(source).shuffle(3).repeat(4).to_iter_dataset(INLINE)
    with grain.trace(tmp_path / "trace.json", max_events=3):
        for _ in ds:
            pass
    events = checked(tmp_path / "trace.json")
    assert len([event for event in events if event["ph"] in "Xb"]) <= 3
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_events"] > 0


PROGRAM = """
import grainmill as grain
print("printed by the program")
def add(x):
    return x + 1
ds = grain.MapDataset.range(100).map(add).batch(10)
"""


def test_command_writes_a_trace(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program_to_trace.py").write_text(PROGRAM, "utf-8")
    command = ["trace", "program_to_trace.py:ds", "-o", "own.json"]
    assert main.main([*command, "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["elements"] == 10
    assert found["events"] == len(checked(tmp_path / "own.json"))
    assert "printed by the program" in err
    assert main.main([*command, "-n", "3"]) == 0
    assert "own.json: 3 elements" in capfd.readouterr().out
    assert main.main([*command, "--max-events", "0"]) == 2
    assert main.main([*command, "--count", "0"]) == 2
    assert main.main([*command, "--seconds", "0"]) == 2
    assert main.main(["trace", "program_to_trace.py:ds", "-o", "s3://bucket/x"]) == 2
    assert main.main(["trace", "program_to_trace.py:ds", "-o", "missing/x"]) == 3


def test_threads_that_name_slices_at_the_same_time_keep_their_names():
    taken, start = timeline.Timeline(), threading.Barrier(8)

    def add_some(thread):
        start.wait()
        for number in range(200):
            taken.add(f"{thread} {number}", "block", 0.0, 1.0, first=number, count=thread)

    threads = [threading.Thread(target=add_some, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = slices(json.loads(text_of(taken))["traceEvents"], "block")
    assert len(found) == 8 * 200
    for event in found:
        assert event["name"] == f"{event['args']['elements']} {event['args']['first']}"


def test_the_command_counts_elements_that_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("elements = [None, 1, None]\n")
    assert main.main(["trace", "program.py:elements", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elements"] == 3
