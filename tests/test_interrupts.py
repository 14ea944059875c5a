"""Signals during any line of a `next`: the next call returns the next element, and none is lost."""

import contextlib
import ctypes
import functools
import gc
import inspect
import io
import linecache
import os
import random
import signal
import sys
import threading
from pathlib import Path

import effort
import numpy as np
import opcodes
import pipelines
import pytest
from pipelines import add_one, build, encode
from stages import STAGES
from under_test import INLINE, IS_GRAIN, experimental, grain

if not IS_GRAIN:
    from grainmill._stats.thread_clock import ThreadClock

from grainmill._interrupts import came_after_call

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset
PACKAGE = f"{os.sep}grainmill{os.sep}"
pytestmark = pytest.mark.better_than_grain("Grain loses the element in flight")


NAMES = [name for name in STAGES if "mp_prefetch" not in name and "empty" not in name]
# Starting processes takes longer than all places of others.
WORKERS = ["mp_prefetch", "mp_prefetch_packed", "mp_prefetch_user_iter"]
MORE = {
    "threads_batch": lambda: arrays(grain.ReadOptions()).batch(4),
    "map_batch": lambda: MapDataset.range(40).map(np.array).batch(4).to_iter_dataset(INLINE),
    "filtered_batch": lambda: arrays().filter(lambda x: x[0] % 3 > 0).batch(4),
    "rows_packed": lambda: experimental.FirstFitPackIterDataset(
        MapDataset.range(40).map(lambda x: {"t": np.full(1 + x % 5, x)}).to_iter_dataset(INLINE),
        length_struct={"t": 8},
        num_packing_bins=4,
    ).batch(3),
    "whole_blocks": lambda: MapDataset.range(30).map(WholeBlocks()).to_iter_dataset(INLINE),
    "source_with_blocks": lambda: MapDataset.source(Blocks()).to_iter_dataset(INLINE).batch(4),
    "operations": lambda: grain.DataLoader(
        data_source=Blocks(),
        sampler=grain.samplers.SequentialSampler(30, grain.sharding.NoSharding()),
        operations=[AddOne(), grain.transforms.Batch(4)],
        worker_count=0,
    ),
    "whole_blocks_mixed": lambda: MapDataset.mix(
        [MapDataset.range(15).map(WholeBlocks()), MapDataset.range(15).map(WholeBlocks())]
    ).to_iter_dataset(INLINE),
}
USERS_ITERATORS = ["user_iter_in_the_middle", "user_iter_source", "user_iter_mixed"]
# Users' iterators of all kinds, in which signals come, too.
USERS = {
    **{name: functools.partial(build, grain, STAGES[name]) for name in USERS_ITERATORS},
    "outputs": lambda: experimental.FlatMapIterDataset(inline(0, 9), Outputs()),
    "outputs_by_index": lambda: experimental.FlatMapMapDataset(
        MapDataset.range(9), Outputs()
    ).to_iter_dataset(INLINE),
    "answers": lambda: MapDataset.source(Answers()).to_iter_dataset(INLINE).batch(4),
    "functions": lambda: MapDataset.range(30).map(add_one).to_iter_dataset(INLINE).map(add_one),
}


class AddOne(grain.transforms.Map):
    def map(self, element):
        return element + 1


class WholeBlocks(AddOne):
    def map_block(self, elements):
        return [element + 1 for element in elements]


class Blocks:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return np.array(index)

    def __getitems__(self, indices):
        return [np.array(index) for index in indices]


class Few:
    """Its iterators are objects of Python, which signals may interrupt."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return FewIterator(self.values)


class FewIterator:
    def __init__(self, values):
        self.values = list(values)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.values:
            raise StopIteration
        return self.values.pop(0)


class Outputs(experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element):
        return Few([element] * (element % 4))


class Answers(Blocks):
    def __getitems__(self, indices):
        return Few([np.array(index) for index in indices])


SIGNALS = ["thread_prefetch", "main_job", "interleave", "user_iter_mixed", "operations"]
# Quick iterators, whose time goes into their own `__next__`, which may call that of another.
QUICK = {
    "numbers": lambda: iter(MapDataset.range(300).to_iter_dataset(INLINE)),
    "elastic": lambda: elastic(MapDataset.range(300)),
    "elastic_shards": lambda: elastic(MapDataset.range(300).filter(lambda x: x % 3 > 0)),
    "progress": lambda: grain.progress(
        iter(MapDataset.range(150).to_iter_dataset(INLINE)), file=io.StringIO()
    ),
}


def elastic(dataset):
    shard = grain.sharding.ShardOptions(1, 2)
    return experimental.ElasticIterator(dataset, 4, shard, read_options=INLINE)


def arrays(options=INLINE):
    return MapDataset.range(40).map(lambda x: np.array([x])).to_iter_dataset(options)


def inline(start, stop):
    return MapDataset.range(start, stop).map(add_one).to_iter_dataset(INLINE)


def dataset_of(name):
    make = MORE.get(name) or USERS.get(name)
    return build(grain, STAGES[name]) if make is None else make()


class Preempted(Exception):  # noqa: N818 - a name that trainers use
    """What a trainer's own signal handler raises."""


