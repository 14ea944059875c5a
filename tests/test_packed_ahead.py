"""Packing and batching on the thread that computes elements changes nothing but the thread."""

import gc
import itertools
import multiprocessing
import threading
import time
import weakref

import numpy as np
import pytest
from oracle_stack import assert_same
from pipelines import tokens, tokens2
from stage_harness import count_at_rest, found
from under_test import INLINE

import grainmill as grain
from grainmill import experimental
from grainmill._iterators.open import open_stage
from grainmill._iterators.pack_in_thread import PackInThreadStage


def unlike_tokens(x):
    return {"tokens": np.arange(x % 9 + 1, dtype=[np.int32, np.int64][x // 40 % 2])}


def lists_of_tokens(x):
    return {"tokens": list(range(x % 9 + 1))}


def tokens_or_none(x):
    return None if x % 3 == 0 else tokens(x)


def tokens_but_for_70(x):
    if x == 70:
        raise ValueError("no more")
    return tokens(x)


def long_tokens(x):
    return {"tokens": np.zeros(20 if x == 70 else 3)}


def first_fit(ds, **options):
    return experimental.FirstFitPackIterDataset(ds, num_packing_bins=5, **options)


def best_fit(ds, **options):
    return experimental.BestFitPackIterDataset(ds, num_packing_bins=3, **options)


def packed(function, options=None, *, pack=first_fit, batch_size=2, count=200):
    ds = grain.MapDataset.range(count).map(function).to_iter_dataset(options)
    features = ["inputs", "targets"] if function is tokens2 else ["tokens"]
    ds = pack(ds, length_struct=dict.fromkeys(features, 12))
    return ds.batch(batch_size) if batch_size else ds


@pytest.mark.parametrize("batch_size", [0, 4])
@pytest.mark.parametrize("pack", [first_fit, best_fit, experimental.ConcatThenSplitIterDataset])
@pytest.mark.parametrize(
    "function",
    [
        tokens,
        tokens2,
        unlike_tokens,
        lists_of_tokens,
        tokens_or_none,
        tokens_but_for_70,
        long_tokens,
    ],
)
def test_thread_changes_no_row_state_or_failure(function, pack, batch_size):
    def computed(options):
        return found(packed(function, options, pack=pack, batch_size=batch_size))

    inline = computed(INLINE)
    assert len(inline) > 4
    for prefetch, threads in ((1, 1), (2, 16), (7, 2), (500, 16)):
        assert computed(grain.ReadOptions(threads, prefetch)) == inline


@pytest.mark.parametrize("batch_size", [0, 4])
def test_restored_iterator_goes_on_wherever_the_thread_is(batch_size):
    ds = packed(tokens, batch_size=batch_size, count=60)
    with iter(ds) as iterator:
        states = [iterator.get_state()]
        elements = []
        for element in iterator:
            elements.append(element)
            states.append(iterator.get_state())
    with iter(ds) as iterator:
        for at in [*range(len(states)), *reversed(range(len(states)))]:
            iterator.set_state(states[at])
            assert iterator.get_state() == states[at]
            assert_same(list(itertools.islice(iterator, 3)), elements[at : at + 3])


def test_only_stages_without_user_code_are_made_together():
    def is_one(ds):
        return isinstance(open_stage(ds._plan_node()), PackInThreadStage)

    assert is_one(packed(tokens))
    assert is_one(packed(tokens, pack=experimental.ConcatThenSplitIterDataset))
    assert not is_one(packed(tokens, INLINE))
    assert not is_one(packed(tokens, grain.ReadOptions(prefetch_buffer_size=0)))
    assert not is_one(packed(tokens, batch_size=0).batch(2, batch_fn=list))
    assert not is_one(packed(tokens, batch_size=0).map(dict).batch(2))
    assert not is_one(packed(tokens).map(dict))


def test_functions_run_on_the_threads_programs_know():
    names = set()

    def function(x):
        names.add(threading.current_thread().name)
        return tokens(x)

    assert len(list(packed(function, batch_size=4))) > 9
    assert names <= {f"grain-prefetch_{number}" for number in range(16)}


def test_functions_that_wait_get_more_threads():
    names = set()

    def function(x):
        names.add(threading.current_thread().name)
        time.sleep(0.005)
        return tokens(x)

    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
    with iter(packed(function, options, batch_size=2, count=3000)) as iterator:
        rows = []
        while len(names) < 4 and len(rows) < 700:
            rows.append(next(iterator))
    assert names == {f"grain-prefetch_{number}" for number in range(4)}
    assert_same(
        rows, list(itertools.islice(packed(tokens, INLINE, batch_size=2, count=3000), len(rows)))
    )


def test_functions_never_overlap_while_places_change():
    inside = threading.Lock()
    overlapped = []

    def function(x):
        if not inside.acquire(blocking=False):
            overlapped.append(x)
            return tokens(x)
        time.sleep(0.001)
        inside.release()
        return tokens(x)

    expected = list(packed(tokens, INLINE, batch_size=2))
    with iter(packed(function, grain.ReadOptions(num_threads=1), batch_size=2)) as iterator:
        states = [iterator.get_state()]
        for _ in range(5):
            next(iterator)
            states.append(iterator.get_state())
        for at in (3, 0, 5, 1):
            iterator.set_state(states[at])
            assert_same([next(iterator)], [expected[at]])
    assert not overlapped


def test_place_changes_without_the_rest_of_a_batch():
    """Restoring waits only for the block in flight, not for a thousand calls."""
    slow, calls = threading.Event(), []

    def function(x):
        if slow.is_set():
            time.sleep(0.01)
        calls.append(x)
        return tokens(x)

    ds = packed(function, grain.ReadOptions(num_threads=1), batch_size=2000, count=10**6)
    with iter(ds) as iterator:
        start = iterator.get_state()
        iterator.start_prefetch()
        slow.set()
        time.sleep(0.05)
        num_before = len(calls)
        iterator.set_state(start)
        assert len(calls) - num_before < 500


@pytest.mark.parametrize(("batch_size", "prefetch"), [(8, 20), (8, 500), (300, 20), (300, 500)])
def test_prefetch_is_bounded(batch_size, prefetch):
    calls = []

    def function(x):
        calls.append(x)
        return tokens(x)

    options = grain.ReadOptions(prefetch_buffer_size=prefetch)
    ds = packed(function, options, batch_size=batch_size, count=10**6)
    with iter(ds) as iterator:
        for _ in range(30):
            next(iterator)
        before = count_at_rest(calls)
        at = iterator.get_state()["parent"]["next_index"]
    # Two transferred blocks and the one being consumed, pending bins, a block of the reader.
    rows = 3 * max(batch_size, prefetch // 2) + 5
    assert before - at < 2.4 * rows + prefetch


@pytest.mark.parametrize(("num_cells", "most"), [(10, 3 * 62), (100_000, 3 * 1)])
def test_few_large_batches_are_ahead(num_cells, most):
    """Half the read-ahead would be 62 batches; only as many as fit into 4 MiB are transferred."""

    def function(x):
        return {"tokens": np.full(num_cells, x, np.int32)}

    ds = grain.MapDataset.range(10**6).map(function).to_iter_dataset()
    ds = first_fit(ds, length_struct={"tokens": num_cells}).batch(4)
    alive = 0
    with iter(ds) as iterator:
        for _ in range(100):
            next(iterator)
            alive = max(alive, len(iterator._waiting) + iterator._stage._queue._num_queued)
        deadline = time.monotonic() + 60
        while not iterator._stage._queue._num_queued and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread prefetches while the consumer does not wait
        alive = max(alive, len(iterator._waiting) + iterator._stage._queue._num_queued)
    assert 1 <= alive <= most


def test_close_does_not_wait_for_a_function():
    stuck, entered = threading.Event(), threading.Event()

    def function(x):
        if x == 45:
            entered.set()
            stuck.wait()
        return tokens(x)

    others = set(threading.enumerate())
    iterator = iter(packed(function, batch_size=8))
    next(iterator)  # is not withheld until later elements are computed
    assert entered.wait(240)
    iterator.close()  # would never return
    stuck.set()
    deadline = time.monotonic() + 240
    while any(t.name.startswith("grain-") for t in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _rest(iterator, queue):
    queue.put([repr(element) for element in iterator])
    iterator.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("steps", [0, 7])
def test_forked_process_goes_on_by_itself(steps, prefetched):
    ds = packed(tokens, batch_size=2)
    if prefetched:
        ds = experimental.ThreadPrefetchIterDataset(
            packed(tokens, INLINE, batch_size=2), prefetch_buffer_size=3
        )
    context = multiprocessing.get_context("fork")
    with iter(ds) as iterator:
        iterator.start_prefetch()
        for _ in range(steps):
            next(iterator)
        time.sleep(0.05)
        queue = context.Queue()
        child = context.Process(target=_rest, args=(iterator, queue))
        child.start()
        theirs = queue.get(timeout=240)
        child.join(60)
        assert child.exitcode == 0
        assert [repr(element) for element in iterator] == theirs
    assert len(theirs) > 10


def test_abandoned_iterator_leaves_nothing_for_the_collector():
    gc.collect()
    gc.disable()
    try:
        iterator = iter(packed(tokens, count=10**6))
        next(iterator)
        reader = weakref.ref(iterator._stage._reader)
        del iterator
        deadline = time.monotonic() + 60
        while reader() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()
