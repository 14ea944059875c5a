"""A prefetching thread never changes elements or their order, and never outlives its stage."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from driven import Driven, bare
from stage_harness import Boom, ListStage, count_at_rest, drain
from waits import becomes

import grainmill as grain
from grainmill._iterators import thread_prefetch
from grainmill._iterators.base.stage import Block
from grainmill._iterators.interleave import Interleave, InterleaveStage
from grainmill._iterators.thread_prefetch import ThreadPrefetch, ThreadPrefetchStage
from grainmill.experimental import ThreadPrefetchIterDataset


def prefetched(stage, size=2):
    return Driven(ThreadPrefetchStage(ThreadPrefetch((), size), stage))


_others = set()


@pytest.fixture(autouse=True)
def threads_of_this_test():
    """Threads of tests before, whose iterators may not be collected yet, are none of this one."""
    _others.clear()
    _others.update(threading.enumerate())


def threads():
    # A thread whose start was interrupted is listed forever, though it never runs.
    ours = [t for t in threading.enumerate() if t.name.startswith("grain-thread-prefetch")]
    return [t for t in ours if t.is_alive() and t not in _others]


class MeetingStage(ListStage):
    """Returns each element only while other stages are in `pull`, too."""

    def __init__(self, elements, meeting):
        super().__init__(elements)
        self.meeting = meeting

    def pull(self, limit) -> Block:
        self.meeting.wait(60)
        return super().pull(limit)


class GateStage(ListStage):
    """Waits for a gate before each element."""

    def __init__(self, elements):
        super().__init__(elements)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.cancelled = 0

    def cancel(self):
        self.cancelled += 1

    def pull(self, limit) -> Block:
        self.entered.set()
        self.gate.wait()
        return super().pull(limit)


def test_thread_keeps_to_its_buffer():
    parent = ListStage(list(range(100)))
    stage = prefetched(parent, 3)
    assert stage.pull(1).elements == [0]
    assert becomes(lambda: parent.pulled == 4)
    time.sleep(0.02)
    assert parent.pulled == 4
    stage.close()


def test_ready_elements_come_together():
    parent = ListStage(list(range(10)), pull_size=4)
    stage = prefetched(parent, 4)
    stage.start_prefetch()
    assert becomes(lambda: parent.pulled == 4)
    assert stage.pull(3).elements == [0]  # at once
    block = stage.pull(3)
    assert block.elements == [1, 2]
    assert [block.state_after(k)["next_index"] for k in range(3)] == [1, 2, 3]
    assert drain(stage)[0] == list(range(3, 10))


def test_state_starts_no_thread():
    parent = ListStage([1, 2])
    stage = prefetched(parent)
    assert stage.state() == {"next_index": 0}
    assert not threads()
    assert parent.pulled == 0


def test_started_stage_still_has_its_first_state():
    parent = ListStage(list(range(9)))
    stage = prefetched(parent)
    stage.start_prefetch()
    assert becomes(lambda: parent.pulled == 2)
    assert stage.state() == {"next_index": 0}
    assert drain(stage)[0] == list(range(9))


def test_failure_comes_at_its_place_and_loses_nothing():
    stage = prefetched(ListStage(list(range(5)), failing=[2]), 5)
    assert [stage.pull(1).elements for _ in range(2)] == [[0], [1]]
    with pytest.raises(Boom):
        stage.pull(1)
    assert stage.state() == {"next_index": 2}
    assert drain(stage)[0] == [2, 3, 4]


def test_index_is_of_the_next_element_handed_out():
    parent = ListStage(list(range(9)))
    stage = prefetched(parent, 3)
    stage.pull(1)
    assert becomes(lambda: parent.pulled == 4)
    assert stage.next_index() == 1
    assert stage.pull(1).elements == [1]
    stage.seek(7)
    assert drain(stage)[0] == [7, 8]
    stage.seek(8)
    assert drain(stage)[0] == [8]


def test_restore_waits_for_the_element_in_flight():
    parent = GateStage(list(range(5)))
    stage = prefetched(parent)
    stage.start_prefetch()
    parent.entered.wait()
    threading.Timer(0.05, parent.gate.set).start()
    stage.restore({"next_index": 3})
    assert drain(stage)[0] == [3, 4]


def test_closed_stage_refuses_to_be_used():
    for size in (0, 2):
        parent = ListStage(list(range(5)))
        stage = prefetched(parent, size)
        stage.pull(1)
        stage.close()
        stage.close()
        assert parent.closed == 1
        for use in (lambda stage=stage: stage.pull(1), stage.start_prefetch):
            with pytest.raises(ValueError, match=r"^Attempting to use a closed iterator\.$"):
                use()
    assert becomes(lambda: not threads())


def test_close_does_not_wait_for_a_stuck_parent():
    parent = GateStage([1])
    stage = prefetched(parent)
    stage.start_prefetch()
    parent.entered.wait()
    begin = time.monotonic()
    stage.close()
    assert time.monotonic() - begin < 10
    assert (parent.cancelled, parent.closed) == (1, 0)
    parent.gate.set()
    assert becomes(lambda: not threads())
    assert parent.closed == 1


def test_close_wakes_a_waiting_consumer():
    parent = GateStage([1])
    stage = prefetched(parent)
    threading.Timer(0.05, stage.close).start()
    with pytest.raises(ValueError, match="closed iterator"):
        stage.pull(1)
    parent.gate.set()
    assert becomes(lambda: not threads())


def test_abandoned_stages_end_their_threads():
    gc.disable()
    try:
        for _ in range(20):
            prefetched(ListStage(list(range(100)))).pull(1)
        assert becomes(lambda: not threads())
    finally:
        gc.enable()


def test_parts_of_an_interleave_are_made_side_by_side():
    meeting = threading.Barrier(3)
    node = Interleave((), (), 3, 0, 0, 2)
    parts = [bare(prefetched(MeetingStage([k, 10 + k], meeting))) for k in range(3)]
    stage = Driven(InterleaveStage(node, parts.__getitem__, 3, start_all=True))
    assert drain(stage)[0] == [0, 1, 2, 10, 11, 12]
    stage.close()


def test_interleave_makes_as_many_elements_ahead_as_it_is_told():
    calls = []

    def datasets():
        ds = grain.MapDataset.range(40).to_iter_dataset(grain.ReadOptions(num_threads=0))
        return [ds.map(lambda x, number=number: calls.append(number) or x) for number in range(2)]

    together = grain.experimental.InterleaveIterDataset
    with iter(together(datasets(), cycle_length=2, iter_buffer_size=5)) as iterator:
        assert next(iterator) == 0
        assert becomes(lambda: calls.count(0) >= 5 and calls.count(1) >= 5)
    calls.clear()
    with iter(together(datasets(), cycle_length=2)) as iterator:
        assert next(iterator) == 0
        time.sleep(0.05)
        assert calls == [0]


def test_any_iterator_can_be_wrapped():
    class Counter:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == 4:
                raise StopIteration
            self.at += 1
            return self.at

        def get_state(self):
            return {"at": self.at}

        def set_state(self, state):
            self.at = state["at"]

    stage = ThreadPrefetchStage.around(Counter(), 2)
    stage.start_prefetch()
    assert stage.pull(1).elements == [1]
    assert stage.state() == {"at": 1}
    assert drain(stage)[0] == [2, 3, 4]
    stage.restore({"at": 2})
    assert drain(stage)[0] == [3, 4]
    with pytest.raises(ValueError, match="must be greater than or equal to 0, got -1"):
        ThreadPrefetchStage.around(Counter(), -1)


def test_interpreter_leaves_in_silence_while_a_parent_is_stuck():
    program = textwrap.dedent("""
        import time
        from grainmill._iterators.thread_prefetch import ThreadPrefetchStage
        def stuck():
            yield 1
            time.sleep(1000)
        def busy():
            while True:
                yield sum(range(1000))
        kept = [ThreadPrefetchStage.around(make(), 2) for make in (stuck, busy, busy)]
        print([len(stage.pull(1).elements) for stage in kept])
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 1, 1]\n", "")


