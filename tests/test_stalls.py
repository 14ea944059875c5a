"""Waits that last: one warning names who is awaited, the element and the line, then fewer."""

import functools
import itertools
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from under_test import IS_GRAIN, grain
from worker_harness import all_of, run_script, workers

if IS_GRAIN:
    pytest.skip("Grain waits without a word", allow_module_level=True)

from grainmill._evaluate.program import PendingElements, Program
from grainmill._threads import is_own_thread

BAD = 5
SOON_S = 60.0


def waits_in_a_helper(x):
    if x == BAD:
        threading.Event().wait()
    return x


def hangs(x):
    return waits_in_a_helper(x)


def computes(x):
    while x == BAD:
        pass
    return x


def in_c(x):
    if x == BAD:  # this neither returns nor runs the handlers of Python's signals
        re.match(r"(a|a)*b", "a" * 60)
    return x


LINES = {
    function.__name__: function.__code__.co_firstlineno + 1 for function in (hangs, computes)
} | {"in_c": in_c.__code__.co_firstlineno + 2}


@pytest.fixture(autouse=True)
def _soon():
    """Warnings come after a tenth of a second."""
    grain.config.update("stall_warning_s", 0.1)
    yield
    grain.config.update("stall_warning_s", 20.0)
    grain.config.update("stall_timeout_s", 0.0)


def _thread_prefetch(ds):
    return grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)


WAYS = {
    "threads": lambda ds: ds.to_iter_dataset(),
    "batches": lambda ds: ds.batch(1).to_iter_dataset(),
    "num_workers": lambda ds: ds.to_iter_dataset(grain.ReadOptions(num_workers=2)),
    "mp_prefetch": lambda ds: ds.to_iter_dataset().mp_prefetch(
        grain.MultiprocessingOptions(num_workers=2)
    ),
    "thread prefetch": lambda ds: _thread_prefetch(ds.to_iter_dataset()),
    "thread prefetch of threads": lambda ds: _thread_prefetch(
        _thread_prefetch(ds.to_iter_dataset(grain.ReadOptions(num_threads=2)))
    ),
    "thread prefetch of workers": lambda ds: _thread_prefetch(
        ds.to_iter_dataset(grain.ReadOptions(num_workers=2))
    ),
    "threads for shards": lambda ds: grain.experimental.multithread_prefetch(
        ds.to_iter_dataset(), 2, 2
    ),
    "packing": lambda ds: grain.experimental.FirstFitPackIterDataset(
        ds.map(lambda x: {"x": [x]}).to_iter_dataset(), length_struct={"x": 2}, num_packing_bins=2
    ),
}
IN_PROCESSES = {"num_workers", "mp_prefetch", "thread prefetch of workers"}


def warned(iterator, caplog, name, count=1):
    """The warnings that show the function `name`, until there are `count`.

    Meanwhile this thread waits for an element. Workers may take longer to start than the first
    warnings, which show no function, or that of their start.
    """
    caplog.set_level(logging.WARNING, "grainmill")

    def found():
        messages = [record.getMessage() for record in list(caplog.records)]
        return [message for message in messages if f"in {name}\n" in message]

    def close_after():
        until = time.monotonic() + SOON_S
        while len(found()) < count and time.monotonic() < until:
            time.sleep(0.01)
        iterator.close()

    closing = threading.Thread(target=close_after)
    closing.start()
    with pytest.raises(ValueError, match="closed iterator"):
        all_of(iterator)
    closing.join()
    return found()


@pytest.mark.parametrize("way", WAYS)
def test_wait_that_lasts_names_who_is_awaited_and_the_line(way, caplog):
    ds = grain.MapDataset.source(list(range(20))).map(hangs)
    iterator = iter(WAYS[way](ds))
    messages = warned(iterator, caplog, "hangs", 3)
    first = messages[0]
    who = "worker [01]" if way in IN_PROCESSES else r"thread grain-(?:thread-)?prefetch_\d+"
    text = rf"{who} has returned no result for ([\d.]+) s while computing "
    waits_s = [float(re.match(text, message)[1]) for message in messages]
    # A wait may end, and another one begin, while workers start.
    assert any(then == 2 * before for before, then in itertools.pairwise(waits_s)), messages
    assert f'File "{__file__}", line {LINES["hangs"]}, in hangs\n' in first, first
    assert "return waits_in_a_helper(x)\n" in first
    assert "in waits_in_a_helper\n" in first
    assert __file__ in first.partition("File")[0]  # the stage
    if way == "mp_prefetch":
        assert f"element {BAD}\n" in first
    elif way == "batches":
        first, last = re.search(r"elements? (\d+)(?: to (\d+))? of `Batch", first).groups()
        assert int(first) <= BAD <= int(last or first)
    else:
        assert f"from record {BAD} of `SourceMapDataset" in first


