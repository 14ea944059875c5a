"""What running iterators show of themselves: a line, a table, and that while they run."""

import html.parser
import importlib.util
import io
import os
import re

import numpy as np
import pytest

import grainmill as grain
from grainmill import MapDataset
from grainmill._dataset.views import progress, running, watch

pytestmark = pytest.mark.better_than_grain("these are ours")


def double(n):
    return np.full(10, 2 * n)


class Doubled(grain.transforms.Map):
    def map(self, element):
        return 2 * element


def dataset():
    return MapDataset.range(200).map(double).batch(10).to_iter_dataset()


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.fixture
def _wide_terminal(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((200, 24)))
    monkeypatch.setenv("COLUMNS", "200")


def test_an_iterator_is_shown_as_one_line_with_its_position():
    iterator = iter(dataset().map(lambda x: x))
    name = re.escape(str(iterator))
    assert re.fullmatch(rf"<{name}: 0 elements>", repr(iterator))
    for count in (1, 2, 3):
        next(iterator)
        noun = "element" if count == 1 else "elements"
        expected = rf"<{name}: {count} {noun}, [\d,.]+/s, next index {count}>"
        assert re.fullmatch(expected, repr(iterator))
    iterator.set_state({"next_index": 17})
    next(iterator)
    assert "next index 18>" in repr(iterator)
    assert len(list(iterator)) == 2
    iterator.close()
    assert "\n" not in repr(iterator)


@pytest.mark.parametrize("count", range(4))
def test_showing_an_iterator_moves_it_nowhere(count):
    expected = list(dataset().map(lambda x: x + 1))
    iterator = iter(dataset().map(lambda x: x + 1))
    for _ in range(count):
        next(iterator)
    state = iterator.get_state()
    repr(iterator)
    iterator._repr_html_()
    assert iterator.get_state() == state
    np.testing.assert_equal(list(iterator), expected[count:])


def test_a_loaders_iterator_is_shown_like_another(monkeypatch):
    loader = grain.load(range(20), num_epochs=1, batch_size=4, transformations=[Doubled()])
    with iter(loader) as iterator:
        assert repr(iterator) == "<DataLoaderIterator over range: 0 elements>"
        next(iterator)
        expected = r"<DataLoaderIterator over range: 1 element, [\d,.]+/s, next index 4>"
        assert re.fullmatch(expected, repr(iterator))
        table = Table(iterator._repr_html_())
        assert table.text[1].startswith("<DataLoaderIterator over range: 1 element,")
        assert "transform=Doubled" in "".join(row[0] for row in table.rows)
        assert [row[3] for row in table.rows if row[0].startswith("Batch")] == ["1"]
    monkeypatch.setattr(watch, "_REFRESH_S", -1.0)
    shown = io.StringIO()
    watched = grain.watch(loader, file=shown)
    assert len(list(watched)) == 5
    assert watched.verdict().split()[-1] in shown.getvalue().splitlines()[-1]


class Table(html.parser.HTMLParser):
    """The texts of the cells of a table by rows, and all texts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.text, self.bars = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
        width = re.search(r"height:10px;width:([\d.]+)%", dict(attrs).get("style") or "")
        self.bars += [float(width[1])] if width else []

    def handle_data(self, data):
        self.text.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_notebooks_show_a_table_with_the_verdict_on_top():
    iterator = iter(dataset())
    elements = [next(iterator) for _ in range(15)]
    verdict, table = iterator.verdict(), Table(iterator._repr_html_())
    while verdict != iterator.verdict():  # it has percentages of the time that passes meanwhile
        verdict, table = iterator.verdict(), Table(iterator._repr_html_())
    assert len(elements) == 15
    assert table.text[0] == verdict
    assert "15 elements" in table.text[1]
    heads, *rows = table.rows
    assert heads == list(running.HEADS)
    names = ["RangeMapDataset", "MapMapDataset", "BatchMapDataset", "PrefetchIterDataset"]
    assert [re.sub(r"\W.*", "", row[0]) for row in rows] == names
    assert "transform=double" in rows[1][0]
    assert rows[-1][3] == "15"
    assert [row[5].split(",")[0] for row in rows] == ["Rust", "Python", "Rust", "Rust"]
    assert sum(table.bars) == pytest.approx(100, abs=0.3)


def test_iterators_without_a_plan_show_no_table():
    numbers = grain.experimental.ThreadPrefetchDatasetIterator(iter(range(3)), 2)
    assert numbers._repr_html_() is None
    assert "0 elements" in repr(numbers)
    shown = io.StringIO()
    assert list(grain.watch(numbers, file=shown)) == [0, 1, 2]
    assert "3 [" in shown.getvalue()


def test_watching_in_a_pipe_prints_a_line_at_the_end():
    shown = io.StringIO()
    watched = grain.watch(dataset(), file=shown)
    assert len(list(watched)) == 20
    (line,) = shown.getvalue().splitlines()
    assert "20/20" in line
    assert line.endswith(watched.verdict().split()[-1])


@pytest.mark.usefixtures("_wide_terminal")
def test_watching_in_a_terminal_refreshes_a_table(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(watch, "_REFRESH_S", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    with grain.watch(dataset(), file=shown) as watched:
        assert len(list(watched)) == 20
    text = shown.getvalue()
    assert text.count("runs in") >= 20
    assert "transform=double" in text


@pytest.mark.usefixtures("_wide_terminal")
def test_watching_without_rich_prints_lines(monkeypatch):
    monkeypatch.setattr(watch, "_REFRESH_S", -1.0)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else found(name)
    )
    shown = Terminal()
    assert len(list(grain.watch(dataset(), file=shown))) == 20
    assert len(shown.getvalue().splitlines()) == 21


def test_watching_in_a_notebook_updates_its_display(monkeypatch):
    pages = []

    class Display:
        def update(self, data, *, raw):
            assert raw
            pages.append(data["text/html"])

    monkeypatch.setattr(progress, "_notebook_display", Display)
    monkeypatch.setattr(watch, "_REFRESH_S", -1.0)
    list(grain.watch(dataset()))
    assert len(pages) == 21
    assert Table(pages[-1]).rows[-1][3] == "20"


def test_watched_elements_and_states_are_those_of_the_iterator():
    watched, expected = grain.watch(dataset(), file=io.StringIO()), iter(dataset())
    for _ in range(5):
        np.testing.assert_equal(next(watched), next(expected))
    assert watched.get_state() == expected.get_state()


def test_sources_show_short_paths(tmp_path):
    paths = [tmp_path / "folder" / f"{number}.jsonl" for number in range(3)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("{}\n")
    for given, shown in (
        (paths[:1], "JsonLinesDataSource(folder/0.jsonl)"),
        (paths[:2], "JsonLinesDataSource(folder/0.jsonl and 1 more file)"),
        (paths, "JsonLinesDataSource(folder/0.jsonl and 2 more files)"),
    ):
        source = grain.sources.JsonLinesDataSource(list(map(str, given)))
        ds = MapDataset.source(source)
        assert shown in str(ds.describe())
        assert shown in ds._repr_html_()
        assert "hash" not in str(ds.describe())
        assert repr(source).startswith("JsonLinesDataSource(hash_of_paths=")  # as states have it
