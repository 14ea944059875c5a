"""The progress bar: in terminals of any width, in pipes, endless, and after a restore."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

import grainmill as grain
from grainmill._dataset.views import progress as module


class Terminal(io.StringIO):
    """A terminal, as far as the bar asks."""

    def isatty(self):
        return True

    def fileno(self):
        return 1


def bar(iterable, monkeypatch, columns=80, **options):
    """A bar in a terminal that shows every element, and what was written."""
    monkeypatch.setattr(module, "_INTERVAL_S", -1.0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    monkeypatch.setenv("TERM", options.pop("terminal", "dumb"))
    file = Terminal()
    return grain.progress(iterable, file=file, **options), file


def shown(file):
    """The texts that replaced each other in the terminal."""
    return [text.rstrip() for text in file.getvalue().split("\r") if text.strip()]


@pytest.mark.parametrize("columns", [1, 5, 10, 20, 40, 60, 79, 80, 200])
@pytest.mark.parametrize("total", [None, 5, 123_456_789])
def test_a_line_is_shorter_than_the_terminal_is_wide(columns, total, monkeypatch):
    elements, file = bar(range(5), monkeypatch, columns, total=total)
    assert list(elements) == [0, 1, 2, 3, 4]
    for text in file.getvalue().removesuffix("\n").split("\r"):
        assert len(text) < max(columns, 2)
    if columns >= 20 and total == 5:
        assert "5/5" in shown(file)[-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: grain.MapDataset.range(3).repeat(),
        lambda: grain.MapDataset.range(3).repeat().batch(2),
        lambda: grain.MapDataset.range(3).repeat()[1::7],
    ],
)
def test_what_is_endless_has_neither_total_nor_time_left(make, monkeypatch):
    elements, file = bar(make(), monkeypatch)
    for _ in range(4):
        next(elements)
    for text in shown(file):
        assert re.fullmatch(r"\d+ \[.*/s, .*waiting\]", text)
    assert "endlessly many elements" in str(make().describe())


def test_a_bar_goes_on_from_the_position_that_was_restored(monkeypatch):
    ds = grain.MapDataset.range(5)
    elements, file = bar(ds, monkeypatch)
    state = None
    for number in elements:
        if number == 1:
            state = elements.get_state()
    assert "5/5" in shown(file)[-1]
    elements.set_state(state)
    assert [next(elements), next(elements)] == [2, 3]
    assert "4/5" in shown(file)[-1]
    assert list(elements) == [4]
    assert "5/5" in shown(file)[-1]
    assert not any(re.search(r"[6-9]/5|1\d/5", text) for text in shown(file))
    grain.experimental.set_next_index(elements, 4)
    assert list(elements) == [4]
    assert "5/5" in shown(file)[-1]


def test_a_position_that_is_unknown_has_no_total(monkeypatch):
    ds = grain.MapDataset.range(6).filter(lambda x: x % 2).to_iter_dataset().filter(lambda x: x)
    elements, file = bar(ds, monkeypatch, total=3)
    state = elements.get_state()
    assert list(elements) == [1, 3, 5]
    elements.set_state(state)
    assert list(elements) == [1, 3, 5]
    assert shown(file)[-1].startswith("3 [")
    plain, _ = bar(iter([1]), monkeypatch)
    assert not hasattr(plain, "set_state")


def test_a_pipe_gets_lines(monkeypatch):
    file = io.StringIO()
    assert sum(grain.progress(grain.MapDataset.range(1_000), file=file)) == 499_500
    assert "\r" not in file.getvalue()
    (line,) = file.getvalue().splitlines()
    assert "1000/1000" in line
    monkeypatch.setattr(module, "_LINE_INTERVAL_S", -1.0)
    file = io.StringIO()
    list(grain.progress(range(3), file=file))
    assert len(file.getvalue().splitlines()) == 4
    assert file.getvalue().endswith("\n")


def test_a_terminal_gets_one_line():
    ours, theirs = pty.openpty()
    program = "import grainmill as grain; list(grain.progress(range(1000)))"
    done = subprocess.run([sys.executable, "-c", program], stderr=theirs, timeout=60, check=False)
    os.close(theirs)
    written = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert written.startswith("\r")
    assert "1000/1000" in written
    assert written.count("\n") == 1


def test_options_of_a_plan_are_its_own():
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    ds = grain.MapDataset.range(3).map(lambda x: x).to_iter_dataset(options)
    options.num_threads = 7
    assert "num_threads=2" in repr(ds)
    assert list(ds) == [0, 1, 2]


COLOURED = re.compile(r"\x1b\[3[123]m(#+)\x1b\[0m")


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_bar_has_colours_unless_they_are_not_wanted(no_colour, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_colour)
    elements, file = bar(range(8), monkeypatch, terminal="xterm")
    list(elements)
    assert bool(COLOURED.search(file.getvalue())) != bool(no_colour)
    assert ("\x1b" in file.getvalue()) != bool(no_colour)
    monkeypatch.setenv("NO_COLOR", "")
    elements, file = bar(range(8), monkeypatch)
    list(elements)
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize("columns", [None, 5, 20, 40, 80])
@pytest.mark.parametrize("count", [0, 1, 5, 9])
@pytest.mark.parametrize(("wait_s", "code"), [(0.0, 32), (0.3, 33), (1.0, 31)])
def test_colours_change_nothing_else(columns, count, wait_s, code):
    text = module.progress_text(count, 9, 1.0, wait_s, columns)
    shown = module.coloured(text, wait_s)
    assert re.sub(r"\x1b\[\d+m", "", shown) == text
    assert (f"\x1b[{code}m" in shown) == ("#" in text)


def test_no_colours_are_written_to_a_file(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = io.StringIO()
    list(grain.progress(range(8), file=file))
    assert "8/8" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_total_of_an_iterable_dataset_is_that_of_its_plan():
    ds = grain.MapDataset.range(102).batch(3).to_iter_dataset()
    totals = {
        34: ds,
        17: ds.batch(2),
        None: ds.filter(len),
    }
    for total, dataset in totals.items():
        assert module.total_of(dataset) == total
        if total is not None:
            assert len(list(dataset)) == total
    assert module.total_of(grain.MapDataset.range(5).repeat().to_iter_dataset()) is None
    assert module.total_of(iter(range(3))) is None
