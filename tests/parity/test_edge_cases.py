"""Unusual arguments of every public stage: results and errors equal Grain's, or are documented.

`docs/differences.md` names every difference; a rule here says which of them explains what, and a
rule that explains nothing any more fails.
"""

import collections
import functools
import logging
import re
from pathlib import Path

import grain as real
import numpy as np
import pytest
from absl import flags
from edge_cases import BEYOND_64_BITS, CASES, LARGE, outcome
from under_test import IS_GRAIN, grain

DOCUMENT = Path(__file__).parents[2] / "docs/differences.md"
pytestmark = [
    pytest.mark.skipif(IS_GRAIN, reason="compares the two"),
    # Grain's iterators raise in `__del__` where their construction failed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_flags():
    """Grain fails without them; with those that another test has parsed it starts ten workers."""
    were_parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.unparse_flags()
    yield
    if were_parsed:
        flags.FLAGS.mark_as_parsed()


def documented():
    """The names of the differences in the document."""
    names = re.findall(r"^\| `([\w-]+)` \|", DOCUMENT.read_text("utf-8"), flags=re.MULTILINE)
    assert len(names) == len(set(names))
    return set(names)


def _unwrapped(result):
    """An encoded result with NumPy integers, and texts of them and of booleans, as integers."""
    text = re.sub(r"np\.int64\((\d+)\)", r"\1", str(result)).replace("True", "1")
    return re.sub(r"\{'nd': \['int64', \[\], \[(\d+)\]\]\}", r"\1", text)


def _fails(result, *types):
    return result[0] != "ok" and isinstance(result[1], types or Exception)


# Values that Grain takes, although they mean nothing, and that are refused here.
_MEANINGLESS = {
    "WindowShuffleIterDataset(window_size)": {0, -1},  # ends at once
    "FirstFit(pack_alignment_struct of a feature)": {-1},  # moves sequences over one another
    "BestFit(pack_alignment_struct of a feature)": {-1},
    "seed(seed).shuffle(3)": {-1},
}


def _checked_type(case, value, theirs, ours):
    if not _fails(ours, TypeError):
        return False
    taken = isinstance(value, bool | float | str) or (
        value in {None, 0}
        and any(word in case for word in ("datasets", "[., v]", "options", "selection_map"))
    )
    return _fails(theirs) or taken


def _checked_value(case, value, theirs, ours):
    if not _fails(ours, ValueError):
        return False
    # Grain takes one number where there is one feature, and fails where there are two.
    taken = "pack_alignment_struct)" in case or value in _MEANINGLESS.get(case, ())
    return _fails(theirs) or taken


# Whether a difference is of the kind that the document describes under this name.
RULES = {
    "index-shuffle": lambda case, value, *_: case == "index_shuffle(max_index)" and value == LARGE,
    "packed-padding": lambda case, value, _, ours: (
        "padding_struct" in case and value == 1.5 and _fails(ours, ValueError)
    ),
    "window-shuffle": lambda case, value, *_: (
        case == "WindowShuffleMapDataset(window_size)" and value in {100, LARGE}
    ),
    "numpy-integers": lambda _, value, *both: (
        isinstance(value, np.integer | bool) and _unwrapped(both[0]) == _unwrapped(both[1])
    ),
    "numpy-seeds": lambda _, value, *both: (
        isinstance(value, np.integer) and _fails(both[0]) and not _fails(both[1])
    ),
    "64-bit-positions": lambda _, value, *both: (
        value == BEYOND_64_BITS and not _fails(both[1], TypeError, ValueError)
    ),
    "range-source": lambda case, value, *both: (
        case.startswith("RangeDataSource(") and value == -1 and _fails(both[0], AssertionError)
    ),
    "loader-source-too-short": lambda case, value, *both: (
        case == "DataLoader(data_source)" and value == "x" and _fails(both[1], IndexError)
    ),
    "source-without-length": lambda case, _, *both: (
        case == "source(source)" and _fails(both[0], TypeError)
    ),
    "checked-types": _checked_type,
    "checked-values": _checked_value,
}


def _agree(theirs, ours):
    if "ok" in {theirs[0], ours[0]}:
        return theirs == ours
    return isinstance(ours[1], type(theirs[1]))


@functools.cache
def differences(case):
    """(value, name of the rule or `None`, Grain's outcome, ours) of each value that differs."""
    values, make = CASES[case]
    found = []
    for value in values:
        theirs, ours = outcome(real, make, value), outcome(grain, make, value)
        if not _agree(theirs, ours):
            rules = [name for name, rule in RULES.items() if rule(case, value, theirs, ours)]
            found.append((value, rules[0] if rules else None, theirs, ours))
    return found


@pytest.mark.parametrize("case", CASES)
def test_unusual_arguments_do_what_they_do_in_grain(case):
    unexplained = [
        f"{case} with {value!r}: Grain {theirs}, ours {ours}"
        for value, rule, theirs, ours in differences(case)
        if rule is None
    ]
    assert not unexplained, "\n".join(unexplained)


def test_every_rule_is_documented_and_still_explains_something():
    used = collections.Counter(rule for case in CASES for _, rule, *_ in differences(case))
    assert set(RULES) <= documented()
    assert set(used) - {None} == set(RULES)
