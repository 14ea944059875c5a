"""What `docs/differences.md` says about Grain 0.2.18 and about grainmill is so, in both."""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import grain as real
import numpy as np
import pytest
from absl import flags
from pipelines import build, close, encode, take, transforms
from under_test import IS_GRAIN, grain

ROOT = Path(__file__).parents[2]
INLINE = {"num_threads": 0, "prefetch_buffer_size": 0}

pytestmark = [
    pytest.mark.skipif(IS_GRAIN, reason="compares the two"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def rows():
    """{difference: the test that shows it} of the document."""
    text = (ROOT / "docs/differences.md").read_text("utf-8")
    found = re.findall(r"^\| `([\w-]+)` \|.*\| `(\w+)` \|$", text, flags=re.MULTILINE)
    assert len(found) == len(dict(found)) == len(re.findall(r"^\| `", text, flags=re.MULTILINE))
    return dict(found)


def test_every_difference_names_a_test_that_shows_it():
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", sources, flags=re.MULTILINE))
    named = rows()
    assert set(named.values()) <= tests
    mine = {name for name, test in named.items() if test == test_both_are_as_documented.__name__}
    assert mine == set(CHECKS)


def error_of(action):
    """The exception that `action` raises, or `None`."""
    try:
        action()
    except Exception as error:
        return error
    return None


def elements(g, ops, state=None, limit=60):
    """The elements of a pipeline, encoded, after `state` if it is given."""
    iterator = iter(build(g, ops))
    if state is not None:
        iterator.set_state(state)
    found = take(iterator, limit)
    close(iterator)
    return found


def states(g, ops, count):
    """JSON of the states before each of the first elements and after the last of them."""
    iterator = iter(build(g, ops))
    found = [json.dumps(iterator.get_state())]
    for _ in range(count):
        next(iterator)
        found.append(json.dumps(iterator.get_state()))
    close(iterator)
    return found


def loses_after_json(g, ops, position):
    """Whether the elements after a state that went through JSON are others than before."""
    iterator = iter(build(g, ops))
    take(iterator, position)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 60)
    close(iterator)
    return elements(g, ops, state) != expected


# --- order ---------------------------------------------------------------------------------------


def index_shuffle():
    images = [
        {g.experimental.index_shuffle(k, 65536, 0, 4) for k in range(65537)} for g in (real, grain)
    ]
    assert list(map(len, images)) == [65536, 65537]


def window_shuffle():
    found = [elements(g, [["range", 7], ["window_shuffle", 4, 0]]) for g in (real, grain)]
    assert found[0] == [0, 3, 1, 2, 5, 6, 0]
    assert sorted(found[1]) == list(range(7))


def sequential_slice():
    ops = [["range", 10], ["getslice", 2, 8], ["to_iter", INLINE]]
    ops.append(["multithread_prefetch", 2, 1, {"sequential_slice": True}])
    found = [sorted(elements(g, ops)) for g in (real, grain)]
    assert found[1] == list(range(2, 8))
    assert found[0] != found[1]


def concat_split_of_several_features():
    def tokens(g):
        source = [{"a": np.arange(1, 30), "b": np.arange(101, 104)}]
        parent = g.MapDataset.source(source).to_iter_dataset(g.ReadOptions(0, 0))
        packed = g.experimental.ConcatThenSplitIterDataset(parent, length_struct={"a": 6, "b": 2})
        return sorted(int(x) for row in packed for key in "ab" for x in row[key] if x)

    whole = [*range(1, 30), *range(101, 104)]
    assert tokens(grain) == whole
    assert tokens(real) != whole


def first_token_of_several_features():
    def rows_of(g):
        ops = [["range", 14], ["map", "tokens2"], ["to_iter", INLINE]]
        options = {
            "length_struct": {"inputs": 3, "targets": 3},
            "bos_handling": "REPLACE_FIRST_TOKEN_WITH_BOS",
            "bos_features": ["inputs", "targets"],
            "bos_token_id": 1,
        }
        return elements(g, [*ops, ["concat_split", options]])

    assert isinstance(error_of(lambda: rows_of(real)), IndexError)
    for row in rows_of(grain):
        for name in ("inputs", "targets"):
            positions, segments, values = (
                np.array(row["dict"][name + suffix]["nd"][2])
                for suffix in ("_positions", "_segment_ids", "")
            )
            assert ((values == 1) == ((positions == 0) & (segments > 0))).all()


def _loader(g, shard, operations=(), num_records=10, seed=None):
    return g.DataLoader(
        data_source=g.sources.RangeDataSource(0, num_records, 1),
        sampler=g.samplers.IndexSampler(
            num_records, g.sharding.ShardOptions(*shard), num_epochs=1, seed=seed
        ),
        operations=operations,
        read_options=g.ReadOptions(0, 0),
    )


def loader_remainder():
    found = [sorted(x for k in range(3) for x in _loader(g, (k, 3, False))) for g in (real, grain)]
    assert len(found[0]) == 9
    assert found[1] == list(range(10))


def more_epochs_of_a_loader():
    def loader(g, num_epochs):
        sampler = g.samplers.IndexSampler(3, g.sharding.NoSharding(), num_epochs=num_epochs)
        source = g.sources.RangeDataSource(0, 3, 1)
        return g.DataLoader(data_source=source, sampler=sampler, read_options=g.ReadOptions(0, 0))

    def continued(g):
        state = take_all(loader(g, 1)).get_state()
        iterator = iter(loader(g, 2))
        iterator.set_state(state)
        return list(iterator)

    def take_all(loader):
        iterator = iter(loader)
        assert list(iterator) == [0, 1, 2]
        return iterator

    assert "Sampler in checkpoint does not match" in str(error_of(lambda: continued(real)))
    assert continued(grain) == [0, 1, 2]


def generators_after_flat_map():
    def generators(g):
        class Seen(g.transforms.RandomMap):
            def random_map(self, _, rng):
                return rng is not None

        return set(_loader(g, (0, 1), [transforms(g)["FanTwo"](), Seen()], seed=1))

    assert [generators(g) for g in (real, grain)] == [{False}, {True}]


def shard_without_records():
    failures = [
        error_of(
            lambda g=g: g.samplers.IndexSampler(2, g.sharding.ShardOptions(2, 3), num_epochs=2)[2]
        )
        for g in (real, grain)
    ]
    assert list(map(type, failures)) == [ZeroDivisionError, ValueError]


def endless_batches():
    ops = [["range", 5], ["repeat"], ["batch", 3]]
    exact = -(-(2**63 - 1) // 3)
    assert len(build(grain, ops)) == exact
    assert len(build(real, ops)) != exact


def batches_of_numbers_and_none():
    def batch(g):
        ds = g.MapDataset.source([1, None, 3]).to_iter_dataset(allow_nones=True)
        return next(iter(ds.batch(3)))

    assert batch(real).dtype == object
    assert "same structure" in str(error_of(lambda: batch(grain)))


def weights_by_name():
    def mixed(g):
        parts = {name: build(g, [["range", 3], ["to_iter", INLINE]]) for name in "ab"}
        return list(g.IterDataset.mix(parts, {"a": 1, "c": 2}))

    assert len(mixed(real)) > 0
    assert "same keys" in str(error_of(lambda: mixed(grain)))


# --- states --------------------------------------------------------------------------------------


def concat_split_after_json():
    ops = [["range", 14], ["map", "tokens"], ["to_iter", INLINE]]
    ops.append(["concat_split", {"length_struct": {"tokens": 8}}])
    found = [[loses_after_json(g, ops, k) for k in range(6)] for g in (real, grain)]
    assert any(found[0])
    assert not any(found[1])


_PARTS = [
    [["range", first, first + count], ["to_iter", INLINE]]
    for first, count in [(0, 2), (10, 4), (20, 3), (30, 2)]
]
_INTERLEAVE = [["interleave", _PARTS, {"cycle_length": 2}]]


def interleave_changes_its_state():
    for g, changed in ((real, True), (grain, False)):
        iterator = iter(build(g, _INTERLEAVE))
        take(iterator, 2)
        state = iterator.get_state()
        kept = copy.deepcopy(state)
        again = iter(build(g, _INTERLEAVE))
        again.set_state(state)
        take(again, 60)
        assert (state != kept) == changed
        close(iterator)
        close(again)


def interleave_rolled_back():
    for g, lost in ((real, True), (grain, False)):
        iterator = iter(build(g, _INTERLEAVE))
        start = copy.deepcopy(iterator.get_state())
        take(iterator, 60)
        iterator.set_state(start)
        state = json.loads(json.dumps(iterator.get_state()))
        close(iterator)
        assert (elements(g, _INTERLEAVE, state) != elements(g, _INTERLEAVE)) == lost


def flat_map_at_its_end():
    ops = [["range", 3, 5], ["to_iter", INLINE], ["flat_map", "FanTwo"]]
    for g, repeated in ((real, True), (grain, False)):
        used = iter(build(g, ops))
        take(used, 60)
        end = copy.deepcopy(used.get_state())
        used.set_state({"parent": {"next_index": 0}, "next_index_in_buffer": 0})
        take(used, 1)
        used.set_state(end)
        assert (take(used, 60) != []) == repeated


def rebatch_at_its_end():
    ops = [["range", 6], ["batch", 3], ["to_iter", INLINE], ["rebatch", 3]]
    found = [elements(g, ops, json.loads(states(g, ops, 2)[-1])) for g in (real, grain)]
    assert found == [[{"nd": ["int64", [0], []]}], []]


def states_after_dropped_elements():
    ops = [["range", 12], ["to_iter", INLINE], ["filter", "is_small"], ["batch", 2]]
    ours, theirs = states(grain, ops, 3), states(real, ops, 3)
    for state in (ours[-1], theirs[-1]):
        for g in (real, grain):
            assert elements(g, ops, json.loads(state)) == []


def failed_reads():
    class Fails:
        failed = False

        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 2 and not self.failed:
                self.failed = True
                raise KeyError(index)
            return index

    def after_failure(g):
        options = g.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        iterator = iter(g.MapDataset.source(Fails()).to_iter_dataset(options))
        found = take(iterator, 2)
        assert isinstance(error_of(lambda: next(iterator)), KeyError)
        for _ in range(4):
            error = error_of(lambda: found.append(encode(next(iterator))))
        close(iterator)
        return found, error

    assert after_failure(grain) == ([0, 1, 2, 3, 4, 5], None)
    assert after_failure(real)[0] != [0, 1, 2, 3, 4, 5]


# --- others --------------------------------------------------------------------------------------


def shared_memory_batches():
    def batch(g):
        rows = g.MapDataset.source([np.float32(1), np.float64(0.1)]).batch(2)
        rows.enable_shared_memory_output()
        found = rows[0]
        assert isinstance(found, g.multiprocessing.SharedMemoryArray)
        if g is real:
            found.unlink_on_del()
        return found

    assert [batch(g).dtype for g in (real, grain)] == [np.float32, np.float64]


def packed_dtypes():
    def rows(g):
        documents = [{"t": np.array([1], np.uint16)}, {"t": np.array([70_000], np.int32)}]
        ds = g.MapDataset.source(documents).to_iter_dataset()
        pack = g.experimental.FirstFitPackIterDataset
        return next(iter(pack(ds, length_struct={"t": 3}, num_packing_bins=1)))["t"].tolist()

    assert [rows(g) for g in (real, grain)] == [[1, 4464, 0], [1, 70_000, 0]]


def packed_nested_features():
    def row(g):
        ds = g.MapDataset.source([{"a": {"t": np.array([1, 2])}}]).to_iter_dataset()
        pack = g.experimental.FirstFitPackIterDataset
        return next(iter(pack(ds, length_struct={"a": {"t": 3}}, num_packing_bins=1)))

    assert "Failed to extract segment ids" in str(error_of(lambda: row(real)))
    assert row(grain)["a_segment_ids"]["t"].tolist() == [1, 1, 0]


def packed_padding():
    def rows(g):
        ds = g.MapDataset.source([{"t": np.array([1], np.uint16)}]).to_iter_dataset()
        options = {"num_packing_bins": 1, "padding_struct": {"t": 0.5}}
        packed = g.experimental.FirstFitPackIterDataset(ds, length_struct={"t": 2}, **options)
        return next(iter(packed))["t"].tolist()

    assert rows(real) == [1, 0]
    assert isinstance(error_of(lambda: rows(grain)), ValueError)


def bytes_that_end_in_zeros():
    def batch(g):
        return g.MapDataset.source([b"ab\0", b"c"]).batch(2)[0].tolist()

    assert batch(real) == [b"ab", b"c"]
    assert isinstance(error_of(lambda: batch(grain)), ValueError)


def ranges_beyond_the_file():
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/ten.array_record"
        with grain.array_record.ArrayRecordWriter(path, "group_size:1") as writer:
            for number in range(10):
                writer.write(b"%d" % number)
        theirs = real.sources.ArrayRecordDataSource(f"{path}[5:12]")
        assert (len(theirs), theirs[0]) == (7, b"5")
        assert isinstance(error_of(lambda: theirs[6]), RuntimeError)
        ours = error_of(lambda: grain.sources.ArrayRecordDataSource(f"{path}[5:12]"))
        assert isinstance(ours, IndexError)


def workers_without_flags():
    ops = [["range", 3], ["to_iter", INLINE], ["mp_prefetch", 1, 1]]
    were_parsed = flags.FLAGS.is_parsed()  # by another test
    flags.FLAGS.unparse_flags()
    try:
        assert type(error_of(lambda: elements(real, ops))).__name__ == "UnparsedFlagAccessError"
    finally:
        if were_parsed:
            flags.FLAGS.mark_as_parsed()
    assert elements(grain, ops) == [0, 1, 2]


def more_threads_than_datasets():
    ops = [["interleave", _PARTS[:2], {"cycle_length": 2}], ["multithread_prefetch", 3, 1]]
    assert error_of(lambda: elements(real, ops)) is not None
    assert sorted(elements(grain, ops)) == [0, 1, 10, 11, 12, 13]


def more_workers_than_threads():
    ops = [["range", 7], ["to_iter", INLINE], ["multithread_prefetch", 2, 1]]
    ops.append(["multithread_prefetch", 3, 1])  # divides them as `mp_prefetch` does
    assert error_of(lambda: elements(real, ops)) is not None
    assert elements(grain, ops) == list(range(7))


SERVED = """
import importlib, os, sys
import prometheus_client
os.environ["ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY"] = "true"
served = []
def start(port, addr="0.0.0.0", *more, **options):
    served.append(addr)
prometheus_client.start_http_server = start
g = importlib.import_module(sys.argv[1])
next(iter(g.MapDataset.range(3).to_iter_dataset()))
print(*served)
"""


def metrics_address():
    served = {}
    env = {name: value for name, value in os.environ.items() if "PROMETHEUS" not in name}
    for name in ("grain", "grainmill"):
        done = subprocess.run(
            [sys.executable, "-c", SERVED, name],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        served[name] = done.stdout.split()
    assert served == {"grain": ["0.0.0.0"], "grainmill": ["127.0.0.1"]}


def paths_as_sources():
    assert list(real.MapDataset.source("a/b")) == ["a", "/", "b"]
    assert isinstance(error_of(lambda: grain.MapDataset.source("a/b")), TypeError)


def generators_of_flat_maps():
    def flat_mapped(g):
        class Twice(g.experimental.FlatMapTransform):
            max_fan_out = 2

            def flat_map(self, element):
                yield element
                yield element

        return list(
            g.experimental.FlatMapIterDataset(g.MapDataset.range(2).to_iter_dataset(), Twice())
        )

    assert isinstance(error_of(lambda: flat_mapped(real)), TypeError)
    assert flat_mapped(grain) == [0, 0, 1, 1]


CHECKS = {
    name.replace("_", "-"): check
    for name, check in {
        "index_shuffle_permutes": index_shuffle,
        "window_shuffle_permutes": window_shuffle,
        "sequential_slice": sequential_slice,
        "concat_split_of_several_features": concat_split_of_several_features,
        "first_token_of_several_features": first_token_of_several_features,
        "loader_remainder": loader_remainder,
        "more_epochs_of_a_loader": more_epochs_of_a_loader,
        "generators_after_flat_map": generators_after_flat_map,
        "shard_without_records": shard_without_records,
        "endless_batches": endless_batches,
        "weights_by_name": weights_by_name,
        "batches_of_numbers_and_none": batches_of_numbers_and_none,
        "concat_split_after_json": concat_split_after_json,
        "interleave_changes_its_state": interleave_changes_its_state,
        "interleave_rolled_back": interleave_rolled_back,
        "flat_map_at_its_end": flat_map_at_its_end,
        "rebatch_at_its_end": rebatch_at_its_end,
        "states_after_dropped_elements": states_after_dropped_elements,
        "failed_reads": failed_reads,
        "packed_dtypes": packed_dtypes,
        "packed_nested_features": packed_nested_features,
        "packed_padding": packed_padding,
        "bytes_that_end_in_zeros": bytes_that_end_in_zeros,
        "paths_as_sources": paths_as_sources,
        "generators_of_flat_maps": generators_of_flat_maps,
        "shared_memory_batches": shared_memory_batches,
        "ranges_beyond_the_file": ranges_beyond_the_file,
        "workers_without_flags": workers_without_flags,
        "more_threads_than_datasets": more_threads_than_datasets,
        "more_workers_than_threads": more_workers_than_threads,
        "metrics_address": metrics_address,
    }.items()
}


@pytest.mark.parametrize("name", CHECKS)
def test_both_are_as_documented(name):
    CHECKS[name]()
