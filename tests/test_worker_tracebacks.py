"""Tracebacks of errors from workers: those that the same program has without workers."""

import pdb
import random
import traceback
from types import SimpleNamespace

import pytest
from under_test import IS_GRAIN, grain
from worker_harness import ENTRANCES, opened, run_script

if IS_GRAIN:
    pytest.skip("Grain's tracebacks differ", allow_module_level=True)

from grainmill._workers.frames import frames_of, traceback_of


def failing(depth):
    if depth:
        return [failing(depth - 1)]
    values = {"a": 1}
    return values["missing"] + 1


class Reader:
    def __init__(self, depth):
        self.depth = depth

    def __call__(self, x):
        if x < 5:
            return x
        try:
            return failing(self.depth)
        except KeyError as cause:
            raise RuntimeError("not readable") from cause


def raised(iterator):
    try:
        list(iterator)
    except BaseException as failure:
        return failure
    pytest.fail("nothing was raised")


def users_frames(failure):
    """What tracebacks show of the frames of this file, except those of the consumer."""
    shown = traceback.TracebackException.from_exception(failure)
    chain = [shown] if shown.__cause__ is None else [shown, shown.__cause__]
    return [
        (frame.filename, frame.name, frame.lineno, frame.colno, frame.end_colno, frame.line)
        for link in chain
        for frame in link.stack
        if frame.filename == __file__ and frame.name != "raised"
    ]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("depth", [0, 3])
def test_error_of_a_worker_has_the_frames_of_the_worker(entrance, depth):
    ds = grain.MapDataset.range(9).map(Reader(depth))
    expected = users_frames(raised(iter(ds.to_iter_dataset(grain.ReadOptions(num_threads=0)))))
    failure = raised(opened(ds, entrance))
    assert [name for _, name, *_ in expected].count("failing") == depth + 1
    assert users_frames(failure) == expected
    # Debuggers go from frame to frame of the traceback.
    stack, _ = pdb.Pdb().get_stack(None, failure.__cause__.__traceback__)
    assert [frame.f_code.co_name for frame, _ in stack] == ["__call__"] + ["failing"] * (depth + 1)
    assert stack[-1][0].f_code.co_qualname == "failing"
    assert "missing" not in stack[-1][0].f_locals


def test_functions_of_the_main_script_have_its_file(tmp_path):
    """Functions that workers cannot import are sent by value."""
    script = """
import traceback
import grainmill as grain

def fails(x):
    return {}[x]

options = grain.ReadOptions(num_workers=2)
for ds in (
    grain.MapDataset.range(3).map(fails),
    grain.MapDataset.range(3).map(lambda x: fails(x)),
):
    try:
        list(ds.to_iter_dataset(options))
    except KeyError as failure:
        for note in failure.__notes__:
            assert "<dynamic-code>" not in note, note
        traceback.print_exc(file=None)
        names = [frame.name for frame in traceback.extract_tb(failure.__traceback__)]
        print(names[-2:], traceback.extract_tb(failure.__traceback__)[-1].line)
"""
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['__next__', 'fails'] return {}[x]",
        "['<lambda>', 'fails'] return {}[x]",
    ]
    assert "<dynamic-code>" not in done.stderr


def made_traceback(rng):
    """The traceback of an exception in functions with names, files and lines that vary."""
    depth = rng.choice([1, 2, 7, 60, 150])
    lines = ["\n" * rng.choice([0, 3, 70_000])]
    lines += ["def f(n, *rest):", "    if n:", "        return f(n - 1, 'ü') + [0]", "    1 / 0"]
    code = compile("\n".join(lines), rng.choice(["<cell 3>", "/no/where.py", "ä ö.py"]), "exec")
    scope = {}
    exec(code, scope)
    try:
        scope["f"](depth)
    except ZeroDivisionError as failure:
        return failure.__traceback__
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_made_traceback_shows_what_the_original_does(seed):
    original = made_traceback(random.Random(seed))
    made = traceback_of(frames_of(original))
    before, after = map(traceback.extract_tb, (original, made))
    if len(before) > 100:
        before = traceback.StackSummary.from_list([*before[:50], *before[-50:]])
    assert "".join(after.format()) == "".join(before.format())
    assert [
        (frame.filename, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno)
        for frame in after
    ] == [
        (frame.filename, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno)
        for frame in before
    ]


def test_frames_without_columns_keep_their_line():
    code = compile("\n\n1 / 0", "x.py", "exec").replace(co_linetable=b"")
    frame = SimpleNamespace(f_code=code, f_globals={"__name__": "m"})
    place = SimpleNamespace(tb_frame=frame, tb_lasti=2, tb_lineno=3, tb_next=None)
    (shown,) = traceback.extract_tb(traceback_of(frames_of(place)))
    assert (shown.lineno, shown.colno, shown.name) == (3, None, "<module>")