SHARED = {
    "elements": lambda ds: ds,
    "batches": lambda ds: ds.batch(7),
    "prefetched": lambda ds: ThreadPrefetchIterDataset(ds, prefetch_buffer_size=4),
    "filtered": lambda ds: ds.filter(lambda x: x is not None),
}


@pytest.mark.parametrize("num_threads", [0, 16])
@pytest.mark.parametrize("name", SHARED)
def test_threads_that_share_an_iterator_get_each_element_once(name, num_threads):
    read = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=20)
    ds = grain.MapDataset.range(500).map(lambda x: x).to_iter_dataset(read)
    for _ in range(5):
        iterator = iter(SHARED[name](ds))
        found = [[] for _ in range(3)]
        threads = [threading.Thread(target=part.extend, args=(iterator,)) for part in found]
        for thread in threads:
            thread.start()
        for _ in range(20):
            iterator.get_state()
        for thread in threads:
            thread.join()
        elements = np.concatenate([np.atleast_1d(x) for part in found for x in part])
        assert sorted(elements.tolist()) == list(range(500))
        iterator.close()


def test_what_is_ahead_is_bounded_by_bytes(monkeypatch):
    """A huge buffer is limited to a quarter of the memory: here 16 elements."""
    monkeypatch.setattr(thread_prefetch, "default_budget_bytes", lambda: 16 << 20)
    calls = []

    def function(x):
        calls.append(x)
        return np.zeros(1 << 20, np.uint8)

    ds = grain.MapDataset.range(10**6).to_iter_dataset().map(function)
    with iter(ThreadPrefetchIterDataset(ds, prefetch_buffer_size=10**9)) as iterator:
        for _ in range(40):
            next(iterator)
        assert becomes(lambda: len(calls) >= 48)
        assert count_at_rest(calls) - 40 <= 18
