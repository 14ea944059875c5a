"""Workers' elements arrive unchanged (values, types, order), and so do their exceptions."""

import collections
import contextlib
import dataclasses
import gc
import os
import pickle
import re
import signal
import textwrap
import threading
import time

import numpy as np
import pytest
from effort import cases
from under_test import IS_GRAIN, grain
from worker_harness import ENTRANCES, all_of, environment, opened, run_script

from grainmill.array_record import ArrayRecordWriter

ml_dtypes = pytest.importorskip("ml_dtypes")

pytestmark = pytest.mark.skipif(IS_GRAIN, reason="about the pool of workers")
both = pytest.mark.parametrize("entrance", ENTRANCES)

Point = collections.namedtuple("Point", "x y")  # noqa: PYI024


@dataclasses.dataclass
class Record:
    name: str
    array: np.ndarray


class Strange(dict):
    """A subclass of `dict`."""


def _nested(depth):
    value = np.arange(3)
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


def _cyclic(x):
    value = [x, {"self": None}]
    value[1]["self"] = value
    return value


def _masked(x):
    return np.ma.masked_array(np.arange(4) + x, mask=[0, 1, 0, 1])


def _aliased(x):
    array, inner = np.arange(3) + x, [x]
    return [array, array, inner, inner, {"a": array}]


STRUCTURED = np.dtype([("a", "<i4"), ("b", "S3"), ("c", "<f8", (2,))])