# What handlers raise: also what ends data, or what this package itself catches.
KINDS = [
    Preempted,
    KeyboardInterrupt,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
]


@contextlib.contextmanager
def raising(kind):
    """Expects that `kind` is raised, or what Python and this package replace `StopIteration` by."""
    try:
        yield
    except kind:
        pass
    except RuntimeError as failure:
        if not (kind is StopIteration and isinstance(failure.__cause__, kind)):
            raise


def is_in_package(code):
    return PACKAGE in code.co_filename


def is_users(code):
    """Whether `code` is that of a user's function or iterator, rather than of the test itself."""
    names = {pipelines.__file__, __file__}
    return code.co_filename in names and code is not Interrupt.__exit__.__code__


def is_in_finalizer(frame):
    """Whether Python ignores what is raised in the function that `frame` runs."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or "weakref" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Interrupt:
    """Raises `kind` at the `at`-th place: before a line, or after a call of C.

    They are counted in the code for which `is_place` is true. Garbage collection is disabled
    meanwhile: it would run `__del__` of iterators of other tests, and Python ignores exceptions in
    those.
    """

    def __init__(self, at, kind, place, is_place=is_in_package):
        self.left = at
        self.is_place = is_place
        self.kind, self.place = kind, place
        self._set = sys.settrace if place == "line" else sys.setprofile
        self._event = place
        self._lines = {}  # the last one of each frame

    def __enter__(self):
        gc.disable()
        self._before = sys.gettrace() if self._set is sys.settrace else sys.getprofile()
        self._set(self._trace)
        return self

    def __exit__(self, *_):
        self._set(self._before)
        gc.enable()

    def _trace(self, frame, event, _):
        if not self.is_place(frame.f_code):
            return None
        if event == self._event and not self._leaves_with(frame):
            self.left -= 1
            if not self.left and (is_in_finalizer(frame) or self._ends_generator(frame)):
                self.left = 1  # the next place
            elif not self.left:
                self._set(None)
                raise self.kind
        return self._trace

    def _ends_generator(self, frame):
        """Whether CPython, from 3.12 on, may take the exception for the end of a generator."""
        return self.kind is StopIteration and frame.f_code.co_flags & inspect.CO_GENERATOR

    def _leaves_with(self, frame):
        """Whether it is at the end of a `with`, where no handler runs before a lock is free."""
        if self._event != "line":
            return False
        before, self._lines[frame] = self._lines.get(frame, 0), frame.f_lineno
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        return line.startswith("with ") and before > frame.f_lineno


@pytest.mark.parametrize("place", ["line", "c_return"])
@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_nothing_is_lost_or_repeated_after_an_interrupt(name, place):
    check(name, place, effort.cases(1, 120), 6)


@pytest.mark.parametrize("name", USERS)
def test_nothing_is_lost_or_repeated_after_an_interrupt_of_a_users_code(name):
    check(name, "line", effort.cases(4, 120), 10, is_users)


@pytest.mark.parametrize("place", ["line", "c_return"])
@pytest.mark.parametrize("name", WORKERS)
def test_nothing_is_lost_or_repeated_after_an_interrupt_with_workers(name, place):
    check(name, place, effort.cases(1, 25), 2)


def check(name, place, num_elements, num_places, is_place=is_in_package):
    """Interrupts the `next` of some elements, each at places drawn by chance or at the first ones.

    Which elements they are, and the kinds of exceptions, are drawn as well.
    """
    dataset = dataset_of(name)
    expected = [encode(element) for element in dataset]
    draw = random.Random(f"{name} {place} {effort.SEED}")
    for nth in range(num_elements):
        num_before = draw.randrange(len(expected))
        last = count_places(dataset, num_before, place, is_place)
        places = [1, 2, 3, 4][:num_places] if nth == 0 else []
        if last:
            places += [draw.randint(1, last) for _ in range(num_places - len(places))]
        for at in places:
            if at <= last:
                interrupt = Interrupt(at, draw.choice(KINDS), place, is_place)
                check_place(dataset, expected, num_before, interrupt)


def count_places(dataset, num_before, place, is_place):
    iterator = iter(dataset)
    for _ in range(num_before):
        next(iterator)
    with Interrupt(0, None, place, is_place) as counter:
        next(iterator)
    iterator.close()
    return -counter.left


def check_place(dataset, expected, num_before, interrupt):
    iterator = iter(dataset)
    found = [encode(next(iterator)) for _ in range(num_before)]
    where = f"{num_before} elements, then {interrupt.kind} at place {interrupt.left}"
    element = None
    with raising(interrupt.kind), interrupt:
        element = next(iterator)
    if interrupt.left <= 0:
        assert element is None, f"suppressed, or to be raised later: {where}"
    else:  # the pace of threads decides how many places there are
        found.append(encode(element))
    if interrupt.place == "c_return":  # no handler runs before each line, such as that of a release
        assert is_free_for_others(iterator), where
    state = iterator.get_state()
    num_found = len(found)
    assert getattr(iterator, "_num_delivered", num_found) == num_found, where
    found += map(encode, iterator)
    assert found == expected, where
    assert getattr(iterator, "_num_delivered", len(found)) == len(found), where
    iterator.set_state(state)
    assert [encode(element) for element in iterator] == expected[num_found:], where
    iterator.close()


def is_free_for_others(iterator):
    """Whether another thread may use the iterator: the owner of a lock may take it again."""
    found = []

    def take():
        lock = iterator._try_acquire()
        if lock is not None:
            lock.release()
        found.append(lock is not None)

    if hasattr(iterator, "_try_acquire"):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    return all(found)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Preempted, IndexError, StopIteration])
@pytest.mark.parametrize("name", [*SIGNALS, *QUICK])
def test_nothing_is_lost_where_signals_come(name, kind):
    make = QUICK.get(name) or functools.partial(iter, dataset_of(name))
    expected = [encode(element) for element in make()]
    moments = random.Random(0)
    num_interrupts = 0
    waiting = False

    def interrupt(_, frame):
        # A thread that is slow to take its turn may bring the signal after `next` has returned.
        if waiting and frame.f_code.co_filename != __file__ and not is_in_finalizer(frame):
            raise kind

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # Python ignores what is raised while it collects
    try:
        for num_done in range(400):
            if num_done >= effort.cases(3, 40) and num_interrupts:  # none may come in few
                break
            iterator, found = make(), []
            while len(found) < len(expected):
                element = None
                with raising(kind):
                    try:
                        waiting = True
                        signal.setitimer(signal.ITIMER_REAL, moments.uniform(2e-5, 4e-4))
                        element = next(iterator)
                    finally:
                        waiting = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                num_interrupts += element is None
                if element is not None:
                    found.append(encode(element))
            assert found == expected
            iterator.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert num_interrupts


def open_statistics():
    """The files that `ThreadClock` keeps open."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            found += [file.name] if file.readlink().name == "schedstat" else []
    return found


