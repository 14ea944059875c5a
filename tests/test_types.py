"""Programs that type checkers accept, and whose declared types match their values at run time."""

import importlib
import itertools
import runpy
import subprocess
import sys
import types
import typing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import grainmill

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted((ROOT / "tests/typed").glob("*.py"))
RUN = [path for path in PROGRAMS if path.stem != "mistakes"]

CHECKERS = {
    "mypy": ["mypy", "--strict", "tests/typed"],
    "pyright": ["basedpyright", "--pythonpath", sys.executable, "--warnings"],
}


# mypy takes some seconds at first, until it has cached what it knows of the package and of NumPy.
@pytest.mark.parametrize("checker", CHECKERS)
def test_programs_have_the_types_they_claim(checker):
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", RUN, ids=lambda path: path.stem)
def test_claims_hold_when_programs_run(program, tmp_path, monkeypatch):
    claims = []

    def checked(value, claim):
        claims.append(claim)
        assert holds(value, claim), f"{value!r} is no {claim}"
        return value

    monkeypatch.setattr(typing, "assert_type", checked)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")
    assert claims


def holds(value, claim):
    """Whether `value`, with its contents, has the type `claim`."""
    if claim is typing.Any:
        return True
    if isinstance(claim, types.UnionType) or typing.get_origin(claim) is typing.Union:
        return any(holds(value, one) for one in typing.get_args(claim))
    if claim is None:
        return value is None
    kind, of = typing.get_origin(claim) or claim, typing.get_args(claim)
    if hasattr(kind, "__value__"):  # an alias, such as NumPy's of arrays from Python 3.12 on
        return holds(value, kind.__value__[of])
    if not isinstance(value, kind):
        return False
    return not of or all(holds(part, one) for part, one in parts(value, of))


def parts(value, of):
    """Items of `value`, or its first ones, each with its declared type."""
    match value:
        case np.ndarray():
            (scalar,) = typing.get_args(of[1])
            return [] if scalar is typing.Any else [(np.zeros(1, value.dtype)[0], scalar)]
        case dict():
            return [(key, of[0]) for key in value] + [(item, of[1]) for item in value.values()]
        case tuple() if of[-1] is not ...:
            return list(zip(value, of, strict=True))
        case tuple() | list():
            return [(item, of[0]) for item in value]
        case grainmill.MapDataset() | grainmill.IterDataset() | grainmill.DataLoader():
            start = list(itertools.islice(value, 3))
            assert start, f"{value} has no elements to look at"
            return [(item, of[0]) for item in start]
        case grainmill.DatasetIterator() | grainmill.DataLoaderIterator():
            state = value.get_state()
            first = next(value)
            value.set_state(state)
            return [(first, of[0])]
        case _:
            raise NotImplementedError(f"what {value!r} is made of")


@pytest.mark.parametrize(
    ("value", "claim", "true"),
    [
        ({"a": np.zeros(2, np.int32)}, dict[str, NDArray[np.int32]], True),
        ({"a": np.zeros(2, np.int64)}, dict[str, NDArray[np.int32]], False),
        ((1, "a"), tuple[int, int], False),
        ((1, 2), tuple[int, ...], True),
        (grainmill.MapDataset.range(3), grainmill.MapDataset[int], True),
        (grainmill.MapDataset.range(3), grainmill.MapDataset[str], False),
        (grainmill.MapDataset.range(3), grainmill.IterDataset[int], False),
        (iter(grainmill.MapDataset.range(3)), grainmill.DatasetIterator[str | None], False),
        (None, str | None, True),
    ],
)
def test_false_claims_are_told_from_true_ones(value, claim, true):
    assert holds(value, claim) == true


GENERIC = {
    "experimental": "FlatMapMapDataset ZipMapDataset PackAndBatchOperation",
    "python": "BatchOperation FilterOperation MapOperation RandomMapOperation Record",
    "sources": "RandomAccessDataSource",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in GENERIC for name in GENERIC[module].split()]
)
def test_classes_take_as_many_types_as_in_grain(module, name):
    theirs = getattr(importlib.import_module(f"grain.{module}"), name)
    ours = getattr(importlib.import_module(f"grainmill.{module}"), name)
    assert len(ours.__parameters__) == len(theirs.__parameters__) > 0
    assert typing.get_origin(ours[(int,) * len(ours.__parameters__)]) is ours