VALUES = {
    "scalars": lambda x: (x, float(x), bool(x % 2), None, str(x), bytes([x]), 1j * x, 10**30 + x),
    "numpy_scalars": lambda x: [
        np.int8(x),
        np.float16(x),
        np.bool_(x),
        np.str_(x),
        np.bytes_(b"ab"),
    ],
    "datetimes": lambda x: {
        "a": np.array([x, x + 1], "datetime64[us]"),
        "b": np.datetime64(x, "D"),
        "c": np.array(x, "timedelta64[s]"),
    },
    "namedtuple": lambda x: Point(np.arange(x), Point(x, "y")),
    "dataclass": lambda x: Record(str(x), np.arange(x)),
    "dict_subclass": lambda x: Strange(a=x),
    "ordered_dict": lambda x: collections.OrderedDict([("b", x), ("a", np.arange(2))]),
    "dict_order": lambda x: {"z": x, "a": 1} if x % 2 else {"a": 1, "z": x},
    "key_types": lambda x: {1: "int", "1": "str", (1, 2): np.arange(2), None: x, 2.5: 0},
    "equal_keys": lambda x: {1: x} if x % 2 else {True: x},
    "masked": _masked,
    "record_array": lambda x: np.rec.array([(x, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "zero_d": lambda x: {"a": np.array(x), "b": np.array(1.5), "c": np.array("text")},
    "zero_length": lambda x: [np.zeros((0, 3)), np.zeros((x % 3, 0), "U0"), np.array([], object)],
    "fortran": lambda x: np.asfortranarray(np.arange(12.0).reshape(3, 4) + x),
    "fortran_large": lambda x: np.asfortranarray(np.arange(40_000.0).reshape(200, 200) + x),
    "negative_strides": lambda x: (np.arange(10)[::-1] + x)[::-2],
    "transposed": lambda x: np.ones((2, 3, 4), np.int16).transpose(2, 0, 1) * x,
    "broadcast": lambda x: np.broadcast_to(np.array(x), (4, 5)),
    "objects": lambda x: np.array([x, "text", None, [1]], object),
    "bfloat16": lambda x: np.arange(5).astype(ml_dtypes.bfloat16) + x,
    "float8": lambda _: np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "big_endian": lambda x: np.arange(5, dtype=">i4") + x,
    "strings": lambda x: np.array(["a", "bcd" * x, ""]),
    "bytes": lambda _: np.array([b"a", b"bc"]),
    "structured": lambda x: np.array([(x, b"ab", (1, 2))] * 2, STRUCTURED),
    "structured_scalar": lambda x: np.array([(x, b"ab", (1, 2))], STRUCTURED)[0],
    "nones": lambda x: {"a": None, "b": [None, x], "c": (None,)},
    "empties": lambda x: ({}, [], (), "", b"", set(), frozenset([x])),
    "mixed_dtypes": lambda x: np.arange(3, dtype=[np.int32, np.int64][x % 2]),
    "mixed_ranks": lambda x: np.zeros((2,) * (x % 3)),
    "mixed_types": lambda x: [x, np.arange(3), "s", {"a": 1}][x % 4],
    "deep": lambda _: _nested(150),
    "many_arrays": lambda x: {f"k{i}": np.full(i % 5, x) for i in range(1500)},
    "aliased": _aliased,
    "arrays_of_64k": lambda x: [np.full(20_000, x)] * 2,
    "large": lambda x: {"a": np.full((300, 300), x), "b": x},
}


def same(left, right):  # noqa: PLR0911
    """Whether two values agree in type, dtype, order and content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype == object:
            return all(map(same, left.ravel().tolist(), right.ravel().tolist()))
        if isinstance(left, np.ma.MaskedArray):
            return np.array_equal(np.ma.getmaskarray(left), np.ma.getmaskarray(right)) and same(
                left.data, right.data
            )
        fortran = left.flags.f_contiguous and not left.flags.c_contiguous
        if fortran and not right.flags.f_contiguous:
            return False
        return left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        if len(left) != len(right):
            return False
        return all(same(k, j) and same(left[k], right[j]) for k, j in zip(left, right, strict=True))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return same(vars(left), vars(right))
    return left == right


@both
@pytest.mark.parametrize("names", [list(VALUES)[i::2] for i in range(2)], ids=range(2))
def test_elements_arrive_as_they_were_made(entrance, names):
    """One pool computes all kinds, several elements of each so that a message has several."""
    count = 9

    def make(i):
        return {"value": VALUES[names[i // count]](i % count + 1)}

    iterator = opened(grain.MapDataset.range(count * len(names)).map(make), entrance, 2)
    try:
        for i in range(count * len(names)):
            found, expected = next(iterator), make(i)
            assert same(found, expected), (names[i // count], found, expected)
    finally:
        iterator.close()


@both
def test_cyclic_elements_stay_cyclic(entrance):
    iterator = opened(grain.MapDataset.range(6).map(_cyclic), entrance, 2)
    for x, element in enumerate(iterator):
        assert element[0] == x
        assert element[1]["self"] is element
    iterator.close()


BATCHED = [
    "zero_d",
    "zero_length",
    "fortran",
    "negative_strides",
    "broadcast",
    "bfloat16",
    "float8",
    "big_endian",
    "strings",
    "bytes",
    "structured",
    "datetimes",
    "numpy_scalars",
    "mixed_dtypes",
    "many_arrays",
    "large",
    "masked",
    "nones",
]


@both
@pytest.mark.parametrize("names", [BATCHED[i::3] for i in range(3)], ids=range(3))
def test_batches_are_those_of_no_workers(entrance, names):
    """One pool batches all kinds, up to one that cannot be batched."""
    while names:
        makes = [VALUES[name] for name in names]
        ds = grain.MapDataset.range(6 * len(names))
        ds = ds.map(lambda x, makes=makes: {"v": makes[x // 6](x % 6 + 1)})
        plain = iter(ds.to_iter_dataset().batch(3))
        iterator = opened(ds, entrance, 1, batch_size=3)
        try:
            for number in range(2 * len(names) + 1):
                name = names[number // 2] if number < 2 * len(names) else "the end"
                try:
                    expected = next(plain, None)
                except Exception as failure:
                    with pytest.raises(type(failure)):
                        next(iterator)
                    names = names[number // 2 + 1 :]
                    break
                assert same(next(iterator, None), expected), name
            else:
                assert expected is None
                names = []
        finally:
            iterator.close()
            plain.close()


@both
def test_arrays_that_the_worker_keeps_are_its_own(entrance):
    """A batch that is sent again, or changed later, is not what was delivered."""
    kept = []

    def first_again(batch):
        if not kept:
            kept.append(batch)
        return {"first": kept[0]["x"], "now": batch["x"]}

    ds = grain.MapDataset.range(160).map(lambda x: {"x": np.full(9000, x)})
    iterator = opened(ds.batch(4).map(first_again), entrance, 1)
    held = []
    for i, element in enumerate(iterator):
        assert element["now"][:, 0].tolist() == [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]
        element["now"][:] = -1
        held.append(element["first"])
    assert len(held) == 40
    assert all(first[:, -1].tolist() == [0, 1, 2, 3] for first in held)
    iterator.close()


def test_batches_stay_in_their_slot_on_the_way():
    """A batch's bytes are copied once in the worker, and not at all in the parent."""
    native = pytest.importorskip("grainmill._native")

    def copied(batch):
        return {"x": batch["x"], "copied": native.copied_bytes()}

    size = 4 * 100_000 * 8
    ds = grain.MapDataset.range(120).map(lambda x: {"x": np.full(100_000, x)}).batch(4)
    for num_workers, in_parent in ((1, 0), (0, 30)):
        before = native.copied_bytes()
        # With one thread, batches are computed and counted in order.
        options = {"prefetch_buffer_size": 4, "num_threads": 1}
        batches = all_of(opened(ds.map(copied), "read", num_workers, **options))
        grown = native.copied_bytes() - before
        assert in_parent * size <= grown <= (in_parent + 0.1) * size + size
        if num_workers:
            in_worker = int(batches[-1]["copied"]) - int(batches[0]["copied"])
            assert 29 * size <= in_worker <= 29.5 * size


def test_batches_of_a_whole_pipeline_stay_in_their_slot_too():
    native = pytest.importorskip("grainmill._native")
    size = 64 * 3125 * 8
    ds = grain.MapDataset.range(64 * 60).map(lambda x: np.full(3125, x))
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=0)).batch(64)
    ds = ds.map(lambda batch: {"x": batch, "copied": native.copied_bytes()})
    batches = list(ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    in_worker = int(batches[-1]["copied"]) - int(batches[0]["copied"])
    assert 59 * size <= in_worker <= 60 * size


# --- what cannot be sent ------------------------------------------------------------------------

UNSENDABLE = {
    "lock": (threading.Lock, "lock", ""),
    "generator": (lambda: (i for i in range(3)), "generator", ""),
    "open_file": (lambda: open(os.devnull), "TextIOWrapper", ""),  # noqa: PTH123, SIM115
    "in_dict": (lambda: {"a": {"b": [0, threading.Lock()]}}, "lock", "['a']['b'][1]"),
    "in_dataclass": (lambda: {"r": Record("r", threading.Lock())}, "lock", "['r'].array"),
    "in_objects": (lambda: {"o": np.array([1, threading.Lock()], object)}, "lock", "['o'][1]"),
}


@contextlib.contextmanager
def pool_of(actions, entrance):
    """A pool of one worker whose elements are 0 to 4 and what an action returns, for each action.

    Yields a function that returns the iterator before the elements of a name in `actions`, and the
    number of the action's element.
    """
    names, each = list(actions), 6

    def act(x):
        return actions[names[x // each]][0]() if x % each == each - 1 else x % each

    elements = grain.MapDataset.range(each * len(names))
    with opened(elements.map(lambda x: x), entrance, 1) as plain:
        states = []
        for _ in elements:
            states.append(plain.get_state())
            next(plain)
    with opened(elements.map(act), entrance, 1) as iterator:

        def before(name):
            start = each * names.index(name)
            iterator.set_state(states[start])
            return iterator, start + each - 1

        yield before


@pytest.fixture(scope="module", params=ENTRANCES)
def unsendable(request):
    with pool_of(UNSENDABLE, request.param) as before:
        yield before


@pytest.mark.parametrize("name", UNSENDABLE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_can_not_be_sent_is_named(unsendable, name):
    _, kind, place = UNSENDABLE[name]
    iterator, number = unsendable(name)
    assert all_of(iterator, 5) == [0, 1, 2, 3, 4]
    message = rf"element {number} cannot be sent by worker 0"
    for _ in range(2):
        with pytest.raises(TypeError, match=message) as caught:
            next(iterator)
        assert f"a value of type {kind}" in str(caught.value)
        assert place in str(caught.value)


def test_batch_that_can_not_be_sent_is_named():
    def make(x):
        return {"x": x, "o": threading.Lock() if x == 13 else object}

    ds = grain.MapDataset.range(40).map(make)
    iterator = opened(ds, "read", 1, batch_size=4)
    assert [next(iterator)["x"].tolist()[0] for _ in range(3)] == [0, 4, 8]
    for _ in range(2):
        with pytest.raises(TypeError, match=r"batch of elements 12 to 15 .*\['o'\]\[1\].* lock"):
            next(iterator)
    iterator.close()


# --- exceptions ----------------------------------------------------------------------------------


class TwoArgumentsError(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code


def _raise_local():
    class LocalError(LookupError):
        pass

    raise LocalError("local")


def _raise_holding():
    failure = RuntimeError("holds", 3)
    failure.lock = threading.Lock()
    failure.number = 5
    raise failure


def _raise_chained():
    try:
        {}["key"]
    except KeyError as missing:
        raise ValueError("from") from missing


def _raise_in_handler():
    try:
        x = []
        x[3]
    except IndexError:
        raise ValueError("while handling")  # noqa: B904


def _recurse(x=0):
    return _recurse(x + 1)


def _raising(failure):
    raise failure


class _BadTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _raise_without_text():
    raise _BadTextError


RAISED = {
    "value": (lambda: _raising(ValueError("bad")), ValueError, "bad"),
    "local": (_raise_local, LookupError, "local"),
    "two_arguments": (lambda: _raising(TwoArgumentsError(3, "why")), TwoArgumentsError, "3: why"),
    "holding_a_lock": (_raise_holding, RuntimeError, "holds"),
    "chained": (_raise_chained, ValueError, "from"),
    "in_handler": (_raise_in_handler, ValueError, "while handling"),
    "stop_iteration": (lambda: next(iter([])), RuntimeError, "StopIteration"),
    "keyboard_interrupt": (lambda: _raising(KeyboardInterrupt("k")), KeyboardInterrupt, "k"),
    "generator_exit": (lambda: _raising(GeneratorExit("g")), GeneratorExit, "g"),
    "memory": (lambda: _raising(MemoryError("no room")), MemoryError, "no room"),
    "recursion": (_recurse, RecursionError, "maximum recursion depth"),
    "os": (lambda: open("/nowhere/at/all"), FileNotFoundError, "/nowhere/at/all"),  # noqa: PTH123, SIM115
    "unicode": (lambda: b"\xff".decode(), UnicodeDecodeError, "0xff"),  # noqa: PLW0108
    "group": (lambda: _raising(ExceptionGroup("g", [ValueError("in")])), ExceptionGroup, "g"),
    "bad_text": (_raise_without_text, Exception, ""),
}


@pytest.fixture(scope="module", params=ENTRANCES)
def raising(request):
    with pool_of(RAISED, request.param) as before:
        yield before


@pytest.mark.parametrize("name", RAISED)
def test_exceptions_reach_the_consumer_in_their_place(raising, name):
    _, kind, text = RAISED[name]
    iterator, number = raising(name)
    assert all_of(iterator, 5) == [0, 1, 2, 3, 4]
    for _ in range(2):
        try:
            next(iterator)
        except BaseException as failure:
            caught = failure
        else:
            pytest.fail("nothing was raised")
        assert isinstance(caught, kind)
        if name != "bad_text":
            assert text in str(caught)
        notes = "\n".join(caught.__notes__)
        assert "in worker 0" in notes
        assert re.search(rf"element {number}\b", notes)
        assert "Traceback" in notes
    if name == "chained":
        assert isinstance(caught.__cause__, KeyError)
    if name == "in_handler":
        assert isinstance(caught.__context__, IndexError)
    if name == "holding_a_lock":
        assert caught.number == 5
        assert caught.args == ("holds", 3)
    if name == "two_arguments":
        assert caught.code == 3


@both
def test_exception_of_one_worker_waits_for_its_turn(entrance):
    def slow_or_bad(x):
        if x % 2 == 0:
            time.sleep(0.02)
        elif x >= 7:
            raise KeyboardInterrupt(x)
        return x

    iterator = opened(grain.MapDataset.range(20).map(slow_or_bad), entrance, 2)
    assert all_of(iterator, 7) == list(range(7))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    iterator.close()


@both
def test_message_of_many_megabytes_arrives(entrance):
    byte_len = cases(16, 100) << 20

    def shouts(_):
        raise ValueError("x" * byte_len)

    iterator = opened(grain.MapDataset.range(2).map(shouts), entrance, 1)
    with pytest.raises(ValueError, match=r"^x") as caught:
        next(iterator)
    assert len(str(caught.value)) == byte_len
    del caught
    gc.collect()
    iterator.close()


def test_large_states_tasks_and_set_ups_cross():
    import json  # noqa: PLC0415

    parts = [grain.MapDataset.range(2).map(lambda x: x).to_iter_dataset() for _ in range(700)]
    ds = grain.experimental.InterleaveIterDataset(parts, cycle_length=700)
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=4)
    ds = ds.mp_prefetch(options)
    iterator = iter(ds)
    first = all_of(iterator, 5)
    state = iterator.get_state()
    assert len(json.dumps(state)) > 1 << 14
    second = all_of(iterator, 5)
    iterator.set_state(state)
    assert all_of(iterator, 5) == second
    assert first == [0] * 5
    iterator.close()


def test_large_sources_and_environments_cross(monkeypatch):
    for i in range(400):
        monkeypatch.setenv(f"GRAINMILL_TEST_{i}", "x" * 1000)
    source = [np.full(3, i) for i in range(20_000)]
    ds = grain.MapDataset.source(source).map(lambda x: (x, os.environ["GRAINMILL_TEST_399"]))
    iterator = opened(ds, "read", 1)
    for i, (x, text) in enumerate(iterator):
        assert x[0] == i
        assert len(text) == 1000
    assert i == 19_999
    iterator.close()


# --- the main script -----------------------------------------------------------------------------

MAIN = """
import collections, dataclasses, functools, threading
import numpy as np
import grainmill as grain
from worker_harness import opened

class MainError(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

@dataclasses.dataclass
class MainRecord:
    x: int
    array: np.ndarray

class Outer:
    class Inner(tuple):
        pass

MainPoint = collections.namedtuple("MainPoint", "x y")

class Adder:
    def __init__(self, n):
        self.n = n
    def add(self, x):
        return x + self.n
    def __call__(self, x):
        return x * self.n

def fails(x):
    if x == 5:
        raise MainError("main", x)
    return x

def made_here(x):
    Made = collections.namedtuple("Made", "x")
    return Made(x)

def all_kinds(x):
    return MainPoint(x, x), Outer.Inner((x,)), made_here(x), MainRecord(x, np.arange(x))

offset = 7
for entrance, num_workers in (("read", 2), ("parts", 1)):
    ds = grain.MapDataset.range(6).map(fails).map(lambda x: x + offset)
    ds = ds.map(functools.partial(max, 9)).map(Adder(2).add).map(Adder(2)).map(all_kinds)
    iterator = opened(ds, entrance, num_workers)
    found = [next(iterator) for _ in range(5)]
    expected = [22, 22, 22, 24, 26]
    assert [made for *_, made, _ in found] == [(x,) for x in expected], (entrance, found)
    for x, (point, inner, made, record) in zip(expected, found):
        assert type(point) is MainPoint and point == (x, x)
        assert type(inner) is Outer.Inner and inner == (x,)
        assert made.x == x
        assert type(record) is MainRecord and len(record.array) == record.x == x
    try:
        next(iterator)
    except MainError as failure:
        assert failure.b == 5 and "element 5" in failure.__notes__[0]
    else:
        raise SystemExit("not raised")
    iterator.close()
print("fine")
"""

IN_INTERPRETER = """
import code
interpreter = code.InteractiveInterpreter({{"__name__": "__main__"}})
import __main__
__main__.__dict__.update(interpreter.locals)
interpreter.locals = __main__.__dict__
done = interpreter.runsource({text!r}, "<cell>", "exec")
"""
IN_ABSL = """
from absl import app
{text}
def run():
    exec(compile(TEXT, "cell", "exec"), globals())
def main(argv):
    run()
TEXT = {text!r}
app.run(main)
"""


def in_notebook(text):
    """Runs `text` as a cell of a real Jupyter kernel; returns what it printed."""
    from jupyter_client.manager import KernelManager  # noqa: PLC0415 - slow, and workers import this

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment())
    client = manager.client()
    client.start_channels()
    printed = []

    def note(message):
        content = message["content"]
        printed.append(content.get("text") or "\n".join(content.get("traceback", ())))

    try:
        client.wait_for_ready(60)
        client.execute_interactive(text, timeout=240, output_hook=note)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(printed)


def test_notebooks_need_no_guard():
    printed = in_notebook(MAIN)
    assert printed == "fine\n"


REGISTERED = """
import jax, numpy as np
import grainmill as grain
from worker_harness import opened

@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, *parts):
        self.parts = parts
    def tree_flatten(self):
        return self.parts, None
    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


ds = grain.MapDataset.range(100).map(lambda x: {"pair": Pair(np.full(2, x), x)})
expected = list(ds.to_iter_dataset().batch(8))
found = list(opened(ds, "read", batch_size=8))
assert len(found) == len(expected) == 13
for one, other in zip(found, expected):
    assert type(one["pair"]) is Pair
    for part, wanted in zip(one["pair"].parts, other["pair"].parts):
        np.testing.assert_array_equal(part, wanted)
# If the worker runs the whole pipeline, batching is impossible: it cannot know the container.
for iterator in (opened(ds.batch(8), "read"), opened(ds, "parts", batch_size=8)):
    try:
        next(iterator)
    except ValueError as failure:
        assert "class Pair" in str(failure) and "in a module" in str(failure)
    else:
        raise SystemExit("nothing was raised")
print("fine")
"""


def test_containers_that_the_main_script_registers_are_never_taken_for_leaves():
    pytest.importorskip("jax")
    done = run_script(REGISTERED)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("way", ["script", "c", "stdin", "interpreter", "absl"])
def test_programs_of_all_kinds_need_no_guard(way, tmp_path):
    if way == "script":
        done = run_script(MAIN, tmp_path)
    elif way == "c":
        done = run_script(MAIN)
    elif way == "stdin":
        done = run_script("import sys; exec(compile(sys.stdin.read(), '-', 'exec'))", input=MAIN)
    elif way == "absl":
        pytest.importorskip("absl")
        done = run_script(IN_ABSL.format(text=MAIN), tmp_path)
    else:
        done = run_script(IN_INTERPRETER.format(text=MAIN))
    assert "fine" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


IN_CHILD = """
import multiprocessing, sys
import numpy as np
import grainmill as grain
from worker_harness import opened

class Point:
    def __init__(self, x):
        self.x = x

def double(x):
    return {"x": 2 * x, "point": Point(x)}

def train(entrances):
    for entrance in entrances:
        elements = list(opened(grain.MapDataset.range(10).map(double), entrance))
        assert [element["x"] for element in elements] == list(range(0, 20, 2))
        assert all(type(element["point"]) is Point for element in elements)

if __name__ == "__main__":
    entrances = ("read", "parts")
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(entrances,))
    child.start()
    child.join()
    assert child.exitcode == 0
    print("fine")
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_functions_of_the_main_script_reach_workers_of_its_children(method, tmp_path):
    done = run_script(IN_CHILD, tmp_path, args=[method])
    assert done.stdout == "fine\n", done.stderr


def test_workers_read_the_files_that_were_found_when_the_source_was_made(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        with ArrayRecordWriter(str(tmp_path / name / "some.array_record")) as writer:
            writer.write(name.encode())
    monkeypatch.chdir(tmp_path / "here")
    source = grain.sources.ArrayRecordDataSource("some.array_record")
    assert source.paths == ["some.array_record"]
    monkeypatch.chdir(tmp_path / "there")
    for entrance in ENTRANCES:
        assert list(opened(grain.MapDataset.source(source).map(bytes), entrance)) == [b"here"]
    assert pickle.loads(pickle.dumps(source))[0] == b"here"


def test_what_workers_print_and_log_arrives(tmp_path):
    text = """
    import logging, os, sys
    import grainmill as grain
    from worker_harness import opened
    logging.basicConfig(level=logging.INFO)
    order = []
    def init(worker, count):
        order.append((worker, count))
    def speaks(x):
        assert order in ([(0, 2)], [(1, 2)]), order
        assert os.environ["LATE"] == "1" and sys.path[0] == "/late"
        print("printed", x)
        logging.getLogger("user").info("logged %d", x)
        return x
    os.environ["LATE"] = "1"
    sys.path.insert(0, "/late")
    for entrance in ("read", "parts"):
        iterator = opened(grain.MapDataset.range(3).map(speaks), entrance, worker_init_fn=init)
        assert list(iterator) == [0, 1, 2]
        iterator.close()
    """
    done = run_script(textwrap.dedent(text), tmp_path)
    assert done.returncode == 0, done.stderr
    for x in range(3):
        assert f"printed {x}" in done.stdout
        lines = [line for line in done.stderr.splitlines() if f"logged {x}" in line]
        assert len(lines) == 2
        assert all(line.startswith(("worker 0:", "worker 1:")) for line in lines)


@both
def test_dataset_that_can_not_be_pickled_is_named(entrance):
    lock = threading.Lock()

    def holds(x):
        return lock and x

    ds = grain.MapDataset.range(3).map(lambda x: x).map(holds).map(lambda x: x)
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        next(opened(ds, entrance))
    stage, value = caught.value.__notes__
    assert stage.startswith("Dataset: MapMapDataset(transform=")
    assert stage.endswith("cannot be pickled!")
    assert "holds" in stage
    assert value.startswith("variable `lock` of `")


@both
def test_worker_init_fn_that_raises_is_told(entrance):
    def init(_, count):
        raise LookupError(f"init {count}")

    iterator = opened(grain.MapDataset.range(3).map(lambda x: x), entrance, worker_init_fn=init)
    for _ in range(2):
        with pytest.raises(LookupError, match="init 2") as caught:
            next(iterator)
        assert "in worker" in caught.value.__notes__[0]
    iterator.close()


class ReopenedFile:
    """A source over an open file, which it opens again where it is unpickled."""

    def __init__(self, path):
        self._path = path
        self._file = open(path, "rb")  # noqa: PTH123, SIM115

    def __len__(self):
        return 26

    def __getitem__(self, index):
        return os.pread(self._file.fileno(), 1, index)

    def __getstate__(self):
        return self._path

    def __setstate__(self, path):
        self.__init__(path)

    def close(self):
        self._file.close()


@both
def test_sources_with_open_files_are_opened_again(entrance, tmp_path):
    path = tmp_path / "letters"
    path.write_bytes(bytes(range(97, 123)))
    source = ReopenedFile(path)
    iterator = opened(grain.MapDataset.source(source).map(lambda x: x.decode()), entrance)
    assert "".join(iterator) == "abcdefghijklmnopqrstuvwxyz"
    iterator.close()
    source.close()


def test_array_records_are_read_in_workers(tmp_path):
    writer_of = pytest.importorskip("array_record.python.array_record_module").ArrayRecordWriter
    path = str(tmp_path / "x.array_record")
    writer = writer_of(path, "group_size:1")
    for i in range(50):
        writer.write(b"%d" % i)
    writer.close()
    source = grain.sources.ArrayRecordDataSource(path)
    assert source[3] == b"3"  # it is open when it is pickled
    for entrance in ENTRANCES:
        iterator = opened(grain.MapDataset.source(source).map(int), entrance)
        assert list(iterator) == list(range(50))
        iterator.close()


def _exits_at_2():
    return grain.MapDataset.range(4).map(lambda x: os._exit(3) if x == 2 else x)


@both
def test_parent_that_ignores_or_blocks_signals_has_its_workers_all_the_same(entrance):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        iterator = opened(_exits_at_2(), entrance, 1)
        # A worker that prefetches the element that kills it may die before it has sent earlier
        # ones; the worker after it does not prefetch.
        elements = []
        for _ in range(3):
            with contextlib.suppress(grain.WorkerError):
                elements += all_of(iterator, 1)
            if len(elements) == 2:
                break
        assert elements == [0, 1]
        with pytest.raises(grain.WorkerError, match="exit code 3"):
            next(iterator)
        iterator.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_pool_inside_a_worker():
    def sums(x):
        inner = opened(grain.MapDataset.range(x + 1).map(lambda y: y), "read", 1)
        try:
            return sum(inner)
        finally:
            inner.close()

    iterator = opened(grain.MapDataset.range(3).map(sums), "read", 1)
    assert list(iterator) == [0, 1, 3]
    iterator.close()