def interrupted_at(call, place):
    """Whether `call` had as many opcodes in the package, before the last of which it ended."""
    left = place

    def trace(frame, event, _):
        nonlocal left
        if PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                sys.settrace(None)
                raise Preempted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Preempted:
        return True
    finally:
        sys.settrace(before)
    return False


@opcodes.traced
def test_the_clock_of_a_thread_leaves_no_file_open_wherever_a_signal_comes():
    before = open_statistics()
    place = 1
    while interrupted_at(ThreadClock, place):
        assert open_statistics() == before, place
        place += 1
    assert place > 10
    clock = ThreadClock()
    assert clock.read().cpu_s > 0
    assert len(open_statistics()) == len(before) + 1
    del clock
    assert open_statistics() == before


class Late(Exception):  # noqa: N818 - what a handler raises
    """Raised by the handler of a signal that comes while C computes."""


class Signals:
    """Sends the signal that it is compared with, in C, and is not equal to it."""

    __eq__ = staticmethod(ctypes.PyDLL(None)["raise"])
    __hash__ = None


@pytest.mark.parametrize("num_calls", [1, 100])
def test_an_interrupt_after_a_call_is_known(num_calls):
    """Also once the interpreter has adapted the call to what it calls."""

    def handler(_, __):
        raise Late

    def position(values, value):
        try:
            return values.index(value)
        except Late as late:
            return came_after_call(late)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(num_calls - 1):
            position([0], 0)
        assert position([Signals(), signal.SIGALRM], signal.SIGALRM) is True
    finally:
        signal.signal(signal.SIGALRM, before)