@pytest.mark.parametrize("function", [computes, in_c], ids=["computes", "in_c"])
def test_stack_of_a_worker_is_taken_whatever_it_does(function, caplog):
    ds = grain.MapDataset.range(20).map(function)
    name = function.__name__
    message, *_ = warned(iter(WAYS["num_workers"](ds)), caplog, name)
    line = re.search(f'File "{__file__}", line (\\d+), in {name}\n', message)[1]
    assert int(line) - LINES[name] in {0, 1}


def test_function_of_a_stage_is_named_where_no_reader_computes(caplog):
    ds = grain.MapDataset.range(20).to_iter_dataset().map(hangs)
    message, *_ = warned(iter(_thread_prefetch(ds)), caplog, "hangs")
    assert "while computing its next element" in message
    assert f"line {LINES['hangs']}, in hangs" in message


@pytest.mark.parametrize("way", WAYS)
def test_limit_makes_an_error_of_it(way):
    # Both the thread that waits for a worker and a thread in the worker may be the first to raise.
    kinds = (grain.WorkerError, TimeoutError) if way in IN_PROCESSES else TimeoutError
    message = r"returned no result for .* while computing .*; the limit is `\w*timeout_s=[\d.]+`"
    limit_s, text = 1 if way in IN_PROCESSES else 0.25, ""
    while "in hangs\n" not in text and limit_s < SOON_S:  # workers may start slowly
        grain.config.update("stall_timeout_s", limit_s)
        iterator = iter(WAYS[way](grain.MapDataset.range(20).map(hangs)))
        with pytest.raises(kinds, match=message) as failure:
            all_of(iterator)
        text = str(failure.value)
        limit_s *= 4
        iterator.close()
    assert "in hangs\n" in text


def test_nothing_is_said_where_nobody_waits_or_never_is_asked_for(caplog):
    caplog.set_level(logging.WARNING, "grainmill")

    def slow(x):
        time.sleep(0.4 if x == 1 else 0)
        return x

    iterator = iter(_thread_prefetch(grain.MapDataset.range(4).to_iter_dataset().map(slow)))
    assert next(iterator) == 0
    time.sleep(1)  # the thread computes meanwhile
    assert list(iterator) == [1, 2, 3]
    grain.config.update("stall_warning_s", 0)
    ds = grain.MapDataset.range(4).map(slow)
    with ThreadPoolExecutor(len(WAYS)) as pool:
        lengths = list(pool.map(lambda way: sum(1 for _ in way(ds)), WAYS.values()))
    assert set(lengths) == {2, 4}
    assert not caplog.records


def test_own_threads_and_workers_leave_reports_to_their_consumer():
    assert not is_own_thread()
    ds = grain.MapDataset.range(4).map(lambda _: is_own_thread())
    assert all(ds.to_iter_dataset(grain.ReadOptions(num_workers=1)))
    assert all(_thread_prefetch(ds.to_iter_dataset().map(lambda x: x)))


def test_workers_that_are_started_one_by_one_are_asked_too(tmp_path):
    script = """
import logging, os, threading
import grainmill as grain
from grainmill._workers import worker_group

class EndAtTheReport(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "in hangs" in text:
            print(text, flush=True)
            os._exit(0)

worker_group._can_fork[0] = False
logging.getLogger().addHandler(EndAtTheReport())

def hangs(x):
    if x == 3:
        threading.Event().wait()
    return x

options = grain.ReadOptions(num_workers=2, stall_warning_s=0.1)
list(grain.MapDataset.range(9).map(hangs).to_iter_dataset(options))
"""
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'File "{tmp_path / "script.py"}", line 18, in hangs' in done.stdout, done


def test_where_no_function_of_the_user_runs_it_says_so(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "grainmill")
    hung = threading.Lock()
    hung.acquire()
    wait = staticmethod(functools.partial(hung.acquire, timeout=2))
    monkeypatch.setattr(PendingElements, "wait", wait)
    monkeypatch.setattr(Program, "waits_for_storage", True)
    iterator = iter(grain.MapDataset.range(20).map(hangs).to_iter_dataset())
    assert next(iterator) == 0
    iterator.close()
    nothing = "no function of yours is running there: it reads, or waits for storage"
    messages = [record.getMessage() for record in caplog.records]
    (message, *_) = [message for message in messages if message.endswith(nothing)]
    assert "from record 0 of `RangeMapDataset" in message


def wait_for_report(caplog):
    until = time.monotonic() + SOON_S
    while not caplog.records and time.monotonic() < until:
        time.sleep(0.01)


def test_stopped_worker_is_reported_as_one(caplog):
    caplog.set_level(logging.WARNING, "grainmill")
    iterator = iter(WAYS["num_workers"](grain.MapDataset.range(10**6).map(computes_little)))
    assert next(iterator) == 0
    caplog.clear()
    stopped = workers()
    for worker in stopped:
        worker.suspend()

    def resume():
        wait_for_report(caplog)
        for worker in stopped:
            worker.resume()

    threading.Thread(target=resume).start()
    for _ in range(10**5):
        next(iterator)
        if caplog.records:
            break
    iterator.close()
    assert "it has just started or gone on, or is stopped" in caplog.records[0].getMessage()


def computes_little(x):
    return x
